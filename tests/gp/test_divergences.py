"""Divergences against torch.distributions and against sampling."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from structgp.gp.divergences import kl_whitened

V, M = 3, 4


def whitened() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(V, M, generator=generator, dtype=torch.float64)
    factor = torch.randn(V, M, M, generator=generator, dtype=torch.float64).tril()
    return mean, factor


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


def test_standard_deviations_against_torch() -> None:
    """Of either sign; the prior is the standard normal."""
    mean, factor = whitened()
    sd = factor.diagonal(dim1=-1, dim2=-2)
    assert (sd < 0).any()
    zero, one = torch.zeros_like(mean), torch.ones_like(mean)
    expected = kl_divergence(Normal(mean, sd.abs()), Normal(zero, one)).sum()
    torch.testing.assert_close(kl_whitened(mean, sd), expected)


def test_whitened_standard_deviations() -> None:
    mean, factor = whitened()
    sd = factor.diagonal(dim1=-1, dim2=-2)
    torch.testing.assert_close(kl_whitened(mean, sd), kl_whitened(mean, torch.diag_embed(sd)))


def test_the_papers_gradients_of_the_divergence_of_tables() -> None:
    """-K_bin^-1 m and (S^-1 - K_bin^-1) / 2, of minus the divergence, in the scores themselves, whose
    prior is N(0, K_bin) with K_bin = s^2 I: right as printed, though the supplement's first line for it
    lost the sign."""
    generator = torch.Generator().manual_seed(2)
    P, sd = V * V, 1.7
    mean = torch.randn(P, generator=generator, dtype=torch.float64).requires_grad_()
    root = torch.randn(P, P, generator=generator, dtype=torch.float64).tril()
    root = root + 2 * torch.eye(P, dtype=torch.float64)
    S = (root @ root.mT).requires_grad_()
    value = -kl_whitened(mean / sd, torch.linalg.cholesky(S) / sd)
    grad_mean, grad_S = torch.autograd.grad(value, (mean, S))
    torch.testing.assert_close(grad_mean, -mean.detach() / sd**2)
    eye = torch.eye(P, dtype=torch.float64)
    expected = 0.5 * (torch.linalg.inv(S.detach()) - eye / sd**2)
    torch.testing.assert_close(grad_S, expected)


def test_nothing_learned_costs_nothing() -> None:
    eye = torch.eye(M, dtype=torch.float64).repeat(V, 1, 1)
    zero = torch.zeros(V, M, dtype=torch.float64)
    assert kl_whitened(zero, eye).item() == 0
    assert kl_whitened(zero, torch.ones_like(zero)).item() == 0


def test_gradients() -> None:
    mean, factor = (x.requires_grad_() for x in whitened())
    assert torch.autograd.gradcheck(kl_whitened, (mean, factor))
    sd = factor.detach().diagonal(dim1=-1, dim2=-2).clone().requires_grad_()
    assert torch.autograd.gradcheck(kl_whitened, (mean, sd))
