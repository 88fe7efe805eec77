"""Uncertainty against entropies of all labellings."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import entropy

from structgp.answers import uncertainty

CLOSE = 1e-8
SETTINGS = [{}, {"known": 0.4}, {"known": 0.4, "bans": 0.2}]

under_all = pytest.mark.parametrize("setting", SETTINGS, ids=str)


@pytest.fixture
def make(oracles: ModuleType, mixtures: ModuleType) -> Any:
    return lambda seed=0, **given: mixtures.mixture(oracles, seed, **given)


@under_all
def test_uncertainty_of_tokens(make: Any, setting: Any) -> None:
    case = make(0, **setting)
    found = uncertainty.token_uncertainty(case.at())
    for b, n in enumerate(case.lengths):
        table = case.by_hand(b)
        total = entropy(table.marginals(table.prob, 3), axis=-1)
        each = [entropy(table.marginals(p, 3), axis=-1) for p in table.each]
        np.testing.assert_allclose(found.total[b, :n], total, rtol=0, atol=CLOSE)
        np.testing.assert_allclose(found.data[b, :n], table.share @ each, rtol=0, atol=CLOSE)
        for part in (found.total, found.data, found.model):
            assert not part[b, n:].any()
    assert (found.model > -1e-12).all()
    assert found.model.max() > 0.01


def test_uncertainty_of_an_event() -> None:
    p, share = np.array([0.2, 0.9, 0.0]), np.array([0.5, 0.2, 0.3])
    found = uncertainty.event_uncertainty(torch.tensor(p), torch.tensor(share))
    assert float(found.total) == pytest.approx(entropy([p @ share, 1 - p @ share]), abs=1e-12)
    each = entropy(np.stack([p, 1 - p]), axis=0)
    assert float(found.data) == pytest.approx(each @ share, abs=1e-12)
    assert float(found.model) == pytest.approx(float(found.total) - each @ share, abs=1e-12)


def test_an_event_that_rounding_makes_too_probable() -> None:
    p = torch.tensor([1 + 1e-15, -1e-17], dtype=torch.float64)
    found = uncertainty.event_uncertainty(p, torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert float(found.total) == pytest.approx(0, abs=1e-12)
    assert float(found.data) == pytest.approx(0, abs=1e-12)


@under_all
def test_uncertainty_of_sequences(make: Any, setting: Any) -> None:
    """The model's part from 1,000 labellings, within four standard errors."""
    case, n = make(1, **setting), 1_000
    found = uncertainty.sequence_uncertainty(case.at(), n, torch.Generator().manual_seed(0))
    for b in range(4):
        table = case.by_hand(b)
        data = table.share @ entropy(table.each, axis=-1)
        assert float(found.data[b]) == pytest.approx(data, abs=CLOSE)
        # What a labelling tells of the draw that it came from, and how much that varies.
        possible = table.prob > 0
        belief = table.joint[:, possible] / table.joint[:, possible].sum(0)
        told = entropy(belief, table.share[:, None], axis=0)
        mean = table.prob[possible] @ told
        assert data + mean == pytest.approx(entropy(table.prob), abs=1e-10)
        error = np.sqrt(table.prob[possible] @ (told - mean) ** 2 / n)
        assert float(found.model[b]) == pytest.approx(mean, abs=4 * error + 1e-9)
        assert float(found.total[b]) == pytest.approx(entropy(table.prob), abs=4 * error + 1e-9)


@under_all
def test_one_draw_is_exact(make: Any, setting: Any) -> None:
    case = make(2, S=1, **setting)
    for at, mean in ((case.at(), False), (case.at(mean=True), True)):
        found = uncertainty.sequence_uncertainty(at, 1, torch.Generator().manual_seed(0))
        for b in range(4):
            expected = entropy(case.by_hand(b, mean=mean).prob)
            assert float(found.total[b]) == pytest.approx(expected, abs=CLOSE)
        assert not found.model.any()
        assert uncertainty.token_uncertainty(at).model.abs().max() < 1e-12


def test_draws_that_agree_leave_the_model_no_uncertainty(make: Any) -> None:
    case = make(3, S=4)
    case.f[:], case.g[:] = case.f[:1], case.g[:1]
    found = uncertainty.sequence_uncertainty(case.at(), 16, torch.Generator().manual_seed(0))
    assert found.model.abs().max() < 1e-12
    assert (found.data > 0.1).all()


def test_draws_that_are_sure_of_different_labellings(make: Any) -> None:
    """All uncertainty is the model's: log 2 nats, of a token and of the sequence."""
    case = make(0, lengths=(3,), V=2, S=2)
    case.g[:] = 0
    case.f[0], case.f[1] = [60.0, 0.0], [0.0, 60.0]
    for found in (
        uncertainty.token_uncertainty(case.at()),
        uncertainty.sequence_uncertainty(case.at(), 8, torch.Generator().manual_seed(0)),
    ):
        np.testing.assert_allclose(found.model, np.log(2), rtol=0, atol=1e-12)
        assert found.data.abs().max() < 1e-12
