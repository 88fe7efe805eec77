"""The paper's control variate against its formula, written out; and the baselines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from structgp.inference.estimators import Draws, Moments, Target
from structgp.inference.estimators.designs import draw, replicate_sizes
from structgp.paper import Score
from structgp.paper.score import REPLICATES, TENTHS
from structgp.plan.optimizers import ESTIMATORS

B, T, V = 2, 2, 2
MASK = torch.tensor([[True, True], [True, False]])
WEIGHT = torch.tensor([0.3, 0.9], dtype=torch.float64)

both_pairs = pytest.mark.parametrize("pairs_are_full", [False, True])


def log_prob(unary: Tensor, pairwise: Tensor) -> Tensor:
    real = unary * MASK[..., None]
    z = real[..., 0].sum(-1) - 0.5 * real[..., 1].sum(-1) + pairwise[:, 0, 1, None]
    return -2 - torch.nn.functional.softplus(z) - 0.2 * (real * real.roll(1, 2)).sum((-1, -2))


def make_target(pairs_are_full: bool) -> Target:
    return Target(log_prob, MASK, WEIGHT, V, pairs_are_full)


def scores(draws: Draws, pairs_are_full: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """h for each draw: (S, B, T, V) and (S, B, V, T, T) of the unary numbers, (S, n) of the pairwise."""
    e, p = draws.unary.numpy(), draws.pairwise.flatten(1).numpy()
    S = len(e)
    bend = np.zeros((S, B, V, T, T))
    for t in range(T):
        for u in range(T):
            bend[:, :, :, t, u] = e[:, :, t] * e[:, :, u] - (t == u)
    second = (
        np.stack([np.outer(row, row) - np.eye(V * V) for row in p]).reshape(S, -1)
        if pairs_are_full
        else p**2 - 1
    )
    return e, bend, np.concatenate([p, second], 1)


def a_hat(h: np.ndarray, l: np.ndarray) -> float:
    """Cov[h l, h] / Var[h] of one entry."""
    g = h * l
    return ((g - g.mean()) * (h - h.mean())).mean() / h.var()


@both_pairs
@pytest.mark.parametrize("n_draws", [200, 97])
def test_the_control_variate_is_the_papers(pairs_are_full: bool, n_draws: int) -> None:
    """One entry at a time: a-hat from the first tenth, g - a-hat h averaged over all the others."""
    target = make_target(pairs_are_full)
    found = ESTIMATORS["control-variate"].with_draws(n_draws)(
        target, torch.Generator().manual_seed(1)
    )
    sizes = replicate_sizes(n_draws, TENTHS, "iid")
    assert sizes[0] == -(-n_draws // 10)
    first, *rest = draw(target, "iid", sizes, torch.Generator().manual_seed(1))
    later = Draws(torch.cat([d.unary for d in rest]), torch.cat([d.pairwise for d in rest]))
    tuning, serving = scores(first, pairs_are_full), scores(later, pairs_are_full)
    l0 = log_prob(first.unary, first.pairwise).numpy()
    l1 = log_prob(later.unary, later.pairwise).numpy()

    def estimate(h0: np.ndarray, h1: np.ndarray, one: np.ndarray, other: np.ndarray) -> float:
        return (h1 * other - a_hat(h0, one) * h1).mean()

    for b in range(B):
        n = int(MASK[b].sum())
        for v in range(V):
            for t in range(n):
                at = b, t, v
                each = (slice(None), *at)
                expected = estimate(tuning[0][each], serving[0][each], l0[:, b], l1[:, b])
                assert float(found.moments.slope[at]) == pytest.approx(expected, rel=1e-9)
                for u in range(n):
                    at = b, v, t, u
                    each = (slice(None), *at)
                    expected = estimate(tuning[1][each], serving[1][each], l0[:, b], l1[:, b])
                    assert float(found.moments.bend[at]) == pytest.approx(expected, rel=1e-9)
    pairs = torch.cat([found.moments.pair_slope.flatten(), found.moments.pair_bend.flatten()])
    weight = WEIGHT.numpy()
    for i, value in enumerate(pairs.tolist()):
        expected = estimate(tuning[2][:, i], serving[2][:, i], l0 @ weight, l1 @ weight)
        assert value == pytest.approx(expected, rel=1e-9)


def test_the_tenth_does_not_serve_again() -> None:
    """Where all other values are 0, a-hat is all that remains of it."""
    calls: list[int] = []

    def only_first(unary: Tensor, pairwise: Tensor) -> Tensor:
        calls.append(len(unary))
        return torch.where(torch.tensor(len(calls) == 1), log_prob(unary, pairwise), 0)

    target = Target(only_first, MASK, WEIGHT, V)
    made = ESTIMATORS["control-variate"].with_draws(100)
    found = made(target, torch.Generator().manual_seed(0)).moments
    assert calls == [10] * 10
    first, *rest = draw(target, "iid", calls, torch.Generator().manual_seed(0))
    values = log_prob(first.unary, first.pairwise)[:, 0].numpy()
    later = torch.cat([d.unary for d in rest])[:, 0, 0, 0].numpy()
    expected = -a_hat(first.unary[:, 0, 0, 0].numpy(), values) * later.mean()
    assert float(found.slope[0, 0, 0]) == pytest.approx(expected, rel=1e-9)


@both_pairs
def test_leave_one_out_is_what_it_says(pairs_are_full: bool) -> None:
    """Each value less the mean of the others, written out."""
    target, S = make_target(pairs_are_full), 50
    found = ESTIMATORS["leave-one-out"].with_draws(S)(target, torch.Generator().manual_seed(2))
    every = list(
        draw(target, "iid", replicate_sizes(S, 8, "iid"), torch.Generator().manual_seed(2))
    )
    d = Draws(torch.cat([e.unary for e in every]), torch.cat([e.pairwise for e in every]))
    l = log_prob(d.unary, d.pairwise).numpy()
    less = np.stack([l[s] - np.delete(l, s, 0).mean(0) for s in range(S)])
    unary, bend, pairs = scores(d, pairs_are_full)
    real = MASK.numpy()
    slope = (unary * less[:, :, None, None]).mean(0) * real[..., None]
    np.testing.assert_allclose(found.moments.slope, slope, rtol=1e-9, atol=1e-12)
    both = real[:, None, :, None] & real[:, None, None, :]
    expected = (bend * less[..., None, None, None]).mean(0) * both
    np.testing.assert_allclose(found.moments.bend, expected, rtol=1e-9, atol=1e-12)
    together = (pairs * (less @ WEIGHT.numpy())[:, None]).mean(0)
    wanted = torch.cat([found.moments.pair_slope.flatten(), found.moments.pair_bend.flatten()])
    np.testing.assert_allclose(wanted, together, rtol=1e-9, atol=1e-12)


dependent = pytest.mark.parametrize("design", ["antithetic", "orthogonal", "sobol"])


@dependent
def test_where_points_depend_the_baseline_is_the_other_replicates(design: Any) -> None:
    """Written out: each value less the mean of all values of the other replicates."""
    target, made = make_target(True), Score("x", design, "mean", 44)
    found = made(target, torch.Generator().manual_seed(2))
    sizes = replicate_sizes(44, REPLICATES, design)
    every = list(draw(target, design, sizes, torch.Generator().manual_seed(2)))
    values = [log_prob(d.unary, d.pairwise).numpy() for d in every]
    slope, pair_slope = np.zeros((B, T, V)), np.zeros((V, V))
    for r, (d, l) in enumerate(zip(every, values, strict=True)):
        less = l - np.concatenate(values[:r] + values[r + 1 :]).mean(0)
        slope += (d.unary.numpy() * less[..., None, None]).sum(0) / 44
        pair_slope += np.tensordot(less @ WEIGHT.numpy(), d.pairwise.numpy(), 1) / 44
    slope = slope * MASK[..., None].numpy()
    np.testing.assert_allclose(found.moments.slope, slope, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.moments.pair_slope, pair_slope, rtol=1e-9, atol=1e-12)


@dependent
def test_a_constant_is_taken_away_entirely(design: Any) -> None:

    def far(unary: Tensor, pairwise: Tensor) -> Tensor:
        return torch.full(unary.shape[:2], -1000.0, dtype=unary.dtype)

    made = Score("x", design, "mean", 64)
    target = Target(far, MASK, WEIGHT, V, True)
    found = made(target, torch.Generator().manual_seed(0))
    for kind in ("slope", "bend", "pair_slope", "pair_bend"):
        values = getattr(found.moments, kind)
        torch.testing.assert_close(values, torch.zeros_like(values), atol=1e-10, rtol=0)
    torch.testing.assert_close(found.moments.value, torch.full((B,), -1000.0).double())


@pytest.mark.parametrize("name", ["leave-one-out", "antithetic-orthogonal", "sobol", "surrogate"])
def test_a_constant_changes_nothing(name: str) -> None:
    """Adding 100 to log p moves its value, and no gradient."""

    def moments(shift: float) -> Moments:
        target = Target(lambda u, p: log_prob(u, p) + shift, MASK, WEIGHT, V)
        estimator = ESTIMATORS[name].with_draws(200)
        return estimator(target, torch.Generator().manual_seed(3)).moments

    one, other = moments(0.0), moments(100.0)
    torch.testing.assert_close(one.value + 100, other.value)
    for kind in ("slope", "bend", "pair_slope", "pair_bend"):
        assert (getattr(one, kind) - getattr(other, kind)).abs().max() < 1e-9, kind


@pytest.mark.parametrize(("n_draws", "evaluated"), [(1, 1), (2, 2), (10, 10), (25, 25)])
def test_few_draws_of_the_control_variate(n_draws: int, evaluated: int) -> None:
    """With nothing to learn a-hat from it is 0; a single draw is a raw score."""
    target = make_target(False)
    made = ESTIMATORS["control-variate"].with_draws(n_draws)
    found = made(target, torch.Generator().manual_seed(0))
    assert found.evaluations == B * evaluated
    assert found.moments.slope.isfinite().all()
    if n_draws == 1:
        (d,) = draw(target, "iid", [1], torch.Generator().manual_seed(0))
        raw = log_prob(d.unary, d.pairwise)[..., None, None] * d.unary
        torch.testing.assert_close(found.moments.slope, raw[0] * MASK[..., None])
