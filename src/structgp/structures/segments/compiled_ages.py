"""Forward-backward over labels and ages of spans in probability space, compiled by numba.

The recursion of ``ages``, one sequence at a time, with forward messages scaled to sum to 1. Both passes run
in one go and give log Z with all its derivatives, so that nothing has to be kept or computed again.

Numbers below the smallest one that the type holds are lost. A state with forward message a and backward
message b has probability a b, and a is at most 1: what is lost does not matter as long as no backward
message is huge. This is checked for each sequence (``SAFE``), and sequences that fail are computed in log
space instead.

Needs numba (``structgp[fast]``).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from structgp.structures.linear_chain.compiled import _exponentiate
from structgp.structures.linear_chain.lane_exp import exp_in_place
from structgp.structures.segments.span_scheme import SpanScheme
from structgp.threads import share

SAFE = 1e150
"""Largest backward message that is trusted: what forward messages lose, at most 1e-308 each, then has
probability below 1e-150."""

LARGEST_SCORE = 100.0
"""Largest score of a span that is trusted: exponentials may have a range of exp(700) below it."""

_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
_reordered = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})


def passes(
    f: Tensor, g: Tensor, w: Tensor, mask: Tensor, scheme: SpanScheme, steps: int, ends: int, spread: bool
) -> tuple[Tensor, ...]:
    """log Z (S, B) and whether it can be trusted (S, B); then probabilities of labels (S, B, T, V),
    transitions (S, B, steps, V, V), spans by type and length (S, B, K, L+1), and spans by last position as
    well (S, B, ends, K, L+1). All in double precision.

    steps : T-1, or 1 to sum over positions. ends : T, or 0 to leave out spans by last position. spread :
    p (1 - p) instead of p, except for labels. Other arguments as for ``recursion``."""
    S, B, T, V = f.shape
    K, width = w.shape[-2:]
    tables, spans = (x[:, None, None] if x.dim() == 3 else x for x in (g, w))
    given = [x.detach().double().contiguous().numpy() for x in (f, tables, spans)]
    # Only a label that can continue a span has ages beyond the first.
    ages = torch.where(scheme.parts.all(0), 1, width)
    labels = (x.numpy() for x in (scheme.kinds, ages, scheme.pairs))
    told = g.dim() == 3, w.dim() == 3, mask.sum(-1).numpy(), *labels
    shapes = (S, B), (S, B), (S, B, T, V), (S, B, steps, V, V), (S, B, K, width), (S, B, ends, K, width)
    found = [np.zeros(shape) for shape in shapes]
    work = S * B * T * V * (V + width)
    share(lambda *part: _passes(*given, *told, spread, *found, *part), S * B, work)
    log_z, safe, *rest = map(torch.from_numpy, found)
    return log_z, safe > 0, *rest


@_compiled
def _exponentiate_edges(g: Any, n: int, pairs: Any, edge: Any, joined: Any) -> Any:
    """edge (T-1, V, V) <- exp of the first n tables g, each minus its largest entry, with 0 for transitions
    within a span, which go to joined (T-1, P). Returns the sum of the largest entries."""
    V = edge.shape[1]
    tops = _exponentiate(g.reshape(len(g), V * V), n, edge.reshape(len(g), V * V))[0]
    for t in range(n):
        for p in range(len(pairs)):
            joined[t, p] = edge[t, pairs[p, 0], pairs[p, 1]]
            edge[t, pairs[p, 0], pairs[p, 1]] = 0
    return tops


@_compiled
def _exponentiate_spans(w: Any, n: int, out: Any) -> bool:
    """out (T, K+1, L+1) <- exp of the scores w (T, K, L+1) of spans, for the first n positions. The last
    type is that of labels outside of spans, whose spans of one token score 0. Returns True if the
    exponentials can be trusted."""
    K, width = w.shape[1:]
    top, fits = -LARGEST_SCORE, True
    for t in range(n):
        for k in range(K):
            for a in range(width):
                x = w[t, k, a]
                top = x if x > top else top
                fits = fits and x <= LARGEST_SCORE  # not nan
                out[t, k, a] = x
        out[t, K] = -np.inf
        out[t, K, 0] = 0
    top = max(top, 0.0)
    flat = out[:n].reshape(n * (K + 1) * width)
    for i in range(len(flat)):
        flat[i] -= top
    exp_in_place(flat)
    scale = math.exp(min(top, LARGEST_SCORE))
    for i in range(len(flat)):
        flat[i] *= scale
    return fits


@_reordered
def _forward(
    node: Any, edge: Any, joined: Any, span: Any, kinds: Any, ages: Any, pairs: Any, n: int, alpha: Any,
    ended: Any, scale: Any,
) -> float:  # fmt: skip
    """Returns log Z of these exponentials. Row t of alpha (T, V, L+1) <- the message at t, divided by scale
    (T,) so that it sums to 1; row t of ended (T, V) <- the part of it whose span ends there."""
    V, width = alpha.shape[1:]
    log_z, start = 0.0, np.ones(V)
    for t in range(n):
        here, w = alpha[t], span[min(t, len(span) - 1)]
        here[:] = 0
        if t > 0:
            step, before = min(t - 1, len(edge) - 1), alpha[t - 1]
            start[:] = 0
            for i in range(V):
                e = ended[t - 1, i]
                for v in range(V):
                    start[v] += e * edge[step, i, v]
            for p in range(len(pairs)):
                i, v = pairs[p]
                x = joined[step, p]
                for a in range(min(ages[i], width - 1)):
                    here[v, a + 1] += before[i, a] * x
                if ages[i] == width:
                    here[v, width - 1] += before[i, width - 1] * x
        total = 0.0
        for v in range(V):
            here[v, 0] = start[v]
            for a in range(ages[v]):
                here[v, a] *= node[t, v]
                total += here[v, a]
        scale[t] = total
        log_z += math.log(total)
        inverse = 1 / total
        for v in range(V):
            k, e = kinds[v], 0.0
            for a in range(ages[v]):
                here[v, a] *= inverse
                e += here[v, a] * w[k, a]
            ended[t, v] = e
    return log_z + math.log(ended[n - 1].sum()) if n else log_z


@_reordered
def _backward(
    node: Any, edge: Any, joined: Any, span: Any, kinds: Any, ages: Any, pairs: Any, n: int, alpha: Any,
    ended: Any, scale: Any, spread: bool, nodes: Any, tables: Any, lengths: Any, ends: Any,
) -> float:  # fmt: skip
    """Returns the sum of all backward messages, each divided by its scale. The last four arguments <-
    results, as in ``passes``."""
    V, width = alpha.shape[1:]
    K, messages = len(lengths), 0.0
    after, begun = np.zeros((V, width + 1)), np.zeros(V)  # what the next position passes back
    beta, closed, follows = np.zeros((V, width)), np.empty((K + 1, width)), np.empty(V)
    for t in range(n - 1, -1, -1):
        w = span[min(t, len(span) - 1)]
        if t == n - 1:
            follows[:] = 1 / ended[t].sum()
        else:
            step, table = min(t, len(edge) - 1), tables[min(t, len(tables) - 1)]
            for i in range(V):
                e, total = ended[t, i], 0.0
                for v in range(V):
                    x = edge[step, i, v] * begun[v]
                    total += x
                    x *= e
                    table[i, v] += x - x * x if spread else x
                follows[i] = total
            beta[:] = 0
            for p in range(len(pairs)):
                i, v = pairs[p]
                total, x = 0.0, joined[step, p]
                for a in range(ages[i]):
                    y = x * after[v, a + 1]
                    beta[i, a] += y
                    total += alpha[t, i, a] * y
                table[i, v] += total - total * total if spread else total
        closed[:] = 0
        inverse = 1 / scale[t]
        for v in range(V):
            k, here = kinds[v], 0.0
            for a in range(ages[v]):
                x = w[k, a] * follows[v]
                closed[k, a] += alpha[t, v, a] * x
                x += beta[v, a]
                here += alpha[t, v, a] * x
                x *= inverse
                messages += x
                after[v, a] = x * node[t, v]
            after[v, width] = after[v, width - 1]  # the last age stands for all larger ones
            begun[v] = after[v, 0]
            nodes[t, v] = here
        for k in range(K):
            for a in range(width):
                x = closed[k, a]
                x = x - x * x if spread else x
                lengths[k, a] += x
                if len(ends):
                    ends[t, k, a] = x
    return messages


@_compiled
def _passes(
    f: Any, g: Any, w: Any, one_table: bool, one_w: bool, sizes: Any, kinds: Any, ages: Any, pairs: Any,
    spread: bool, log_z: Any, safe: Any, nodes: Any, tables: Any, lengths: Any, ends: Any, first: int,
    last: int,
) -> None:  # fmt: skip
    B, T, V = f.shape[1:]
    node, edge = np.empty((T, V)), np.empty(g.shape[2:])
    span = np.empty((w.shape[2], w.shape[3] + 1, w.shape[4]))
    alpha, ended, scale = np.empty((T, V, w.shape[4])), np.empty((T, V)), np.empty(T)
    joined, tops, fits = np.empty((len(edge), len(pairs))), 0.0, True
    for unit in range(first, last):
        s, b = unit // B, unit % B
        n = sizes[b]
        if not one_table:
            tops = _exponentiate_edges(g[s, b], n - 1, pairs, edge, joined)
        elif b == 0 or unit == first:
            tops = _exponentiate_edges(g[s, 0], 1, pairs, edge, joined)
        if not one_w:
            fits = _exponentiate_spans(w[s, b], n, span)
        elif b == 0 or unit == first:
            fits = _exponentiate_spans(w[s, 0], 1, span)
        total = _exponentiate(f[s, b], n, node)[0] + (max(n - 1, 0) * tops if one_table else tops)
        total += _forward(node, edge, joined, span, kinds, ages, pairs, n, alpha, ended, scale)
        messages = _backward(
            node, edge, joined, span, kinds, ages, pairs, n, alpha, ended, scale, spread,
            nodes[s, b], tables[s, b], lengths[s, b], ends[s, b],
        )  # fmt: skip
        log_z[s, b] = total
        safe[s, b] = 1 if fits and messages <= SAFE and np.isfinite(total) else 0
