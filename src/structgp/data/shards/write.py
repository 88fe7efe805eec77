"""Write sequences to shards on disk without holding them all in memory."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from structgp.data.encode import FeatureEncoder
from structgp.data.labels import UNSEEN, LabelEncoder, check_labels, only_one_class
from structgp.data.shards.folder import ENCODER, MANIFEST, Folder, Shards, ours, part, read
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
    """Encode labelled sequences and write them to a folder, which is created if necessary.

    There are one or more passes over the sequences to learn their features, and one to encode them.
    Memory is that of the vocabularies and of one shard, however many sequences there are. The manifest
    is written last, and ``read`` refuses a folder without one.

    Parameters
    ----------
    sequences : tuples (x, y) of one sequence of tokens and its labels, as ``fit`` takes them in X and y:
        an iterable that can be iterated over several times, or a function that returns a new iterator
        each time. Dense features are not supported.
    features : as in :class:`structgp.StructuredGPClassifier`.
    classes : labels besides those in the data.
    shard_tokens : approximate number of tokens per shard. Sequences are sorted by length within a shard.
    source : a text that identifies the data; kept as ``Shards.about['source']``.
    name : what errors call the data.
    overwrite : whether shards already in the folder may be replaced."""
    if shard_tokens < 1:
        raise InputError("shard_tokens", f"must be at least 1, got {shard_tokens}", "use a larger number")
    path = _empty_folder(folder, overwrite)
    stream = _Stream(sequences, name)
    try:
        encoder = FeatureEncoder(features).fit(stream)
    except InputError as error:
        if not stream.has_tokens or stream.found:
            raise
        raise InputError(name, "no token has a label", "label some of them") from error
    if encoder.dense_width:
        remedy = "use categorical or sparse features, or fit data in memory"
        raise InputError(name, "dense features cannot be fitted batch by batch", remedy)
    labels = sorted({*stream.found, *classes})
    if len(labels) < 2:
        raise only_one_class(labels[0], name)
    if stream.left_out:
        message = f"{stream.left_out} of {stream.length} sequences have no label at all and are left out"
        warnings.warn(message, StructgpWarning, stacklevel=2)
    about = {"source": source, "n_given": stream.length, "classes": labels}
    _Writer(Folder(path), encoder, about, name).write(stream, shard_tokens)
    return read(path)


def _empty_folder(folder: str | os.PathLike[str], overwrite: bool) -> Path:
    path = Path(folder)
    if (path / MANIFEST).exists() and not overwrite:
        remedy = "name another folder, or use overwrite=True"
        raise InputError(str(folder), "already contains shards", remedy)
    try:
        path.mkdir(parents=True, exist_ok=True)
        for file in ours(path):  # the manifest first: without it the rest is not read
            file.unlink()
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        raise InputError(str(folder), problem, "choose a place you may write to") from error
    return path


@dataclass
class _Stream:
    """The sequences, checked in passing. found : their labels; length : their number; left_out : the number
    of sequences without any label, which are replaced by empty ones."""

    sequences: Sequences
    name: str
    found: set[str] = field(default_factory=set)
    length: int = 0
    left_out: int = 0
    has_tokens: bool = False

    def __iter__(self) -> Iterator[Any]:
        """The tokens of each sequence."""
        for x, _ in self.labelled():
            yield x

    def labelled(self) -> Iterator[tuple[Any, list[str | None]]]:
        """The tokens and labels of each sequence."""
        given: Any = self.sequences() if callable(self.sequences) else self.sequences
        if not callable(self.sequences) and iter(given) is given:
            remedy = "pass a list, or a function that returns a new iterator each time"
            raise InputError(self.name, "an iterator can be gone through only once", remedy)
        n, left_out = -1, 0
        for n, both in enumerate(given):
            if not isinstance(both, Sequence) or isinstance(both, str) or len(both) != 2:
                raise InputError(f"{self.name}[{n}]", "not tokens and labels", "pass tuples (x, y)")
            x, y = both
            (labels,) = check_labels([x], [y], first=n)
            known = {label for label in labels if label is not None}
            self.found |= known
            self.has_tokens = self.has_tokens or bool(labels)
            if labels and not known:
                left_out += 1
                x, labels = [], []
            yield x, labels
        self.length, self.left_out = n + 1, left_out


class _Sequence(NamedTuple):
    """One encoded sequence. rows : (T, P) ids of values; sparse : number of sparse features per token,
    their ids and their values."""

    number: int
    labels: np.ndarray
    rows: np.ndarray
    sparse: tuple[np.ndarray, np.ndarray, np.ndarray]


class _Writer:
    """Fills a folder shard by shard. about : what the manifest will say about the data."""

    def __init__(self, folder: Folder, encoder: FeatureEncoder, about: dict[str, Any], name: str) -> None:
        self.folder, self.encoder, self.name = folder, encoder, name
        self.value_counts = [np.zeros(max(1, len(known)), dtype=np.int64) for known in encoder.values]
        self.label_counts = np.zeros(len(about["classes"]), dtype=np.int64)
        sums = dict.fromkeys(("n_sequences", "n_tokens", "lengths_squared", "sparse_squares"), 0)
        self.about: dict[str, Any] = {**about, **sums, "some_missing": False, "shards": []}

    def write(self, stream: _Stream, shard_tokens: int) -> None:
        labels_of, buffer, held = LabelEncoder(self.about["classes"]), [], 0
        for n, (x, labels) in enumerate(stream.labelled()):
            if not labels:
                continue
            (y,) = labels_of.transform([labels])
            if (y == UNSEEN).any():
                raise self._changed()
            buffer.append(self._encoded(n, x, y.astype(np.int32)))
            held += len(y)
            if held >= shard_tokens:
                self._flush(buffer)
                buffer, held = [], 0
        if buffer:
            self._flush(buffer)
        if stream.length != self.about["n_given"]:
            raise self._changed()
        for j, known in enumerate(self.value_counts):
            self.folder.save(f"counts-{j}", known)
        self.folder.put(ENCODER, json.dumps(self.encoder.to_json()).encode())
        self.folder.finish({**self.about, "label_counts": self.label_counts.tolist()})

    def _encoded(self, n: int, x: Any, y: np.ndarray) -> _Sequence:
        found, P = self.encoder.encode(x, f"X[{n}]"), len(self.encoder.templates)
        rows, all_ids, values = found[:, :P].astype(np.int32), found[:, P::2], found[:, P + 1 :: 2]
        there = (all_ids >= 0) & (values != 0)
        ids = all_ids[there].astype(np.int32)
        sizes = np.array([len(known) for known in self.encoder.values])
        if (rows >= sizes).any() or (ids >= self.encoder.n_sparse).any():
            raise self._changed()
        return _Sequence(n, y, rows, (there.sum(1).astype(np.int32), ids, values[there]))

    def _flush(self, buffer: list[_Sequence]) -> None:
        """Write one shard, sorted by length; sequences of one length keep their order."""
        some, about = sorted(buffer, key=lambda one: len(one.labels)), self.about
        sizes = [(len(one.labels), len(one.sparse[1])) for one in some]
        labels = np.concatenate([one.labels for one in some])
        arrays = {
            "starts": np.concatenate([np.zeros((1, 2), dtype=np.int64), np.cumsum(sizes, 0)]),
            "numbers": np.array([one.number for one in some], dtype=np.int64),
            "labels": labels,
        }
        if self.encoder.templates:
            arrays["values"] = np.concatenate([one.rows for one in some])
            for known, column in zip(self.value_counts, arrays["values"].T, strict=True):
                known += np.bincount(column[column >= 0], minlength=len(known))
        if self.encoder.has_sparse:
            for j, kind in enumerate(("sparse_counts", "sparse_ids", "sparse_values")):
                arrays[kind] = np.concatenate([one.sparse[j] for one in some])
        for kind, array in arrays.items():
            self.folder.save(part(len(about["shards"]), kind), array)
        self.label_counts += np.bincount(labels[labels >= 0], minlength=len(self.label_counts))
        about["some_missing"] |= bool((labels < 0).any())
        about["shards"].append({"n_sequences": len(some), "n_tokens": len(labels)})
        about["n_sequences"] += len(some)
        about["n_tokens"] += len(labels)
        for one in buffer:
            about["lengths_squared"] += len(one.labels) ** 2
            about["sparse_squares"] += float(np.square(one.sparse[2]).sum())

    def _changed(self) -> InputError:
        remedy = "pass the same ones each time, and do not change files while they are read"
        return InputError(self.name, "the second pass gave other sequences than the first", remedy)
