"""What every optimiser must do, tried on each of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import structgp.inference
import structgp.paper
from structgp.inference import Adam, Natural, Problem, SecondOrder, StepInfo
from structgp.inference.estimators import Pathwise
from structgp.paper import LbfgsBlocks, MixtureFit, Saga
from structgp.structures import Chain


@dataclass(frozen=True)
class Case:
    """make : the optimiser, given ``learn_scales``; options : of the problem it is tried on."""

    make: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)

    def problem(self, cases: ModuleType, structure: Any = None, **kwargs: Any) -> Problem:
        problem: Problem = cases.make_problem(structure, **{**self.options, **kwargs})
        return problem


def adam(learn_scales: Any, rate: float = 0.05) -> Adam:
    return Adam(rate, window=10, tolerance=0.5, learn_scales=learn_scales)


def stochastic(learn_scales: Any) -> Saga:
    return Saga(
        mean_step=None,
        covariance_step=None,
        node_steps=None,
        transition_steps=None,
        tolerance=0.2,
        learn_scales=learn_scales,
    )


def blocks(learn_scales: Any) -> LbfgsBlocks:
    return LbfgsBlocks(6, 3, 2, objective_tolerance=0.3, learn_scales=learn_scales)


OPTIMIZERS = {
    "Adam": Case(adam),
    "LbfgsBlocks": Case(blocks),
    "MixtureFit": Case(
        lambda learn_scales: MixtureFit(
            SecondOrder(learn_scales=learn_scales), then=adam(learn_scales, 0.01)
        ),
        {"n_components": 2},
    ),
    "Natural": Case(lambda learn_scales: Natural(learn_scales=learn_scales)),
    "SecondOrder": Case(lambda learn_scales: SecondOrder(learn_scales=learn_scales)),
    "Saga": Case(stochastic),
}

every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


@dataclass(frozen=True)
class Fit:
    """One fit, looked at from several sides: the problem after it, all numbers before and after, the bound
    before it, and likelihoods computed."""

    problem: Problem
    steps: list[StepInfo]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    bound_before: float
    evaluated: int


@pytest.fixture(scope="module")
def fit(cases: ModuleType) -> Callable[..., Fit]:
    @cache
    def made(name: str, learn_scales: Any, batch_tokens: int) -> Fit:
        structure = cases.Counted()
        problem = OPTIMIZERS[name].problem(cases, structure, batch_tokens=batch_tokens)
        bound, before = cases.many_draw_bound(problem, 2000), cases.numbers(problem.posterior)
        structure.evaluated = 0
        steps = cases.finish(OPTIMIZERS[name].make(learn_scales), problem)
        evaluated, after = structure.evaluated, cases.numbers(problem.posterior)
        return Fit(problem, steps, before, after, bound, evaluated)

    return made


def moved(fit: Fit) -> set[str]:
    return {name for name, value in fit.before.items() if not torch.equal(value, fit.after[name])}


def test_roll_call() -> None:
    exported = {
        name
        for package in (structgp.inference, structgp.paper)
        for name in package.__all__
        if inspect.isclass(part := getattr(package, name))
        and hasattr(part, "step")
        and not getattr(part, "_is_protocol", False)
    }
    # Minibatches are of weights, and have a file of tests of their own.
    assert exported - {"Minibatch"} == set(OPTIMIZERS), "an optimiser without conformance tests"


def test_names_are_different() -> None:
    names = {case.make("transitions").name for case in OPTIMIZERS.values()}
    assert len(names) == len(OPTIMIZERS)


@every_optimizer
def test_steps_until_finished(name: str, fit: Callable[..., Fit], cases: ModuleType) -> None:
    found = fit(name, "transitions", 6)
    assert len(found.problem.batches) > 1
    steps = found.steps
    assert all(isinstance(info, StepInfo) for info in steps)
    assert [info.iteration for info in steps] == list(range(len(steps)))
    assert [info.finished for info in steps] == [False] * (len(steps) - 1) + [True]
    assert [info.converged for info in steps[:-1]] == [False] * (len(steps) - 1)
    assert steps[-1].converged
    assert np.isfinite([info.elbo for info in steps]).all()
    assert all(info.evaluations > 0 for info in steps)
    assert cases.many_draw_bound(found.problem, 2000) > found.bound_before + 0.5


@every_optimizer
def test_evaluations_are_likelihoods_computed(name: str, fit: Callable[..., Fit]) -> None:
    for found in (fit(name, "transitions", 6), fit(name, True, 1000)):
        assert sum(info.evaluations for info in found.steps) == found.evaluated


@every_optimizer
def test_the_same_seed_gives_the_same_fit(name: str, fit: Callable[..., Fit], cases: ModuleType) -> None:
    """Also where the optimiser has fitted something else before: it keeps no state of its own. A few steps
    tell, and what a fit of few steps ends with."""
    first, case = fit(name, "transitions", 6), OPTIMIZERS[name]
    optimizer = case.make("transitions")
    other, again = (case.problem(cases, cases.Counted(), batch_tokens=6) for _ in range(2))
    state = optimizer.start(other, torch.Generator().manual_seed(2))
    state, _ = optimizer.step(other, state)
    state = optimizer.start(again, torch.Generator().manual_seed(1))
    for expected in first.steps[: 20 if len(first.steps) <= 20 else 8]:
        state, info = optimizer.step(again, state)
        assert info == expected
    if info.finished:
        for key, value in cases.numbers(again.posterior).items():
            assert torch.equal(value, first.after[key]), key
    assert not torch.equal(other.posterior.node.m, again.posterior.node.m)


@every_optimizer
def test_kernel_and_inducing_inputs_stay(name: str, fit: Callable[..., Fit]) -> None:
    found = fit(name, True, 1000)
    changed = moved(found)
    assert any("kernel." in key for key in found.before)
    assert not any("kernel." in key or "inducing" in key for key in changed)
    both = {f"{t}.{p}" for t in ("node", "next") for p in ("m", "factor", "log_amplitude")}
    assert both <= changed


@every_optimizer
def test_scales_can_be_left_alone(name: str, cases: ModuleType) -> None:
    problem = OPTIMIZERS[name].problem(cases)
    with torch.no_grad():
        problem.posterior.node.log_amplitude.fill_(0.3)
    before = cases.numbers(problem.posterior)
    cases.finish(OPTIMIZERS[name].make(learn_scales=False), problem, most=20)
    after = cases.numbers(problem.posterior)
    for key in ("node.log_amplitude", "next.log_amplitude"):
        assert torch.equal(before[key], after[key]), key
    assert not torch.equal(before["node.m"], after["node.m"])


@every_optimizer
def test_the_scale_of_transitions_can_move_alone(name: str, fit: Callable[..., Fit]) -> None:
    changed = moved(fit(name, "transitions", 6))
    assert "next.log_amplitude" in changed
    assert "node.log_amplitude" not in changed


class NeverTransitions(Chain):
    """Refuses to see a transition score that is not 0."""

    def log_prob(self, f: Any, g: Any, y: Any, mask: Any) -> Any:
        assert (g == 0).all()
        return super().log_prob(f, g, y, mask)

    def curvature(self, f: Any, g: Any, y: Any, mask: Any) -> Any:
        assert (g == 0).all()
        return super().curvature(f, g, y, mask)


@every_optimizer
def test_a_silent_table_stays_silent(name: str, cases: ModuleType) -> None:
    """And no likelihood sees a score of it."""
    problem = OPTIMIZERS[name].problem(cases, NeverTransitions(), transition_sd=0.0)
    cases.finish(OPTIMIZERS[name].make("transitions"), problem, most=20)
    q, table = problem.posterior, problem.posterior["next"]
    assert (table.constant_scores()[0] == 0).all()
    assert (table.constant_scores()[1] == 0).all()
    assert table.is_silent
    assert table.kl() == 0
    assert torch.isfinite(q.node.m).all()
    assert torch.isfinite(q.node.factor).all()


@every_optimizer
def test_draws_are_what_was_asked_for(name: str, cases: ModuleType) -> None:
    """Six of the estimator's for each sequence and component, or whole multiples of them."""
    if name == "SecondOrder":
        pytest.skip("it has draws of its own")
    structure = cases.Counted()
    problem = OPTIMIZERS[name].problem(cases, structure, estimator=Pathwise(n_draws=6))
    optimizer = OPTIMIZERS[name].make("transitions")
    state = optimizer.start(problem, torch.Generator().manual_seed(1))
    optimizer.step(problem, state)  # of a mixture, with what the start took
    structure.evaluated = 0
    _, info = optimizer.step(problem, state)
    assert info.evaluations == structure.evaluated > 0
    assert info.evaluations % (6 * problem.posterior.n_components * problem.n_sequences) == 0


@every_optimizer
def test_one_sequence_of_one_token(name: str, cases: ModuleType) -> None:
    problem = OPTIMIZERS[name].problem(cases, n_sequences=1, mean_length=1, n_labels=2)
    assert [tuple(batch.mask.shape) for batch in problem.batches] == [(1, 1)]
    assert np.isfinite(cases.finish(OPTIMIZERS[name].make("transitions"), problem)[-1].elbo)
