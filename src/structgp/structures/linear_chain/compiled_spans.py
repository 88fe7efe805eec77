"""Probabilities of spans under a chain, averaged over draws, compiled by numba.

One sequence at a time, and all its draws side by side, which the compiler makes vector instructions of.
Forward-backward in probability space leaves how probably a span begins at a token, ends after it, or goes
on from one label to the next; a search multiplies these. A span only visits labels of its own type, so the
products are as small as those labels are few.

Needs numba (``structgp[fast]``)."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structgp.structures.graph.lane_code import LANES
from structgp.structures.graph.lanes import dots_apart
from structgp.structures.linear_chain.compiled import _compiled, _reordered
from structgp.structures.linear_chain.lane_exp import exp_in_place
from structgp.structures.threads import WORTH_A_THREAD

TOGETHER = 4 * LANES
"""Draws of which sums are taken at once."""

Found = list[list[tuple[int, int, int, float]]]


def search_spans(
    f: Tensor, g: Tensor, mask: Tensor, share: Tensor, inside: Tensor, parts: Tensor, least: float
) -> tuple[Found, bool]:
    """Of each sequence, every span (start, stop, type) with a probability of at least ``least``, and that
    probability, most probable first; then whether every sequence has a labelling. Right where potentials
    are not too far apart for probability space.

    f (S, B, T, V), g, mask (B, T) : a chain; share : (S, B) of the draws; inside : (K, V), whether a label
    belongs to a type; parts : (V, V), whether a span ends between two labels. Cost O(S T V^2) per sequence,
    and O(S) per span that is likely, or would be if it were longer."""
    pairs = (inside[:, :, None] & inside[:, None] & ~parts).nonzero().numpy()  # (P, 3): type, label, next
    shared, lengths = g.dim() == 3, mask.sum(-1).tolist()
    shares = np.zeros((len(lengths), -(-len(f) // TOGETHER) * TOGETHER))
    shares[:, : len(f)] = share.T.numpy()
    edge = _exponential(g[:, None]) if shared else None
    types, threads = inside.numpy(), torch.get_num_threads()

    def of(b: int) -> list[tuple[int, int, int, float]] | None:
        n = lengths[b]
        # The spans that begin at one token exclude each other.
        room = int(min(n * (n + 1) // 2 * len(types), n * (1 / max(least, 1e-9) + 1)))
        places, values = np.empty((room, 3), np.int64), np.empty(room)
        tables = edge if shared else _exponential(g[:, b, : max(0, n - 1)])
        given = _exponential(f[:, b, :n]), tables, shares[b]
        count = _search(*given, types, pairs, least, places, values)
        if count < 0:
            return None
        spans = zip(places[:count].tolist(), values[:count].tolist(), strict=True)
        return sorted(((*place, p) for place, p in spans), key=lambda span: -span[3])

    if threads > 1 and len(f) * sum(lengths) * f.shape[-1] ** 2 >= WORTH_A_THREAD:
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(of, range(len(lengths))))
    else:
        found = [of(b) for b in range(len(lengths))]
    some = [spans for spans in found if spans is not None]
    return (some, True) if len(some) == len(found) else ([], False)


@_compiled
def node_width(f: Any, lengths: Any) -> tuple[float, bool]:
    """Largest difference between node scores (S, B, T, V) of one token, those of -inf left out, inf where
    there are no others; and whether some are -inf of tokens that are neither first nor last."""
    width, is_barred = 0.0, False
    for s in range(len(f)):
        for b in range(len(lengths)):
            for t in range(lengths[b]):
                low, high = np.inf, -np.inf
                for v in range(f.shape[3]):
                    score = f[s, b, t, v]
                    if score > -np.inf:
                        low, high = min(low, score), max(high, score)
                    elif 0 < t < lengths[b] - 1:
                        is_barred = True
                width = max(width, high - low if high > -np.inf else np.inf)
    return width, is_barred


def _exponential(scores: Tensor) -> np.ndarray:
    """Scores (S, T, ...) -> (T, ..., S'), 1 at the largest of each position and draw. There is a
    multiple of ``TOGETHER`` of draws, the last of them several times."""
    T, S = scores.shape[1], -(-len(scores) // TOGETHER) * TOGETHER
    out = np.empty((T, math.prod(scores.shape[2:]), S))
    _exponentiate_draws(scores.flatten(2).numpy(), out)
    return out.reshape(T, *scores.shape[2:], S)


@_reordered
def _exponentiate_draws(scores: Any, out: Any) -> None:
    """out (T, K, S') <- what ``_exponential`` gives, of scores (S, T, K)."""
    T, K, S = out.shape
    last, high = len(scores) - 1, np.empty(LANES)
    for first in range(0, S, LANES):
        for t in range(T):
            high.fill(-np.inf)
            for k in range(K):
                for s in range(LANES):
                    x = scores[min(first + s, last), t, k]
                    out[t, k, first + s] = x
                    high[s] = x if x > high[s] else high[s]
            for k in range(K):
                for s in range(LANES):
                    out[t, k, first + s] -= high[s]
    exp_in_place(out.reshape(out.size))


@_reordered
def _search(
    node: Any, edge: Any, share: Any, inside: Any, pairs: Any, least: float, places: Any, values: Any
) -> int:
    """The number of spans written to places and values; -1 if there is no labelling."""
    n, V, S = node.shape
    enter, leave, on = np.empty((n, V, S)), np.empty((n, V, S)), np.empty((n, len(pairs), S))
    if not _sweep(node, edge, pairs, enter, leave, on):
        return -1
    count, here, moved = 0, np.empty((V, S)), np.empty((V, S))
    for k in range(len(inside)):
        labels, ways = np.flatnonzero(inside[k]), np.flatnonzero(pairs[:, 0] == k)
        for start in range(n):
            covered, _ = _average(enter[start], leave[start], share, labels)
            stop = start
            while covered >= least and stop < n:
                if stop == start:
                    here[:] = enter[start]
                else:
                    _go_on(here, on[stop - 1], pairs, labels, ways, moved)
                    here, moved = moved, here
                stop += 1
                covered, p = _average(here, leave[stop - 1], share, labels)
                if p >= least:
                    places[count] = start, stop, k
                    values[count] = p
                    count += 1
    return count


@_reordered
def _average(here: Any, leave: Any, share: Any, labels: Any) -> Any:
    """The probability that all tokens so far are in one span, and that it ends here."""
    covered = p = 0.0
    for j in labels:
        for s in range(len(share)):
            covered += share[s] * here[j, s]
            p += share[s] * here[j, s] * leave[j, s]
    return covered, p


@_reordered
def _go_on(here: Any, on: Any, pairs: Any, labels: Any, ways: Any, moved: Any) -> None:
    """moved (V, S) <- here, one token further in the same span."""
    for j in labels:
        moved[j].fill(0)
    for w in ways:
        i, j = pairs[w, 1], pairs[w, 2]
        for s in range(here.shape[1]):
            moved[j, s] += here[i, s] * on[w, s]


@_reordered
def _sweep(node: Any, edge: Any, pairs: Any, enter: Any, leave: Any, on: Any) -> bool:
    """enter (T, V, S) <- probability of a label at t with a boundary before it; leave (T, V, S) <- of a
    boundary after t, given the label at t; on (T, P, S) <- of the second label of a pair at t + 1, given
    the first at t. Returns whether there is a labelling under every draw."""
    n, V, S = node.shape
    alpha, passed, beta = np.empty((n, V, S)), np.empty((n, V, S)), np.empty((n, V, S))
    if not _forward_draws(node, edge, alpha, enter):
        return False
    _backward_draws(node, edge, beta, passed)
    for t in range(n):
        for v in range(V):
            for s in range(S):
                enter[t, v, s] *= passed[t, v, s]
                leave[t, v, s] = 1
    for t in range(n - 1):
        step = edge[min(t, len(edge) - 1)]
        for w in range(len(pairs)):
            i, j = pairs[w, 1], pairs[w, 2]
            for s in range(S):
                p = step[i, j, s] * passed[t + 1, j, s]
                enter[t + 1, j, s] = max(0.0, enter[t + 1, j, s] - alpha[t, i, s] * p)
                p = p / beta[t, i, s] if beta[t, i, s] > 0 else 0.0
                on[t, w, s] = p
                leave[t, i, s] = max(0.0, leave[t, i, s] - p)
    return True


@_compiled
def _step(out: Any, told: Any, edge: Any, V: int, S: int, along: int, across: int) -> None:
    """out (V, S) <- the sum over i of told (V, S) at i and edge[along i + across j], all of them flat."""
    for j in range(V):
        for s in range(0, S, TOGETHER):
            dots_apart(out, j * S + s, V, told, s, S, edge, across * j + s, along)


@_reordered
def _forward_draws(node: Any, edge: Any, alpha: Any, prior: Any) -> bool:
    """alpha (T, V, S) <- the message at t, which sums to 1; prior (T, V, S) <- what t is told by the token
    before; node (T, V, S) is divided by the scale at t. Returns whether no message is empty."""
    n, V, S = node.shape
    total, smallest = np.empty(S), np.finfo(np.float64).tiny
    for t in range(n):
        total.fill(0)
        if t == 0:
            prior[0].fill(1)
        else:
            told, step = alpha[t - 1].reshape(V * S), edge[min(t - 1, len(edge) - 1)].reshape(V * V * S)
            _step(prior[t].reshape(V * S), told, step, V, S, V * S, S)
        for j in range(V):
            for s in range(S):
                alpha[t, j, s] = prior[t, j, s] * node[t, j, s]
                total[s] += alpha[t, j, s]
        for s in range(S):
            if total[s] <= smallest:
                return False
            total[s] = 1 / total[s]
        for j in range(V):
            for s in range(S):
                alpha[t, j, s] *= total[s]
                node[t, j, s] *= total[s]
    return True


@_reordered
def _backward_draws(node: Any, edge: Any, beta: Any, passed: Any) -> None:
    """beta (T, V, S) <- what all that follows says of t; passed (T, V, S) <- what t then passes back."""
    n, V, S = node.shape
    for t in range(n - 1, -1, -1):
        if t == n - 1:
            beta[t].fill(1)
        else:
            told, step = passed[t + 1].reshape(V * S), edge[min(t, len(edge) - 1)].reshape(V * V * S)
            _step(beta[t].reshape(V * S), told, step, V, S, S, V * S)
        for i in range(V):
            for s in range(S):
                passed[t, i, s] = node[t, i, s] * beta[t, i, s]
