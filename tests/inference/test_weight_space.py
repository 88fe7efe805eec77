"""Second-order inference in weight space: where it ends, and how its scales are learned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structgp.inference.learn_scales import (
    AXIS_PRIOR_COUNT,
    LARGEST_FACTOR,
    WEIGHTS_PRIOR_COUNT,
    Slopes,
    learn,
)
from torch import Tensor

from structgp.data.encode import FeatureEncoder
from structgp.data.generate import generate
from structgp.data.labels import LabelEncoder
from structgp.gp import WeightPosterior, contrasts
from structgp.gp.kernels import RelevanceKernel, covariance, weight_variances
from structgp.gp.kernels.block_sum import BlockSumKernel, build_kernel
from structgp.gp.kernels.relevance import degrees_of_freedom
from structgp.gp.kernels.sparse import pack
from structgp.inference import Adam, Problem, SecondOrder
from structgp.inference.estimators import Pathwise
from structgp.inference.loop import make_batches
from structgp.inference.second_order import _fit_covariances, _offsets, _value_and_gradients
from structgp.structures import Chain, Piecewise, Structure
from structgp.structures.base import Curvature, LocalCurvature

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
    pairwise_sd: float = 1.0,
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
    q = WeightPosterior(kernel, V, pairwise_sd=pairwise_sd, basis=basis)
    batches = make_batches(rows, labels, encoder.pad_row, batch_tokens)
    return Problem(q, structure or Chain(), batches)


@torch.no_grad()
def move_kernel(problem: Problem, seed: int = 3) -> None:
    """No weight has variance 1 any more, nor a function, and there is an amplitude."""
    rng, q = np.random.default_rng(seed), problem.posterior
    for p in q.kernel.parameters():
        p += 0.4 * torch.from_numpy(rng.normal(size=p.shape))
    if not q.has_label_basis:
        q.basis.mul_(torch.tensor([0.7, 1.4]))
    q.log_amplitude.fill_(np.log(AMPLITUDE))
    problem.conditional.refresh()


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
    q, noise = problem.posterior, problem.structure.noise
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
        found = prior * q.factor[0, r].square().numpy()
        np.testing.assert_allclose(found, 1 / (1 / prior + squares / noise), rtol=1e-9)

    n = problem.n_sequences
    pair = problem.structure.pair.numpy() * n / (n + 1)
    np.testing.assert_allclose(q.pair_mean, pair, rtol=0, atol=1e-5)
    np.testing.assert_allclose(q.pair_log_sd.exp(), (n + 1) ** -0.5, rtol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("contrast", [False, True])
def test_the_fresh_bound_is_the_bound(contrast: bool, cases: ModuleType) -> None:
    """In closed form: expected squares are those of mean and variance. Twelve times 100 draws, five
    standard errors."""
    problem = make_problem(regression(cases, noise=9.0), contrast=contrast, batch_tokens=6)
    move_kernel(problem)
    q = problem.posterior
    cases.disturb(q)
    # Little spread, so that a hundred draws say much.
    q.factor.mul_(0.4)
    q.pair_log_sd.sub_(1.5)
    x, y = tokens(problem)
    X, w = one_hot(q.kernel, x.numpy()), weight_variances(q.kernel).numpy()
    amplitude = float(q.log_amplitude.exp())
    m, s, basis = q.m[0].numpy(), q.factor[0].numpy(), q.basis.numpy()
    mean = np.sqrt(amplitude) * X @ (np.sqrt(w) * m).T @ basis.T
    variance = amplitude * X**2 @ (w * s**2).T @ (basis**2).T
    away = (mean - problem.structure.table[y].numpy()) ** 2 + variance
    pair_mean, pair_sd = q.pair_mean.numpy(), q.pair_log_sd.exp().numpy()
    pairs = (pair_mean - problem.structure.pair.numpy()) ** 2 + pair_sd**2
    expected = -0.5 * away.sum() / problem.structure.noise - 0.5 * problem.n_sequences * pairs.sum()
    expected -= 0.5 * (m**2 + s**2 - 1 - np.log(s**2)).sum()
    expected -= 0.5 * (pair_mean**2 + pair_sd**2 - 1 - np.log(pair_sd**2)).sum()
    generator = torch.Generator().manual_seed(0)
    found = [problem.fresh_bound(100, generator) for _ in range(12)]
    error = np.std(found, ddof=1) / np.sqrt(len(found))
    assert abs(np.mean(found) - expected) < 5 * error
    for part in (q.kl_inducing(), q.kl_pairwise(), 0.5 * variance.sum() / problem.structure.noise):
        assert error < 0.1 * float(part)


# -- draws ---------------------------------------------------------------------------------------------


@torch.no_grad()
def test_no_two_sequences_share_their_draws(cases: ModuleType) -> None:
    """Equal sequences, in one batch and in two, have offsets of their own; batches change none of them."""
    whole = make_problem()
    batch = whole.batches[0]
    same = replace(
        batch, x=batch.x[:1].expand_as(batch.x), mask=batch.mask[:1].expand_as(batch.mask)
    )
    parts = [
        replace(same, x=same.x[part], y=same.y[part], mask=same.mask[part], index=same.index[part])
        for part in (slice(0, 2), slice(2, None))
    ]
    found = []
    for batches in ([same], parts):
        problem = Problem(whole.posterior, Chain(), batches)
        state = SecondOrder(4).start(problem, torch.Generator().manual_seed(0))
        whole.posterior.factor.fill_(0.7)
        offsets, pair_offset = _offsets(problem, state)
        assert [o.shape[1] for o in offsets] == [len(b) for b in batches]
        assert pair_offset.shape == (4, V, V)
        found.append(torch.cat(offsets, 1))
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
    q, (batch,) = problem.posterior, problem.batches
    optimizer = SecondOrder(100)
    total, n = 0, 0
    for seed in range(40):
        factor = q.factor.clone()
        state = optimizer.start(problem, torch.Generator().manual_seed(seed))
        q.factor.copy_(factor)
        (half,) = (o[:50] for o in _offsets(problem, state)[0])
        total, n = total + torch.einsum("sbtr,sbur->brtu", half, half), n + len(half)
    expected = q.at(problem.conditional(0)).covariance[0] / q.log_amplitude.exp()
    sd = expected.diagonal(dim1=-1, dim2=-2).sqrt()
    error = ((sd[..., :, None] * sd[..., None, :]).square() + expected.square()).sqrt() / n**0.5
    assert ((total / n - expected).abs() <= 5 * error).all()
    assert batch.mask.sum() < batch.mask.numel()


# -- the optimum of the chain's bound -------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["m", "pair_mean", "log_amplitude"])
def test_gradients_against_finite_differences(name: str, cases: ModuleType) -> None:
    problem = make_problem(n_sequences=4, batch_tokens=6, pairwise_sd=1.4)
    move_kernel(problem)
    state = SecondOrder(n_draws=4).start(problem, torch.Generator().manual_seed(3))
    cases.disturb(problem.posterior)
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


@torch.no_grad()
def test_the_reported_bound_is_the_bound(cases: ModuleType) -> None:
    """On the round's draws, at the means after it and the variances before it."""
    problem = make_problem(batch_tokens=6, pairwise_sd=1.4)
    move_kernel(problem)
    q, optimizer = problem.posterior, SecondOrder(n_draws=8, learn_scales=False)
    state = optimizer.start(problem, torch.Generator().manual_seed(3))
    for _ in range(3):
        before = cases.numbers(q)
        offsets, pair_offset = _offsets(problem, state)
        state, info = optimizer.step(problem, state)
        m, s, basis = q.m[0], before["factor"][0], q.basis
        pair_sd = before["pair_log_sd"].exp() / 1.4
        expected = 0.0
        for i, batch in enumerate(problem.batches):
            mean = problem.posterior.at(problem.conditional(i)).mean[0]
            f = (mean + AMPLITUDE**0.5 * offsets[i]) @ basis.T
            values = Chain().log_prob(f, q.pair_mean + pair_offset, batch.y, batch.mask)
            expected += float(values.mean(0).sum())
        expected -= float(0.5 * (m.square() + s.square() - 1 - s.square().log()).sum())
        scores = (q.pair_mean / 1.4).square() + pair_sd.square() - 1 - pair_sd.square().log()
        assert info.elbo == pytest.approx(expected - 0.5 * float(scores.sum()), rel=1e-9)


@torch.no_grad()
def test_the_gradient_on_its_draws_vanishes_where_it_ends() -> None:
    problem = make_problem(batch_tokens=6)
    optimizer = to_the_end()
    none = [torch.zeros(1, *b.mask.shape, V - 1).double() for b in problem.batches]
    _, start, _ = _value_and_gradients(problem, none, torch.zeros(1, V, V).double())
    state = optimizer.start(problem, torch.Generator().manual_seed(1))
    info = None
    while info is None or not info.finished:
        state, info = optimizer.step(problem, state)
    assert info.converged
    _, gradients, _ = _value_and_gradients(problem, *_offsets(problem, state))
    for grad, before in zip(gradients[:2], start[:2], strict=True):
        assert before.abs().max() > 1
        assert grad.abs().max() < 1e-3 * before.abs().max()


def test_the_gradient_on_fresh_draws_vanishes_where_it_ends(cases: ModuleType) -> None:
    """By autograd through means and covariances of whole sequences, with which the fit has nothing to do.
    What the draws it was fitted on leave has the spread of an average over them."""
    problem, fitted, draws, repeats = make_problem(), 512, 400, 20
    cases.finish(to_the_end(fitted), problem)
    q, generator = problem.posterior, torch.Generator().manual_seed(8)
    problem = replace(problem, estimator=Pathwise(n_draws=draws))
    found = [
        torch.autograd.grad(problem.bound(0, generator).elbo, [q.m, q.pair_mean])
        for _ in range(repeats)
    ]
    widen = np.sqrt(1 + draws * repeats / fitted)
    for values in zip(*found, strict=True):
        stacked = torch.stack(values)
        limit = 4.5 * widen * stacked.std(0) / repeats**0.5 + 3e-3
        assert (stacked.mean(0).abs() <= limit).all()
        assert limit.max() < 0.3, "too little power"


@torch.no_grad()
def test_variances_are_what_the_curvature_asks_for(cases: ModuleType, oracles: ModuleType) -> None:
    """Position by position, every probability by enumeration."""
    problem = make_problem(n_sequences=4, batch_tokens=6, pairwise_sd=1.4)
    move_kernel(problem)
    q = problem.posterior
    state = SecondOrder(n_draws=4).start(problem, torch.Generator().manual_seed(3))
    cases.disturb(q)
    offsets, pair_offset = _offsets(problem, state)
    basis, amplitude = q.basis.numpy(), float(q.log_amplitude.exp())
    precision, pairs = np.ones(q.m[0].shape), np.full((V, V), 1.4**-2)
    for i, batch in enumerate(problem.batches):
        mean = q.at(problem.conditional(i)).mean[0]
        for b, T in enumerate(batch.mask.sum(-1).tolist()):
            A = amplitude**0.5 * one_hot(q.kernel, batch.x[b, :T].numpy())
            A = A * weight_variances(q.kernel).sqrt().numpy()
            for s in range(4):
                f = (mean[b, :T] + amplitude**0.5 * offsets[i][s, b, :T]).numpy() @ basis.T
                table = oracles.chain_table(f, (q.pair_mean + pair_offset[s]).numpy())
                along = table.on @ basis  # (V^T, T, R)
                mean_along = np.tensordot(table.prob, along, 1)
                bend = np.tensordot(table.prob, (along - mean_along) ** 2, 1).astype(float)
                precision += (A**2).T.dot(bend).T / 4
                pairs += local_pairs(table) / 4
    _fit_covariances(problem, offsets, pair_offset)
    np.testing.assert_allclose(q.factor[0], precision**-0.5, rtol=1e-9)
    np.testing.assert_allclose(q.pair_log_sd.exp(), pairs**-0.5, rtol=1e-9)
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


# -- scales on the bound -----------------------------------------------------------------------------------


@torch.no_grad()
def weighted(contrast: bool, kernel: str = "both", seed: int = 1) -> Problem:
    """Sequences of random tokens, templates beside attributes; nothing is where it started."""
    rng = np.random.default_rng(seed)
    parts = [RelevanceKernel([3, 2], rare=True), RelevanceKernel([4], sparse=True)]
    parts[0].seldom[1] = True
    rows = []
    for T in (4, 3, 1):
        ids = rng.integers(0, 4, size=(T, 2))
        packed = pack(torch.from_numpy(ids), torch.from_numpy(rng.normal(1, 0.5, ids.shape)))
        values = np.stack([rng.integers(-1, n + 1, T) for n in (3, 2)], -1)
        rows.append(np.concatenate([values, packed.numpy()], 1))
    made: Any = BlockSumKernel(parts, [(0, 2), (2, None)])
    if kernel == "columns":
        made, rows = parts[0], [r[:, :2] for r in rows]
    made = made.double().requires_grad_(False)
    for p in made.parameters():
        p += 0.4 * torch.from_numpy(rng.normal(size=p.shape))
    basis = contrasts(torch.tensor([3.0, 2.0, 1.0])) if contrast else None
    q = WeightPosterior(made, V, basis=basis)
    q.m += 0.8 * torch.from_numpy(rng.normal(size=q.m.shape))
    sign = torch.from_numpy(rng.choice([-1.0, 1.0], q.factor.shape))
    q.factor.copy_(sign * torch.from_numpy(rng.uniform(0.3, 0.95, q.factor.shape)))
    labels = [rng.integers(0, V, len(r)) for r in rows]
    empty = np.array([-1.0, -1, -1, 0, -1, 0])
    return Problem(q, Chain(), make_batches(rows, labels, lambda width: empty[:width], 1000))


Move = Callable[[float], None]


def hyper_parameters(q: WeightPosterior) -> Iterator[tuple[str, int, Move]]:
    """Every logarithm that may be moved: which, its part, and a function that adds to it. ``axis`` is that
    of the variance of a function."""
    parts = q.kernel.kernels if isinstance(q.kernel, BlockSumKernel) else [q.kernel]
    for i, part in enumerate(parts):
        for name in ("log_scale", "log_relevance"):
            p = getattr(part, name)
            for place in range(len(p)):

                def move(by: float, p: Tensor = p, place: int = place) -> None:
                    p[place] += by

                yield name, i, move
    if not q.has_label_basis:
        for r in range(q.n_functions):

            def grow(by: float, r: int = r) -> None:
                q.basis[:, r] *= np.exp(0.5 * by)

            yield "axis", 0, grow


def prior_variances(q: WeightPosterior) -> Tensor:
    """(R, M) of the weights, as the labels see them."""
    return q.basis.square().sum(0)[:, None] * weight_variances(q.kernel)


def slope_and_share(q: WeightPosterior, move: Move, h: float = 1e-5) -> tuple[float, Tensor]:
    """Derivative of -KL with the law of the weights held, which is that of the bound since the likelihood
    sees nothing else; and which (R, M) of the weights have their variance from there."""
    before, m, factor = prior_variances(q), q.m.clone(), q.factor.clone()
    ends, share = [], None
    for sign in (1, -1):
        move(sign * h)
        grown = prior_variances(q) / before
        share = grown.log() / (sign * h)
        q.m[0], q.factor[0] = m[0] / grown.sqrt(), factor[0] / grown.sqrt()
        ends.append(-float(q.kl_inducing()))
        move(-sign * h)
        q.m.copy_(m)
        q.factor.copy_(factor)
    assert share is not None
    return (ends[0] - ends[1]) / (2 * h), share.round()


def ratio(energy: Any, determined: Any, prior: float) -> np.ndarray:
    found = (np.asarray(energy) + prior) / (np.asarray(determined) + prior)
    return found.clip(1 / LARGEST_FACTOR, LARGEST_FACTOR)


each_kernel = pytest.mark.parametrize("kernel", ["columns", "both"])
each_basis = pytest.mark.parametrize("contrast", [False, True], ids=["labels", "contrasts"])


@each_basis
@torch.no_grad()
def test_derivatives_are_half_of_what_is_spent_less_what_is_determined(contrast: bool) -> None:
    q = weighted(contrast).posterior
    largest = 0.0
    for name, _, move in hyper_parameters(q):
        slope, share = slope_and_share(q, move)
        assert share.sum() > 0, name
        energy = float((share * q.m[0].square()).sum())
        determined = float((share * (1 - q.factor[0].square())).sum())
        assert slope == pytest.approx((energy - determined) / 2, abs=1e-7), name
        largest = max(largest, abs(slope))
    assert largest > 1


@each_kernel
@each_basis
@torch.no_grad()
def test_a_step_is_the_ratio_of_energy_to_what_is_determined(contrast: bool, kernel: str) -> None:
    """Functions, then groups, then features; each finds spent what the ones before have left."""
    problem = weighted(contrast, kernel)
    q = problem.posterior
    parts = q.kernel.kernels if kernel == "both" else [q.kernel]
    old = [(p.log_scale.clone(), p.log_relevance.clone()) for p in parts]
    basis, left = q.basis.clone(), q.m[0].square().clone()
    found = [(name, i, *slope_and_share(q, move)) for name, i, move in hyper_parameters(q)]

    def determined(slope: float, share: Tensor) -> float:
        """E - 2 dF."""
        return float((share * q.m[0].square()).sum()) - 2 * slope

    expected: dict[tuple[str, int], list[float]] = {}
    steps = {"axis": AXIS_PRIOR_COUNT, "log_scale": WEIGHTS_PRIOR_COUNT}
    for kind, prior in steps.items():
        for name, i, slope, share in found:
            if name == kind:
                growth = float(ratio((share * left).sum(), determined(slope, share), prior))
                expected.setdefault((name, i), []).append(growth)
                left = left / torch.where(share > 0, growth, 1)
    nu = degrees_of_freedom(q.n_functions)
    relevances: list[list[float]] = [[] for _ in parts]
    for name, i, slope, share in found:
        if name == "log_relevance":
            before = float(old[i][1][len(relevances[i])].exp())
            new = nu + before * float((share * left).sum())
            new = new / (nu + determined(slope, share))
            new = float(np.clip(new, before / LARGEST_FACTOR, before * LARGEST_FACTOR))
            relevances[i].append(new)
    learn(problem, Slopes())

    for i, (part, (scale, _)) in enumerate(zip(parts, old, strict=True)):
        change = (part.log_scale - scale).exp()
        np.testing.assert_allclose(change, expected["log_scale", i], rtol=1e-6)
        np.testing.assert_allclose(part.log_relevance.exp(), relevances[i], rtol=1e-6)
    largest = max(abs(g - 1) for (name, _), all_ in expected.items() for g in all_)
    assert largest > 0.1
    grown = q.basis / basis
    if contrast:
        axes = np.sqrt(expected["axis", 0])
        np.testing.assert_allclose(grown, np.broadcast_to(axes, grown.shape), rtol=1e-6)
        assert np.abs(axes - 1).max() > 0.05
    else:
        assert torch.equal(q.basis, basis)


@each_kernel
@each_basis
@torch.no_grad()
def test_a_step_keeps_the_weights_and_what_the_data_says(contrast: bool, kernel: str) -> None:
    """Means stay to the last digit; precisions change by what the prior's do."""
    problem = weighted(contrast, kernel)
    q = problem.posterior
    rows = q.conditional(problem.batches[0].x, problem.batches[0].mask)
    before, mean = prior_variances(q), q.at(rows).mean[0] @ q.basis.T
    beta = q.basis[:, :, None] * weight_variances(q.kernel).sqrt() * q.m[0]
    precision = 1 / (before * q.factor[0].square())
    learn(problem, Slopes())
    after = prior_variances(q)
    assert (after / before).log().abs().max() > 0.1
    found = q.basis[:, :, None] * weight_variances(q.kernel).sqrt() * q.m[0]
    torch.testing.assert_close(found, beta)
    told = 1 / (after * q.factor[0].square()) - 1 / after
    torch.testing.assert_close(told, precision - 1 / before)
    # What is kept of each batch is under the new kernel.
    torch.testing.assert_close(problem.weights(0).prior_sd, weight_variances(q.kernel).sqrt())
    found = q.at(problem.weights(0)).mean[0] @ q.basis.T
    torch.testing.assert_close(found, mean)


@each_basis
@torch.no_grad()
def test_what_nothing_determines_stays(contrast: bool) -> None:
    """Scales where they are; a relevance is as its prior has it, or as near as one step takes it."""
    problem = weighted(contrast)
    q = problem.posterior
    q.m.zero_()
    q.factor.fill_(1.0)
    first, second = q.kernel.kernels
    second.log_relevance[0] = np.log(3 * LARGEST_FACTOR)
    second.log_relevance[1] = -np.log(3 * LARGEST_FACTOR)
    scales, basis = [p.log_scale.clone() for p in (first, second)], q.basis.clone()
    learn(problem, Slopes())
    for part, scale in zip((first, second), scales, strict=True):
        torch.testing.assert_close(part.log_scale, scale)
    torch.testing.assert_close(q.basis, basis)
    expected = torch.tensor([3.0, 1 / 3, 1, 1], dtype=torch.float64)
    torch.testing.assert_close(second.log_relevance.exp(), expected)
    torch.testing.assert_close(first.log_relevance, torch.zeros_like(first.log_relevance))
    assert not q.m.any()
    torch.testing.assert_close(q.factor, torch.ones_like(q.factor))


@torch.no_grad()
def test_what_is_spent_as_it_is_determined_stays() -> None:
    problem = weighted(True)
    q = problem.posterior
    q.m[0] = (1 - q.factor[0].square()).sqrt()
    for part in q.kernel.kernels:
        part.log_relevance.zero_()
    before = {name: p.clone() for name, p in q.state_dict().items()}
    learn(problem, Slopes())
    for name, p in q.state_dict().items():
        expected = before[name].abs() if name == "factor" else before[name]
        torch.testing.assert_close(p, expected, msg=name)


@torch.no_grad()
@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_no_step_is_longer_than_the_longest(size: float) -> None:
    problem = weighted(False)
    q = problem.posterior
    q.m *= size
    q.factor.mul_(0.01)
    before = [p.clone() for p in q.kernel.parameters()]
    learn(problem, Slopes())
    moved = [(p - b).exp() for p, b in zip(q.kernel.parameters(), before, strict=True)]
    assert max(float(p.max()) for p in moved) <= LARGEST_FACTOR * (1 + 1e-9)
    assert min(float(p.min()) for p in moved) >= (1 - 1e-9) / LARGEST_FACTOR
    assert q.m.isfinite().all()
    assert (q.factor[0] > 0).all()
    # A thousand times the prior is more than a step's worth everywhere.
    if size > 1:
        for part in q.kernel.kernels:
            assert part.log_scale.isfinite().all()
        torch.testing.assert_close(moved[0], torch.full_like(moved[0], LARGEST_FACTOR))


def test_learning_raises_the_bound(cases: ModuleType) -> None:
    """Round after round on its own draws, and in the end on draws that nothing was fitted to, which say
    nearly the same."""
    options = {"n_sequences": 40, "mean_length": 5, "n_values": 8}
    fixed, learned = make_problem(**options), make_problem(**options)
    cases.finish(SecondOrder(learn_scales="pairwise"), fixed)
    optimizer = SecondOrder(learning_tolerance=0.0, learning_rounds=5, tolerance=1e-3)
    steps = cases.finish(optimizer, learned)
    bounds = [step.elbo for step in steps]
    assert len(bounds) > 5
    assert all(b > a - 0.05 for a, b in pairwise(bounds))
    assert bounds[4] > bounds[0] + 1.5
    found, other = (cases.many_draw_bound(problem, 400) for problem in (learned, fixed))
    assert found > other + 1.5
    assert abs(found - bounds[-1]) / learned.n_sequences < 0.04


# -- curvature position by position -----------------------------------------------------------------------


def local_pairs(table: Any) -> np.ndarray:
    """(V, V) sum over neighbours of p (1 - p)."""
    both = table.on[:, :-1, :, None] * table.on[:, 1:, None, :]  # (V^T, T-1, V, V)
    p = np.tensordot(table.prob, both, 1)
    return (p * (1 - p)).sum(0).astype(float)


def some_scores(lengths: tuple[int, ...], seed: int, size: float = 1.0) -> list[Tensor]:
    """f, g, y, mask of two draws; nonsense at padding."""
    rng = np.random.default_rng(seed)
    B, T = len(lengths), max(lengths) + 1
    f = torch.from_numpy(size * rng.normal(size=(2, B, T, V)))
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    g = torch.from_numpy(size * rng.normal(size=(2, V, V)))
    return [f, g, torch.from_numpy(rng.integers(0, V, (B, T))), mask]


BASES = {"labels": None, "contrasts": contrasts(torch.tensor([4.0, 2.0, 1.0]))}


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("size", [1.0, 400.0], ids=["probabilities", "logarithms"])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_local_curvature_is_the_diagonal(
    basis: str, size: float, lengths: list[int], seed: int
) -> None:
    given = some_scores(tuple(lengths), seed, size)
    whole = Chain().curvature(*given, BASES[basis]).node
    found = Chain().local_curvature(*given, BASES[basis])
    expected = whole.diagonal(dim1=-1, dim2=-2).mT
    assert found.node.shape == (*given[3].shape, V if basis == "labels" else V - 1)
    torch.testing.assert_close(found.node, expected.clamp(min=0), rtol=0, atol=1e-14 * size)
    assert not found.node[~given[3]].any()
    assert (found.node >= 0).all()


def test_local_pairs_by_enumeration(oracles: ModuleType) -> None:
    """What neighbours say of each other, and not what pairs do; of one pair that is all there is."""
    for lengths in ((4, 2, 1), (2, 2, 2)):
        f, g, y, mask = given = some_scores(lengths, seed=5)
        found = Chain().local_curvature(*given).next.sum(0)
        expected = np.zeros((V, V))
        for s in range(2):
            for b, n in enumerate(lengths):
                expected += local_pairs(oracles.chain_table(f[s, b, :n], g[s])) / 2
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
        whole = Chain().curvature(f, g, y, mask).next.sum(0)
        same = torch.allclose(found, whole, rtol=1e-9)
        assert same == (lengths == (2, 2, 2))


@pytest.mark.parametrize("basis", BASES)
def test_by_default_it_is_read_off_the_whole(basis: str) -> None:
    given = some_scores((4, 2, 1), seed=6)
    whole = Piecewise().curvature(*given, BASES[basis])
    found = Piecewise().local_curvature(*given, BASES[basis])
    assert isinstance(found, LocalCurvature)
    assert found.node.shape == (3, 5, V if basis == "labels" else V - 1)
    assert torch.equal(found.node, torch.einsum("brtt->btr", whole.node))
    assert torch.equal(found.next, whole.next)
    assert found.node.max() > 0.1
