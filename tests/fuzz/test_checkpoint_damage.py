"""Fits that go on from damaged checkpoints: to the end, or not at all and with one line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from fuzz.container import Container

from fuzz import checkpoints, damage


@pytest.fixture(scope="module", params=["second order", "adam"])
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    return request.param, checkpoints.write(request.param, tmp_path_factory.mktemp("kept") / "checkpoint")


def test_what_is_not_damaged_goes_on(kept: tuple[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(kept[1])
    assert checkpoints.answers(str(tmp_path / "checkpoint"), kept[0]) == "answered"


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree["reached"]["dataclass"].__setitem__(2, {}),
        lambda tree: tree["reached"]["dataclass"][2].update(steps={"list": [3]}),
        lambda tree: tree["reached"]["dataclass"][2].update(elapsed="long"),
        lambda tree: tree["reached"]["dataclass"][2].update(state=None),
        lambda tree: tree["reached"].update({"dataclass": ["structgp.__main__", "main", {}]}),
        lambda tree: tree.update(posterior={"dict": []}),
        lambda tree: tree.update(generator={"tensor": "none"}),
        lambda tree: tree.update(posterior={"call": ["os.system"]}),
        lambda tree: tree.update(format="4"),
    ],
)
def test_a_signed_checkpoint_that_does_not_fit(
    change: Any, kept: tuple[str, bytes], tmp_path: Path
) -> None:
    found = Container.read(kept[1])
    tree = json.loads(found.metadata["checkpoint"])
    change(tree)
    found.metadata["checkpoint"] = json.dumps(tree)
    found.sign("checkpoint")
    path = tmp_path / "checkpoint"
    path.write_bytes(found.write())
    says = checkpoints.answers(str(path), kept[0])
    assert says.startswith(f"refused: {path}: a fit cannot go on from it (")
    assert says.endswith("remove it")


@pytest.mark.parametrize("signed", [True, False])
def test_random_damage(signed: bool, kept: tuple[str, bytes], tmp_path: Path) -> None:
    name, content = kept
    for i in range(12):
        changed, what = damage.container(content, "checkpoint", signed, random.Random(i))
        (tmp_path / "checkpoint").write_bytes(changed)
        try:
            checkpoints.answers(str(tmp_path / "checkpoint"), name)
        except Exception as error:
            raise AssertionError(what) from error
