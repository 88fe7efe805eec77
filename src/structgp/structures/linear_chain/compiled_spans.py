"""Probabilities of spans under a chain, averaged over draws, compiled by numba.

One sequence at a time, with eight of its draws side by side, which fill vector instructions. At a
transition, a span either ends between the two labels or goes on: these two kinds of transitions are summed
separately, and transitions that no draw allows are left out. Forward-backward in probability space gives
the probability that a span begins at each token. Where that is likely on average, a search goes on from
token to token; a span only visits labels of its own type, so its steps are cheap where these are few.

Letters: S draws in K blocks of L = 8, B sequences of n tokens, V labels, E transitions.
Needs numba (``structgp[fast]``)."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from structgp.structures.graph.lane_code import LANES
from structgp.structures.graph.lanes import add, invert, lane_sum, multiply, multiply_and_add, row_sum
from structgp.structures.linear_chain.compiled import _compiled
from structgp.structures.linear_chain.lane_rows import aligned
from structgp.structures.linear_chain.span_lanes import (
    add_multiplied,
    both_sums_of_ways,
    copy,
    exp_below_highest,
    fetch,
    fill,
    scaled_sum_of_ways,
    sum_of_ways,
)
from structgp.threads import share as share_out

L = LANES
LARGEST = 1e300
"""A message whose sum is less than 1 over this counts as empty."""

Found = list[list[tuple[int, int, int, float]]]


class Ways(NamedTuple):
    """The transitions (E, 2) that some draw allows, in an order in which those with the same label at one
    end are neighbours, and among these, those at which a span ends come first.

    order : (E,) index of each transition in a flat table (V, V). place : (E,) the label at the other end,
    times L. begin : (V + 1,) the first transition of each label; cut : (V,) the first one at which a span
    goes on."""

    order: np.ndarray
    place: np.ndarray
    begin: np.ndarray
    cut: np.ndarray

    @staticmethod
    def of(allowed: np.ndarray, joined: np.ndarray, at: int) -> Ways:
        """allowed, joined : (V, V). at : 0 for ways from a label, 1 for ways to it."""
        V, pairs = len(allowed), np.argwhere(allowed)
        goes_on = joined[pairs[:, 0], pairs[:, 1]]
        rank = np.lexsort((pairs[:, 1 - at], goes_on, pairs[:, at]))
        pairs, goes_on = pairs[rank], goes_on[rank]
        begin = np.searchsorted(pairs[:, at], np.arange(V + 1))
        cut = begin[:-1] + np.bincount(pairs[~goes_on, at], minlength=V)
        return Ways(pairs[:, 0] * V + pairs[:, 1], L * pairs[:, 1 - at], begin, cut)


class Types(NamedTuple):
    """labels : the labels of each type of span, one type after the other; begin : (types + 1,) where the
    labels of each type begin."""

    labels: np.ndarray
    begin: np.ndarray


class Searched(NamedTuple):
    """found : the spans of each sequence. possible : whether every sequence has a labelling under every
    draw. width : largest difference between scores of a token that are not -inf; is_barred : whether a
    token other than the first and the last has scores of -inf."""

    found: Found
    possible: bool
    width: float
    is_barred: bool


def search_spans(
    f: Tensor,
    g: Tensor,
    mask: Tensor,
    share: Tensor,
    inside: Tensor,
    parts: Tensor,
    edges: tuple[Tensor, Tensor],
    least: float,
) -> Searched:
    """For each sequence, every span (start, stop, type) with a probability of at least ``least``, and its
    probability, most probable first. Correct where potentials are not too far apart for probability space.

    f (S, B, T, V), g, mask (B, T) : a chain; share : (S, B) shares of the draws; inside : (types, V),
    whether a label belongs to a type; parts : (V, V), whether a span ends between two labels; edges : (V,)
    each, whether a sequence may begin, and end, with a label. Cost O(S T E) per sequence, and O(S) per span
    that is likely, or would be if it were longer."""
    S, B, T, V = f.shape
    joined = ((inside[:, :, None] & inside[:, None]).any(0) & ~parts).numpy()
    allowed = (g > -torch.inf).flatten(0, -3).any(0).numpy()
    ways = Ways.of(allowed, joined, 0), Ways.of(allowed, joined, 1)
    kinds = Types(inside.nonzero()[:, 1].numpy(), np.append(0, inside.sum(1).cumsum(0).numpy()))
    lengths, n_blocks = mask.sum(-1).numpy(), -(-S // L)
    shares = np.zeros((B, n_blocks * L))
    shares[:, :S] = share.T.numpy()
    tables = g.reshape(S, 1 if g.dim() == 3 else B, -1).contiguous().numpy()
    # The spans that begin at one token exclude each other.
    most = np.minimum(lengths * (lengths + 1) // 2 * len(inside), lengths * (1 / max(least, 1e-9) + 1))
    begin = np.append(0, most.astype(np.int64).cumsum())
    places, values = np.empty((begin[-1], 3), np.int64), np.empty(begin[-1])
    counts, widths = np.zeros(B, np.int64), np.zeros((B, 2))
    given = f.contiguous().view(S, B, T * V).numpy(), tables, g.dim() == 3, lengths, shares, *ways, kinds
    starts, ends = (x.numpy() for x in edges)
    out = begin, places, values, counts, widths
    share_out(partial(find_spans, *given, starts, ends, least, *out), B, S * int(lengths.sum()) * V * V)
    possible, found = bool((counts >= 0).all()), []
    for first, count in zip(begin.tolist(), counts.tolist(), strict=False):
        some = slice(first, first + max(0, count))
        spans = zip(places[some].tolist(), values[some].tolist(), strict=True)
        found.append(sorted([(*place, p) for place, p in spans], key=_against))
    return Searched(found, possible, float(widths[:, 0].max(initial=0)), bool(widths[:, 1].any()))


def _against(span: tuple[int, int, int, float]) -> float:
    return -span[3]


@_compiled
def _side_by_side(scores: Any, b: int, block: int, n: int, out: Any) -> None:
    """out (n, L) <- the first n scores (S, B, N) of a sequence under the draws of a block; the last block
    is filled up with the last draw."""
    for s in range(L):
        row = scores[min(block * L + s, len(scores) - 1), b]
        for i in range(n):
            out[i * L + s] = row[i]


@_compiled
def _fetch(scores: Any, b: int, block: int, n: int) -> None:
    """Prefetches what ``_side_by_side`` will read."""
    for s in range(block * L, min((block + 1) * L, len(scores))):
        for i in range(0, n, L):
            fetch(scores, s, b, i)


@_compiled
def _put_tables(
    tables: Any, b: int, block: int, steps: int, ways_from: Any, ways_to: Any, room: Any, out: Any,
    apart: int, widest: Any,
) -> None:  # fmt: skip
    """out (K, 2, apart) <- for one block, exponentials (steps, E, L) of the tables of a sequence, in the
    order of the ways from each label, and in that of the ways to it. room : (steps, V V, L); widest :
    (2, L), unused."""
    E, V = len(ways_from.order), len(ways_from.cut)
    _side_by_side(tables, b, block, steps * V * V, room)
    for step in range(steps):
        exp_below_highest(room, step * V * V * L, V * V, widest, widest, L)
    for step in range(steps):
        for e in range(E):
            at, base = 2 * block * apart + (step * E + e) * L, step * V * V
            copy(out, at, room, (base + ways_from.order[e]) * L)
            copy(out, at + apart, room, (base + ways_to.order[e]) * L)


@_compiled
def _put_nodes(
    f: Any, b: int, block: int, n: int, starts: Any, ends: Any, node: Any, widest: Any, lowest: Any
) -> None:
    """node (n, V, L) <- exponentials of the scores of a sequence, 1 at the highest of each token and draw.
    lowest : (2, L) <- the lowest scores of inner tokens, and of the first and the last token."""
    V = len(starts)
    _side_by_side(f, b, block, n * V, node)
    for v in range(V):
        if not starts[v]:
            node[v * L : (v + 1) * L] = -np.inf
        if not ends[v]:
            node[((n - 1) * V + v) * L : ((n - 1) * V + v + 1) * L] = -np.inf
    for t in range(n):
        exp_below_highest(node, t * V * L, V, widest, lowest, 0 if 0 < t < n - 1 else L)


@_compiled
def _forward(
    node: Any, tables: Any, table: int, each: int, n: int, ways: Any, begins: Any, first: int, inverse: Any,
    room: Any,
) -> None:  # fmt: skip
    """begins (n, V, L), from ``first`` on, <- the part of the message to a token that comes from spans
    ending at the token before; inverse (n, L) <- 1 over the scale of its message. tables : exponentials,
    from ``table`` on and ``each`` further for each step. room : (2 V, L) work space."""
    V, VL = len(ways.cut), len(ways.cut) * L
    for v in range(V):
        fill(begins, first + v * L, 1.0)
        copy(room, v * L, node, v * L)
    for t in range(n):
        at, here, before = t * VL, VL * (t % 2), VL * ((t + 1) % 2)
        for v in range(V if t else 0):
            both_sums_of_ways(
                begins, first + at + v * L, room, here + v * L, ways.begin[v], ways.cut[v],
                ways.begin[v + 1], room, before, ways.place, tables, table, node, at + v * L, inverse,
                (t - 1) * L,
            )  # fmt: skip
        row_sum(inverse, t * L, V, room, here)
        invert(inverse, t * L, inverse, t * L)
        table += each if t else 0


@_compiled
def _backward(
    node: Any, tables: Any, table: int, each: int, n: int, ways: Any, inverse: Any, passed: Any, first: int
) -> None:
    """passed (n, V, L), from ``first`` on, <- what a token passes back to the one before."""
    V, VL = len(ways.cut), len(ways.cut) * L
    for v in range(V):
        at = (n - 1) * VL + v * L
        multiply(passed, first + at, node, at, inverse, (n - 1) * L)
    for t in range(n - 2, -1, -1):
        step, after = table + t * each, first + (t + 1) * VL
        for v in range(V):
            scaled_sum_of_ways(
                passed, first + t * VL + v * L, ways.begin[v], ways.begin[v + 1], passed, after, ways.place,
                tables, step, node, t * VL + v * L, inverse, t * L,
            )  # fmt: skip


@_compiled
def _put_begins(
    begins: Any, passed: Any, first: int, n: int, V: int, kinds: Any, share: Any, block: int, cover: Any,
    room: Any,
) -> None:  # fmt: skip
    """begins (n, V, L), from ``first`` on, <- the probability that a token has a label and that a span
    begins there; cover (n, types, L) += the sum of these over the labels of a type, times share (L,)."""
    K = len(kinds.begin) - 1
    for t in range(n):
        for k in range(K):
            fill(room, 0, 0.0)
            for i in range(kinds.begin[k], kinds.begin[k + 1]):
                at = first + (t * V + kinds.labels[i]) * L
                multiply_and_add(begins, at, passed, at, room, 0)
            add_multiplied(cover, (t * K + k) * L, room, 0, share, block * L)


@_compiled
def _go_on(
    here: Any, now: int, then: int, labels: Any, t: int, n: int, passed: Any, tables: Any, apart: int,
    each: int, ways_from: Any, ways_to: Any, share: Any, K: int, room: Any,
) -> None:  # fmt: skip
    """One step of a span. here (2, K, V, L) : at ``now``, the probability that the span has come to token t
    with each label of its type; at ``then`` <- the same for token t + 1. room (4, L) <- the probability
    that the span ends after t, and that it goes on, lane by lane."""
    VL = len(ways_from.cut) * L
    fill(room, 0, 0.0)
    fill(room, L, 0.0)
    for block in range(K):
        at, to, after = now + block * VL, then + block * VL, (block * n + t + 1) * VL
        step = 2 * block * apart + t * each
        for v in labels:
            if t == n - 1:
                add_multiplied(room, 0, here, at + v * L, share, block * L)
                continue
            begin, cut, end = ways_from.begin[v], ways_from.cut[v], ways_from.begin[v + 1]
            sum_of_ways(room, 2 * L, begin, cut, passed, after, ways_from.place, tables, step)
            sum_of_ways(room, 3 * L, cut, end, passed, after, ways_from.place, tables, step)
            add(room, 3 * L, room, 2 * L)
            invert(room, 3 * L, room, 3 * L)
            multiply(here, at + v * L, here, at + v * L, room, 3 * L)
            multiply(room, 2 * L, here, at + v * L, room, 2 * L)
            add_multiplied(room, 0, room, 2 * L, share, block * L)
        for v in labels:
            if t < n - 1:
                cut, end = ways_to.cut[v], ways_to.begin[v + 1]
                sum_of_ways(here, to + v * L, cut, end, here, at, ways_to.place, tables, step + apart)
                multiply(here, to + v * L, here, to + v * L, passed, after + v * L)
                add_multiplied(room, L, here, to + v * L, share, block * L)


@_compiled
def _search(
    start: int, n: int, kind: int, labels: Any, begins: Any, passed: Any, tables: Any, apart: int,
    each: int, ways_from: Any, ways_to: Any, share: Any, K: int, least: float, here: Any, room: Any,
    places: Any, values: Any, count: int, most: int,
) -> int:  # fmt: skip
    """Writes the likely spans of one type that begin at ``start`` to places and values, from ``count`` on
    and up to ``most``. Returns the new count. begins, passed : (K, n, V, L); here : (2, K, V, L)."""
    VL = len(ways_from.cut) * L
    for block in range(K):
        for v in labels:
            copy(here, block * VL + v * L, begins, (block * n + start) * VL + v * L)
    for t in range(start, n):
        now, then = (t - start) % 2 * K * VL, (t - start + 1) % 2 * K * VL
        _go_on(
            here, now, then, labels, t, n, passed, tables, apart, each, ways_from, ways_to, share, K, room
        )
        ended, covered = lane_sum(room, 0), lane_sum(room, L)
        if ended >= least and count < most:
            places[count, 0], places[count, 1], places[count, 2] = start, t + 1, kind
            values[count] = ended
            count += 1
        if covered < least:
            break
    return count


@_compiled
def find_spans(
    f: Any, g: Any, is_shared: bool, lengths: Any, share: Any, ways_from: Any, ways_to: Any, kinds: Any,
    starts: Any, ends: Any, least: float, begin: Any, places: Any, values: Any, counts: Any, widths: Any,
    first: int, last: int,
) -> None:  # fmt: skip
    """For sequences first..last: counts (B,) <- the number of spans, which are written to places and values
    from begin (B,) on, type by type; -1 where there is no labelling. widths (B, 2) <- the largest
    difference between scores of a token, and whether inner tokens have scores of -inf."""
    V, K, E = len(starts), share.shape[1] // L, len(ways_from.order)
    VL, n_kinds, longest = V * L, len(kinds.begin) - 1, 1
    for b in range(first, last):
        longest = max(longest, lengths[b])
    steps, each = (1, 0) if is_shared else (max(1, longest - 1), E * L)
    apart, raw = (steps * E + 1) * L, aligned(steps * V * VL, f)
    begins, passed = aligned(K * longest * VL, f), aligned(K * longest * VL, f)
    tables = aligned(2 * K * apart, f)
    node, inverse, room = aligned(longest * VL, f), aligned(longest * L, f), aligned(2 * (V + 2) * L, f)
    cover, here, widest = aligned(longest * n_kinds * L, f), aligned(2 * K * VL, f), aligned(4 * L, f)
    for block in range(K if is_shared else 0):
        _put_tables(g, 0, block, 1, ways_from, ways_to, raw, tables, apart, widest)
    for b in range(first, last):
        n, is_sound = lengths[b], True
        cover[: n * n_kinds * L] = 0
        widest[: 2 * L], widest[2 * L :] = 0, np.inf
        for block in range(K if n else 0):
            at, table = block * n * VL, 2 * block * apart
            if not is_shared:
                _put_tables(g, b, block, n - 1, ways_from, ways_to, raw, tables, apart, room)
            _put_nodes(f, b, block, n, starts, ends, node, widest, widest[2 * L :])
            if block + 1 < K:
                _fetch(f, b, block + 1, n * V)
            _forward(node, tables, table + apart, each, n, ways_to, begins, at, inverse, room)
            for i in range(n * L):
                is_sound &= 0 < inverse[i] < LARGEST
            _backward(node, tables, table, each, n, ways_from, inverse, passed, at)
            _put_begins(begins, passed, at, n, V, kinds, share[b], block, cover, room)
        for s in range(L):
            widths[b, 0] = max(widths[b, 0], widest[s])
            widths[b, 1] = max(widths[b, 1], widest[2 * L + s] == -np.inf)
        count = begin[b]
        for kind in range(n_kinds if is_sound else 0):
            labels = kinds.labels[kinds.begin[kind] : kinds.begin[kind + 1]]
            for start in range(n):
                if lane_sum(cover, (start * n_kinds + kind) * L) >= least:
                    count = _search(
                        start, n, kind, labels, begins, passed, tables, apart, each, ways_from, ways_to,
                        share[b], K, least, here, room, places, values, count, begin[b + 1],
                    )  # fmt: skip
        counts[b] = count - begin[b] if is_sound else -1
