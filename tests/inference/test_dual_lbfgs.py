"""Weights found on one number per row are those that would be found directly."""

from __future__ import annotations

from typing import Any

import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from structgp.errors import LikelihoodError
from structgp.gp.weight_rows import OneRow, SparseRows
from structgp.inference.dual_lbfgs import Likelihood, Prior, climb

N, F, R, P = 7, 12, 2, 9

Shape = tuple[int, int]
SHAPES: list[Shape] = [(N, R), (1, P), (N - 2, 4)]
"""Rows and functions of each block: nodes, a table, transitions with features."""


def numbers(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def one_block(seed: int, shape: Shape) -> tuple[Prior, Tensor]:
    """A prior, and the rows X (N, F) written out."""
    n, functions = shape
    if n == 1:
        x, rows = torch.ones(1, 1).double(), OneRow()
    else:
        x = numbers(seed, n, F) * (numbers(seed + 1, n, F) > 0.3)
        rows = SparseRows(scipy.sparse.csr_array(x.numpy()), x.device)
    width = x.shape[1]
    return Prior(rows, numbers(seed + 2, width, functions).exp(), numbers(seed + 3, width, functions)), x


def problem(seed: int) -> tuple[list[Prior], Likelihood, list[Tensor]]:
    """Priors of three blocks, and a log-likelihood that is quadratic, so that the best weights are
    known."""
    blocks = [one_block(seed + 100 * k, shape) for k, shape in enumerate(SHAPES)]
    weights = [numbers(seed + 6 + k, *shape).exp() for k, shape in enumerate(SHAPES)]
    aims = [numbers(seed + 17 + k, *shape) for k, shape in enumerate(SHAPES)]

    def likelihood(functions: list[Tensor]) -> tuple[float, list[Tensor]]:
        away = [h - aim for h, aim in zip(functions, aims, strict=True)]
        slopes = [-w * a for w, a in zip(weights, away, strict=True)]
        return float(sum(0.5 * (s * a).sum() for s, a in zip(slopes, away, strict=True))), slopes

    best = []
    for (prior, x), weight, aim in zip(blocks, weights, aims, strict=True):
        columns = []
        for r in range(aim.shape[1]):
            precision = prior.variance[:, r].reciprocal().diag() + x.T @ (weight[:, r, None] * x)
            linear = prior.mean[:, r] / prior.variance[:, r] + x.T @ (weight[:, r] * aim[:, r])
            columns.append(torch.linalg.solve(precision, linear))
        best.append(torch.stack(columns, 1))
    return [prior for prior, _ in blocks], likelihood, best


def start(size: float = 0.0, seed: int = 2) -> list[Tensor]:
    return [size * numbers(seed + k, *shape) for k, shape in enumerate(SHAPES)]


def weights_of(prior: Prior, a: Tensor) -> Tensor:
    """(F, R) the weights that numbers a stand for."""
    found: Tensor = prior.mean + prior.rows.transposed_times(a) * prior.variance
    return found


@given(st.integers(0, 10_000), st.booleans())
@settings(max_examples=15, deadline=None)
def test_the_best_weights_are_found_from_anywhere(seed: int, unsure: bool) -> None:
    priors, likelihood, best = problem(seed)
    duals, values, reached, _ = climb(likelihood, priors, start(3.0, seed), steps=150, unsure=unsure)
    assert reached == pytest.approx(likelihood(values)[0], rel=1e-6, abs=1e-6)
    for prior, a, functions, expected in zip(priors, duals, values, best, strict=True):
        weights = weights_of(prior, a)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(prior.rows.times(weights), functions)


def test_a_block_that_its_prior_holds_stays_where_it_is() -> None:
    """As a silent table does; the others are found as if it were not there."""
    priors, likelihood, best = problem(3)
    held = Prior(priors[1].rows, torch.full((1, P), 1e-200, dtype=torch.float64), priors[1].mean)
    duals, functions, *_ = climb(likelihood, [priors[0], held, priors[2]], start(), steps=150)
    torch.testing.assert_close(functions[1], held.mean)
    for k in (0, 2):
        weights = weights_of(priors[k], duals[k])
        torch.testing.assert_close(weights, best[k], rtol=1e-5, atol=1e-5)


def test_single_precision_comes_close() -> None:
    priors, likelihood, best = problem(6)

    def narrow(functions: list[Tensor]) -> tuple[float, list[Tensor]]:
        assert {h.dtype for h in functions} == {torch.float32}
        value, slopes = likelihood([h.double() for h in functions])
        return value, [s.float() for s in slopes]

    singles = [Prior(p.rows.single, p.variance.float(), p.mean.float()) for p in priors]
    duals, *_ = climb(narrow, singles, [a.float() for a in start()], steps=60)
    for prior, a, expected in zip(singles, duals, best, strict=True):
        torch.testing.assert_close(weights_of(prior, a).double(), expected, rtol=0.01, atol=0.01)


def test_a_start_that_has_become_far_too_much_is_shortened() -> None:
    priors, likelihood, _ = problem(1)

    def value(found: tuple[list[Tensor], list[Tensor], float, int]) -> float:
        duals, values, *_ = found
        spent = sum(
            float((a * (functions - prior.rows.times(prior.mean))).sum())
            for prior, a, functions in zip(priors, duals, values, strict=True)
        )
        return likelihood(values)[0] - 0.5 * spent

    from_home = value(climb(likelihood, priors, start(), steps=0))
    assert value(climb(likelihood, priors, start(1e6), steps=0)) < from_home - 1e6
    assert value(climb(likelihood, priors, start(1e6), steps=0, unsure=True)) >= from_home


@pytest.mark.parametrize("broken", [float("inf"), float("nan")])
def test_a_start_that_is_not_finite_is_left(broken: float) -> None:
    """Halves of infinity are no shorter."""
    priors, likelihood, best = problem(2)
    began = start(1.0)
    began[1][0, 0] = broken
    duals, *_ = climb(likelihood, priors, began, steps=150, unsure=True)
    for prior, a, expected in zip(priors, duals, best, strict=True):
        torch.testing.assert_close(weights_of(prior, a), expected, rtol=1e-5, atol=1e-5)


def test_where_there_is_no_value_the_steps_are_shorter() -> None:
    priors, likelihood, best = problem(4)
    refused: list[int] = []

    def holes(functions: list[Tensor]) -> Any:
        away = float((functions[0] - priors[0].rows.times(priors[0].mean)).abs().max())
        if away > 0.5 and len(refused) < 3:
            refused.append(1)
            raise LikelihoodError("likelihood", "log p is -inf", "check it")
        return likelihood(functions)

    duals, *_ = climb(holes, priors, start(), steps=150)
    assert refused
    weights = weights_of(priors[0], duals[0])
    torch.testing.assert_close(weights, best[0], rtol=1e-5, atol=1e-5)


def test_calls_are_counted() -> None:
    priors, likelihood, _ = problem(7)
    calls = 0

    def counted(functions: list[Tensor]) -> Any:
        nonlocal calls
        calls += 1
        return likelihood(functions)

    assert climb(counted, priors, start(1.0), steps=5, unsure=True)[3] == calls > 5


def test_a_likelihood_without_any_value_is_told() -> None:
    priors, _, _ = problem(5)

    def none(functions: list[Tensor]) -> Any:
        raise LikelihoodError("likelihood", "log p is -inf", "check it")

    with pytest.raises(LikelihoodError):
        climb(none, priors, start(), steps=3)
