"""Second-order inference in weight space: where it ends."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.generate import generate
from torch import Tensor

from structgp.data.encode import FeatureEncoder
from structgp.data.labels import LabelEncoder
from structgp.gp import Posterior, Table, Weights, contrasts
from structgp.gp.kernels import RelevanceKernel, covariance, weight_variances
from structgp.gp.kernels.build import build_kernel
from structgp.gp.mean_search import GroupedSearch, MeanSearch, grouped
from structgp.inference import Adam, Problem, SecondOrder, second_order
from structgp.inference.estimators import Pathwise
from structgp.inference.loop import make_batches
from structgp.inference.second_order import Draws, _fit_covariances
from structgp.structures import Chain, Structure
from structgp.structures.base import Curvature

V = 3
AMPLITUDE = 1.7


def make_problem(
    structure: Structure | None = None,
    *,
    n_sequences: int = 6,
    mean_length: float = 3,
    n_values: int = 4,
    contrast: bool = True,
    batch_tokens: int = 1000,
    transition_sd: float = 1.0,
) -> Problem:
    """Sequences of a true chain, two templates, values seen once or twice marked as seldom."""
    data = generate(
        n_sequences,
        n_labels=V,
        mean_length=mean_length,
        n_templates=2,
        n_values=n_values,
        strength=2.0,
        seed=0,
    )
    encoder = FeatureEncoder().fit(data.X)
    rows = encoder.transform(data.X)
    labels = LabelEncoder(list(data.chain.labels)).transform(data.y)
    kernel = build_kernel("relevance", encoder.blocks, torch.from_numpy(np.concatenate(rows)))
    kernel.requires_grad_(False)
    counts = torch.from_numpy(np.bincount(np.concatenate(labels), minlength=V))
    basis = contrasts(counts) if contrast else None
    q = Posterior({"node": Weights(kernel, (V,), basis), "next": Table((V, V), transition_sd)})
    batches = make_batches(rows, labels, encoder.pad_row, batch_tokens)
    return Problem(q, structure or Chain(), batches)


@torch.no_grad()
def move_kernel(problem: Problem, seed: int = 3) -> None:
    """No weight has variance 1 any more, nor a function, and there is an amplitude."""
    rng, q = np.random.default_rng(seed), problem.posterior.node
    for p in q.kernel.parameters():
        p += 0.4 * torch.from_numpy(rng.normal(size=p.shape))
    if not q.has_own_functions:
        q.basis.mul_(torch.tensor([0.7, 1.4]))
    q.log_amplitude.fill_(np.log(AMPLITUDE))
    problem.refresh()


def regression(cases: ModuleType, noise: float = 0.3) -> Any:
    class Regression(cases.Regression):  # type: ignore[name-defined, misc]
        """Its curvature has no directions: there is a function for each label."""

        def curvature(
            self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor, basis: Tensor | None = None
        ) -> Curvature:
            return super().curvature(f, g, y, mask)

    return Regression(V, noise)


def to_the_end(n_draws: int = 16) -> SecondOrder:
    """No tolerance, so that rounds go on until nothing moves."""
    return SecondOrder(n_draws, tolerance=1e-9, max_rounds=30, learn_scales=False)


def tokens(problem: Problem) -> tuple[Tensor, Tensor]:
    """Rows and labels of all tokens, batch after batch."""
    x = torch.cat([batch.x[batch.mask] for batch in problem.batches])
    return x, torch.cat([batch.y[batch.mask] for batch in problem.batches])


def one_hot(kernel: RelevanceKernel, x: np.ndarray) -> np.ndarray:
    """(N, M) values, then being rare in each template, then the constant."""
    seldom = np.split(kernel.seldom.numpy(), np.cumsum(kernel.sizes)[:-1])
    values = [x[:, p, None] == np.arange(n) for p, n in enumerate(kernel.sizes)]
    rare = [(here * often).any(1)[:, None] for here, often in zip(values, seldom, strict=True)]
    return np.concatenate([*values, *rare, np.ones((len(x), 1))], 1).astype(float)


# -- a likelihood whose posterior is known ----------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("batch_tokens", [1000, 6])
def test_gaussian_likelihood_gives_gp_regression(batch_tokens: int, cases: ModuleType) -> None:
    """The best mean does not depend on which covariances q may have; the best variances are those of each
    weight with all others held."""
    problem = make_problem(regression(cases), contrast=False, batch_tokens=batch_tokens)
    assert (len(problem.batches) > 1) == (batch_tokens == 6)
    move_kernel(problem)
    steps = cases.finish(to_the_end(), problem)
    assert steps[-1].converged
    q, noise = problem.posterior.node, problem.structure.noise
    x, y = tokens(problem)
    K = AMPLITUDE * covariance(q.kernel, x, x).numpy()
    targets = problem.structure.table[y].numpy()
    expected = K @ np.linalg.solve(K + noise * np.eye(len(K)), targets)
    means, _ = cases.at_tokens(problem)
    np.testing.assert_allclose(means, expected, rtol=0, atol=1e-5)
    assert np.abs(expected).max() > 0.5

    prior = AMPLITUDE * weight_variances(q.kernel).numpy()
    squares = (one_hot(q.kernel, x.numpy()) ** 2).sum(0)
    assert squares.min() == 0 or squares.min() < squares.max() / 4
    for r in range(V):
        found = prior * q.factor[r].square().numpy()
        np.testing.assert_allclose(found, 1 / (1 / prior + squares / noise), rtol=1e-9)

    n = problem.n_sequences
    table = problem.posterior["next"]
    expected = problem.structure.aim.numpy() * n / (n + 1)
    np.testing.assert_allclose(table.constant_scores()[0], expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(table.constant_scores()[1], (n + 1) ** -0.5, rtol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("contrast", [False, True])
def test_the_fresh_bound_is_the_bound(contrast: bool, cases: ModuleType) -> None:
    """In closed form: expected squares are those of mean and variance. Twelve times 100 draws, five
    standard errors."""
    problem = make_problem(regression(cases, noise=9.0), contrast=contrast, batch_tokens=6)
    move_kernel(problem)
    q, table = problem.posterior.node, problem.posterior["next"]
    cases.disturb(problem.posterior)
    # Little spread, so that a hundred draws say much.
    q.factor.mul_(0.4)
    table.factor.mul_(0.2)
    x, y = tokens(problem)
    X, w = one_hot(q.kernel, x.numpy()), weight_variances(q.kernel).numpy()
    amplitude = float(q.log_amplitude.exp())
    m, s, basis = q.m.numpy(), q.factor.numpy(), q.basis.numpy()
    mean = np.sqrt(amplitude) * X @ (np.sqrt(w) * m).T @ basis.T
    variance = amplitude * X**2 @ (w * s**2).T @ (basis**2).T
    away = (mean - problem.structure.table[y].numpy()) ** 2 + variance
    g, sd = table.constant_scores()[0].numpy(), table.constant_scores()[1].numpy()
    second = (g - problem.structure.aim.numpy()) ** 2 + sd**2
    expected = -0.5 * away.sum() / problem.structure.noise - 0.5 * problem.n_sequences * second.sum()
    expected -= 0.5 * (m**2 + s**2 - 1 - np.log(s**2)).sum()
    expected -= 0.5 * (g**2 + sd**2 - 1 - np.log(sd**2)).sum()
    generator = torch.Generator().manual_seed(0)
    found = [problem.fresh_bound(100, generator) for _ in range(12)]
    error = np.std(found, ddof=1) / np.sqrt(len(found))
    assert abs(np.mean(found) - expected) < 5 * error
    for part in (q.kl(), table.kl(), 0.5 * variance.sum() / problem.structure.noise):
        assert error < 0.1 * float(part)


# -- draws ---------------------------------------------------------------------------------------------


@torch.no_grad()
def test_no_two_sequences_share_their_draws(cases: ModuleType) -> None:
    """Equal sequences, in one batch and in two, have offsets of their own; batches change none of them."""
    whole = make_problem()
    batch = whole.batches[0]
    same = replace(batch, x=batch.x[:1].expand_as(batch.x), mask=batch.mask[:1].expand_as(batch.mask))
    parts = [
        replace(same, x=same.x[part], y=same.y[part], mask=same.mask[part], index=same.index[part])
        for part in (slice(0, 2), slice(2, None))
    ]
    found = []
    for batches in ([same], parts):
        problem = Problem(whole.posterior, Chain(), batches)
        state = SecondOrder(4).start(problem, torch.Generator().manual_seed(0))
        whole.posterior.node.factor.fill_(0.7)
        offsets = Draws(problem, state.noise).offsets
        assert [node.shape[1] for node, _ in offsets] == [len(b) for b in batches]
        assert all(table.shape == (4, V * V) for _, table in offsets)
        found.append(torch.cat([node for node, _ in offsets], 1))
    assert torch.equal(*found)
    first = found[0][:, :, 0]
    for i in range(len(batch)):
        for j in range(i):
            assert ((first[:, i] - first[:, j]).abs() > 1e-6).all()
    assert torch.equal(first[:2], -first[2:])


@torch.no_grad()
def test_offsets_have_the_posteriors_covariance(cases: ModuleType) -> None:
    """Without the amplitude, which comes later. 2,000 draws that share nothing, five standard errors."""
    problem = make_problem(n_sequences=3)
    move_kernel(problem)
    cases.disturb(problem.posterior)
    q, (batch,) = problem.posterior.node, problem.batches
    total, n = 0, 0
    for seed in range(40):
        noise = problem.fixed_noise(50, torch.Generator().manual_seed(seed))
        half = Draws(problem, noise).offsets[0][0][:50]
        total, n = total + torch.einsum("sbtr,sbur->brtu", half, half), n + len(half)
    expected = q.gaussian(problem.conditional(0)[0])[1][0] / q.log_amplitude.exp()
    sd = expected.diagonal(dim1=-1, dim2=-2).sqrt()
    error = ((sd[..., :, None] * sd[..., None, :]).square() + expected.square()).sqrt() / n**0.5
    assert ((total / n - expected).abs() <= 5 * error).all()
    assert batch.mask.sum() < batch.mask.numel()


# -- the optimum of the chain's bound -------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["node", "next"])
def test_gradients_against_finite_differences(name: str, cases: ModuleType) -> None:
    problem = make_problem(n_sequences=4, batch_tokens=6, transition_sd=1.4)
    move_kernel(problem)
    cases.disturb(problem.posterior)
    draws = Draws(problem, problem.fixed_noise(2, torch.Generator().manual_seed(3)))
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


@torch.no_grad()
def test_the_reported_bound_is_the_bound(cases: ModuleType) -> None:
    """On the round's draws, at the means after it and the variances before it."""
    problem = make_problem(batch_tokens=6, transition_sd=1.4)
    move_kernel(problem)
    q, table = problem.posterior.node, problem.posterior["next"]
    optimizer = SecondOrder(n_draws=8, learn_scales=False)
    state = optimizer.start(problem, torch.Generator().manual_seed(3))
    for _ in range(3):
        before, offsets = cases.numbers(problem.posterior), Draws(problem, state.noise).offsets
        state, info = optimizer.step(problem, state)
        expected = 0.0
        for i, batch in enumerate(problem.batches):
            mean = q.gaussian(problem.conditional(i)[0])[0][0]
            f = (mean + AMPLITUDE**0.5 * offsets[i][0]) @ q.basis.T
            g = table.constant_scores()[0] + (1.4 * offsets[i][1]).view(-1, V, V)
            expected += float(Chain().log_prob(f, g, batch.y, batch.mask).mean(0).sum())
        for name, m in (("node", q.m), ("next", table.m)):
            s = before[f"{name}.factor"].square()
            expected -= 0.5 * float((m.square() + s - 1 - s.log()).sum())
        assert info.elbo == pytest.approx(expected, rel=1e-9)


@torch.no_grad()
def test_the_gradient_on_its_draws_vanishes_where_it_ends(cases: ModuleType) -> None:
    """What is left of the likelihood's gradient is what the prior asks for."""
    problem = make_problem(batch_tokens=6)
    optimizer = to_the_end()
    _, start = cases.value_and_gradients(Draws(problem, None))
    state = optimizer.start(problem, torch.Generator().manual_seed(1))
    info = None
    while info is None or not info.finished:
        state, info = optimizer.step(problem, state)
    assert info.converged
    _, gradients = cases.value_and_gradients(Draws(problem, state.noise))
    for grad, before, block in zip(gradients, start, problem.posterior.blocks, strict=True):
        assert before.abs().max() > 1
        assert (grad - block.m).abs().max() < 1e-3 * before.abs().max()


def test_the_gradient_on_fresh_draws_vanishes_where_it_ends(cases: ModuleType) -> None:
    """By autograd through means and covariances of whole sequences, with which the fit has nothing to do.
    What the draws it was fitted on leave has the spread of an average over them."""
    problem, fitted, draws, repeats = make_problem(), 512, 300, 15
    cases.finish(to_the_end(fitted), problem)
    q, generator = problem.posterior, torch.Generator().manual_seed(8)
    problem = replace(problem, estimator=Pathwise(n_draws=draws))
    found = [
        torch.autograd.grad(problem.bound(0, generator).elbo, [q.node.m, q["next"].m])
        for _ in range(repeats)
    ]
    widen = np.sqrt(1 + draws * repeats / fitted)
    for values in zip(*found, strict=True):
        stacked = torch.stack(values)
        limit = 4.5 * widen * stacked.std(0) / repeats**0.5 + 3e-3
        assert (stacked.mean(0).abs() <= limit).all()
        assert limit.max() < 0.3, "too little power"


def local_transitions(table: Any) -> np.ndarray:
    """(V, V) sum over neighbours of p (1 - p)."""
    both = table.on[:, :-1, :, None] * table.on[:, 1:, None, :]  # (V^T, T-1, V, V)
    p = np.tensordot(table.prob, both, 1)
    return (p * (1 - p)).sum(0).astype(float)


@torch.no_grad()
def test_variances_are_what_the_curvature_asks_for(cases: ModuleType, oracles: ModuleType) -> None:
    """Position by position, every probability by enumeration."""
    problem = make_problem(n_sequences=4, batch_tokens=6, transition_sd=1.4)
    move_kernel(problem)
    q, scores = problem.posterior.node, problem.posterior["next"]
    cases.disturb(problem.posterior)
    draws = Draws(problem, problem.fixed_noise(2, torch.Generator().manual_seed(3)))
    basis, amplitude = q.basis.numpy(), float(q.log_amplitude.exp())
    precision, transitions = np.ones(q.m.shape), np.full((V, V), 1.4**-2)
    for i, batch in enumerate(problem.batches):
        mean, (offset, table_offset) = q.gaussian(problem.conditional(i)[0])[0][0], draws.offsets[i]
        for b, T in enumerate(batch.mask.sum(-1).tolist()):
            A = amplitude**0.5 * one_hot(q.kernel, batch.x[b, :T].numpy())
            A = A * weight_variances(q.kernel).sqrt().numpy()
            for s in range(4):
                f = (mean[b, :T] + amplitude**0.5 * offset[s, b, :T]).numpy() @ basis.T
                g = scores.constant_scores()[0] + 1.4 * table_offset[s].view(V, V)
                table = oracles.chain_table(f, g.numpy())
                along = table.on @ basis  # (V^T, T, R)
                mean_along = np.tensordot(table.prob, along, 1)
                bend = np.tensordot(table.prob, (along - mean_along) ** 2, 1).astype(float)
                precision += (A**2).T.dot(bend).T / 4
                transitions += local_transitions(table) / 4
    _fit_covariances(draws)
    np.testing.assert_allclose(q.factor, precision**-0.5, rtol=1e-9)
    np.testing.assert_allclose(scores.constant_scores()[1], transitions**-0.5, rtol=1e-9)
    assert precision.max() > 2


def test_not_far_below_adam(cases: ModuleType) -> None:
    """Its variances leave out what positions have in common: here it costs hundredths of a nat."""
    before = cases.many_draw_bound(make_problem(n_sequences=3), 500)
    ours, theirs = make_problem(n_sequences=3), make_problem(n_sequences=3)
    cases.finish(to_the_end(256), ours)
    adam = Adam(0.1, learn_scales=False, max_steps=150, tolerance=0.002)
    cases.finish(adam, replace(theirs, estimator=Pathwise(n_draws=16)))
    found, other = (cases.many_draw_bound(problem, 500) for problem in (ours, theirs))
    assert found > other - 0.05
    assert found < other + 0.15, "Adam was not given a fair chance"
    assert found > before + 5


@pytest.mark.parametrize("contrast", [True, False])
def test_fixed_draws_give_what_the_likelihood_gives(
    contrast: bool, cases: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick way to value and gradients is the slow one, and moves nothing."""
    pytest.importorskip("numba")
    monkeypatch.setattr("structgp.structures.linear_chain.fixed_draws.WORTH_COMPILING", 0)
    problem = make_problem(contrast=contrast, batch_tokens=10, transition_sd=1.7)
    move_kernel(problem)
    problem.refresh()
    for block in problem.posterior.blocks:
        torch.nn.init.normal_(block.m, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        draws = Draws(problem, problem.fixed_noise(4, torch.Generator().manual_seed(4)))
        before = problem.posterior.snapshot()
        quick, quick_grads = cases.value_and_gradients(draws)
        for name, value in problem.posterior.snapshot().items():
            assert torch.equal(value, before[name])
        monkeypatch.setattr(Draws, "slopes", lambda self, i, at: problem.slopes(i, self.scores(i, at)))
        slow, slow_grads = cases.value_and_gradients(draws)
    assert all(batch._draws is not None for batch in draws._fixed)
    torch.testing.assert_close(quick, slow)
    for mine, theirs in zip(quick_grads, slow_grads, strict=True):
        torch.testing.assert_close(mine, theirs)


@torch.no_grad()
def test_bends_at_fixed_draws_are_the_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr("structgp.structures.linear_chain.fixed_draws.WORTH_COMPILING", 0)
    problem = make_problem(contrast=True, batch_tokens=10, transition_sd=1.7)
    move_kernel(problem)
    for block in problem.posterior.blocks:
        torch.nn.init.normal_(block.m, generator=torch.Generator().manual_seed(5))
    draws = Draws(problem, problem.fixed_noise(4, torch.Generator().manual_seed(4)))
    for i in range(len(problem.batches)):
        functions = draws.functions(i)
        quick, slow = draws.bends(i, functions, False), problem.bends(i, draws.scores(i, functions))
        for mine, theirs in zip(quick, slow, strict=True):
            torch.testing.assert_close(mine, theirs)


# -- one number for each group of features ----------------------------------------------------------


@torch.no_grad()
def test_the_slope_of_a_grouped_search_against_finite_differences(cases: ModuleType) -> None:
    problem = make_problem(n_sequences=4, batch_tokens=6, transition_sd=1.4)
    move_kernel(problem)
    cases.disturb(problem.posterior)
    draws = Draws(problem, problem.fixed_noise(2, torch.Generator().manual_seed(3)))
    searches = problem.mean_searches
    sizes = [s.begin(factor) for s, factor in zip(searches, problem.prior_factors, strict=True)]
    assert isinstance(searches[0], GroupedSearch)
    x = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def value(x: Tensor) -> Tensor:
        moved = [search.move(part) for search, part in zip(searches, x.split(sizes), strict=True)]
        return torch.stack(moved).sum() - draws.value(searches)

    value(x)
    analytic, h = torch.cat([search.slope() for search in searches]), 1e-5
    steps = h * torch.eye(len(x), dtype=torch.float64)
    numeric = torch.stack([(value(x + step) - value(x - step)) / (2 * h) for step in steps])
    torch.testing.assert_close(analytic, numeric, rtol=1e-6, atol=1e-7)


@torch.no_grad()
def test_a_grouped_search_finds_the_means_that_a_plain_one_finds(cases: ModuleType) -> None:
    ours, plain = make_problem(batch_tokens=6), make_problem(batch_tokens=6)
    plain.mean_searches = [MeanSearch(block) for block in plain.posterior.blocks]
    for problem in (ours, plain):
        move_kernel(problem)
        draws = Draws(problem, problem.fixed_noise(4, torch.Generator().manual_seed(3)))
        found = second_order._fit_means(draws, 200, 1e-14)
        assert found.gap < 1e-6
    rows = [c[0].rows.matrix for c in map(ours.conditional, range(len(ours.batches)))]
    group, merged = grouped(rows)
    assert merged.shape[1] < len(group), "no two features are alike"
    whole = np.concatenate([x.toarray() for x in rows])
    np.testing.assert_array_equal(merged.matrix.toarray()[:, group], whole)
    assert len(np.unique(whole, axis=1).T) == merged.shape[1]
    for mine, theirs in zip(ours.posterior.blocks, plain.posterior.blocks, strict=True):
        torch.testing.assert_close(mine.m, theirs.m, rtol=0, atol=1e-4)
