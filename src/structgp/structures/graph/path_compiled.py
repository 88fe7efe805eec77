"""``PathCover.solve`` by compiled loops (``path_loops``): where their numbers are, threads, and what they
leave."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structgp.structures.graph.cover import Solution, is_shared
from structgp.structures.graph.path_loops import solve
from structgp.structures.graph.path_sweeps import PathCover, PathPlan, label_ranges
from structgp.structures.program import Scores

WORTH_A_THREAD = 200_000
"""Products of a number by a number, in one sweep, below which a second thread does not pay."""


def share(work: Callable[..., object], units: int, cost: int, arrays: tuple[Any, ...]) -> None:
    """Units first..last of the work to each thread, as many threads as torch uses."""
    n = max(1, min(torch.get_num_threads(), units, cost // WORTH_A_THREAD))
    first, *others = pairwise(units * i // n for i in range(n + 1))
    if not others:
        work(*arrays, *first)
        return
    with ThreadPoolExecutor(len(others)) as pool:
        running = [pool.submit(work, *arrays, *ends) for ends in others]
        work(*arrays, *first)
    for part in running:
        part.result()  # raises what went wrong there


def solve_compiled(
    cover: PathCover, f: Tensor, tables: Scores, sweeps: int, tolerance: float, split: Tensor | None
) -> Solution | None:
    """``PathCover.solve``; None where numbers vanish in probability space, or nothing is possible."""
    plan, (S, B, N, V) = cover.plan, f.shape
    shared = tuple(is_shared(g, t) for g, t in zip(tables, cover.layout.tuples, strict=True))
    index = edge_index(cover, shared)
    log_z, gap, taken = np.empty((S, B)), np.empty((S, B)), np.empty((S, B), np.int64)
    nodes, failed = np.empty((S, B, N, V)), np.empty((S, B), bool)
    pairs = np.zeros((S, index.n_out, V, V))
    moved = np.zeros((S, B * N, plan.into.shape[1], V))
    if split is not None:
        moved[:] = split.numpy()
    given = (
        f.contiguous().numpy(), _pool(cover, f, tables).numpy(), cover.layout.mask.numpy(),
        (plan.weight > 0).sum(1).numpy(), index.first_edge, plan.ends.numpy(), plan.into.numpy(),
        plan.out.numpy(), index.row, index.slot, index.n_slots, plan.scale.numpy(), index.times,
        plan.flip.numpy(), moved, split is not None, sweeps, tolerance, log_z, nodes, pairs, index.out_row,
        gap, taken, failed,
    )  # fmt: skip
    share(solve, S * B, S * len(plan.ends) * V * V, given)
    if failed.any():
        return None
    slopes, first = [], 0
    for is_one, t in zip(shared, cover.layout.tuples, strict=True):
        n = B if is_one else t.mask.numel()
        if t.arity == 2:
            rows, columns = label_ranges(t)
            found = torch.from_numpy(pairs[:, first : first + n, rows, columns]).to(f)
        else:
            found = f.new_zeros((S, n, *t.sizes))
        slopes.append(found if is_one else found.unflatten(1, tuple(t.mask.shape)))
        first += n
    value, node, d, apart = (torch.from_numpy(x).to(f) for x in (log_z, nodes, moved, gap))
    return Solution(value, node, tuple(slopes), d, int(taken.max()), apart)


@dataclass(frozen=True)
class EdgeIndex:
    """Where the loops find things: see ``solve``."""

    first_edge: np.ndarray
    row: np.ndarray
    out_row: np.ndarray
    n_out: int
    slot: np.ndarray
    n_slots: int
    times: np.ndarray


def edge_index(cover: PathCover, shared: tuple[bool, ...]) -> EdgeIndex:
    """Of a cover whose tables are shared, or not, template by template; kept for the next call."""
    if shared not in cover.kept:
        cover.kept[shared] = _edge_index(cover, shared)
    return cover.kept[shared]


def _edge_index(cover: PathCover, shared: tuple[bool, ...]) -> EdgeIndex:
    plan, B = cover.plan, len(cover.rows)
    N = cover.layout.mask.shape[1]
    example = (plan.ends[:, 0] // N).numpy()
    place, template = plan.place.numpy(), plan.template.numpy()
    row, out_row, in_pool, in_out = np.zeros_like(place), np.zeros_like(place), 0, 0
    for k, (is_one, t) in enumerate(zip(shared, cover.layout.tuples, strict=True)):
        at = template == k
        row[at] = in_pool + (0 if is_one else place[at])
        out_row[at] = in_out + (example[at] if is_one else place[at])
        in_pool += 1 if is_one else t.mask.numel()
        in_out += B if is_one else t.mask.numel()
    first_edge = np.searchsorted(example, np.arange(B + 1))
    slot, n_slots = np.zeros_like(row), 1
    for b in range(B):
        some = slice(first_edge[b], first_edge[b + 1])
        told = np.stack([row[some], plan.scale.numpy()[some], plan.flip.numpy()[some]], 1)
        if len(told):
            slot[some] = np.unique(told, axis=0, return_inverse=True)[1].reshape(-1)
            n_slots = max(n_slots, int(slot[some].max()) + 1)
    return EdgeIndex(first_edge, row, out_row, in_out, slot, n_slots, _forests_with(plan))


def _forests_with(plan: PathPlan) -> np.ndarray:
    """(M,) how many forests have each edge."""
    found = plan.into[plan.into >= 0]
    return torch.bincount(found, minlength=len(plan.ends)).double().numpy()


def _pool(cover: PathCover, f: Tensor, tables: Scores) -> Tensor:
    """(S, R, V, V) all tables, template by template; 0 outside a tuple's labels."""
    S, V = f.shape[0], f.shape[-1]
    parts = []
    for g, t in zip(tables, cover.layout.tuples, strict=True):
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
