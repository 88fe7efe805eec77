"""Row numbers by which compiled loops over edges find tables and store gradients."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from structgp.data.layout import GraphLayout, Tuples
from structgp.structures.graph.cover import is_shared
from structgp.structures.program import Scores

SWEEPS = 5
"""Number of times that a fit goes over all edges, at least; used to estimate its work."""


@dataclass(frozen=True)
class EdgeRows:
    """row : (M,) row of each edge's table among all tables (``pool_of``). out_row : (M,) row of its
    gradient among ``n_out``, one per tuple, or one per example for a shared table. slot : (M,) number below
    ``n_slots``; edges of an example with the same slot have the same table, scaled and transposed alike."""

    row: np.ndarray
    out_row: np.ndarray
    n_out: int
    slot: np.ndarray
    n_slots: int

    @staticmethod
    def of(
        layout: GraphLayout,
        shared: tuple[bool, ...],
        template: np.ndarray,
        place: np.ndarray,
        first_edge: np.ndarray,
        alike: np.ndarray,
    ) -> EdgeRows:
        """shared : for each template, True if one table serves all tuples. template, place : (M,) template
        and tuple of each edge, b E + e. first_edge : (B + 1,) where the edges of each example begin.
        alike : (M, n) other values in which edges with the same slot must agree."""
        B = len(layout)
        row, out_row, in_pool, in_out = np.zeros_like(place), np.zeros_like(place), 0, 0
        for k, (is_one, t) in enumerate(zip(shared, layout.tuples, strict=True)):
            at = template == k
            row[at] = in_pool + (0 if is_one else place[at])
            out_row[at] = in_out + (place[at] // max(1, t.mask.shape[1]) if is_one else place[at])
            in_pool += 1 if is_one else t.mask.numel()
            in_out += B if is_one else t.mask.numel()
        slot, n_slots = np.zeros_like(row), 1
        for some in (slice(*ends) for ends in pairwise(first_edge)):
            told = np.concatenate([row[some, None], alike[some]], 1)
            if len(told):
                slot[some] = np.unique(told, axis=0, return_inverse=True)[1].reshape(-1)
                n_slots = max(n_slots, int(slot[some].max()) + 1)
        return EdgeRows(row, out_row, in_out, slot, n_slots)


def pool_of(layout: GraphLayout, f: Tensor, tables: Scores) -> Tensor:
    """(S, R, V, V) all tables, template by template; 0 outside a tuple's labels."""
    S, V = f.shape[0], f.shape[-1]
    parts = []
    for g, t in zip(tables, layout.tuples, strict=True):
        g = g[:, None] if is_shared(g, t) else g.flatten(1, 2)
        if t.sizes != (V, V):
            whole = g.new_zeros((*g.shape[:2], V, V))
            if t.arity == 2:
                rows, columns = label_ranges(t)
                whole[:, :, rows, columns] = g
            g = whole
        parts.append(g)
    if not parts:
        return f.new_zeros((S, 1, V, V))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).contiguous()


def slopes_of(
    layout: GraphLayout, joints: Tensor, shared: tuple[bool, ...], f: Tensor
) -> tuple[Tensor, ...]:
    """Gradients in the tables from ``joints`` (S, n_out, V, V): by tuple, or by example for a shared
    table."""
    slopes, first = [], 0
    for is_one, t in zip(shared, layout.tuples, strict=True):
        n = len(layout) if is_one else t.mask.numel()
        if t.arity == 2:
            rows, columns = label_ranges(t)
            found = joints[:, first : first + n, rows, columns].to(f)
        else:
            found = f.new_zeros((len(f), n, *t.sizes))
        slopes.append(found if is_one else found.unflatten(1, tuple(t.mask.shape)))
        first += n
    return tuple(slopes)


def label_ranges(tuples: Tuples) -> list[slice]:
    """For each place of a tuple, the range of its labels among all V."""
    return [slice(first, first + n) for first, n in zip(tuples.first, tuples.sizes, strict=True)]
