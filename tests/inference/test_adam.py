"""Adam: its schedule, its stopping, and the bound it climbs when data come in batches."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from structgp.inference import Adam, StepInfo
from structgp.inference.adam import AdamState
from structgp.inference.estimators import Pathwise
from structgp.structures import Chain


def test_stops_by_itself_where_nothing_is_left_to_gain(cases: ModuleType) -> None:
    problem = cases.make_problem(n_sequences=6, estimator=Pathwise(n_draws=4))
    before = cases.many_draw_bound(problem, 2000)
    optimizer = Adam(tolerance=0.1, window=20)
    steps = cases.finish(optimizer, problem)
    assert steps[-1].converged
    assert len(steps) < optimizer.max_steps
    assert cases.many_draw_bound(problem, 2000) > before + 2
    assert np.mean([s.elbo for s in steps[-30:]]) > steps[0].elbo + 2


def test_the_limit_is_flagged(cases: ModuleType) -> None:
    steps = cases.finish(Adam(max_steps=7), cases.make_problem())
    assert len(steps) == 7
    assert steps[-1].finished
    assert not steps[-1].converged


def test_a_structure_without_curvature_is_enough(cases: ModuleType) -> None:
    structure = cases.ValueOnly()
    assert not structure.has_curvature
    problem = cases.make_problem(structure, estimator=Pathwise(n_draws=4))
    before = cases.many_draw_bound(problem, 2000)
    steps = cases.finish(Adam(tolerance=0.2, window=20), problem)
    assert steps[-1].converged
    assert cases.many_draw_bound(problem, 2000) > before + 0.5


def scripted(bounds: list[float], optimizer: Adam, cases: ModuleType) -> list[AdamState]:
    """The schedule alone: what it decides after windows with these mean bounds."""
    problem = cases.make_problem()
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    for bound in bounds:
        for value in (bound - 1, bound, bound + 1):
            state.plateau.add(value)
        optimizer._look(problem, state)
        assert state.plateau.recent == []
    return [state]


def test_the_rate_falls_when_the_bound_stops_rising(cases: ModuleType) -> None:
    optimizer = Adam(learning_rate=0.1, tolerance=0.5)  # four sequences: 2 nats
    (state,) = scripted([-50, -40, -37.9, -36, -30], optimizer, cases)
    assert state.reductions == 1  # at -36 only
    rates = [group["lr"] for group in state.optimizer.param_groups]
    assert rates == pytest.approx([0.03, 0.01])
    (state,) = scripted([-50, -40, -45, -39], optimizer, cases)
    assert state.reductions == 2  # -39 is compared with the best so far


def test_looks_come_after_whole_passes(cases: ModuleType) -> None:
    problem = cases.make_problem(n_sequences=5, batch_tokens=4)
    n = len(problem.batches)
    assert n >= 3
    optimizer = Adam(window=n + 1, learning_rate=1e-6)
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    for k in range(1, 2 * n + 1):
        state, _ = optimizer.step(problem, state)
        assert len(state.plateau.recent) == (0 if k == 2 * n else k)


def test_every_batch_comes_once_a_pass(cases: ModuleType) -> None:
    seen: list[int] = []

    class Watching(Chain):
        def log_prob(self, f, g, y, mask):  # type: ignore[no-untyped-def]
            seen.append(mask.sum().item() * 100 + len(mask))
            return super().log_prob(f, g, y, mask)

    problem = cases.make_problem(
        Watching(), n_sequences=8, batch_tokens=6, seed=2, estimator=Pathwise(n_draws=2)
    )
    n = len(problem.batches)
    keys = sorted(batch.mask.sum().item() * 100 + len(batch) for batch in problem.batches)
    optimizer = Adam()
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    passes = []
    for _ in range(4):
        seen.clear()
        for _ in range(n):
            state, _ = optimizer.step(problem, state)
        assert sorted(seen) == keys
        passes.append(list(seen))
    assert len({tuple(p) for p in passes}) > 1, "the order is not shuffled"


def fitted_means(cases: ModuleType, batch_tokens: int) -> tuple[np.ndarray, np.ndarray, int]:
    problem = cases.make_problem(
        cases.Regression(2),
        n_labels=2,
        n_sequences=9,
        mean_length=2.5,
        n_inducing=9,
        batch_tokens=batch_tokens,
        estimator=cases.Exact(),
    )
    optimizer = Adam(learn_scales=False, tolerance=0.002, window=40, max_steps=700)
    cases.finish(optimizer, problem)
    exact = cases.exact_regression(problem)
    np.testing.assert_allclose(
        problem.posterior["next"].constant_scores()[0], exact.transition_mean, rtol=0, atol=0.06
    )
    sizes = {len(batch) for batch in problem.batches}
    return cases.at_tokens(problem)[0], exact.mean, len(sizes)


@pytest.mark.parametrize("batch_tokens", [1000, 8, 1])
def test_batches_stand_for_all_sequences(batch_tokens: int, cases: ModuleType) -> None:
    """Gaussian likelihood, so the optimum is known, however the data are batched: one batch, batches of
    unequal numbers of sequences, single sequences."""
    means, exact, n_sizes = fitted_means(cases, batch_tokens)
    assert n_sizes > 1 or batch_tokens != 8
    np.testing.assert_allclose(means, exact, rtol=0, atol=0.06)


def test_the_bound_of_batches_averages_to_the_whole(cases: ModuleType) -> None:
    """Batches come equally often, so their estimates must average to the bound of all data."""
    problem = cases.make_problem(cases.Regression(3), n_sequences=7, batch_tokens=6, seed=1)
    problem = replace(problem, estimator=Pathwise(n_draws=4000))
    assert len({len(batch) for batch in problem.batches}) > 1
    cases.disturb(problem.posterior)
    expected = 0.0
    with torch.no_grad():
        q, table = problem.posterior, problem.posterior["next"]
        for i, batch in enumerate(problem.batches):
            mean, covariance = q.node.gaussian(problem.conditional(i)[0])
            away = torch.where(batch.mask[..., None], mean[0] - problem.structure.table[batch.y], 0)
            spread = covariance.diagonal(dim1=-1, dim2=-2).sum()
            expected -= 0.5 * float(away.square().sum() + spread) / cases.LABEL_NOISE
            second = (
                table.constant_scores()[0] - problem.structure.aim
            ).square() + table.constant_scores()[1].square()
            expected -= 0.5 * float(second.sum()) * len(batch)
        whole = expected - float(q.divergence())
        generator = torch.Generator().manual_seed(0)
        bounds = [problem.bound(i, generator) for i in range(len(problem.batches))]
    assert np.mean([float(b.elbo) for b in bounds]) == pytest.approx(whole, rel=0.02)


@pytest.mark.slow
def test_amplitude_is_learned(cases: ModuleType) -> None:
    """It moves, and not downhill."""
    moved, fixed = (cases.make_problem(n_sequences=8, estimator=Pathwise(n_draws=8)) for _ in range(2))
    options = {"tolerance": 0.01, "max_steps": 300}
    cases.finish(Adam(learn_scales=True, **options), moved)
    cases.finish(Adam(learn_scales=False, **options), fixed)
    assert abs(float(moved.posterior.node.log_amplitude.detach())) > 0.1
    assert cases.many_draw_bound(moved, 4000) > cases.many_draw_bound(fixed, 4000) - 0.05


def test_reported_bounds_are_means_since_the_last_look(cases: ModuleType) -> None:
    problem = cases.make_problem()
    optimizer = Adam(learning_rate=1e-9, window=4, max_steps=4, reductions=9)
    noisy: list[float] = []
    bound = type(problem).bound

    def recorded(i: int, generator: torch.Generator, **kwargs: bool) -> object:
        value = bound(problem, i, generator, **kwargs)
        noisy.append(float(value.elbo.detach()))
        return value

    object.__setattr__(problem, "bound", recorded)
    steps: list[StepInfo] = cases.finish(optimizer, problem)
    means = [np.mean(noisy[: k + 1]) for k in range(4)]
    assert [s.elbo for s in steps] == pytest.approx(means)
