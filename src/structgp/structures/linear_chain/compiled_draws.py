"""log Z of a chain and its slopes, averaged over draws that differ from their mean by fixed amounts;
compiled by numba.

Exponentials of the amounts are computed once, so that an evaluation at another mean only multiplies. Eight
draws of a number lie side by side in memory and fill vector instructions, whatever the number of labels:
draws of one sequence or, where there are fewer, of several sequences of the same length, a pack.

All is done in probability space, with one pass forward and one back. What the forward pass loses, because
it became 0 or nearly so, the backward pass still counts, so the two disagree about the sum wherever that
matters. An entry of the table that became 0 is lost to both; but where that matters, the label that it
leads to gets almost nothing from the label before and is probable all the same, which makes a number of the
backward pass very large. ``_both_ways`` looks for both signs. Scores of a position that became 0 could go
unnoticed, so their width is bounded (``WIDEST``). A pack that fails is summed in log space
(``compiled_logs``).

Letters: S draws in K blocks, L = 8 lanes of a block, G sequences of a pack with L / G lanes each, B
sequences, T positions, V labels."""

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
    largest_square,
    multiply,
    multiply_and_split,
    row_sum,
    scale_by,
)
from structgp.structures.linear_chain.compiled_factors import WIDEST
from structgp.structures.linear_chain.compiled_logs import pack_in_logs
from structgp.structures.linear_chain.lane_exp import exp_in_place
from structgp.structures.linear_chain.lane_rows import FOUR, aligned, step

L = LANES
LOG_2 = math.log(2)
PACKS_AT_ONCE = 16
"""Number of packs in a unit of work. Slopes of the table are summed unit by unit, so that the result does
not depend on the number of threads."""

MOST_LOST, LARGEST = 1e-8, 1e150
"""Largest share of the sum that the forward pass may lose; and the largest number that the backward pass
may reach, with a label that is probable though it gets less than exp(-345) from the label before. The
square of that number is still finite."""

_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})


@_compiled
def _levels(mean: Any, level: Any, n: int) -> Any:
    """level (n, V) <- exp of mean scores (n, V), scaled so that the highest of each position is 1. Returns
    the sum of the highest scores, and the largest difference within a position."""
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
def _pack_levels(mean: Any, pack: Any, n: int, level: Any, highest: Any, widest: Any, lanes: Any) -> None:
    """lanes (n, V, L) <- ``_levels`` of the sequences of a pack (G,), each in lanes of its own; highest
    (G,) and widest (B,) <- what it returns. Where there is no sequence (-1), the first one is used."""
    G, V = len(pack), mean.shape[2]
    own = L // G
    for g in range(G):
        b = pack[g] if pack[g] >= 0 else pack[0]
        highest[g], widest[b] = _levels(mean[b], level, n)
        for t in range(n):
            for v in range(V):
                at = (t * V + v) * L + g * own
                for s in range(own):
                    lanes[at + s] = level[t, v]


@_compiled
def _sum_of(a: Any, at: int, own: int) -> float:
    total = 0.0
    for s in range(at, at + own):
        total += a[s]
    return total


@_compiled
def _forward(
    factor: Any, level: Any, table: Any, n: int, V: int, node: Any, prior: Any, alpha: Any, inverse: Any,
    room: Any, log_z: Any,
) -> None:  # fmt: skip
    """node, prior, alpha (n, V, L) and inverse (n, L) <- potentials, messages from the position before,
    messages at the position, scaled to sum to 1, and 1 / scale; log_z (L,) <- log Z. factor, level :
    (n, V, L); table : (V, V, L); room : (3, L) work space."""
    VL = V * L
    prior[:VL] = 1
    room[:L], room[L : 2 * L] = 1, 0  # product of the scales, and exponents taken out of it
    for t in range(n):
        at = t * VL
        if t:
            step(table, VL, L, V, alpha[at - VL :], prior, at)
        for v in range(V):
            multiply(node, at + L * v, factor, at + L * v, level, at + L * v)
            multiply(alpha, at + L * v, prior, at + L * v, node, at + L * v)
        row_sum(room, 2 * L, V, alpha, at)
        multiply_and_split(room, room[L:], 0, room, 2 * L)
        invert(inverse, t * L, room, 2 * L)
        for v in range(V):
            multiply(alpha, at + L * v, alpha, at + L * v, inverse, t * L)
    for s in range(L):
        log_z[s] = math.log(room[s]) + LOG_2 * room[L + s]


@_compiled
def _backward(
    node: Any, prior: Any, inverse: Any, table: Any, n: int, V: int, passed: Any, room: Any
) -> None:
    """passed (n, V, L) <- what a position passes back to the one before; node (n, V, L) <- probabilities of
    labels. room : (V, L) work space."""
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


@_compiled
def _both_ways(factor: Any, level: Any, table: Any, n: int, V: int, rooms: Any) -> bool:
    """Fills the ``_rooms`` of a block of draws by both passes. Returns True if nothing was lost: the
    probabilities of the first position's labels sum to 1, so that both passes agree, and no number of the
    backward pass is too large."""
    node, prior, alpha, passed, inverse, log_z, room = rooms
    _forward(factor, level, table, n, V, node, prior, alpha, inverse, room, log_z)
    _backward(node, prior, inverse, table, n, V, passed, room)
    if n:
        row_sum(room, 0, V, node, 0)
        largest_square(room, L, n * V, passed, 0)
        for s in range(L):
            if not (abs(room[s] - 1) <= MOST_LOST and room[L + s] <= LARGEST * LARGEST):
                return False
    return True


@_compiled
def _rooms(T: int, V: int, like: Any) -> Any:
    """Arrays for ``_both_ways``: node, prior, alpha, passed (T, V, L), inverse (T, L), log_z (L,), and work
    space."""
    node, prior = aligned(T * V * L, like), aligned(T * V * L, like)
    alpha, passed = aligned(T * V * L, like), aligned(T * V * L, like)
    return node, prior, alpha, passed, aligned(T * L, like), aligned(L, like), aligned(max(V, 3) * L, like)


@_compiled
def _width(pack: Any, widest: Any, added: float) -> float:
    """Bound of the difference between scores of one position of a pack: ``widest`` (B,), that of the mean
    scores, plus ``added``, that of what draws add. nan where the mean scores are nan."""
    found = 0.0
    for b in pack:
        if b >= 0 and not widest[b] + added <= found:
            found = widest[b] + added
    return found


@_compiled
def _add_transitions(alpha: Any, passed: Any, n: int, V: int, weight: Any, out: Any) -> None:
    """out (V, V, L) += weight (L,) times the sum over positions of alpha at t - 1 times passed at t."""
    VL, t = V * L, 1
    for at in range(0, n * VL, L):
        multiply(passed, at, passed, at, weight, 0)
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
    """(K, V V L) edge, exponentials of what draws add to the table, times the exponentials of the mean
    table (V, V), which are scaled so that their largest is 1."""
    V, found = len(mean), np.empty_like(edge)
    level = (mean - mean.max()).reshape(V * V)
    exp_in_place(level)
    for k in range(len(edge)):
        for i in range(V * V):
            scale_by(found[k], i * L, edge[k], i * L, level[i])
    return found


@_compiled
def draw_totals(
    factor: Any, edge: Any, logs: Any, packs: Any, mean: Any, table: Any, lengths: Any, weight: Any,
    known: Any, sign: float, log_z: Any, nodes: Any, tables: Any, first: int, last: int,
) -> None:  # fmt: skip
    """For the packs of units first..last: log_z (B,) <- log Z averaged over draws, without what factors and
    tables were divided by, minus the mean scores of known labels; not finite where some draw has no
    labelling. nodes (B, T, V) <- its slopes in the mean scores, times sign and weight (B,). tables
    (units, V, V) <- the slopes of log Z in the mean table, times weight, summed over the unit.

    factor : (packs, K, T V L) and edge : (K, V V L), exponentials of what draws add to the scores, at most
    1; logs : what ``pack_in_logs`` needs to know of them, see ``fixed_draws``; packs : (packs, G)
    sequences, -1 for none; mean : (B, T, V) and table (V, V), mean scores; known : (B, T) labels, -1 where
    there are none."""
    (_, T, V), G, (edge_logs, is_log, added) = mean.shape, packs.shape[1], logs
    K, VL, own, ratios = len(edge), mean.shape[2] * L, L // packs.shape[1], _tables(edge, table)
    rooms, level, high = _rooms(T, V, mean), np.empty((T, V)), table - table.max()
    node, _, alpha, passed, _, now, _ = rooms
    summed, lanes, widest = aligned(T * VL, mean), aligned(T * VL, mean), np.empty(len(mean))
    edges, highest, total = np.empty((K, V * VL)), np.empty(G), aligned(L, mean)
    counts, apart, unused = aligned(L, mean), np.empty(V * VL), np.empty(V * VL)
    for unit in range(first, last):
        edges[:], apart[:] = 0, 0
        for p in range(unit * PACKS_AT_ONCE, min(len(packs), (unit + 1) * PACKS_AT_ONCE)):
            n = lengths[packs[p, 0]]
            summed[: n * VL], total[:L] = 0, 0
            _pack_levels(mean, packs[p], n, level, highest, widest, lanes)
            narrow = _width(packs[p], widest, added) <= WIDEST
            for s in range(L):
                counts[s] = weight[packs[p, s // own]] if packs[p, s // own] >= 0 else 0.0
            for k in range(K):
                if narrow and _both_ways(factor[p, k], lanes, ratios[k], n, V, rooms):
                    _add_transitions(alpha, passed, n, V, counts, edges[k])
                else:
                    given = factor[p, k], is_log, edge_logs[k], mean, high, packs[p], n, counts
                    pack_in_logs(*given, node, now, apart, unused)
                    for s in range(L):
                        now[s] -= highest[s // own]
                for at in range(0, n * VL, L):
                    add(summed, at, node, at)
                add(total, 0, now, 0)
            _give_back(packs[p], n, K, highest, total, summed, mean, weight, known, sign, log_z, nodes)
        for i in range(V * V):
            found = 0.0
            for s in range(i * L, (i + 1) * L):
                found += apart[s]
                for k in range(K):
                    found += edges[k, s] * ratios[k, s]
            tables[unit, i // V, i % V] = found / (K * own)


@_compiled
def _give_back(
    pack: Any, n: int, K: int, highest: Any, total: Any, summed: Any, mean: Any, weight: Any, known: Any,
    sign: float, log_z: Any, nodes: Any,
) -> None:  # fmt: skip
    """Sets log_z and nodes of the sequences of a pack (G,), as in ``draw_totals``, from sums over its K
    blocks: total (L,) of log Z and summed (n, V, L) of label probabilities."""
    V, own = mean.shape[2], L // len(pack)
    for g in range(len(pack)):
        b = pack[g]
        if b < 0:
            continue
        log_z[b] = highest[g] + _sum_of(total, g * own, own) / (K * own)
        for t in range(n):
            for v in range(V):
                share = _sum_of(summed, (t * V + v) * L + g * own, own) / (K * own)
                nodes[b, t, v] = sign * weight[b] * share
            if known[b, t] >= 0:
                log_z[b] -= mean[b, t, known[b, t]]
                nodes[b, t, known[b, t]] -= sign * weight[b]
        nodes[b, n:] = 0


@_compiled
def _in_lanes(basis: Any) -> Any:
    """(R, V, L) the columns of basis (V, R), each number repeated in all lanes."""
    V, R = basis.shape
    found = aligned(R * V * L, basis)
    for r in range(R):
        for v in range(V):
            found[(r * V + v) * L : (r * V + v + 1) * L] = basis[v, r]
    return found


@_compiled
def _add_squares(p: Any, n: int, V: int, basis: Any, R: int, told: Any, out: Any) -> None:
    """out (n, R, L) += (p basis)^2, with probabilities p (n, V, L) and basis (R, V, L). told : (R, L) work
    space."""
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
            add(out, (t * R + r) * L, told, L * r)


@_compiled
def draw_variances(
    factor: Any, edge: Any, logs: Any, packs: Any, mean: Any, table: Any, lengths: Any, basis: Any,
    squares: Any, nodes: Any, tables: Any, first: int, last: int,
) -> None:  # fmt: skip
    """For the packs of units first..last, averaged over draws: nodes (B, T, R) <- the variance of each
    column of basis (V, R) under the label probabilities of a position; tables (B, V, V) <- p (1 - p) of
    each label with the next one, summed over positions. squares : squares of the basis. Other arguments as
    in ``draw_totals``."""
    (_, T, V), G, R, (edge_logs, is_log, added) = mean.shape, packs.shape[1], basis.shape[1], logs
    K, VL, own, ratios = len(edge), mean.shape[2] * L, L // packs.shape[1], _tables(edge, table)
    rooms, level, high = _rooms(T, V, mean), np.empty((T, V)), table - table.max()
    node, _, alpha, passed, _, now, _ = rooms
    summed, lanes, widest = aligned(T * VL, mean), aligned(T * VL, mean), np.empty(len(mean))
    once, twice = np.empty(V * VL), np.empty(V * VL)
    told, columns, squared = aligned(R * L, mean), _in_lanes(basis), aligned(T * R * L, mean)
    highest, ones = np.empty(G), aligned(L, mean)
    ones[:L] = 1
    for p in range(first * PACKS_AT_ONCE, min(len(packs), last * PACKS_AT_ONCE)):
        n = lengths[packs[p, 0]]
        summed[: n * VL], squared[: n * R * L] = 0, 0
        _pack_levels(mean, packs[p], n, level, highest, widest, lanes)
        narrow = _width(packs[p], widest, added) <= WIDEST
        for b in packs[p]:
            if b >= 0:
                tables[b] = 0
        for k in range(K):
            once[:], twice[:] = 0, 0
            if narrow and _both_ways(factor[p, k], lanes, ratios[k], n, V, rooms):
                _add_transitions(alpha, passed, n, V, ones, once)
                for i in range(n * VL):
                    alpha[i] *= alpha[i]
                    passed[i] *= passed[i]
                _add_transitions(alpha, passed, n, V, ones, twice)
                for i in range(V * VL):
                    once[i] = ratios[k, i] * (once[i] - ratios[k, i] * twice[i])
            else:
                given = factor[p, k], is_log, edge_logs[k], mean, high, packs[p], n, ones
                pack_in_logs(*given, node, now, once, twice)
                for i in range(V * VL):
                    once[i] -= twice[i]
            for at in range(0, n * VL, L):
                add(summed, at, node, at)
            _add_squares(node, n, V, columns, R, told, squared)
            for g in range(G):
                if packs[p, g] >= 0:
                    for i in range(V * V):
                        found = _sum_of(once, i * L + g * own, own) / (K * own)
                        tables[packs[p, g], i // V, i % V] += found
        _give_variances(packs[p], n, K, summed, squared, squares, nodes)


@_compiled
def _give_variances(pack: Any, n: int, K: int, summed: Any, squared: Any, squares: Any, nodes: Any) -> None:
    """Sets nodes of the sequences of a pack (G,), as in ``draw_variances``, from sums over its K blocks:
    summed (n, V, L) of label probabilities, and squared (n, R, L)."""
    (V, R), own = squares.shape, L // len(pack)
    share = np.empty(V)
    for g in range(len(pack)):
        b = pack[g]
        if b < 0:
            continue
        for t in range(n):
            for v in range(V):
                share[v] = _sum_of(summed, (t * V + v) * L + g * own, own) / (K * own)
            for r in range(R):
                second = 0.0
                for v in range(V):
                    second += share[v] * squares[v, r]
                nodes[b, t, r] = second - _sum_of(squared, (t * R + r) * L + g * own, own) / (K * own)
        nodes[b, n:] = 0
