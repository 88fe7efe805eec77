"""What inducing values say of the functions on a batch: p(h | u), and q(h) (``eq:bkjn-skjn``).

Letters as in ``gp.block``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from structgp.gp.kernels import covariance
from structgp.gp.linalg import cholesky
from structgp.gp.lowrank import LowRank, weighted_gram
from structgp.gp.spreads import Spread


@dataclass(frozen=True)
class Projection:
    """p(h | u) on a batch, before any data: depends on the kernel and Z alone.

    projection : (B, T, M) A = k(x, Z) L_zz^-T. residual : (B, T, T) lower factor of K_nn - A A^T; zero at
    padding.
    """

    projection: Tensor
    residual: Tensor

    def times(self, values: Tensor) -> Tensor:
        """(B, T, R) A v of whitened inducing values (R, M)."""
        return self.projection @ values.T

    def transposed_times(self, functions: Tensor) -> Tensor:
        """(R, M) A^T h of functions (B, T, R)."""
        return functions.flatten(0, 1).T @ self.projection.flatten(0, 1)

    def scaled(self, factor: Tensor) -> Projection:
        """The same under a kernel whose amplitude is ``factor`` squared times as large."""
        return Projection(factor * self.projection, factor * self.residual)


def condition(kernel: Kernel, inducing: Tensor, rows: Tensor, mask: Tensor, factor: Tensor) -> Projection:
    """At rows (B, T, W), with factor (M, M) L_zz. Cost O(B T M (W + M) + B T^3), in float64."""
    B, T, W = rows.shape
    cross = covariance(kernel, rows.reshape(B * T, W), inducing)
    projection = torch.linalg.solve_triangular(factor, cross.mT, upper=False).mT
    projection = projection.reshape(B, T, len(inducing)) * mask[..., None]
    if T == 0:
        return Projection(projection, projection.new_zeros(B, 0, 0))
    prior = covariance(kernel, rows, rows)
    both = mask[:, :, None] & mask[:, None, :]
    open_part = torch.where(both, prior - projection @ projection.mT, 0)
    # The jitter is a share of the PRIOR variance: with Z = X nothing is left open, and a share of nothing
    # would not make the factor exist. Each example has its own, whatever else is in the batch.
    size = torch.where(mask, prior.diagonal(dim1=-1, dim2=-2), 0).amax(-1).clamp(min=1e-12)
    open_part = open_part + torch.diag_embed(1e-8 * size[:, None] * mask)
    # Padding gets the mean of the diagonal, which leaves the jitter of `cholesky` as it is.
    mean = open_part.diagonal(dim1=-1, dim2=-2).sum(-1) / mask.sum(-1).clamp(min=1)
    mean = torch.where(mask.any(-1), mean, 1).detach()
    residual = cholesky(open_part + torch.diag_embed(mean[:, None] * ~mask))
    return Projection(projection, torch.where(both, residual, 0))


def gaussian_of(conditional: Projection, m: Tensor, spread: Spread) -> tuple[Tensor, Tensor]:
    """q of the functions: mean (B, T, R) and covariance (B, R, T, T), from m (R, M) and a spread (R, M,
    M) lower triangular, (R, M) standard deviations, or low-rank. Cost O(B T R M (M + T)); O(B T^2 R M)
    with standard deviations, O(B T R M (r + T)) if low-rank."""
    rest = conditional.residual @ conditional.residual.mT
    return conditional.times(m), _uncertainty(conditional.projection, spread) + rest[:, None]


def _uncertainty(A: Tensor, spread: Spread) -> Tensor:
    """(B, R, T, T) A S_j A^T."""
    if isinstance(spread, LowRank):
        along = _through(A, spread.narrowing)
        return weighted_gram(A, spread.sd.square()) - along @ along.mT
    if spread.dim() == 2:
        return weighted_gram(A, spread.square())
    root = _through(A, spread)
    return root @ root.mT


def _through(A: Tensor, matrix: Tensor) -> Tensor:
    """(B, R, T, r) A matrix_j, of (R, M, r)."""
    B, T, M = A.shape
    R, _, r = matrix.shape
    # One matrix product over all functions: broadcasting would copy them B times.
    flat = A.reshape(B * T, M) @ matrix.permute(1, 0, 2).reshape(M, R * r)
    return flat.reshape(B, T, R, r).transpose(1, 2)
