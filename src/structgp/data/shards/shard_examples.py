"""Shards as training data: what a fit needs to know about them, and their batches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import torch

from structgp.data.batch import UNUSED, Batch, by_length
from structgp.data.encode import entries
from structgp.data.labels import LabelEncoder, check_obeyed
from structgp.data.rules import declared_rules
from structgp.data.schemes import Allowed
from structgp.data.shards.folder import Shards, part


class ShardBatches(Sequence[Batch]):
    """Padded batches, read from the shards one at a time.

    The sequences of a shard are sorted by length, and a batch holds neighbours, so that there is little
    padding. Memory holds one batch at a time, and four numbers per batch. ``counts`` : number of sequences
    per batch."""

    def __init__(self, shards: Shards, batch_tokens: int) -> None:
        self.shards = shards
        places: list[tuple[int, int, int]] = []
        for k in range(shards.n_shards):
            lengths = np.diff(shards.array(part(k, "starts"))[:, 0]).tolist()
            places += [(k, index[0], index[-1] + 1) for index in by_length(lengths, batch_tokens)]
        self._places, self.counts = places, [end - begin for _, begin, end in places]
        self._last: tuple[int, Batch] | None = None
        self._device = "cpu"

    def to(self, device: str) -> ShardBatches:
        """The same batches, moved to ``device`` as they are read."""
        other = copy.copy(self)
        other._last, other._device = None, device
        return other

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, i: int) -> Batch: ...
    @overload
    def __getitem__(self, i: slice) -> list[Batch]: ...
    def __getitem__(self, i: int | slice) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(len(self))[i]]
        i = range(len(self))[i]
        if self._last is None or self._last[0] != i:
            self._last = None
            self._last = i, self._read(*self._places[i]).to(self._device)
        return self._last[1]

    def _read(self, k: int, begin: int, end: int) -> Batch:
        shards, array = self.shards, self.shards.array
        starts = np.array(array(part(k, "starts"))[begin : end + 1])
        tokens = slice(int(starts[0, 0]), int(starts[-1, 0]))
        rows = []
        if shards.has(part(k, "values")):
            rows.append(array(part(k, "values"))[tokens].astype(np.float64))
        if shards.has(part(k, "sparse_ids")):
            sparse = slice(int(starts[0, 1]), int(starts[-1, 1]))
            counts = np.array(array(part(k, "sparse_counts"))[tokens])
            found = array(part(k, "sparse_ids"))[sparse], array(part(k, "sparse_values"))[sparse]
            rows.append(entries(counts, *found))
        lengths, flat, pad_row = np.diff(starts[:, 0]), np.concatenate(rows, 1), shards.encoder.pad_row
        mask = np.arange(lengths.max()) < lengths[:, None]
        unused = np.tile(UNUSED, (flat.shape[1] - len(pad_row)) // 2)
        x = np.tile(np.concatenate([pad_row, unused]), (*mask.shape, 1))
        y = np.zeros(mask.shape, dtype=np.int64)
        x[mask], y[mask] = flat, array(part(k, "labels"))[tokens]
        numbers = np.array(array(part(k, "numbers"))[begin:end])
        tensors = [torch.from_numpy(found) for found in (x, y, mask, numbers)]
        return Batch(*tensors)  # type: ignore[arg-type]


class ShardedExamples:
    """The attributes of :class:`structgp.data.examples.Examples`, with the rows on disk."""

    weights = None

    def __init__(self, shards: Shards, constraints: Allowed | None = None) -> None:
        self.shards, self.encoder, self.digest = shards, shards.encoder, shards.digest
        self.constraints, self.labels = constraints, LabelEncoder(shards.classes)
        self.n_sequences, self.n_tokens, about = shards.n_sequences, shards.n_tokens, shards.about
        self.n_labels = len(shards.classes)
        self.typical_length: float = about["lengths_squared"] / max(1, self.n_tokens)
        self.label_counts, self.some_missing = np.array(about["label_counts"]), bool(about["some_missing"])

    def under(self, constraints: Allowed) -> ShardedExamples:
        """The same examples under constraints that all their labellings obey."""
        return ShardedExamples(self.shards, constraints)

    def batches(self, batch_tokens: int) -> ShardBatches:
        return ShardBatches(self.shards, batch_tokens)


def read_sharded(shards: Shards, constraints: Any) -> ShardedExamples:
    """The examples of some shards; InputError for labels that the constraints forbid."""
    rules = None if constraints is None else declared_rules(constraints, shards.classes)
    if rules is not None:
        check_obeyed(rules, shards.labels(), shards.classes)
    return ShardedExamples(shards, rules)
