"""The commands of a labelling loop: several annotators, the next sequences, a fit that goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.generate import generate
from click.testing import CliRunner

import structgp
from structgp import select
from structgp.cli import main

TEMPLATE = "U00:%x[0,0]\nU01:%x[0,1]\nB\n"
ONCE = ("--data-weight", "1")


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def ok(*arguments: Any) -> Any:
    result = run(*arguments)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return result


def columns(X: Any, *labels: Any) -> str:
    """Sequences as a column file, with any number of label columns."""
    lines = []
    for x, *y in zip(X, *labels, strict=True):
        lines += [" ".join([*token, *more]) for token, *more in zip(x, *y, strict=True)] + [""]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def data() -> Any:
    return generate(40, n_labels=3, n_values=5, n_templates=2, mean_length=5, strength=2.5, seed=0)


@pytest.fixture
def folder(tmp_path: Path, data: Any) -> Path:
    (tmp_path / "template").write_text(TEMPLATE)
    (tmp_path / "few").write_text(columns(data.X[:10], data.y[:10]))
    (tmp_path / "more").write_text(columns(data.X[:16], data.y[:16]))
    (tmp_path / "pool").write_text(columns(data.X[8:]))
    return tmp_path


def noisy(y: Any, share: float, seed: int) -> list[list[str]]:
    rng, classes = np.random.default_rng(seed), sorted({v for labels in y for v in labels})
    return [[str(rng.choice(classes)) if rng.random() < share else v for v in labels] for labels in y]


# -- several annotators --------------------------------------------------------------------------------


def test_label_columns_of_annotators(folder: Path, data: Any) -> None:
    good, poor = noisy(data.y, 0.05, 1), noisy(data.y, 0.7, 2)
    poor[:4] = [["-"] * len(y) for y in poor[:4]]  # what they have not seen
    (folder / "crowd").write_text(columns(data.X, good, poor))
    model = folder / "m.sgp"
    options = "--annotators", "good,poor", "--missing", "-", *ONCE
    said = ok("train", folder / "template", folder / "crowd", *options, "-o", model)
    found = structgp.load(model)
    assert found.annotators_["good"].mean > found.annotators_["poor"].mean + 0.2
    assert "annotator" in said.stderr
    assert found.annotators_.n_given.tolist()[0] > found.annotators_.n_given.tolist()[1]
    assert "annotators\n  annotator" in ok("describe", model).stdout
    tagged = ok("tag", "-m", model, folder / "pool").stdout
    assert len(tagged.splitlines()) == sum(len(x) + 1 for x in data.X[8:])


def test_json_lines_of_annotators(folder: Path, data: Any) -> None:
    good, poor = noisy(data.y, 0.05, 1), noisy(data.y, 0.7, 2)
    lines = []
    for x, a, b in zip(data.X, good, poor, strict=True):
        tokens = [{"a": t[0], "b": t[1]} for t in x]
        lines.append(json.dumps({"tokens": tokens, "annotations": {"good": a, "poor": b}}))
    (folder / "crowd").write_text("\n".join(lines))
    model, train = folder / "m.sgp", ("train", "--format", "jsonl", folder / "crowd", *ONCE)
    ok(*train, "--annotators", "all", "-o", model)
    found = structgp.load(model).annotators_
    assert found.names == ["good", "poor"]
    assert found["good"].mean > found["poor"].mean
    message = run(*train, "--annotators", "good,eve", "-o", model)
    assert message.exit_code == 2
    assert "no line has annotations of eve" in message.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--annotators", "a,a"), "--annotators: must be different names"),
        (("--annotators", "a,b,c"), "few:1: 3 columns, but tokens and the labels of 3 annotators"),
        (("--annotators", "a", "--shards", "here"), "--annotators: shards hold one labelling"),
        (("--from", "nowhere"), "nowhere: no such file"),
    ],
)
def test_options_that_cannot_be(folder: Path, options: tuple[str, ...], message: str) -> None:
    found = run("train", folder / "template", folder / "few", "-o", folder / "m.sgp", *options)
    assert found.exit_code == 2
    assert message in found.stderr


# -- the next sequences --------------------------------------------------------------------------------


def test_before_there_is_a_model(folder: Path, data: Any) -> None:
    found = ok("next", "-n", "3", folder / "pool")
    blocks = found.stdout.strip().split("\n\n")
    assert len(blocks) == 3
    assert all(line.endswith("?") for block in blocks for line in block.splitlines())
    places = [int(line.rsplit(":", 1)[1]) for line in found.stderr.splitlines()]
    starts = np.cumsum([1, *(len(x) + 1 for x in data.X[8:])]).tolist()
    chosen = [starts.index(place) for place in places]
    assert chosen == select(None, [[list(t) for t in x] for x in data.X[8:]], 3, "diverse")
    other = ok("next", "-n", "3", "--strategy", "random", "--seed", "7", folder / "pool")
    assert other.stdout != found.stdout
    wrong = run("next", "--strategy", "bald", folder / "pool")
    assert wrong.exit_code == 2
    assert "--strategy: 'bald' needs a model" in wrong.stderr


def test_what_is_labelled_is_left_out(folder: Path, data: Any) -> None:
    model = folder / "m.sgp"
    ok("train", folder / "template", folder / "few", *ONCE, "-o", model)
    found = ok("next", "-m", model, "-n", "40", folder / "pool", "--exclude", folder / "few")
    same = sum(x in data.X[:10] for x in data.X[8:])
    assert f"{same} of 32 sequences excluded" in found.stderr
    assert len(found.stdout.strip().split("\n\n")) == 32 - same
    cold = ok("next", "-n", "40", folder / "pool", "--exclude", folder / "few")
    assert f"{same} of 32" not in cold.stderr or "excluded" in cold.stderr
    nothing = run("next", "-m", model, folder / "few", "--exclude", folder / "few")
    assert nothing.exit_code == 2
    assert "--exclude: no sequence of POOL is left" in nothing.stderr


def test_probabilities_of_the_next_sequences(folder: Path) -> None:
    model = folder / "m.sgp"
    ok("train", folder / "template", folder / "few", *ONCE, "-o", model)
    plain = ok("next", "-m", model, "-n", "2", folder / "pool").stdout
    told = ok("next", "-m", model, "-n", "2", "-v", "1", folder / "pool").stdout
    assert told.startswith("# 0.")
    shown = [line for line in told.splitlines() if line and not line.startswith("#")]
    labels = [line.split("\t")[-1].split("/")[0] for line in shown]
    assert labels == [line.split("\t")[-1] for line in plain.splitlines() if line]


def test_diverse_sequences_are_not_alike() -> None:
    pool = [[["a", "x"]] * 3, [["a", "x"]] * 3, [["b", "y"]] * 2, [["c", "y"]], []]
    assert select(None, pool, 3, "diverse") == [0, 2, 3]
    assert select(None, pool, 9, "diverse") == [0, 2, 3, 1]
    assert select(None, pool, 3, "diverse", cost="token") == [0, 3, 2]
    assert sorted(select(None, pool, 9, "random")) == [0, 1, 2, 3]
    with pytest.raises(structgp.InputError, match="strategy: 'batch' needs a model"):
        select(None, pool, 1)
    with pytest.raises(structgp.InputError, match=r"pool\[0\]: tokens are given as ndarray"):
        select(None, [np.zeros((2, 3))], 1, "diverse")


# -- a fit that goes on --------------------------------------------------------------------------------


def test_train_from_a_model(folder: Path, data: Any) -> None:
    first, second = folder / "first.sgp", folder / "second.sgp"
    ok("train", folder / "template", folder / "few", "--data-weight", "3", "-o", first)
    ok("train", folder / "template", folder / "more", "--from", first, "-o", second)
    model = structgp.load(second)
    assert model.model_.info["n_sequences"] == 16
    weight = model.training_log_["plan"]["data_weight"]
    assert weight == {"value": 3.0, "reason": "as in the earlier fit"}
    assert model.warm_start is False
    (folder / "other").write_text("U00:%x[0,0]\nB\n")
    wrong = run("train", folder / "other", folder / "more", "--from", first, "-o", second)
    assert wrong.exit_code == 2
    assert "was trained with another template" in wrong.stderr
