"""What inducing values say of the latent values of sequences: p(f | u), and q(f) (``eq:bkjn-skjn``).

Letters as in ``gp.posterior``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from structgp.gp.lowrank import LowRank, weighted_gram
from structgp.gp.spreads import Spread


@dataclass(frozen=True)
class Conditional:
    """p(f | u) on a batch of sequences, before any data: depends on the kernel and Z alone.

    projection : (B, T, M), A above.
    residual : (B, T, T) lower factor of K_nn - A A^T; zero at padding.
    """

    projection: Tensor
    residual: Tensor

    def times(self, m: Tensor) -> Tensor:
        """(B, T, R) A m of whitened inducing values (R, M)."""
        return self.projection @ m.T

    def transposed_times(self, values: Tensor) -> Tensor:
        """(R, M) A^T values, of (B, T, R)."""
        return values.flatten(0, 1).T @ self.projection.flatten(0, 1)

    def scaled(self, factor: Tensor) -> Conditional:
        """The same under a kernel whose amplitude is ``factor`` squared times as large."""
        return Conditional(factor * self.projection, factor * self.residual)


@dataclass(frozen=True)
class SequenceGaussian:
    """q of the functions at the rows of B sequences: a mixture of K Gaussians, each independent over
    functions and joint over positions.

    m : (K, R, M); spread : (K, R, M, M) lower triangular, (K, R, M) standard deviations, or low-rank.
    """

    conditional: Conditional
    m: Tensor
    spread: Spread

    @property
    def mean(self) -> Tensor:
        """(K, B, T, R). Cost O(K B T R M)."""
        K, R, M = self.m.shape
        B, T, _ = self.conditional.projection.shape
        flat = self.conditional.projection.reshape(B * T, M) @ self.m.reshape(K * R, M).T
        return flat.reshape(B, T, K, R).permute(2, 0, 1, 3)

    @property
    def covariance(self) -> Tensor:
        """(K, B, R, T, T). Cost O(K B T R M (M + T)); O(K B T^2 R M) with standard deviations, and
        O(K B T R M (r + T)) if low-rank."""
        rest = self.conditional.residual @ self.conditional.residual.mT
        parts = [self._doubt(self.spread[k]) + rest[:, None] for k in range(len(self.m))]
        return torch.stack(parts)

    def _doubt(self, spread: Spread) -> Tensor:
        """(B, R, T, T) A S_j A^T of one component."""
        A = self.conditional.projection
        if isinstance(spread, LowRank):
            along = self._through(spread.narrowing)
            return weighted_gram(A, spread.sd.square()) - along @ along.mT
        if spread.dim() == 2:
            return weighted_gram(A, spread.square())
        root = self._through(spread)
        return root @ root.mT

    def _through(self, matrix: Tensor) -> Tensor:
        """(B, R, T, r) A matrix_j, of (R, M, r)."""
        B, T, M = self.conditional.projection.shape
        R, _, r = matrix.shape
        # One matrix product over all functions: broadcasting would copy them B times.
        stacked = matrix.permute(1, 0, 2).reshape(M, R * r)
        flat = self.conditional.projection.reshape(B * T, M) @ stacked
        return flat.reshape(B, T, R, r).transpose(1, 2)
