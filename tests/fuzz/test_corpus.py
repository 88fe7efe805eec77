"""Inputs that once went wrong, or nearly: read as an independent reader reads them, or refused in one line,
and at once."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from fuzz import inputs, stress

FILES = sorted((Path(inputs.__file__).parent / "corpus").iterdir())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_of_the_corpus(path: Path) -> None:
    began = time.process_time()
    inputs.answers(str(path), next(f for f in inputs.SEEDS if path.name.startswith(f"{f}-")))
    assert time.process_time() - began < 10


@pytest.mark.parametrize("format", inputs.SEEDS)
def test_some_of_the_campaign(format: str, tmp_path: Path) -> None:
    path, seen = tmp_path / "file", set()
    for n, content in enumerate(inputs.SEEDS[format]):
        path.write_bytes(content)
        assert inputs.answers(str(path), format) == "answered", n
    for k in range(20 if format in inputs.documents.NAMES else 60):
        content = inputs.mutated(format, random.Random(k))
        path.write_bytes(content)
        try:
            seen.add(inputs.answers(str(path), format).partition(":")[0])
        except Exception as error:
            raise AssertionError(content[:300]) from error
    assert seen == {"answered", "refused"}


def test_a_misreading_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is one: what is read otherwise does not pass."""
    (tmp_path / "file").write_bytes(inputs.SEEDS["columns"][0])
    monkeypatch.setitem(inputs.ORACLES, "columns", lambda content: [])
    with pytest.raises(AssertionError, match=r"^read "):
        inputs.answers(str(tmp_path / "file"), "columns")


def test_some_stressed_fits() -> None:
    tally = stress.fits(2, seed=0)
    assert not tally.failures
    assert tally.outcomes["answered"]
