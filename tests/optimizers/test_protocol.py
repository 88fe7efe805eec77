"""What every optimiser must do, tried on each of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import structgp.optimizers
from structgp.optimizers import Adam, SecondOrder, StepInfo
from structgp.structures import Chain

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "Adam": lambda **kwargs: Adam(**{"window": 10, "tolerance": 0.5, **kwargs}),
    "SecondOrder": lambda **kwargs: SecondOrder(**kwargs),
}

every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def test_roll_call() -> None:
    exported = {
        name
        for name in structgp.optimizers.__all__
        if inspect.isclass(part := getattr(structgp.optimizers, name))
        and hasattr(part, "step")
        and not getattr(part, "_is_protocol", False)
    }
    assert exported == set(OPTIMIZERS), "an optimiser without conformance tests"


@every_optimizer
def test_steps_until_finished(make: Callable[..., Any], cases: ModuleType) -> None:
    problem = cases.make_problem(batch_tokens=6)
    assert len(problem.batches) > 1
    steps = cases.finish(make(), problem)
    assert all(isinstance(info, StepInfo) for info in steps)
    assert [info.iteration for info in steps] == list(range(len(steps)))
    assert [info.finished for info in steps] == [False] * (len(steps) - 1) + [True]
    assert [info.converged for info in steps[:-1]] == [False] * (len(steps) - 1)
    assert steps[-1].converged
    assert np.isfinite([info.elbo for info in steps]).all()
    assert all(info.evaluations > 0 for info in steps)


@every_optimizer
def test_names_are_different_and_said(make: Callable[..., Any]) -> None:
    assert isinstance(make().name, str)
    assert len({other().name for other in OPTIMIZERS.values()}) == len(OPTIMIZERS)


@every_optimizer
def test_the_bound_rises(make: Callable[..., Any], cases: ModuleType) -> None:
    problem = cases.make_problem()
    before = cases.many_draw_bound(problem, 2000)
    cases.finish(make(), problem)
    assert cases.many_draw_bound(problem, 2000) > before + 0.5


@every_optimizer
@pytest.mark.parametrize("batch_tokens", [6, 1000])
def test_evaluations_are_likelihoods_computed(
    make: Callable[..., Any], batch_tokens: int, cases: ModuleType
) -> None:
    structure = cases.Counted()
    steps = cases.finish(make(), cases.make_problem(structure, batch_tokens=batch_tokens))
    assert sum(info.evaluations for info in steps) == structure.evaluated


@every_optimizer
def test_the_same_seed_gives_the_same_fit(make: Callable[..., Any], cases: ModuleType) -> None:
    fits = []
    for seed in (1, 1, 2):
        problem = cases.make_problem(batch_tokens=6)
        elbos = [info.elbo for info in cases.finish(make(), problem, seed)]
        fits.append((elbos, cases.numbers(problem.posterior)))
    (elbos, first), (again, second), (_, other) = fits
    assert elbos == again
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert not torch.equal(first["m"], other["m"])


@every_optimizer
def test_kernel_and_inducing_inputs_stay(make: Callable[..., Any], cases: ModuleType) -> None:
    problem = cases.make_problem()
    before = cases.numbers(problem.posterior)
    cases.finish(make(learn_scales=True), problem)
    after = cases.numbers(problem.posterior)
    assert any(name.startswith("kernel.") for name in before)
    for name, value in before.items():
        if name.startswith("kernel.") or name == "inducing":
            assert torch.equal(value, after[name]), name
    moved = ("m", "factor", "pair_mean", "pair_log_sd", "log_amplitude", "log_pairwise_sd")
    for name in moved:
        assert not torch.equal(before[name], after[name]), name


@every_optimizer
def test_scales_can_be_left_alone(make: Callable[..., Any], cases: ModuleType) -> None:
    problem = cases.make_problem()
    with torch.no_grad():
        problem.posterior.log_amplitude.fill_(0.3)
    before = cases.numbers(problem.posterior)
    cases.finish(make(learn_scales=False), problem)
    after = cases.numbers(problem.posterior)
    for name in ("log_amplitude", "log_pairwise_sd"):
        assert torch.equal(before[name], after[name]), name
    assert not torch.equal(before["m"], after["m"])


@every_optimizer
def test_pairwise_scale_moves_alone_by_default(make: Callable[..., Any], cases: ModuleType) -> None:
    problem = cases.make_problem()
    before = cases.numbers(problem.posterior)
    assert make().learn_scales == "pairwise"
    cases.finish(make(), problem)
    after = cases.numbers(problem.posterior)
    assert torch.equal(before["log_amplitude"], after["log_amplitude"])
    assert not torch.equal(before["log_pairwise_sd"], after["log_pairwise_sd"])


@every_optimizer
def test_no_pairwise_scores_where_their_scale_is_zero(
    make: Callable[..., Any], cases: ModuleType
) -> None:
    problem = cases.make_problem(pairwise_sd=0.0)
    cases.finish(make(), problem)
    q = problem.posterior
    assert (q.pair_mean == 0).all()
    assert (q.pair_log_sd == -torch.inf).all()
    assert q.pairwise_sd == 0
    assert q.kl_pairwise() == 0
    assert torch.isfinite(q.m).all()
    assert torch.isfinite(q.factor).all()


class NeverPairs(Chain):
    """Refuses to see a pairwise score that is not 0."""

    def log_prob(self, f: Any, g: Any, y: Any, mask: Any) -> Any:
        assert (g == 0).all()
        return super().log_prob(f, g, y, mask)

    def curvature(self, f: Any, g: Any, y: Any, mask: Any) -> Any:
        assert (g == 0).all()
        return super().curvature(f, g, y, mask)


@every_optimizer
def test_likelihoods_see_no_pairwise_score_either(
    make: Callable[..., Any], cases: ModuleType
) -> None:
    cases.finish(make(), cases.make_problem(NeverPairs(), pairwise_sd=0.0))
    # Nor where the scale was set to 0 later on, and q(g) still has a width of its own.
    problem = cases.make_problem(NeverPairs())
    with torch.no_grad():
        problem.posterior.log_pairwise_sd.fill_(-torch.inf)
    cases.finish(make(), problem)
    assert (problem.posterior.pair_mean == 0).all()


@every_optimizer
def test_draws_are_what_was_asked_for(make: Callable[..., Any], cases: ModuleType) -> None:
    seen = set()

    class Watching(Chain):
        def log_prob(self, f: Any, g: Any, y: Any, mask: Any) -> Any:
            assert len(f) == len(g)
            seen.add(len(f))
            return super().log_prob(f, g, y, mask)

    problem = cases.make_problem(Watching())
    optimizer = make(n_draws=6)
    state = optimizer.start(problem, torch.Generator().manual_seed(1))
    seen.clear()
    optimizer.step(problem, state)
    assert seen == {6}


@every_optimizer
def test_one_sequence_of_one_token(make: Callable[..., Any], cases: ModuleType) -> None:
    problem = cases.make_problem(n_sequences=1, mean_length=1, n_labels=2)
    assert [tuple(batch.mask.shape) for batch in problem.batches] == [(1, 1)]
    assert np.isfinite(cases.finish(make(), problem)[-1].elbo)


@every_optimizer
def test_the_optimiser_keeps_no_state_of_its_own(
    make: Callable[..., Any], cases: ModuleType
) -> None:
    """One object fits two problems in turn, and each as if the other were not there."""
    optimizer = make()
    alone = cases.make_problem(seed=3)
    cases.finish(optimizer, alone)
    cases.finish(optimizer, cases.make_problem(seed=4))
    again = cases.make_problem(seed=3)
    cases.finish(optimizer, again)
    assert torch.equal(alone.posterior.m, again.posterior.m)
