"""The search of ``best_spans`` compiled by numba: the same labellings, for many sequences at once.

Needs numba (``structgp[fast]``)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

_compiled = njit(cache=True, nogil=True, error_model="numpy")


@_compiled
def _reach(score: Any, apart: Any, bonus: Any, before: Any, reach: Any) -> None:
    """Sets reach (V,) to the most that labels up to a token can be worth if a part begins there with each
    label, and before (V,) to the label before it. score : (V,) the worth of the labels before the token."""
    V = len(bonus)
    for v in range(V):
        best, at = -np.inf, 0
        for u in range(V):
            if apart[u, v] and score[u] > best:
                best, at = score[u], u
        reach[v], before[v] = best + bonus[v], at


@_compiled
def _go_on(here: Any, labels: Any, on: Any, bonus: Any, origin: Any, moved: Any) -> None:
    """Extends a span by one token: sets moved (n,) to the worth of all labels so far, without that of the
    span itself, if the new token has each of the n labels of the type, and origin (n,) to the index in
    ``labels`` of the label before, -1 if there is none."""
    for j in range(len(labels)):
        origin[j] = -1
        for i in range(len(labels)):
            if on[labels[i], labels[j]] and (origin[j] < 0 or here[i] > here[origin[j]]):
                origin[j] = i
        moved[j] = -np.inf if origin[j] < 0 else here[origin[j]] + bonus[labels[j]]


@_compiled
def _labels_of_span(
    start: int, stop: int, last: int, first: Any, labels: Any, on: Any, bonus: Any, out: Any
) -> None:
    """Sets out (T,) to the labels of a span that ends with ``last``. first : (V,) worth of its first label,
    with all labels before it."""
    n = len(labels)
    here, moved, origin = np.empty(n), np.empty(n), np.empty((stop - start, n), np.int64)
    j = 0
    for i in range(n):
        here[i] = first[labels[i]]
        j = i if labels[i] == last else j
    for t in range(start + 1, stop):
        _go_on(here, labels, on, bonus[t], origin[t - start], moved)
        here, moved = moved, here
    for t in range(stop - 1, start - 1, -1):
        out[t] = labels[j]
        j = origin[t - start, j] if t > start else j


@_compiled
def best_labellings(
    bonus: Any, begin: Any, apart: Any, on: Any, outside: Any, labels: Any, label_begin: Any, spans: Any,
    worth: Any, span_begin: Any, out: Any, found: Any,
) -> None:  # fmt: skip
    """Sets out (N,) to the labels of the tokens of B sequences, and found (B,) to True where there is a
    labelling.

    bonus : (N, V) worth of each label. begin : (B + 1,) where sequences begin. apart, on : (V, V) True if
    two labels may follow each other with and without a boundary between them. outside : the labels outside
    of spans. labels, label_begin : the labels of each type, one type after the other, and where those of
    each type begin. spans : (M, 3) start, type and stop of each span, sorted in this order within each
    sequence; span_begin : (B + 1,) where those of each sequence begin; worth : (M,) worth of each span."""
    V, longest = bonus.shape[1], 0
    for b in range(len(begin) - 1):
        longest = max(longest, begin[b + 1] - begin[b])
    score, reach = np.empty((longest + 1, V)), np.empty((longest, V))
    before, since = np.empty((longest, V), np.int64), np.empty((longest + 1, V), np.int64)
    type_of, here, moved = np.empty((longest + 1, V), np.int64), np.empty(V), np.empty(V)
    unused = np.empty(V, np.int64)
    for b in range(len(begin) - 1):
        own, n, s = bonus[begin[b] : begin[b + 1]], begin[b + 1] - begin[b], span_begin[b]
        score[: n + 1] = -np.inf
        for t in range(n):
            if t:
                _reach(score[t], apart, own[t], before[t], reach[t])
            else:
                reach[0], before[0] = own[0], 0
            for o in outside:
                if reach[t, o] > score[t + 1, o]:
                    score[t + 1, o], since[t + 1, o], type_of[t + 1, o] = reach[t, o], t, -1
            while s < span_begin[b + 1] and spans[s, 0] == t:
                kind, stop = spans[s, 1], t + 1
                some = labels[label_begin[kind] : label_begin[kind + 1]]
                for i in range(len(some)):
                    here[i] = reach[t, some[i]]
                while s < span_begin[b + 1] and spans[s, 0] == t and spans[s, 1] == kind:
                    while stop < spans[s, 2]:
                        _go_on(here, some, on, own[stop], unused, moved)
                        here, moved = moved, here
                        stop += 1
                    for i in range(len(some)):
                        if here[i] + worth[s] > score[stop, some[i]]:
                            score[stop, some[i]] = here[i] + worth[s]
                            since[stop, some[i]], type_of[stop, some[i]] = t, kind
                    s += 1
        v = np.argmax(score[n])
        found[b], t = score[n, v] > -np.inf, n
        while t and found[b]:
            start, kind = since[t, v], type_of[t, v]
            if kind < 0:
                out[begin[b] + start] = v
            else:
                some = labels[label_begin[kind] : label_begin[kind + 1]]
                _labels_of_span(start, t, v, reach[start], some, on, own, out[begin[b] : begin[b + 1]])
            v = before[start, out[begin[b] + start]]
            t = start
