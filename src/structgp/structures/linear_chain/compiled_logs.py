"""Forward-backward in log space, one draw of a chain at a time, for scores too wide for probability space;
compiled by numba.

Messages are logarithms. A step still multiplies in probability space, scaled to its largest number, and a
label whose sum is so small that terms of it may have been lost is summed again with a scale of its own, so
forbidden moves do no harm. A step leaves the probabilities of the label before given the label after. Going
back through these needs no scale: all are between 0 and 1, and none that matters is lost. Letters as in
``compiled_draws``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from structgp.structures.graph.lane_code import LANES
from structgp.structures.linear_chain.lane_exp import exp_in_place

L = LANES
SURE = math.exp(-600.0)
"""Smallest sum that has lost nothing that matters: terms that become 0 are below exp(-700)."""

_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})


@_compiled
def _told(alpha: Any, table: Any, ratio: Any, top: Any, weight: Any, back: Any, out: Any) -> None:
    """out (V,) <- logs of the sums over u of exp(alpha[u] + table[v, u]); back (V, V) <- the share of each
    u in them. ratio : (V, V) exp(table - top), top (V,) the largest of each row. weight : (V,) work
    space."""
    V, high = len(alpha), alpha.max()
    for u in range(V):
        weight[u] = alpha[u] - high
    exp_in_place(weight)
    for v in range(V):
        total = 0.0
        for u in range(V):
            back[v, u] = weight[u] * ratio[v, u]
            total += back[v, u]
        if total >= SURE:
            out[v] = math.log(total) + high + top[v]
        else:
            for u in range(V):
                back[v, u] = alpha[u] + table[v, u]
            most = back[v].max()
            for u in range(V):
                back[v, u] -= most if most > -np.inf else 0.0
            exp_in_place(back[v])
            total = back[v].sum()
            out[v] = math.log(total) + most if most > -np.inf else most
        for u in range(V):
            back[v, u] *= 1 / total if total > 0 else 0.0


@_compiled
def chain_in_logs(node: Any, table: Any, back: Any, p: Any) -> float:
    """p (n, V) <- probabilities of labels; back (n, V, V) <- those of the label before, given this label
    (first index) and all scores up to here. Returns log Z, -inf where no labelling is possible. node :
    (n, V) scores; table : (V, V) scores of moves, from the second index to the first."""
    n, V = node.shape
    top, ratio = np.empty(V), np.empty((V, V))
    for v in range(V):
        top[v] = table[v].max()
        for u in range(V):
            ratio[v, u] = table[v, u] - (top[v] if top[v] > -np.inf else 0.0)
    exp_in_place(ratio.reshape(V * V))
    alpha, weight, told = node[0].copy(), np.empty(V), np.empty(V)
    for t in range(1, n):
        if not alpha.max() > -np.inf:
            break
        _told(alpha, table, ratio, top, weight, back[t], told)
        for v in range(V):
            alpha[v] = told[v] + node[t, v]
    high = alpha.max()
    if not high > -np.inf:
        return high
    for v in range(V):
        p[n - 1, v] = alpha[v] - high
    exp_in_place(p[n - 1])
    total = p[n - 1].sum()
    for v in range(V):
        p[n - 1, v] /= total
    for t in range(n - 1, 0, -1):
        p[t - 1] = 0
        for v in range(V):
            for u in range(V):
                p[t - 1, u] += p[t, v] * back[t, v, u]
    return high + math.log(total)


@_compiled
def pack_in_logs(
    factor: Any, is_log: bool, edge: Any, mean: Any, table: Any, pack: Any, n: int, counts: Any, node: Any,
    log_z: Any, once: Any, twice: Any,
) -> None:  # fmt: skip
    """For all lanes of a pack (G,): node (n, V, L) <- probabilities of labels; log_z (L,) <- log Z; once,
    twice (V, V, L) += counts (L,) times the sum over positions of the probabilities of two labels, and of
    their squares.

    factor : (T, V, L) exponentials of what draws add to the mean scores, or these amounts themselves if
    ``is_log``; edge : (V, V, L) what they add to the mean table; mean : (B, T, V) and table : (V, V)."""
    V, own = mean.shape[2], L // len(pack)
    scores, p, moves, back = np.empty((n, V)), np.empty((n, V)), np.empty((V, V)), np.empty((n, V, V))
    sums, squares = np.empty((V, V)), np.empty((V, V))
    for s in range(L):
        b = pack[s // own] if pack[s // own] >= 0 else pack[0]
        for t in range(n):
            for v in range(V):
                added = factor[(t * V + v) * L + s]
                scores[t, v] = mean[b, t, v] + (added if is_log else math.log(added))
        for u in range(V):
            for v in range(V):
                moves[v, u] = table[u, v] + edge[(u * V + v) * L + s]
        log_z[s] = chain_in_logs(scores, moves, back, p) if n else 0.0
        for t in range(n):
            for v in range(V):
                node[(t * V + v) * L + s] = p[t, v]
        sums[:], squares[:] = 0, 0
        for t in range(1, n):
            for v in range(V):
                for u in range(V):
                    both = p[t, v] * back[t, v, u]
                    sums[v, u] += both
                    squares[v, u] += both * both
        for u in range(V):
            for v in range(V):
                once[(u * V + v) * L + s] += counts[s] * sums[v, u]
                twice[(u * V + v) * L + s] += counts[s] * squares[v, u]
