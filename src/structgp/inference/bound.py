"""The evidence lower bound (``eq:elbo-sparse``):

    ELBO = E_q[ sum_n log p(y_n | f_n, g) ] - KL(q(u) || p(u)) - KL(q(g) || p(g)).

This is where a structure and the GP meet: an estimator sees the likelihood's values at draws of the
posterior, and what it finds flows back through mean and covariance of each sequence to whatever
lies behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from structgp.gp import Conditional, Entropy, PairwiseGaussian, Posterior
from structgp.gp.linalg import cholesky
from structgp.inference.estimators import Estimate, Moments

LogProb = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sensitivity:
    """Gradients of the expected log-likelihood in the Gaussian of each sequence.

    mean : (K, B, T, R). covariance : (K, B, R, T, T), symmetric. pair_mean : (V, V) and
    pair_covariance : (V, V) of the variances, or (V^2, V^2): both summed over components with their
    weights, and over sequences.
    """

    mean: Tensor
    covariance: Tensor
    pair_mean: Tensor
    pair_covariance: Tensor


@dataclass(frozen=True)
class Latents:
    """q of the functions at B sequences (``eq:bkjn-skjn``), and the way from standard normal numbers
    to the latent values of the labels. What the estimators see as one batch of K B sequences is
    component after component.

    mean : (K, B, T, R) and covariance : (K, B, R, T, T), differentiable in all that is behind them.
    factor : (K, B, R, T, T) of the covariance, detached. pairs : q(g). mask : (B, T). basis : (V, R),
    None where a label has a function of its own.
    """

    mean: Tensor
    covariance: Tensor
    factor: Tensor
    pairs: PairwiseGaussian
    mask: Tensor
    basis: Tensor | None = None

    def place(self, unary: Tensor, pairwise: Tensor) -> tuple[Tensor, Tensor]:
        """f (S, K B, T, V), g (S, V, V) from standard normal numbers (S, K B, T, R), (S, V, V).
        Cost O(S K B T R (T + V))."""
        mean = self.mean.detach().flatten(0, 1).to(unary)
        factor = self.factor.flatten(0, 1).to(unary)  # (K B, R, T, T)
        spread = factor @ unary.permute(1, 3, 2, 0)  # (K B, R, T, S)
        pairs = PairwiseGaussian(self.pairs.mean.detach(), self.pairs.factor.detach())
        h = mean + spread.permute(3, 0, 2, 1)
        f = h if self.basis is None else h @ self.basis.to(unary).T
        return f, pairs.to(unary).place(pairwise)

    def sensitivity(self, moments: Moments) -> Sensitivity:
        """grad_b = L^-T slope and grad_Sigma = 1/2 L^-T bend L^-1."""
        shape, factor = self.covariance.shape, self.factor
        slope = moments.slope.to(factor).mT.reshape(*shape[:-1], 1)
        bend = moments.bend.to(factor).reshape(shape)
        mean = _solve_transposed(factor, slope)[..., 0].mT
        covariance = 0.5 * _divide(factor, bend)
        pair_slope, pair_bend = moments.pair_slope.to(factor), moments.pair_bend.to(factor)
        pair_factor = self.pairs.factor.detach()
        if not bool((pair_factor != 0).any()):
            return Sensitivity(
                mean, covariance, torch.zeros_like(pair_slope), torch.zeros_like(pair_bend)
            )
        if not self.pairs.is_full:
            return Sensitivity(
                mean, covariance, pair_slope / pair_factor, 0.5 * pair_bend / pair_factor.square()
            )
        pair_mean = _solve_transposed(pair_factor, pair_slope.reshape(-1, 1)).view_as(pair_slope)
        return Sensitivity(mean, covariance, pair_mean, 0.5 * _divide(pair_factor, pair_bend))

    def moments(self, sensitivity: Sensitivity) -> Moments:
        """The slope and bend that ``sensitivity`` is of; value 0."""
        factor, pair_factor = self.factor, self.pairs.factor.detach()
        slope = (factor.mT @ sensitivity.mean.mT[..., None])[..., 0].mT
        bend = 2 * factor.mT @ sensitivity.covariance @ factor
        if self.pairs.is_full:
            pair_slope = (pair_factor.T @ sensitivity.pair_mean.reshape(-1)).view_as(
                sensitivity.pair_mean
            )
            pair_bend = 2 * pair_factor.T @ sensitivity.pair_covariance @ pair_factor
        else:
            pair_slope = pair_factor * sensitivity.pair_mean
            pair_bend = 2 * pair_factor.square() * sensitivity.pair_covariance
        slope, bend = slope.flatten(0, 1), bend.flatten(0, 1)
        return Moments(slope.new_zeros(len(slope)), slope, bend, pair_slope, pair_bend)

    def expand(self, moments: Moments, weights: Tensor) -> Tensor:
        """The expected log-likelihood summed over components with ``weights`` (K,) and over sequences:
        its value, and as function of the posterior right to first order, which is all that a gradient
        sees. The derivative in a weight is the expectation under its component."""
        at = self.sensitivity(moments)
        value = moments.value.to(self.mean).reshape(self.mean.shape[:2])
        away = self.mean - self.mean.detach()
        spread = self.covariance - self.covariance.detach()
        value = value + (at.mean * away).sum((-1, -2))
        value = value + (at.covariance * spread).sum((-1, -2, -3))
        pairs = self.pairs
        total = (weights @ value).sum()
        total = total + (at.pair_mean * (pairs.mean - pairs.mean.detach())).sum()
        now = pairs.covariance
        return total + (at.pair_covariance * (now - now.detach())).sum()


def latents(posterior: Posterior, conditional: Conditional, mask: Tensor) -> Latents:
    """q of the functions on a batch. Cost O(K B R T (M^2 + T^2))."""
    gaussian = posterior.at(conditional)
    covariance = gaussian.covariance
    detached = covariance.detach()
    # Padding gets the mean of the diagonal, which leaves the jitter of `cholesky` as it is.
    scale = detached.diagonal(dim1=-1, dim2=-2).sum(-1) / mask.sum(-1).clamp(min=1)[:, None]
    scale = torch.where(mask.any(-1)[:, None], scale, 1)
    fill = torch.diag_embed(scale[..., None] * ~mask[:, None])
    basis = None if posterior.has_label_basis else posterior.basis
    factor = cholesky(detached + fill)
    return Latents(gaussian.mean, covariance, factor, posterior.pairwise(), mask, basis)


@dataclass(frozen=True)
class Bound:
    """elbo = expected_log_prob - kl_inducing - kl_pairwise, all scalars, differentiable; estimate :
    where the first of them comes from."""

    elbo: Tensor
    expected_log_prob: Tensor
    kl_inducing: Tensor
    kl_pairwise: Tensor
    estimate: Estimate


def evidence_lower_bound(
    posterior: Posterior,
    latent: Latents,
    estimate: Estimate,
    *,
    scale: float = 1.0,
    entropy: Entropy = "auto",
) -> Bound:
    """The bound from B sequences; ``scale`` = N / B makes a batch stand for all N of them."""
    expected = scale * latent.expand(estimate.moments, posterior.weights)  # eq:ellhat
    kl_inducing = posterior.kl_inducing(entropy)  # klun
    kl_pairwise = posterior.kl_pairwise()  # klbin
    return Bound(expected - kl_inducing - kl_pairwise, expected, kl_inducing, kl_pairwise, estimate)


def _solve_transposed(factor: Tensor, right: Tensor) -> Tensor:
    """L^-T right."""
    return torch.linalg.solve_triangular(factor.mT, right, upper=True)


def _divide(factor: Tensor, matrix: Tensor) -> Tensor:
    """L^-T matrix L^-1."""
    half = _solve_transposed(factor, matrix)
    return torch.linalg.solve_triangular(factor, half, upper=False, left=False)
