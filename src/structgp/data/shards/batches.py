"""Padded batches, read from shards one at a time."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import torch

from structgp.data.batch import Batch, by_length
from structgp.data.shards.layout import Shards, part


class ShardBatches(Sequence[Batch]):
    """Batches of sequences that stand side by side in a shard: those are sorted by length, so that there
    is little padding. Memory is that of one batch, and three numbers for each of them.

    counts : sequences of each batch.
    """

    on_disk = True

    def __init__(self, shards: Shards, batch_tokens: int) -> None:
        self.shards = shards
        places: list[tuple[int, int, int]] = []
        for k in range(shards.n_shards):
            lengths = np.diff(shards.array(part(k, "starts"))[:, 0]).tolist()
            found = by_length(lengths, batch_tokens)
            places += [(k, index[0], index[-1] + 1) for index in found]
        self._places = np.array(places, dtype=np.int64).reshape(-1, 3)
        self._last: tuple[int, Batch] | None = None
        self._device = "cpu"

    def to(self, device: str) -> ShardBatches:
        """The same, with batches on ``device`` as they are read."""
        other = copy.copy(self)
        other._last, other._device = None, device
        return other

    @property
    def counts(self) -> list[int]:
        return (self._places[:, 2] - self._places[:, 1]).tolist()

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
            self._last = i, self._read(*self._places[i].tolist()).to(self._device)
        return self._last[1]

    def _read(self, k: int, begin: int, end: int) -> Batch:
        shards, array = self.shards, self.shards.array
        starts = np.array(array(part(k, "starts"))[begin : end + 1])
        tokens = slice(int(starts[0, 0]), int(starts[-1, 0]))
        lengths = np.diff(starts[:, 0])
        mask = np.arange(lengths.max()) < lengths[:, None]
        rows = []
        if shards.has(part(k, "values")):
            rows.append(array(part(k, "values"))[tokens].astype(np.float64))
        if shards.has(part(k, "pair_ids")):
            pairs = slice(int(starts[0, 1]), int(starts[-1, 1]))
            counts = np.array(array(part(k, "pair_counts"))[tokens])
            found = array(part(k, "pair_ids"))[pairs], array(part(k, "pair_values"))[pairs]
            rows.append(_pairs(counts, *found))
        tokens_rows = np.concatenate(rows, 1)
        x = np.tile(shards.encoder.pad_row(tokens_rows.shape[1]), (*mask.shape, 1))
        y = np.zeros(mask.shape, dtype=np.int64)
        x[mask], y[mask] = tokens_rows, array(part(k, "labels"))[tokens]
        numbers = np.array(array(part(k, "numbers"))[begin:end])
        return Batch(*(torch.from_numpy(found) for found in (x, y, mask, numbers)))


def _pairs(counts: np.ndarray, ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(n, 2A) ids and values side by side, from those of all tokens one after the other."""
    rows = np.tile([-1.0, 0.0], (len(counts), max(1, int(counts.max(initial=0)))))
    row = np.repeat(np.arange(len(counts)), counts)
    slot = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows[row, 2 * slot], rows[row, 2 * slot + 1] = ids, values
    return rows
