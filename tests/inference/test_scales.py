"""Gradients of the bound in hyper-parameters, as Adam and L-BFGS see them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from structgp.gp import Inducing, Posterior
from structgp.inference import Adam, Problem
from structgp.inference.estimators import Pathwise
from structgp.inference.problem import hyper_parameters
from structgp.paper import LbfgsBlocks

FORMS: list[dict[str, Any]] = [{}, {"covariance": "diagonal", "full_table": True}, {"n_components": 2}]
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: ", ".join(form) or "plain")


def named(problem: Problem) -> dict[str, Tensor]:
    """All hyper-parameters by name."""
    chosen = hyper_parameters(problem.posterior, "all")
    names = {id(p): name for name, p in problem.posterior.named_parameters()}
    return {names[id(p)]: p for p in chosen}


def total(problem: Problem, seed: int = 0) -> Tensor:
    """The bound of all batches, differentiable in the kernel."""
    generator = torch.Generator().manual_seed(seed)
    n = len(problem.batches)
    parts = [problem.bound(i, generator, move_kernel=True).elbo / n for i in range(n)]
    return torch.stack(parts).sum()


def differences(problem: Problem, p: Tensor, h: float) -> Iterator[float]:
    for place in np.ndindex(*p.shape):
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                p[place] += sign * h
            ends.append(float(total(problem).detach()))
            with torch.no_grad():
                p[place] -= sign * h
        yield (ends[0] - ends[1]) / (2 * h)


@every_form
def test_against_finite_differences_of_an_exact_bound(form: dict[str, Any], cases: ModuleType) -> None:
    """Under a quadratic likelihood with exact moments there is nothing but the mathematics."""
    problem = cases.make_problem(
        cases.Regression(2), n_labels=2, n_inducing=3, batch_tokens=9, estimator=cases.Exact(), **form
    )
    cases.disturb(problem.posterior)
    parameters = named(problem)
    assert {"node.log_amplitude", "next.log_amplitude"} < set(parameters)
    assert sum("node.kernel." in name for name in parameters) >= 2
    grads = torch.autograd.grad(total(problem), list(parameters.values()))
    for (name, p), grad in zip(parameters.items(), grads, strict=True):
        numeric = torch.tensor(list(differences(problem, p, 1e-5)), dtype=torch.float64)
        torch.testing.assert_close(
            grad.flatten(), numeric, rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert max(float(g.abs().max()) for g in grads) > 0.1


def test_against_finite_differences_of_the_chains_bound(cases: ModuleType) -> None:
    """With 8,000 draws: the first-order expansion has the value's gradient in expectation, not draw by
    draw, since a covariance has more than one root. Within 3 % of the largest."""
    problem = cases.make_problem(n_inducing=3, estimator=Pathwise(n_draws=8000))
    cases.disturb(problem.posterior)
    parameters = named(problem)
    grads = torch.autograd.grad(total(problem), list(parameters.values()))
    numeric = [list(differences(problem, p, 1e-3)) for p in parameters.values()]
    size = max(float(g.abs().max()) for g in grads)
    assert size > 0.5
    for grad, found in zip(grads, numeric, strict=True):
        np.testing.assert_allclose(grad.flatten(), found, rtol=0, atol=0.03 * size)


def test_kept_conditionals_give_the_same_gradient_in_the_amplitude(cases: ModuleType) -> None:
    problem = cases.make_problem(batch_tokens=9)
    cases.disturb(problem.posterior)
    q = problem.posterior
    found = []
    for moves in (False, True):
        bound = problem.bound(0, torch.Generator().manual_seed(0), move_kernel=moves)
        found.append(
            torch.autograd.grad(bound.elbo, [q.node.log_amplitude, q["next"].log_amplitude, q.node.m])
        )
    for kept, computed in zip(*found, strict=True):
        torch.testing.assert_close(kept, computed, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("learn", "names"),
    [
        (False, set()),
        ("transitions", {"next.log_amplitude"}),
        (True, {"next.log_amplitude", "node.log_amplitude"}),
        ("all", {"next.log_amplitude", "node.log_amplitude", "node.kernel"}),
        (np.False_, set()),
        (np.True_, {"next.log_amplitude", "node.log_amplitude"}),
    ],
)
def test_what_each_choice_moves(learn: Any, names: set[str], cases: ModuleType) -> None:
    for transition_sd in (1.0, 0.0):
        q = cases.make_problem(transition_sd=transition_sd).posterior
        of = {id(p): ".".join(name.split(".")[:2]) for name, p in q.named_parameters()}
        found = {of[id(p)] for p in hyper_parameters(q, learn)}
        assert found == (names if transition_sd else names - {"next.log_amplitude"})
        assert all(p.requires_grad == ("node.kernel" in names) for p in q.node.kernel.parameters())


def test_transitions_with_features_have_an_amplitude_as_nodes_do(cases: ModuleType) -> None:
    """It is not a table's scale: 'transitions' leaves it alone."""
    node = cases.make_problem().posterior.node
    after = Inducing(node.kernel, node.inducing, (3, 3))
    q = Posterior({"node": node, "next": after})
    assert hyper_parameters(q, "transitions") == []
    assert {id(p) for p in hyper_parameters(q, True)} == {id(block.log_amplitude) for block in q.blocks}


@pytest.mark.parametrize(
    "optimizer",
    [
        Adam(max_steps=60, learn_scales="all"),
        LbfgsBlocks(20, 5, 5, max_iterations=2, learn_scales="all", parameter_tolerance=0.0),
    ],
    ids=["adam", "blocks"],
)
def test_all_moves_the_kernel_uphill(optimizer: Any, cases: ModuleType) -> None:
    """From weights of the templates that are far off."""

    def start() -> Problem:
        problem: Problem = cases.make_problem(n_sequences=10, estimator=Pathwise(n_draws=8))
        problem.posterior.node.kernel.outputscale = 0.2
        problem.refresh()
        return problem

    learned, fixed = start(), start()
    before = cases.numbers(learned.posterior)
    cases.finish(optimizer, learned)
    cases.finish(replace(optimizer, learn_scales="transitions"), fixed)
    after = cases.numbers(learned.posterior)
    moved = {n for n in before if n.startswith("node.kernel.") and not torch.equal(before[n], after[n])}
    assert len(moved) >= 2
    assert cases.many_draw_bound(learned, 2000) > cases.many_draw_bound(fixed, 2000) + 0.5
    scratch = Problem(learned.posterior, learned.structure, learned.batches, learned.estimator)
    assert cases.many_draw_bound(learned, 200) == cases.many_draw_bound(scratch, 200)


def test_adam_refreshes_after_every_pass(cases: ModuleType) -> None:
    problem = cases.make_problem(batch_tokens=9)
    optimizer = Adam(learn_scales="all")
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    kept = problem.conditional(0)[0].projection.clone()
    state, _ = optimizer.step(problem, state)
    assert torch.equal(problem.conditional(0)[0].projection, kept)
    optimizer.step(problem, state)
    assert not torch.equal(problem.conditional(0)[0].projection, kept)
