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
    parts = np.stack([p.is_own, p.is_message, p.base, p.stride, p.source, p.row_map], 1).astype(np.int64)
    return cliques, parts, s.row_maps, s.first_clique, s.segment, s.first_segment


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
def _fill(
    clique: Any, parts: Any, row_maps: Any, x: Any, messages: Any, offset: int, row: Any, table: Any
) -> int:
    """table (R n,) <- the product of the parts of a clique. Returns the first part that is not its own."""
    n_rows, n_labels = clique[0], clique[1]
    p, last = clique[3], clique[4]
    row[:n_labels] = 1.0
    while p < last and parts[p, 0]:
        stride = parts[p, 3]
        if parts[p, 1]:
            source, base = messages, parts[p, 2] - offset
        else:
            source, base = x, parts[p, 2]
        for i in range(n_labels):
            row[i] *= source[base + i * stride]
        p += 1
    wide = p
    if p == last:
        for r in range(n_rows):
            table[r * n_labels : (r + 1) * n_labels] = row[:n_labels]
    while p < last:
        stride, maps = parts[p, 3], parts[p, 5]
        if parts[p, 1]:
            source, base = messages, parts[p, 2] - offset
        else:
            source, base = x, parts[p, 2]
        for r in range(n_rows):
            begin, to = base + row_maps[maps + r], r * n_labels
            if p == wide:
                for i in range(n_labels):
                    table[to + i] = row[i] * source[begin + i * stride]
            else:
                for i in range(n_labels):
                    table[to + i] *= source[begin + i * stride]
        p += 1
    return wide


@_reordered
def _sum(x: Any, begin: int, n: int) -> float:
    total = 0.0
    for i in range(begin, begin + n):
        total += x[i]
    return total


@_compiled
def _inward(
    first: int, last: int, cliques: Any, parts: Any, row_maps: Any, x: Any, top: Any, least: Any,
    first_segment: int, messages: Any, message_least: Any, row: Any, table: Any,
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
        _fill(cliques[c], parts, row_maps, x, messages, offset, row, table)
        n_rows, n_labels, to = cliques[c, 0], cliques[c, 1], cliques[c, 2] - offset
        high, low = 0.0, np.inf
        for r in range(n_rows):
            total = _sum(table, r * n_labels, n_labels)
            messages[to + r] = total
            high = total if total > high else high
            low = total if 0 < total < low else low
        if high == 0:
            return IMPOSSIBLE, 0.0
        for r in range(n_rows):
            messages[to + r] /= high
        message_least[c - first] = low / high
        log_z += math.log(high)
    return DONE, log_z


@_compiled
def _outward(
    first: int, last: int, cliques: Any, parts: Any, row_maps: Any, x: Any, messages: Any, row: Any,
    table: Any, slope: Any, share: Any,
) -> None:  # fmt: skip
    """slope (L,) <- the gradient of log Z. share : of the messages, the probabilities of their rows."""
    slope.fill(0)
    if last == first:
        return
    offset = cliques[first, 2]
    share[: cliques[last - 1, 2] - offset + cliques[last - 1, 0]] = 0
    share[cliques[last - 1, 2] - offset] = 1
    for c in range(last - 1, first - 1, -1):
        wide = _fill(cliques[c], parts, row_maps, x, messages, offset, row, table)
        n_rows, n_labels, to = cliques[c, 0], cliques[c, 1], cliques[c, 2] - offset
        row[:n_labels] = 0
        for r in range(n_rows):
            begin = r * n_labels
            total = _sum(table, begin, n_labels)
            scale = share[to + r] / total if total > 0 else 0.0
            for i in range(n_labels):
                table[begin + i] *= scale
                row[i] += table[begin + i]
        for p in range(cliques[c, 3], cliques[c, 4]):
            stride = parts[p, 3]
            if parts[p, 1]:
                out, base = share, parts[p, 2] - offset
            else:
                out, base = slope, parts[p, 2]
            if p < wide:
                for i in range(n_labels):
                    out[base + i * stride] += row[i]
                continue
            for r in range(n_rows):
                begin, source = base + row_maps[parts[p, 5] + r], r * n_labels
                for i in range(n_labels):
                    out[begin + i * stride] += table[source + i]


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
    row, table = np.empty(widest), np.empty(largest)
    for unit in range(begin, end):
        s, b = unit // B, unit % B
        first, last = first_clique[b], first_clique[b + 1]
        found = _load(scores[s, b], segment, first_segment[b], first_segment[b + 1], x, top, least)
        value = 0.0
        if found == DONE:
            found, value = _inward(
                first, last, cliques, parts, row_maps, x, top, least,
                first_segment[b], messages, message_least, row, table,
            )  # fmt: skip
        state[s, b] = found
        log_z[s, b] = value if found == DONE else -np.inf
        if gradient.size:
            if found == DONE:
                _outward(
                    first, last, cliques, parts, row_maps, x, messages, row, table, slope, share
                )
                gradient[s, b] = slope
            else:
                gradient[s, b] = 0
