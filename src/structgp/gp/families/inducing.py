"""A posterior of function values at inducing inputs, for any kernel.

Whitened: u_j = L_zz v_j with v_j ~ N(0, I) a priori, and q(v) = prod_j N(m_j, S_j). With A = k(X_n, Z)
L_zz^-T, the values of function j on one example are JOINTLY Gaussian (``eq:bkjn-skjn``):

    mean A m_j,   covariance  K_nn - A A^T  +  A S_j A^T.

The first part of the covariance is what the inducing values leave open; the second is the uncertainty about
the inducing values themselves. Letters as in ``gp.block``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from structgp.gp.block import Entropy
from structgp.gp.divergences import divergence
from structgp.gp.families.inducing_points import InducingBlock
from structgp.gp.families.inducing_scales import learn_scales
from structgp.gp.families.inducing_updates import InducingCurvature, solve_sites
from structgp.gp.inducing_inputs import Projection, gaussian_of
from structgp.gp.linalg import cholesky
from structgp.gp.mean_search import SpreadSearch
from structgp.gp.spreads import root_times, root_transposed_times, traces


class Inducing(InducingBlock):
    """One Gaussian per function; see :class:`InducingBlock`. Parameters ``m`` (R, M), ``factor`` (R, M,
    M) or (R, M), ``directions`` (R, M, rank)."""

    name = "inducing"

    def gaussian(self, conditional: Projection) -> tuple[Tensor, Tensor]:
        """Mean (1, B, T, R) and covariance (1, B, R, T, T) of the functions."""
        mean, covariance = gaussian_of(conditional.scaled(self.scale), self.m, self.spread)
        return mean[None], covariance[None]

    def kl(self, entropy: Entropy = "bhattacharyya") -> Tensor:
        """KL(q(u) || p(u)) (``klun``); with 'jensen', the paper's upper bound on it."""
        return divergence(self.m.new_zeros(1), self.m[None], self.spread[None], entropy)

    def effective_parameters(self) -> Tensor:
        """() how many of the R M inducing values the data determine: the sum of 1 - variance / prior
        variance, whitened."""
        return (self.n_values - traces(self.m, self.spread)).sum()

    def root_times(self, v: Tensor) -> Tensor:
        """(..., R, M) C v with C C^T = S."""
        return root_times(self.spread, v)

    def root_transposed_times(self, v: Tensor) -> Tensor:
        return root_transposed_times(self.spread, v)

    def mean_search(self, conditionals: Sequence[Projection] | None) -> SpreadSearch:
        return SpreadSearch(self)

    def fixed_noise(self, half: int, masks: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
        """For each batch, (2 half, B, T, R) standard normal numbers; the second half mirrors the first."""
        found = []
        for mask in masks:
            shape = half, *mask.shape, self.n_functions
            noise = torch.randn(shape, generator=generator, dtype=self.m.dtype)
            found.append(torch.cat([noise, -noise]).to(self.m))
        return found

    def drawn_functions(
        self, conditional: Projection, noise: list[Tensor], i: int, numbers: Tensor
    ) -> Tensor:
        """(S, B, T, R) functions of batch i at the draws that ``fixed_noise`` stands for, without the
        amplitude."""
        return conditional.times(self.m) + self.offsets(conditional, noise, i, numbers)

    def offsets(self, conditional: Projection, noise: list[Tensor], i: int, numbers: Tensor) -> Tensor:
        """(S, B, T, R) what each draw adds to the mean, JOINT over tuples, without the amplitude. Cost
        O(B R T M (M + T))."""
        covariance = gaussian_of(conditional, self.m, self.spread)[1]
        return torch.einsum("bvtu,sbuv->sbtv", cholesky(covariance), noise[i])

    def draws(self, n: int, seed: int, generator: torch.Generator) -> InducingDraws:
        """n draws of inducing values, rounded up to mirrored pairs. Cost O(n R M^2), O(n R M r) if
        low-rank."""
        shape = (n + 1) // 2, self.n_functions, self.n_values
        noise = torch.randn(shape, generator=generator, dtype=self.m.dtype).to(self.m)
        spread = self.root_times(noise)
        both = torch.cat([self.m + spread, self.m - spread])
        return InducingDraws(both, self.prior_factor(), seed)

    def mean_draw(self) -> InducingDraws:
        return InducingDraws(self.m[None].clone(), self.prior_factor(), None)

    curvature_sum = InducingCurvature.of
    solve_sites = solve_sites
    learn_scales = learn_scales


@dataclass(frozen=True)
class InducingDraws:
    """values : (S, R, M) whitened inducing values. prior_factor : (M, M) L_zz. seed : that of the part of
    the functions that the inducing values leave open, None to use its mean."""

    values: Tensor
    prior_factor: Tensor
    seed: int | None

    def at(self, block: InducingBlock, rows: Tensor, mask: Tensor) -> Tensor:
        """(S, B, T, *labels) scores, joint over the tuples of an example."""
        conditional = block.conditional(rows, mask, self.prior_factor).scaled(block.scale)
        h = torch.einsum("btm,srm->sbtr", conditional.projection.to(self.values), self.values)
        if self.seed is not None:
            S, R = self.values.shape[:2]
            # Tuple by tuple from a separate generator, so that a longer example only appends numbers.
            rng = np.random.default_rng([self.seed, 1])
            eps = torch.from_numpy(rng.standard_normal((mask.shape[1], S // 2, R))).to(h)
            rest = torch.einsum("btu,usr->sbtr", conditional.residual.to(h), eps)
            h = h + torch.cat([rest, -rest])
        return block.scores(h)
