"""Transitions with features: weights whose scores are of two labels, at the rows of ``Batch.edges``; and a
table as the special case whose only feature is the constant 1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.inference.random_posteriors import conditionals
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from structgp.answers import potentials
from structgp.data.batch import Batch
from structgp.gp import Inducing, Posterior, Table, Weights
from structgp.gp.kernels import RelevanceKernel, covariance, weight_variances
from structgp.gp.weight_rows import WeightConditional
from structgp.inference.latents import Latents
from structgp.structures import Chain

V, P = 2, 4
SIZES = [3, 2]
LENGTHS = (4, 1, 3)
B, T = len(LENGTHS), max(LENGTHS)
AMPLITUDE = 1.6

generated = settings(max_examples=25, deadline=None, derandomize=True)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_kernel() -> RelevanceKernel:
    kernel = RelevanceKernel(SIZES).double().requires_grad_(False)
    for k, p in enumerate(kernel.parameters()):
        p.copy_(0.4 * normal(*p.shape, seed=20 + k))
    return kernel


def make_batch(lengths: tuple[int, ...] = LENGTHS) -> Batch:
    """Two templates at every transition; values missing (-1) and never seen (3, 2). Padding looks like the
    rest."""
    n, longest, rng = len(lengths), max(lengths), np.random.default_rng(5)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    edges = torch.from_numpy(rng.integers(-1, 4, size=(n, longest - 1, 2)).astype(float))
    y = torch.from_numpy(rng.integers(0, V, size=(n, longest)))
    return Batch(normal(n, longest, 1), y, mask, torch.arange(n), edges=edges)


@torch.no_grad()
def somewhere() -> Weights:
    """Not at its prior."""
    block = Weights(make_kernel(), (V, V))
    block.m.copy_(normal(*block.m.shape, seed=1))
    block.factor.copy_(0.3 + normal(*block.factor.shape, seed=2).abs())
    block.log_amplitude.fill_(np.log(AMPLITUDE))
    return block


def posterior(block: Any) -> Posterior:
    """Nodes at the prior, and the transitions."""
    node = Inducing(RBFKernel().double(), normal(3, 1), (V,))
    return Posterior({"node": node, "next": block})


def here(block: Any, batch: Batch) -> Any:
    return block.conditional(batch.rows[1], batch.masks[1], block.prior_factor())


def dense(block: Weights, batch: Batch) -> np.ndarray:
    """(B, T - 1, M) what each transition holds of each weight, the constant last, times the prior standard
    deviation."""
    assert batch.edges is not None
    found = np.zeros((*batch.edges.shape[:2], sum(SIZES) + 1))
    for b, t in np.ndindex(*found.shape[:2]):
        if batch.masks[1][b, t]:
            found[b, t, -1] = 1
            for k, value in enumerate(batch.edges[b, t].long().tolist()):
                if 0 <= value < SIZES[k]:
                    found[b, t, sum(SIZES[:k]) + value] = 1
    return np.sqrt(AMPLITUDE * weight_variances(block.kernel).numpy()) * found


# -- what the posterior says --------------------------------------------------------------------------


def test_sizes() -> None:
    block, batch = somewhere(), make_batch()
    M = sum(SIZES) + 1
    assert block.m.shape == block.factor.shape == (P, M)
    assert not block.shared
    assert batch.rows[1] is batch.edges
    assert batch.masks[1].sum(1).tolist() == [n - 1 for n in LENGTHS]


def test_divergence_against_torch() -> None:
    block = somewhere()
    q = Normal(block.m.detach(), block.factor.detach())
    expected = kl_divergence(q, Normal(0.0, 1.0)).sum()
    torch.testing.assert_close(block.kl().detach(), expected)
    whole = posterior(block)
    torch.testing.assert_close(whole.divergence().detach(), expected)


@torch.no_grad()
def test_mean_and_covariance_at_the_prior_are_the_kernels() -> None:
    batch = make_batch()
    assert batch.edges is not None
    block, mask = Weights(make_kernel(), (V, V)), batch.masks[1]
    mean, found = block.gaussian(here(block, batch))
    assert mean.shape == (1, B, T - 1, P)
    assert not mean.any()
    both = mask[:, None, :, None] & mask[:, None, None, :]
    expected = torch.where(both, covariance(block.kernel, batch.edges, batch.edges)[:, None], 0)
    torch.testing.assert_close(found[0], expected.expand(B, P, T - 1, T - 1))


@torch.no_grad()
def test_mean_scores_against_dense_features() -> None:
    """Score (i, j) of a transition is of function 2 i + j."""
    block, batch = somewhere(), make_batch()
    scores = potentials.mean(posterior(block)).potentials(Chain(), batch).g
    assert scores.shape == (1, B, T - 1, V, V)
    A, m = dense(block, batch), block.m.numpy()
    for i, j in np.ndindex(V, V):
        np.testing.assert_allclose(scores[0, ..., i, j], A @ m[V * i + j], rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_draws_are_joint_over_the_transitions_of_an_example() -> None:
    """8,000 draws, five standard errors: covariances between transitions as the posterior has them, and
    none between the scores of different labels. The mean is exact, as draws come with their mirror
    images."""
    block, batch, n = somewhere(), make_batch(), 8000
    q = posterior(block)
    drawn = potentials.sample(q, n, 0).potentials(Chain(), batch).g
    assert drawn.shape == (n, B, T - 1, V, V)
    mean, expected = (part[0] for part in block.gaussian(here(block, batch)))
    mean = mean.view(B, T - 1, P)
    flat = drawn.flatten(3)
    torch.testing.assert_close(flat.mean(0), mean, rtol=0, atol=1e-9)
    away = flat - mean
    found = torch.einsum("sbtr,sbuv->brvtu", away, away) / n
    wanted = torch.diag_embed(expected.permute(0, 2, 3, 1)).permute(0, 3, 4, 1, 2)
    sd = expected.diagonal(dim1=-1, dim2=-2).sqrt()  # (B, P, T - 1)
    size = torch.einsum("brt,bvu->brvtu", sd, sd)
    error = ((size.square() + wanted.square()) / (n / 2)).sqrt()
    assert ((found - wanted).abs() <= 5 * error + 1e-12).all()
    assert expected[0, 0, 0, 1].abs() > 0.1
    for b, length in enumerate(LENGTHS):
        assert not away[:, b, length - 1 :].any()


@torch.no_grad()
def test_draws_do_not_depend_on_padding_or_neighbours() -> None:
    block, batch = somewhere(), make_batch()
    assert batch.edges is not None
    q = posterior(block)
    draws = potentials.sample(q, 4, 1)
    together = draws.potentials(Chain(), batch).g
    for b, length in enumerate(LENGTHS):
        some = slice(b, b + 1)
        alone = Batch(
            batch.x[some, :length],
            batch.y[some, :length],
            batch.mask[some, :length],
            batch.index[some],
            edges=batch.edges[some, : length - 1],
        )
        found = draws.potentials(Chain(), alone).g
        torch.testing.assert_close(found[:, 0], together[:, b, : length - 1])


@torch.no_grad()
def test_what_inducing_values_leave_open_is_drawn_for_each_template() -> None:
    """Inducing inputs far from everything leave all open: correlations of 2,000 draws of nodes and of
    transitions are within five standard errors of 0, as many functions as there are of both."""
    far, kernel = torch.full((1, 1), 99.0, dtype=torch.float64), RBFKernel().double()
    q = Posterior({"node": Inducing(kernel, far, (P,)), "next": Inducing(kernel, far, (V, V))})
    batch = Batch(normal(1, 3, 1), torch.zeros(1, 3).long(), torch.ones(1, 3).bool(), torch.arange(1))
    batch = replace(batch, edges=normal(1, 2, 1, seed=1))
    at = potentials.sample(q, 4000, 0).potentials(Chain(), batch)
    half = torch.cat([at.f[:2000].flatten(1), at.g[:2000].flatten(1)], 1)
    found = torch.corrcoef(half.T)[: 3 * P, 3 * P :]
    assert found.abs().max() < 5 / 2000**0.5


@pytest.mark.parametrize("family", ["weights", "inducing"])
def test_latents_of_transitions(family: str) -> None:
    """Standard normal numbers lead to scores (S, B, T - 1, V, V) with the posterior's mean and covariance,
    read off unit vectors; with inducing inputs as with weights."""
    batch, block = make_batch(), somewhere()
    if family == "inducing":
        edges = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, -1.0]], dtype=torch.float64)
        block = Inducing(make_kernel(), edges, (V, V))
        with torch.no_grad():
            block.m.copy_(normal(P, 3))
            block.factor += 0.3 * normal(P, 3, 3, seed=3)
    q = posterior(block)
    latents = Latents.of(q, conditionals(q, batch), batch.masks)
    assert latents.groups[1].shape(5) == (5, B, T - 1, P)
    numbers = (T - 1) * P
    unit = torch.eye(numbers, dtype=torch.float64).reshape(numbers, 1, T - 1, P)
    noise = torch.cat([torch.zeros(1, B, T - 1, P), unit.expand(-1, B, -1, -1)])
    nodes, scores = latents.place((normal(numbers + 1, B, T, V), noise))
    assert nodes.shape == (numbers + 1, B, T, V)
    assert scores.shape == (numbers + 1, B, T - 1, V, V)
    mask = batch.masks[1]
    real = torch.where(mask[..., None], scores.flatten(3), 0)
    mean, expected = (part[0].detach() for part in block.gaussian(here(block, batch)))
    torch.testing.assert_close(real[0], mean)
    spread = real[1:] - real[0]
    found = torch.einsum("sbtr,sbur->brtu", spread, spread)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


# -- products -------------------------------------------------------------------------------------------


@generated
@given(st.integers(0, 10_000))
def test_scores_of_weights_and_the_way_back_are_adjoint(seed: int) -> None:
    """<scores(A m), s> = <m, A^T pull_back(s)>."""
    block, batch = somewhere(), make_batch()
    m, s = normal(*block.m.shape, seed=seed), normal(B, T - 1, V, V, seed=seed + 1)
    at = here(block, batch)
    left = (block.scores(at.times(m)) * s).sum()
    right = (m * at.transposed_times(block.pull_back(s))).sum()
    torch.testing.assert_close(left, right)


@torch.no_grad()
def test_curvature_sets_the_spread() -> None:
    """1 / s^2 = 1 + sum over transitions of squared feature times curvature, batch after batch."""
    block, batches = somewhere(), [make_batch(), make_batch((2, 3))]
    total, expected = block.curvature_sum(), np.ones(block.factor.shape)
    for k, batch in enumerate(batches):
        bend = normal(*batch.masks[1].shape, V, V, seed=7 + k).square()
        total.add(here(block, batch), bend)
        expected += np.einsum("btm,btr->rm", dense(block, batch) ** 2, bend.flatten(2).numpy())
    total.finish()
    np.testing.assert_allclose(block.factor, expected**-0.5, rtol=1e-10)


# -- sites of minibatches ----------------------------------------------------------------------------------


@generated
@given(st.integers(0, 10_000), st.booleans())
@torch.no_grad()
def test_knowledge_placed_again_is_the_same_posterior(seed: int, table: bool) -> None:
    """Of posteriors that are nowhere wider than their prior, for weights and for tables."""
    block = Table((V, V), AMPLITUDE**0.5) if table else Weights(make_kernel(), (V, V))
    block.m.copy_(normal(*block.m.shape, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    sd = torch.rand(block.factor.shape, generator=generator, dtype=torch.float64)
    block.factor.copy_(0.05 + 0.95 * sd)
    before = block.m.clone(), block.factor.clone()
    precision, linear = block.knowledge()
    prior_sd = block.prior_sds()
    assert precision.shape == linear.shape == (len(prior_sd), P)
    block.m.zero_()
    block.factor.fill_(1)
    block.place(precision, linear, prior_sd, torch.arange(len(prior_sd)))
    torch.testing.assert_close(block.m, before[0])
    torch.testing.assert_close(block.factor, before[1])


@torch.no_grad()
def test_placing_some_weights_leaves_the_others() -> None:
    """In the weights themselves: precision 1 / prior + site, mean linear / precision."""
    block = somewhere()
    before, index = block.m.clone(), torch.tensor([0, 4])
    prior_sd = block.prior_sds()[index]
    precision, linear = normal(2, P, seed=3).square(), normal(2, P, seed=4)
    block.place(precision, linear, prior_sd, index)
    total = precision + prior_sd.square().reciprocal()[:, None]
    torch.testing.assert_close(prior_sd[:, None] * block.m[:, index].T, linear / total)
    found = prior_sd[:, None] * block.factor[:, index].T
    torch.testing.assert_close(found, total.rsqrt())
    rest = [1, 2, 3, 5]
    assert torch.equal(block.m[:, rest], before[:, rest])


# -- a table is one constant feature ---------------------------------------------------------------


@torch.no_grad()
def twins() -> tuple[Table, Weights]:
    """One posterior of transitions: as a table, and as weights of the constant 1 with the same prior."""
    kernel = RelevanceKernel([]).double().requires_grad_(False)
    kernel.log_scale.fill_(np.log(AMPLITUDE))
    table, weights = Table((V, V), AMPLITUDE**0.5), Weights(kernel, (V, V))
    assert weights.m.shape == (P, 1)
    for block in (table, weights):
        block.m.copy_(normal(P, seed=1).view_as(block.m))
        block.factor.copy_(0.3 + normal(P, seed=2).abs().view_as(block.factor))
    return table, weights


def constant_batch() -> Batch:
    """Transitions without any feature of their own."""
    return replace(make_batch(), edges=torch.zeros(B, T - 1, 0, dtype=torch.float64))


@torch.no_grad()
def test_a_table_is_weights_of_the_constant() -> None:
    """The same cost and the same scores at every transition."""
    (table, weights), batch = twins(), constant_batch()
    torch.testing.assert_close(table.kl(), weights.kl())
    torch.testing.assert_close(table.effective_parameters(), weights.effective_parameters())
    one = potentials.mean(posterior(table)).potentials(Chain(), batch).g
    other = potentials.mean(posterior(weights)).potentials(Chain(), batch).g
    assert one.shape == (1, V, V)
    real = batch.masks[1]
    torch.testing.assert_close(other[0][real], one.expand(int(real.sum()), V, V))
    variance = table.gaussian(here(table, batch))[1]
    found = weights.gaussian(here(weights, batch))[1][0, 0]  # (P, T - 1, T - 1)
    torch.testing.assert_close(found, variance[:, None, None].expand_as(found))


@torch.no_grad()
def test_a_table_is_updated_as_weights_of_the_constant_are() -> None:
    """By curvature, which a table takes summed over transitions, and by sites of minibatches."""
    (table, weights), batch = twins(), constant_batch()
    bend = normal(B, T - 1, V, V, seed=5).square() * batch.masks[1][..., None, None]
    for block, given_bend in ((table, bend.sum(1)), (weights, bend)):
        total = block.curvature_sum()
        total.add(here(block, batch), given_bend)
        total.finish()
    torch.testing.assert_close(table.factor, weights.factor)
    assert table.factor.max() < 0.9
    for one, other in zip(table.knowledge(), weights.knowledge(), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(table.prior_sds(), weights.prior_sds())
    precision, linear = normal(1, P, seed=6).square(), normal(1, P, seed=7)
    for block in (table, weights):
        block.place(precision, linear, block.prior_sds(), torch.arange(1))
    torch.testing.assert_close(table.m, weights.m)
    torch.testing.assert_close(table.factor, weights.factor)


# -- examples of one variable ----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["weights", "inducing"])
def test_examples_of_one_token_have_no_transitions(family: str) -> None:
    """All of them, so that there is no tuple at all: nothing to say, and nothing fails."""
    batch, block = make_batch((1, 1)), somewhere()
    if family == "inducing":
        block = Inducing(make_kernel(), torch.zeros(1, 2, dtype=torch.float64), (V, V))
    q = posterior(block)
    with torch.no_grad():
        found = potentials.sample(q, 4, 0).potentials(Chain(), batch).g
        assert found.shape == (4, 2, 0, V, V)
        latents = Latents.of(q, conditionals(q, batch), batch.masks)
        scores = latents.place([torch.zeros(g.shape(3)).double() for g in latents.groups])[1]
        assert scores.shape == (3, 2, 0, V, V)
        before, total = block.factor.clone(), block.curvature_sum()
        shape = (2, P, 0, 0) if block.joint_curvature else (2, 0, V, V)
        total.add(here(block, batch), torch.zeros(shape, dtype=torch.float64))
        total.finish()
        assert torch.equal(block.factor, torch.ones_like(before) if before.dim() == 2 else before)
        if isinstance(block, Weights):
            at = here(block, batch)
            assert isinstance(at, WeightConditional)
            index, _ = at.compact
            assert len(index) == 0
            assert not at.transposed_times(torch.zeros(2, 0, P, dtype=torch.float64)).any()
