"""log Z of a chain and its slopes, averaged over draws that differ from their mean by fixed amounts;
compiled by numba.

Exponentials of the amounts are taken once, so that an evaluation at another mean only multiplies. Eight
draws of a number lie side by side in memory and fill vector instructions, whatever the number of labels.
Letters: S draws in K blocks of L = 8, B sequences, T positions, V labels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from structgp.structures.graph.lanes import (
    LANES,
    add,
    add_four_outers,
    add_outer,
    invert,
    lane_sum,
    multiply,
    multiply_and_split,
    row_sum,
    scale_by,
)
from structgp.structures.linear_chain.lane_exp import exp_in_place
from structgp.structures.linear_chain.lane_rows import FOUR, aligned, step

L = LANES
LOG_2 = math.log(2)
CHAINS_AT_ONCE = 16
"""Sequences of a unit of work. Slopes of the table are summed unit by unit, so that the result does not
depend on the number of threads."""

_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})


@_compiled
def _levels(mean: Any, level: Any, n: int) -> Any:
    """level (n, V) <- exp of mean scores (n, V), the highest of each position as 1. Returns the sum of the
    highest, and the largest difference within a position."""
    total, widest = 0.0, 0.0
    for t in range(n):
        high, low = mean[t, 0], mean[t, 0]
        for v in range(mean.shape[1]):
            high, low = max(high, mean[t, v]), min(low, mean[t, v])
        for v in range(mean.shape[1]):
            level[t, v] = mean[t, v] - high
        total += high
        widest = max(widest, high - low)
    exp_in_place(level[:n].reshape(n * mean.shape[1]))
    return total, widest


@_compiled
def _forward(
    factor: Any, level: Any, table: Any, n: int, V: int, node: Any, prior: Any, alpha: Any, inverse: Any,
    room: Any,
) -> float:  # fmt: skip
    """node, prior, alpha (n, V, L) and inverse (n, L) <- potentials, what a position is told by the one
    before, messages that sum to 1, and 1 / what they summed to. Returns the sum of log Z over the draws.
    factor : (n, V, L); level : (n, V); table : (V, V, L); room : (3, L)."""
    VL = V * L
    prior[:VL] = 1
    room[:L], room[L : 2 * L] = 1, 0  # product of the scales, and exponents taken out of it
    for t in range(n):
        at = t * VL
        if t:
            step(table, VL, L, V, alpha[at - VL :], prior, at)
        for v in range(V):
            scale_by(node, at + L * v, factor, at + L * v, level[t, v])
            multiply(alpha, at + L * v, prior, at + L * v, node, at + L * v)
        row_sum(room, 2 * L, V, alpha, at)
        multiply_and_split(room, room[L:], 0, room, 2 * L)
        invert(inverse, t * L, room, 2 * L)
        for v in range(V):
            multiply(alpha, at + L * v, alpha, at + L * v, inverse, t * L)
    total = 0.0
    for s in range(L):
        total += math.log(room[s]) + LOG_2 * room[L + s]
    return total


@_compiled
def _backward(
    node: Any, prior: Any, inverse: Any, table: Any, n: int, V: int, passed: Any, nodes: Any, room: Any
) -> None:
    """passed (n, V, L) <- what a position passes back to the one before; nodes (n, V, L) += probabilities
    of labels. room : (V, L)."""
    VL = V * L
    for t in range(n - 1, -1, -1):
        at = t * VL
        if t < n - 1:
            step(table, L, VL, V, passed[at + VL :], room, 0)
        for v in range(V):
            here = at + L * v
            multiply(passed, here, node, here, inverse, t * L)
            if t < n - 1:
                multiply(passed, here, passed, here, room, L * v)
            multiply(node, here, prior, here, passed, here)
            add(nodes, here, node, here)


@_compiled
def _add_transitions(alpha: Any, passed: Any, n: int, V: int, weight: float, out: Any) -> None:
    """out (V, V, L) += weight times the sum over positions of alpha at t - 1 times passed at t."""
    VL, t = V * L, 1
    for at in range(0, n * VL, L):
        scale_by(passed, at, passed, at, weight)
    while t + FOUR <= n:
        for i in range(V):
            add_four_outers(out, i * VL, V, alpha, (t - 1) * VL + L * i, passed, t * VL, VL)
        t += FOUR
    while t < n:
        for i in range(V):
            add_outer(out, i * VL, V, alpha, (t - 1) * VL + L * i, passed, t * VL, VL)
        t += 1


@_compiled
def draw_totals(
    factor: Any, mean: Any, table: Any, lengths: Any, weight: Any, log_z: Any, widest: Any, nodes: Any,
    tables: Any, first: int, last: int,
) -> None:  # fmt: skip
    """Of the sequences of units first..last: log_z (B,) <- log Z averaged over draws, without what factors
    and tables were divided by; nodes (B, T, V) <- its slopes in the mean scores, times weight (B,); tables
    (units, V, V) <- those in the mean table, summed over the unit; widest (B,) <- the largest difference
    between mean scores of one position, nan where some draw lost all its labellings.

    factor : (B, K, T V L), exponentials of what draws add to the scores, at most 1; mean : (B, T, V); table
    : (K, V V L), exponentials of the scores of transitions."""
    B, T, V = mean.shape
    K, VL = len(table), mean.shape[2] * L
    node, prior = aligned(T * VL, mean), aligned(T * VL, mean)
    alpha, passed = aligned(T * VL, mean), aligned(T * VL, mean)
    inverse, room, summed = aligned(T * L, mean), aligned(max(V, 3) * L, mean), aligned(T * VL, mean)
    level, edges = np.empty((T, V)), np.empty((K, V * VL))
    for unit in range(first, last):
        edges[:] = 0
        for b in range(unit * CHAINS_AT_ONCE, min(B, (unit + 1) * CHAINS_AT_ONCE)):
            n, total = lengths[b], 0.0
            summed[: n * VL] = 0
            highest, widest[b] = _levels(mean[b], level, n)
            for k in range(K):
                total += _forward(factor[b, k], level, table[k], n, V, node, prior, alpha, inverse, room)
                _backward(node, prior, inverse, table[k], n, V, passed, summed, room)
                _add_transitions(alpha, passed, n, V, weight[b], edges[k])
            log_z[b], certain = highest + total / (K * L), 0.0
            for t in range(n):
                for v in range(V):
                    p = lane_sum(summed, t * VL + v * L) / (K * L)
                    nodes[b, t, v] = weight[b] * p
                    certain += p
            nodes[b, n:] = 0
            if not abs(certain - n) < 1e-6 * max(n, 1):
                widest[b] = np.nan
        for i in range(V):
            for j in range(V):
                at, total = (i * V + j) * L, 0.0
                for k in range(K):
                    for s in range(at, at + L):
                        total += edges[k, s] * table[k, s]
                tables[unit, i, j] = total / (K * L)
