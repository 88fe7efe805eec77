"""Which inputs the sparse GP keeps: greedy conditional variance, i.e. pivoted Cholesky."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from structgp.gp.kernels import covariance, variance

WHOLE_MATRIX = 8_000
"""Rows up to which the whole prior covariance is computed at once (512 MB in float64)."""


@dataclass(frozen=True)
class InducingChoice:
    """``index`` (M,): rows chosen, in order. ``residual``: share of the prior variance they leave
    unexplained, i.e. trace(K - K_xz K_zz^-1 K_zx) / trace(K)."""

    index: Tensor
    residual: float


def choose_inducing(
    kernel: Kernel, rows: Tensor, most: int, *, tolerance: float = 1e-6, enough: float = 0.0
) -> InducingChoice:
    """Picks the row whose variance given the rows picked so far is largest, again and again.

    Stops at ``most`` rows, when no row keeps more than ``tolerance`` of the largest prior variance (the
    sparse GP then is the full GP), or when they leave a share ``enough`` of the prior variance open.
    Duplicates are never picked twice. Cost O(N M^2) time, O(N M)
    memory.

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
        factor = rows.new_zeros((M, len(rows)))
        chosen: list[int] = []
        total = float(prior.sum())
        for m in range(M):
            pivot = int(left.argmax())
            if float(left.sum()) <= enough * total:
                break
            if float(left[pivot]) <= tolerance * float(prior.max()):
                break
            row = prior_row(pivot)
            row = row - factor[:m, pivot] @ factor[:m]
            factor[m] = row / left[pivot].sqrt()
            left = (left - factor[m].square()).clamp_(min=0)
            left[pivot] = 0
            chosen.append(pivot)
        if not chosen:
            # A kernel that vanishes everywhere (no token has a feature): any row will do.
            chosen = [0]
        share = float(left.sum() / prior.sum().clamp(min=torch.finfo(prior.dtype).tiny))
    return InducingChoice(torch.tensor(chosen), share)


def _prior_rows(kernel: Kernel, rows: Tensor) -> Callable[[int], Tensor]:
    """Row i of K, from the whole matrix where that fits: a kernel call a row costs more."""
    if len(rows) <= WHOLE_MATRIX:
        whole = covariance(kernel, rows, rows)
        return lambda i: whole[i]
    return lambda i: covariance(kernel, rows[i : i + 1], rows)[0]
