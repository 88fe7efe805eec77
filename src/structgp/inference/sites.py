"""A log-likelihood as a quadratic in the functions: what a batch of examples has to say.

log p(y | h) is replaced by r^T h - h^T Lambda h / 2 for each function, so that it has the sensitivities
that were estimated. A quadratic stays what it is when the posterior moves, which makes it a memory; and a
posterior whose likelihood is quadratic is known in closed form, which makes it an optimiser. T R + R T^2
numbers per example: far fewer than a gradient in the inducing values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from structgp.inference.latents import Latents, Sensitivity


@dataclass(frozen=True)
class Sites:
    """One entry per block. linear : (K, B, T, R) r; precision : (K, B, R, T, T) Lambda; of a shared block
    (P,) and (P,) or (P, P), summed over the batch."""

    linear: tuple[Tensor, ...]
    precision: tuple[Tensor, ...]

    @staticmethod
    def of(latent: Latents, at: Sensitivity) -> Sites:
        """The quadratic with sensitivities ``at`` under ``latent``."""
        precision = tuple(-2 * c for c in at.covariance)
        moved = (apply(p, m) for p, m in zip(precision, latent.means, strict=True))
        linear = tuple(slope + p for slope, p in zip(at.mean, moved, strict=True))
        return Sites(linear, precision)

    def sensitivity(self, latent: Latents) -> Sensitivity:
        """What the quadratic's expectation does when ``latent`` moves."""
        moved = (apply(p, m) for p, m in zip(self.precision, latent.means, strict=True))
        mean = tuple(r - p for r, p in zip(self.linear, moved, strict=True))
        return Sensitivity(mean, tuple(-0.5 * p for p in self.precision))

    def map(self, function: Callable[..., Tensor], *others: Sites) -> Sites:
        """``function`` of each entry, with the same entries of ``others``."""
        every = (self, *others)
        linear = zip(*(s.linear for s in every), strict=True)
        precision = zip(*(s.precision for s in every), strict=True)
        return Sites(tuple(function(*a) for a in linear), tuple(function(*a) for a in precision))

    def plus(self, other: Sites, times: float) -> Sites:
        return self.map(lambda a, b: a + times * b, other)

    def towards(self, other: Sites, rate: float) -> Sites:
        """(1 - rate) of this and rate of the other."""
        return self.map(lambda a, b: a.lerp(b, rate), other)

    def nothing(self) -> Sites:
        """The quadratic 0."""
        return self.map(torch.zeros_like)


def apply(precision: Tensor, mean: Tensor) -> Tensor:
    """The precision of each function times its mean, (K, B, T, R), or of shared ones (P,)."""
    if mean.dim() == 1:
        return precision * mean if precision.dim() == 1 else precision @ mean
    return (precision @ mean.mT[..., None])[..., 0].mT
