"""The sweeps of ``path_loops`` for eight draws of an example side by side, where at most two forests cover
it.

Most of the time goes into vectors with one number per label, too short to fill vector instructions; eight
draws fill them whatever the number of labels. A group of draws goes on until all of them have converged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from structgp.structures.graph.lane_code import LANES
from structgp.structures.graph.lanes import (
    add,
    agree_two,
    dot,
    extremes,
    four_dots,
    invert,
    multiply,
    product_sum,
    row_sum,
)
from structgp.structures.graph.path_loops import LEAST
from structgp.structures.linear_chain.lane_exp import _bits, _float, exp_in_place

_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})


@_compiled
def room(n: int) -> Any:
    """An array of n numbers that begins where a cache line does."""
    whole = np.empty(n + LANES)
    first = (-(whole.ctypes.data // 8)) % LANES
    return whole[first : first + n]


@_compiled
def log_in_place(x: Any) -> None:
    """Logarithms of numbers from 1e-300 on, to 1e-12: with x = 2^k m, log m = 2 artanh((m - 1) / (m +
    1))."""
    for i in range(len(x)):
        bits = _bits(x[i])
        k = (bits - 4604544271217802189) >> 52  # the bits of the root of 1/2
        m = _float(bits - (k << 52))
        s = (m - 1) / (m + 1)
        t = s * s
        p = 1 / 13 + t / 15
        p = 1 / 11 + t * p
        p = 1 / 9 + t * p
        p = 1 / 7 + t * p
        p = 1 / 5 + t * p
        p = 1 / 3 + t * p
        x[i] = k * 0.6931471805599453 + 2 * s * (1 + t * p)


@_compiled
def _message(node: Any, other: Any, at: int, V: int, a: Any, total: Any, factor: Any) -> None:
    """a (V, 8) <- node other at ``at``, scaled to sum to 1; total (8,) <- the sum before."""
    for v in range(V):
        multiply(a, 8 * v, node, at + 8 * v, other, at + 8 * v)
    row_sum(total, 0, V, a, 0)
    invert(factor, 0, total, 0)
    for v in range(V):
        multiply(a, 8 * v, a, 8 * v, factor, 0)


@_compiled
def _times(tables: Any, j: int, step: int, across: int, V: int, a: Any, out: Any, o: int) -> None:
    """out (V, 8) <- a table times a. step, across : distance from a number to the next in its row, and to
    the next row."""
    row = 0
    while row + 4 <= V:
        four_dots(out, o + 8 * row, V, a, tables, j + across * row, step, across)
        row += 4
    while row < V:
        dot(out, o + 8 * row, V, a, tables, j + across * row, step)
        row += 1


@_compiled
def _tell(
    n: int, K: int, most: int, V: int, forth: bool, side: Any, ends: Any, slot: Any, start: int, tables:
    Any, node: Any, told: Any, a: Any, total: Any, factor: Any,
) -> None:  # fmt: skip
    """Renews the messages to variable n from all before it (``forth``), or from all that follows."""
    for k in range(K):
        edge, at = side[start + n, k], (n * most + k) * 8 * V
        if edge < 0:
            told[at : at + 8 * V] = 1.0
        else:
            other = ends[edge, 0 if forth else 1] - start
            _message(node, told, (other * most + k) * 8 * V, V, a, total, factor)
            step, across = (8 * V, 8) if forth else (8, 8 * V)
            _times(tables, slot[edge] * 8 * V * V, step, across, V, a, told, at)


@_compiled
def _move(
    n: int, most: int, V: int, node: Any, prior: Any, beta: Any, total: Any, factor: Any, gap: Any
) -> bool:
    """Makes both forests agree on variable n; False if a draw has no label left."""
    at, ok = n * most * 8 * V, True
    for k in range(2):
        product_sum(total, 0, V, node, prior, beta, at + 8 * V * k)
        invert(factor, 8 * k, total, 0)
        for lane in range(LANES):
            ok = ok and total[lane] > 0
    for v in range(V):
        agree_two(node, at + 8 * v, at + 8 * (V + v), prior, beta, factor, gap, LEAST)
    return ok


@_compiled
def _rescale(n: int, K: int, most: int, V: int, node: Any, top: Any, high: Any, low: Any) -> None:
    """Keeps node scores in a range where they neither overflow nor vanish."""
    for k in range(K):
        at = (n * most + k) * V * 8
        extremes(high, low, V, node, at)
        for lane in range(LANES):
            largest = high[lane]
            if largest > 0 and not 1e-60 < largest < 1e60:
                top[(n * most + k) * 8 + lane] += np.log(largest)
                for v in range(V):
                    node[at + 8 * v + lane] /= largest


@_compiled
def _load_tables(
    pool: Any, draws: Any, e: int, row: int, scale: float, flip: bool, tables: Any, tops: Any, sums: Any
) -> None:
    """Table e (V, V, 8) <- exp(scale x - top) of each draw, transposed if ``flip``, and its tops (8,); its
    sums <- 0."""
    V = pool.shape[-1]
    first = e * 8 * V * V
    for lane in range(LANES):
        x, top = pool[draws[lane], row], -np.inf
        for i in range(V):
            for j in range(V):
                top = max(top, x[i, j])
        top = top if top > -np.inf else 0.0
        tops[8 * e + lane] = scale * top
        for i in range(V):
            for j in range(V):
                place = j * V + i if flip else i * V + j
                tables[first + 8 * place + lane] = scale * (x[i, j] - top)
    exp_in_place(tables[first : first + 8 * V * V])
    sums[first : first + 8 * V * V] = 0.0


@_compiled
def _load_nodes(
    f: Any, draws: Any, b: int, K: int, most: int, there: Any, split: Any, warm: bool, node: Any, top: Any
) -> None:
    """node (N, K, V, 8) <- exp(h - top) of one example, and top (N, K, 8)."""
    N, V = f.shape[2:]
    for n in range(N):
        if not there[b, n]:
            continue
        for lane in range(LANES):
            s = draws[lane]
            for k in range(K):
                at, highest = (n * most + k) * 8 * V + lane, -np.inf
                for v in range(V):
                    h = f[s, b, n, v]
                    if warm and K == 2:
                        h += 0.5 * (split[s, b * N + n, k, v] - split[s, b * N + n, 1 - k, v])
                    node[at + 8 * v] = h
                    highest = max(highest, h)
                highest = highest if highest > -np.inf else 0.0
                top[(n * most + k) * 8 + lane] = highest
                for v in range(V):
                    node[at + 8 * v] -= highest
        exp_in_place(node[n * most * 8 * V : (n * most + K) * 8 * V])


@_compiled
def _keep_split(
    f: Any, draws: Any, count: int, b: int, K: int, most: int, there: Any, split: Any, node: Any, top: Any
) -> None:
    """split of one example <- h - f, 0 at impossible labels; node is changed to logarithms."""
    N, V = f.shape[2:]
    for n in range(N):
        if there[b, n]:
            some = node[n * most * 8 * V : (n * most + K) * 8 * V]
            for i in range(len(some)):
                some[i] = max(some[i], 1e-300)
            log_in_place(some)
            for lane in range(count):
                s = draws[lane]
                for k in range(K):
                    for v in range(V):
                        found = (
                            some[(k * V + v) * 8 + lane] + top[(n * most + k) * 8 + lane] - f[s, b, n, v]
                        )
                        split[s, b * N + n, k, v] = found if f[s, b, n, v] > -np.inf else 0.0


@_compiled
def _add_joint(
    tables: Any, e: int, V: int, a: Any, c: Any, share: float, joint: Any, total: Any, sums: Any
) -> None:
    """sums of table e (V, V, 8) += share times the marginals of an edge: a (V, 8) times table times c
    (V, 8), scaled to sum to 1."""
    first = e * 8 * V * V
    total[:] = 0.0
    for i in range(V):
        for j in range(V):
            at = 8 * (i * V + j)
            multiply(joint, at, tables, first + at, c, 8 * j)
            multiply(joint, at, joint, at, a, 8 * i)
            add(total, 0, joint, at)
    for lane in range(LANES):
        total[lane] = share / total[lane] if total[lane] > 0 else 0.0
    for i in range(V * V):
        multiply(joint, 8 * i, joint, 8 * i, total, 0)
        add(sums, first + 8 * i, joint, 8 * i)


@_compiled
def _sweep(
    there: Any, K: int, most: int, V: int, into: Any, out: Any, ends: Any, slot: Any, start: int,
    tables: Any, node: Any, prior: Any, beta: Any, top: Any, a: Any, total: Any, factor: Any, gap: Any,
    high: Any, low: Any,
) -> bool:  # fmt: skip
    """Goes forth and back over the variables of one example; gap (8,) <- the largest gap on the way back.
    False if a draw has no label left."""
    ok = True
    for n in range(len(there)):
        if there[n]:
            _tell(n, K, most, V, True, into, ends, slot, start, tables, node, prior, a, total, factor)
            ok = _move(n, most, V, node, prior, beta, total, factor, gap) and ok
    gap[:] = 0.0
    for n in range(len(there) - 1, -1, -1):
        if there[n]:
            _tell(n, K, most, V, False, out, ends, slot, start, tables, node, beta, a, total, factor)
            ok = _move(n, most, V, node, prior, beta, total, factor, gap) and ok
            _rescale(n, K, most, V, node, top, high, low)
    return ok


@_compiled
def _leave_node(
    at: int, V: int, K: int, node: Any, prior: Any, c: Any, a: Any, total: Any, factor: Any, value: Any,
    nodes: Any, draws: Any, in_group: int, b: int, n: int,
) -> bool:  # fmt: skip
    """Adds a forest's marginals of variable n, from c = node beta (V, 8), to nodes, and the logarithm of
    the sum of its forward message to value (8,). False if a draw has no label left."""
    ok = True
    for v in range(V):
        multiply(a, 8 * v, c, 8 * v, prior, at + 8 * v)
    row_sum(total, 0, V, a, 0)
    invert(factor, 0, total, 0)
    for lane in range(in_group):
        ok = ok and total[lane] > 0
        for v in range(V):
            nodes[draws[lane], b, n, v] += a[8 * v + lane] * factor[lane] / K
    _message(node, prior, at, V, a, total, factor)
    for lane in range(in_group):
        value[lane] += np.log(total[lane])
    return ok


@_compiled
def solve_lanes(
    f: Any, pool: Any, there: Any, count: Any, first_edge: Any, ends: Any, into: Any, out: Any, row: Any,
    slot: Any, n_slots: int, scale: Any, times: Any, flip: Any, split: Any, warm: bool, sweeps: int,
    tolerance: float, log_z: Any, nodes: Any, joints: Any, out_row: Any, gaps: Any, taken: Any, failed: Any,
    first: int, last: int,
) -> None:  # fmt: skip
    """Solves units first..last, each a group of draws of one example, group by group; else as
    ``path_loops.solve``, but nodes must start as zeros. Lanes without a draw repeat the last one."""
    (S, B, N, V), most = f.shape, into.shape[1]
    node, prior, beta = room(N * most * V * 8), room(N * most * V * 8), room(N * most * V * 8)
    tables, sums, joint = room(n_slots * V * V * 8), room(n_slots * V * V * 8), room(V * V * 8)
    top, tops, a, c = room(N * most * 8), room(n_slots * 8), room(V * 8), room(V * 8)
    total, factor, gap, high, low = room(8), room(16), room(8), room(8), room(8)
    value, draws, edge_of = room(8), np.empty(LANES, np.int64), np.empty(n_slots, np.int64)
    for unit in range(first, last):
        group, b = unit // B, unit % B
        K, start, in_group = count[b], b * N, min(LANES, S - LANES * group)
        draws[:] = LANES * group + np.minimum(np.arange(LANES), in_group - 1)
        edge_of.fill(-1)
        for e in range(first_edge[b], first_edge[b + 1]):
            if edge_of[slot[e]] < 0:
                edge_of[slot[e]] = e
                _load_tables(pool, draws, slot[e], row[e], scale[e], flip[e], tables, tops, sums)
        _load_nodes(f, draws, b, K, most, there, split, warm, node, top)
        for n in range(N - 1, -1, -1):
            if there[b, n]:
                _tell(n, K, most, V, False, out, ends, slot, start, tables, node, beta, a, total, factor)
        ok, sweep, largest = True, 0, 0.0 if K == 1 else np.inf
        gap[:], value[:] = 0.0, 0.0
        while sweep < sweeps and largest > tolerance and ok:
            sweep += 1
            ok = _sweep(
                there[b], K, most, V, into, out, ends, slot, start, tables, node, prior, beta, top, a,
                total, factor, gap, high, low,
            )  # fmt: skip
            largest = gap.max()
        for n in range(N):
            if not there[b, n]:
                continue
            _tell(n, K, most, V, True, into, ends, slot, start, tables, node, prior, a, total, factor)
            for k in range(K):
                at, edge = (n * most + k) * 8 * V, into[start + n, k]
                for v in range(V):
                    multiply(c, 8 * v, node, at + 8 * v, beta, at + 8 * v)
                if edge >= 0:
                    other = (ends[edge, 0] - start) * most + k
                    _message(node, prior, other * 8 * V, V, a, total, factor)
                    _add_joint(tables, slot[edge], V, a, c, 1 / times[edge], joint, total, sums)
                    add(value, 0, tops, slot[edge] * 8)
                add(value, 0, top, (n * most + k) * 8)
                given = at, V, K, node, prior, c, a, total, factor, value, nodes, draws, in_group, b, n
                ok = _leave_node(*given) and ok
        for e in range(n_slots):
            if edge_of[e] >= 0:
                _leave_sums(sums, e, V, flip[edge_of[e]], joints, draws, in_group, out_row[edge_of[e]])
        _keep_split(f, draws, in_group, b, K, most, there, split, node, top)
        for lane in range(in_group):
            s = draws[lane]
            log_z[s, b], gaps[s, b], taken[s, b] = value[lane] / K, gap[lane], sweep
            failed[s, b] = not (ok and value[lane] > -np.inf)


@_compiled
def _leave_sums(
    sums: Any, e: int, V: int, flip: bool, joints: Any, draws: Any, in_group: int, row: int
) -> None:
    for lane in range(in_group):
        for i in range(V):
            for j in range(V):
                place = j * V + i if flip else i * V + j
                joints[draws[lane], row, i, j] += sums[(e * V * V + place) * 8 + lane]
