"""``TreeCover.solve`` by compiled loops (``tree_loops``), for forests of edges."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from structgp.structures.graph.cover import Solution, factors_of, is_shared
from structgp.structures.graph.edge_rows import EdgeRows, pool_of, share, slopes_of
from structgp.structures.graph.layout import GraphLayout
from structgp.structures.graph.tree_loops import solve
from structgp.structures.program import Scores


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
        """covers : for each example the forests, lists of positions in ``factors_of`` it, all edges."""
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
                near: dict[int, list[tuple[int, int, int]]] = {}
                for e in forest:
                    u, v = edges[e][:2]
                    near.setdefault(u, []).append((v, e, 1))
                    near.setdefault(v, []).append((u, e, 0))
                    beside[u * K + k].append((e, 0))
                    beside[v * K + k].append((e, 1))
                parent: dict[int, tuple[int, int, int]] = {}  # of a variable the one above, edge, way down
                depth: dict[int, int] = {}
                latest: dict[int, int] = {}  # of a root the last variable visited
                root_of: dict[int, int] = {}
                down: list[tuple[int, int]] = []
                for n in range(b * N, b * N + N):
                    if not there[b, n - b * N]:
                        continue
                    if n not in depth:
                        is_root[n, k], depth[n], root_of[n] = True, 0, n
                        waiting = [n]
                        for u in waiting:
                            for v, e, way in near.get(u, []):
                                if v not in depth:
                                    depth[v], root_of[v], parent[v] = depth[u] + 1, n, (u, e, way)
                                    down.append((e, way))
                                    waiting.append(v)
                    else:
                        last = latest[root_of[n]]
                        walks[n * K + k] = _way(last, n, parent, depth)
                        after[last, k] = n - b * N
                    latest[root_of[n]] = n
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


def _way(
    u: int, v: int, parent: dict[int, tuple[int, int, int]], depth: dict[int, int]
) -> list[tuple[int, int]]:
    """Edges and ways from u to v, of one tree."""
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
    """Where each list begins, with the end of the last, and all entries, (n, 2)."""
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
    """None where numbers vanish in probability space, or nothing is possible. split : (S, B N, K, V)."""
    f, *tables = scores
    S, B, N, V = f.shape
    shared = tuple(is_shared(g, t) for g, t in zip(tables, layout.tuples, strict=True))
    if shared not in index.kept:
        alike = index.scale[:, None]
        found = EdgeRows.of(layout, shared, index.template, index.place, index.first_edge, alike)
        index.kept[shared] = found
    rows = index.kept[shared]
    log_z, gap, taken = np.empty((S, B)), np.empty((S, B)), np.empty((S, B), np.int64)
    nodes, failed, pairs = np.empty((S, B, N, V)), np.empty((S, B), bool), np.zeros((S, rows.n_out, V, V))
    moved = np.zeros((S, B * N, index.after.shape[1], V))
    if split is not None:
        moved[:] = split.numpy()
    given = (
        f.contiguous().numpy(), pool_of(layout, f, tables).numpy(), layout.mask.numpy(), index.count,
        index.first_edge, index.ends, rows.row, rows.slot, rows.n_slots, index.scale, index.times,
        index.begin, index.beside, index.walk_begin, index.walk, index.after, index.all_begin, index.every,
        index.n_up, index.is_root, moved, split is not None, sweeps, tolerance, log_z, nodes, pairs,
        rows.out_row, gap, taken, failed,
    )  # fmt: skip
    share(solve, S * B, S * len(rows.row) * V * V, given)
    if failed.any():
        return None
    value, node, d, apart = (torch.from_numpy(x).to(f) for x in (log_z, nodes, moved, gap))
    return Solution(value, node, slopes_of(layout, pairs, shared, f), d, int(taken.max()), apart)
