"""The tree-reweighted bound over forests of edges, compiled by numba: one example of one draw at a time.

As in ``path_sweeps``, the marginals of each variable in turn are made equal in all forests, forth and back.
From one variable of a tree to the next, in the order of their places, only the messages on the way between
them have changed; these are renewed, so that every step is exact and the bound never rises. Within the
loops, all is float64, in probability space, with messages scaled so that their largest number is 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from structgp.structures.graph.path_loops import agree, exponentiate, keep_split, load_nodes

_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
_reordered = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})


@_reordered
def _product(
    node: Any, told: Any, begin: Any, beside: Any, n: int, k: int, at: int, first: int, skip: int,
    out: Any,
) -> None:  # fmt: skip
    """out (V,) <- scores of variable n in forest k times the messages of its edges to it, except edge
    ``skip``. at : its place in ``begin``; first : the example's first edge."""
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
    returns its largest number before scaling."""
    V, most, row = len(x), 0.0, 0
    while row + 4 <= V:  # a number, once loaded, serves four rows
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
def _renew(
    e: int, way: int, k: int, start: int, e0: int, ends: Any, slot: Any, tables: Any, begin: Any,
    beside: Any, node: Any, told: Any, x: Any,
) -> float:  # fmt: skip
    """Renews the message of edge e in direction ``way``; returns its largest number before scaling. Leaves
    the sender's product in x (V,)."""
    a = ends[e, 1 - way] - start
    _product(node, told, begin, beside, a, k, (start + a) * node.shape[1] + k, e0, e, x)
    return _send(tables, slot[e], x, told, k, e - e0, way)


@_compiled
def _sweep(
    forth: bool, b: int, K: int, there: Any, e0: int, ends: Any, slot: Any, tables: Any, begin: Any,
    beside: Any, walk_begin: Any, walk: Any, after: Any, node: Any, top: Any, told: Any, p: Any, x: Any,
) -> float:  # fmt: skip
    """Visits all variables of an example in turn; returns the largest gap, or nan if no label is left."""
    N, most, V = node.shape
    gap, start = 0.0, b * N
    for turn in range(N):
        n = turn if forth else N - 1 - turn
        if not there[b, n]:
            continue
        for k in range(K):
            m = n if forth else after[start + n, k]
            at = (start + m) * most + k
            length = 0 if m < 0 else walk_begin[at + 1] - walk_begin[at]
            for i in range(length):
                # Back, it is the same way from its end.
                j = walk_begin[at] + (i if forth else length - 1 - i)
                way = walk[j, 1] if forth else 1 - walk[j, 1]
                _renew(walk[j, 0], way, k, start, e0, ends, slot, tables, begin, beside, node, told, x)
            _product(node, told, begin, beside, n, k, (start + n) * most + k, e0, -1, x)
            total = x.sum()
            if not total > 0:
                return np.nan
            for v in range(V):
                p[k, v] = x[v] / total
        gap = max(gap, agree(node, top, p, n, K))
    return gap


@_compiled
def _add_joint(tables: Any, slot: int, a: Any, b: Any, times: float, joint: Any, out: Any) -> None:
    """out (V, V) += the marginals of an edge, divided by ``times``. a, b : what others tell its ends."""
    total = 0.0
    for i in range(len(a)):
        for j in range(len(b)):
            joint[i, j] = tables[slot, 0, i, j] * a[i] * b[j]
            total += joint[i, j]
    if total > 0:
        for i in range(len(a)):
            for j in range(len(b)):
                out[i, j] += joint[i, j] / (total * times)


@_compiled
def solve(
    f: Any, pool: Any, there: Any, count: Any, first_edge: Any, ends: Any, row: Any, slot: Any,
    n_slots: int, scale: Any, times: Any, begin: Any, beside: Any, walk_begin: Any, walk: Any,
    after: Any, all_begin: Any, every: Any, n_up: Any, is_root: Any, split: Any, warm: bool,
    sweeps: int, tolerance: float, log_z: Any, nodes: Any, joints: Any, out_row: Any, gaps: Any,
    taken: Any, failed: Any, first: int, last: int,
) -> None:  # fmt: skip
    """Solves units first..last, each one example of one draw, draw by draw. Most arrays as in
    ``path_loops.solve``; a place is (b N + n) K + k. begin, beside : for each place its edges in that
    forest, and the direction of each towards it. walk_begin, walk : edges and directions on the way to it
    from the previous variable of its tree. after : the next variable of its tree, or -1.
    all_begin, every : for each example and forest all edges in both directions, each after those that it
    depends on; the first ``n_up`` lead to the roots."""
    (B, N, V), most, e_most = f.shape[1:], after.shape[1], max(1, (first_edge[1:] - first_edge[:-1]).max())
    node, told, top = np.empty((N, most, V)), np.ones((most, e_most, 2, V)), np.empty((N, most))
    p, joint, x, z = np.empty((most, V)), np.empty((V, V)), np.empty(V), np.empty(V)
    tables, table_top, ready = np.empty((n_slots, 2, V, V)), np.empty(n_slots), np.empty(n_slots, np.int64)
    for unit in range(first, last):
        s, b = unit // B, unit % B
        K, start, e0 = count[b], b * N, first_edge[b]
        ready.fill(0)
        for e in range(e0, first_edge[b + 1]):
            if ready[slot[e]] == 0:
                table_top[slot[e]] = exponentiate(pool[s, row[e]], scale[e], False, tables[slot[e], 0])
                tables[slot[e], 1] = tables[slot[e], 0].T
                ready[slot[e]] = 1
        load_nodes(f, s, b, K, there, split, warm, node, top)
        for k in range(K):
            for i in range(all_begin[b * most + k], all_begin[b * most + k + 1]):
                e, way = every[i, 0], every[i, 1]
                _renew(e, way, k, start, e0, ends, slot, tables, begin, beside, node, told, x)
        sweep, gap, total = 0, 0.0 if K == 1 else np.inf, 0.0
        while sweep < sweeps and gap > tolerance:  # ends once it is nan
            for forth in (True, False):
                gap = _sweep(forth, b, K, there, e0, ends, slot, tables, begin, beside, walk_begin, walk,
                             after, node, top, told, p, x)  # fmt: skip
            sweep += 1
        for k in range(K):
            for i in range(all_begin[b * most + k], all_begin[b * most + k + 1]):
                e, way = every[i, 0], every[i, 1]
                found = _renew(e, way, k, start, e0, ends, slot, tables, begin, beside, node, told, x)
                if i - all_begin[b * most + k] < n_up[b, k]:
                    total += np.log(found) + table_top[slot[e]]
                    continue
                # On the way from the roots, both messages of an edge are final.
                a = ends[e, way] - start
                _product(node, told, begin, beside, a, k, (start + a) * most + k, e0, e, z)
                if way == 1:
                    _add_joint(tables, slot[e], x, z, times[e], joint, joints[s, out_row[e]])
                else:
                    _add_joint(tables, slot[e], z, x, times[e], joint, joints[s, out_row[e]])
        total += _read_nodes(b, K, there, e0, begin, beside, node, top, told, is_root, x, nodes[s, b])
        keep_split(f, s, b, K, there, split, node, top)
        log_z[s, b], gaps[s, b], taken[s, b] = total / K, gap, sweep
        failed[s, b] = not total > -np.inf or gap != gap


@_compiled
def _read_nodes(
    b: int, K: int, there: Any, e0: int, begin: Any, beside: Any, node: Any, top: Any, told: Any,
    is_root: Any, x: Any, out: Any,
) -> float:  # fmt: skip
    """out (N, V) <- marginals of the variables of an example, averaged over forests. Returns the sum over
    forests of tops, and of the log of the sum at each root."""
    N, most, V = node.shape
    total = 0.0
    out.fill(0)
    for n in range(N):
        if not there[b, n]:
            continue
        for k in range(K):
            _product(node, told, begin, beside, n, k, (b * N + n) * most + k, e0, -1, x)
            whole = x.sum()
            total += top[n, k] + (np.log(whole) if is_root[b * N + n, k] else 0.0)
            if not whole > 0:
                return -np.inf
            for v in range(V):
                out[n, v] += x[v] / (whole * K)
    return total
