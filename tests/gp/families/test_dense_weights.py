"""The posterior over weights of dense features against plain algebra, and its draws against their
moments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from structgp.gp import DenseWeights, contrasts
from structgp.gp.kernels import DenseKernel, RelevanceKernel
from structgp.gp.kernels.block_sum import BlockSumKernel
from structgp.gp.mean_search import MeanSearch, MixedSearch

V, R, D = 3, 2, 3
LENGTHS = (4, 2, 3, 1)
B, T, AMPLITUDE = len(LENGTHS), 5, 1.7
KINDS = ("alone", "beside templates")
each_kind = pytest.mark.parametrize("kind", KINDS)


def make_rows(seed: int = 10) -> tuple[Tensor, Tensor]:
    """Two templates, then dense columns. Padding looks like anything else."""
    rng = np.random.default_rng(seed)
    ids, numbers = rng.integers(-1, 3, size=(B, T, 2)), rng.normal(size=(B, T, D))
    mask = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
    return torch.from_numpy(np.concatenate([ids, numbers], -1)), mask


@torch.no_grad()
def somewhere(kind: str = "beside templates", seed: int = 2) -> tuple[DenseWeights, Tensor, Tensor]:
    """A posterior with three inducing inputs, nowhere in particular, and rows for it."""
    rng = np.random.default_rng(seed)
    rows, mask = make_rows()
    tokens = rows[mask]
    dense = DenseKernel.of("linear+rbf", tokens[:, 2:])
    dense.place(tokens[[0, 3, 5], 2:])
    kernel: Any = dense
    if kind == "alone":
        rows = rows[..., 2:]
    else:
        kernel = BlockSumKernel([RelevanceKernel([3, 3]), dense], [(0, 2), (2, 5)])
    kernel = kernel.double().requires_grad_(False)
    q = DenseWeights(kernel, (V,), contrasts(torch.tensor([3.0, 2.0, 1.0])), AMPLITUDE)
    q.m.copy_(torch.from_numpy(rng.normal(size=q.m.shape)))
    q.factor.copy_(torch.from_numpy(rng.uniform(0.3, 1.5, size=q.factor.shape)))
    q.root.copy_(torch.from_numpy(0.3 * rng.normal(size=q.root.shape)).triu())
    q.root.diagonal(dim1=-1, dim2=-2).add_(0.5)
    return q, rows, mask


def given(q: DenseWeights, rows: Tensor, mask: Tensor) -> Any:
    return q.conditional(rows, mask, q.prior_factor())


def weights_of(q: DenseWeights) -> tuple[Tensor, list[Tensor]]:
    """Means (R, M) and covariances (M, M) of all weights."""
    dense = q.root @ q.root.mT
    return q.m, [torch.block_diag(q.factor[r].square().diag(), dense[r]) for r in range(R)]


def design(q: DenseWeights, rows: Tensor, mask: Tensor) -> Tensor:
    """(B, T, M) what the weights are multiplied by, one weight after another."""
    here, eye = given(q, rows, mask), torch.eye(q.n_values).double()
    return torch.stack([here.times(one[None])[..., 0] for one in eye], -1)


@torch.no_grad()
@each_kind
def test_functions_are_features_times_weights(kind: str) -> None:
    q, rows, mask = somewhere(kind)
    here, X = given(q, rows, mask), design(q, rows, mask)
    m, S = weights_of(q)
    mean, covariance = q.gaussian(here)
    torch.testing.assert_close(mean[0], AMPLITUDE**0.5 * X @ m.T)
    for r in range(R):
        wanted = X @ S[r] @ X.mT + torch.diag_embed(here.left)
        torch.testing.assert_close(covariance[0, :, r], AMPLITUDE * wanted)
    assert (here.left[mask] > 0).any()
    assert not mean[0][~mask].any()
    assert not covariance[0].diagonal(dim1=-1, dim2=-2).transpose(1, 2)[~mask].any()


@torch.no_grad()
@each_kind
def test_the_prior_is_the_kernel(kind: str) -> None:
    """Weights that are standard normal make covariances of the kernel, but for what the smooth part leaves
    open between different rows: with all of them inducing inputs, nothing."""
    q, rows, mask = somewhere(kind)
    q.parts[1].place(rows[mask][:, q.columns])
    q = DenseWeights(q.kernel, (V,), amplitude=AMPLITUDE)
    _, covariance = q.gaussian(given(q, rows, mask))
    for b, n in enumerate(LENGTHS):
        wanted = AMPLITUDE * q.kernel(rows[b, :n], rows[b, :n]).to_dense()
        torch.testing.assert_close(covariance[0, b, 0, :n, :n], wanted, rtol=0, atol=1e-5)


@torch.no_grad()
@each_kind
def test_divergence_is_that_of_gaussians(kind: str) -> None:
    q, *_ = somewhere(kind)
    m, S = weights_of(q)
    normal = torch.distributions.MultivariateNormal
    prior = normal(torch.zeros(q.n_values).double(), torch.eye(q.n_values).double())
    wanted = sum(torch.distributions.kl_divergence(normal(m[r], S[r]), prior) for r in range(R))
    torch.testing.assert_close(q.kl(), wanted)
    assert not DenseWeights(q.kernel, (V,)).kl()
    torch.testing.assert_close(q.determined(), torch.stack([q.n_values - s.trace() for s in S]))


@torch.no_grad()
@each_kind
def test_roots_and_their_transposes(kind: str) -> None:
    q, rows, mask = somewhere(kind)
    rng = np.random.default_rng(5)
    a, b = (torch.from_numpy(rng.normal(size=(4, R, q.n_values))) for _ in range(2))
    torch.testing.assert_close((q.root_times(a) * b).sum(), (a * q.root_transposed_times(b)).sum())
    for r, S in enumerate(weights_of(q)[1]):
        both = q.root_times(q.root_transposed_times(a))[:, r]
        torch.testing.assert_close(both, a[:, r] @ S)
    here, h = given(q, rows, mask), torch.from_numpy(rng.normal(size=(B, T, R)))
    torch.testing.assert_close((here.times(a[0]) * h).sum(), (a[0] * here.transposed_times(h)).sum())


@torch.no_grad()
@each_kind
@pytest.mark.parametrize("of", ["answers", "fit"])
def test_draws_have_the_moments_of_the_gaussian(kind: str, of: str) -> None:
    q, rows, mask = somewhere(kind)
    n, here = 8_000, given(q, rows, mask)
    generator = torch.Generator().manual_seed(0)
    mean, covariance = (found[0] for found in q.gaussian(here))
    if of == "answers":
        scores = q.draws(n, 3, generator).at(q, rows, mask)
        mean, covariance = mean @ q.basis.T, torch.einsum("vr,brtu->bvtu", q.basis.square(), covariance)
    else:
        noise = q.fixed_noise(n // 2, [mask], generator)
        scores = q.scale * q.drawn_functions(here, noise, 0, torch.arange(B))
    # Mirrored draws have the mean exactly.
    torch.testing.assert_close(scores.mean(0), mean, rtol=0, atol=1e-9)
    away = scores - mean
    found = torch.einsum("sbtv,sbuv->bvtu", away, away) / len(scores)
    sd = covariance.diagonal(dim1=-1, dim2=-2).sqrt()
    error = (found - covariance).abs() / (sd[..., None] * sd[..., None, :]).clamp(min=1e-3)
    assert float(error.max()) < 5 / math.sqrt(n / 2)


@torch.no_grad()
@each_kind
def test_the_mean_draw_is_the_mean(kind: str) -> None:
    q, rows, mask = somewhere(kind)
    (found,) = q.mean_draw().at(q, rows, mask)
    torch.testing.assert_close(found, q.scores(q.gaussian(given(q, rows, mask))[0][0]))


@torch.no_grad()
@each_kind
def test_parts_of_a_score_add_up(kind: str) -> None:
    q, rows, mask = somewhere(kind)
    direction = q.basis[0] - q.basis[2]
    mean = q.gaussian(given(q, rows, mask))[0][0]
    for t in range(LENGTHS[0]):
        found = q.feature_scores(rows[0, t : t + 1], direction)
        torch.testing.assert_close(found.sum(), mean[0, t] @ direction)


@torch.no_grad()
@each_kind
def test_constant_scores_are_those_of_the_constants(kind: str) -> None:
    q, *_ = somewhere(kind)
    mean, sd = q.constant_scores()
    m, S = weights_of(q)
    prior = torch.zeros(q.n_values).double()
    prior[q.constants] = q._constant_sds()
    torch.testing.assert_close(mean, AMPLITUDE**0.5 * q.basis @ m @ prior)
    variance = AMPLITUDE * torch.stack([(prior.square() * s.diagonal()).sum() for s in S])
    torch.testing.assert_close(sd.square(), q.basis.square() @ variance)
    assert q.prior_sd == pytest.approx(float(AMPLITUDE**0.5 * prior.norm()))


@torch.no_grad()
@each_kind
def test_curvature_gives_precisions(kind: str) -> None:
    """S^-1 = I + sum_t phi_t H_t phi_t^T, of independent weights the diagonal alone."""
    q, rows, mask = somewhere(kind)
    bend = torch.from_numpy(np.random.default_rng(4).uniform(0, 0.25, (B, T, R))) * mask[..., None]
    total = q.curvature_sum()
    for part in (slice(0, 2), slice(2, 4)):
        total.add(given(q, rows[part], mask[part]), bend[part])
    total.finish()
    X = design(q, rows, mask)
    eye, n = torch.eye(q.n_values).double(), q.n_loose
    for r, S in enumerate(weights_of(q)[1]):
        precision = eye + AMPLITUDE * torch.einsum("btm,bt,btk->mk", X, bend[..., r], X)
        torch.testing.assert_close(S[n:, n:], precision[n:, n:].inverse())
        torch.testing.assert_close(S.diagonal()[:n], 1 / precision.diagonal()[:n])


@torch.no_grad()
def test_a_file_may_round_the_roots() -> None:
    q, *_ = somewhere()
    before = q.root.clone()
    q.round_factor()
    torch.testing.assert_close(q.root, q.root.float().double(), rtol=0, atol=0)
    torch.testing.assert_close(q.root, before, rtol=1e-6, atol=0)


# -- the search for means ---------------------------------------------------------------------------


@torch.no_grad()
def searched(search: MeanSearch, q: DenseWeights, here: Any) -> tuple[Any, int]:
    """Minus the bound of a regression on targets, in the coordinates of a search: a function with its
    slope, and how many numbers there are."""
    targets = torch.arange(B * T * R).double().view(B, T, R).sin()

    def negative(x: np.ndarray) -> tuple[float, np.ndarray]:
        distance = search.move(torch.from_numpy(x))
        away = targets - search.functions(0, here)
        search.add(0, here, away)
        return float(distance + 0.5 * away.square().sum()), search.slope().numpy()

    return negative, search.begin(q.prior_factor())


@torch.no_grad()
def test_a_search_with_groups_finds_the_means_that_a_plain_one_finds() -> None:
    found, sizes = [], []
    for plain in (False, True):
        q, rows, mask = somewhere()
        rows[..., 1] = rows[..., 0]  # every value of one template occurs with one value of the other
        here = given(q, rows, mask)
        search = MeanSearch(q) if plain else q.mean_search([here])
        assert isinstance(search, MixedSearch) != plain
        negative, size = searched(search, q, here)
        x = np.random.default_rng(0).normal(size=size)
        numeric = [(negative(x + h)[0] - negative(x - h)[0]) / 2e-5 for h in 1e-5 * np.eye(size)]
        np.testing.assert_allclose(negative(x)[1], numeric, rtol=1e-5, atol=1e-6)
        best = minimize(negative, np.zeros(size), jac=True, options={"gtol": 1e-9})
        negative(best.x)
        search.settle()
        found.append(q.m.clone())
        sizes.append(size)
    assert sizes[0] < sizes[1]
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)
