"""What every optimiser must do, tried on each of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import structgp.inference
from structgp.inference import Adam, Natural, Problem, SecondOrder, StepInfo
from structgp.inference.estimators import Pathwise
from structgp.paper import Blocks, MixtureFit, Stochastic
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


def stochastic(learn_scales: Any, remembers: bool) -> Stochastic:
    return Stochastic(
        remembers,
        mean_step="auto",
        covariance_step="auto",
        node_steps=None,
        transition_steps=None,
        tolerance=0.1,
        learn_scales=learn_scales,
        name="saga" if remembers else "sgd",
    )


OPTIMIZERS = {
    "Adam": Case(adam),
    "Blocks": Case(lambda learn_scales: Blocks(objective_tolerance=0.1, learn_scales=learn_scales)),
    "Mixture": Case(
        lambda learn_scales: MixtureFit(
            SecondOrder(learn_scales=learn_scales), then=adam(learn_scales, 0.01)
        ),
        {"n_components": 2},
    ),
    "Natural": Case(lambda learn_scales: Natural(learn_scales=learn_scales)),
    "SecondOrder": Case(lambda learn_scales: SecondOrder(learn_scales=learn_scales)),
    "Stochastic": Case(lambda learn_scales: stochastic(learn_scales, True)),
    "Stochastic, no memory": Case(lambda learn_scales: stochastic(learn_scales, False)),
}

every_optimizer = pytest.mark.parametrize("case", OPTIMIZERS.values(), ids=OPTIMIZERS)


def test_roll_call() -> None:
    exported = {
        name
        for name in structgp.inference.__all__
        if inspect.isclass(part := getattr(structgp.inference, name))
        and hasattr(part, "step")
        and not getattr(part, "_is_protocol", False)
    }
    # Minibatches are of weights, and have a file of tests of their own.
    assert exported - {"Minibatch"} == {name.partition(",")[0] for name in OPTIMIZERS}, (
        "an optimiser without conformance tests"
    )


@every_optimizer
def test_steps_until_finished(case: Case, cases: ModuleType) -> None:
    problem = case.problem(cases, batch_tokens=6)
    assert len(problem.batches) > 1
    steps = cases.finish(case.make("transitions"), problem)
    assert all(isinstance(info, StepInfo) for info in steps)
    assert [info.iteration for info in steps] == list(range(len(steps)))
    assert [info.finished for info in steps] == [False] * (len(steps) - 1) + [True]
    assert [info.converged for info in steps[:-1]] == [False] * (len(steps) - 1)
    assert steps[-1].converged
    assert np.isfinite([info.elbo for info in steps]).all()
    assert all(info.evaluations > 0 for info in steps)


@every_optimizer
def test_names_are_different_and_said(case: Case) -> None:
    assert isinstance(case.make("transitions").name, str)
    names = {other.make("transitions").name for other in OPTIMIZERS.values()}
    assert len(names) == len(OPTIMIZERS)


@every_optimizer
def test_the_bound_rises(case: Case, cases: ModuleType) -> None:
    problem = case.problem(cases)
    before = cases.many_draw_bound(problem, 2000)
    cases.finish(case.make("transitions"), problem)
    assert cases.many_draw_bound(problem, 2000) > before + 0.5


@every_optimizer
@pytest.mark.parametrize("batch_tokens", [6, 1000])
def test_evaluations_are_likelihoods_computed(
    case: Case, batch_tokens: int, cases: ModuleType
) -> None:
    structure = cases.Counted()
    steps = cases.finish(
        case.make("transitions"), case.problem(cases, structure, batch_tokens=batch_tokens)
    )
    assert sum(info.evaluations for info in steps) == structure.evaluated


@every_optimizer
def test_the_same_seed_gives_the_same_fit(case: Case, cases: ModuleType) -> None:
    fits = []
    for seed in (1, 1, 2):
        problem = case.problem(cases, batch_tokens=6)
        elbos = [info.elbo for info in cases.finish(case.make("transitions"), problem, seed)]
        fits.append((elbos, cases.numbers(problem.posterior)))
    (elbos, first), (again, second), (_, other) = fits
    assert elbos == again
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert not torch.equal(first["m"], other["m"])


@every_optimizer
def test_kernel_and_inducing_inputs_stay(case: Case, cases: ModuleType) -> None:
    problem = case.problem(cases)
    before = cases.numbers(problem.posterior)
    cases.finish(case.make(learn_scales=True), problem)
    after = cases.numbers(problem.posterior)
    assert any(name.startswith("kernel.") for name in before)
    for name, value in before.items():
        if name.startswith("kernel.") or name == "inducing":
            assert torch.equal(value, after[name]), name
    moved = ("m", "factor", "pair_mean", "pair_log_sd", "log_amplitude", "log_pairwise_sd")
    for name in moved:
        assert not torch.equal(before[name], after[name]), name


@every_optimizer
def test_scales_can_be_left_alone(case: Case, cases: ModuleType) -> None:
    problem = case.problem(cases)
    with torch.no_grad():
        problem.posterior.node.log_amplitude.fill_(0.3)
    before = cases.numbers(problem.posterior)
    cases.finish(case.make(learn_scales=False), problem)
    after = cases.numbers(problem.posterior)
    for name in ("log_amplitude", "log_pairwise_sd"):
        assert torch.equal(before[name], after[name]), name
    assert not torch.equal(before["m"], after["m"])


@every_optimizer
def test_pairwise_scale_can_move_alone(case: Case, cases: ModuleType) -> None:
    problem = case.problem(cases)
    before = cases.numbers(problem.posterior)
    cases.finish(case.make("transitions"), problem)
    after = cases.numbers(problem.posterior)
    assert torch.equal(before["log_amplitude"], after["log_amplitude"])
    assert not torch.equal(before["log_pairwise_sd"], after["log_pairwise_sd"])


@every_optimizer
def test_no_pairwise_scores_where_their_scale_is_zero(case: Case, cases: ModuleType) -> None:
    problem = case.problem(cases, transition_sd=0.0)
    cases.finish(case.make("transitions"), problem)
    q = problem.posterior
    assert (q["next"].mean_scores == 0).all()
    assert (q.pair_log_sd == -torch.inf).all()
    assert q.pairwise_sd == 0
    assert q.kl_pairwise() == 0
    assert torch.isfinite(q.node.m).all()
    assert torch.isfinite(q.node.factor).all()


class NeverPairs(Chain):
    """Refuses to see a pairwise score that is not 0."""

    def log_prob(self, f: Any, g: Any, y: Any, mask: Any) -> Any:
        assert (g == 0).all()
        return super().log_prob(f, g, y, mask)

    def curvature(self, f: Any, g: Any, y: Any, mask: Any) -> Any:
        assert (g == 0).all()
        return super().curvature(f, g, y, mask)


@every_optimizer
def test_likelihoods_see_no_pairwise_score_either(case: Case, cases: ModuleType) -> None:
    cases.finish(case.make("transitions"), case.problem(cases, NeverPairs(), transition_sd=0.0))
    # Nor where the scale was set to 0 later on, and q(g) still has a width of its own.
    problem = case.problem(cases, NeverPairs())
    with torch.no_grad():
        problem.posterior.log_pairwise_sd.fill_(-torch.inf)
    cases.finish(case.make("transitions"), problem)
    assert (problem.posterior["next"].mean_scores == 0).all()


@every_optimizer
def test_draws_are_what_was_asked_for(case: Case, cases: ModuleType) -> None:
    """Six of the estimator's for each sequence and component, or whole multiples of them."""
    if case is OPTIMIZERS["SecondOrder"]:
        pytest.skip("it has draws of its own")
    structure = cases.Counted()
    problem = case.problem(cases, structure, estimator=Pathwise(n_draws=6))
    optimizer = case.make("transitions")
    state = optimizer.start(problem, torch.Generator().manual_seed(1))
    optimizer.step(problem, state)  # of a mixture, with what the start took
    structure.evaluated = 0
    _, info = optimizer.step(problem, state)
    assert info.evaluations == structure.evaluated > 0
    assert info.evaluations % (6 * problem.posterior.n_components * problem.n_sequences) == 0


@every_optimizer
def test_one_sequence_of_one_token(case: Case, cases: ModuleType) -> None:
    problem = case.problem(cases, n_sequences=1, mean_length=1, n_labels=2)
    assert [tuple(batch.mask.shape) for batch in problem.batches] == [(1, 1)]
    assert np.isfinite(cases.finish(case.make("transitions"), problem)[-1].elbo)


@every_optimizer
def test_the_optimiser_keeps_no_state_of_its_own(case: Case, cases: ModuleType) -> None:
    """One object fits two problems in turn, and each as if the other were not there."""
    optimizer = case.make("transitions")
    alone = case.problem(cases, seed=3)
    cases.finish(optimizer, alone)
    cases.finish(optimizer, case.problem(cases, seed=4))
    again = case.problem(cases, seed=3)
    cases.finish(optimizer, again)
    assert torch.equal(alone.posterior.m, again.posterior.m)
