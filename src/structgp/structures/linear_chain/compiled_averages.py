"""``averages`` compiled by numba: one sequence at a time, in single precision and probability space.

The sixteen draws of a score lie side by side in memory and fill vector instructions, whatever the number of
labels. Letters as in ``averages``; L = S = 16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from structgp.structures.graph.lane_code import SINGLE_LANES
from structgp.structures.graph.lanes import (
    add,
    eight_sums,
    extremes,
    four_sums,
    invert,
    largest_square,
    multiply,
    row_sum,
    scale,
)
from structgp.structures.linear_chain.lane_exp import exp_in_place
from structgp.structures.linear_chain.lane_rows import FOUR, aligned, step

L = SINGLE_LANES
LARGEST = np.float32(60)
_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
_reordered = njit(
    cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz", "nnan"}
)


@_reordered
def _inner(x: Any, y: Any) -> Any:
    total = x.dtype.type(0)
    for i in range(L):
        total += x[i] * y[i]
    return total


@_compiled
def _messages(node: Any, table: Any, n: int, V: int, rest: Any, inverse: Any, told: Any) -> None:
    """rest (n, V, L) <- the message that each token gets from the rest of the sequence under each draw, on
    any scale. node : (n, V, L); table : (V, V, L); inverse, told : work space."""
    VL = V * L
    rest[:VL] = 1
    for t in range(n):
        if t:
            step(table, VL, L, V, told, rest, t * VL)
        for v in range(V):
            multiply(told, L * v, rest, t * VL + L * v, node, t * VL + L * v)
        row_sum(inverse, t * L, V, told, 0)
        invert(inverse, t * L, inverse, t * L)
        for v in range(V):
            multiply(told, L * v, told, L * v, inverse, t * L)
    for t in range(n - 2, -1, -1):
        # told[:VL] <- what the next token passes back; told[VL:] <- what of it arrives at this one
        for v in range(V):
            multiply(told, L * v, node, (t + 1) * VL + L * v, inverse, (t + 1) * L)
            if t + 2 < n:
                multiply(told, L * v, told, L * v, told, VL + L * v)
        step(table, L, VL, V, told, told, VL)
        for v in range(V):
            multiply(rest, t * VL + L * v, rest, t * VL + L * v, told, VL + L * v)


@_compiled
def _sums(
    out: Any, o: int, apart: int, rows: int, n: int, x: Any, i: int, step: int, across: int, b: Any, j: int,
    along: int,
) -> None:  # fmt: skip
    """``four_sums`` for any number of rows; up to three rows more are written."""
    row = 0
    while row < rows:
        if rows - row > FOUR:
            eight_sums(out, o + apart * row, apart, n, x, i + across * row, step, across, b, j, along)
            row += 2 * FOUR
        else:
            four_sums(out, o + apart * row, apart, n, x, i + across * row, step, across, b, j, along)
            row += FOUR


@_compiled
def _factors(mixed: Any, V: int, R: int, normal: Any, at: int, width: int, room: Any, out: Any) -> bool:
    """out (V, width) <- exp of mixed (V, R) times normal numbers (R, width), from ``at`` on: what these add
    to the score of each label. room : (L,) work space. Returns False if that is too much for single
    precision."""
    for first in range(0, width, L):
        _sums(out, first, width, V, R, mixed, 0, 1, R, normal, at + first, width)
    largest_square(room, 0, V * width // L, out, 0)
    is_safe = True
    for s in range(L):
        is_safe &= room[s] < LARGEST * LARGEST
    exp_in_place(out[: V * width])
    return is_safe


@_compiled
def _average(
    said: Any, factor: Any, mirror: int, V: int, half: int, weight: Any, total: Any, out: Any
) -> None:
    """out (V,) <- the probabilities of a token's labels, averaged over all draws and points. said : (V, L),
    the message to the token under each draw, times exp of its mean scores; factor : (V, K / 2), factors of
    each point, followed, from ``mirror`` on, by those of mirrored points; weight, total : work space."""
    other = (V + FOUR) * L
    for side in range(2):
        _sums(weight, 0, L, half, V, factor, side * mirror, half, 1, said, 0, L)
        for k in range(half):
            invert(weight, L * k, weight, L * k)
        _sums(total, side * other, L, V, half, factor, side * mirror, 1, half, weight, 0, L)
    for v in range(V):
        add(total, L * v, total, other + L * v)
        out[v] = _inner(total[L * v : L * v + L], said[L * v : L * v + L]) / (2 * half * L)


@_compiled
def _levels(mean: Any, open: Any, level: Any) -> None:
    """level (V,) <- exp of mean scores, scaled so that the highest is 1, and 0 for labels that are not
    open."""
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
    """Multiplies node (V, L) by level (V,). Returns the largest ratio of two numbers of one draw."""
    V, widest = len(level), np.float32(1)
    for v in range(V):
        scale(node, L * v, node, L * v, level, v)
    extremes(high, low, V, node, 0)
    for s in range(L):
        widest = max(widest, high[s] / low[s])
    return widest


@_compiled
def average_sequences(
    mean: Any, sd: Any, basis: Any, noise: Any, points: Any, table: Any, starts: Any, ends: Any,
    begin: Any, first: int, last: int, out: Any, spread: Any,
) -> None:  # fmt: skip
    """out (N, V) <- probabilities of the tokens of sequences first..last; spread (B,) <- for each sequence
    the largest ratio of two node potentials of a token under a draw.

    mean : (N, V); sd : (N, R); basis : (V, R); noise : (P R, L), mirrored; points : (R, K / 2), to be
    mirrored; table : (V, V, L), exponentials of the scores of transitions; starts, ends : (V,) whether a
    sequence may begin or end with a label; begin : (B + 1,) index of the first token of each sequence, and
    N."""
    V, R, half, VL = mean.shape[1], sd.shape[1], points.shape[1], mean.shape[1] * L
    positions, mirror, longest = len(noise) // R, (V + FOUR) * half, 0
    for b in range(first, last):
        longest = max(longest, begin[b + 1] - begin[b])
    node, rest = aligned(longest * VL, table), aligned(longest * VL, table)
    inverse = aligned(longest * L, table)
    told, mixed, factor = aligned(2 * VL, table), aligned((V + FOUR) * R, table), aligned(2 * mirror, table)
    weight, total, said = aligned(half * L, table), aligned(2 * VL + FOUR * L, table), aligned(VL, table)
    level, high, low = np.empty((longest, V), np.float32), aligned(L, table), aligned(L, table)
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
            if not _factors(mixed, V, R, normal, t % positions * R * L, L, high, here):
                spread[b] = np.inf
            spread[b] = max(spread[b], _put_levels(level[t], here, high, low))
        _messages(node, table, n, V, rest, inverse, told)
        for t in range(n):
            _mix(basis, sd[start + t], mixed)
            if not _factors(mixed, V, R, fixed, 0, half, high, factor):
                spread[b] = np.inf
            for i in range(0, V * half, L):
                invert(factor, mirror + i, factor, i)
            for v in range(V):
                scale(said, L * v, rest, t * VL + L * v, level[t], v)
            _average(said, factor, mirror, V, half, weight, total, out[start + t])
