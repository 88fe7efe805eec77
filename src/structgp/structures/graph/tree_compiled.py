"""``TreeCover.solve`` by compiled loops (``tree_loops``), for forests of edges."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from structgp.data.layout import GraphLayout
from structgp.structures.graph.cover import Solution, factors_of, is_shared
from structgp.structures.graph.edge_rows import SWEEPS, EdgeRows, pool_of, slopes_of
from structgp.structures.graph.tree_loops import solve
from structgp.structures.program import Scores
from structgp.threads import share


@dataclass(frozen=True)
class TreeIndex:
    """Arrays of ``tree_loops.solve`` that do not depend on the scores."""

    count: np.ndarray
    first_edge: np.ndarray
    ends: np.ndarray
    template: np.ndarray
    place: np.ndarray
    scale: np.ndarray
    times: np.ndarray
    begin: np.ndarray
    beside: np.ndarray
    walk_begin: np.ndarray
    walk: np.ndarray
    after: np.ndarray
    all_begin: np.ndarray
    every: np.ndarray
    n_up: np.ndarray
    is_root: np.ndarray
    kept: dict[tuple[bool, ...], EdgeRows] = field(default_factory=dict)

    @staticmethod
    def of(layout: GraphLayout, covers: list[list[list[int]]]) -> TreeIndex:
        """covers : for each example its forests, lists of positions in its ``factors_of``, all edges."""
        B, N = layout.mask.shape
        K = max([1, *map(len, covers)])
        there = layout.mask.cpu().numpy()
        edges: list[tuple[int, int, int, int]] = []
        first_edge, scale, times = [0], [], []
        beside: list[list[tuple[int, int]]] = [[] for _ in range(B * N * K)]
        walks: list[list[tuple[int, int]]] = [[] for _ in range(B * N * K)]
        every: list[list[tuple[int, int]]] = [[] for _ in range(B * K)]
        after, is_root = np.full((B * N, K), -1), np.zeros((B * N, K), bool)
        n_up = np.zeros((B, K), np.int64)
        for b, (found, forests) in enumerate(zip(factors_of(layout), covers, strict=True)):
            first, having = len(edges), np.zeros(len(found))
            for t, e, (u, v) in found:
                edges.append((b * N + u, b * N + v, t, b * layout.tuples[t].index.shape[1] + e))
            for k in range(max(1, len(forests))):
                forest = [first + e for e in forests[k]] if forests else []
                having[[e - first for e in forest]] += 1
                for e in forest:
                    beside[edges[e][0] * K + k].append((e, 0))
                    beside[edges[e][1] * K + k].append((e, 1))
                order = [b * N + n for n in range(N) if there[b, n]]
                down, roots, ways = _visit(order, forest, edges)
                is_root[roots, k] = True
                for last, n, way in ways:
                    walks[n * K + k] = way
                    after[last, k] = n - b * N
                every[b * K + k] = [(e, 1 - way) for e, way in reversed(down)] + down
                n_up[b, k] = len(down)
            first_edge.append(len(edges))
            scale += (max(1, len(forests)) / np.maximum(having, 1)).tolist()
            times += having.tolist()
        table = np.array(edges, np.int64).reshape(-1, 4)
        return TreeIndex(
            np.array([max(1, len(forests)) for forests in covers]),
            np.array(first_edge),
            np.ascontiguousarray(table[:, :2]),
            table[:, 2],
            table[:, 3],
            np.array(scale),
            np.array(times),
            *_flat(beside),
            *_flat(walks),
            after,
            *_flat(every),
            n_up,
            is_root,
        )


Way = list[tuple[int, int]]  # edges, with the direction of each: 1 from its first variable to its second


def _visit(
    order: list[int], forest: list[int], edges: list[tuple[int, int, int, int]]
) -> tuple[Way, list[int], list[tuple[int, int, Way]]]:
    """Visits the variables of a forest in this order. Returns all edges, directed away from the roots,
    which are the first variables of the trees; the roots; and for every other variable the previous one of
    its tree, itself, and the way from one to the other."""
    near: dict[int, list[tuple[int, int, int]]] = {}
    for e in forest:
        u, v = edges[e][:2]
        near.setdefault(u, []).append((v, e, 1))
        near.setdefault(v, []).append((u, e, 0))
    parent: dict[int, tuple[int, int, int]] = {}  # the variable above, edge, way down
    depth: dict[int, int] = {}
    root_of: dict[int, int] = {}
    latest: dict[int, int] = {}
    down: Way = []
    ways = []
    for n in order:
        if n in depth:
            last = latest[root_of[n]]
            ways.append((last, n, _way(last, n, parent, depth)))
        else:
            depth[n], root_of[n], waiting = 0, n, [n]
            for u in waiting:
                for v, e, way in near.get(u, []):
                    if v not in depth:
                        depth[v], root_of[v], parent[v] = depth[u] + 1, n, (u, e, way)
                        down.append((e, way))
                        waiting.append(v)
        latest[root_of[n]] = n
    return down, [n for n in order if root_of[n] == n], ways


def _way(
    u: int, v: int, parent: dict[int, tuple[int, int, int]], depth: dict[int, int]
) -> list[tuple[int, int]]:
    """Edges on the way from u to v, of one tree, with their directions."""
    up, down = [], []
    while u != v:
        if depth[u] >= depth[v]:
            u, e, way = parent[u]
            up.append((e, 1 - way))
        else:
            v, e, way = parent[v]
            down.append((e, way))
    return up + down[::-1]


def _flat(lists: list[list[tuple[int, int]]]) -> tuple[np.ndarray, np.ndarray]:
    """Where each list begins, and the end of the last; and all entries one after the other, (n, 2)."""
    begin = np.cumsum([0, *map(len, lists)])
    return begin, np.array([x for found in lists for x in found], np.int64).reshape(-1, 2)


def solve_compiled(
    index: TreeIndex,
    layout: GraphLayout,
    scores: Scores,
    sweeps: int,
    tolerance: float,
    split: Tensor | None,
) -> Solution | None:
    """``TreeCover.solve``; None if numbers vanish in probability space, or nothing is possible.
    split : (S, B N, K, V)."""
    f, *tables = scores
    S, B, N, V = f.shape
    shared = tuple(is_shared(g, t) for g, t in zip(tables, layout.tuples, strict=True))
    if shared not in index.kept:
        alike = index.scale[:, None]
        found = EdgeRows.of(layout, shared, index.template, index.place, index.first_edge, alike)
        index.kept[shared] = found
    rows = index.kept[shared]
    log_z, gap, taken = np.empty((S, B)), np.empty((S, B)), np.empty((S, B), np.int64)
    nodes, failed, joints = np.empty((S, B, N, V)), np.empty((S, B), bool), np.zeros((S, rows.n_out, V, V))
    moved = np.zeros((S, B * N, index.after.shape[1], V))
    if split is not None:
        moved[:] = split.numpy()
    given = (
        f.contiguous().numpy(), pool_of(layout, f, tables).numpy(), layout.mask.numpy(), index.count,
        index.first_edge, index.ends, rows.row, rows.slot, rows.n_slots, index.scale, index.times,
        index.begin, index.beside, index.walk_begin, index.walk, index.after, index.all_begin, index.every,
        index.n_up, index.is_root, moved, split is not None, sweeps, tolerance, log_z, nodes, joints,
        rows.out_row, gap, taken, failed,
    )  # fmt: skip
    share(partial(solve, *given), S * B, SWEEPS * S * len(rows.row) * V * V)
    if failed.any():
        return None
    value, node, d, apart = (torch.from_numpy(x).to(f) for x in (log_z, nodes, moved, gap))
    return Solution(
        value, node, slopes_of(layout, torch.from_numpy(joints), shared, f), d, int(taken.max()), apart
    )
