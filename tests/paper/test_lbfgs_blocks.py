"""L-BFGS over blocks: the schedule, the same draws, the three ways to stop, and what is kept."""

from __future__ import annotations

import itertools
import time
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch

from structgp.inference import Problem
from structgp.inference.estimators import Pathwise
from structgp.paper import LbfgsBlocks
from structgp.paper import lbfgs_blocks as module

NODE = {"node.m", "node.factor", "node.weight_logits"}
TABLE = {"next.m", "next.factor"}
HYPER = {"next.log_amplitude", "node.log_amplitude"}


def is_kernel(name: str) -> bool:
    return name.startswith("node.kernel.")


def watch(monkeypatch: pytest.MonkeyPatch, cases: ModuleType) -> list[tuple[int, set[str], int]]:
    """For each call of L-BFGS: most iterations, the parameters that moved, iterations made."""
    seen: list[tuple[int, set[str], int]] = []
    original = scipy.optimize.minimize
    climb = LbfgsBlocks._climb

    def minimize(fun: Any, x0: Any, **kwargs: Any) -> Any:
        result = original(fun, x0, **kwargs)
        seen.append((kwargs["options"]["maxiter"], set(), result.nit))
        return result

    def climbing(self: LbfgsBlocks, problem: Problem, *args: Any) -> Any:
        before = cases.numbers(problem.posterior)
        answer = climb(self, problem, *args)
        now = cases.numbers(problem.posterior)
        seen[-1][1].update(k for k, v in before.items() if not torch.equal(v, now[k]))
        return answer

    monkeypatch.setattr(scipy.optimize, "minimize", minimize)
    monkeypatch.setattr(LbfgsBlocks, "_climb", climbing)
    return seen


@pytest.mark.parametrize(("n_components", "full"), [(1, True), (2, False)])
def test_blocks_in_turn(
    n_components: int, full: bool, cases: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = cases.make_problem(n_components=n_components, full_table=full)
    seen = watch(monkeypatch, cases)
    optimizer = LbfgsBlocks(node_steps=7, transition_steps=4, hyper_steps=2, learn_scales="all")
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    for _ in range(2):
        state, _ = optimizer.step(problem, state)
    assert [most for most, _, _ in seen] == [7, 4, 2, 7, 4, 2]
    assert all(0 < made <= most for most, _, made in seen)
    names = set(cases.numbers(problem.posterior))
    for (_, moved, _), allowed in zip(seen, itertools.cycle((NODE, TABLE, HYPER)), strict=False):
        wanted = allowed & names
        if allowed is HYPER:
            assert any(is_kernel(name) for name in moved)
            moved = {name for name in moved if not is_kernel(name)}
        assert moved == wanted


@pytest.mark.parametrize(
    ("learn_scales", "moved"), [(False, set()), ("transitions", {"next.log_amplitude"}), (True, HYPER)]
)
def test_which_scales_move(learn_scales: Any, moved: set[str], cases: ModuleType) -> None:
    problem = cases.make_problem()
    before = cases.numbers(problem.posterior)
    cases.finish(LbfgsBlocks(learn_scales=learn_scales, max_iterations=1), problem)
    after = cases.numbers(problem.posterior)
    different = {name for name in before if not torch.equal(before[name], after[name])}
    assert {n for n in different if is_kernel(n) or n in HYPER} == moved


def test_no_block_of_transitions_where_there_are_none(
    cases: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = cases.make_problem(transition_sd=0.0)
    seen = watch(monkeypatch, cases)
    cases.finish(LbfgsBlocks(max_iterations=1, learn_scales=True), problem)
    assert [most for most, _, _ in seen] == [50, 5]
    assert [moved for _, moved, _ in seen] == [{"node.m", "node.factor"}, {"node.log_amplitude"}]


def test_every_evaluation_has_the_same_draws(cases: ModuleType) -> None:
    """Standard normal numbers, batch by batch; another seed has others."""
    seen: list[torch.Tensor] = []

    class Watched(Pathwise):
        def __call__(self, target: Any, generator: Any, memory: Any = None) -> Any:
            start = generator.get_state()
            answer = super().__call__(target, generator, memory)
            fresh = torch.Generator()
            fresh.set_state(start)
            seen.append(torch.randn(4, generator=fresh))
            return answer

    def fit(seed: int) -> list[torch.Tensor]:
        seen.clear()
        problem = cases.make_problem(batch_tokens=9, estimator=Watched(n_draws=4))
        assert len(problem.batches) == 2
        cases.finish(LbfgsBlocks(6, 3, 3, max_iterations=2, learn_scales="all"), problem, seed)
        return list(seen)

    draws, other = fit(1), fit(2)
    assert len(draws) > 20
    for first, second in itertools.pairwise(zip(draws[::2], draws[1::2], strict=True)):
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], other[0])


def test_the_objective_is_the_mean_over_batches(cases: ModuleType) -> None:
    problem = cases.make_problem(batch_tokens=9, estimator=Pathwise(n_draws=4))
    cases.disturb(problem.posterior)
    q = problem.posterior
    value, grads, count = module._value_and_gradients(problem, [q.node.m, q["next"].m], 3, False)
    generator = torch.Generator().manual_seed(3)
    bounds = [problem.bound(i, generator) for i in range(2)]
    mean = (bounds[0].elbo + bounds[1].elbo) / 2
    assert value == pytest.approx(float(mean.detach()), rel=1e-12)
    for found, expected in zip(grads, torch.autograd.grad(mean, [q.node.m, q["next"].m]), strict=True):
        torch.testing.assert_close(found, expected)
    assert count == 4 * problem.n_sequences


# -- stopping --------------------------------------------------------------------------------------


def regression(cases: ModuleType) -> Problem:
    problem: Problem = cases.make_problem(
        cases.Regression(2), n_labels=2, estimator=cases.Exact(), n_inducing=4
    )
    return problem


def test_stops_when_the_objective_stands_still(cases: ModuleType) -> None:
    optimizer = LbfgsBlocks(parameter_tolerance=0.0, objective_tolerance=1e-2, learn_scales=False)
    steps = cases.finish(optimizer, regression(cases))
    changes = np.abs(np.diff([s.elbo for s in steps]))
    assert steps[-1].converged
    assert len(steps) > 1
    assert changes[-1] < 1e-2
    assert (changes[:-1] >= 1e-2).all()


def test_stops_when_the_parameters_stand_still(cases: ModuleType) -> None:
    problem = regression(cases)
    q = problem.posterior
    optimizer = LbfgsBlocks(
        node_steps=3, parameter_tolerance=1e-2, objective_tolerance=0.0, learn_scales=False
    )
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    moves, infos = [], []
    for _ in range(30):
        before = cases.numbers(q)
        state, info = optimizer.step(problem, state)
        now = cases.numbers(q)
        away = {k: (now[k] - before[k]).abs() for k in ("node.m", "node.factor")}
        diagonal = away["node.factor"].diagonal(dim1=-1, dim2=-2)
        moves.append(max(float(away["node.m"].mean()), float(diagonal.mean())))
        infos.append(info)
        if info.finished:
            break
    assert infos[-1].converged
    assert len(infos) > 1
    assert moves[-1] < 1e-2
    assert min(moves[:-1]) >= 1e-2


def never(**kwargs: Any) -> LbfgsBlocks:
    """No tolerance would stop it."""
    return LbfgsBlocks(parameter_tolerance=0.0, objective_tolerance=0.0, learn_scales=False, **kwargs)


def test_stops_at_most_iterations(cases: ModuleType) -> None:
    steps = cases.finish(never(max_iterations=3, node_steps=2), cases.make_problem())
    assert len(steps) == 3
    assert steps[-1].finished
    assert not steps[-1].converged


def test_stops_in_time_and_keeps_what_it_has(cases: ModuleType) -> None:
    problem = cases.make_problem(estimator=Pathwise(n_draws=4))
    before = cases.many_draw_bound(problem, 1000)
    began = time.monotonic()
    steps = cases.finish(never(max_seconds=0.3), problem)
    assert time.monotonic() - began < 5
    assert steps[-1].finished
    assert not steps[-1].converged
    assert cases.many_draw_bound(problem, 1000) > before + 1


def test_the_time_is_looked_at_within_a_block(cases: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves by a second an evaluation: five of them, and no more blocks."""
    clock, calls = [0.0], [0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    original = module._value_and_gradients

    def counted(*args: Any) -> Any:
        clock[0] += 1
        calls[0] += 1
        return original(*args)

    monkeypatch.setattr(module, "_value_and_gradients", counted)
    problem = cases.make_problem()
    steps = cases.finish(never(max_seconds=4.5), problem)
    assert calls[0] == 5
    assert len(steps) == 1
    assert not steps[0].converged
    assert (problem.posterior["next"].constant_scores()[0] == 0).all()
    assert (problem.posterior.node.m != 0).any()


# -- the best is kept ------------------------------------------------------------------------------


def test_the_best_parameters_are_kept(cases: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound that is lowered from outside in every round after the first: what is left in the end is the
    first one's."""
    problem = cases.make_problem()
    state_of: list[dict[str, torch.Tensor]] = []
    worse = [0.0]
    original = module._value_and_gradients

    def lowered(*args: Any) -> Any:
        value, grads, count = original(*args)
        return value - worse[0], grads, count

    monkeypatch.setattr(module, "_value_and_gradients", lowered)
    optimizer = never(max_iterations=3, node_steps=3, transition_steps=2)
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    infos = []
    for _ in range(3):
        state, info = optimizer.step(problem, state)
        infos.append(info)
        state_of.append(cases.numbers(problem.posterior))
        worse[0] += 100
    assert infos[-1].finished
    assert infos[0].elbo == infos[1].elbo == infos[2].elbo
    assert not torch.equal(state_of[0]["node.m"], state_of[1]["node.m"])
    for name, value in state_of[0].items():
        assert torch.equal(value, state_of[2][name]), name


def test_values_that_are_no_numbers_are_stepped_over(
    cases: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = module._value_and_gradients, [0]

    def holes(*args: Any) -> Any:
        value, grads, count = original(*args)
        calls[0] += 1
        if calls[0] == 4:
            raise torch.linalg.LinAlgError("nothing can be computed there")
        return (np.nan if calls[0] == 3 else value), grads, count

    monkeypatch.setattr(module, "_value_and_gradients", holes)
    problem = cases.make_problem()
    steps = cases.finish(never(max_iterations=2, node_steps=8), problem)
    assert np.isfinite([s.elbo for s in steps]).all()
    assert torch.isfinite(problem.posterior.node.m).all()


def test_conditionals_follow_the_kernel_at_once(cases: ModuleType) -> None:
    """The node block of the next global iteration needs them."""
    problem = cases.make_problem(batch_tokens=9)
    kept = problem.conditional(0)[0].projection.clone()
    optimizer = LbfgsBlocks(4, 2, 2, learn_scales="all")
    _, info = optimizer.step(problem, optimizer.start(problem, torch.Generator().manual_seed(0)))
    assert not info.finished
    scratch = Problem(problem.posterior, problem.structure, problem.batches)
    found = problem.conditional(0)[0].projection
    assert not torch.equal(found, kept)
    assert torch.equal(found, scratch.conditional(0)[0].projection)


def test_conditionals_follow_the_kernel(cases: ModuleType) -> None:
    """After 'all' has moved the kernel, the bound is that of a problem made from scratch."""
    problem = cases.make_problem(batch_tokens=9)
    before = cases.numbers(problem.posterior)
    cases.finish(LbfgsBlocks(6, 3, 3, learn_scales="all", max_iterations=2), problem)
    after = cases.numbers(problem.posterior)
    assert any(is_kernel(n) and not torch.equal(before[n], after[n]) for n in before)
    scratch = Problem(problem.posterior, problem.structure, problem.batches, problem.estimator)
    for i in range(2):
        torch.testing.assert_close(
            problem.conditional(i)[0].projection, scratch.conditional(i)[0].projection, rtol=0, atol=0
        )
    old, new = (cases.many_draw_bound(p, 200) for p in (problem, scratch))
    assert old == new


def test_the_reported_bound_is_of_the_parameters_kept(cases: ModuleType) -> None:
    problem = cases.make_problem(batch_tokens=9)
    optimizer = LbfgsBlocks(6, 3, 3, learn_scales="all", max_iterations=2, parameter_tolerance=0.0)
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    for _ in range(2):
        state, info = optimizer.step(problem, state)
    value, _, _ = module._value_and_gradients(problem, [problem.posterior.node.m], state.seed, False)
    assert info.elbo == pytest.approx(value, abs=1e-8)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_only_the_lower_triangle_is_a_parameter(covariance: str, cases: ModuleType) -> None:
    q = cases.make_problem(covariance=covariance, n_components=2).posterior
    K, V, M = q.node.m.shape
    size = M * (M + 1) // 2 if covariance == "full" else M
    lower = [False, covariance == "full"]
    flat = module._flatten([q.node.m.detach(), q.node.factor.detach()], lower)
    assert flat.shape == (K * V * (M + size),)
    new = torch.randn(flat.shape, generator=torch.Generator().manual_seed(0), dtype=flat.dtype)
    module._unflatten(new, [q.node.m, q.node.factor], lower)
    np.testing.assert_array_equal(module._flatten([q.node.m.detach(), q.node.factor.detach()], lower), new)
    if covariance == "full":
        assert torch.equal(q.node.factor, q.node.factor.tril())


def test_a_full_table_keeps_its_triangle(cases: ModuleType) -> None:
    """Its factor is (V^2, V^2): what is above the diagonal does not count and has no gradient."""
    problem = cases.make_problem(full_table=True)
    cases.finish(LbfgsBlocks(5, 5, max_iterations=1, learn_scales=False), problem)
    factor = problem.posterior["next"].factor.detach()
    assert torch.equal(factor, factor.tril())
    assert (factor - torch.eye(9, dtype=torch.float64)).abs().max() > 0.01
