"""SAGA and SGD: what a step moves along, what is stored, and when each block moves."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from structgp.errors import InputError, LikelihoodError
from structgp.inference import Problem
from structgp.inference.estimators import Pathwise
from structgp.inference.plateau import Plateau
from structgp.paper import Stochastic
from structgp.paper import saga as module
from structgp.paper.saga import Gradient, StochasticState, curvature_bound, pair_curvature_bound, project
from structgp.structures import Chain

FORMS = [
    {},
    {"covariance": "diagonal"},
    {"full_table": True},
    {"n_components": 2},
    {"n_components": 2, "covariance": "diagonal", "full_table": True},
    {"transition_sd": 0.0},
]
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: ", ".join(form) or "plain")

SAGA = Stochastic(node_steps=None, transition_steps=None, learn_scales=True)
SGD = replace(SAGA, remembers=False)


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
    disturb(cases, problem)
    return problem


def disturb(cases: ModuleType, problem: Problem, seed: int = 5) -> None:
    had = problem.posterior.has_pairs
    cases.disturb(problem.posterior, seed)
    if not had:
        with torch.no_grad():
            problem.posterior["next"].mean_scores.zero_()


def begin(optimizer: Stochastic, problem: Problem) -> StochasticState:
    """At the posterior as it is: a start would move components of a mixture apart."""
    kept = {k: v.detach().clone() for k, v in problem.posterior.state_dict().items()}
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    problem.posterior.load_state_dict(kept)
    return state


def fill(optimizer: Stochastic, problem: Problem, state: StochasticState) -> None:
    for i in range(len(problem.batches)):
        optimizer.direction(problem, state, i)


def directions(optimizer: Stochastic, problem: Problem, state: StochasticState) -> list[Gradient]:
    """What a step would move along for each batch, every time from the same store."""
    found = []
    for i in range(len(problem.batches)):
        copied = replace(state, stored=dict(state.stored))
        found.append(optimizer.direction(problem, copied, i)[0])
    return found


def full_gradient(problem: Problem) -> Gradient:
    """Of the expected log-likelihood of all batches, by hand from their sensitivities."""
    total: Gradient | None = None
    fresh = StochasticState(torch.Generator(), None, 0, 0, 0, 0, 0)  # type: ignore[arg-type]
    for i in range(len(problem.batches)):
        whole, _, _ = SGD.direction(problem, fresh, i)
        part = whole.plus(whole, 1 / len(problem.batches) - 1)
        total = part if total is None else total.plus(part)
    assert total is not None
    return total


def assert_equal(first: Gradient, second: Gradient, rtol: float = 1e-9) -> None:
    for name, value in vars(first).items():
        torch.testing.assert_close(
            value, vars(second)[name], rtol=rtol, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


# -- the gradient ----------------------------------------------------------------------------------


def through(covariance: Tensor, factor: Tensor, diagonal: bool) -> Tensor:
    return 2 * covariance * factor if diagonal else (2 * covariance @ factor.tril()).tril()


@every_form
@pytest.mark.parametrize("batch_tokens", [1, 1000])
def test_the_gradient_is_autograds(
    form: dict[str, Any], batch_tokens: int, cases: ModuleType
) -> None:
    """In every parameter of the posterior, against the expected part of the bound."""
    problem = regression(cases, batch_tokens, **form)
    q = problem.posterior
    found = full_gradient(problem)
    n = len(problem.batches)
    expected = sum(problem.bound(i, torch.Generator()).expected_log_prob / n for i in range(n))
    spread = q.pair_factor if q.pairs_are_full else q.pair_log_sd
    wanted = [
        q.node.m,
        q.node.factor,
        q.node.log_amplitude,
        q.node.weight_logits,
        q["next"].mean_scores,
        spread,
    ]
    grads = torch.autograd.grad(expected, wanted, allow_unused=True)
    m, factor, amplitude, logits, pair_mean, pair_spread = grads
    torch.testing.assert_close(found.m, m, rtol=1e-6, atol=1e-8)
    ours = through(found.covariance, q.node.factor.detach(), q.is_diagonal)
    torch.testing.assert_close(ours, factor, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.amplitude, amplitude, rtol=1e-6, atol=1e-8)
    weights = q.mixing.detach()
    centred = weights * (found.value - weights @ found.value)
    torch.testing.assert_close(centred, logits, rtol=1e-6, atol=1e-7)
    assert m.abs().max() > 0.1
    if not q.has_pairs:
        assert (found.pair_mean == 0).all()
        return
    torch.testing.assert_close(found.pair_mean, pair_mean, rtol=1e-6, atol=1e-8)
    if q.pairs_are_full:
        ours = through(found.pair_covariance, q.pair_factor.detach(), False)
    else:
        ours = 2 * found.pair_covariance * (2 * q.pair_log_sd.detach()).exp()
    torch.testing.assert_close(ours, pair_spread, rtol=1e-6, atol=1e-8)


@every_form
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_saga_has_the_full_gradient_as_its_mean(
    form: dict[str, Any], seed: int, cases: ModuleType
) -> None:
    """Whatever is stored: here each batch's gradient at a posterior of its own."""
    problem = regression(cases, **form)
    state = begin(SAGA, problem)
    kept = cases.numbers(problem.posterior)
    for i in range(len(problem.batches)):
        disturb(cases, problem, seed + i)
        SAGA.direction(problem, state, i)
        problem.posterior.load_state_dict(kept)
    found = directions(SAGA, problem, state)
    n = len(found)
    mean = found[0].plus(found[0], 1 / n - 1)
    for one in found[1:]:
        mean = mean.plus(one, 1 / n)
    assert_equal(mean, full_gradient(problem), rtol=1e-7)
    assert not torch.allclose(found[0].m, found[1].m), "nothing was at stake"


@every_form
def test_a_fresh_store_leaves_no_variance(form: dict[str, Any], cases: ModuleType) -> None:
    problem = regression(cases, **form)
    state = begin(SAGA, problem)
    fill(SAGA, problem, state)
    whole = full_gradient(problem)
    for direction in directions(SAGA, problem, state):
        assert_equal(direction, whole)
    forgetful = directions(SGD, problem, begin(SGD, problem))
    spread = torch.stack([d.m for d in forgetful]).std(0)
    assert spread.max() > 1
    assert_equal(_mean(forgetful), whole)


def _mean(found: list[Gradient]) -> Gradient:
    total = found[0]
    for one in found[1:]:
        total = total.plus(one)
    return total.plus(total, 1 / len(found) - 1)


# -- the store -------------------------------------------------------------------------------------


@every_form
def test_the_cached_total_is_the_sum_of_what_is_stored(
    form: dict[str, Any], cases: ModuleType
) -> None:
    """After many steps in which amplitude and weights move too."""
    problem = cases.make_problem(estimator=Pathwise(n_draws=4), batch_tokens=1, **form)
    optimizer = replace(SAGA, mean_step=0.02, covariance_step=0.005)
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    for _ in range(60):
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
    """K (T V + V T^2) numbers a sequence, V^2 + V^2 (or V^4) for pairs, K values and the amplitude."""
    problem = cases.make_problem(batch_tokens=1, **form)
    state = begin(SAGA, problem)
    assert state.memory_bytes == 0
    fill(SAGA, problem, state)
    q = problem.posterior
    K, V = q.n_components, q.n_labels
    pairs = V**2 + (V**4 if q.pairs_are_full else V**2)
    lengths = [batch.mask.shape[1] for batch in problem.batches]
    assert len(set(lengths)) > 1
    numbers = sum(K * (T * V + V * T * T) + pairs + K + 1 for T in lengths)
    assert state.memory_bytes == 8 * numbers
    fill(SAGA, problem, state)  # again changes nothing
    assert state.memory_bytes == 8 * numbers
    forgetful = begin(SGD, problem)
    fill(SGD, problem, forgetful)
    assert forgetful.memory_bytes == 0


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
    assert not torch.equal(problem.posterior.node.m, before["m"])
    # Without memory there is nothing to fill.
    forgetful = replace(optimizer, remembers=False)
    problem.posterior.load_state_dict(before)
    forgetful.step(problem, forgetful.start(problem, torch.Generator().manual_seed(0)))
    assert not torch.equal(problem.posterior.node.m, before["m"])


def test_batches_come_at_random_after_that(cases: ModuleType, monkeypatch: Any) -> None:
    problem = regression(cases)
    optimizer = replace(SAGA, mean_step=1e-9, covariance_step=1e-9, max_steps=10**9, tolerance=-1e9)
    seen: list[int] = []
    original = Stochastic.direction

    def watched(self: Stochastic, problem: Problem, state: Any, i: int) -> Any:
        seen.append(i)
        return original(self, problem, state, i)

    monkeypatch.setattr(Stochastic, "direction", watched)
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    for _ in range(505):
        state, _ = optimizer.step(problem, state)
    assert seen[:5] == list(range(5))
    counts = np.bincount(seen[5:], minlength=5)
    assert (np.abs(counts - 100) < 4 * np.sqrt(80)).all()
    assert any(a == b for a, b in itertools.pairwise(seen)), "drawn with replacement"


# -- the schedule ----------------------------------------------------------------------------------


def test_blocks_in_turn(cases: ModuleType) -> None:
    problem = cases.make_problem(n_components=2)
    optimizer = Stochastic(
        False, 0.01, 0.01, node_steps=3, transition_steps=2, learn_scales=True, tolerance=-1e9
    )
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    unary = {"m", "factor", "weight_logits", "log_amplitude"}
    pairwise = {"pair_mean", "pair_log_sd"}
    for k in range(10):
        before = cases.numbers(problem.posterior)
        state, _ = optimizer.step(problem, state)
        after = cases.numbers(problem.posterior)
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        expected = unary if k % 5 < 3 else pairwise
        # At the end of each round the pairwise scale has its turn.
        assert moved == (expected | {"log_pairwise_sd"} if k % 5 == 4 else expected)


def test_all_at_once(cases: ModuleType) -> None:
    problem = cases.make_problem()
    optimizer = Stochastic(False, 0.01, 0.01, node_steps=None, transition_steps=None)
    before = cases.numbers(problem.posterior)
    optimizer.step(problem, optimizer.start(problem, torch.Generator().manual_seed(0)))
    after = cases.numbers(problem.posterior)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"m", "factor", "pair_mean", "pair_log_sd"}


def test_a_step_is_its_size_times_the_gradient_of_the_bound(cases: ModuleType) -> None:
    problem = regression(cases, batch_tokens=1000)
    q = problem.posterior
    bound = problem.bound(0, torch.Generator()).elbo
    wanted = [q.node.m, q.node.factor, q["next"].mean_scores, q.pair_log_sd]
    before = [p.detach().clone() for p in wanted]
    gradients = torch.autograd.grad(bound, wanted)
    optimizer = Stochastic(False, 0.01, 0.002, node_steps=None, transition_steps=None)
    optimizer.step(problem, optimizer.start(problem, torch.Generator()))
    for p, old, gradient, size in zip(
        wanted, before, gradients, (0.01, 0.002, 0.01, 0.002), strict=True
    ):
        torch.testing.assert_close(p.detach() - old, size * gradient, rtol=1e-6, atol=1e-9)


def test_it_stops_at_the_second_stall(cases: ModuleType) -> None:
    problem = cases.make_problem(batch_tokens=1)
    optimizer = Stochastic(1e-9, 1e-9, node_steps=3, transition_steps=2, tolerance=0.5)
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
    with pytest.raises(InputError, match=r"^learn_scales: 'all' is more than 'saga' inference can"):
        Stochastic(learn_scales="all").start(cases.make_problem(), torch.Generator())


# -- steps by themselves -----------------------------------------------------------------------------


def hessian_norms(problem: Problem) -> tuple[float, float]:
    """Largest curvature of minus the bound in m of one label, and in one pairwise score, at zero
    scores, by the chain's closed form."""
    q = problem.posterior
    M = q.n_inducing
    zero = torch.zeros(1, q.n_labels, q.n_labels, dtype=torch.float64)
    unary = torch.eye(M, dtype=torch.float64).repeat(q.n_labels, 1, 1)
    pairs = torch.zeros_like(zero[0])
    scale = float(q.node.log_amplitude.detach().exp())
    for i, batch in enumerate(problem.batches):
        f = torch.zeros(1, *batch.mask.shape, q.n_labels, dtype=torch.float64)
        bend = Chain().curvature(f, zero, batch.y, batch.mask)
        A = problem.conditional(i)[0].projection
        unary += scale * torch.einsum("btm,bvtu,bun->vmn", A, bend.unary, A)
        pairs += bend.pairwise.sum(0)
    if q.has_pairs:
        pairs += float(q.pairwise_sd.detach()) ** -2
    return float(torch.linalg.eigvalsh(unary).max()), float(pairs.max())


@pytest.mark.parametrize("log_amplitude", [0.0, 1.0])
@pytest.mark.parametrize("n_sequences", [4, 40])
def test_automatic_steps_are_below_the_inverse_curvature(
    n_sequences: int, log_amplitude: float, cases: ModuleType
) -> None:
    problem = cases.make_problem(
        n_sequences=n_sequences, n_labels=2, mean_length=6, transition_sd=1.5
    )
    with torch.no_grad():
        problem.posterior.node.log_amplitude.fill_(log_amplitude)
    unary, pairs = hessian_norms(problem)
    assert unary <= curvature_bound(problem) * (1 + 1e-9)
    assert curvature_bound(problem) < 8 * unary
    assert pairs < 2 * pair_curvature_bound(problem)
    optimizer = Stochastic("auto", "auto")
    state = optimizer.start(problem, torch.Generator())
    assert state.mean_step == pytest.approx(1 / (3 * curvature_bound(problem)))
    assert state.mean_step < 1 / unary
    assert state.pair_mean_step < 1 / pairs
    assert state.covariance_step == pytest.approx(0.1 * state.mean_step)
    assert state.pair_covariance_step == pytest.approx(0.1 * state.pair_mean_step)


def test_steps_that_are_given_are_taken(cases: ModuleType) -> None:
    problem = cases.make_problem()
    state = Stochastic(0.3, "auto").start(problem, torch.Generator())
    assert state.mean_step == state.pair_mean_step == 0.3
    assert state.covariance_step == pytest.approx(0.1 / (3 * curvature_bound(problem)))
    state = Stochastic("auto", 0.2).start(problem, torch.Generator())
    assert state.covariance_step == state.pair_covariance_step == 0.2
    paper = Stochastic().start(problem, torch.Generator())
    assert (paper.mean_step, paper.covariance_step) == (1e-4, 1e-5)


def test_many_transitions_and_rare_features_do_not_diverge(cases: ModuleType) -> None:
    """The pairwise scores bend more with every transition, the latent functions hardly: each token
    is nearly its own, so that one step size for both would be far too long for the scores."""
    problem = cases.make_problem(
        n_sequences=40, n_labels=2, mean_length=6, n_inducing=1, batch_tokens=1,
        estimator=Pathwise(n_draws=4),
    )  # fmt: skip
    with torch.no_grad():
        problem.posterior.node.log_amplitude.fill_(-2.0)
    _, pairs = hessian_norms(problem)
    assert pairs > 2 * 3 * curvature_bound(problem), "nothing was at stake"
    before = cases.many_draw_bound(problem, 500)
    optimizer = replace(SAGA, mean_step="auto", covariance_step="auto", learn_scales=False)
    cases.finish(replace(optimizer, max_steps=600), problem)
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
def test_a_bound_that_rose_and_fell_within_a_round_is_seen(
    values: list[float], turned: bool
) -> None:
    """Four passes of three batches each, from a best bound of 0; noise of one nat."""
    noise = (-1.0, 0.0, 1.0)
    recent = [value + shift for value in values for shift in noise]
    assert module._turned(Plateau(12, tolerance=0.5, recent=recent, best=0.0), 3) == turned


def test_the_pass_that_fills_the_store_is_no_bound(cases: ModuleType) -> None:
    problem = cases.make_problem(Chain(), batch_tokens=1)
    optimizer = Stochastic(node_steps=None, transition_steps=None)
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
    problem = cases.make_problem(Steep(), batch_tokens=1)
    start = cases.many_draw_bound(problem)
    optimizer = Stochastic(
        mean_step=1.0, covariance_step=0.1, node_steps=None, transition_steps=None, max_steps=400
    )
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    info = None
    while info is None or not info.finished:
        state, info = optimizer.step(problem, state)
    assert state.falls > 0
    assert state.mean_step == 0.5**state.falls
    problem.posterior.load_state_dict(state.best)
    assert cases.many_draw_bound(problem) > start - 20
