"""Shards: what is written is what is read, and what was not written to the end is not read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from benchmarks.generate import generate, generate_stream
from hypothesis import given, settings
from hypothesis import strategies as st

from structgp.data import shards
from structgp.data.encode import FeatureEncoder
from structgp.data.examples import Examples, read_examples
from structgp.errors import InputError, StructgpWarning
from structgp.inference.loop import make_batches

WORDS = st.sampled_from("abcdefg")
TOKENS = {
    "strings": st.tuples(WORDS, WORDS),
    "bags": st.lists(WORDS, max_size=4),
    "dicts": st.fixed_dictionaries({"w": WORDS}, optional={"n": st.floats(-2, 2), "p": WORDS}),
    "attributes": st.dictionaries(WORDS, st.floats(0.5, 2), max_size=3),
}
LABELS = st.sampled_from(["A", "B", "C", None])


def pairs_of(kind: str) -> st.SearchStrategy[list[tuple[Any, Any]]]:
    one = st.lists(st.tuples(TOKENS[kind], LABELS), max_size=5)
    return st.lists(one.map(lambda s: ([x for x, _ in s], [y for _, y in s])), max_size=12)


FIRST: dict[str, Any] = {
    "strings": [("a", "b"), ("c", "d")],
    "bags": [["a"], ["b", "c"]],
    "dicts": [{"w": "a", "n": 1.5}, {"w": "b"}],
    "attributes": [{"a": 1.0}, {"b": 2.0, "c": 0.5}],
}


def same_batches(found: shards.ShardBatches, examples: Examples, batch_tokens: int) -> None:
    expected = make_batches(examples.rows, examples.y, examples.encoder.pad_row, batch_tokens)
    assert len(found) == len(expected)
    assert found.counts == [len(batch) for batch in expected]
    for one, other in zip(found, expected, strict=True):
        for name in ("x", "y", "mask", "index"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("kind", TOKENS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_one_shard_has_the_batches_of_data_in_memory(
    kind: str, data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pairs = [(FIRST[kind], ["A", "B"]), *data.draw(pairs_of(kind))]
    if any(y and not any(y) for _, y in pairs):
        pairs = [(x, y) for x, y in pairs if not y or any(y)]
    folder = tmp_path_factory.mktemp("shards")
    found = shards.write(pairs, folder, overwrite=True)
    examples = read_examples([x for x, _ in pairs], [y for _, y in pairs])
    assert found.encoder == examples.encoder
    assert found.classes == examples.labels.classes
    assert (found.n_sequences, found.n_tokens) == (examples.n_sequences, examples.n_tokens)
    told = shards.read_sharded(found, None)
    assert told.label_counts.tolist() == examples.label_counts.tolist()
    assert told.some_missing == examples.some_missing
    assert told.typical_length == pytest.approx(examples.typical_length)
    same_batches(shards.ShardBatches(found, 7), examples, 7)


def make(n: int = 40) -> Any:
    return lambda: generate_stream(
        n, n_labels=3, mean_length=5, n_templates=2, n_values=6, strength=2.0, seed=3
    )


def test_several_shards_have_each_sequence_once_and_little_padding(tmp_path: Path) -> None:
    found = shards.write(make(), tmp_path / "s", shard_tokens=60)
    assert found.n_shards > 2
    encoder = found.encoder
    given = list(make()())
    batches, padded = shards.ShardBatches(found, 30), 0
    seen = []
    for batch in batches:
        padded += batch.mask.numel()
        for b, n in enumerate(batch.index.tolist()):
            length = int(batch.mask[b].sum())
            x, y = given[n]
            np.testing.assert_array_equal(batch.x[b, :length], encoder.encode(x))
            assert [found.classes[v] for v in batch.y[b, :length].tolist()] == y
            seen.append(n)
    assert sorted(seen) == list(range(40))
    assert padded < 1.6 * found.n_tokens
    assert [n for n, _ in found.labels()] != sorted(seen), "sorted by length within a shard"
    values = {n: y.tolist() for n, y in found.labels()}
    assert [[found.classes[v] for v in values[n]] for n in range(40)] == [y for _, y in given]


def test_sparse_matrices(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X = [scipy.sparse.random(n, 30, 0.1, "csr", random_state=rng, dtype=np.float64) for n in (3, 0, 5)]
    y = [["A", "B", "A"], [], ["B"] * 5]
    found = shards.write(list(zip(X, y, strict=True)), tmp_path / "s")
    same_batches(shards.ShardBatches(found, 100), read_examples(X, y), 100)


def test_counts_of_values(tmp_path: Path) -> None:
    found = shards.write(make(), tmp_path / "s", shard_tokens=60)
    rows = np.concatenate(found.encoder.transform([x for x, _ in make()()])).astype(int)
    for j, counts in enumerate(found.value_counts):
        assert counts.tolist() == np.bincount(rows[:, j]).tolist()


def test_batches_are_a_sequence(tmp_path: Path) -> None:
    batches = shards.ShardBatches(shards.write(make(), tmp_path / "s"), 20)
    assert torch.equal(batches[-1].x, batches[len(batches) - 1].x)
    assert [len(batch) for batch in batches[1:3]] == batches.counts[1:3]
    with pytest.raises(IndexError):
        batches[len(batches)]


def test_an_encoder_learned_from_a_stream_is_the_same() -> None:
    data = generate(20, n_values=5, seed=1)

    class Stream:
        def __iter__(self) -> Iterator[Any]:
            return iter(data.X)

    assert FeatureEncoder().fit(Stream()) == FeatureEncoder().fit(data.X)


# -- what is not whole -------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from structgp.data import shards
from benchmarks.generate import generate_stream
times = 0
def sequences():
    global times
    times += 1
    for n, pair in enumerate(generate_stream(40, n_values=5, seed=1)):
        if times == 3 and n == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        yield pair
shards.write(sequences, sys.argv[1], shard_tokens=50)
"""


def test_a_killed_run_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert list(folder.glob("shard-*"))
    with pytest.raises(InputError, match="not all of them were written; write them again"):
        shards.read(folder)
    found = shards.write(make(), folder)
    assert found.n_sequences == 40
    assert {p.name for p in folder.iterdir()} == {*found.about["files"], "manifest.json"}


def test_shards_are_not_written_over_unasked(tmp_path: Path) -> None:
    first = shards.write(make(), tmp_path / "s")
    with pytest.raises(InputError, match="already contains shards; name another folder"):
        shards.write(make(50), tmp_path / "s")
    assert shards.read(tmp_path / "s").digest == first.digest
    assert shards.write(make(50), tmp_path / "s", overwrite=True).n_sequences == 50


@pytest.mark.parametrize("cut", ["shard-00000-values.npy", "encoder.json", "counts-1.npy"])
def test_a_file_that_was_cut_short(cut: str, tmp_path: Path) -> None:
    shards.write(make(), tmp_path / "s")
    path = tmp_path / "s" / cut
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(InputError, match=f"{cut}: changed since it was written; write the shards"):
        shards.read(tmp_path / "s")
    path.unlink()
    with pytest.raises(InputError, match=f"{cut}: cannot be read"):
        shards.read(tmp_path / "s")


def test_a_byte_that_was_changed_is_found_when_it_is_read(tmp_path: Path) -> None:
    shards.write(make(), tmp_path / "s")
    path = tmp_path / "s" / "shard-00000-labels.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    batches = shards.ShardBatches(shards.read(tmp_path / "s"), 20)
    with pytest.raises(InputError, match=r"shard-00000-labels.npy: changed since it was written"):
        batches[0]


@pytest.mark.parametrize("change", [{"n_tokens": 3}, {"format": 99}, None])
def test_a_manifest_that_was_changed(change: dict[str, int] | None, tmp_path: Path) -> None:
    shards.write(make(), tmp_path / "s")
    path = tmp_path / "s" / "manifest.json"
    text = "[]" if change is None else json.dumps(json.loads(path.read_text()) | change)
    path.write_text(text)
    what = "another version" if change == {"format": 99} else "changed since it was written"
    with pytest.raises(InputError, match=what):
        shards.read(tmp_path / "s")


# -- what cannot be written --------------------------------------------------------------------------


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder; check the path"):
        shards.read(tmp_path / "s")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be written .*choose a place"):
        shards.write(make(), tmp_path / "file")


BAD: dict[str, tuple[Any, str]] = {
    "once only": (iter([]), "gone through only once; pass a list, or a function"),
    "no pair": ([("a", "b", "c")], r"sequences\[0\]: not tokens and labels"),
    "too few labels": ([([("a",)], [])], r"y\[0\]: 0 labels for 1 tokens"),
    "one label": ([([("a",)], ["A"])], "sequences: every token has the same label, 'A'"),
    "no label": ([([("a",)], [None])], "sequences: no token has a label"),
    "no token": ([([], [])], "no tokens"),
    "dense": ([(np.zeros((2, 3)), ["A", "B"])], "dense features cannot be fitted"),
    "another form": (
        [([("a",), ("b",)], ["A", "B"]), ([{"w": "a"}], ["A"])],
        "tokens are dicts, but training had strings",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_data(name: str, tmp_path: Path) -> None:
    given, message = BAD[name]
    with pytest.raises(InputError, match=message):
        shards.write(given, tmp_path / "s")
    with pytest.raises(InputError, match="not all of them were written"):
        shards.read(tmp_path / "s")


@pytest.mark.parametrize("second", [30, 41])
def test_sequences_that_are_others_the_second_time(second: int, tmp_path: Path) -> None:
    sizes = iter([40, 40, second])
    with pytest.raises(InputError, match="the second pass gave other sequences"):
        shards.write(lambda: make(next(sizes))(), tmp_path / "s", features="columns")


def test_values_that_are_others_the_second_time(tmp_path: Path) -> None:
    times = iter(range(9))

    def given() -> list[Any]:
        new = next(times) > 1
        return [([("x" if new else "a",), ("b",)], ["A", "B"])]

    with pytest.raises(InputError, match="the second pass gave other sequences"):
        shards.write(given, tmp_path / "s", features="columns")


def test_sequences_without_labels_are_left_out_with_a_warning(tmp_path: Path) -> None:
    pairs = [([("a",)], [None]), ([("b",), ("c",)], ["A", None]), ([("c",)], ["B"])]
    with pytest.warns(StructgpWarning, match="1 of 3 sequences have no label at all"):
        found = shards.write(pairs, tmp_path / "s")
    assert (found.n_sequences, found.about["n_given"]) == (2, 3)
    assert list(found.encoder.values[0]) == ["b", "c"]
    (batch,) = shards.ShardBatches(found, 100)
    assert batch.index.tolist() == [2, 1]
