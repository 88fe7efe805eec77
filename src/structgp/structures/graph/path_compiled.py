"""``PathCover.solve`` by compiled loops (``path_loops``)."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from structgp.structures.graph.cover import Solution, is_shared
from structgp.structures.graph.edge_rows import SWEEPS, EdgeRows, pool_of, slopes_of
from structgp.structures.graph.lane_code import LANES
from structgp.structures.graph.path_lanes import solve_lanes
from structgp.structures.graph.path_loops import solve
from structgp.structures.graph.path_sweeps import PathCover
from structgp.structures.program import Scores
from structgp.threads import share

LEAST_DRAWS = 3
"""Smallest number of draws that go side by side, even if some of the eight lanes are idle. With 11 labels
and three draws, this took .7 of the time of one after the other for a shared table, and as long for a table
per edge; with two draws, as long for both."""


def solve_compiled(
    cover: PathCover, f: Tensor, tables: Scores, sweeps: int, tolerance: float, split: Tensor | None
) -> Solution | None:
    """``PathCover.solve``; None if numbers vanish in probability space, or nothing is possible."""
    plan, layout, (S, B, N, V) = cover.plan, cover.layout, f.shape
    shared = tuple(is_shared(g, t) for g, t in zip(tables, layout.tuples, strict=True))
    first_edge = np.searchsorted((plan.ends[:, 0] // N).numpy(), np.arange(B + 1))
    if shared not in cover.kept:
        alike = np.stack([plan.scale.numpy(), plan.flip.numpy()], 1)
        found = EdgeRows.of(layout, shared, plan.template.numpy(), plan.place.numpy(), first_edge, alike)
        cover.kept[shared] = found
    rows = cover.kept[shared]
    times = torch.bincount(plan.into[plan.into >= 0], minlength=len(plan.ends)).double()
    log_z, gap, taken = np.empty((S, B)), np.empty((S, B)), np.empty((S, B), np.int64)
    nodes, failed, joints = np.zeros((S, B, N, V)), np.empty((S, B), bool), np.zeros((S, rows.n_out, V, V))
    moved = np.zeros((S, B * N, plan.into.shape[1], V))
    if split is not None:
        moved[:] = split.numpy()
    given = (
        f.contiguous().numpy(), pool_of(layout, f, tables).numpy(), layout.mask.numpy(),
        (plan.weight > 0).sum(1).numpy(), first_edge, plan.ends.numpy(), plan.into.numpy(),
        plan.out.numpy(), rows.row, rows.slot, rows.n_slots, plan.scale.numpy(), times.numpy(),
        plan.flip.numpy(), moved, split is not None, sweeps, tolerance, log_z, nodes, joints,
        rows.out_row, gap, taken, failed,
    )  # fmt: skip
    side_by_side = S >= LEAST_DRAWS and plan.into.shape[1] <= 2
    work, units = (solve_lanes, -(-S // LANES) * B) if side_by_side else (solve, S * B)
    share(partial(work, *given), units, SWEEPS * S * len(plan.ends) * V * V)
    if failed.any():
        return None
    value, node, d, apart = (torch.from_numpy(x).to(f) for x in (log_z, nodes, moved, gap))
    return Solution(
        value, node, slopes_of(layout, torch.from_numpy(joints), shared, f), d, int(taken.max()), apart
    )
