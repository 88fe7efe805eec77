"""The Gaussian of the functions on a batch, block by block, and the map from standard normal numbers to
scores.

Estimators see a log-likelihood as a function of standard normal numbers eps, one array per block. What they
find, slope and bend in eps, is turned into gradients in the mean b and the covariance Sigma = L L^T of each
block's functions:

    grad_b = L^-T slope,       grad_Sigma = 1/2 L^-T bend L^-1,

and from there flows back to the parameters behind them. A block's functions are per example (one Gaussian
over the tuples of each), or shared by all examples (one Gaussian over the scores of a table). Examples of a
mixture's K components come component after component, as one batch of K B examples. Letters as in
``gp.block``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from structgp.gp import Posterior
from structgp.gp.linalg import cholesky
from structgp.inference.estimators.moments import Entries, Group, Moments


@dataclass(frozen=True)
class Sensitivity(Entries):
    """Gradients of the expected log-likelihood, one entry per block. mean : (K, B, T, R), or (P,) if
    shared. covariance : (K, B, R, T, T), symmetric, or (P,) of the variances or (P, P) if shared. Gradients
    of shared functions are summed over examples, and over components with their weights."""

    mean: tuple[Tensor, ...]
    covariance: tuple[Tensor, ...]


@dataclass(frozen=True)
class ExampleLatent:
    """q of one block's functions on B examples. mean : (K, B, T, R) and covariance : (K, B, R, T, T),
    differentiable in the parameters behind them. factor : Cholesky factor of the covariance, detached.
    mask : (B, T)."""

    block: Any
    mean: Tensor
    covariance: Tensor
    factor: Tensor
    mask: Tensor

    @staticmethod
    def of(block: Any, conditional: Any, mask: Tensor) -> ExampleLatent:
        """Cost O(K B R T (M^2 + T^2))."""
        mean, covariance = block.gaussian(conditional)
        detached = covariance.detach()
        # Padding gets the mean of the diagonal, which leaves the jitter of `cholesky` as it is.
        scale = detached.diagonal(dim1=-1, dim2=-2).sum(-1) / mask.sum(-1).clamp(min=1)[:, None]
        scale = torch.where(mask.any(-1)[:, None], scale, 1)
        fill = torch.diag_embed(scale[..., None] * ~mask[:, None])
        return ExampleLatent(block, mean, covariance, cholesky(detached + fill), mask)

    @property
    def group(self) -> Group:
        return Group(self.mask.repeat(len(self.mean), 1), self.block.n_functions)

    def place(self, noise: Tensor) -> Tensor:
        """(S, K B, T, *labels) scores from standard normal numbers (S, K B, T, R). Cost O(S K B T R (T +
        P))."""
        mean = self.mean.detach().flatten(0, 1).to(noise)
        factor = self.factor.flatten(0, 1).to(noise)  # (K B, R, T, T)
        spread = factor @ noise.permute(1, 3, 2, 0)  # (K B, R, T, S)
        return self.block.scores(mean + spread.permute(3, 0, 2, 1))

    def sensitivity(self, slope: Tensor, bend: Tensor) -> tuple[Tensor, Tensor]:
        shape, factor = self.covariance.shape, self.factor
        slope = slope.to(factor).mT.reshape(*shape[:-1], 1)
        mean = _solve_transposed(factor, slope)[..., 0].mT
        return mean, 0.5 * _divide(factor, bend.to(factor).reshape(shape))

    def moments(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """The slope and bend that belong to these gradients: the inverse of ``sensitivity``."""
        slope = (self.factor.mT @ mean.mT[..., None])[..., 0].mT
        bend = 2 * self.factor.mT @ covariance @ self.factor
        return slope.flatten(0, 1), bend.flatten(0, 1)


@dataclass(frozen=True)
class SharedLatent:
    """q of a table's scores. mean : (P,), covariance : (P,) variances or (P, P), differentiable; factor :
    (P,) standard deviations or (P, P) lower triangular, detached."""

    block: Any
    mean: Tensor
    covariance: Tensor
    factor: Tensor

    @staticmethod
    def of(block: Any, conditional: Any, mask: Tensor) -> SharedLatent:
        mean, covariance = block.gaussian(conditional)
        return SharedLatent(block, mean, covariance, (block.scale * block.spread).detach())

    @property
    def is_full(self) -> bool:
        return self.factor.dim() == 2

    @property
    def group(self) -> Group:
        return Group(None, self.block.n_functions, self.is_full)

    def place(self, noise: Tensor) -> Tensor:
        """(S, *labels) scores from standard normal numbers (S, P)."""
        factor = self.factor.to(noise)
        spread = noise @ factor.mT if self.is_full else factor * noise
        return self.block.scores(self.mean.detach().to(noise) + spread)

    def sensitivity(self, slope: Tensor, bend: Tensor) -> tuple[Tensor, Tensor]:
        slope, bend, factor = slope.to(self.factor), bend.to(self.factor), self.factor
        if self.block.is_silent:
            return torch.zeros_like(slope), torch.zeros_like(bend)
        if not self.is_full:
            return slope / factor, 0.5 * bend / factor.square()
        return _solve_transposed(factor, slope[:, None])[:, 0], 0.5 * _divide(factor, bend)

    def moments(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        factor = self.factor
        if self.is_full:
            return factor.T @ mean, 2 * factor.T @ covariance @ factor
        return factor * mean, 2 * factor.square() * covariance


@dataclass(frozen=True)
class Latents:
    """q of the functions of all blocks on one batch."""

    parts: tuple[ExampleLatent | SharedLatent, ...]

    @staticmethod
    def of(posterior: Posterior, conditionals: Sequence[Any], masks: Sequence[Tensor]) -> Latents:
        parts = zip(posterior.blocks, conditionals, masks, strict=True)
        return Latents(tuple((SharedLatent if p[0].shared else ExampleLatent).of(*p) for p in parts))

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(part.group for part in self.parts)

    @property
    def means(self) -> tuple[Tensor, ...]:
        """The means of all blocks, detached."""
        return tuple(part.mean.detach() for part in self.parts)

    def place(self, noise: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The scores of every template."""
        return tuple(part.place(eps) for part, eps in zip(self.parts, noise, strict=True))

    def sensitivity(self, moments: Moments) -> Sensitivity:
        """Gradients in mean and covariance."""
        parts = zip(self.parts, moments.slopes, moments.bends, strict=True)
        return Sensitivity(
            *zip(*(part.sensitivity(slope, bend) for part, slope, bend in parts), strict=True)
        )

    def moments(self, at: Sensitivity) -> Moments:
        """The slope and bend that belong to the gradients ``at``; value 0."""
        parts = zip(self.parts, at.mean, at.covariance, strict=True)
        slopes, bends = zip(*(part.moments(*gradients) for part, *gradients in parts), strict=True)
        return Moments(slopes[0].new_zeros(len(slopes[0])), slopes, bends)

    def expand(self, moments: Moments, mixing: Tensor) -> Tensor:
        """The expected log-likelihood, summed over examples, and over components with weights ``mixing``
        (K,). As a function of the posterior it is right to first order, which is all that a gradient sees.
        The derivative in a component's weight is the expectation under that component."""
        at = self.sensitivity(moments)
        value = moments.value.to(self.parts[0].mean).reshape(self.parts[0].mean.shape[:2])
        total = (mixing @ value).sum()
        for part, mean, covariance in zip(self.parts, at.mean, at.covariance, strict=True):
            away = mean * (part.mean - part.mean.detach())
            spread = covariance * (part.covariance - part.covariance.detach())
            if isinstance(part, SharedLatent):
                total = total + away.sum() + spread.sum()
            else:
                total = total + (mixing @ (away.sum((-1, -2)) + spread.sum((-1, -2, -3)))).sum()
        return total


@dataclass(frozen=True)
class Sites(Entries):
    """The log-likelihood of a batch of examples, approximated by a quadratic in the functions.

    log p(y | h) is replaced by r^T h - h^T Lambda h / 2 for each function, such that it has the
    sensitivities that were estimated. A quadratic stays the same when the posterior moves, so it can serve
    as a memory; and a posterior under a quadratic log-likelihood is known in closed form, which is what
    natural gradients use. It takes T R + R T^2 numbers per example: far fewer than a gradient in the
    inducing values.

    One entry per block. linear : (K, B, T, R) r; precision : (K, B, R, T, T) Lambda; for a shared block
    (P,) and (P,) or (P, P), summed over the batch."""

    linear: tuple[Tensor, ...]
    precision: tuple[Tensor, ...]

    @staticmethod
    def of(latent: Latents, at: Sensitivity) -> Sites:
        """The quadratic with sensitivities ``at`` under ``latent``."""
        precision = tuple(-2 * c for c in at.covariance)
        parts = zip(at.mean, precision, latent.means, strict=True)
        return Sites(tuple(slope + apply(p, m) for slope, p, m in parts), precision)

    def sensitivity(self, latent: Latents) -> Sensitivity:
        """Gradients of the quadratic's expectation under ``latent``."""
        parts = zip(self.linear, self.precision, latent.means, strict=True)
        mean = tuple(r - apply(p, m) for r, p, m in parts)
        return Sensitivity(mean, tuple(-0.5 * p for p in self.precision))

    def towards(self, other: Sites, rate: float) -> Sites:
        """The average of this, with weight 1 - rate, and the other, with weight rate."""
        return self.map(lambda a, b: a.lerp(b, rate), other)


def apply(precision: Tensor, mean: Tensor) -> Tensor:
    """The precision of each function times its mean, (K, B, T, R), or (P,) for shared functions."""
    if mean.dim() == 1:
        return precision * mean if precision.dim() == 1 else precision @ mean
    return (precision @ mean.mT[..., None])[..., 0].mT


def _solve_transposed(factor: Tensor, right: Tensor) -> Tensor:
    """L^-T right."""
    return torch.linalg.solve_triangular(factor.mT, right, upper=True)


def _divide(factor: Tensor, matrix: Tensor) -> Tensor:
    """L^-T matrix L^-1."""
    half = _solve_transposed(factor, matrix)
    return torch.linalg.solve_triangular(factor, half, upper=False, left=False)
