"""The tree-reweighted bound over forests of edges, compiled by numba: one example of one draw at a time.

As in ``path_sweeps`` each variable in turn has its marginals made equal in all forests, forth and back.
From one variable of a tree to the next, in the order of their places, only the messages on the way between
them have changed: those are renewed, so that every step is exact and the bound never rises. Within the
loops all is float64, in probability space, messages scaled so that their largest number is 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from structgp.structures.graph.path_loops import agree, exponentiate

_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
_reordered = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})


@_reordered
def _product(
    node: Any, told: Any, begin: Any, beside: Any, n: int, k: int, at: int, first: int, skip: int,
    out: Any,
) -> None:  # fmt: skip
    """out (V,) <- scores of variable n in forest k times what its edges tell it, but for edge ``skip``. at
    : its place in ``begin``; first : the example's first edge."""
    for v in range(len(out)):
        out[v] = node[n, k, v]
    for i in range(begin[at], begin[at + 1]):
        e, way = beside[i, 0], beside[i, 1]
        if e != skip:
            for v in range(len(out)):
                out[v] *= told[k, e - first, way, v]


@_reordered
def _send(tables: Any, slot: int, x: Any, told: Any, k: int, e: int, way: int) -> float:
    """told[k, e, way] <- the message of an edge, from its first variable to its second if ``way`` is 1;
    what it was divided by."""
    V, most, row = len(x), 0.0, 0
    while row + 4 <= V:  # a number that is loaded serves four rows
        a = b = c = d = 0.0
        for j in range(V):
            a += tables[slot, way, row, j] * x[j]
            b += tables[slot, way, row + 1, j] * x[j]
            c += tables[slot, way, row + 2, j] * x[j]
            d += tables[slot, way, row + 3, j] * x[j]
        told[k, e, way, row], told[k, e, way, row + 1] = a, b
        told[k, e, way, row + 2], told[k, e, way, row + 3] = c, d
        most = max(most, max(max(a, b), max(c, d)))
        row += 4
    while row < V:
        a = 0.0
        for j in range(V):
            a += tables[slot, way, row, j] * x[j]
        told[k, e, way, row] = a
        most = max(most, a)
        row += 1
    if most > 0:
        factor = 1 / most
        for i in range(V):
            told[k, e, way, i] *= factor
    return most


@_compiled
def solve(
    f: Any, pool: Any, there: Any, count: Any, first_edge: Any, ends: Any, row: Any, slot: Any, n_slots: int,
    scale: Any, times: Any, begin: Any, beside: Any, walk_begin: Any, walk: Any, after: Any, all_begin: Any,
    every: Any, n_up: Any, is_root: Any, split: Any, warm: bool, sweeps: int, tolerance: float, log_z: Any,
    nodes: Any, pairs: Any, out_row: Any, gaps: Any, taken: Any, failed: Any, first: int, last: int,
) -> None:  # fmt: skip
    """Units first..last of draws and examples, draw by draw. Most arrays as in ``path_loops.solve``; a
    place is (b N + n) K + k. begin, beside : for each place its edges in that forest, and which way leads
    to it. walk_begin, walk : edges and ways from the variable of its tree that comes before, to it. after :
    the variable of its tree that comes next, or -1. all_begin, every : for each example and forest all
    edges both ways, each after those that it depends on; the first ``n_up`` lead to the roots."""
    B, N, V = f.shape[1:]
    most, most_edges = after.shape[1], 1
    for b in range(B):
        most_edges = max(most_edges, first_edge[b + 1] - first_edge[b])
    node, told = np.empty((N, most, V)), np.ones((most, most_edges, 2, V))
    p, pair, top, x, z = (
        np.empty((most, V)),
        np.empty((V, V)),
        np.empty((N, most)),
        np.empty(V),
        np.empty(V),
    )
    tables, table_top = np.empty((n_slots, 2, V, V)), np.empty(n_slots)
    done = np.empty(n_slots, np.int64)
    for unit in range(first, last):
        s, b = unit // B, unit % B
        K, start, e0 = count[b], b * N, first_edge[b]
        done.fill(0)
        for e in range(e0, first_edge[b + 1]):
            if done[slot[e]] == 0:
                table_top[slot[e]] = exponentiate(pool[s, row[e]], scale[e], False, tables[slot[e], 0])
                tables[slot[e], 1] = tables[slot[e], 0].T
                done[slot[e]] = 1
        for n in range(N):
            if there[b, n]:
                for k in range(K):
                    high = -np.inf
                    for v in range(V):
                        node[n, k, v] = f[s, b, n, v]
                        if warm:
                            mean = 0.0
                            for j in range(K):
                                mean += split[s, start + n, j, v] / K
                            node[n, k, v] += split[s, start + n, k, v] - mean
                        high = max(high, node[n, k, v])
                    top[n, k] = high if high > -np.inf else 0.0
                    for v in range(V):
                        node[n, k, v] = np.exp(node[n, k, v] - top[n, k])
        for k in range(K):
            for i in range(all_begin[b * most + k], all_begin[b * most + k + 1]):
                e, way = every[i, 0], every[i, 1]
                a = ends[e, 1 - way] - start
                _product(node, told, begin, beside, a, k, (start + a) * most + k, e0, e, x)
                _send(tables, slot[e], x, told, k, e - e0, way)
        ok, sweep, gap = True, 0, 0.0 if K == 1 else np.inf
        while sweep < sweeps and gap > tolerance and ok:
            sweep, gap = sweep + 1, 0.0
            for turn in range(2 * N):
                forth = turn < N
                n = turn if forth else 2 * N - 1 - turn
                if not there[b, n]:
                    continue
                for k in range(K):
                    m = n if forth else after[start + n, k]
                    if m >= 0:
                        at = (start + m) * most + k
                        length = walk_begin[at + 1] - walk_begin[at]
                        for i in range(length):
                            # Back is the same way, from its end.
                            j = walk_begin[at] + (i if forth else length - 1 - i)
                            e, way = walk[j, 0], walk[j, 1] if forth else 1 - walk[j, 1]
                            a = ends[e, 1 - way] - start
                            _product(node, told, begin, beside, a, k, (start + a) * most + k, e0, e, x)
                            _send(tables, slot[e], x, told, k, e - e0, way)
                    _product(node, told, begin, beside, n, k, (start + n) * most + k, e0, -1, x)
                    total = x.sum()
                    ok = ok and total > 0
                    for v in range(V):
                        p[k, v] = x[v] / total
                if not ok:
                    break
                apart = agree(node, top, p, n, K)
                if not forth:
                    gap = max(gap, apart)
        total = 0.0
        for k in range(K):
            begins = all_begin[b * most + k]
            for i in range(begins, all_begin[b * most + k + 1]):
                e, way = every[i, 0], every[i, 1]
                a = ends[e, 1 - way] - start
                _product(node, told, begin, beside, a, k, (start + a) * most + k, e0, e, x)
                found = _send(tables, slot[e], x, told, k, e - e0, way)
                if i - begins < n_up[b, k]:
                    total += np.log(found) + table_top[slot[e]]
                else:
                    # On the way from the roots both messages are final: the edge's own marginals.
                    c = ends[e, way] - start
                    _product(node, told, begin, beside, c, k, (start + c) * most + k, e0, e, z)
                    for i1 in range(V):
                        for j1 in range(V):
                            pair[i1, j1] = tables[slot[e], 0, i1, j1] * (
                                x[i1] * z[j1] if way == 1 else z[i1] * x[j1]
                            )
                    whole = pair.sum()
                    if whole > 0:
                        for i1 in range(V):
                            for j1 in range(V):
                                pairs[s, out_row[e], i1, j1] += pair[i1, j1] / (whole * times[e])
        for n in range(N):
            nodes[s, b, n].fill(0)
            if there[b, n]:
                for k in range(K):
                    _product(node, told, begin, beside, n, k, (start + n) * most + k, e0, -1, x)
                    whole = x.sum()
                    ok = ok and whole > 0
                    total += top[n, k] + (np.log(whole) if is_root[start + n, k] else 0.0)
                    for v in range(V):
                        nodes[s, b, n, v] += x[v] / (whole * K) if whole > 0 else 0.0
                        found = np.log(max(node[n, k, v], 1e-300)) + top[n, k] - f[s, b, n, v]
                        split[s, start + n, k, v] = found if f[s, b, n, v] > -np.inf else 0.0
        log_z[s, b], gaps[s, b], taken[s, b] = total / K, gap, sweep
        failed[s, b] = not (ok and total > -np.inf)
