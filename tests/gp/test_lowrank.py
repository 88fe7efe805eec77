"""Low-rank covariances against the dense matrices they stand for, and the forms that they lie between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from structgp.gp import Inducing, Mixture
from structgp.gp.families.inducing_points import InducingBlock
from structgp.gp.spreads import (
    LowRank,
    half_log_dets,
    root_times,
    root_transposed_times,
    traces,
    weighted_gram,
)

B, T, V, M, W = 2, 3, 2, 5, 2
LENGTHS = (3, 2)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(sd: Tensor, directions: Tensor) -> Tensor:
    eye = torch.eye(sd.shape[-1], dtype=torch.float64)
    inner = torch.linalg.inv(eye + directions @ directions.mT)
    return sd[..., None] * inner * sd[..., None, :]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 6), st.integers(1, 6), st.integers(-3, 3), st.integers(0, 1000))
def test_against_the_dense_matrix(r: int, n: int, size: int, seed: int) -> None:
    """Any rank, up to and beyond n; directions from hardly to much narrowed."""
    sd, directions = noise(V, n, seed=seed), 10.0**size * noise(V, n, r, seed=seed + 1)
    spread, S, v = LowRank(sd, directions), dense(sd, directions), noise(4, V, n, seed=seed + 2)
    scale = S.diagonal(dim1=-1, dim2=-2).amax()
    close = {"rtol": 1e-6, "atol": 1e-9 * float(sd.square().max())}
    torch.testing.assert_close(spread.matrix, S, **close)
    torch.testing.assert_close(
        traces(sd, spread), S.diagonal(dim1=-1, dim2=-2).sum(-1), rtol=1e-6, atol=1e-8
    )
    twice = root_times(spread, root_transposed_times(spread, v))
    torch.testing.assert_close(twice, (S @ v[..., None])[..., 0], rtol=1e-6, atol=1e-8)
    # The determinant of a matrix that is nearly singular is what the dense way knows badly.
    if size <= 0:
        torch.testing.assert_close(2 * half_log_dets(sd, spread), torch.linalg.slogdet(S)[1])
    assert scale > 0
    torch.testing.assert_close(spread[1].matrix, spread.matrix[1])


def test_gram_of_weights() -> None:
    A, weight = noise(B, T, M).requires_grad_(), noise(V, M, seed=1).requires_grad_()
    expected = torch.einsum("btm,rm,bum->brtu", A, weight, A)
    torch.testing.assert_close(weighted_gram(A, weight), expected)
    assert torch.autograd.gradcheck(weighted_gram, (A, weight))
    # Gradients that are not symmetric, and of one of the two alone.
    assert torch.autograd.gradcheck(lambda a: weighted_gram(a, weight.detach()).cumsum(-1), (A,))
    assert torch.autograd.gradcheck(lambda w: weighted_gram(A.detach(), w).cumsum(-2), (weight,))


# -- the ends of the family -------------------------------------------------------------------------


def make(covariance: Any, rank: int = 0, K: int = 1) -> InducingBlock:
    given: dict[str, Any] = {"covariance": covariance, "rank": rank}
    kernel, Z = RBFKernel().double(), noise(M, W)
    if K == 1:
        q: InducingBlock = Inducing(kernel, Z, (V,), **given)
    else:
        q = Mixture(kernel, Z, (V,), n_components=K, **given)
    with torch.no_grad():
        q.m += noise(*q.m.shape, seed=2)
        if isinstance(q, Mixture):
            q.weight_logits += noise(K, seed=3)
    return q


def everything(q: InducingBlock) -> list[Tensor]:
    """Mean and covariances on examples of several lengths, divergences and what the data determine."""
    mask = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
    with torch.no_grad():
        there = q.conditional(noise(B, T, W, seed=4), mask, q.prior_factor())
        costs = [q.kl(e) for e in ("bhattacharyya", "jensen")]
        return [*q.gaussian(there), *costs, q.effective_parameters()]


@pytest.mark.parametrize("K", [1, 2])
def test_rank_m_is_any_covariance(K: int) -> None:
    """S^-1 less a half of its smallest eigenvalue has a factor, and those are the directions."""
    full, low = make("full", K=K), make("low-rank", M, K=K)
    with torch.no_grad():
        full.factor.copy_((noise(*full.factor.shape, seed=5) + 2 * torch.eye(M)).tril())
        precision = torch.linalg.inv(full.factor @ full.factor.mT)
        least = 0.5 * torch.linalg.eigvalsh(precision)[..., 0]
        low.factor.copy_(least.rsqrt()[..., None].expand_as(low.factor))
        rest = precision - least[..., None, None] * torch.eye(M)
        low.directions.copy_(torch.linalg.cholesky(rest) * low.factor[..., None])
    for one, other in zip(everything(low), everything(full), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("rank", [0, 2])
def test_no_direction_is_the_diagonal(K: int, rank: int) -> None:
    """None at all, or none that is narrowed."""
    thin, low = make("diagonal", K=K), make("low-rank", rank, K=K)
    with torch.no_grad():
        for q in (thin, low):
            q.factor.copy_(noise(*q.factor.shape, seed=5))
    assert low.rank == rank
    for one, other in zip(everything(low), everything(thin), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_rank_beyond_m_is_m() -> None:
    assert make("low-rank", 99).rank == M


def test_it_stays_small() -> None:
    """Numbers held, at a size where full covariances would be 64 million."""
    q = Inducing(RBFKernel().double(), torch.zeros(4000, 1), (4,), covariance="low-rank", rank=8)
    held = sum(p.numel() for p in q.parameters())
    assert held < 4 * 4000 * (1 + 1 + 8) + 100
    assert np.isclose(float(q.kl().detach()), 0, atol=1e-9)
