"""Second-order inference: where it ends is where the bound is largest, and what it reports is true."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from structgp.errors import InputError
from structgp.gp import Posterior
from structgp.inference import Adam, Problem, SecondOrder
from structgp.inference.estimators import Pathwise
from structgp.inference.scales import PAIRWISE_PRIOR_SCORES, fit_pairwise_sd
from structgp.inference.second_order import (
    AMPLITUDE_PRIOR_SD,
    SecondOrderState,
    _offsets,
    _value_and_gradients,
)
from structgp.structures import Chain

FIT_DRAWS = 2048


def to_the_end(learn_scales: bool = False, n_draws: int = FIT_DRAWS) -> SecondOrder:
    """No tolerance, so that rounds go on until nothing moves."""
    return SecondOrder(n_draws=n_draws, tolerance=1e-7, max_rounds=25, learn_scales=learn_scales)


# -- a likelihood whose posterior is known ----------------------------------------------------------


@pytest.mark.parametrize("batch_tokens", [1000, 6])
def test_gaussian_likelihood_gives_gp_regression(batch_tokens: int, cases: ModuleType) -> None:
    """Inducing inputs that span all tokens: the exact posterior of GP regression."""
    problem = cases.make_problem(
        cases.Regression(3), n_sequences=6, n_inducing=99, batch_tokens=batch_tokens
    )
    assert (len(problem.batches) > 1) == (batch_tokens == 6)
    steps = cases.finish(SecondOrder(learn_scales=False), problem)
    assert steps[-1].converged
    exact = cases.exact_regression(problem)
    means, covariances = cases.at_tokens(problem)
    np.testing.assert_allclose(means, exact.mean, rtol=0, atol=1e-6)
    start = 0
    for covariance in covariances:
        T = covariance.shape[-1]
        expected = exact.covariance[start : start + T, start : start + T]
        for block in covariance:
            np.testing.assert_allclose(block, expected, rtol=0, atol=1e-6)
        start += T
    q = problem.posterior
    np.testing.assert_allclose(q["next"].mean_scores.detach(), exact.transition_mean, rtol=0, atol=1e-6)
    np.testing.assert_allclose(q["next"].score_sds.detach(), exact.transition_sd, rtol=0, atol=1e-6)
    # There the bound is the evidence.
    bound = cases.many_draw_bound(problem)
    assert bound == pytest.approx(exact.log_evidence, rel=3e-3)


def test_gaussian_likelihood_with_few_inducing_inputs(cases: ModuleType) -> None:
    """The best q(u) in closed form: precision I + A^T A / s2 and mean S A^T t / s2, in whitened
    coordinates, at an amplitude that is not 1."""
    problem = cases.make_problem(cases.Regression(2), n_labels=2, n_sequences=6, n_inducing=3)
    amplitude = 1.7
    with torch.no_grad():
        problem.posterior.node.log_amplitude.fill_(np.log(amplitude))
    cases.finish(SecondOrder(learn_scales=False), problem)
    q = problem.posterior
    (batch,) = problem.batches
    x, Z = batch.x[batch.mask].numpy(), q.node.inducing.numpy()
    targets = problem.structure.table[batch.y[batch.mask]].numpy()
    total = amplitude * cases.AMPLITUDE

    def agreement(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return total * (a[:, None] == b[None]).mean(-1)

    A = np.linalg.solve(np.linalg.cholesky(agreement(Z, Z)), agreement(Z, x)).T
    S = np.linalg.inv(np.eye(len(Z)) + A.T @ A / cases.LABEL_NOISE)
    mean = S @ A.T @ targets / cases.LABEL_NOISE
    np.testing.assert_allclose(q.node.m[0].detach().T, mean, rtol=0, atol=1e-6)
    factor = q.node.factor[0].detach().tril().numpy()
    for j in range(2):
        np.testing.assert_allclose(factor[j] @ factor[j].T, S, rtol=0, atol=1e-6)


def diagonal(problem: Problem) -> Problem:
    """The same problem for a posterior of diagonal covariances."""
    old = problem.posterior
    sd = float(old.pairwise_sd.detach())
    q = Posterior(old.kernel, old.inducing, old.n_labels, pairwise_sd=sd, covariance="diagonal")
    return replace(problem, posterior=q)


def test_gaussian_likelihood_with_diagonal_covariances(cases: ModuleType) -> None:
    """The best diagonal S has the inverse diagonal of the precision; the best mean is the same."""
    problem = diagonal(cases.make_problem(cases.Regression(2), n_labels=2, n_sequences=6))
    cases.finish(to_the_end(n_draws=16), problem)
    q = problem.posterior
    A = problem.conditional(0)[0].projection[problem.batches[0].mask].numpy()
    targets = problem.structure.table[problem.batches[0].y[problem.batches[0].mask]].numpy()
    precision = np.eye(A.shape[1]) + A.T @ A / cases.LABEL_NOISE
    mean = np.linalg.solve(precision, A.T @ targets / cases.LABEL_NOISE)
    np.testing.assert_allclose(q.node.m[0].detach().T, mean, rtol=0, atol=1e-6)
    variance = q.node.factor[0].detach().square().numpy()
    for j in range(2):
        np.testing.assert_allclose(variance[j], 1 / np.diag(precision), rtol=1e-6)
    # The diagonal of the inverse is something else.
    assert np.abs(1 / np.diag(precision) - np.diag(np.linalg.inv(precision))).max() > 0.03


# -- the optimum of the chain's bound -----------------------------------------------------------


def bound_gradients(
    problem: Problem, *, draws: int, repeats: int, seed: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Pathwise gradients of the bound by autograd: mean and standard error, by name."""
    (_,) = problem.batches
    q = problem.posterior
    names = ("m", "factor", "pair_mean", "pair_log_sd")
    parameters = [getattr(q, name) for name in names]
    generator = torch.Generator().manual_seed(seed)
    problem = replace(problem, estimator=Pathwise(n_draws=draws))
    rows = [
        torch.autograd.grad(problem.bound(0, generator).elbo, parameters) for _ in range(repeats)
    ]
    answer = {}
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        stacked = torch.stack(values)
        answer[name] = stacked.mean(0), stacked.std(0) / repeats**0.5
    return answer


@pytest.mark.parametrize("n_labels", [2, 3])
@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_the_gradient_vanishes_where_it_ends(
    n_labels: int, covariance: str, cases: ModuleType
) -> None:
    problem = cases.make_problem(n_labels=n_labels)
    problem = diagonal(problem) if covariance == "diagonal" else problem
    cases.finish(to_the_end(), problem)
    draws, repeats = 500, 40
    # What the draws it was fitted on leave of the gradient has the spread of an average over them.
    widen = np.sqrt(1 + draws * repeats / FIT_DRAWS)
    for name, (mean, error) in bound_gradients(
        problem, draws=draws, repeats=repeats, seed=8
    ).items():
        limit = 4 * widen * error + 3e-3
        assert (mean.abs() <= limit).all(), (name, (mean.abs() - limit).max())
        assert limit.max() < 0.2, "too little power"


def test_not_below_adam_after_a_long_run(cases: ModuleType) -> None:
    before = cases.many_draw_bound(cases.make_problem())
    second, adam = cases.make_problem(), cases.make_problem(estimator=Pathwise(n_draws=16))
    cases.finish(to_the_end(n_draws=512), second)
    long = Adam(learn_scales=False, tolerance=0.001, window=100, max_steps=1500)
    cases.finish(long, adam)
    ours, theirs = cases.many_draw_bound(second), cases.many_draw_bound(adam)
    assert ours > theirs - 0.01
    assert ours < theirs + 0.2, "Adam was not given a fair chance"
    assert ours > before + 0.5


def test_diagonal_covariances_reach_no_higher(cases: ModuleType) -> None:
    """A smaller family: not above the full one, and above where it started."""
    full, less = cases.make_problem(n_sequences=8), diagonal(cases.make_problem(n_sequences=8))
    before = cases.many_draw_bound(less)
    cases.finish(to_the_end(n_draws=512), full)
    steps = cases.finish(to_the_end(n_draws=512), less)
    assert steps[-1].converged
    ours, theirs = cases.many_draw_bound(less), cases.many_draw_bound(full)
    assert before + 0.5 < ours <= theirs + 0.01


def test_diagonal_covariances_end_at_a_local_optimum(cases: ModuleType) -> None:
    """No change of the widths, up or down, raises the bound on very many draws."""
    problem = diagonal(cases.make_problem())
    cases.finish(to_the_end(), problem)
    q = problem.posterior
    best = cases.many_draw_bound(problem)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        kept = q.node.factor.clone()
        for size in (0.1, 0.3):
            for _ in range(4):
                noise = torch.randn(kept.shape, generator=generator, dtype=torch.float64)
                for sign in (1, -1):
                    q.node.factor.copy_(kept * torch.exp(sign * size * noise))
                    assert cases.many_draw_bound(problem) < best - 0.01


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n_components": 2}, "a posterior of 2 components"),
        ({"full_table": True}, "a full covariance of the pairwise scores"),
    ],
)
def test_posteriors_it_cannot_fit(options: dict[str, Any], text: str, cases: ModuleType) -> None:
    problem = cases.make_problem()
    old = problem.posterior
    problem = replace(
        problem, posterior=Posterior(old.kernel, old.inducing, old.n_labels, **options)
    )
    with pytest.raises(
        InputError, match=f"inference: 'second-order' cannot fit {text}; use 'adam'"
    ):
        SecondOrder().start(problem, torch.Generator())


def test_few_draws_come_close_to_many(cases: ModuleType) -> None:
    few, many = cases.make_problem(), cases.make_problem()
    cases.finish(SecondOrder(learn_scales=False), few)
    cases.finish(to_the_end(), many)
    assert cases.many_draw_bound(few) > cases.many_draw_bound(many) - 0.2


# -- what a round reports and moves -------------------------------------------------------------


def bound_by_hand(
    problem: Problem,
    state: SecondOrderState,
    before: dict[str, Tensor],
    oracles: ModuleType,
) -> float:
    """The bound at the means and the amplitude of now and the covariances of ``before``, on the
    draws of ``state``, every probability by enumeration."""
    q = problem.posterior
    _, V, M = q.node.m.shape
    m, amplitude = q.node.m[0].detach().numpy(), float(q.node.log_amplitude.detach().exp())
    pair_mean, pair_sd = q["next"].mean_scores.detach().numpy(), before["pair_log_sd"].exp().numpy()
    prior_sd = float(before["log_pairwise_sd"].exp())
    L = np.tril(before["factor"][0].numpy())
    total = 0.0
    for i, batch in enumerate(problem.batches):
        A = problem.conditional(i)[0].projection.numpy()
        R = problem.conditional(i)[0].residual.numpy()
        noise = state.noise[i].numpy()
        for b, T in enumerate(batch.mask.sum(-1).tolist()):
            mean = A[b, :T] @ m.T
            roots = []
            for j in range(V):
                spread = A[b, :T] @ L[j]
                roots.append(np.linalg.cholesky(spread @ spread.T + R[b, :T, :T] @ R[b, :T, :T].T))
            for s in range(len(noise)):
                off = np.stack([roots[j] @ noise[s, b, :T, j] for j in range(V)], -1)
                g = pair_mean + pair_sd * state.pair_noise[s].numpy()
                table = oracles.chain_table(np.sqrt(amplitude) * (mean + off), g)
                labels = batch.y[b, :T].numpy()
                (here,) = np.flatnonzero((table.labels == labels).all(-1))
                total += float(table.score[here] - table.log_z) / len(noise)
    for j in range(V):
        S = L[j] @ L[j].T
        total -= 0.5 * (np.trace(S) + m[j] @ m[j] - M - np.linalg.slogdet(S)[1])
    ratio = (pair_sd / prior_sd) ** 2
    return total - 0.5 * float((ratio + (pair_mean / prior_sd) ** 2 - 1 - np.log(ratio)).sum())


@pytest.mark.parametrize("learn_scales", [False, True])
def test_the_reported_bound_is_the_bound(
    learn_scales: bool, cases: ModuleType, oracles: ModuleType
) -> None:
    problem = cases.make_problem(batch_tokens=6, pairwise_sd=1.4)
    assert len(problem.batches) > 1
    optimizer = SecondOrder(n_draws=8, learn_scales=learn_scales)
    state = optimizer.start(problem, torch.Generator().manual_seed(3))
    for _ in range(3):
        before = cases.numbers(problem.posterior)
        state, info = optimizer.step(problem, state)
        expected = bound_by_hand(problem, state, before, oracles)
        assert info.elbo == pytest.approx(expected, rel=1e-6)
    moved = abs(float(problem.posterior.node.log_amplitude.detach()))
    assert (moved > 0.1) == learn_scales  # so that its prior would show


@pytest.mark.parametrize("name", ["m", "pair_mean", "log_amplitude"])
def test_gradients_against_finite_differences(name: str, cases: ModuleType) -> None:
    problem = cases.make_problem(batch_tokens=6, pairwise_sd=1.4)
    optimizer = SecondOrder(n_draws=4)
    state = optimizer.start(problem, torch.Generator().manual_seed(3))
    cases.disturb(problem.posterior)
    with torch.no_grad():
        offsets, pair_offset = _offsets(problem, state)
        _, gradients, _ = _value_and_gradients(problem, offsets, pair_offset)
        analytic = gradients[["m", "pair_mean", "log_amplitude"].index(name)]
        parameter = getattr(problem.posterior, name)
        parameter = parameter[0] if name == "m" else parameter
        numeric, h = torch.zeros_like(parameter), 1e-5
        for place in np.ndindex(*parameter.shape):
            for sign in (1, -1):
                parameter[place] += sign * h
                value, _, _ = _value_and_gradients(problem, offsets, pair_offset)
                numeric[place] += sign * value / (2 * h)
                parameter[place] -= sign * h
    assert analytic.abs().max() > 0.1
    torch.testing.assert_close(analytic, numeric, rtol=1e-6, atol=1e-7)


def test_the_value_is_the_bound_but_for_constants(cases: ModuleType) -> None:
    """Between two settings of means and amplitude, the value changes by what the bound does, and
    by what the amplitude's prior does."""
    problem = cases.make_problem(batch_tokens=6, pairwise_sd=1.4)
    optimizer = SecondOrder(n_draws=4)
    state = optimizer.start(problem, torch.Generator().manual_seed(3))
    q = problem.posterior
    values, bounds, priors = [], [], []
    with torch.no_grad():
        offsets, pair_offset = _offsets(problem, state)
        for change in (0.0, 0.3):
            q.node.m += change
            q["next"].mean_scores -= change
            q.node.log_amplitude += change
            values.append(float(_value_and_gradients(problem, offsets, pair_offset)[0]))
            priors.append(-0.5 * float(q.node.log_amplitude / AMPLITUDE_PRIOR_SD) ** 2)
            expected = 0.0
            for i, batch in enumerate(problem.batches):
                f = (0.5 * q.node.log_amplitude).exp() * (
                    problem.conditional(i)[0].projection @ q.node.m[0].T + offsets[i]
                )
                g = q["next"].mean_scores + pair_offset
                log_prob = problem.structure.log_prob(f, g, batch.y, batch.mask)
                expected += float(log_prob.mean(0).sum())
            bounds.append(expected - float(q.kl_inducing() + q.kl_pairwise()))
    rise = bounds[1] - bounds[0] + priors[1] - priors[0]
    assert values[1] - values[0] == pytest.approx(rise, rel=1e-9)


def test_draws_have_the_posteriors_covariance(cases: ModuleType) -> None:
    """Jointly over the positions of a sequence, and in pairs that cancel."""
    problem = cases.make_problem()
    cases.disturb(problem.posterior)
    kept = cases.numbers(problem.posterior)
    optimizer = SecondOrder(n_draws=40_000)
    state = optimizer.start(problem, torch.Generator().manual_seed(3))
    problem.posterior.load_state_dict(kept)
    with torch.no_grad():
        problem.posterior.node.log_amplitude.zero_()
        (offset,), pair_offset = _offsets(problem, state)
        expected = problem.posterior.at(problem.conditional(0)).covariance[0]
        found = torch.einsum("sbtv,sbuv->bvtu", offset, offset) / len(offset)
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
        assert expected[:, :, 0, 1].abs().max() > 0.2
        assert offset.mean(0).abs().max() < 1e-12
        sd = problem.posterior.pair_log_sd.exp()
        torch.testing.assert_close(pair_offset.std(0), sd, rtol=0.05, atol=0)


# -- stopping ---------------------------------------------------------------------------------------


def test_converges_and_says_so(cases: ModuleType) -> None:
    problem = cases.make_problem()
    optimizer = SecondOrder()
    steps = cases.finish(optimizer, problem)
    assert steps[-1].converged
    assert 2 <= len(steps) < optimizer.max_rounds
    changes = np.abs(np.diff([s.elbo for s in steps])) / problem.n_sequences
    assert changes[-1] < optimizer.tolerance
    assert (changes[:-1] >= optimizer.tolerance).all()


@pytest.mark.parametrize("max_rounds", [1, 3])
def test_the_limit_is_flagged(max_rounds: int, cases: ModuleType) -> None:
    steps = cases.finish(SecondOrder(max_rounds=max_rounds, tolerance=0.0), cases.make_problem())
    assert len(steps) == max_rounds
    assert steps[-1].finished
    assert not steps[-1].converged


# -- scales -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("amplitude", [0.2, 1.0, 5.0])
def test_scales_are_learned_uphill(amplitude: float, cases: ModuleType) -> None:
    """Both move, and the bound with them, whether the kernel started too small or too large."""

    def start() -> Problem:
        problem = cases.make_problem(n_sequences=12, mean_length=5)
        problem.posterior.node.kernel.outputscale = cases.AMPLITUDE * amplitude
        problem.conditional.refresh()
        return problem

    learned, fixed = start(), start()
    cases.finish(SecondOrder(n_draws=64, tolerance=0.002, learn_scales=True), learned)
    cases.finish(SecondOrder(n_draws=64, tolerance=0.002, learn_scales=False), fixed)
    assert abs(float(learned.posterior.node.log_amplitude.detach())) > 1e-3
    assert abs(float(learned.posterior.pairwise_sd.detach()) - 1) > 0.02
    gain = cases.many_draw_bound(learned, 5000) - cases.many_draw_bound(fixed, 5000)
    assert gain > (-0.05 if amplitude == 1 else 0.1)


def golden(value: Callable[[float], float], low: float, high: float) -> float:
    """Where ``value`` is largest, by a grid that is refined."""
    for _ in range(6):
        grid = np.linspace(low, high, 41)
        best = int(np.argmax([value(x) for x in grid]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 40)]
    return 0.5 * (low + high)


def test_amplitude_ends_where_bound_and_prior_balance(cases: ModuleType) -> None:
    """Only the amplitude is left to move: the best one by search on many draws, prior included."""
    problem = cases.make_problem(n_sequences=8, transition_sd=0.0)
    cases.finish(to_the_end(learn_scales=True, n_draws=512), problem)
    q = problem.posterior
    found = float(q.node.log_amplitude.detach())
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        state = SecondOrder(n_draws=4000).start(
            cases.make_problem(n_sequences=8, transition_sd=0.0), generator
        )
        (offset,), _ = _offsets(problem, state)
        (batch,) = problem.batches
        base = problem.conditional(0)[0].projection @ q.node.m[0].T + offset
        g = torch.zeros(len(base), q.n_labels, q.n_labels, dtype=torch.float64)

        def value(log_amplitude: float) -> float:
            f = np.exp(0.5 * log_amplitude) * base
            total = problem.structure.log_prob(f, g, batch.y, batch.mask).mean(0).sum()
            return float(total) - 0.5 * (log_amplitude / AMPLITUDE_PRIOR_SD) ** 2

        best = golden(value, -3, 3)
    assert abs(found) > 0.1
    assert found == pytest.approx(best, abs=0.06)


@pytest.mark.parametrize("pairwise_covariance", ["full", "diagonal"])
def test_pairwise_scale_ends_where_its_divergence_is_least(
    pairwise_covariance: Any, cases: ModuleType
) -> None:
    old = cases.make_problem(n_sequences=8).posterior
    q = Posterior(old.kernel, old.inducing, 3, pairwise_covariance=pairwise_covariance)
    with torch.no_grad():
        q["next"].mean_scores += torch.linspace(-2, 2, 9, dtype=torch.float64).view(3, 3)
        if q.pairs_are_full:
            generator = torch.Generator().manual_seed(0)
            q.pair_factor += 0.3 * torch.randn(9, 9, generator=generator, dtype=torch.float64)
        else:
            q.pair_log_sd -= 0.7
        for _ in range(60):
            fit_pairwise_sd(q)
        lower = (
            q.pair_factor.tril() if q.pairs_are_full else torch.diag(q["next"].score_sds.detach().flatten())
        )
        second = q["next"].mean_scores.square().flatten() + (lower @ lower.mT).diagonal()

    def value(sd: float) -> float:
        """-KL(q(g) || p(g)) but for constants, and as much for the prior's made-up scores."""
        scores = second.numel() + PAIRWISE_PRIOR_SCORES
        return -0.5 * (float(second.sum()) + PAIRWISE_PRIOR_SCORES) / sd**2 - scores * np.log(sd)

    assert float(q.pairwise_sd.detach()) == pytest.approx(golden(value, 0.2, 5), rel=1e-4)
    assert abs(float(q.pairwise_sd.detach()) - 1) > 0.1


def test_pairwise_scale_is_consistent_at_the_end(cases: ModuleType) -> None:
    problem = cases.make_problem(n_sequences=8)
    cases.finish(to_the_end(learn_scales=True, n_draws=64), problem)
    q = problem.posterior
    before = float(q.pairwise_sd.detach())
    with torch.no_grad():
        fit_pairwise_sd(q)
    assert before == pytest.approx(float(q.pairwise_sd.detach()), rel=1e-3)


def test_a_structure_that_leaves_the_pairwise_scores_alone(cases: ModuleType) -> None:
    class Alone(Chain):
        def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
            chosen = f.log_softmax(-1).gather(-1, y.expand(len(f), -1, -1)[..., None])[..., 0]
            return torch.where(mask, chosen, 0).sum(-1)

        def curvature(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Any:
            return super().curvature(f, torch.zeros_like(g), y, mask)

    problem = cases.make_problem(Alone())
    assert np.isfinite(cases.finish(SecondOrder(), problem)[-1].elbo)


def test_the_bound_reported_has_the_entropy_asked_for(cases: ModuleType) -> None:
    problem = cases.make_problem(estimator=Pathwise(n_draws=16))
    problem.entropy = "jensen"
    last = cases.finish(SecondOrder(), problem)[-1].elbo
    q = problem.posterior
    loose = 0.5 * (1 - np.log(2)) * q.node.m.numel()
    exact = cases.make_problem(estimator=Pathwise(n_draws=16))
    assert last == pytest.approx(cases.finish(SecondOrder(), exact)[-1].elbo - loose, abs=1e-6)
