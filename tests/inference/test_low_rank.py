"""Low-rank posteriors under every optimiser: those that take them end where they should."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from structgp.inference.fit_low_rank import fit_low_rank, leading_directions, open_directions
from torch import Tensor

from structgp.errors import InputError
from structgp.gp.low_rank_fit import leading_directions
from structgp.inference import Adam, Natural, SecondOrder
<<<<<<< HEAD:tests/inference/test_factors.py
from structgp.paper import Blocks, Mixture, Stochastic

R, M = 2, 12


def precision(seed: int = 0) -> Tensor:
    """(R, M, M) I and what some tokens say, some directions much more than others."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(R, 40, M, generator=generator, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(M, M, generator=generator, dtype=torch.float64))[0]
    A = A * torch.logspace(0.5, -1.5, M, dtype=torch.float64) @ turn
    return torch.eye(M) + A.mT @ A


def fitted(P: Tensor, rank: int, passes: int) -> LowRank:
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(R, M, rank, generator=generator, dtype=torch.float64)
    start = LowRank(torch.ones(R, M, dtype=torch.float64), directions)
    return fit_low_rank(P.matmul, P.diagonal(dim1=-1, dim2=-2), start, passes)


def value(P: Tensor, S: Tensor) -> Tensor:
    """(R,) twice the bound as function of S, but for constants."""
    return torch.linalg.slogdet(S)[1] - (P * S).sum((-1, -2))


def test_all_directions_are_the_inverse() -> None:
    P = precision()
    torch.testing.assert_close(fitted(P, M, 1).matrix, torch.linalg.inv(P), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("rank", [1, 4])
def test_few_directions_come_to_the_best_of_their_number(rank: int) -> None:
    """Against L-BFGS on sd and directions; what is left is a share of what the directions bring."""
    P = precision()
    start = fitted(P, rank, 2)
    leaves = [x.clone().requires_grad_() for x in (start.sd, start.directions)]
    climber = torch.optim.LBFGS(leaves, max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        climber.zero_grad()
        total = -value(P, LowRank(*leaves).matrix).sum()
        total.backward()
        return total

    climber.step(loss)
    best = value(P, LowRank(*leaves).matrix).detach()
    brings = best - value(P, fitted(P, 0, 1).matrix)
    for passes, share in ((5, 0.3), (100, 0.05)):
        left = (best - value(P, fitted(P, rank, passes).matrix)) / brings
        assert bool((left < share).all())
        assert bool((left > -1e-6).all())


def test_each_direction_helps_and_one_pass_never_harms() -> None:
    P = precision()
    thin = torch.diag_embed(1 / P.diagonal(dim1=-1, dim2=-2))
    values = [value(P, fitted(P, rank, 20).matrix) for rank in (0, 1, 2, 4, 8)]
    torch.testing.assert_close(values[0], value(P, thin))
    for less, more in pairwise(values):
        assert bool((more > less).all())
    assert bool((values[-1] < value(P, torch.linalg.inv(P))).all())
    for rank in (1, 4):
        assert bool((value(P, fitted(P, rank, 1).matrix) >= values[0] - 1e-12).all())

=======
from structgp.inference.problem import open_low_rank
from structgp.paper import Blocks, MixtureFit, Stochastic
>>>>>>> w-tinf:tests/inference/test_low_rank.py

# -- the second-order fit ---------------------------------------------------------------------------


def climbed(cases: ModuleType, covariance: str, rank: int = 2, **options: Any) -> Any:
    problem = cases.make_problem(
        covariance=covariance, rank=rank, n_sequences=8, mean_length=5, n_inducing=9, **options
    )
    optimizer = SecondOrder(n_draws=32, tolerance=1e-4, max_rounds=8, learn_scales=False)
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
        Blocks(max_iterations=2, learn_scales=False),
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
        Stochastic().start(problem, torch.Generator())
    assert "'adam'" in e.value.remedy
