"""The paper's control variate against its formula, written out; and the baselines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from structgp.inference.estimators import Moments, Surrogate, Target
from structgp.inference.estimators.designs import draw, replicate_sizes
from structgp.inference.estimators.moments import Function, Group, Noise
from structgp.paper import Score
from structgp.paper.score import REPLICATES, TENTHS

B, T, V = 2, 2, 2
MASK = torch.tensor([[True, True], [True, False]])
WEIGHT = torch.tensor([0.3, 0.9], dtype=torch.float64)

CONTROL_VARIATE = Score("control-variate", "iid", "control-variate")
LEAVE_ONE_OUT = Score("leave-one-out", "iid", "mean")

both_bends = pytest.mark.parametrize("full", [False, True], ids=["variances", "full"])


def log_prob(noise: Noise) -> Tensor:
    """Of numbers per example (S, B, T, V) and shared ones (S, V^2)."""
    real = noise[0] * MASK[..., None]
    z = real[..., 0].sum(-1) - 0.5 * real[..., 1].sum(-1) + noise[1][:, 1, None]
    return -2 - torch.nn.functional.softplus(z) - 0.2 * (real * real.roll(1, 2)).sum((-1, -2))


def make_target(full: bool, function: Function = log_prob) -> Target:
    return Target(function, (Group(MASK, V), Group(None, V * V, full)), WEIGHT)


def together(draws: list[Noise]) -> Noise:
    return tuple(torch.cat(parts) for parts in zip(*draws, strict=True))


def shared(moments: Moments) -> Tensor:
    """Slopes, then bends, of the shared numbers."""
    return torch.cat([moments.slopes[1], moments.bends[1].flatten()])


def scores(noise: Noise, full: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """h for each draw: (S, B, T, V) and (S, B, V, T, T) of the numbers per example, (S, n) of the shared
    ones."""
    e, p = noise[0].numpy(), noise[1].numpy()
    S = len(e)
    bend = np.zeros((S, B, V, T, T))
    for t in range(T):
        for u in range(T):
            bend[:, :, :, t, u] = e[:, :, t] * e[:, :, u] - (t == u)
    second = (
        np.stack([np.outer(row, row) - np.eye(V * V) for row in p]).reshape(S, -1) if full else p**2 - 1
    )
    return e, bend, np.concatenate([p, second], 1)


def a_hat(h: np.ndarray, l: np.ndarray) -> float:
    """Cov[h l, h] / Var[h] of one entry."""
    g = h * l
    return ((g - g.mean()) * (h - h.mean())).mean() / h.var()


@both_bends
@pytest.mark.parametrize("n_draws", [200, 97])
def test_the_control_variate_is_the_papers(full: bool, n_draws: int) -> None:
    """One entry at a time: a-hat from the first tenth, g - a-hat h averaged over all the others."""
    target = make_target(full)
    found = CONTROL_VARIATE.with_draws(n_draws)(target, torch.Generator().manual_seed(1))
    sizes = replicate_sizes(n_draws, TENTHS, "iid")
    assert sizes[0] == -(-n_draws // 10)
    first, *rest = draw(target, "iid", sizes, torch.Generator().manual_seed(1))
    later = together(rest)
    tuning, serving = scores(first, full), scores(later, full)
    l0, l1 = log_prob(first).numpy(), log_prob(later).numpy()

    def estimate(h0: np.ndarray, h1: np.ndarray, one: np.ndarray, other: np.ndarray) -> float:
        return (h1 * other - a_hat(h0, one) * h1).mean()

    for b in range(B):
        n = int(MASK[b].sum())
        for v in range(V):
            for t in range(n):
                at = b, t, v
                each = (slice(None), *at)
                expected = estimate(tuning[0][each], serving[0][each], l0[:, b], l1[:, b])
                assert float(found.moments.slopes[0][at]) == pytest.approx(expected, rel=1e-9)
                for u in range(n):
                    at = b, v, t, u
                    each = (slice(None), *at)
                    expected = estimate(tuning[1][each], serving[1][each], l0[:, b], l1[:, b])
                    assert float(found.moments.bends[0][at]) == pytest.approx(expected, rel=1e-9)
    weight = WEIGHT.numpy()
    for i, value in enumerate(shared(found.moments).tolist()):
        expected = estimate(tuning[2][:, i], serving[2][:, i], l0 @ weight, l1 @ weight)
        assert value == pytest.approx(expected, rel=1e-9)


def test_the_tenth_does_not_serve_again() -> None:
    """Where all other values are 0, a-hat is all that remains of it."""
    calls: list[int] = []

    def only_first(noise: Noise) -> Tensor:
        calls.append(len(noise[0]))
        return torch.where(torch.tensor(len(calls) == 1), log_prob(noise), 0)

    target = make_target(False, only_first)
    made = CONTROL_VARIATE.with_draws(100)
    found = made(target, torch.Generator().manual_seed(0)).moments
    assert calls == [10] * 10
    first, *rest = draw(target, "iid", calls, torch.Generator().manual_seed(0))
    values = log_prob(first)[:, 0].numpy()
    later = together(rest)[0][:, 0, 0, 0].numpy()
    expected = -a_hat(first[0][:, 0, 0, 0].numpy(), values) * later.mean()
    assert float(found.slopes[0][0, 0, 0]) == pytest.approx(expected, rel=1e-9)


@both_bends
def test_leave_one_out_is_what_it_says(full: bool) -> None:
    """Each value less the mean of the others, written out."""
    target, S = make_target(full), 50
    found = LEAVE_ONE_OUT.with_draws(S)(target, torch.Generator().manual_seed(2))
    every = list(draw(target, "iid", replicate_sizes(S, 8, "iid"), torch.Generator().manual_seed(2)))
    d = together(every)
    l = log_prob(d).numpy()
    less = np.stack([l[s] - np.delete(l, s, 0).mean(0) for s in range(S)])
    first, bend, table = scores(d, full)
    real = MASK.numpy()
    slope = (first * less[:, :, None, None]).mean(0) * real[..., None]
    np.testing.assert_allclose(found.moments.slopes[0], slope, rtol=1e-9, atol=1e-12)
    both = real[:, None, :, None] & real[:, None, None, :]
    expected = (bend * less[..., None, None, None]).mean(0) * both
    np.testing.assert_allclose(found.moments.bends[0], expected, rtol=1e-9, atol=1e-12)
    wanted = (table * (less @ WEIGHT.numpy())[:, None]).mean(0)
    np.testing.assert_allclose(shared(found.moments), wanted, rtol=1e-9, atol=1e-12)


dependent = pytest.mark.parametrize("design", ["antithetic", "orthogonal", "sobol"])


@dependent
def test_where_points_depend_the_baseline_is_the_other_replicates(design: Any) -> None:
    """Written out: each value less the mean of all values of the other replicates."""
    target, made = make_target(True), Score("x", design, "mean", 44)
    found = made(target, torch.Generator().manual_seed(2))
    sizes = replicate_sizes(44, REPLICATES, design)
    every = list(draw(target, design, sizes, torch.Generator().manual_seed(2)))
    values = [log_prob(d).numpy() for d in every]
    slope, shared_slope = np.zeros((B, T, V)), np.zeros(V * V)
    for r, (d, l) in enumerate(zip(every, values, strict=True)):
        less = l - np.concatenate(values[:r] + values[r + 1 :]).mean(0)
        slope += (d[0].numpy() * less[..., None, None]).sum(0) / 44
        shared_slope += less @ WEIGHT.numpy() @ d[1].numpy() / 44
    slope = slope * MASK[..., None].numpy()
    np.testing.assert_allclose(found.moments.slopes[0], slope, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.moments.slopes[1], shared_slope, rtol=1e-9, atol=1e-12)


@dependent
def test_a_constant_is_taken_away_entirely(design: Any) -> None:
    def far(noise: Noise) -> Tensor:
        return torch.full(noise[0].shape[:2], -1000.0, dtype=noise[0].dtype)

    made = Score("x", design, "mean", 64)
    found = made(make_target(True, far), torch.Generator().manual_seed(0))
    for values in (*found.moments.slopes, *found.moments.bends):
        torch.testing.assert_close(values, torch.zeros_like(values), atol=1e-10, rtol=0)
    torch.testing.assert_close(found.moments.value, torch.full((B,), -1000.0).double())


@pytest.mark.parametrize(
    "estimator",
    [
        LEAVE_ONE_OUT,
        Score("antithetic-orthogonal", "orthogonal", "mean"),
        Score("sobol", "sobol", "mean"),
        Surrogate("surrogate", "composite", uses_memory=True),
    ],
    ids=lambda e: e.name,
)
def test_a_constant_changes_nothing(estimator: Any) -> None:
    """Adding 100 to log p moves its value, and no gradient."""

    def moments(shift: float) -> Moments:
        target = make_target(False, lambda noise: log_prob(noise) + shift)
        return estimator.with_draws(200)(target, torch.Generator().manual_seed(3)).moments

    one, other = moments(0.0), moments(100.0)
    torch.testing.assert_close(one.value + 100, other.value)
    for a, b in zip(one.entries[1:], other.entries[1:], strict=True):
        assert (a - b).abs().max() < 1e-9


@pytest.mark.parametrize(("n_draws", "evaluated"), [(1, 1), (2, 2), (10, 10), (25, 25)])
def test_few_draws_of_the_control_variate(n_draws: int, evaluated: int) -> None:
    """With nothing to learn a-hat from it is 0; a single draw is a raw score."""
    target = make_target(False)
    made = CONTROL_VARIATE.with_draws(n_draws)
    found = made(target, torch.Generator().manual_seed(0))
    assert found.evaluations == B * evaluated
    assert found.moments.slopes[0].isfinite().all()
    if n_draws == 1:
        (d,) = draw(target, "iid", [1], torch.Generator().manual_seed(0))
        raw = log_prob(d)[..., None, None] * d[0]
        torch.testing.assert_close(found.moments.slopes[0], raw[0] * MASK[..., None])
