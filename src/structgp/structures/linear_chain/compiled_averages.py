"""``averages`` compiled by numba: one sequence at a time, in single precision and probability space.

The sixteen draws of a score lie side by side in memory and fill vector instructions, whatever the number of
labels. Letters as in ``averages``; L = S = 16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from structgp.structures.graph.lanes import (
    SINGLE_LANES,
    dot,
    extremes,
    four_dots,
    four_sums,
    invert,
    multiply,
    row_sum,
)
from structgp.structures.linear_chain.lane_exp import exp_in_place

L = SINGLE_LANES
FOUR, LARGEST = 4, np.float32(60)
_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
_reordered = njit(
    cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz", "nnan"}
)


@_reordered
def _furthest(x: Any) -> Any:
    """The largest absolute value."""
    high = low = x.dtype.type(0)
    for i in range(len(x)):
        high, low = max(high, x[i]), min(low, x[i])
    return max(high, -low)


@_reordered
def _inner(x: Any, y: Any) -> Any:
    total = x.dtype.type(0)
    for i in range(L):
        total += x[i] * y[i]
    return total


@_compiled
def _room(n: int) -> Any:
    """n numbers that begin where a cache line does, with room behind them for the last block of four
    rows."""
    whole = np.zeros(n + (FOUR + 1) * L, np.float32)
    first = (-(whole.ctypes.data // 4)) % L
    return whole[first:]


@_compiled
def _step(table: Any, along: int, across: int, V: int, told: Any, out: Any, o: int) -> None:
    """out[o + L j] <- the sum over i of told[L i] table[along i + across j]."""
    row = 0
    while row + FOUR <= V:
        four_dots(out, o + L * row, V, told, table, across * row, along, across)
        row += FOUR
    while row < V:
        dot(out, o + L * row, V, told, table, across * row, along)
        row += 1


@_compiled
def _messages(node: Any, table: Any, n: int, V: int, rest: Any, inverse: Any, told: Any) -> None:
    """rest (n, V, L) <- what the rest of the sequence says of each token under each draw, in any scale.
    node : (n, V, L); table : (V, V, L); inverse, told : room."""
    VL = V * L
    rest[:VL] = 1
    for t in range(n):
        if t:
            _step(table, VL, L, V, told, rest, t * VL)
        for v in range(V):
            multiply(told, L * v, rest, t * VL + L * v, node, t * VL + L * v)
        row_sum(inverse, t * L, V, told, 0)
        invert(inverse, t * L, inverse, t * L)
        for v in range(V):
            multiply(told, L * v, told, L * v, inverse, t * L)
    for t in range(n - 2, -1, -1):
        # told[:VL] <- what the next token passes back; told[VL:] <- what that says of this one
        for v in range(V):
            multiply(told, L * v, node, (t + 1) * VL + L * v, inverse, (t + 1) * L)
            if t + 2 < n:
                multiply(told, L * v, told, L * v, told, VL + L * v)
        _step(table, L, VL, V, told, told, VL)
        for v in range(V):
            multiply(rest, t * VL + L * v, rest, t * VL + L * v, told, VL + L * v)


@_compiled
def _factors(mixed: Any, V: int, R: int, normal: Any, at: int, width: int, out: Any, apart: int) -> bool:
    """out[apart v : apart v + width] <- exp of what normal numbers (R, width), from ``at`` on, add to the
    score of each label. mixed : (V, R). False where that is too much for single precision."""
    for first in range(0, width, L):
        for v in range(0, V, FOUR):
            four_sums(out, apart * v + first, apart, R, mixed, v * R, 1, R, normal, at + first, width)
    is_safe = True
    for v in range(V):
        row = out[apart * v : apart * v + width]
        is_safe &= _furthest(row) < LARGEST
        exp_in_place(row)
    return is_safe


@_compiled
def _average(said: Any, factor: Any, V: int, K: int, weight: Any, total: Any, out: Any) -> None:
    """out (V,) <- the probabilities of a token's labels, averaged over all draws and points. said : (V, L),
    what a draw says of the token; factor : (V, K), what a point says of it; weight, total : room."""
    for k in range(0, K, FOUR):
        four_sums(weight, L * k, L, V, factor, k, K, 1, said, 0, L)
    for k in range(K):
        invert(weight, L * k, weight, L * k)
    for v in range(0, V, FOUR):
        four_sums(total, L * v, L, K, factor, v * K, 1, K, weight, 0, L)
    for v in range(V):
        out[v] = _inner(total[L * v : L * v + L], said[L * v : L * v + L]) / (L * K)


@_compiled
def _levels(mean: Any, open: Any, level: Any) -> None:
    """level (V,) <- exp of mean scores, the highest as 1, and 0 for labels that are not open."""
    high = np.float32(-np.inf)
    for v in range(len(mean)):
        high = max(high, mean[v]) if open[v] else high
    for v in range(len(mean)):
        level[v] = mean[v] - high if open[v] else -np.inf
    exp_in_place(level)


@_compiled
def _mix(basis: Any, sd: Any, mixed: Any) -> None:
    """mixed (V, R) <- basis (V, R) times sd (R,)."""
    V, R = basis.shape
    for v in range(V):
        for r in range(R):
            mixed[v * R + r] = basis[v, r] * sd[r]


@_compiled
def _put_levels(level: Any, node: Any, high: Any, low: Any) -> Any:
    """node (V, L) is multiplied by level (V,). Returns the largest ratio of two numbers of one draw."""
    V, widest = len(level), np.float32(1)
    for v in range(V):
        for i in range(L * v, L * v + L):
            node[i] *= level[v]
    extremes(high, low, V, node, 0)
    for s in range(L):
        widest = max(widest, high[s] / low[s])
    return widest


@_compiled
def average_sequences(
    mean: Any, sd: Any, basis: Any, noise: Any, points: Any, table: Any, starts: Any, ends: Any,
    begin: Any, first: int, last: int, out: Any, spread: Any,
) -> None:  # fmt: skip
    """out (N, V) <- probabilities of the tokens of sequences first..last; spread (B,) <- the largest ratio
    of two node potentials of a token under a draw, of each sequence.

    mean : (N, V); sd : (N, R); basis : (V, R); noise : (P R, L), mirrored; points : (R, K / 2), to be
    mirrored; table : (V, V, L), exponentials of the scores of transitions; starts, ends : (V,) whether a
    sequence may begin or end with a label; begin : (B + 1,) where sequences begin among the tokens."""
    V, R, half, VL = mean.shape[1], sd.shape[1], points.shape[1], mean.shape[1] * L
    positions, K, longest = len(noise) // R, 2 * half, 0
    for b in range(first, last):
        longest = max(longest, begin[b + 1] - begin[b])
    node, rest, inverse = _room(longest * VL), _room(longest * VL), _room(longest * L)
    told, mixed, factor = _room(2 * VL), _room((V + FOUR) * R), _room((V + FOUR) * K)
    weight, total, said = _room(K * L), _room(VL), _room(VL)
    level, high, low = np.empty((longest, V), np.float32), _room(L), _room(L)
    normal, fixed, table, open = noise.ravel(), points.ravel(), table.ravel(), np.ones(V, np.bool_)
    for b in range(first, last):
        start, n = begin[b], begin[b + 1] - begin[b]
        spread[b] = 1
        for t in range(n):
            open[:] = True
            if t == 0:
                open &= starts
            if t == n - 1:
                open &= ends
            _levels(mean[start + t], open, level[t])
            _mix(basis, sd[start + t], mixed)
            here = node[t * VL :]
            if not _factors(mixed, V, R, normal, t % positions * R * L, L, here, L):
                spread[b] = np.inf
            spread[b] = max(spread[b], _put_levels(level[t], here, high, low))
        _messages(node, table, n, V, rest, inverse, told)
        for t in range(n):
            _mix(basis, sd[start + t], mixed)
            if not _factors(mixed, V, R, fixed, 0, half, factor, K):
                spread[b] = np.inf
            for v in range(V):
                for k in range(half):
                    factor[K * v + half + k] = 1 / factor[K * v + k]
                for i in range(L * v, L * v + L):
                    said[i] = rest[t * VL + i] * level[t, v]
            _average(said, factor, V, K, weight, total, out[start + t])
