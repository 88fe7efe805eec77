"""Scores against drawn labellings, beside the metrics and beside all labellings."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from structgp import metrics
from structgp.answers.expected import agreement, drawn_agreement, expected_scores
from structgp.answers.spans import Boundaries

LABELS = {
    "BIO": ["B-X", "B-Y", "I-X", "I-Y", "O"],
    "IOBES": ["B-X", "E-X", "I-X", "O", "S-X"],
    "bare": ["B", "I", "O"],
    "unprefixed": ["NOUN", "VERB"],
}


@pytest.mark.parametrize("classes", LABELS.values(), ids=LABELS.keys())
def test_counts_are_those_of_the_metrics(classes: list[str]) -> None:
    rng, lengths = np.random.default_rng(0), (7, 1, 4)
    guess, y = (torch.from_numpy(rng.integers(len(classes), size=s)) for s in ((3, 7), (20, 3, 7)))
    y[:10] = torch.where(torch.from_numpy(rng.random((10, 3, 7)) < 0.8), guess, y[:10])  # mostly alike
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]

    def named(labels: torch.Tensor) -> list[list[str]]:
        return [[classes[i] for i in row[:n]] for row, n in zip(labels.tolist(), lengths, strict=True)]

    for drawn, found in zip(y, agreement(y, guess, mask, Boundaries.of(classes)).tolist(), strict=True):
        spans = metrics.span_scores(named(drawn), named(guess))
        wrong = round(metrics.token_error(named(drawn), named(guess)) * sum(lengths))
        assert found == [wrong, spans.n_true, spans.n_pred, spans.n_correct]


def test_draws_are_of_the_posterior(oracles: ModuleType, mixtures: ModuleType) -> None:
    """Under each draw of the functions, mean counts are those over all labellings."""
    classes, n = LABELS["bare"], 3000
    case = mixtures.mixture(oracles, 1, (4,), 3, S=3)
    at, table, boundaries = case.alone(0), case.by_hand(0), Boundaries.of(classes)
    guess = torch.tensor([[0, 1, 2, 0]])
    found = drawn_agreement(at, guess, boundaries, n, torch.Generator().manual_seed(0))
    every = agreement(torch.tensor(table.labels)[:, None], guess, at.mask, boundaries).double()
    means = found.double().view(n, 3, 4).mean(0)
    spread = (
        torch.tensor(table.each) @ every.square() - (torch.tensor(table.each) @ every).square()
    ).clamp(0)
    assert ((means - torch.tensor(table.each) @ every).abs() <= 4 * (spread / n).sqrt() + 1e-9).all()
    assert (means[0] - means[1]).abs().max() > 0.05  # draws differ


def test_scores_and_their_quantiles() -> None:
    counts = np.array([[k, 10, 8, 8 - k] for k in range(5)])
    found = expected_scores(counts, [15, 0, 5], 0.5)
    assert found.error == pytest.approx((0.1, 0.05, 0.15))
    assert found.precision == pytest.approx((6 / 8, 5 / 8, 7 / 8))
    assert found.recall == pytest.approx((0.6, 0.5, 0.7))
    assert found.f1 == pytest.approx((12 / 18, 10 / 18, 14 / 18))
    assert (found.n_sequences, found.n_tokens) == (2, 20)
    alike = expected_scores(counts, [15, 0, 5], 0.5, (1.0, 1e-9))
    assert alike.f1 == pytest.approx(found.f1)
    nothing = expected_scores(np.zeros((3, 4)), [4], 0.9)
    assert nothing.f1 == nothing.precision == (0, 0, 0)


def test_an_interval_contains_the_mean() -> None:
    """Even where one draw of many has all the errors."""
    counts = np.array([[0, 10, 10, 10]] * 99 + [[8, 10, 10, 2]])
    found = expected_scores(counts, [20], 0.9)
    assert found.error == pytest.approx((0.004, 0, 0.004))
    assert found.f1 == pytest.approx((0.992, 0.992, 1))


def test_errors_counted_in_cross_validation_move_what_is_expected() -> None:
    """As far as they are sure of it, and no further than draws leave it open."""
    rng = np.random.default_rng(1)
    wrong = rng.normal(100, 20, size=4000)
    counts = np.stack([wrong, np.full(4000, 500), np.full(4000, 500), 500 - wrong], 1)

    def log_error(ratio: float, error: float) -> tuple[float, float]:
        found = expected_scores(counts, [1000], 0.9, (ratio, error)).error
        return float(np.log(found.mean / 0.1)), np.log(found.high / found.low)

    usual = expected_scores(counts, [1000], 0.9).error
    width = np.log(usual.high / usual.low)
    assert log_error(0.5, 1e-6) == pytest.approx((np.log(0.5), width), abs=0.01)  # all is known
    moved, wider = log_error(0.5, 0.2)
    assert moved == pytest.approx(0.5 * np.log(0.5) + 0.01, abs=0.02)  # as sure as the draws: half way
    assert wider == pytest.approx(width * np.sqrt(1.5), rel=0.05)
    assert log_error(0.5, 100.0)[0] == pytest.approx(0.02, abs=0.02)  # nothing is known
    assert expected_scores(counts, [1000], 0.9, (50.0, 1e-6)).f1 == (0, 0, 0)
