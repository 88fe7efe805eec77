"""The sweeps of ``path_sweeps``, compiled by numba: one example of one draw at a time, in probability
space.

All messages of an example stay in the nearest caches, tables are exponentiated once for all sweeps, and
each example stops when it has converged. Variables go in the order of their places, which is an order of
levels too, so that the numbers agree with ``PathSweeps`` up to rounding. Within the loops, all is float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from structgp.structures.graph.cover import FLOOR
from structgp.structures.linear_chain.lane_exp import exp_in_place

LEAST = float(np.exp(FLOOR))
_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
_reordered = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})


@_reordered
def _times(tables: Any, slot: int, a: Any, out: Any, n: int, k: int) -> None:
    """out[n, k] <- tables[slot] a, four rows at a time: a number, once loaded, serves all of them."""
    V, row = len(a), 0
    while row + 4 <= V:
        w = x = y = z = 0.0
        for i in range(V):
            w += tables[slot, row, i] * a[i]
            x += tables[slot, row + 1, i] * a[i]
            y += tables[slot, row + 2, i] * a[i]
            z += tables[slot, row + 3, i] * a[i]
        out[n, k, row], out[n, k, row + 1], out[n, k, row + 2], out[n, k, row + 3] = w, x, y, z
        row += 4
    while row < V:
        w = 0.0
        for i in range(V):
            w += tables[slot, row, i] * a[i]
        out[n, k, row] = w
        row += 1


@_reordered
def _message(node: Any, other: Any, n: int, k: int, out: Any) -> float:
    """out (V,) <- node[n, k] other[n, k], scaled to sum to 1; returns the sum before."""
    total = 0.0
    for v in range(len(out)):
        out[v] = node[n, k, v] * other[n, k, v]
        total += out[v]
    if total > 0:
        factor = 1 / total
        for v in range(len(out)):
            out[v] *= factor
    return total


@_compiled
def exponentiate(x: Any, scale: float, flip: bool, out: Any) -> float:
    """out (V, V) <- exp(scale x - top), transposed if ``flip``; returns the top."""
    V, top = len(x), -np.inf
    for i in range(V):
        for j in range(V):
            top = max(top, x[i, j])
    if top == -np.inf:
        out.fill(0)
        return 0.0
    for i in range(V):
        for j in range(V):
            found = scale * (x[i, j] - top)
            if flip:
                out[j, i] = found
            else:
                out[i, j] = found
    exp_in_place(out.reshape(V * V))
    return scale * top


@_reordered
def _marginals(node: Any, prior: Any, beta: Any, n: int, K: int, p: Any) -> bool:
    """p (K, V) <- marginals of each forest at variable n; False if one has no label left."""
    for k in range(K):
        total = 0.0
        for v in range(p.shape[1]):
            p[k, v] = node[n, k, v] * prior[n, k, v] * beta[n, k, v]
            total += p[k, v]
        if not total > 0:
            return False
        factor = 1 / total
        for v in range(p.shape[1]):
            p[k, v] *= factor
    return True


@_compiled
def agree(node: Any, top: Any, p: Any, n: int, K: int) -> float:
    """Moves the node scores exp(h - top) of variable n so that its marginals p become their geometric mean;
    returns the largest difference from their mean before."""
    V, gap = p.shape[1], 0.0
    if K == 2:
        for v in range(V):
            gap = max(gap, abs(p[0, v] - p[1, v]) / 2)
            one, other = max(p[0, v], LEAST), max(p[1, v], LEAST)
            middle = np.sqrt(one * other)
            node[n, 0, v] *= middle / one
            node[n, 1, v] *= middle / other
    else:
        for v in range(V):
            mean = logs = 0.0
            for k in range(K):
                mean += p[k, v] / K
                logs += np.log(max(p[k, v], LEAST)) / K
            middle = np.exp(logs)
            for k in range(K):
                gap = max(gap, abs(p[k, v] - mean))
                node[n, k, v] *= middle / max(p[k, v], LEAST)
    for k in range(K):
        most = 0.0
        for v in range(V):
            most = max(most, node[n, k, v])
        if most > 0 and not 1e-60 < most < 1e60:  # a test costs less than a logarithm that can wait
            top[n, k] += np.log(most)
            for v in range(V):
                node[n, k, v] /= most
    return gap


@_compiled
def _back(
    n: int, K: int, out: Any, ends: Any, slot: Any, start: int, tables: Any, node: Any, beta: Any, a: Any
) -> None:
    """Renews the messages to variable n from all that follows it."""
    for k in range(K):
        edge = out[start + n, k]
        if edge < 0:
            for v in range(len(a)):
                beta[n, k, v] = 1.0
        else:
            _message(node, beta, ends[edge, 1] - start, k, a)
            _times(tables, slot[edge], a, beta, n, k)


@_compiled
def _forth(
    n: int,
    K: int,
    into: Any,
    ends: Any,
    slot: Any,
    start: int,
    tables_t: Any,
    node: Any,
    prior: Any,
    a: Any,
) -> None:
    """Renews the messages to variable n from all that comes before it."""
    for k in range(K):
        edge = into[start + n, k]
        if edge < 0:
            for v in range(len(a)):
                prior[n, k, v] = 1.0
        else:
            _message(node, prior, ends[edge, 0] - start, k, a)
            _times(tables_t, slot[edge], a, prior, n, k)


@_compiled
def load_nodes(
    f: Any, s: int, b: int, K: int, there: Any, split: Any, warm: bool, node: Any, top: Any
) -> None:
    """node (N, K, V) <- exp(h - top) of one example, and top (N, K)."""
    N, V = f.shape[2:]
    for n in range(N):
        if not there[b, n]:
            continue
        for v in range(V):
            mean = 0.0
            if warm:
                for k in range(K):
                    mean += split[s, b * N + n, k, v] / K
            for k in range(K):
                node[n, k, v] = f[s, b, n, v] + (split[s, b * N + n, k, v] - mean if warm else 0.0)
        for k in range(K):
            most = -np.inf
            for v in range(V):
                most = max(most, node[n, k, v])
            top[n, k] = most if most > -np.inf else 0.0
            for v in range(V):
                node[n, k, v] -= top[n, k]
            exp_in_place(node[n, k])


@_compiled
def keep_split(f: Any, s: int, b: int, K: int, there: Any, split: Any, node: Any, top: Any) -> None:
    """split of one example <- h - f, 0 at impossible labels."""
    N, V = f.shape[2:]
    for n in range(N):
        if there[b, n]:
            for k in range(K):
                for v in range(V):
                    found = np.log(max(node[n, k, v], 1e-300)) + top[n, k] - f[s, b, n, v]
                    split[s, b * N + n, k, v] = found if f[s, b, n, v] > -np.inf else 0.0


@_compiled
def solve(
    f: Any, pool: Any, there: Any, count: Any, first_edge: Any, ends: Any, into: Any, out: Any, row: Any,
    slot: Any, n_slots: int, scale: Any, times: Any, flip: Any, split: Any, warm: bool, sweeps: int,
    tolerance: float, log_z: Any, nodes: Any, joints: Any, out_row: Any, gaps: Any, taken: Any, failed: Any,
    first: int, last: int,
) -> None:  # fmt: skip
    """Solves units first..last of draws and examples, draw by draw. Arrays as in ``PathPlan``, and: pool
    (S, R, V, V) tables; row (M,) the table of each edge; slot (M,) edges of an example with the same slot
    share a table; count (B,) forests; times (M,) forests that have the edge; out_row (M,) where in joints
    (S, R', V, V) its gradient goes. split (S, B N, K, V) is read if ``warm``, and written."""
    (B, N, V), most = f.shape[1:], into.shape[1]
    node, prior, beta = np.empty((N, most, V)), np.empty((N, most, V)), np.empty((N, most, V))
    p, joint, top, a = np.empty((most, V)), np.empty((V, V)), np.empty((N, most)), np.empty(V)
    tables, tables_t = np.empty((n_slots, V, V)), np.empty((n_slots, V, V))
    table_top, done = np.empty(n_slots), np.empty(n_slots, np.int64)
    for unit in range(first, last):
        s, b = unit // B, unit % B
        K, start = count[b], b * N
        done.fill(0)
        for e in range(first_edge[b], first_edge[b + 1]):
            if done[slot[e]] == 0:
                table_top[slot[e]] = exponentiate(pool[s, row[e]], scale[e], flip[e], tables[slot[e]])
                tables_t[slot[e]] = tables[slot[e]].T
                done[slot[e]] = 1
        load_nodes(f, s, b, K, there, split, warm, node, top)
        for n in range(N - 1, -1, -1):
            if there[b, n]:
                _back(n, K, out, ends, slot, start, tables, node, beta, a)
        ok, sweep, gap = True, 0, 0.0 if K == 1 else np.inf
        while sweep < sweeps and gap > tolerance and ok:
            sweep, gap = sweep + 1, 0.0
            for n in range(N):
                if there[b, n]:
                    _forth(n, K, into, ends, slot, start, tables_t, node, prior, a)
                    ok = ok and _marginals(node, prior, beta, n, K, p)
                    agree(node, top, p, n, K)
            for n in range(N - 1, -1, -1):
                if there[b, n]:
                    _back(n, K, out, ends, slot, start, tables, node, beta, a)
                    ok = ok and _marginals(node, prior, beta, n, K, p)
                    gap = max(gap, agree(node, top, p, n, K))
        total = 0.0
        for n in range(N):
            nodes[s, b, n].fill(0)
            if there[b, n]:
                _forth(n, K, into, ends, slot, start, tables_t, node, prior, a)
                ok = ok and _marginals(node, prior, beta, n, K, p)
                for k in range(K):
                    total += top[n, k] + np.log(_message(node, prior, n, k, a))
                    for v in range(V):
                        nodes[s, b, n, v] += p[k, v] / K
                    edge = into[start + n, k]
                    if edge >= 0:
                        total += table_top[slot[edge]]
                        _message(node, prior, ends[edge, 0] - start, k, a)
                        _joint(tables, slot[edge], a, node, beta, n, k, joint)
                        _add(joint, times[edge], flip[edge], joints, s, out_row[edge])
        keep_split(f, s, b, K, there, split, node, top)
        log_z[s, b], gaps[s, b], taken[s, b] = total / K, gap, sweep
        failed[s, b] = not (ok and total > -np.inf)


@_reordered
def _joint(tables: Any, slot: int, before: Any, node: Any, beta: Any, n: int, k: int, out: Any) -> None:
    """out (V, V) <- marginals of an edge into variable n."""
    V, total = len(out), 0.0
    for i in range(V):
        for j in range(V):
            out[i, j] = before[i] * tables[slot, i, j] * (node[n, k, j] * beta[n, k, j])
            total += out[i, j]
    if total > 0:
        factor = 1 / total
        for i in range(V):
            for j in range(V):
                out[i, j] *= factor


@_compiled
def _add(joint: Any, times: float, flip: bool, joints: Any, s: int, row: int) -> None:
    V, share = len(joint), 1 / times
    for i in range(V):
        for j in range(V):
            joints[s, row, i, j] += share * (joint[j, i] if flip else joint[i, j])
