"""A log-likelihood as a quadratic in the latent values: what a batch of sequences has to say.

log p(y | f, g) is replaced by r^T f - f^T Lambda f / 2 for each function, and the same in g, so that it
has the sensitivities that were estimated. A quadratic stays what it is when the posterior moves, which
makes it a memory; and a posterior whose likelihood is quadratic is known in closed form, which makes it
an optimiser. T V + V T^2 numbers a sequence: far fewer than a gradient in the inducing values.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from structgp.inference.bound import Latents, Sensitivity


@dataclass(frozen=True)
class Sites:
    """linear : (K, B, T, R) r; precision : (K, B, R, T, T) Lambda; pair_linear : (V, V) and
    pair_precision : (V, V), or (V^2, V^2), the same in g, summed over the batch."""

    linear: Tensor
    precision: Tensor
    pair_linear: Tensor
    pair_precision: Tensor

    @staticmethod
    def of(latent: Latents, at: Sensitivity) -> Sites:
        """The quadratic with sensitivities ``at`` under ``latent``."""
        precision, pair_precision = -2 * at.covariance, -2 * at.pair_covariance
        linear = at.mean + _apply(precision, latent.mean.detach())
        pair_mean = latent.pairs.mean.detach()
        pair_linear = at.pair_mean + _apply_pairs(pair_precision, pair_mean)
        return Sites(linear, precision, pair_linear, pair_precision)

    def sensitivity(self, latent: Latents) -> Sensitivity:
        """What the quadratic's expectation does when ``latent`` moves."""
        mean = self.linear - _apply(self.precision, latent.mean.detach())
        pair_mean = latent.pairs.mean.detach()
        return Sensitivity(
            mean,
            -0.5 * self.precision,
            self.pair_linear - _apply_pairs(self.pair_precision, pair_mean),
            -0.5 * self.pair_precision,
        )

    def plus(self, other: Sites, times: float) -> Sites:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Sites(*(a + times * b for a, b in pairs))

    def towards(self, other: Sites, rate: float) -> Sites:
        """(1 - rate) of this and rate of the other."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Sites(*(a.lerp(b, rate) for a, b in pairs))


def _apply(precision: Tensor, mean: Tensor) -> Tensor:
    """(K, B, T, R): the precision of each function times its mean."""
    return (precision @ mean.mT[..., None])[..., 0].mT


def _apply_pairs(precision: Tensor, mean: Tensor) -> Tensor:
    if precision.shape == mean.shape:
        return precision * mean
    return (precision @ mean.reshape(-1)).view_as(mean)
