"""A Gaussian near the posterior of GPstruct, around which elliptical slices are drawn.

The sampler may use any Gaussian instead of the prior if the ratio makes up for it (Nishihara, Murray and
Adams 2014): with t(h) = exp(<a, h> - (h - m)^T W (h - m) / 2), prior times likelihood equals prior times t,
which is Gaussian, times likelihood over t. The nearer prior times t is to the posterior, the flatter
likelihood over t is, and the longer are the steps. The sampled posterior is the same for every a, m and
W >= 0; if all are 0, it is the plain sampler. Here W is diagonal and m is the mean of prior times t; both
come from the likelihood's average slope and bend around m.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from experiments.methods.latent import Coordinates, LatentChain

ROUNDS = 8
MEAN_STEPS = 4
HALF_DRAWS = 8
PRECISION_SHARE = 0.7
"""Share of the precision from the bend that is used, so that the Gaussian is rather too wide: if it were
too narrow, the ratio would rise in its tails, and chains would stay there for long."""


@dataclass(frozen=True)
class Sites:
    """The Gaussian, and the parameters of t. mean, precision : (N, C) m and W. transition_mean,
    transition_precision : (V, V), the same for g. factor : (C, N, R), where factor factor^T is the
    covariance of h. transition_sd : (V, V) standard deviation of g. tilt, transition_tilt : a for h and for
    g."""

    mean: Tensor
    precision: Tensor
    factor: Tensor
    tilt: Tensor
    transition_mean: Tensor
    transition_precision: Tensor
    transition_sd: Tensor
    transition_tilt: Tensor

    def draw(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """n deviations from the mean: (n, N, C) and (n, V, V). Cost O(n C N R)."""
        C, _, R = self.factor.shape
        eps = torch.randn(C, R, n, generator=generator, dtype=self.mean.dtype)
        noise = torch.randn(n, *self.transition_sd.shape, generator=generator, dtype=self.mean.dtype)
        return (self.factor @ eps).permute(2, 1, 0), self.transition_sd * noise

    def ratio(self, chain: LatentChain, dh: Tensor, dg: Tensor) -> Tensor:
        """(S,) log(likelihood / t) at deviations from the mean."""
        h, g = self.mean + dh, self.transition_mean + dg
        linear = (self.tilt * h).sum((1, 2)) + (self.transition_tilt * g).sum((1, 2))
        square = (self.precision * dh.square()).sum((1, 2))
        square = square + (self.transition_precision * dg.square()).sum((1, 2))
        return chain.log_prob(h, g) - linear + 0.5 * square


def prior_sites(coordinates: Coordinates, basis: Tensor, transition_sd: float) -> Sites:
    """Sites with t = 1, which leave the prior as it is. basis : (V, C), the functions."""
    V, C = basis.shape
    zero, table = basis.new_zeros(len(coordinates.phi), C), basis.new_zeros(V, V)
    factor = coordinates.phi.expand(C, -1, -1)
    return Sites(zero, zero, factor, zero, table, table, table + transition_sd, table)


def fit_sites(
    chain: LatentChain, coordinates: Coordinates, transition_sd: float, generator: torch.Generator
) -> Sites:
    """Fits sites in several rounds: the precision from the bend averaged over draws, then Newton steps of
    the mean along the slope averaged over draws. Step sizes fall as 1 / k, so that the noise of the draws
    averages out. Cost O(C N R^2) per round."""
    now = prior_sites(coordinates, chain.basis, transition_sd)
    prior_precision = transition_sd**-2
    for number in range(ROUNDS):
        bend, transition_bend = chain.bend(*_around(now, generator))
        share = 1 / (1 + number)
        precision = torch.lerp(now.precision, bend, share)
        transition_precision = torch.lerp(now.transition_precision, transition_bend, share)
        now = _with_precision(now, precision, transition_precision, coordinates, prior_precision)
        for k in range(number * MEAN_STEPS, (number + 1) * MEAN_STEPS):
            slope, transition_slope = chain.slope(*_around(now, generator))
            # The mean is stationary if slope = K^-1 mean.
            pull = (slope + now.precision * now.mean).T[..., None]
            aim = (now.factor @ (now.factor.mT @ pull)).squeeze(-1).T
            transition_aim = now.transition_sd.square() * (
                transition_slope + now.transition_precision * now.transition_mean
            )
            step = 1 / (1 + 0.25 * k)
            now = replace(
                now,
                mean=torch.lerp(now.mean, aim, step),
                transition_mean=torch.lerp(now.transition_mean, transition_aim, step),
            )
    precisions = (PRECISION_SHARE * now.precision, PRECISION_SHARE * now.transition_precision)
    now = _with_precision(now, *precisions, coordinates, prior_precision)
    # K^-1 m, so that m is the mean of prior times t.
    tilt = (coordinates.phi / coordinates.scale.square()) @ coordinates.inverse(now.mean)
    return replace(now, tilt=tilt, transition_tilt=prior_precision * now.transition_mean)


def _around(sites: Sites, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Antithetic draws of h and g."""
    dh, dg = sites.draw(HALF_DRAWS, generator)
    return sites.mean + torch.cat([dh, -dh]), sites.transition_mean + torch.cat([dg, -dg])


def _with_precision(
    sites: Sites,
    precision: Tensor,
    transition_precision: Tensor,
    coordinates: Coordinates,
    prior_precision: float,
) -> Sites:
    return replace(
        sites,
        precision=precision,
        factor=_factor(coordinates.phi, precision),
        transition_precision=transition_precision,
        transition_sd=(prior_precision + transition_precision).rsqrt(),
    )


def _factor(phi: Tensor, precision: Tensor) -> Tensor:
    """(C, N, R) factor phi J^-T with J J^T = I + phi^T W phi, so that factor factor^T = (K^-1 + W)^-1."""
    eye = torch.eye(phi.shape[1], dtype=phi.dtype)
    factors = []
    for weight in precision.T:
        root = torch.linalg.cholesky(eye + phi.T @ (weight[:, None] * phi))
        factors.append(torch.linalg.solve_triangular(root, phi.T, upper=False).T.contiguous())
    return torch.stack(factors)
