"""Divergences against torch.distributions and against sampling."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from structgp.gp.divergences import kl_diagonal, kl_full, kl_whitened

V, M = 3, 4


def whitened() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(V, M, generator=generator, dtype=torch.float64)
    factor = torch.randn(V, M, M, generator=generator, dtype=torch.float64).tril()
    return mean, factor


def diagonal() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(V, V, generator=generator, dtype=torch.float64)
    sd = torch.rand(V, V, generator=generator, dtype=torch.float64) + 0.2
    return mean, sd, torch.tensor(1.7, dtype=torch.float64)


def assert_within_four_errors(draws: Tensor, value: Tensor) -> None:
    error = draws.std() / len(draws) ** 0.5
    assert (draws.mean() - value).abs() < 4 * error
    assert error < 0.02 * value


def test_whitened_against_torch() -> None:
    """Diagonal entries of either sign: the factor of a covariance is unique up to those."""
    mean, factor = whitened()
    assert (factor.diagonal(dim1=-1, dim2=-2) < 0).any()
    zero, eye = torch.zeros(M, dtype=torch.float64), torch.eye(M, dtype=torch.float64)
    q = MultivariateNormal(mean, covariance_matrix=factor @ factor.mT)
    expected = kl_divergence(q, MultivariateNormal(zero, covariance_matrix=eye)).sum()
    torch.testing.assert_close(kl_whitened(mean, factor), expected)


def test_whitened_against_sampling() -> None:
    mean, factor = whitened()
    factor = factor + torch.diag_embed(factor.diagonal(dim1=-1, dim2=-2).sign())
    q = MultivariateNormal(mean, covariance_matrix=factor @ factor.mT)
    torch.manual_seed(0)
    u = q.sample((50_000,))
    draws = (q.log_prob(u) - Normal(0.0, 1.0).log_prob(u).sum(-1)).sum(-1)
    assert_within_four_errors(draws, kl_whitened(mean, factor))


def test_diagonal_against_torch() -> None:
    mean, sd, prior_sd = diagonal()
    expected = kl_divergence(Normal(mean, sd), Normal(torch.zeros_like(mean), prior_sd)).sum()
    torch.testing.assert_close(kl_diagonal(mean, sd, prior_sd), expected)
    shaped = prior_sd.expand(V, V)
    torch.testing.assert_close(kl_diagonal(mean, sd, shaped), expected)


def test_diagonal_against_sampling() -> None:
    mean, sd, prior_sd = diagonal()
    q = Normal(mean, sd)
    torch.manual_seed(1)
    g = q.sample((50_000,))
    draws = (q.log_prob(g) - Normal(0.0, prior_sd).log_prob(g)).sum((-1, -2))
    assert_within_four_errors(draws, kl_diagonal(mean, sd, prior_sd))


def full() -> tuple[Tensor, Tensor, Tensor]:
    mean, _, prior_sd = diagonal()
    generator = torch.Generator().manual_seed(2)
    factor = torch.randn(V * V, V * V, generator=generator, dtype=torch.float64).tril()
    return mean, factor, prior_sd


def test_full_against_torch() -> None:
    mean, factor, prior_sd = full()
    eye = torch.eye(V * V, dtype=torch.float64)
    q = MultivariateNormal(mean.flatten(), covariance_matrix=factor @ factor.mT)
    prior = MultivariateNormal(torch.zeros_like(mean).flatten(), prior_sd.square() * eye)
    torch.testing.assert_close(kl_full(mean, factor, prior_sd), kl_divergence(q, prior))


def test_full_of_independent_scores_is_diagonal() -> None:
    mean, sd, prior_sd = diagonal()
    found = kl_full(mean, torch.diag(sd.flatten()), prior_sd)
    torch.testing.assert_close(found, kl_diagonal(mean, sd, prior_sd))


def test_whitened_standard_deviations() -> None:
    mean, factor = whitened()
    sd = factor.diagonal(dim1=-1, dim2=-2)
    torch.testing.assert_close(kl_whitened(mean, sd), kl_whitened(mean, torch.diag_embed(sd)))


def test_the_papers_gradients_of_the_pairwise_divergence() -> None:
    """-K_bin^-1 m and (S^-1 - K_bin^-1) / 2, of minus the divergence: right as printed, though the
    supplement's first line for it lost the sign."""
    mean, factor, prior_sd = full()
    factor = factor + 2 * torch.eye(V * V, dtype=torch.float64)
    S = (factor @ factor.mT).requires_grad_()
    mean.requires_grad_()
    value = -kl_full(mean, torch.linalg.cholesky(S), prior_sd)
    grad_mean, grad_S = torch.autograd.grad(value, (mean, S))
    torch.testing.assert_close(grad_mean, -mean.detach() / prior_sd.square())
    eye = torch.eye(V * V, dtype=torch.float64)
    expected = 0.5 * (torch.linalg.inv(S.detach()) - eye / prior_sd.square())
    torch.testing.assert_close(grad_S, expected)


def test_nothing_learned_costs_nothing() -> None:
    eye = torch.eye(M, dtype=torch.float64).repeat(V, 1, 1)
    assert kl_whitened(torch.zeros(V, M, dtype=torch.float64), eye).item() == 0
    sd = torch.full((V, V), 2.0)
    assert kl_diagonal(torch.zeros(V, V), sd, torch.tensor(2.0)).item() == pytest.approx(0)


def test_gradients() -> None:
    mean, factor = (x.requires_grad_() for x in whitened())
    assert torch.autograd.gradcheck(kl_whitened, (mean, factor))
    assert torch.autograd.gradcheck(kl_diagonal, tuple(x.requires_grad_() for x in diagonal()))
    assert torch.autograd.gradcheck(kl_full, tuple(x.requires_grad_() for x in full()))
