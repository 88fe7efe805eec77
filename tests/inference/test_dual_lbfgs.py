"""Weights found on a number for each token are those that would be found directly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structgp.gp.weights import SparseRows
from torch import Tensor

from structgp.errors import LikelihoodError
from structgp.inference.dual_lbfgs import Prior, climb

N, F, R, V = 7, 12, 2, 3


def numbers(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def problem(seed: int, *, fixed: bool = False):
    """A prior, and a log-likelihood that is quadratic, so that the best weights are known."""
    x = numbers(seed, N, F) * (numbers(seed + 1, N, F) > 0.3)
    place = torch.arange(F).expand(N, F)
    prior = Prior(
        SparseRows(place, x, F),
        numbers(seed + 2, F, R).exp(),
        numbers(seed + 3, F, R),
        numbers(seed + 4, V, V).exp(),
        numbers(seed + 5, V, V),
        fixed,
    )
    weight, aim = numbers(seed + 6, N, R).exp(), numbers(seed + 7, N, R)
    pair_weight, pair_aim = numbers(seed + 8, V, V).exp(), numbers(seed + 9, V, V)

    def likelihood(h: Tensor, g: Tensor) -> tuple[float, Tensor, Tensor]:
        value = -0.5 * (weight * (h - aim).square()).sum()
        value = value - 0.5 * (pair_weight * (g - pair_aim).square()).sum()
        return float(value), -weight * (h - aim), -pair_weight * (g - pair_aim)

    best = []
    for r in range(R):
        precision = prior.precision[:, r].diag() + x.T @ (weight[:, r, None] * x)
        linear = prior.precision[:, r] * prior.mean[:, r] + x.T @ (weight[:, r] * aim[:, r])
        best.append(torch.linalg.solve(precision, linear))
    pairs = prior.pair_precision * prior.pair_mean + pair_weight * pair_aim
    return prior, likelihood, torch.stack(best, 1), pairs / (prior.pair_precision + pair_weight)


@given(st.integers(0, 10_000), st.booleans(), st.booleans())
@settings(max_examples=25, deadline=None)
def test_the_best_weights_are_found_from_anywhere(seed: int, fixed: bool, unsure: bool) -> None:
    prior, likelihood, best, best_pairs = problem(seed, fixed=fixed)
    start = 3 * numbers(seed + 10, N, R), 3 * numbers(seed + 11, V, V)
    found = climb(likelihood, prior, *start, steps=100, unsure=unsure)
    weights = prior.mean + prior.weights(found.a)
    torch.testing.assert_close(weights, best, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(prior.rows.times(weights), found.functions)
    expected = prior.pair_mean if fixed else best_pairs
    torch.testing.assert_close(found.pairs, expected, rtol=1e-5, atol=1e-5)


def test_a_start_that_has_become_far_too_much_is_shortened() -> None:
    prior, likelihood, _, _ = problem(1)
    far = 1e6 * numbers(2, N, R), 1e6 * numbers(3, V, V)
    zero = torch.zeros(N, R, dtype=torch.float64), torch.zeros(V, V, dtype=torch.float64)

    def value(found):
        a = (found.a * (found.functions - prior.rows.times(prior.mean))).sum()
        b = (found.b * (found.pairs - prior.pair_mean)).sum()
        return likelihood(found.functions, found.pairs)[0] - 0.5 * float(a + b)

    from_home = value(climb(likelihood, prior, *zero, steps=0))
    assert value(climb(likelihood, prior, *far, steps=0)) < from_home - 1e6
    assert value(climb(likelihood, prior, *far, steps=0, unsure=True)) >= from_home


def test_where_there_is_no_value_the_steps_are_shorter() -> None:
    prior, likelihood, best, _ = problem(4)
    home, refused = prior.rows.times(prior.mean), []

    def holes(h: Tensor, g: Tensor) -> tuple[float, Tensor, Tensor]:
        if float((h - home).abs().max()) > 0.9 and len(refused) < 3:
            refused.append(1)
            raise LikelihoodError("likelihood", "log p is -inf", "check it")
        return likelihood(h, g)

    zero = torch.zeros(N, R, dtype=torch.float64), torch.zeros(V, V, dtype=torch.float64)
    found = climb(holes, prior, *zero, steps=100)
    assert refused
    torch.testing.assert_close(prior.mean + prior.weights(found.a), best, rtol=1e-5, atol=1e-5)


def test_a_likelihood_without_any_value_is_told() -> None:
    prior, _, _, _ = problem(5)

    def none(h: Tensor, g: Tensor) -> tuple[float, Tensor, Tensor]:
        raise LikelihoodError("likelihood", "log p is -inf", "check it")

    zero = torch.zeros(N, R, dtype=torch.float64), torch.zeros(V, V, dtype=torch.float64)
    with pytest.raises(LikelihoodError):
        climb(none, prior, *zero, steps=3)
