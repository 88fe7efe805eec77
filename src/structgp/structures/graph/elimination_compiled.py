"""Elimination in probability space, compiled by numba: log Z and its gradient in one go.

The loops take one example at a time, in eight draws side by side (``lanes``). Scores less the maximum of
their segment are exponentiated, tables are products, and messages are divided by their largest number. All
sums are of non-negative numbers and right to rounding, as long as only scores of -inf become 0. The
smallest positive numbers of segments and messages bound the entries of the next table from below; where
that bound is too small, everything is left to log space.

The backward pass gives each table the probabilities of its entries: that of each row, known from the clique
that its message went to, is divided among the entries of the row. Summed over all axes except a part's own,
they are the gradient in that part or, if the part is a message, the probabilities of the rows of the clique
that sent it. Everything is in double precision.

If a variable of the separator is in a single part, as all are in trees and layers, then rows that differ in
its label alone have all other factors in common: their sums are products of that part with one vector, and
no table is built.

Needs numba (``structgp[fast]``), which compiles at the first use and keeps the result in a file.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from structgp.structures.graph.elimination_schedule import Schedule
from structgp.structures.graph.group_lanes import ROWS, one_dot, one_slope, some_dots, some_slopes
from structgp.structures.graph.lane_code import LANES
from structgp.structures.graph.lanes import add, divide, extremes, multiply, multiply_and_add, row_sum
from structgp.structures.linear_chain.lane_exp import exp_in_place
from structgp.threads import share

SMALLEST = 1e-280
"""Smallest positive entry that a trusted table may have; the smallest normal number is 2e-308."""

WIDEST = -600.0
"""Smallest logarithm that an entry of a segment, divided by the largest, may have."""

BLOCK = 256
"""Number of table entries that are built at once: 16 KiB for eight draws, half of the nearest cache."""

VECTORS = 1024
"""Number of entries of vectors common to groups of rows that are built at once: 64 KiB for eight draws."""

_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})


def totals(scores: Tensor, schedule: Schedule, with_gradient: bool) -> tuple[Tensor, Tensor] | None:
    """(S, B) log Z of scores (S, B, L) and, if asked for, its gradient (S, B, L). None where the scores
    have too large a spread."""
    S, B, L = scores.shape
    given = scores.detach().contiguous().numpy()
    log_z = np.zeros((S, B))
    gradient = np.empty((S, B, L) if with_gradient else (0, 0, 0), given.dtype)
    arguments: tuple[Any, ...] = (given, *_arrays(schedule), log_z, gradient)
    units = -(-S // LANES) * B
    safe = all(share(partial(_run, *arguments), units, S * schedule.entries))
    return (torch.from_numpy(log_z).to(scores.dtype), torch.from_numpy(gradient)) if safe else None


def _arrays(s: Schedule) -> tuple[np.ndarray, ...]:
    """Cliques (M, 8) and parts (P, 6), each row with what the loops need, and further arrays."""
    p = s.parts
    cliques = np.stack([s.n_rows, s.n_labels, s.message[:-1], s.part[:-1], s.part[1:], *s.groups.T], 1)
    parts = np.stack([p.is_own, p.is_message, p.base, p.stride, p.source, p.row_map], 1).astype(np.int64)
    return cliques, parts, s.row_maps, s.first_clique, s.segment, s.first_segment


@_compiled
def _load(scores: Any, b: int, segment: Any, first: int, last: int, x: Any, top: Any, least: Any) -> bool:
    """x (L, lanes) <- exp of the scores (lanes, B, L) less the maximum of their segment. top, least <- for
    each segment that maximum (lanes,), -inf where nothing is possible, and its smallest positive number.
    False if a spread is too large."""
    for i in range(first, last):
        begin, size = segment[i, 0], segment[i, 1]
        least[i - first] = 0
        for k in range(LANES):
            here = scores[min(k, len(scores) - 1), b, begin : begin + size]
            high = -np.inf
            for j in range(size):
                high = here[j] if here[j] > high else high
            top[(i - first) * LANES + k] = high
            low, to = 0.0, begin * LANES + k
            for j in range(size):
                value = here[j] - high if high > -np.inf else here[j]  # -inf, or nan
                x[to + j * LANES] = value
                low = value if -np.inf < value < low else low
            least[i - first] = min(least[i - first], low)
        if least[i - first] < WIDEST:
            return False
    exp_in_place(x)
    exp_in_place(least[: last - first])
    return True


@_compiled
def _own(clique: Any, parts: Any, x: Any, messages: Any, offset: int, row: Any) -> int:
    """row (n, lanes) <- the product of the parts that depend on the eliminated variable alone. Returns the
    first other part."""
    n_labels, p = clique[1], clique[3]
    row[: n_labels * LANES] = 1.0
    while p < clique[4] and parts[p, 0]:
        step = parts[p, 3] * LANES
        source, base = (messages, parts[p, 2] - offset) if parts[p, 1] else (x, parts[p, 2])
        for i in range(n_labels):
            multiply(row, i * LANES, row, i * LANES, source, base * LANES + i * step)
        p += 1
    return p


@_compiled
def _fill(
    clique: Any, wide: int, first: int, last: int, parts: Any, row_maps: Any, x: Any, messages: Any,
    offset: int, row: Any, table: Any,
) -> None:  # fmt: skip
    """table (last - first, n, lanes) <- these rows of the product of a clique's parts; ``row`` has the
    product of those before ``wide``."""
    n_labels = clique[1]
    if wide == clique[4]:
        table[: n_labels * LANES] = row[: n_labels * LANES]
    for p in range(wide, clique[4]):
        step, maps = parts[p, 3] * LANES, parts[p, 5]
        source, base = (messages, parts[p, 2] - offset) if parts[p, 1] else (x, parts[p, 2])
        to = 0
        for r in range(first, last):
            begin = (base + row_maps[maps + r]) * LANES
            for i in range(n_labels):
                if p == wide:
                    multiply(table, to, row, i * LANES, source, begin)
                else:
                    multiply(table, to, table, to, source, begin)
                to += LANES
                begin += step


@_compiled
def _common(
    clique: Any, wide: int, groups: Any, parts: Any, row_maps: Any, x: Any, messages: Any, offset: int,
    own: Any, vectors: Any,
) -> None:  # fmt: skip
    """vectors (groups, n, lanes) <- the factor common to the rows of each group: the product of ``own`` and
    all parts from ``wide`` on, except the part on which the group depends. groups : (n_groups,) their first
    rows."""
    size = clique[1] * LANES
    for g in range(len(groups)):
        vectors[g * size : (g + 1) * size] = own[:size]
        for p in range(wide, clique[4]):
            if p != clique[5]:
                step = parts[p, 3] * LANES
                source, base = (messages, parts[p, 2] - offset) if parts[p, 1] else (x, parts[p, 2])
                at = (base + row_maps[parts[p, 5] + groups[g]]) * LANES
                for to in range(g * size, (g + 1) * size, LANES):
                    multiply(vectors, to, vectors, to, source, at)
                    at += step


@_compiled
def _next_groups(clique: Any, begin: int, groups: Any) -> Any:
    """The first rows of groups ``begin``, ``begin`` + 1, ...: as many groups as ``VECTORS`` allows."""
    size, apart = clique[6], clique[7]
    end = min(clique[0] // size, begin + max(1, VECTORS // clique[1]))
    for g in range(begin, end):
        groups[g - begin] = g // apart * size * apart + g % apart
    return groups[: end - begin]


@_compiled
def _group_sums(
    clique: Any, wide: int, parts: Any, row_maps: Any, x: Any, messages: Any, offset: int, own: Any,
    vectors: Any, room: Any,
) -> None:  # fmt: skip
    """Writes the sums of all rows of a clique to its message, group by group. Takes some rows of each group
    at a time: numbers of the part that several groups share then stay in the nearest cache."""
    n_labels, part, size, apart = clique[1], clique[5], clique[6], clique[7] * LANES
    step, maps, to = parts[part, 3] * LANES, parts[part, 5], (clique[2] - offset) * LANES
    source, base = (messages, parts[part, 2] - offset) if parts[part, 1] else (x, parts[part, 2])
    across = (row_maps[maps + clique[7]] - row_maps[maps]) * LANES
    begin = 0
    while begin < clique[0] // size:
        groups = _next_groups(clique, begin, room)
        _common(clique, wide, groups, parts, row_maps, x, messages, offset, own, vectors)
        for q in range(0, size, ROWS):
            for g in range(len(groups)):
                at = (base + row_maps[maps + groups[g]]) * LANES + q * across
                out, a = to + groups[g] * LANES + q * apart, g * n_labels * LANES
                if q + ROWS <= size:
                    some_dots(messages, out, apart, n_labels, vectors, a, source, at, step, across)
                else:
                    for _ in range(q, size):
                        one_dot(messages, out, apart, n_labels, vectors, a, source, at, step, across)
                        at, out = at + across, out + apart
        begin += len(groups)


@_compiled
def _group_slopes(
    clique: Any, wide: int, parts: Any, row_maps: Any, x: Any, messages: Any, offset: int, own: Any,
    vectors: Any, room: Any, totals: Any, slope: Any, share: Any, own_slope: Any,
) -> None:  # fmt: skip
    """Adds the probabilities of a clique's entries to the slopes of its parts from ``wide`` on and of its
    own variable; ``share`` has the probabilities of its rows, divided by their sums."""
    n_labels, part, size, apart = clique[1], clique[5], clique[6], clique[7] * LANES
    step, maps, to = parts[part, 3] * LANES, parts[part, 5], (clique[2] - offset) * LANES
    source, base = (messages, parts[part, 2] - offset) if parts[part, 1] else (x, parts[part, 2])
    out = share if parts[part, 1] else slope
    across = (row_maps[maps + clique[7]] - row_maps[maps]) * LANES
    begin = 0
    while begin < clique[0] // size:
        groups = _next_groups(clique, begin, room)
        _common(clique, wide, groups, parts, row_maps, x, messages, offset, own, vectors)
        totals[: len(groups) * n_labels * LANES] = 0
        for q in range(0, size, ROWS):
            for g in range(len(groups)):
                at = (base + row_maps[maps + groups[g]]) * LANES + q * across
                k, a = to + groups[g] * LANES + q * apart, g * n_labels * LANES
                if q + ROWS <= size:
                    some_slopes(
                        out, totals, n_labels, vectors, a, source, at, step, across, share, k, apart
                    )
                else:
                    for _ in range(q, size):
                        one_slope(
                            out, totals, n_labels, vectors, a, source, at, step, across, share, k, apart
                        )
                        at, k = at + across, k + apart
        _share_out(clique, wide, groups, parts, row_maps, offset, vectors, totals, slope, share, own_slope)
        begin += len(groups)


@_compiled
def _share_out(
    clique: Any, wide: int, groups: Any, parts: Any, row_maps: Any, offset: int, vectors: Any, totals: Any,
    slope: Any, share: Any, own_slope: Any,
) -> None:  # fmt: skip
    """Adds the sums over each group, totals times vectors, to the slopes of all factors its rows share."""
    size = clique[1] * LANES
    for at in range(0, len(groups) * size, LANES):
        multiply(totals, at, totals, at, vectors, at)
        add(own_slope, at % size, totals, at)
    for p in range(wide, clique[4]):
        if p != clique[5]:
            step = parts[p, 3] * LANES
            out, base = (share, parts[p, 2] - offset) if parts[p, 1] else (slope, parts[p, 2])
            for g in range(len(groups)):
                to = (base + row_maps[parts[p, 5] + groups[g]]) * LANES
                for at in range(g * size, (g + 1) * size, LANES):
                    add(out, to, totals, at)
                    to += step


@_compiled
def _log_product(x: Any) -> float:
    """The sum of logarithms, taking few of them: one costs more than a small clique."""
    found, product = 0.0, 1.0
    for i in range(len(x)):
        product *= x[i]
        if not 1e-20 < product < 1e100:  # times SMALLEST it is still above 0
            found += np.log(product)
            product = 1.0
    return found + np.log(product)


@_compiled
def _inward(
    first: int, last: int, cliques: Any, parts: Any, row_maps: Any, x: Any, top: Any, least: Any,
    first_segment: int, messages: Any, largest: Any, message_least: Any, row: Any, table: Any,
    vectors: Any, groups: Any, log_z: Any,
) -> bool:  # fmt: skip
    """messages <- those of all cliques of an example, divided by their largest number, and log_z (lanes,).
    False if a table is not to be trusted."""
    log_z[:] = 0
    offset = cliques[first, 2] if last > first else 0
    high, low, inverse = np.empty(LANES), np.empty(LANES), np.empty(LANES)
    for c in range(first, last):
        bound = 1.0
        for p in range(cliques[c, 3], cliques[c, 4]):
            if parts[p, 1]:
                bound *= message_least[parts[p, 4] - first]
            else:
                bound *= least[parts[p, 4] - first_segment]
                add(log_z, 0, top, (parts[p, 4] - first_segment) * LANES)
        if bound < SMALLEST:
            return False
        n_rows, n_labels, to = cliques[c, 0], cliques[c, 1], (cliques[c, 2] - offset) * LANES
        block = max(1, BLOCK // n_labels)
        wide = _own(cliques[c], parts, x, messages, offset, row)
        if cliques[c, 5] >= 0:
            _group_sums(cliques[c], wide, parts, row_maps, x, messages, offset, row, vectors, groups)
        else:
            for r in range(0, n_rows, block):
                end = min(n_rows, r + block)
                _fill(cliques[c], wide, r, end, parts, row_maps, x, messages, offset, row, table)
                for i in range(end - r):
                    row_sum(messages, to + (r + i) * LANES, n_labels, table, i * n_labels * LANES)
        if c == last - 1:  # one row, in which nan stays nan
            for k in range(LANES):
                log_z[k] += 0 * messages[to + k]
        extremes(high, low, n_rows, messages, to)
        message_least[c - first] = 1
        for k in range(LANES):
            largest[(c - first) * LANES + k] = high[k]
            inverse[k] = 1 / high[k] if high[k] > 0 else 1.0
            if high[k] > 0:
                message_least[c - first] = min(message_least[c - first], low[k] * inverse[k])
        for r in range(n_rows):
            multiply(messages, to + r * LANES, messages, to + r * LANES, inverse, 0)
    for k in range(LANES):
        log_z[k] += _log_product(largest[k : (last - first) * LANES : LANES])
    return True


@_compiled
def _outward(
    first: int, last: int, cliques: Any, parts: Any, row_maps: Any, x: Any, messages: Any, largest: Any,
    row: Any, own: Any, table: Any, vectors: Any, groups: Any, totals: Any, log_z: Any, slope: Any,
    share: Any,
) -> None:  # fmt: skip
    """slope (L, lanes) <- the gradient of log Z. share <- the probabilities of all messages' rows."""
    slope[:] = 0
    if last == first:
        return
    offset = cliques[first, 2]
    root = (cliques[last - 1, 2] - offset) * LANES
    share[: root + LANES] = 0
    for k in range(LANES):
        share[root + k] = 1 if log_z[k] > -np.inf else 0
    for c in range(last - 1, first - 1, -1):
        n_rows, n_labels, to = cliques[c, 0], cliques[c, 1], (cliques[c, 2] - offset) * LANES
        block = max(1, BLOCK // n_labels)
        wide, last_part = _own(cliques[c], parts, x, messages, offset, row), cliques[c, 4]
        own[: n_labels * LANES] = 0
        # A row's probability divided by its sum, times an entry, is the probability of the entry.
        for r in range(n_rows):
            divide(share, to + r * LANES, messages, to + r * LANES, largest, (c - first) * LANES)
        if cliques[c, 5] >= 0:
            _group_slopes(
                cliques[c], wide, parts, row_maps, x, messages, offset, row, vectors, groups, totals,
                slope, share, own,
            )  # fmt: skip
        else:
            for r in range(0, n_rows, block):
                end = min(n_rows, r + block)
                _fill(cliques[c], wide, r, end, parts, row_maps, x, messages, offset, row, table)
                at = 0
                for q in range(r, end):
                    for i in range(n_labels):
                        multiply_and_add(table, at, share, to + q * LANES, own, i * LANES)
                        at += LANES
                for p in range(wide, last_part):
                    step, maps = parts[p, 3] * LANES, parts[p, 5]
                    out, base = (share, parts[p, 2] - offset) if parts[p, 1] else (slope, parts[p, 2])
                    at = 0
                    for q in range(r, end):
                        begin = (base + row_maps[maps + q]) * LANES
                        for _ in range(n_labels):
                            add(out, begin, table, at)
                            at += LANES
                            begin += step
        for p in range(cliques[c, 3], wide):
            step = parts[p, 3] * LANES
            out, base = (share, parts[p, 2] - offset) if parts[p, 1] else (slope, parts[p, 2])
            for i in range(n_labels):
                add(out, base * LANES + i * step, own, i * LANES)


@_compiled
def _run(
    scores: Any, cliques: Any, parts: Any, row_maps: Any, first_clique: Any, segment: Any,
    first_segment: Any, log_z: Any, gradient: Any, begin: int, end: int,
) -> bool:  # fmt: skip
    """Units begin..end, each one example in eight draws, or in as many as are left. False if one is not
    safe."""
    S, B, L = scores.shape
    n_messages = n_cliques = n_segments = widest = 1
    for b in range(B):
        first, last = first_clique[b], first_clique[b + 1]
        n_cliques = max(n_cliques, last - first)
        n_segments = max(n_segments, first_segment[b + 1] - first_segment[b])
        if last > first:
            n_messages = max(n_messages, cliques[last - 1, 2] + cliques[last - 1, 0] - cliques[first, 2])
    for c in range(len(cliques)):
        widest = max(widest, cliques[c, 1])
    x, slope = np.zeros(L * LANES), np.zeros(L * LANES)
    top, least = np.empty(n_segments * LANES), np.empty(n_segments)
    messages, share = np.empty(n_messages * LANES), np.empty(n_messages * LANES)
    tops, message_least = np.empty(n_cliques * LANES), np.empty(n_cliques)
    row, own, value = np.empty(widest * LANES), np.empty(widest * LANES), np.empty(LANES)
    table, vectors = np.empty(max(BLOCK, widest) * LANES), np.empty(max(VECTORS, widest) * LANES)
    totals, groups = np.empty_like(vectors), np.empty(VECTORS, np.int64)
    for unit in range(begin, end):
        s, b = unit // B * LANES, unit % B
        first, last, n = first_clique[b], first_clique[b + 1], min(LANES, S - s)
        if not _load(
            scores[s : s + n], b, segment, first_segment[b], first_segment[b + 1], x, top, least
        ) or not _inward(
            first, last, cliques, parts, row_maps, x, top, least,
            first_segment[b], messages, tops, message_least, row, table, vectors, groups, value,
        ):  # fmt: skip
            return False
        for k in range(n):
            log_z[s + k, b] = value[k]
        if gradient.size:
            _outward(
                first, last, cliques, parts, row_maps, x, messages, tops, row, own, table, vectors,
                groups, totals, value, slope, share,
            )  # fmt: skip
            for k in range(n):
                for j in range(L):
                    gradient[s + k, b, j] = slope[j * LANES + k]
    return True
