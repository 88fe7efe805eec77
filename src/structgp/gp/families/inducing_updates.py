"""Closed-form updates of a posterior at inducing inputs.

For a log-likelihood that is quadratic in the functions with precision Lambda, the best covariance is

    S_j^-1 = I + sum_n A_n^T Lambda_nj A_n,

and for any other one the same holds with the expected curvature (set the gradient of the bound to zero
and use Price's theorem). A diagonal S_j has its optimum at the inverse of that matrix's DIAGONAL, since
only the diagonal of the gradient has to vanish. A low-rank S_j is found by a few products with the matrix
(``gp.low_rank_fit``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from structgp.gp.block import LEAST_PRECISION
from structgp.gp.inducing_inputs import Projection, not_padding
from structgp.gp.linalg import add_upper_gram, factor_from_upper, factor_of_inverse
from structgp.gp.low_rank_fit import fit_low_rank
from structgp.gp.spreads import LowRank


@dataclass
class InducingCurvature:
    """precision : (R, M, M) that of the whitened inducing values, only the upper triangle of which is
    valid; or its diagonal (R, M) for forms other than 'full'."""

    block: Any
    precision: Tensor
    seen: list[tuple[Projection, Tensor]] = field(default_factory=list)

    @staticmethod
    def of(block: Any) -> InducingCurvature:
        R, M = block.m.shape
        full = block.form == "full"
        prior = torch.eye(M).to(block.m) if full else torch.ones_like(block.m[0])
        return InducingCurvature(block, prior.repeat(R, *[1] * prior.dim()))

    def add(self, conditional: Projection, bend: Tensor) -> None:
        """bend : (B, R, T, T). Cost O(R B T M^2); O(R B T M T) for the diagonal."""
        A = conditional.projection
        flat, square, there = A.flatten(0, 1), self.block.scale.square(), not_padding(A)
        some = flat[there]
        for j, total in enumerate(self.precision):
            bent = ((square * bend[:, j]) @ A).flatten(0, 1)
            if total.dim() == 2:
                add_upper_gram(total, some, bent[there])
            else:
                total += (bent * flat).sum(0)
        if self.block.form == "low-rank":
            self.seen.append((conditional, bend))

    def tensors(self) -> list[Tensor]:
        return [self.precision]

    def finish(self) -> None:
        block = self.block
        if block.form == "full":
            for lower, precision in zip(block.factor, self.precision, strict=True):
                lower.copy_(factor_from_upper(precision))
        elif block.form == "diagonal":
            block.factor.copy_(self.precision.rsqrt())
        else:
            start = LowRank(block.factor, block.first_directions([c for c, _ in self.seen]))
            found = fit_low_rank(self._times, self.precision, start)
            block.factor.copy_(found.sd)
            block.directions.copy_(found.directions)

    def _times(self, x: Tensor) -> Tensor:
        """(R, M, r) the precision times x. Per batch, two matrix products over all functions."""
        R, M, r = x.shape
        total, wide = x.new_zeros((M, R * r)), x.permute(1, 0, 2).reshape(M, R * r)
        square = self.block.scale.square()
        for conditional, bend in self.seen:
            A = conditional.projection
            B, T, _ = A.shape
            seen = (A.flatten(0, 1) @ wide).reshape(B, T, R, r).transpose(1, 2)
            bent = (square * bend @ seen).transpose(1, 2).reshape(B * T, R * r)
            total.addmm_(A.flatten(0, 1).T, bent)
        return x + total.reshape(M, R, r).permute(1, 0, 2)


def solve_sites(
    block: Any, conditionals: Sequence[Projection], linear: Sequence[Tensor], bends: Sequence[Tensor]
) -> bool:
    """Sets the posterior to that for quadratics r^T h - h^T Lambda h / 2, with one linear term r (B, T, R)
    and one precision Lambda (B, R, T, T) per batch. Returns False, and moves nothing, if there is none.
    Where covariances are not full, the means are still exact, and the covariances are the closest ones of
    their form. Cost O(R (N M^2 + M^3)) time, O(M^2) memory beside the posterior itself."""
    scale = block.scale.detach()
    total = torch.zeros_like(block.m)
    for conditional, r in zip(conditionals, linear, strict=True):
        total += scale * conditional.transposed_times(r)
    first: Any = block.first_directions(conditionals) if block.form == "low-rank" else None
    means, factors, directions = [], [], []
    # One function at a time: there may be memory for only one of the R precisions.
    for j in range(block.n_functions):
        precision = _precision(block, conditionals, bends, j, scale)
        least = LEAST_PRECISION * torch.eye(len(precision)).to(precision)
        if int(torch.linalg.cholesky_ex(precision - least)[1]) > 0:
            return False
        lower = torch.linalg.cholesky_ex(precision)[0]
        means.append(torch.cholesky_solve(total[j][:, None], lower)[:, 0])
        if block.form == "full":
            factors.append(factor_of_inverse(precision))
        elif block.form == "diagonal":
            # The closest diagonal covariance is the one whose inverse has the precision's diagonal.
            factors.append(precision.diagonal().rsqrt())
        else:
            start = LowRank(block.factor[j][None], first[j][None])
            found = fit_low_rank(precision.matmul, precision.diagonal()[None], start)[0]
            factors.append(found.sd)
            directions.append(found.directions)
    block.m.copy_(torch.stack(means))
    block.factor.copy_(torch.stack(factors))
    if directions:
        block.directions.copy_(torch.stack(directions))
    return True


def _precision(
    block: Any, conditionals: Sequence[Projection], bends: Sequence[Tensor], j: int, scale: Tensor
) -> Tensor:
    """(M, M) I + sum_n A_n^T Lambda_nj A_n of function j."""
    precision = torch.eye(block.n_values).to(block.m)
    for conditional, bend in zip(conditionals, bends, strict=True):
        A = scale * conditional.projection
        precision.addmm_(A.flatten(0, 1).T, (bend[:, j] @ A).flatten(0, 1))
    return 0.5 * (precision + precision.T)
