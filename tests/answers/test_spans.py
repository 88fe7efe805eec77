"""Probabilities of spans against all labellings, read as conlleval reads them."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from structgp import metrics
from structgp.answers.potentials import Potentials
from structgp.answers.spans import Boundaries, likely_spans, span_probability, spans_by_walk
from structgp.structures import Chain, Rules
from structgp.structures.linear_chain import messages

CLOSE = 1e-8
LABELS = {
    "BIO": ["B-X", "B-Y", "I-X", "I-Y", "O"],
    "BIO without O": ["B-X", "B-Y", "I-X"],
    "IOBES": ["B-X", "E-X", "I-X", "O", "S-X"],
    "brackets": [".", "B-X", "[-X", "]-Y"],
    "bare": ["B", "I", "O"],
    "unprefixed": ["NOUN", "O", "VERB"],
    "nothing else": ["NOUN", "VERB"],
}

each_set = pytest.mark.parametrize("classes", LABELS.values(), ids=LABELS.keys())


@pytest.fixture
def make(oracles: ModuleType, mixtures: ModuleType) -> Any:
    def one(classes: list[str], seed: int = 0, T: int = 4, **given: Any) -> Any:
        return mixtures.mixture(oracles, seed, (T,), len(classes), S=3, **given)

    return one


def has(spans: list[tuple[int, int, str]], start: int, stop: int, sense: str, kind: Any) -> bool:
    for first, last, this in spans:
        same = kind is None or this == kind
        if sense == "covers" and first <= start and stop <= last and same:
            return True
        if sense != "covers" and (first, last) == (start, stop) and same:
            return True
    return False


def asked(kinds: list[str]) -> list[tuple[str, str | None]]:
    return [("bounds", None), ("covers", None), *((s, k) for s in ("covers", "exact") for k in kinds)]


@each_set
@pytest.mark.parametrize("setting", [{}, {"known": 0.3, "bans": 0.15}], ids=str)
def test_probability_of_every_span(make: Any, classes: list[str], setting: Any) -> None:
    case = make(classes, **setting)
    boundaries, at, table = Boundaries.of(classes), case.alone(0), case.by_hand(0)
    spans = [metrics.chunks([classes[i] for i in y]) for y in table.labels]
    assert boundaries.kinds == sorted({kind for found in spans for *_, kind in found})
    for sense, kind in asked(boundaries.kinds):
        which = None if kind is None else boundaries.kinds.index(kind)
        for start in range(4):
            for stop in range(start + 1, 5):
                there = np.array([has(found, start, stop, sense, kind) for found in spans])
                p = span_probability(at, boundaries, start, stop, sense, which)
                np.testing.assert_allclose(p, table.each @ there, rtol=0, atol=CLOSE)
                averaged = float(at.average(p[:, None])[0])
                assert averaged == pytest.approx(table.prob @ there, abs=CLOSE)


@each_set
@pytest.mark.parametrize("setting", [{}, {"known": 0.3, "bans": 0.15}], ids=str)
@pytest.mark.parametrize("least", [0.3, 0.05, 1e-4])
@pytest.mark.parametrize("compiled", [False, True])
def test_all_spans_that_are_likely(
    make: Any,
    monkeypatch: pytest.MonkeyPatch,
    classes: list[str],
    setting: Any,
    least: float,
    compiled: bool,
) -> None:
    if compiled:
        pytest.importorskip("numba")
        monkeypatch.setattr(messages, "WORTH_COMPILING", 0)
    case = make(classes, 1, **setting)
    boundaries, table = Boundaries.of(classes), case.by_hand(0)
    expected: dict[tuple[int, int, str], float] = {}
    for y, p in zip(table.labels, table.prob, strict=True):
        for span in metrics.chunks([classes[i] for i in y]):
            expected[span] = expected.get(span, 0.0) + p
    (found,) = likely_spans(case.alone(0), boundaries, least)
    by_span = {(start, stop, boundaries.kinds[k]): p for start, stop, k, p in found}
    assert len(by_span) == len(found)
    assert set(by_span) == {span for span, p in expected.items() if p >= least}
    for span, p in by_span.items():
        assert p == pytest.approx(expected[span], abs=CLOSE)
    values = [p for *_, p in found]
    assert values == sorted(values, reverse=True)


def test_compiled_spans_of_a_batch(make: Any, oracles: ModuleType, mixtures: ModuleType) -> None:
    """Padding, several lengths, and tables by position, against the walk."""
    pytest.importorskip("numba")
    classes = LABELS["BIO"]
    boundaries = Boundaries.of(classes)
    for case in (mixtures.mixture(oracles, 3, (5, 1, 3), 5, S=6, bans=bans) for bans in (0.0, 0.2)):
        at = case.at()
        for g in (at.g, at.g[:, None, None].expand(-1, 3, 4, -1, -1) + torch.randn(6, 3, 4, 5, 5)):
            here = replace(at, scores=(at.f, g.double()))
            slow = likely_spans(here, boundaries, 0.02)  # too little to be worth compiling
            scores, edges = (here.f, here.g), (torch.ones(5, dtype=torch.bool),) * 2
            if case.rules:  # of the first and the last token they are told apart from the scores
                scores = here.f, Rules.restrict(case.rules, (here.f, here.g), at.mask)[1]
                edges = case.rules.starts, case.rules.ends
            given = *scores, at.mask, at.share, boundaries.inside, boundaries.parts, edges
            quick, possible, *_ = compiled_spans().search_spans(*given, 0.02)
            assert possible
            assert [[s[:3] for s in spans] for spans in quick] == [[s[:3] for s in spans] for spans in slow]
            p, q = ([s[3] for spans in found for s in spans] for found in (quick, slow))
            np.testing.assert_allclose(p, q, rtol=0, atol=CLOSE)


def compiled_spans() -> Any:
    return importlib.import_module("structgp.structures.linear_chain.compiled_spans")


def test_one_token(make: Any) -> None:
    case = make(LABELS["BIO"], T=1)
    boundaries, table = Boundaries.of(LABELS["BIO"]), case.by_hand(0)
    p = table.prob[0] + table.prob[2]  # B-X, and an I-X that begins a span
    found = span_probability(case.alone(0), boundaries, 0, 1, "exact", 0)
    assert float(case.alone(0).average(found[:, None])[0]) == pytest.approx(p, abs=CLOSE)


def test_sequences_of_one_token_with_tables_by_position(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no position for a table, compiled or not."""
    case, boundaries = make(LABELS["BIO"], T=1), Boundaries.of(LABELS["BIO"])
    at = case.alone(0)
    apart = replace(at, scores=(at.f, at.g.new_empty((3, 1, 0, 5, 5))))
    expected = likely_spans(at, boundaries, 0.01)
    for least in (messages.WORTH_COMPILING, 0):
        monkeypatch.setattr(messages, "WORTH_COMPILING", least)
        (found,), (wanted,) = likely_spans(apart, boundaries, 0.01), expected
        assert [span[:3] for span in found] == [span[:3] for span in wanted]
        np.testing.assert_allclose([s[3] for s in found], [s[3] for s in wanted], rtol=0, atol=CLOSE)


def test_long_spans_are_followed_while_they_are_likely(make: Any) -> None:
    """One span over all of six tokens, and none that is shorter."""
    classes = ["B-X", "I-X", "O"]
    case = make(classes, T=6)
    case.f[:], case.g[:] = 0, 0
    case.f[:, 0, 0, 0] = case.f[:, 0, 1:, 1] = 20
    (found,) = likely_spans(case.alone(0), Boundaries.of(classes), 0.5)
    assert [span[:3] for span in found] == [(0, 6, 0)]


def test_labels_without_any_span(make: Any) -> None:
    boundaries = Boundaries.of([".", "O"])
    assert boundaries.kinds == []
    assert boundaries.inside.shape == (0, 2)
    case = make([".", "O"])
    assert likely_spans(case.alone(0), boundaries, 0.01) == [[]]
    p = span_probability(case.alone(0), boundaries, 0, 2, "bounds", None)
    assert not p.any()


def test_boundaries_of_bio() -> None:
    found = Boundaries.of(["B-X", "I-X", "I-Y", "O"])
    assert found.kinds == ["X", "Y"]
    assert found.inside.int().tolist() == [[1, 1, 0, 0], [0, 0, 1, 0]]
    joined = torch.zeros(4, 4, dtype=torch.bool)
    joined[[0, 1, 2], [1, 1, 2]] = True
    assert torch.equal(found.parts, ~joined)


def test_the_width_of_node_scores() -> None:
    pytest.importorskip("numba")
    f, lengths = np.random.default_rng(0).normal(size=(2, 3, 5, 4)), np.array([5, 1, 3])
    f[:, 2, 3:] = 1e9  # padding
    mask, free = torch.arange(5) < torch.tensor(lengths)[:, None], torch.ones(4, dtype=torch.bool)
    boundaries = Boundaries.of(["B-X", "I-X", "I-Y", "O"])

    def width() -> float:
        tokens = (f[s, b, t] for s in range(2) for b, n in enumerate(lengths) for t in range(n))
        return max(np.ptp(scores[scores > -np.inf]) for scores in tokens)

    def searched() -> Any:
        scores = torch.from_numpy(f), torch.zeros(2, 4, 4, dtype=torch.float64)
        share = torch.full((2, 3), 0.5, dtype=torch.float64)
        given = *scores, mask, share, boundaries.inside, boundaries.parts, (free, free), 0.1
        return compiled_spans().search_spans(*given)

    assert searched()[1:] == (True, pytest.approx(width()), False)
    f[1, 0, 0, 1] = f[0, 2, 2, 0] = -np.inf  # of a first and of a last token
    assert searched()[1:] == (True, pytest.approx(width()), False)
    f[0, 2, 1, 3] = -np.inf
    assert searched()[1:] == (True, pytest.approx(width()), True)
    f[0, 1, 0] = -np.inf
    assert not searched().possible


@pytest.mark.parametrize("S", [1, 8, 21])
def test_wide_scores_and_any_number_of_draws(S: int) -> None:
    """Scores so far apart that most exponentials are 0, against the walk, whose loops are others."""
    pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(S)
    f, g = (
        scale * torch.randn(S, *shape, generator=generator, dtype=torch.float64)
        for scale, shape in ((40.0, (4, 30, 5)), (3.0, (5, 5)))
    )
    mask = torch.arange(30) < torch.tensor([30, 1, 2, 17])[:, None]
    share = torch.rand(S, 4, generator=generator, dtype=torch.float64)
    at = Potentials(Chain(), (f, g), mask, share / share.sum(0))
    boundaries = Boundaries.of(LABELS["BIO"])
    quick, slow = (search(at, boundaries, 0.01) for search in (likely_spans, spans_by_walk))
    assert [len(spans) for spans in quick] == [len(spans) for spans in slow]
    for one, other in zip(quick, slow, strict=True):
        expected = {span[:3]: span[3] for span in other}
        assert {span[:3]: span[3] for span in one} == pytest.approx(expected, abs=1e-12)
