"""SAGA: what a step moves along, what is stored, and when each block moves."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from structgp.errors import InputError, LikelihoodError
from structgp.gp import FullTable, Inducing, Posterior, Weights
from structgp.gp.kernels import RelevanceKernel
from structgp.inference import Natural, Problem
from structgp.inference.bound import Plateau
from structgp.inference.estimators import Pathwise
from structgp.paper import Saga
from structgp.paper import saga as module
from structgp.paper.saga import Gradient, SagaState, project
from structgp.structures import Chain

FORMS = [{}, {"covariance": "diagonal", "full_table": True}, {"n_components": 2}, {"transition_sd": 0.0}]
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: ", ".join(form) or "plain")

SAGA = Saga(node_steps=None, transition_steps=None, learn_scales=True)


def regression(cases: ModuleType, batch_tokens: int = 1, **form: Any) -> Problem:
    """Expectations are exact here, so that what is random is the batch alone."""
    problem: Problem = cases.make_problem(
        cases.Regression(2),
        n_labels=2,
        n_sequences=5,
        estimator=cases.Exact(),
        batch_tokens=batch_tokens,
        **form,
    )
    cases.disturb(problem.posterior)
    return problem


def begin(optimizer: Saga, problem: Problem) -> SagaState:
    """At the posterior as it is: a start would move components of a mixture apart."""
    kept = problem.posterior.snapshot()
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    problem.posterior.load_state_dict(kept)
    return state


def fill(optimizer: Saga, problem: Problem, state: SagaState) -> None:
    for i in range(len(problem.batches)):
        optimizer.direction(problem, state, i)


def directions(optimizer: Saga, problem: Problem, state: SagaState) -> list[Gradient]:
    """What a step would move along for each batch, every time from the same store."""
    found = []
    for i in range(len(problem.batches)):
        copied = replace(state, stored=dict(state.stored))
        found.append(optimizer.direction(problem, copied, i)[0])
    return found


def each_gradient(problem: Problem) -> list[Gradient]:
    """Of the expected log-likelihood of each batch, which is what an empty store moves along."""
    n = len(problem.batches)
    return [SAGA.direction(problem, begin(SAGA, problem), i)[0] for i in range(n)]


def full_gradient(problem: Problem) -> Gradient:
    total, *others = each_gradient(problem)
    for one in others:
        total = total.plus(one)
    return total


def assert_equal(first: Gradient, second: Gradient, rtol: float = 1e-9) -> None:
    for name, value in vars(first).items():
        torch.testing.assert_close(
            value, vars(second)[name], rtol=rtol, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


# -- the gradient ----------------------------------------------------------------------------------


def through(covariance: Tensor, factor: Tensor, m: Tensor) -> Tensor:
    diagonal = factor.shape == m.shape
    return 2 * covariance * factor if diagonal else (2 * covariance @ factor.tril()).tril()


@every_form
@pytest.mark.parametrize("batch_tokens", [1, 1000])
def test_the_gradient_is_autograds(form: dict[str, Any], batch_tokens: int, cases: ModuleType) -> None:
    """In every parameter of the posterior, against the expected part of the bound."""
    problem = regression(cases, batch_tokens, **form)
    q = problem.posterior
    found = full_gradient(problem)
    n = len(problem.batches)
    expected = sum(problem.bound(i, torch.Generator()).expected_log_prob / n for i in range(n))
    wanted = [p for block in q.blocks for p in (block.m, block.factor)]
    more = [q.node.log_amplitude] + ([q.node.weight_logits] if q.n_components > 1 else [])
    grads = torch.autograd.grad(expected, wanted + more, allow_unused=True)
    for k, block in enumerate(q.blocks):
        ours = through(found.covariance[k], block.factor.detach(), block.m)
        if block.is_silent:
            assert (found.m[k] == 0).all()
            assert (ours == 0).all()
            continue
        torch.testing.assert_close(found.m[k], grads[2 * k], rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(ours, grads[2 * k + 1], rtol=1e-6, atol=1e-8)
        assert grads[2 * k].abs().max() > 0.1
    torch.testing.assert_close(found.amplitude, grads[4], rtol=1e-6, atol=1e-8)
    if q.n_components > 1:
        mixing = q.mixing.detach()
        centred = mixing * (found.value - mixing @ found.value)
        torch.testing.assert_close(centred, grads[5], rtol=1e-6, atol=1e-7)


@every_form
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_saga_has_the_full_gradient_as_its_mean(form: dict[str, Any], seed: int, cases: ModuleType) -> None:
    """Whatever is stored: here each batch's gradient at a posterior of its own."""
    problem = regression(cases, **form)
    state = begin(SAGA, problem)
    kept = problem.posterior.snapshot()
    for i in range(len(problem.batches)):
        cases.disturb(problem.posterior, seed + i)
        SAGA.direction(problem, state, i)
        problem.posterior.load_state_dict(kept)
    found = directions(SAGA, problem, state)
    n = len(found)
    mean = found[0].plus(found[0], 1 / n - 1)
    for one in found[1:]:
        mean = mean.plus(one, 1 / n)
    assert_equal(mean, full_gradient(problem), rtol=1e-7)
    assert not torch.allclose(found[0].m[0], found[1].m[0]), "nothing was at stake"


@every_form
def test_a_fresh_store_leaves_no_variance(form: dict[str, Any], cases: ModuleType) -> None:
    problem = regression(cases, **form)
    state = begin(SAGA, problem)
    fill(SAGA, problem, state)
    whole = full_gradient(problem)
    for direction in directions(SAGA, problem, state):
        assert_equal(direction, whole)
    # Without a store, each batch would stand for all of them.
    alone = torch.stack([len(problem.batches) * one.m[0] for one in each_gradient(problem)])
    assert alone.std(0).max() > 1


# -- the store -------------------------------------------------------------------------------------


@every_form
def test_the_cached_total_is_the_sum_of_what_is_stored(form: dict[str, Any], cases: ModuleType) -> None:
    """After many steps in which amplitude and weights move too."""
    problem = cases.make_problem(estimator=Pathwise(n_draws=4), batch_tokens=1, **form)
    optimizer = replace(SAGA, mean_step=0.02, covariance_step=0.005)
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    for _ in range(40):
        state, _ = optimizer.step(problem, state)
    q = problem.posterior
    assert abs(float(q.node.log_amplitude.detach())) > 0.01
    if q.n_components > 1:
        assert float(q.mixing.detach().std()) > 1e-3
    parts = [project(problem, i, state.stored[i]) for i in range(4)]
    total = parts[0].plus(parts[1]).plus(parts[2]).plus(parts[3])
    assert state.total is not None
    assert_equal(state.total, total, rtol=1e-8)


@every_form
def test_memory_is_as_counted(form: dict[str, Any], cases: ModuleType) -> None:
    """K (T V + V T^2) numbers per sequence, V^2 + V^2 (or V^4) for the table, K values and the
    amplitude."""
    problem = cases.make_problem(batch_tokens=1, **form)
    state = begin(SAGA, problem)
    assert state.memory_bytes == 0
    fill(SAGA, problem, state)
    q = problem.posterior
    K, V = q.n_components, q.node.n_scores
    table = V**2 + (V**4 if isinstance(q["next"], FullTable) else V**2)
    lengths = [batch.mask.shape[1] for batch in problem.batches]
    assert len(set(lengths)) > 1
    numbers = sum(K * (T * V + V * T * T) + table + K + 1 for T in lengths)
    assert state.memory_bytes == 8 * numbers
    fill(SAGA, problem, state)  # again changes nothing
    assert state.memory_bytes == 8 * numbers


def test_the_first_pass_fills_without_moving(cases: ModuleType) -> None:
    seen: list[int] = []

    class Watching(Chain):
        def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
            seen.append(mask.shape[1])
            return super().log_prob(f, g, y, mask)

    problem = cases.make_problem(Watching(), batch_tokens=1, estimator=Pathwise(n_draws=2))
    optimizer = replace(SAGA, mean_step=0.05, covariance_step=0.01)
    before = cases.numbers(problem.posterior)
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    for i in range(4):
        assert sorted(state.stored) == list(range(i))
        state, info = optimizer.step(problem, state)
        assert info.evaluations == 2
    assert seen == [batch.mask.shape[1] for batch in problem.batches]
    assert all(torch.equal(v, before[k]) for k, v in cases.numbers(problem.posterior).items())
    state, _ = optimizer.step(problem, state)
    assert not torch.equal(problem.posterior.node.m, before["node.m"])


def test_batches_come_at_random_after_that(cases: ModuleType, monkeypatch: Any) -> None:
    problem = regression(cases)
    optimizer = replace(SAGA, mean_step=1e-9, covariance_step=1e-9, max_steps=10**9, tolerance=-1e9)
    seen: list[int] = []
    original = Saga.direction

    def watched(self: Saga, problem: Problem, state: Any, i: int) -> Any:
        seen.append(i)
        return original(self, problem, state, i)

    monkeypatch.setattr(Saga, "direction", watched)
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    for _ in range(155):
        state, _ = optimizer.step(problem, state)
    assert seen[:5] == list(range(5))
    counts = np.bincount(seen[5:], minlength=5)
    assert (np.abs(counts - 30) < 4 * np.sqrt(24)).all()
    assert any(a == b for a, b in itertools.pairwise(seen)), "drawn with replacement"


# -- the schedule ----------------------------------------------------------------------------------


def filled(optimizer: Saga, problem: Problem) -> SagaState:
    """Where the store is full, and nothing has moved."""
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    for _ in problem.batches:
        state, _ = optimizer.step(problem, state)
    return state


def test_blocks_in_turn(cases: ModuleType) -> None:
    problem = cases.make_problem(n_components=2)
    optimizer = Saga(0.01, 0.01, node_steps=3, transition_steps=2, learn_scales=True, tolerance=1e9)
    state = filled(optimizer, problem)
    node = {"node.m", "node.factor", "node.weight_logits", "node.log_amplitude"}
    table = {"next.m", "next.factor"}
    for k in range(1, 11):
        before = cases.numbers(problem.posterior)
        full = len(state.plateau.recent) == 4
        state, _ = optimizer.step(problem, state)
        after = cases.numbers(problem.posterior)
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        expected = node if k % 5 < 3 else table
        # At the end of each round the scale of the table has its turn, and the law of the scores stays.
        assert moved == (expected | table | {"next.log_amplitude"} if full else expected)


def test_all_at_once(cases: ModuleType) -> None:
    problem = cases.make_problem()
    optimizer = Saga(0.01, 0.01, node_steps=None, transition_steps=None)
    state, before = filled(optimizer, problem), cases.numbers(problem.posterior)
    optimizer.step(problem, state)
    after = cases.numbers(problem.posterior)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"node.m", "node.factor", "next.m", "next.factor"}


def test_a_step_is_its_size_times_the_gradient_of_the_bound(cases: ModuleType) -> None:
    problem = regression(cases, batch_tokens=1000)
    q = problem.posterior
    bound = problem.bound(0, torch.Generator()).elbo
    wanted = [p for block in q.blocks for p in (block.m, block.factor)]
    before = [p.detach().clone() for p in wanted]
    gradients = torch.autograd.grad(bound, wanted)
    optimizer = Saga(0.01, 0.002, node_steps=None, transition_steps=None)
    optimizer.step(problem, filled(optimizer, problem))
    for p, old, gradient, size in zip(wanted, before, gradients, (0.01, 0.002, 0.01, 0.002), strict=True):
        torch.testing.assert_close(p.detach() - old, size * gradient, rtol=1e-6, atol=1e-9)


def test_transitions_at_inducing_inputs(cases: ModuleType) -> None:
    """Both blocks move, and uphill: GP regression of one table for each transition."""
    problem = cases.make_problem(
        cases.RegressionOfTransitions(2), n_labels=2, estimator=cases.Exact(), batch_tokens=1
    )
    rng = np.random.default_rng(2)
    batches = [
        replace(b, edges=torch.from_numpy(rng.normal(size=(*b.masks[1].shape, 1))))
        for b in problem.batches
        if b.mask.shape[1] > 1
    ]
    Z = torch.linspace(-1.5, 1.5, 4, dtype=torch.float64)[:, None]
    after = Inducing(RBFKernel().double().requires_grad_(False), Z, (2, 2))
    q = Posterior({"node": problem.posterior.node, "next": after})
    problem = replace(problem, posterior=q, batches=batches)
    assert len(batches) > 1
    optimizer = replace(SAGA, mean_step=None, covariance_step=None, learn_scales=False, max_steps=150)
    optimum = replace(problem, posterior=copy.deepcopy(q))
    cases.finish(Natural(rate=1.0, learn_scales=False, max_steps=3), optimum)

    def bound(of: Problem) -> float:
        found = [of.bound(i, torch.Generator()).elbo.item() for i in range(len(batches))]
        return float(np.mean(found))

    start, best = bound(problem), bound(optimum)
    cases.finish(optimizer, problem)
    assert bound(problem) > best - 0.1 * (best - start)


def test_weights_are_refused(cases: ModuleType) -> None:
    node = Weights(RelevanceKernel([3]).double(), (3,))
    q = Posterior({"node": node, "next": cases.make_problem().posterior["next"]})
    with pytest.raises(InputError, match=r"^inference: 'saga' stores gradients at inducing inputs"):
        Saga().start(Problem(q, Chain(), []), torch.Generator())


def test_it_stops_at_the_second_stall(cases: ModuleType) -> None:
    problem = cases.make_problem(batch_tokens=1)
    optimizer = Saga(1e-9, 1e-9, node_steps=3, transition_steps=2, tolerance=0.5)
    steps = cases.finish(optimizer, problem)
    assert steps[-1].converged
    # Two rounds of five, the first of which begins where the store is full.
    assert len(steps) == len(problem.batches) - 1 + 10


def test_limits(cases: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    never = replace(SAGA, mean_step=1e-3, covariance_step=1e-4, tolerance=-1e9)
    steps = cases.finish(replace(never, max_steps=7), cases.make_problem(batch_tokens=1))
    assert len(steps) == 7
    assert not steps[-1].converged
    clock = iter(range(10_000))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    steps = cases.finish(replace(never, max_seconds=11.5), cases.make_problem(batch_tokens=1))
    assert len(steps) == 12
    assert not steps[-1].converged


def test_the_kernel_stays_and_it_says_so(cases: ModuleType) -> None:
    with pytest.raises(InputError, match=r"^learn_scales: 'saga' inference cannot move the kernel"):
        Saga(learn_scales="all").start(cases.make_problem(), torch.Generator())


# -- steps by themselves -----------------------------------------------------------------------------


def hessian_norms(problem: Problem) -> tuple[float, float]:
    """Largest curvature of minus the bound in m of one label, and in one whitened transition score, at zero
    scores, by the chain's closed form."""
    q = problem.posterior
    M = q.node.n_values
    zero = torch.zeros(1, q.node.n_scores, q.node.n_scores, dtype=torch.float64)
    node = torch.eye(M, dtype=torch.float64).repeat(q.node.n_scores, 1, 1)
    table = torch.zeros_like(zero[0])
    scale = float(q.node.log_amplitude.detach().exp())
    for i, batch in enumerate(problem.batches):
        f = torch.zeros(1, *batch.mask.shape, q.node.n_scores, dtype=torch.float64)
        bend = Chain().curvature(f, zero, batch.y, batch.mask)
        A = problem.conditional(i)[0].projection
        node += scale * torch.einsum("btm,bvtu,bun->vmn", A, bend.node, A)
        table += bend.next.sum(0)
    variance = float(q["next"].log_amplitude.detach().exp())
    return float(torch.linalg.eigvalsh(node).max()), 1 + variance * float(table.max())


def curvature_bounds(problem: Problem) -> list[float]:
    blocks = problem.posterior.blocks
    return [block.curvature_bound(problem.of_block(k)) for k, block in enumerate(blocks)]


@pytest.mark.parametrize(("n_sequences", "log_amplitude"), [(4, 0.0), (40, 1.0)])
def test_automatic_steps_are_below_the_inverse_curvature(
    n_sequences: int, log_amplitude: float, cases: ModuleType
) -> None:
    problem = cases.make_problem(n_sequences=n_sequences, n_labels=2, mean_length=6, transition_sd=1.5)
    with torch.no_grad():
        problem.posterior.node.log_amplitude.fill_(log_amplitude)
    node, table = hessian_norms(problem)
    bounds = curvature_bounds(problem)
    assert node <= bounds[0] * (1 + 1e-9)
    assert bounds[0] < 8 * node
    assert table < 2 * bounds[1]
    state = Saga(None, None).start(problem, torch.Generator())
    assert state.mean_steps == pytest.approx([1 / (3 * bound) for bound in bounds])
    assert state.mean_steps[0] < 1 / node
    assert state.mean_steps[1] < 1 / table
    assert state.covariance_steps == pytest.approx([0.1 * step for step in state.mean_steps])


def test_steps_that_are_given_are_taken(cases: ModuleType) -> None:
    problem = cases.make_problem()
    state = Saga(0.3, None).start(problem, torch.Generator())
    assert state.mean_steps == [0.3, 0.3]
    expected = [0.1 / (3 * bound) for bound in curvature_bounds(problem)]
    assert state.covariance_steps == pytest.approx(expected)
    state = Saga(None, 0.2).start(problem, torch.Generator())
    assert state.covariance_steps == [0.2, 0.2]
    paper = Saga().start(problem, torch.Generator())
    assert (paper.mean_steps, paper.covariance_steps) == ([1e-4] * 2, [1e-5] * 2)


def test_many_transitions_and_rare_features_do_not_diverge(cases: ModuleType) -> None:
    """The transition scores bend more with every transition, the latent functions hardly: each token is
    nearly its own, so that one step size for both would be far too long for the scores."""
    problem = cases.make_problem(
        n_sequences=40, n_labels=2, mean_length=6, n_inducing=1, batch_tokens=1,
        estimator=Pathwise(n_draws=2),
    )  # fmt: skip
    with torch.no_grad():
        problem.posterior.node.log_amplitude.fill_(-2.0)
    _, table = hessian_norms(problem)
    assert table > 2 * 3 * curvature_bounds(problem)[0], "nothing was at stake"
    before = cases.many_draw_bound(problem, 500)
    optimizer = replace(SAGA, mean_step=None, covariance_step=None, learn_scales=False)
    cases.finish(replace(optimizer, max_steps=250), problem)
    assert cases.many_draw_bound(problem, 500) > before + 10


@pytest.mark.parametrize(
    ("values", "turned"),
    [
        ([10.0, 30.0, 50.0, 70.0], False),
        ([10.0, 60.0, 50.0, 40.0], False),  # a third of what was gained is lost
        ([10.0, 60.0, 40.0, 20.0], True),
        ([0.1, 0.2, 0.2, 0.1], False),  # within the tolerance
    ],
)
def test_a_bound_that_rose_and_fell_within_a_round_is_seen(values: list[float], turned: bool) -> None:
    """Four passes of three batches each, from a best bound of 0; noise of one nat."""
    noise = (-1.0, 0.0, 1.0)
    recent = [value + shift for value in values for shift in noise]
    assert module._turned(Plateau(12, tolerance=0.5, recent=recent, best=0.0), 3) == turned


def test_the_pass_that_fills_the_store_is_no_bound(cases: ModuleType) -> None:
    problem = cases.make_problem(Chain(), batch_tokens=1)
    optimizer = Saga(node_steps=None, transition_steps=None)
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    n = None
    for k in range(1, 100):
        state, _ = optimizer.step(problem, state)
        if n is None and len(state.stored) == len(problem.batches):
            n = k
        if n is not None:
            assert len(state.plateau.recent) == k - n + 1
            if k > n + 3:
                break
    else:
        pytest.fail("the store was never full")


class Steep(Chain):
    """The chain's log-likelihood, twenty times over: far steeper than automatic steps expect."""

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return 20 * super().log_prob(f, g, y, mask)


class Fragile(Chain):
    """The chain, but for the time it is asked after so many others."""

    def __init__(self, good: int) -> None:
        super().__init__()
        self.good = good

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        self.good -= 1
        if self.good == 0:
            raise LikelihoodError("likelihood", "log p is -inf", "return finite numbers")
        return super().log_prob(f, g, y, mask)


def test_a_likelihood_that_breaks_on_the_way_is_stepped_back_from(cases: ModuleType) -> None:
    problem = cases.make_problem(Fragile(60), batch_tokens=1)
    optimizer = replace(SAGA, mean_step=1e-3, covariance_step=1e-4)
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    for _ in range(80):
        state, _ = optimizer.step(problem, state)
    assert state.falls == 1


def test_a_likelihood_that_breaks_from_the_start_is_told(cases: ModuleType) -> None:
    problem = cases.make_problem(Fragile(2), batch_tokens=1)
    with pytest.raises(LikelihoodError):
        cases.finish(replace(SAGA, max_steps=5), problem)


def test_a_bound_that_fell_is_taken_back(cases: ModuleType) -> None:
    problem = cases.make_problem(Steep(), batch_tokens=1, estimator=Pathwise(n_draws=4))
    start = cases.many_draw_bound(problem, 2000)
    optimizer = Saga(
        mean_step=1.0, covariance_step=0.1, node_steps=None, transition_steps=None, max_steps=250
    )
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    info = None
    while info is None or not info.finished:
        state, info = optimizer.step(problem, state)
    assert state.falls > 0
    assert state.mean_steps == [0.5**state.falls] * 2
    problem.posterior.load_state_dict(state.best)
    assert cases.many_draw_bound(problem, 2000) > start - 20
