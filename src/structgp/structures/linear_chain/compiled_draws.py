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

from structgp.structures.graph.lane_code import LANES
from structgp.structures.graph.lanes import (
    add,
    add_four_outers,
    add_outer,
    dot,
    four_dots,
    invert,
    lane_sum,
    multiply,
    multiply_and_split,
    row_sum,
    scale_by,
)
from structgp.structures.linear_chain.lane_exp import exp_in_place

L = LANES
FOUR, LOG_2 = 4, math.log(2)
CHAINS_AT_ONCE = 16
"""Sequences of a unit of work. Slopes of the table are summed unit by unit, so that the result does not
depend on the number of threads."""

_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})


@_compiled
def _room(n: int) -> Any:
    """n numbers that begin where a cache line does, with room behind them for the last block of four."""
    whole = np.zeros(n + (FOUR + 1) * L)
    first = (-(whole.ctypes.data // 8)) % L
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
            _step(table, VL, L, V, alpha[at - VL :], prior, at)
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
            _step(table, L, VL, V, passed[at + VL :], room, 0)
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
def _tables(edge: Any, mean: Any) -> Any:
    """(K, V V L) edge, exponentials of what draws add to the table, times those of the mean table (V, V),
    whose largest entry counts as 1."""
    V, found = len(mean), np.empty_like(edge)
    level = (mean - mean.max()).reshape(V * V)
    exp_in_place(level)
    for k in range(len(edge)):
        for i in range(V * V):
            scale_by(found[k], i * L, edge[k], i * L, level[i])
    return found


@_compiled
def draw_totals(
    factor: Any, edge: Any, mean: Any, table: Any, lengths: Any, weight: Any, known: Any, sign: float,
    log_z: Any, widest: Any, nodes: Any, tables: Any, first: int, last: int,
) -> None:  # fmt: skip
    """Of the sequences of units first..last: log_z (B,) <- log Z averaged over draws, without what factors
    and tables were divided by, less the mean scores of known labels; nodes (B, T, V) <- its slopes in the
    mean scores, times sign and weight (B,); tables (units, V, V) <- those of log Z in the mean table, times
    weight, summed over the unit; widest (B,) <- the largest difference between mean scores of one position,
    nan where some draw lost all its labellings.

    factor : (B, K, T V L) and edge : (K, V V L), exponentials of what draws add to the scores, at most 1;
    mean : (B, T, V) and table : (V, V), mean scores; known : (B, T) labels, -1 where there is none."""
    B, T, V = mean.shape
    K, VL, edge = len(edge), mean.shape[2] * L, _tables(edge, table)
    node, prior, alpha, passed = _room(T * VL), _room(T * VL), _room(T * VL), _room(T * VL)
    inverse, room, summed = _room(T * L), _room(max(V, 3) * L), _room(T * VL)
    level, edges = np.empty((T, V)), np.empty((K, V * VL))
    for unit in range(first, last):
        edges[:] = 0
        for b in range(unit * CHAINS_AT_ONCE, min(B, (unit + 1) * CHAINS_AT_ONCE)):
            n, total = lengths[b], 0.0
            summed[: n * VL] = 0
            highest, widest[b] = _levels(mean[b], level, n)
            for k in range(K):
                total += _forward(factor[b, k], level, edge[k], n, V, node, prior, alpha, inverse, room)
                _backward(node, prior, inverse, edge[k], n, V, passed, summed, room)
                _add_transitions(alpha, passed, n, V, weight[b], edges[k])
            log_z[b], certain = highest + total / (K * L), 0.0
            for t in range(n):
                for v in range(V):
                    p = lane_sum(summed, t * VL + v * L) / (K * L)
                    nodes[b, t, v] = sign * weight[b] * p
                    certain += p
                if known[b, t] >= 0:
                    log_z[b] -= mean[b, t, known[b, t]]
                    nodes[b, t, known[b, t]] -= sign * weight[b]
            nodes[b, n:] = 0
            if not abs(certain - n) < 1e-6 * max(n, 1):
                widest[b] = np.nan
        for i in range(V):
            for j in range(V):
                at, total = (i * V + j) * L, 0.0
                for k in range(K):
                    for s in range(at, at + L):
                        total += edges[k, s] * edge[k, s]
                tables[unit, i, j] = total / (K * L)


@_compiled
def _in_lanes(basis: Any) -> Any:
    """(R, V, L) the columns of basis (V, R), each number as often as there are lanes."""
    V, R = basis.shape
    found = _room(R * V * L)
    for r in range(R):
        for v in range(V):
            found[(r * V + v) * L : (r * V + v + 1) * L] = basis[v, r]
    return found


@_compiled
def _add_squares(p: Any, n: int, V: int, basis: Any, R: int, told: Any, out: Any) -> None:
    """out (n, R) += the sum over draws of (p basis)^2, of probabilities p (n, V, L) and basis (R, V, L).
    told : (R, L) room."""
    VL = V * L
    for t in range(n):
        here, r = p[t * VL :], 0
        while r + FOUR <= R:
            four_dots(told, L * r, V, here, basis, VL * r, L, VL)
            r += FOUR
        while r < R:
            dot(told, L * r, V, here, basis, VL * r, L)
            r += 1
        for r in range(R):
            multiply(told, L * r, told, L * r, told, L * r)
            out[t, r] += lane_sum(told, L * r)


@_compiled
def draw_variances(
    factor: Any, edge: Any, mean: Any, table: Any, lengths: Any, basis: Any, squares: Any, widest: Any,
    nodes: Any, tables: Any, first: int, last: int,
) -> None:  # fmt: skip
    """Of the sequences of units first..last, averaged over draws: nodes (B, T, R) <- the variance of each
    column of basis (V, R) under the label probabilities of a position; tables (B, V, V) <- p (1 - p) of
    each label with the next one, summed over positions. squares : of the basis. The others as of
    ``draw_totals``."""
    B, T, V = mean.shape
    K, VL, R, edge = len(edge), mean.shape[2] * L, basis.shape[1], _tables(edge, table)
    node, prior, alpha, passed = _room(T * VL), _room(T * VL), _room(T * VL), _room(T * VL)
    inverse, room, summed = _room(T * L), _room(max(V, 3) * L), _room(T * VL)
    level, once, twice = np.empty((T, V)), np.empty(V * VL), np.empty(V * VL)
    told, share, columns = _room(R * L), np.empty(V), _in_lanes(basis)
    for b in range(first * CHAINS_AT_ONCE, min(B, last * CHAINS_AT_ONCE)):
        n, certain = lengths[b], 0.0
        summed[: n * VL], nodes[b], tables[b] = 0, 0, 0
        _, widest[b] = _levels(mean[b], level, n)
        for k in range(K):
            _forward(factor[b, k], level, edge[k], n, V, node, prior, alpha, inverse, room)
            _backward(node, prior, inverse, edge[k], n, V, passed, summed, room)
            _add_squares(node, n, V, columns, R, told, nodes[b])
            once[:], twice[:] = 0, 0
            _add_transitions(alpha, passed, n, V, 1.0, once)
            for i in range(n * VL):
                alpha[i] *= alpha[i]
                passed[i] *= passed[i]
            _add_transitions(alpha, passed, n, V, 1.0, twice)
            for i in range(V):
                for j in range(V):
                    for s in range((i * V + j) * L, (i * V + j + 1) * L):
                        e = edge[k, s]
                        tables[b, i, j] += e * (once[s] - e * twice[s]) / (K * L)
        for t in range(n):
            for v in range(V):
                share[v] = lane_sum(summed, t * VL + v * L) / (K * L)
                certain += share[v]
            for r in range(R):
                second = 0.0
                for v in range(V):
                    second += share[v] * squares[v, r]
                nodes[b, t, r] = second - nodes[b, t, r] / (K * L)
        if not abs(certain - n) < 1e-6 * max(n, 1):
            widest[b] = np.nan
