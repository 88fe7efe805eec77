"""Sequences, gone through and never held, to shards on disk."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from structgp.data.encode import FeatureEncoder
from structgp.data.labels import MISSING, check_sequence
from structgp.data.shards.layout import ENCODER, MANIFEST, Folder, Shards, ours, part, read
from structgp.errors import InputError, StructgpWarning

Sequences = Iterable[tuple[Any, Any]] | Callable[[], Iterable[tuple[Any, Any]]]

SHARD_TOKENS = 250_000


def write(
    sequences: Sequences,
    folder: str | os.PathLike[str],
    *,
    features: str = "auto",
    classes: Sequence[str] = (),
    shard_tokens: int = SHARD_TOKENS,
    source: str = "",
    name: str = "sequences",
    overwrite: bool = False,
) -> Shards:
    """Encodes labelled sequences and writes them to a folder, which is made.

    The sequences are gone through once or more to learn their features, and once to encode them. Memory is
    that of the vocabularies and of one shard, however many there are. Until all is written there is no
    manifest, and a folder without one is refused by ``read``.

    Parameters
    ----------
    sequences : pairs (x, y) as ``fit`` takes X and y: anything that can be gone through again, or a
        function that begins anew each time it is called. Tokens with dense features have no place here.
    folder : where to write.
    features : as of :class:`structgp.StructuredGPClassifier`.
    classes : labels beside those of the data.
    shard_tokens : tokens of a shard, about. Sequences of similar length are put together within one.
    source : a text that says what the data are; kept as ``Shards.about['source']``.
    name : what errors call the data.
    overwrite : whether shards that are in the folder may be replaced.
    """
    if shard_tokens < 1:
        raise InputError("shard_tokens", f"{shard_tokens} is too few", "use 1 or more")
    path = _empty_folder(folder, overwrite)
    stream = _Stream(sequences, name)
    try:
        encoder = FeatureEncoder(features).fit(stream.tokens())
    except InputError as error:
        if not stream.has_tokens or stream.found:
            raise
        raise InputError(name, "no token has a label", "label some of them") from error
    if any(block.kind == "dense" for block in encoder.blocks):
        raise InputError(
            name,
            "dense features, which have no weights to be fitted batch by batch",
            "use categorical or sparse ones, or fit data that is in memory",
        )
    labels = sorted({*stream.found, *classes})
    if len(labels) < 2:
        raise InputError(
            name,
            f"every token has the same label, {labels[0]!r}: only one class",
            "pass data with at least two labels",
        )
    if stream.left_out:
        warnings.warn(
            f"{stream.left_out} of {stream.length} sequences have no label at all and are left out",
            StructgpWarning,
            stacklevel=2,
        )
    _Writer(Folder(path), encoder, labels, shard_tokens, name).write(stream, source)
    return read(path)


def _empty_folder(folder: str | os.PathLike[str], overwrite: bool) -> Path:
    path = Path(folder)
    if (path / MANIFEST).exists() and not overwrite:
        raise InputError(
            str(folder), "there are shards in it", "name another folder, or say overwrite=True"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        for file in ours(path):  # the manifest first: what is left is not taken for whole
            file.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            str(folder), f"cannot be written ({reason})", "choose a place you may write to"
        ) from error
    return path


@dataclass
class _Stream:
    """The sequences, checked as they come by. found : their labels; length : how many there are;
    left_out : those without any label."""

    sequences: Sequences
    name: str
    found: set[str] = field(default_factory=set)
    length: int = 0
    left_out: int = 0
    has_tokens: bool = False

    def __iter__(self) -> Iterator[tuple[int, Any, list[str | None]]]:
        """Number, tokens and labels; of one without any label, nothing of both."""
        given: Any = self.sequences() if callable(self.sequences) else self.sequences
        if not callable(self.sequences) and iter(given) is given:
            raise InputError(
                self.name,
                "an iterator, which can be gone through once only",
                "pass a list, or a function that makes a new iterator each time",
            )
        n, left_out = -1, 0
        for n, pair in enumerate(given):
            if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
                raise InputError(
                    f"{self.name}[{n}]", "no pair of tokens and labels", "pass pairs (x, y)"
                )
            x, y = pair
            labels = check_sequence(x, y, n)
            known = {label for label in labels if label is not None}
            self.found |= known
            self.has_tokens = self.has_tokens or bool(labels)
            if labels and not known:
                left_out += 1
                x, labels = [], []
            yield n, x, labels
        self.length, self.left_out = n + 1, left_out

    def tokens(self) -> Iterable[Any]:
        return _Tokens(self)


@dataclass
class _Tokens:
    """The tokens of each sequence, as often as they are asked for."""

    stream: _Stream

    def __iter__(self) -> Iterator[Any]:
        for _, x, _ in self.stream:
            yield x


@dataclass
class _Sequence:
    """rows : (T, P) ids of values; pairs : of sparse features, how many each token has, ids and values."""

    number: int
    labels: np.ndarray
    rows: np.ndarray
    pairs: tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass
class _Writer:
    folder: Folder
    encoder: FeatureEncoder
    classes: list[str]
    shard_tokens: int
    name: str
    shards: list[dict[str, int]] = field(default_factory=list)

    def write(self, stream: _Stream, source: str) -> None:
        encoder, length = self.encoder, stream.length
        counts = [np.zeros(max(1, len(known)), dtype=np.int64) for known in encoder.values]
        labels_seen = np.zeros(len(self.classes), dtype=np.int64)
        index: dict[str | None, int] = {label: v for v, label in enumerate(self.classes)}
        index[None] = MISSING
        buffer: list[_Sequence] = []
        held, squares, lengths_squared, missing = 0, 0.0, 0, False
        for n, x, labels in stream:
            if not labels:
                continue
            try:
                y = np.array([index[label] for label in labels], dtype=np.int32)
            except KeyError:
                raise self._changed() from None
            one = self._encoded(n, x, y)
            for j, known in enumerate(counts):
                column = one.rows[:, j]
                np.add.at(known, column[column >= 0], 1)
            labels_seen += np.bincount(y[y >= 0], minlength=len(labels_seen))
            missing = missing or bool((y < 0).any())
            squares += float(np.square(one.pairs[2]).sum())
            lengths_squared += len(y) ** 2
            buffer.append(one)
            held += len(y)
            if held >= self.shard_tokens:
                self._flush(buffer)
                buffer, held = [], 0
        if buffer:
            self._flush(buffer)
        if stream.length != length:
            raise self._changed()
        for j, known in enumerate(counts):
            self.folder.save(f"counts-{j}", known)
        text = json.dumps(encoder.to_json())
        self.folder.put(ENCODER, text.encode())
        self.folder.finish(
            {
                "source": source,
                "n_sequences": sum(shard["n_sequences"] for shard in self.shards),
                "n_tokens": sum(shard["n_tokens"] for shard in self.shards),
                "n_given": length,
                "classes": self.classes,
                "label_counts": labels_seen.tolist(),
                "some_missing": missing,
                "lengths_squared": lengths_squared,
                "sparse_squares": squares,
                "shards": self.shards,
            }
        )

    def _encoded(self, n: int, x: Any, y: np.ndarray) -> _Sequence:
        found, P = self.encoder.encode(x, f"X[{n}]"), len(self.encoder.templates)
        rows, pairs = found[:, :P].astype(np.int32), found[:, P:]
        there = (pairs[:, 0::2] >= 0) & (pairs[:, 1::2] != 0)
        ids = pairs[:, 0::2][there].astype(np.int32)
        sizes = np.array([len(known) for known in self.encoder.values])
        n_sparse = len(self.encoder.columns or self.encoder.attributes)
        if (rows >= sizes).any() or (ids >= n_sparse).any():
            raise self._changed()
        return _Sequence(n, y, rows, (there.sum(1).astype(np.int32), ids, pairs[:, 1::2][there]))

    def _flush(self, buffer: list[_Sequence]) -> None:
        """One shard, sorted by length; sequences of one length stay in their order."""
        k, some = len(self.shards), sorted(buffer, key=lambda one: len(one.labels))
        sizes = [(len(one.labels), len(one.pairs[1])) for one in some]
        starts = np.concatenate([np.zeros((1, 2), dtype=np.int64), np.cumsum(sizes, 0)])
        arrays = {
            "starts": starts,
            "numbers": np.array([one.number for one in some], dtype=np.int64),
            "labels": np.concatenate([one.labels for one in some]),
        }
        if self.encoder.templates:
            arrays["values"] = np.concatenate([one.rows for one in some])
        if self.encoder.has_sparse:
            kinds = ("pair_counts", "pair_ids", "pair_values")
            for j, kind in enumerate(kinds):
                arrays[kind] = np.concatenate([one.pairs[j] for one in some])
        for kind, array in arrays.items():
            self.folder.save(part(k, kind), array)
        self.shards.append({"n_sequences": len(some), "n_tokens": int(starts[-1, 0])})

    def _changed(self) -> InputError:
        return InputError(
            self.name,
            "other sequences the second time than the first",
            "pass the same ones each time, and leave files as they are while they are read",
        )
