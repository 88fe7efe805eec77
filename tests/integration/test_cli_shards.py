"""``structgp train --shards``: files that are read as a stream; ``structgp tag`` in flat memory."""

from __future__ import annotations

import functools
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.generate import generate_stream
from click.testing import CliRunner

import structgp
import structgp.cli.progress as cli_progress
import structgp.plan.run
from structgp.cli import main
from structgp.data import shards
from structgp.data.sources.columns import write_columns
from structgp.inference.checkpoint import Checkpoint

TEMPLATE = "U00:%x[0,0]\nU01:%x[-1,0]/%x[0,1]\nB\n"


def some(n: int) -> Any:
    stream = generate_stream(n, n_labels=3, n_values=8, n_templates=2, mean_length=5, seed=0)
    return ([(*x, label) for x, label in zip(tokens, y, strict=True)] for tokens, y in stream)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "template").write_text(TEMPLATE)
    write_columns(tmp_path / "train", some(30))
    return tmp_path


def run(folder: Path, *arguments: str) -> Any:
    places = [str(folder / a[1:]) if a.startswith("@") else a for a in arguments]
    return CliRunner().invoke(main, places)


def ok(folder: Path, *arguments: str) -> Any:
    result = run(folder, *arguments)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return result


def refused(folder: Path, *arguments: str) -> str:
    result = run(folder, *arguments)
    assert result.exit_code == 2, result.exception
    return result.stderr.splitlines()[-1]


TRAIN = ("train", "@template", "@train", "-o", "@model")


def test_the_model_is_that_of_minibatches_in_memory(files: Path) -> None:
    said = ok(files, *TRAIN, "--shards", "@shards").stderr
    assert "encoding" in said
    assert "30 sequences" in said
    assert "the data is on disk" in said
    ok(files, "train", "@template", "@train", "-o", "@other", "--inference", "minibatch")
    one, other = structgp.load(files / "model"), structgp.load(files / "other")
    for name, value in one.model_.posterior.state_dict().items():
        assert torch.equal(value, other.model_.posterior.state_dict()[name]), name
    tagged = [ok(files, "tag", "-m", m, "@train", "-v1").stdout for m in ("@model", "@other")]
    assert tagged[0] == tagged[1]
    left = {"template", "train", "shards", "model", "other"}
    assert {p.name for p in files.iterdir()} == left


def test_shards_that_are_there_are_used_again(files: Path) -> None:
    ok(files, *TRAIN, "--shards", "@shards")
    before = {p.name: p.stat().st_mtime_ns for p in (files / "shards").iterdir()}
    assert "already written" in ok(files, *TRAIN, "--shards", "@shards", "--seed", "1").stderr
    assert {p.name: p.stat().st_mtime_ns for p in (files / "shards").iterdir()} == before
    write_columns(files / "train", some(31))
    said = refused(files, *TRAIN, "--shards", "@shards")
    assert "holds shards of other data" in said
    assert "name another folder, or remove this one" in said


def test_attributes_and_labels_that_are_missing(files: Path) -> None:
    lines = ["A\tw=a\tn:2", "B\tw=b", "?\tw=c", "", "B\tw=b\tw=d", "A\tw=a", ""] * 4
    (files / "train").write_text("\n".join(lines))
    command = ("train", "--format", "crfsuite", "@train", "-o", "@model", "--missing", "?")
    ok(files, *command, "--shards", "@shards")
    found = shards.read(files / "shards")
    assert (found.classes, found.n_sequences, found.n_tokens) == (["A", "B"], 8, 20)
    assert found.about["some_missing"]
    assert found.about["label_counts"] == [8, 8]


def test_what_does_not_go_with_shards(files: Path) -> None:
    command = (*TRAIN, "--shards", "@shards")
    assert "leave out --shards" in refused(files, *command, "--numeric", "1")
    said = refused(files, *command, "--inference", "second-order")
    assert "'second-order' needs all data in memory" in said
    (files / "train").write_text("a A\nb A\n")
    (files / "template").write_text("U:%x[0,0]\n")
    assert "train: every token has the same label" in refused(files, *TRAIN, "--shards", "@other")
    (files / "train").write_text("a\nb\n")
    assert "train:1: only one column, where tokens" in refused(files, *TRAIN, "--shards", "@other")
    (files / "train").write_text("\n\n")
    assert "train: no tokens" in refused(files, *TRAIN, "--shards", "@other")
    (files / "train").write_text("a A\nb B c\n")
    assert "train:2: 3 columns where line 1 has 2" in refused(files, *TRAIN, "--shards", "@other")
    (files / "template").write_text("U:%x[0,1]\n")
    (files / "train").write_text("a A\nb B\n")
    assert "only column 0 exists" in refused(files, *TRAIN, "--shards", "@other")


class CutOffError(Exception):
    """Instead of a power cut."""


class CutOff(cli_progress.tqdm):  # type: ignore[type-arg]
    """A progress bar that does not get far."""

    def update(self, n: float | None = 1) -> None:
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen == 5:
            raise CutOffError


def test_a_run_that_was_cut_off_goes_on_without_encoding_again(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = functools.partial(Checkpoint, seconds=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(structgp.plan.run, "Checkpoint", often)
        patch.setattr(cli_progress, "tqdm", CutOff)
        cut = run(files, *TRAIN, "--shards", "@shards")
    assert isinstance(cut.exception, CutOffError)
    assert (files / "model.checkpoint.sites").is_dir()
    said = ok(files, *TRAIN, "--shards", "@shards").stderr
    assert "already written" in said
    assert "step 1:" not in said
    assert "step 5:" in said
    assert not list(files.glob("*.checkpoint*"))
    ok(files, "train", "@template", "@train", "-o", "@other", "--shards", "@shards")
    one, other = (structgp.load(files / m).model_.posterior.node.m for m in ("model", "other"))
    assert torch.equal(one, other)


def test_tagging_takes_no_more_memory_for_more_sequences(files: Path) -> None:
    """The same 400 sequences four times: held whole, the rest would be 3 MB and what is made of them."""
    ok(files, *TRAIN, "--inference", "minibatch")
    write_columns(files / "few", some(400))
    (files / "many").write_text(4 * (files / "few").read_text())
    peaks = []
    for name in ("few", "few", "many"):  # the first time, imports and tables are in it
        tracemalloc.start()
        ok(files, "tag", "-m", "@model", f"@{name}", "-o", "@tagged")
        peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
        tracemalloc.stop()
    assert peaks[2] - peaks[1] < 1
    assert (files / "tagged").read_text().count("\n\n") == 1_600
