"""Low-rank posteriors under every optimiser: those that take them end where they should."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from structgp.errors import InputError
from structgp.gp.low_rank_fit import leading_directions
from structgp.inference import Adam, Natural, SecondOrder
from structgp.inference.problem import open_low_rank
from structgp.paper import LbfgsBlocks, MixtureFit, Saga

# -- the second-order fit ---------------------------------------------------------------------------


def climbed(cases: ModuleType, covariance: str, rank: int = 2, **options: Any) -> Any:
    problem = cases.make_problem(
        covariance=covariance, rank=rank, n_sequences=8, mean_length=5, n_inducing=9, **options
    )
    optimizer = SecondOrder(n_draws=128, tolerance=1e-4, max_rounds=8, learn_scales=False)
    cases.finish(optimizer, problem)
    return problem


def test_the_bound_lies_between(cases: ModuleType) -> None:
    """And nearer to the full one the more directions there are; with all of them it is the full one."""
    tokens = {"batch_tokens": 12}
    thin, full = (climbed(cases, form, **tokens) for form in ("diagonal", "full"))
    ranks = [climbed(cases, "low-rank", rank, **tokens) for rank in (1, 3, 9)]
    bounds = [cases.many_draw_bound(p, 2000) for p in (thin, *ranks, full)]
    assert bounds[0] < bounds[1] - 0.01
    assert bounds[1] < bounds[2] - 0.01
    assert bounds[2] < bounds[4]
    assert bounds[3] == pytest.approx(bounds[4], abs=2e-3)
    assert bounds[4] - bounds[2] < 0.5 * (bounds[4] - bounds[0])
    for one, other in zip(cases.at_tokens(ranks[-1])[1], cases.at_tokens(full)[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-3)


def test_kernels_are_learned_as_under_the_full_form(cases: ModuleType) -> None:
    """With all directions, scales on the bound move as they do there."""
    found = []
    for form in ("full", "low-rank"):
        problem = cases.make_problem(covariance=form, rank=9, n_sequences=8, n_inducing=9)
        cases.finish(SecondOrder(n_draws=16, learn_scales="all", max_rounds=6), problem)
        found.append(cases.numbers(problem.posterior))
    for name in ("node.m", "node.basis", "next.m"):
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-2, atol=1e-2)


# -- the others -------------------------------------------------------------------------------------


def test_gradients_of_the_bound_in_everything(cases: ModuleType) -> None:
    """Of a quadratic likelihood, which has no noise: against differences."""
    problem = cases.make_problem(
        cases.Regression(3), covariance="low-rank", estimator=cases.Exact(), batch_tokens=8
    )
    q = problem.posterior
    cases.disturb(q)

    def bound() -> Tensor:
        generator = torch.Generator()
        parts = [problem.bound(i, generator).elbo for i in range(len(problem.batches))]
        return torch.stack(parts).mean()

    parameters = [q.node.m, q.node.factor, q.node.directions, q.node.log_amplitude]
    grads = torch.autograd.grad(bound(), parameters)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p, grad in zip(parameters, grads, strict=True):
            way = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            values = []
            for step in (1e-5, -1e-5):
                p += step * way
                values.append(float(bound()))
                p -= step * way
            slope = (values[0] - values[1]) / 2e-5
            assert slope == pytest.approx(float((grad * way).sum()), rel=1e-6, abs=1e-6)


def test_directions_are_opened_once(cases: ModuleType) -> None:
    """A little, along the leading directions of the data, where gradients would find none."""
    problem = cases.make_problem(covariance="low-rank", rank=2)
    node = problem.posterior.node
    projection = problem.conditional(0)[0].projection
    open_low_rank(problem)
    opened = node.directions.detach().clone()
    flat = projection.flatten(0, 1)
    found = leading_directions([(projection, projection.new_ones(len(projection)))], node.n_values, 2)
    captured = (found.T @ flat.T @ flat @ found).trace()
    assert captured > 0.97 * torch.linalg.eigvalsh(flat.T @ flat)[-2:].sum()
    torch.testing.assert_close(opened[0], 0.1 * found)
    open_low_rank(problem)
    assert torch.equal(node.directions, opened)


def exact_bound(problem: Any) -> float:
    with torch.no_grad():
        n = len(problem.batches)
        return sum(float(problem.bound(i, torch.Generator()).elbo) for i in range(n)) / n


@pytest.mark.parametrize(
    "optimizer",
    [
        Natural(window=3, reductions=2, learn_scales=False),
        Adam(0.05, window=20, tolerance=0.02, max_steps=400, learn_scales=False),
        LbfgsBlocks(max_iterations=2, learn_scales=False),
    ],
    ids=["natural", "adam", "lbfgs"],
)
def test_every_way_leads_there(optimizer: Any, cases: ModuleType) -> None:
    """Of a quadratic likelihood, whose bound has no noise: well above the best of the diagonal ones, near
    to what the second-order fit reaches, and never above the full one."""
    bounds = {}
    for form, climber in {
        "diagonal": SecondOrder(learn_scales=False),
        "full": SecondOrder(learn_scales=False),
        "low-rank": SecondOrder(learn_scales=False),
        "ours": optimizer,
    }.items():
        problem = cases.make_problem(
            cases.Regression(3, noise=1.0),
            estimator=cases.Exact(),
            covariance="low-rank" if form == "ours" else form,
            rank=3,
            n_inducing=9,
        )
        cases.finish(climber, problem)
        bounds[form] = exact_bound(problem)
    gap = bounds["full"] - bounds["diagonal"]
    assert bounds["low-rank"] > bounds["diagonal"] + 0.3 * gap
    assert bounds["diagonal"] + 0.3 * gap < bounds["ours"] < bounds["full"]
    assert bounds["ours"] == pytest.approx(bounds["low-rank"], abs=0.3 * gap)


def test_a_mixture_of_low_ranks_is_no_worse_than_one(cases: ModuleType) -> None:
    one = cases.make_problem(covariance="low-rank")
    cases.finish(SecondOrder(learn_scales=False), one)
    two = cases.make_problem(covariance="low-rank", n_components=2)
    optimizer = MixtureFit(SecondOrder(learn_scales=False), then=Adam(0.01, window=10, max_steps=40))
    cases.finish(optimizer, two)
    assert bool(two.posterior.node.directions.any())
    assert cases.many_draw_bound(two, 2000) > cases.many_draw_bound(one, 2000) - 0.1


def test_stored_gradients_are_not_for_it(cases: ModuleType) -> None:
    problem = cases.make_problem(covariance="low-rank")
    with pytest.raises(InputError, match=r"^covariance: 'saga'.*'low-rank' never holds; use") as e:
        Saga().start(problem, torch.Generator())
    assert "'adam'" in e.value.remedy
