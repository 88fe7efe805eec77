"""The forms that the covariance S of inducing values may have, and what is asked of each.

'full': a lower triangular factor (..., M, M). 'diagonal': standard deviations (..., M). 'low-rank':
``LowRank``. Which of the first two a tensor is, is read off its shape beside that of the means. Entries
on the diagonal may have either sign."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from structgp.gp.lowrank import LowRank

Spread: TypeAlias = Tensor | LowRank


def traces(mean: Tensor, spread: Spread) -> Tensor:
    """(...) of S, for means (..., M)."""
    if isinstance(spread, LowRank):
        return spread.trace
    return spread.square().flatten(mean.dim() - 1).sum(-1)


def half_log_dets(mean: Tensor, spread: Spread) -> Tensor:
    """(...) log det S / 2, for means (..., M)."""
    if isinstance(spread, LowRank):
        return spread.half_log_det
    diagonal = spread if spread.dim() == mean.dim() else spread.diagonal(dim1=-1, dim2=-2)
    return diagonal.abs().log().sum(-1)


def root_times(spread: Spread, v: Tensor) -> Tensor:
    """(..., R, M) C v with C C^T = S, of one component: spread (R, M, M), (R, M) or low-rank."""
    if isinstance(spread, LowRank):
        return spread.root_times(v)
    return spread * v if spread.dim() == 2 else torch.einsum("rmk,...rk->...rm", spread, v)


def root_transposed_times(spread: Spread, v: Tensor) -> Tensor:
    """(..., R, M) C^T v with the same C."""
    if isinstance(spread, LowRank):
        return spread.root_transposed_times(v)
    return spread * v if spread.dim() == 2 else torch.einsum("rkm,...rk->...rm", spread, v)
