"""Labels for the best span F1, and for the lowest cost, against all labellings."""

from __future__ import annotations

from itertools import combinations
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from structgp import metrics
from structgp.answers import labellings
from structgp.answers.best_spans import LEFT_OUT, TIE, SpanDecoder, expected_f1
from structgp.answers.spans import Boundaries, likely_spans

SETS = {
    "BIO": ["B-X", "B-Y", "I-X", "I-Y", "O"],
    "IO": ["I-X", "I-Y", "O"],
    "IOBES": ["B-X", "E-X", "I-X", "O", "S-X"],
    "without O": ["B", "I"],
}


@pytest.mark.parametrize("seed", range(20))
def test_the_best_set_of_all(seed: int) -> None:
    """Two sequences, whose best spans are chosen together."""
    rng = np.random.default_rng(seed)
    each = []
    for _ in range(2):
        places = [(a, b) for a in range(4) for b in range(a + 1, 5)]
        some = rng.choice(len(places), 6, replace=False)
        each.append([(*places[i], "X", p) for i, p in zip(some, rng.dirichlet(np.ones(6)), strict=True)])
    sets = [[c for n in range(5) for c in combinations(spans, n) if _apart(c)] for spans in each]
    wanted = sum(s[3] for spans in each for s in spans)
    best = max(2 * sum(s[3] for s in a + b) / (len(a + b) + wanted) for a in sets[0] for b in sets[1])
    f1, threshold = expected_f1(each)
    assert f1 == pytest.approx(best, abs=1e-12)
    assert threshold == f1 / 2


def _apart(spans: Any) -> bool:
    return all(a[1] <= b[0] or b[1] <= a[0] for a, b in combinations(spans, 2))


def test_nothing_to_choose_from() -> None:
    assert expected_f1([]) == expected_f1([[]]) == (0.0, 0.0)


@pytest.mark.parametrize("classes", SETS.values(), ids=SETS.keys())
@pytest.mark.parametrize(
    "setting", [{}, {"known": 0.3}, {"bans": 0.2}, {"known": 0.2, "bans": 0.2}], ids=str
)
@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.6])
def test_the_labelling_worth_most(
    oracles: ModuleType, mixtures: ModuleType, classes: list[str], setting: Any, threshold: float
) -> None:
    case = mixtures.mixture(oracles, 5, (4,), len(classes), S=3, **setting)
    at, table, V = case.alone(0), case.by_hand(0), len(classes)
    allowed = [np.ones(shape, bool) for shape in ((V, V), V, V)]
    if case.rules is not None:
        allowed = [x.numpy() for x in (case.rules.follows, case.rules.starts, case.rules.ends)]
    boundaries = Boundaries.of(classes)
    decoder = SpanDecoder(classes, boundaries, threshold, *allowed)
    (spans,) = likely_spans(at, boundaries, 1e-9)
    p = at.marginals()[0].numpy()
    found = decoder.labels(spans, p, labellings.best_tokens(at.marginals(), at.mask, case.rules)[0].numpy())
    inside = boundaries.inside.any(0).numpy()
    outside = np.maximum(p[:, ~inside].sum(1, keepdims=True), 1e-6)
    token = TIE * p + LEFT_OUT * ~inside * np.minimum(0, np.log(outside / p.max(1, keepdims=True)))
    value = {(start, stop, boundaries.kinds[k]): q for start, stop, k, q in spans}

    def worth(labels: Any) -> float:
        chunks = metrics.chunks([classes[v] for v in labels])
        return sum(value.get(c, 0.0) - threshold for c in chunks) + token[np.arange(4), labels].sum()

    possible = [labels for labels, q in zip(table.labels, table.prob, strict=True) if q > 0]
    assert any((labels == found).all() for labels in possible)
    assert worth(found) == pytest.approx(max(map(worth, possible)), abs=1e-9)


@pytest.mark.parametrize("classes", SETS.values(), ids=SETS.keys())
@pytest.mark.parametrize("with_rules", [False, True])
def test_many_sequences_at_once(classes: list[str], with_rules: bool) -> None:
    """Compiled loops find what the search of one sequence finds, ties and dead ends included."""
    pytest.importorskip("numba")
    rng, V = np.random.default_rng(len(classes)), len(classes)
    kinds, p, each, usual = Boundaries.of(classes).kinds, [], [], []
    for n in (6, 1, 9, 2, 0, 12, 7, 3) * 8:
        p.append(rng.dirichlet(np.full(V, 0.3), n).round(2))
        usual.append(p[-1].argmax(1))
        places = [(a, b, k) for a in range(n) for b in range(a + 1, n + 1) for k in range(len(kinds))]
        some = rng.permutation(len(places))[: 2 * n]
        each.append([(*places[i], round(float(rng.random()), 1)) for i in some])
    allowed = [rng.random(shape) < 0.7 if with_rules else np.ones(shape, bool) for shape in ((V, V), V, V)]
    decoder = SpanDecoder(classes, Boundaries.of(classes), 0.3, *allowed)
    expected = [
        decoder.labels(*given) if len(given[1]) else np.empty(0)
        for given in zip(each, p, usual, strict=True)
    ]
    asked: list[int] = []

    def fallback(i: int) -> np.ndarray:
        asked.append(i)
        return np.array(usual[i])

    found = decoder.all_labels(each, p, fallback)
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]
    assert decoder.all_labels([], [], fallback) == []
    assert len(asked) < len(p)
    assert bool(asked) or not with_rules


def test_where_no_likely_span_agrees_with_what_is_known() -> None:
    """The fallback's spans are added."""
    classes = ["B-X", "I-X", "O"]
    free = [np.ones(shape, bool) for shape in ((3, 3), 3, 3)]
    decoder = SpanDecoder(classes, Boundaries.of(classes), 0.5, *free)
    p = np.array([[1.0, 0.0, 0.0], [0.0, 0.4, 0.6]])
    assert decoder.labels([], p, np.array([0, 2])).tolist() == [0, 2]


@pytest.mark.parametrize("setting", [{}, {"known": 0.3}, {"bans": 0.2}], ids=str)
def test_the_cheapest_labelling(oracles: ModuleType, mixtures: ModuleType, setting: Any) -> None:
    case = mixtures.mixture(oracles, 2, (4,), 3, S=3, **setting)
    at, table = case.alone(0), case.by_hand(0)
    costs = np.random.default_rng(0).random((3, 3)) * 5

    def cost(labels: Any) -> float:
        return float(sum(q * costs[z, labels].sum() for z, q in zip(table.labels, table.prob, strict=True)))

    found = labellings.cheapest_tokens(at.marginals(), at.mask, case.rules, torch.tensor(costs))[0].numpy()
    # Given what is known, each token may have any label that has a probability, if the rules agree.
    p = at.marginals()[0].numpy()
    tokens = np.arange(4)
    possible = [z for z in table.labels if case.obeys(z) and (p[tokens, z] > 0).all()]
    assert cost(found) == pytest.approx(min(map(cost, possible)), abs=1e-9)


@pytest.mark.parametrize(("outside", "label"), [(0.01, "O"), (0.0001, "B-X")])
def test_no_label_is_all_but_impossible(outside: float, label: str) -> None:
    """A span that is worth less than nothing is left out, unless its token is almost surely in a span."""
    decoder = SpanDecoder.of(["B-X", "B-Y", "O"], 0.5, None)
    p = np.array([[0.6, 0.4 - outside, outside]])
    (found,) = decoder.labels([(0, 1, 0, 0.3), (0, 1, 1, 0.2)], p, np.array([0]))
    assert decoder.classes[found] == label
