"""Inducing inputs: the choice of rows, and the functions on a batch given their values.

Rows are picked by greedy conditional variance, i.e. pivoted Cholesky; p(h | u) and q(h) are those of
``eq:bkjn-skjn``.

Letters as in ``gp.block``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from structgp.gp.kernels import covariance, variance
from structgp.gp.linalg import times_lower
from structgp.gp.spreads import LowRank, Spread, weighted_gram


@dataclass(frozen=True)
class Projection:
    """p(h | u) on a batch, which depends only on the kernel and Z, not on any labels.

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


def gaussian_of(conditional: Projection, m: Tensor, spread: Spread) -> tuple[Tensor, Tensor]:
    """Mean (B, T, R) and covariance (B, R, T, T) of the functions under q, from m (R, M) and a spread:
    (R, M, M) lower triangular, (R, M) standard deviations, or low-rank. Cost O(B T R M (M + T));
    O(B T^2 R M) with standard deviations, O(B T R M (r + T)) if low-rank."""
    rest = conditional.residual @ conditional.residual.mT
    return conditional.times(m), _uncertainty(conditional.projection, spread) + rest[:, None]


def _uncertainty(A: Tensor, spread: Spread) -> Tensor:
    """(B, R, T, T) A S_j A^T."""
    if isinstance(spread, LowRank):
        along = _through(A, spread.narrowing)
        return weighted_gram(A, spread.sd.square()) - along @ along.mT
    if spread.dim() == 2:
        return weighted_gram(A, spread.square())
    there, parts = not_padding(A), []
    some = A.flatten(0, 1)[there]
    # One function after the other, so that nothing has to be copied.
    for lower in spread:
        root = torch.zeros_like(A).flatten(0, 1).index_copy(0, there, times_lower(some, lower)).view_as(A)
        parts.append(root @ root.mT)
    return torch.stack(parts, 1)


def not_padding(A: Tensor) -> Tensor:
    """Indices of the non-zero rows of A (B, T, M), with its examples one after another: often half of all
    rows."""
    return A.detach().flatten(0, 1).any(-1).nonzero()[:, 0]


def _through(A: Tensor, matrix: Tensor) -> Tensor:
    """(B, R, T, r) A matrix_j for each function j, from ``matrix`` (R, M, r)."""
    B, T, M = A.shape
    R, _, r = matrix.shape
    # One matrix product over all functions: broadcasting would copy them B times.
    flat = A.reshape(B * T, M) @ matrix.permute(1, 0, 2).reshape(M, R * r)
    return flat.reshape(B, T, R, r).transpose(1, 2)


PICKS_PER_LOOK = 64
"""Number of rows picked on a GPU between checks whether there are enough: a check takes longer than a
pick."""

WHOLE_MATRIX = 8_000
"""Number of rows up to which the whole prior covariance is computed at once (512 MB in float64)."""


@dataclass(frozen=True)
class InducingChoice:
    """``index`` (M,): the rows chosen, in order. ``residual``: share of the prior variance that they leave
    unexplained, trace(K - K_xz K_zz^-1 K_zx) / trace(K)."""

    index: Tensor
    residual: float


def choose_inducing(
    kernel: Kernel, rows: Tensor, most: int, *, tolerance: float = 1e-6, enough: float = 0.0
) -> InducingChoice:
    """Repeatedly picks the row whose variance given the rows picked so far is largest.

    Stops at ``most`` rows; when no row keeps more than ``tolerance`` of the largest prior variance (the
    sparse GP then is the full GP); or when no more than a share ``enough`` of the prior variance is left
    unexplained. Of duplicates, only one is picked. Cost O(N M^2) time, O(N M) memory.

    Parameters
    ----------
    rows : (N, W).
    most : largest M.
    """
    with torch.no_grad():
        prior = variance(kernel, rows)
        left = prior.clone()
        M = min(most, len(rows))
        prior_row = _prior_rows(kernel, rows)
        factor = prior.new_zeros((M, len(rows)))
        picks = 1 if rows.device.type == "cpu" else PICKS_PER_LOOK
        pivots = torch.zeros(M + 1, dtype=torch.long, device=rows.device)
        # Before each pick: the sum of the variances left at all rows, and the largest.
        sums, tops = prior.new_full((M + 1,), torch.inf), prior.new_full((M + 1,), torch.inf)
        least_sum, least_top = enough * prior.sum(), tolerance * prior.max()
        for m in range(M + 1):
            # Few operations, none of which fetches a number: a GPU spends its time on starting them.
            here = slice(m, m + 1)
            top, pivot = torch.max(left, 0, keepdim=True, out=(tops[here], pivots[here]))
            torch.sum(left, 0, keepdim=True, out=sums[here])
            if m % picks == 0 or m == M:
                stops = (sums <= least_sum) | (tops <= least_top)
                if m == M or bool(stops.any()):
                    break
            known = factor[:m, pivot].mT
            torch.addmm(prior_row(pivot), known, factor[:m], alpha=-1, out=factor[here]).mul_(top.rsqrt())
            left.addcmul_(factor[m], factor[m], value=-1).clamp_(min=0).index_fill_(0, pivot, 0)
        n_chosen = int(stops.int().argmax()) if bool(stops.any()) else M
        share = float(sums[n_chosen] / prior.sum().clamp(min=torch.finfo(prior.dtype).tiny))
    # A kernel that vanishes everywhere (no token has a feature): any row will do.
    return InducingChoice(pivots[: max(1, n_chosen)].cpu(), share)


def _prior_rows(kernel: Kernel, rows: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that gives rows of K from their indices (n,). It reads them off the whole matrix where
    that fits: one kernel call per row costs more."""
    if len(rows) <= WHOLE_MATRIX:
        whole = covariance(kernel, rows, rows)
        return lambda places: whole[places]
    return lambda places: covariance(kernel, rows[places], rows)
