"""Sequences of different lengths -> rectangular batches with a mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

MISSING = -1
"""The index of a missing label."""

UNUSED = (-1.0, 0.0)
"""Id and value of an entry of the sparse block that is not used."""


@dataclass(frozen=True)
class GraphRows:
    """What a batch of graphs has besides its nodes. layout : a ``data.layout.GraphLayout``. rows, masks :
    for each template, the features of its tuples (None if they have none), and which of its tuples
    exist."""

    layout: Any
    rows: tuple[Tensor | None, ...]
    masks: tuple[Tensor, ...]

    def to(self, device: str | torch.device) -> GraphRows:
        rows = tuple(None if r is None else r.to(device) for r in self.rows)
        return GraphRows(self.layout.to(device), rows, tuple(m.to(device) for m in self.masks))


@dataclass(frozen=True)
class Batch:
    """B sequences, padded at the end to the longest one.

    x : (B, T, W) rows; y : (B, T) labels, negative where one is missing, 0 at padding, or (B, T, V)
    evidence, the log-likelihood of what annotators said given each label; mask : (B, T) true at real
    positions; index : (B,) the position of each sequence in the data; weight : (B,) how often each sequence
    counts, None if each counts once; number : (B,) the number that determines each sequence's noise, None
    to use its position among the sequences of all batches; edges : (B, T - 1, W') the features of the
    transitions into each token but the first, None where they have none; graph : the tuples of examples
    that are not sequences, else None.
    rows, masks : for each template, the features of its tuples, and which of them exist: (B, T) nodes, (B,
    T - 1) transitions. layout : what a structure is told about the examples: the mask, or a graph's
    layout."""

    x: Tensor
    y: Tensor
    mask: Tensor
    index: Tensor
    weight: Tensor | None = None
    number: Tensor | None = None
    edges: Tensor | None = None
    graph: GraphRows | None = None
    rows: tuple[Tensor | None, ...] = field(init=False, repr=False)
    masks: tuple[Tensor, ...] = field(init=False, repr=False)
    layout: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        usual = GraphRows(self.mask, (self.x, self.edges), (self.mask, self.mask[:, 1:]))
        found = usual if self.graph is None else self.graph
        for name in ("rows", "masks", "layout"):
            object.__setattr__(self, name, getattr(found, name))

    def __len__(self) -> int:
        return len(self.index)

    def to(self, device: str | torch.device) -> Batch:
        """The batch with all its tensors on ``device``."""
        parts = (self.x, self.y, self.mask, self.index, self.weight, self.number, self.edges, self.graph)
        return Batch(*(None if t is None else t.to(device) for t in parts))  # type: ignore[arg-type]

    def real(self, values: Any, b: int) -> Any:
        """The entries of ``values`` (B, N, ...) at the variables of example b, without padding; for values
        (B, N - 1, ...) between neighbours, the entries after the first variable."""
        if self.graph is None:
            return values[b, : int(self.mask[b].sum())]
        mask = self.graph.layout.mask[b, self.graph.layout.mask.shape[1] - values.shape[1] :]
        return values[b][mask.cpu().numpy() if isinstance(values, np.ndarray) else mask]


def pad(
    rows: Sequence[np.ndarray],
    labels: Sequence[np.ndarray] | None,
    pad_row: np.ndarray,
    index: Sequence[int],
    weights: np.ndarray | None = None,
    layers: int = 1,
) -> Batch:
    """The sequences ``index`` of ``rows`` (each (T, W)) and ``labels`` (each (T,), or (T, V) for evidence
    about them; None if all are missing) as one batch, with their ``weights`` (N,). layers : labels per
    token; the labels of one layer come after those of the layer before.

    pad_row : the row at padded positions, without its sparse block. That block is filled up with unused
    entries, both at padded positions and in narrower rows."""
    lengths = [len(rows[i]) for i in index]
    B, T = len(index), max(lengths)
    width = max(rows[i].shape[1] for i in index)
    unused = np.tile(UNUSED, (width - len(pad_row)) // 2)
    x = np.tile(np.concatenate([pad_row, unused]), (B, T, 1))
    told = labels is not None and any(of.ndim == 2 for of in labels)  # evidence
    more = max(of.shape[-1] for of in labels if of.ndim == 2) if labels is not None and told else 0
    y: np.ndarray = np.zeros((B, layers, T, more)) if told else np.zeros((B, layers, T), dtype=np.int64)
    for b, i in enumerate(index):
        x[b, : lengths[b], : rows[i].shape[1]] = rows[i]
        if labels is not None:
            y[b, :, : lengths[b]] = labels[i].reshape(layers, lengths[b], *y.shape[3:])
        else:
            y[b, :, : lengths[b]] = MISSING
    y = y.reshape(B, layers * T, *y.shape[3:])
    mask = np.arange(T) < np.array(lengths)[:, None]
    tensors = [torch.from_numpy(a) for a in (x, y, mask, np.array(index, dtype=np.int64))]
    if weights is not None:
        tensors.append(torch.from_numpy(weights[list(index)]))
    return Batch(*tensors)  # type: ignore[arg-type]


def by_length(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of non-empty sequences in batches of similar length, each of at most ``batch_tokens`` tokens
    including padding (a longer sequence is a batch of its own). Each index comes once."""
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: lengths[i])
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * lengths[i] > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def flat_tokens(rows: Sequence[np.ndarray]) -> Tensor:
    """(N, W) all tokens, one after the other; narrower rows are filled up with unused entries."""
    rows = [r for r in rows if len(r)]
    width = max(r.shape[1] for r in rows)
    unused = [np.tile(UNUSED, (len(r), (width - r.shape[1]) // 2)) for r in rows]
    wide = [np.concatenate(both, 1) for both in zip(rows, unused, strict=True)]
    return torch.from_numpy(np.concatenate(wide))
