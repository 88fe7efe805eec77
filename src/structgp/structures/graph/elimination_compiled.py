"""Elimination in probability space, compiled by numba: log Z and its gradient in one go.

One example of one draw at a time. Scores are exponentiated less the maximum of their segment, tables are
products, and messages are divided by their largest number: sums of numbers that are not negative, which are
right to rounding as long as none but those of -inf becomes 0. The smallest positive number of each segment and
message bounds those of the next table: where that bound is too small, the example is given up (``UNSAFE``), to
be done in log space.

The way back gives each table the probabilities of its entries: those of its rows, known from the clique that
its message went to, shared out within each row. Their sums over all but a part's own entries are the gradient
in that part, and the probabilities of the rows of the cliques before. All of it is in double precision.

Needs numba (``structgp[fast]``), which compiles at the first use and keeps the result in a file.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from structgp.structures.graph.elimination_schedule import Schedule
from structgp.structures.linear_chain.lane_exp import exp_in_place

WORTH_A_THREAD = 1_000_000
"""Table entries of all draws below which a second thread does not pay."""

SMALLEST = 1e-280
"""A table with smaller positive entries is not trusted; the smallest normal number is 2e-308."""

WIDEST = -600.0
"""The same of the logarithm of an entry of one segment."""

DONE, IMPOSSIBLE, UNSAFE = range(3)

_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
_reordered = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})


def totals(scores: Tensor, schedule: Schedule, with_gradient: bool) -> tuple[Tensor, Tensor] | None:
    """(S, B) log Z of scores (S, B, L) and, if asked for, its gradient (S, B, L). None where the scores have
    too large a spread."""
    S, B, L = scores.shape
    given = scores.detach().contiguous().numpy()
    log_z, state = np.zeros((S, B)), np.zeros((S, B), np.int64)
    gradient = np.empty((S, B, L) if with_gradient else (0, 0, 0), given.dtype)
    arguments = given, *_arrays(schedule), log_z, state, gradient
    units = S * B
    n = max(1, min(torch.get_num_threads(), units, S * schedule.entries // WORTH_A_THREAD))
    first, *others = pairwise(units * i // n for i in range(n + 1))
    if not others:
        _run(*arguments, *first)
    else:
        with ThreadPoolExecutor(len(others)) as pool:
            running = [pool.submit(_run, *arguments, *ends) for ends in others]
            _run(*arguments, *first)
        for part in running:
            part.result()  # raises what went wrong there
    if (state == UNSAFE).any():
        return None
    return torch.from_numpy(log_z).to(scores.dtype), torch.from_numpy(gradient)


def _arrays(s: Schedule) -> tuple[np.ndarray, ...]:
    p = s.parts
    cliques = np.stack([s.n_rows, s.n_labels, s.message[:-1], s.part[:-1], s.part[1:]], 1)
    parts = [p.is_own, p.is_message, p.base, p.stride, p.source, p.row_map, p.is_straight]
    return cliques, np.stack(parts, 1).astype(np.int64), s.row_maps, s.first_clique, s.segment, s.first_segment


@_compiled
def _load(scores: Any, segment: Any, first: int, last: int, x: Any, top: Any, least: Any) -> int:
    """x (L,) <- exp of the scores less the maximum of their segment; of each segment that maximum and the
    smallest positive number."""
    for i in range(first, last):
        begin, size = segment[i, 0], segment[i, 1]
        high = -np.inf
        for j in range(begin, begin + size):
            high = scores[j] if scores[j] > high else high
        if high == -np.inf:
            return IMPOSSIBLE
        low = 0.0
        for j in range(begin, begin + size):
            x[j] = scores[j] - high
            low = x[j] if -np.inf < x[j] < low else low
        if low < WIDEST:
            return UNSAFE
        top[i - first], least[i - first] = high, low
    exp_in_place(x)
    exp_in_place(least[: last - first])
    return DONE


@_compiled
def _own(clique: Any, parts: Any, x: Any, messages: Any, offset: int, row: Any) -> int:
    """row (n,) <- the product of the parts that depend on the eliminated variable alone. Returns the first of
    the others."""
    n_labels, p = clique[1], clique[3]
    row[:n_labels] = 1.0
    while p < clique[4] and parts[p, 0]:
        stride = parts[p, 3]
        source, base = (messages, parts[p, 2] - offset) if parts[p, 1] else (x, parts[p, 2])
        if stride == 1:
            here = source[base : base + n_labels]
            for i in range(n_labels):
                row[i] *= here[i]
        else:
            for i in range(n_labels):
                row[i] *= source[base + i * stride]
        p += 1
    return p


@_compiled
def _fill(
    clique: Any, wide: int, parts: Any, row_maps: Any, x: Any, messages: Any, offset: int, row: Any,
    table: Any,
) -> None:  # fmt: skip
    """table (R n,) <- the product of the parts of a clique, of which ``row`` has those before ``wide``."""
    n_rows, n_labels, last = clique[0], clique[1], clique[4]
    if wide == last:
        table[:n_labels] = row[:n_labels]
    for p in range(wide, last):
        stride, maps = parts[p, 3], parts[p, 5]
        source, base = (messages, parts[p, 2] - offset) if parts[p, 1] else (x, parts[p, 2])
        for r in range(n_rows):
            begin, to = base + row_maps[maps + r], r * n_labels
            if p == wide:
                for i in range(n_labels):
                    table[to + i] = row[i] * source[begin + i * stride]
            else:
                for i in range(n_labels):
                    table[to + i] *= source[begin + i * stride]


@_reordered
def _product(
    clique: Any, part: Any, row_maps: Any, source: Any, base: int, row: Any, out: Any
) -> None:
    """out (R,) <- the sums of the rows of a table whose only other part is ``part``."""
    n_rows, n_labels, stride = clique[0], clique[1], part[3]
    if part[6]:
        out[:] = 0
        for i in range(n_labels):
            here, by = source[base + i * stride : base + i * stride + n_rows], row[i]
            for r in range(n_rows):
                out[r] += by * here[r]
        return
    for r in range(n_rows):
        begin, total = base + row_maps[part[5] + r], 0.0
        if stride == 1:
            here = source[begin : begin + n_labels]
            for i in range(n_labels):
                total += row[i] * here[i]
        else:
            for i in range(n_labels):
                total += row[i] * source[begin + i * stride]
        out[r] = total


@_reordered
def _product_back(
    clique: Any, part: Any, row_maps: Any, source: Any, base: int, row: Any, scale: Any, out: Any, own: Any
) -> None:
    """The way back of ``_product``: probabilities of the entries of the table, row r times ``scale[r]``, are
    added to what they come from; own (n,) <- their sums over rows."""
    n_rows, n_labels, stride = clique[0], clique[1], part[3]
    own[:n_labels] = 0
    if part[6]:
        for i in range(n_labels):
            begin = base + i * stride
            here, to, by, total = source[begin : begin + n_rows], out[begin : begin + n_rows], row[i], 0.0
            for r in range(n_rows):
                p = by * here[r] * scale[r]
                to[r] += p
                total += p
            own[i] = total
        return
    for r in range(n_rows):
        begin, by = base + row_maps[part[5] + r], scale[r]
        if stride == 1:
            here, to = source[begin : begin + n_labels], out[begin : begin + n_labels]
            for i in range(n_labels):
                p = by * here[i] * row[i]
                to[i] += p
                own[i] += p
        else:
            for i in range(n_labels):
                p = by * source[begin + i * stride] * row[i]
                out[begin + i * stride] += p
                own[i] += p


@_reordered
def _sum(x: Any, begin: int, n: int) -> float:
    total = 0.0
    for i in range(begin, begin + n):
        total += x[i]
    return total


@_compiled
def _inward(
    first: int, last: int, cliques: Any, parts: Any, row_maps: Any, x: Any, top: Any, least: Any,
    first_segment: int, messages: Any, largest: Any, message_least: Any, row: Any, table: Any,
) -> tuple[int, float]:  # fmt: skip
    """The messages of all cliques of an example, divided by their largest number; and log Z."""
    log_z = 0.0
    offset = cliques[first, 2] if last > first else 0
    for c in range(first, last):
        bound = 1.0
        for p in range(cliques[c, 3], cliques[c, 4]):
            if parts[p, 1]:
                bound *= message_least[parts[p, 4] - first]
            else:
                bound *= least[parts[p, 4] - first_segment]
                log_z += top[parts[p, 4] - first_segment]
        if bound < SMALLEST:
            return UNSAFE, 0.0
        n_rows, n_labels, to = cliques[c, 0], cliques[c, 1], cliques[c, 2] - offset
        sums = messages[to : to + n_rows]
        wide = _own(cliques[c], parts, x, messages, offset, row)
        if cliques[c, 4] == wide + 1:
            source, base = (messages, parts[wide, 2] - offset) if parts[wide, 1] else (x, parts[wide, 2])
            _product(cliques[c], parts[wide], row_maps, source, base, row, sums)
        else:
            _fill(cliques[c], wide, parts, row_maps, x, messages, offset, row, table)
            for r in range(n_rows):
                sums[r] = _sum(table, r * n_labels, n_labels)
        high, low = 0.0, np.inf
        for r in range(n_rows):
            total = sums[r]
            high = total if total > high else high
            low = total if 0 < total < low else low
        if high == 0:
            return IMPOSSIBLE, 0.0
        for r in range(n_rows):
            sums[r] /= high
        largest[c - first], message_least[c - first] = high, low / high
        log_z += math.log(high)
    return DONE, log_z


@_compiled
def _outward(
    first: int, last: int, cliques: Any, parts: Any, row_maps: Any, x: Any, messages: Any, largest: Any,
    row: Any, own: Any, table: Any, slope: Any, share: Any,
) -> None:  # fmt: skip
    """slope (L,) <- the gradient of log Z. share : of the messages, the probabilities of their rows."""
    slope.fill(0)
    if last == first:
        return
    offset = cliques[first, 2]
    share[: cliques[last - 1, 2] - offset + cliques[last - 1, 0]] = 0
    share[cliques[last - 1, 2] - offset] = 1
    for c in range(last - 1, first - 1, -1):
        n_rows, n_labels, to = cliques[c, 0], cliques[c, 1], cliques[c, 2] - offset
        wide, last_part = _own(cliques[c], parts, x, messages, offset, row), cliques[c, 4]
        scale = share[to : to + n_rows]
        for r in range(n_rows):
            if messages[to + r] > 0:
                scale[r] /= messages[to + r] * largest[c - first]
        if last_part == wide + 1:
            source, base = (messages, parts[wide, 2] - offset) if parts[wide, 1] else (x, parts[wide, 2])
            out = share if parts[wide, 1] else slope
            _product_back(cliques[c], parts[wide], row_maps, source, base, row, scale, out, own)
        else:
            _fill(cliques[c], wide, parts, row_maps, x, messages, offset, row, table)
            own[:n_labels] = 0
            for r in range(n_rows):
                for i in range(n_labels):
                    table[r * n_labels + i] *= scale[r]
                    own[i] += table[r * n_labels + i]
            for p in range(wide, last_part):
                stride, maps = parts[p, 3], parts[p, 5]
                out, base = (share, parts[p, 2] - offset) if parts[p, 1] else (slope, parts[p, 2])
                for r in range(n_rows):
                    begin = base + row_maps[maps + r]
                    for i in range(n_labels):
                        out[begin + i * stride] += table[r * n_labels + i]
        for p in range(cliques[c, 3], wide):
            stride = parts[p, 3]
            out, base = (share, parts[p, 2] - offset) if parts[p, 1] else (slope, parts[p, 2])
            for i in range(n_labels):
                out[base + i * stride] += own[i]


@_compiled
def _run(
    scores: Any, cliques: Any, parts: Any, row_maps: Any, first_clique: Any, segment: Any,
    first_segment: Any, log_z: Any, state: Any, gradient: Any, begin: int, end: int,
) -> None:  # fmt: skip
    """Units begin..end of all draws and examples."""
    B, L = scores.shape[1], scores.shape[2]
    n_messages = n_cliques = n_segments = largest = widest = 1
    for b in range(B):
        first, last = first_clique[b], first_clique[b + 1]
        n_cliques = max(n_cliques, last - first)
        n_segments = max(n_segments, first_segment[b + 1] - first_segment[b])
        if last > first:
            n_messages = max(n_messages, cliques[last - 1, 2] + cliques[last - 1, 0] - cliques[first, 2])
    for c in range(len(cliques)):
        largest = max(largest, cliques[c, 0] * cliques[c, 1])
        widest = max(widest, cliques[c, 1])
    x, slope = np.zeros(L), np.zeros(L)
    top, least = np.empty(n_segments), np.empty(n_segments)
    messages, share, message_least = np.empty(n_messages), np.empty(n_messages), np.empty(n_cliques)
    row, own, table, tops = np.empty(widest), np.empty(widest), np.empty(largest), np.empty(n_cliques)
    for unit in range(begin, end):
        s, b = unit // B, unit % B
        first, last = first_clique[b], first_clique[b + 1]
        found = _load(scores[s, b], segment, first_segment[b], first_segment[b + 1], x, top, least)
        value = 0.0
        if found == DONE:
            found, value = _inward(
                first, last, cliques, parts, row_maps, x, top, least,
                first_segment[b], messages, tops, message_least, row, table,
            )  # fmt: skip
        state[s, b] = found
        log_z[s, b] = value if found == DONE else -np.inf
        if gradient.size:
            if found == DONE:
                _outward(
                    first, last, cliques, parts, row_maps, x, messages, tops, row, own, table, slope, share
                )
                gradient[s, b] = slope
            else:
                gradient[s, b] = 0
