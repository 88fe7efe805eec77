"""Second-order inference: where it ends is where the bound is largest, and what it reports is true."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from structgp import Prior, StructuredGPClassifier
from structgp.errors import InputError, StructgpWarning
from structgp.gp import FullTable, Inducing, Posterior, Table, Weights
from structgp.gp.families.weights import PRIOR_SCORES
from structgp.gp.kernels import RelevanceKernel
from structgp.gp.kernels import covariance as kernel_matrix
from structgp.inference import Problem, SecondOrder
from structgp.inference.estimators import Pathwise
from structgp.inference.second_order import OPTIMISM, Draws, SecondOrderState, _is_settled
from structgp.structures import Chain

FIT_DRAWS = 2048


def to_the_end(learn_scales: Any = False, n_draws: int = FIT_DRAWS) -> SecondOrder:
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
    np.testing.assert_allclose(q["next"].constant_scores()[0], exact.transition_mean, rtol=0, atol=1e-6)
    np.testing.assert_allclose(
        q["next"].constant_scores()[1].detach(), exact.transition_sd, rtol=0, atol=1e-6
    )
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
    np.testing.assert_allclose(q.node.m.detach().T, mean, rtol=0, atol=1e-6)
    factor = q.node.factor.detach().tril().numpy()
    for j in range(2):
        np.testing.assert_allclose(factor[j] @ factor[j].T, S, rtol=0, atol=1e-6)


def diagonal(problem: Problem) -> Problem:
    """The same problem for a posterior of diagonal covariances."""
    old = problem.posterior
    node = Inducing(old.node.kernel, old.node.inducing, old.node.labels, covariance="diagonal")
    return replace(problem, posterior=Posterior({"node": node, "next": old["next"]}))


def test_gaussian_likelihood_with_diagonal_covariances(cases: ModuleType) -> None:
    """The best diagonal S has the inverse diagonal of the precision; the best mean is the same."""
    problem = diagonal(cases.make_problem(cases.Regression(2), n_labels=2, n_sequences=6))
    cases.finish(to_the_end(n_draws=16), problem)
    q = problem.posterior
    A = problem.conditional(0)[0].projection[problem.batches[0].mask].numpy()
    targets = problem.structure.table[problem.batches[0].y[problem.batches[0].mask]].numpy()
    precision = np.eye(A.shape[1]) + A.T @ A / cases.LABEL_NOISE
    mean = np.linalg.solve(precision, A.T @ targets / cases.LABEL_NOISE)
    np.testing.assert_allclose(q.node.m.detach().T, mean, rtol=0, atol=1e-6)
    variance = q.node.factor.detach().square().numpy()
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
    names = ("node.m", "node.factor", "next.m", "next.factor")
    parameters = [p for block in q.blocks for p in (block.m, block.factor)]
    generator = torch.Generator().manual_seed(seed)
    problem = replace(problem, estimator=Pathwise(n_draws=draws))
    rows = [torch.autograd.grad(problem.bound(0, generator).elbo, parameters) for _ in range(repeats)]
    answer = {}
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        stacked = torch.stack(values)
        answer[name] = stacked.mean(0), stacked.std(0) / repeats**0.5
    return answer


@pytest.mark.parametrize(("n_labels", "covariance"), [(3, "full"), (2, "diagonal")])
def test_the_gradient_vanishes_where_it_ends(n_labels: int, covariance: str, cases: ModuleType) -> None:
    problem = cases.make_problem(n_labels=n_labels)
    problem = diagonal(problem) if covariance == "diagonal" else problem
    cases.finish(to_the_end(), problem)
    draws, repeats = 500, 30
    # What the draws it was fitted on leave of the gradient has the spread of an average over them.
    widen = np.sqrt(1 + draws * repeats / FIT_DRAWS)
    for name, (mean, error) in bound_gradients(problem, draws=draws, repeats=repeats, seed=8).items():
        limit = 4 * widen * error + 3e-3
        assert (mean.abs() <= limit).all(), (name, (mean.abs() - limit).max())
        assert limit.max() < 0.2, "too little power"


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
    cases.finish(to_the_end(n_draws=1024), problem)
    q = problem.posterior
    best = cases.many_draw_bound(problem, 4000)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        kept = q.node.factor.clone()
        for size in (0.1, 0.3):
            for _ in range(4):
                noise = torch.randn(kept.shape, generator=generator, dtype=torch.float64)
                for sign in (1, -1):
                    q.node.factor.copy_(kept * torch.exp(sign * size * noise))
                    assert cases.many_draw_bound(problem, 4000) < best - 0.01


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n_components": 2}, "a mixture of 2 components"),
        ({"full_table": True}, "a full covariance of the transition scores"),
    ],
)
def test_posteriors_it_cannot_fit(options: dict[str, Any], text: str, cases: ModuleType) -> None:
    with pytest.raises(InputError, match=f"inference: 'second-order' cannot fit {text}; use 'adam'"):
        SecondOrder().start(cases.make_problem(**options), torch.Generator())


def test_it_stops_where_a_round_changes_the_bound_of_an_example_by_less(cases: ModuleType) -> None:
    problem = cases.make_problem(n_sequences=40)
    steps = cases.finish(SecondOrder(learn_scales=False, tolerance=0.002), problem)
    changes = np.abs(np.diff([step.elbo for step in steps])) / 40
    assert changes[-1] < 0.002
    assert (changes[:-1] >= 0.002).all()
    assert 40 * changes[-1] > 0.002  # which tells examples from the sum of them


def test_few_draws_come_close_to_many(cases: ModuleType) -> None:
    few, many = cases.make_problem(), cases.make_problem()
    cases.finish(SecondOrder(learn_scales=False), few)
    cases.finish(to_the_end(n_draws=512), many)
    assert cases.many_draw_bound(few) > cases.many_draw_bound(many) - 0.2


# -- what a round reports and moves -------------------------------------------------------------


def bound_by_hand(
    problem: Problem, state: SecondOrderState, before: dict[str, Tensor], oracles: ModuleType
) -> float:
    """The bound at the means and the amplitude of now and the covariances of ``before``, on the draws of
    ``state``, every probability by enumeration."""
    q = problem.posterior
    V, M = q.node.m.shape
    m, amplitude = q.node.m.detach().numpy(), float(q.node.log_amplitude.detach().exp())
    table_mean = q["next"].constant_scores()[0].numpy()
    prior_sd = float((0.5 * before["next.log_amplitude"]).exp())
    table_sd = prior_sd * before["next.factor"].view(V, V).numpy()
    L = np.tril(before["node.factor"].numpy())
    total = 0.0
    for i, batch in enumerate(problem.batches):
        A = problem.conditional(i)[0].projection.numpy()
        R = problem.conditional(i)[0].residual.numpy()
        noise = state.noise[0][i].numpy()
        for b, T in enumerate(batch.mask.sum(-1).tolist()):
            mean = A[b, :T] @ m.T
            roots = []
            for j in range(V):
                spread = A[b, :T] @ L[j]
                roots.append(np.linalg.cholesky(spread @ spread.T + R[b, :T, :T] @ R[b, :T, :T].T))
            for s in range(len(noise)):
                off = np.stack([roots[j] @ noise[s, b, :T, j] for j in range(V)], -1)
                g = table_mean + table_sd * state.noise[1][s].view(V, V).numpy()
                table = oracles.chain_table(np.sqrt(amplitude) * (mean + off), g)
                labels = batch.y[b, :T].numpy()
                (here,) = np.flatnonzero((table.labels == labels).all(-1))
                total += float(table.score[here] - table.log_z) / len(noise)
    for j in range(V):
        S = L[j] @ L[j].T
        total -= 0.5 * (np.trace(S) + m[j] @ m[j] - M - np.linalg.slogdet(S)[1])
    ratio = (table_sd / prior_sd) ** 2
    return total - 0.5 * float((ratio + (table_mean / prior_sd) ** 2 - 1 - np.log(ratio)).sum())


@pytest.mark.parametrize("learn_scales", [False, True])
def test_the_reported_bound_is_the_bound(
    learn_scales: bool, cases: ModuleType, oracles: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("structgp.inference.second_order.MOST_DRAWS", 8)  # those that there are
    problem = cases.make_problem(batch_tokens=6, transition_sd=1.4)
    assert len(problem.batches) > 1
    problem.posterior.node.kernel.outputscale = 0.2
    problem.refresh()
    optimizer = SecondOrder(n_draws=8, learn_scales=learn_scales, learning_tolerance=0.0)
    state = optimizer.start(problem, torch.Generator().manual_seed(3))
    for _ in range(3):
        before = cases.numbers(problem.posterior)
        state, info = optimizer.step(problem, state)
        expected = bound_by_hand(problem, state, before, oracles)
        assert info.elbo == pytest.approx(expected, rel=1e-6)
    moved = abs(float(problem.posterior.node.log_amplitude.detach()))
    assert (moved > 0.1) == learn_scales


@pytest.mark.parametrize("name", ["node", "next"])
def test_gradients_against_finite_differences(name: str, cases: ModuleType) -> None:
    problem = cases.make_problem(batch_tokens=6, transition_sd=1.4)
    state = SecondOrder(n_draws=4).start(problem, torch.Generator().manual_seed(3))
    cases.disturb(problem.posterior)
    with torch.no_grad():
        draws = Draws(problem, state.noise)
        analytic = cases.value_and_gradients(draws)[1][["node", "next"].index(name)]
        parameter = problem.posterior[name].m
        numeric, h = torch.zeros_like(parameter), 1e-5
        for place in np.ndindex(*parameter.shape):
            for sign in (1, -1):
                parameter[place] += sign * h
                numeric[place] += sign * cases.value_and_gradients(draws)[0] / (2 * h)
                parameter[place] -= sign * h
    assert analytic.abs().max() > 0.1
    torch.testing.assert_close(analytic, numeric, rtol=1e-6, atol=1e-7)


def test_the_value_is_the_mean_log_likelihood_of_the_draws(cases: ModuleType) -> None:
    """The mean as it is now plus offsets, times the root of the amplitude; and the draws are those that the
    bound on the same noise is of."""
    problem = cases.make_problem(batch_tokens=6, transition_sd=1.4)
    state = SecondOrder(n_draws=4).start(problem, torch.Generator().manual_seed(3))
    cases.disturb(problem.posterior)
    q = problem.posterior
    with torch.no_grad():
        draws = Draws(problem, state.noise)
        q.node.m += 0.3
        q["next"].m -= 0.3
        q.node.log_amplitude += 0.3
        expected = torch.zeros(()).double()
        for i, batch in enumerate(problem.batches):
            h = problem.conditional(i)[0].projection @ q.node.m.T + draws.offsets[i][0]
            f = (0.5 * q.node.log_amplitude).exp() * h
            g = q["next"].constant_scores()[0] + (1.4 * draws.offsets[i][1]).view(-1, 3, 3)
            values = problem.structure.log_prob(f, g, batch.y, batch.mask)
            expected += values.mean(0).sum()
            torch.testing.assert_close(draws.scores(i, draws.functions(i)), [f, g])
        torch.testing.assert_close(cases.value_and_gradients(draws)[0], expected)


def test_draws_have_the_posteriors_covariance(cases: ModuleType) -> None:
    """Jointly over the positions of a sequence, and in pairs that cancel."""
    problem = cases.make_problem()
    cases.disturb(problem.posterior)
    kept = problem.posterior.snapshot()
    state = SecondOrder(n_draws=20_000).start(problem, torch.Generator().manual_seed(3))
    problem.posterior.load_state_dict(kept)
    with torch.no_grad():
        problem.posterior.node.log_amplitude.zero_()
        ((offset, table_offset),) = Draws(problem, state.noise).offsets
        expected = problem.posterior.node.gaussian(problem.conditional(0)[0])[1][0]
        found = torch.einsum("sbtv,sbuv->bvtu", offset, offset) / len(offset)
        torch.testing.assert_close(found, expected, rtol=0.07, atol=0.07)
        assert expected[:, :, 0, 1].abs().max() > 0.2
        assert offset.mean(0).abs().max() < 1e-12
        sd = problem.posterior["next"].factor[:, 0].abs()
        torch.testing.assert_close(table_offset.std(0), sd, rtol=0.05, atol=0)


# -- transitions with features -------------------------------------------------------------------------


def featured(cases: ModuleType, structure: Any, batch_tokens: int = 1000) -> Problem:
    """Weights of the transitions, of two features each, beside inducing values of the nodes."""
    problem = cases.make_problem(structure, n_labels=2, n_sequences=6, batch_tokens=batch_tokens)
    rng = np.random.default_rng(0)
    batches = [
        replace(b, edges=torch.from_numpy(rng.integers(0, 3, (*b.masks[1].shape, 2)).astype(float)))
        for b in problem.batches
    ]
    kernel = RelevanceKernel([3, 3]).double().requires_grad_(False)
    after = Weights(kernel, (2, 2))
    q = Posterior({"node": problem.posterior.node, "next": after})
    return replace(problem, posterior=q, batches=batches)


def test_gaussian_likelihood_of_transitions_with_features(cases: ModuleType) -> None:
    """The best means are those of GP regression on the rows of the transitions; the best variances are
    those of each weight with all others held."""
    problem = featured(cases, cases.RegressionOfTransitions(2), batch_tokens=9)
    assert len(problem.batches) > 1
    steps = cases.finish(to_the_end(n_draws=16), problem)
    assert steps[-1].converged
    after, noise = problem.posterior["next"], cases.LABEL_NOISE
    x = torch.cat([b.edges[b.masks[1]] for b in problem.batches])
    aims = [problem.structure.aims[b.y[:, :-1], b.y[:, 1:]][b.masks[1]] for b in problem.batches]
    K = kernel_matrix(after.kernel, x, x).numpy()
    targets = torch.cat(aims).flatten(1).numpy()
    expected = K @ np.linalg.solve(K + noise * np.eye(len(K)), targets)
    with torch.no_grad():
        found = torch.cat(
            [problem.conditional(i)[1].times(after.m)[b.masks[1]] for i, b in enumerate(problem.batches)]
        )
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        conditional = problem.conditional(0)[1]
        X = one_hot(x) * conditional.prior_sd
        precision = 1 + (X**2).sum(0) / noise
        np.testing.assert_allclose(after.factor[0], precision**-0.5, rtol=1e-6)
        assert np.ptp(precision.numpy()) > 1


def one_hot(x: Tensor) -> Tensor:
    """(N, 3 + 3 + 1) the values of two columns, and the constant."""
    columns = [(x[:, p, None] == torch.arange(3)).double() for p in range(2)]
    return torch.cat([*columns, torch.ones(len(x), 1).double()], 1)


def test_transitions_with_features_end_at_the_optimum(cases: ModuleType, oracles: ModuleType) -> None:
    """Under the chain: the gradient of the bound on the draws it was fitted to vanishes in all means, and
    scales learned on the way raise the bound on fresh draws."""
    structure = cases.Enumerated(oracles)
    fixed, learned = featured(cases, structure), featured(cases, structure)
    before, optimizer = cases.many_draw_bound(fixed, 400), to_the_end(n_draws=16)
    state = optimizer.start(fixed, torch.Generator().manual_seed(3))
    info = None
    while info is None or not info.finished:
        kept = fixed.posterior.snapshot()
        state, info = optimizer.step(fixed, state)
    with torch.no_grad():
        spreads = {n: p for n, p in kept.items() if "factor" in n}
        fixed.posterior.load_state_dict(fixed.posterior.snapshot() | spreads)
        _, grads = cases.value_and_gradients(Draws(fixed, state.noise))
        for block, grad in zip(fixed.posterior.blocks, grads, strict=True):
            assert float((grad - block.m).abs().max()) < 0.02
            assert float(block.m.abs().max()) > 0.1
    assert cases.many_draw_bound(fixed, 400) > before + 1
    cases.finish(SecondOrder(n_draws=16, learn_scales="all", max_rounds=6), learned)
    assert cases.many_draw_bound(learned, 400) > cases.many_draw_bound(fixed, 400) - 0.1
    assert (learned.posterior["next"].kernel.log_scale != 0).any()


def test_transitions_at_inducing_inputs_are_refused(cases: ModuleType) -> None:
    problem = cases.make_problem()
    node = problem.posterior.node
    after = Inducing(node.kernel, node.inducing, (3, 3))
    with pytest.raises(InputError, match="cannot fit transitions at inducing inputs; use 'adam'"):
        SecondOrder().start(
            replace(problem, batches=[], posterior=Posterior({"node": node, "next": after})),
            torch.Generator(),
        )


# -- stopping ---------------------------------------------------------------------------------------


def test_converges_and_says_so(cases: ModuleType) -> None:
    problem = cases.make_problem()
    optimizer = SecondOrder(n_draws=128)  # the most: they stay
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


@pytest.mark.parametrize("amplitude", [0.2, 5.0])
def test_scales_are_learned_uphill(amplitude: float, cases: ModuleType) -> None:
    """Both move, and the bound with them, whether the kernel started too small or too large."""

    def start() -> Problem:
        problem = cases.make_problem(n_sequences=12, mean_length=5)
        problem.posterior.node.kernel.outputscale = cases.AMPLITUDE * amplitude
        problem.refresh()
        return problem

    learned, fixed = start(), start()
    cases.finish(SecondOrder(n_draws=64, tolerance=0.002, learn_scales=True), learned)
    cases.finish(SecondOrder(n_draws=64, tolerance=0.002, learn_scales=False), fixed)
    assert abs(float(learned.posterior.node.log_amplitude.detach())) > 1e-3
    assert abs(learned.posterior["next"].prior_sd - 1) > 0.02
    gain = cases.many_draw_bound(learned, 5000) - cases.many_draw_bound(fixed, 5000)
    assert gain > 0.1


def golden(value: Callable[[float], float], low: float, high: float) -> float:
    """Where ``value`` is largest, by a grid that is refined."""
    for _ in range(6):
        grid = np.linspace(low, high, 41)
        best = int(np.argmax([value(x) for x in grid]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 40)]
    return 0.5 * (low + high)


@pytest.mark.slow
def test_amplitude_ends_where_the_bound_is_largest(cases: ModuleType) -> None:
    """Only the amplitude is left to move, with the whitened posterior held: the best one by search on
    many draws."""
    problem = cases.make_problem(n_sequences=8, transition_sd=0.0)
    problem.posterior.node.kernel.outputscale = 0.5
    problem.refresh()
    optimizer = SecondOrder(
        256, tolerance=1e-5, learn_scales=True, learning_tolerance=0.0, learning_rounds=20, max_rounds=21
    )
    cases.finish(optimizer, problem)
    q = problem.posterior
    found = float(q.node.log_amplitude.detach())
    with torch.no_grad():
        noise = problem.fixed_noise(2000, torch.Generator().manual_seed(4))
        draws = Draws(problem, noise)
        f, g = draws.scores(0, draws.functions(0))
        (batch,) = problem.batches

        def value(log_amplitude: float) -> float:
            values = problem.structure.log_prob(
                np.exp(0.5 * (log_amplitude - found)) * f, g, batch.y, batch.mask
            )
            return float(values.mean(0).sum())

        best = golden(value, -3, 3)
    assert abs(found) > 0.3
    assert found == pytest.approx(best, abs=0.1)


@pytest.mark.parametrize("full", [True, False], ids=["full", "diagonal"])
def test_the_scale_of_a_table_ends_where_its_divergence_is_least(full: bool) -> None:
    table = (FullTable if full else Table)((3, 3))
    with torch.no_grad():
        table.m += torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
        if full:
            generator = torch.Generator().manual_seed(0)
            table.factor += 0.3 * torch.randn(9, 9, generator=generator, dtype=torch.float64)
        else:
            table.factor *= 0.5
        second = table.constant_scores()[0].square() + table.constant_scores()[1].square()
        for _ in range(60):
            table.fit_amplitude()
        after = table.constant_scores()[0].square() + table.constant_scores()[1].square()
    torch.testing.assert_close(after, second)  # the law of the scores stays what it is

    def value(sd: float) -> float:
        """-KL(q(g) || p(g)) but for constants, and as much for the prior's made-up scores."""
        scores = second.numel() + PRIOR_SCORES
        return -0.5 * (float(second.sum()) + PRIOR_SCORES) / sd**2 - scores * np.log(sd)

    assert table.prior_sd == pytest.approx(golden(value, 0.2, 5), rel=1e-4)
    assert abs(table.prior_sd - 1) > 0.1


def test_the_scale_of_a_table_is_consistent_at_the_end(cases: ModuleType) -> None:
    problem = cases.make_problem(n_sequences=8)
    cases.finish(to_the_end("transitions", n_draws=64), problem)
    table = problem.posterior["next"]
    before = table.prior_sd
    table.fit_amplitude()
    assert before == pytest.approx(table.prior_sd, rel=1e-3)
    assert abs(before - 1) > 0.02


def test_a_structure_that_leaves_the_transitions_alone(cases: ModuleType) -> None:
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


# -- when it says 'converged' -------------------------------------------------------------------


def test_a_search_that_stops_short_is_not_called_converged(
    cases: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds whose means hardly move change the bound by next to nothing, wherever that is."""

    def lazy(objective: Any, start: Tensor, **_: Any) -> tuple[Tensor, float]:
        x = start - 1e-6 * objective(start)[1]
        return x, objective(x)[0]

    honest = cases.finish(SecondOrder(learn_scales=False), cases.make_problem(Chain(), n_sequences=6))
    monkeypatch.setattr("structgp.inference.second_order.minimize", lazy)
    monkeypatch.setattr("structgp.inference.second_order.climb_down", lazy)
    steps = cases.finish(
        SecondOrder(learn_scales=False, max_rounds=8), cases.make_problem(Chain(), n_sequences=6)
    )
    assert abs(steps[-1].elbo - steps[-2].elbo) < 0.02 * 6
    assert steps[-1].elbo < honest[-1].elbo - 0.1 * 6
    assert honest[-1].converged
    assert steps[-1].finished
    assert not steps[-1].converged


@pytest.mark.parametrize(
    ("change", "before", "settled"),
    [
        (0.01, np.inf, True),
        (0.01, 0.025, True),
        (0.01, 0.011, False),  # ten more such rounds to come
        (0.001, 0.0005, True),
        (0.0, 0.0, True),
        (0.03, np.inf, False),
        (np.inf, np.inf, False),
    ],
)
def test_the_rounds_to_come_count_as_well(change: float, before: float, settled: bool) -> None:
    assert _is_settled(change, before, tolerance=0.02) is settled


def test_draws_are_doubled_where_rounds_go_back_and_forth(
    cases: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounds that rise and fall, whatever the posterior is: more draws up to the most, and no convergence
    before two rounds on the same draws agree."""
    told = iter([-50.0, -45.0, -50.0, -50.0, -45.0, -45.001, -45.002])
    monkeypatch.setattr("structgp.inference.second_order.MOST_DRAWS", 8)
    monkeypatch.setattr("structgp.inference.second_order.lower_bound", lambda *_: next(told))
    problem = cases.make_problem(Chain(), n_sequences=6)
    steps = cases.finish(SecondOrder(n_draws=4, learn_scales=False), problem)
    assert [step.n_draws for step in steps] == [4, 4, 4, 8, 8, 8]
    assert [step.converged for step in steps] == [False] * 5 + [True]
    assert len(problem.fixed_noise(4, torch.Generator())[0][0]) == 8


@pytest.mark.parametrize(("excess", "n_draws"), [(0.5, 4), (1.5, 8), (3.5, 16), (250.0, 128)])
def test_draws_are_as_many_as_the_bound_on_fresh_ones_asks_for(
    excess: float, n_draws: int, cases: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In proportion to how much lower it is, at once. excess : as a multiple of what is allowed."""
    told = iter([excess * OPTIMISM])
    found = "structgp.inference.second_order._excess"
    monkeypatch.setattr(found, lambda *_: (next(told, 0.0), 0))
    problem = cases.make_problem(Chain(), n_sequences=6)
    steps = cases.finish(SecondOrder(n_draws=4, learn_scales=False, tolerance=1.0), problem)
    assert steps[-1].n_draws == n_draws
    assert steps[-1].converged


def test_a_brief_fit_ends_when_scales_have_been_learned(cases: ModuleType) -> None:
    """With the scales of the longer one."""
    problems = [cases.make_problem(Chain(), n_sequences=6) for _ in range(2)]
    brief, longer = (
        cases.finish(SecondOrder(brief=brief, learning_tolerance=0.02), problem)
        for brief, problem in zip((True, False), problems, strict=True)
    )
    assert len(brief) < len(longer)
    assert brief[-1].finished
    assert [step.elbo for step in brief] == [step.elbo for step in longer[: len(brief)]]
    amplitudes = [problem.posterior.node.log_amplitude for problem in problems]
    assert torch.equal(*amplitudes)


@pytest.mark.parametrize("brief", [False, True])
def test_a_brief_fit_does_not_claim_to_have_converged(brief: bool) -> None:
    X = [[{"word": "ab"[(i + t) % 2]} for t in range(4)] for i in range(8)]
    y = [["AB"[(i + t) % 2] for t in range(4)] for i in range(8)]
    way = SecondOrder(brief=brief, learn_scales=False, tolerance=0.5, learning_tolerance=0.01)
    told = pytest.warns(StructgpWarning, match="before the bound settled") if brief else nullcontext()
    with told:
        fitted = StructuredGPClassifier(inference=way, prior=Prior(data_weight=1.0)).fit(X, y)
    assert fitted.training_log_["stopped"] == ("limit" if brief else "converged")


@pytest.mark.slow
def test_a_large_amplitude_gets_more_draws_and_a_higher_bound(cases: ModuleType) -> None:
    bounds = {}
    for most in (4, 128):
        problem = cases.make_problem(Chain(), n_sequences=6)
        with torch.no_grad():
            problem.posterior.node.log_amplitude.fill_(np.log(300.0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("structgp.inference.second_order.MOST_DRAWS", most)
            steps = cases.finish(SecondOrder(n_draws=4, learn_scales=False), problem)
        assert (steps[-1].n_draws > 4) == (most > 4)
        bounds[most] = cases.many_draw_bound(problem)
    assert bounds[128] > bounds[4] + 0.1
