"""Compact covariances of many inducing values: a diagonal, with the variance reduced along r directions.

The prior of whitened values is N(0, I), and data only ever sharpen some of its directions: the best
covariance has S^-1 = I + (the information in the tokens), of which few eigenvalues are large. So it is the
PRECISION that gets a low-rank term,

    S^-1 = diag(1/s) (I + V V^T) diag(1/s),      V (M, r),

where r = 0 gives a diagonal covariance and r = M any covariance. It is positive definite whatever s and V
are, and with the (r, r) matrix I + V^T V all that a bound needs is cheap (Woodbury, and the determinant
lemma):

    S = diag(s)^2 - Y Y^T,   Y = diag(s) V K^-T,
    log det S = 2 sum log s - 2 log det K,   K K^T = I + V^T V.

A covariance D + W W^T of low rank would have to WIDEN directions, and could say 'one direction is known
and the rest as before' only with r = M - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """Covariances with S^-1 = diag(1/s) (I + V V^T) diag(1/s). sd : (..., M) s, of either sign.
    directions : (..., M, r) V."""

    sd: Tensor
    directions: Tensor

    def __getitem__(self, index: Any) -> LowRank:
        """Selects along the leading dimensions."""
        return LowRank(self.sd[index], self.directions[index])

    def __len__(self) -> int:
        return len(self.sd)

    @cached_property
    def _inner(self) -> Tensor:
        """(..., r, r) K. Its eigenvalues are 1 or more: no jitter is needed. Cost O(M r^2)."""
        V = self.directions
        eye = torch.eye(V.shape[-1], dtype=V.dtype, device=V.device)
        return torch.linalg.cholesky(eye + V.mT @ V)

    @cached_property
    def narrowing(self) -> Tensor:
        """(..., M, r) Y, with S = diag(s)^2 - Y Y^T. Cost O(M r^2)."""
        scaled = self.sd[..., None] * self.directions
        return torch.linalg.solve_triangular(self._inner.mT, scaled, upper=True, left=False)

    @cached_property
    def _half(self) -> Tensor:
        """(..., M, r) H, with (I + V V^T)^(-1/2) = I - H H^T."""
        V = self.directions
        value, vector = torch.linalg.eigh(V.mT @ V)
        root = (1 + value.clamp(min=0)).sqrt()
        return V @ (vector * (root * (1 + root)).rsqrt()[..., None, :])

    @property
    def trace(self) -> Tensor:
        """(...) trace of S."""
        return self.sd.square().sum(-1) - self.narrowing.square().sum((-1, -2))

    @property
    def half_log_det(self) -> Tensor:
        """(...) log det S / 2."""
        inner = self._inner.diagonal(dim1=-1, dim2=-2).log().sum(-1)
        return self.sd.abs().log().sum(-1) - inner

    @property
    def matrix(self) -> Tensor:
        """(..., M, M) S as a whole, which this class is there to avoid."""
        return torch.diag_embed(self.sd.square()) - self.narrowing @ self.narrowing.mT

    def root_times(self, v: Tensor) -> Tensor:
        """(..., R, M) C v with C C^T = S, for R covariances. Cost O(M r) each."""
        return self.sd * self._rounded(v)

    def root_transposed_times(self, v: Tensor) -> Tensor:
        """(..., R, M) C^T v."""
        return self._rounded(self.sd * v)

    def _rounded(self, v: Tensor) -> Tensor:
        """(I + V V^T)^(-1/2) v, which is symmetric."""
        along = torch.einsum("rmk,...rm->...rk", self._half, v)
        return v - torch.einsum("rmk,...rk->...rm", self._half, along)


Spread: TypeAlias = Tensor | LowRank
"""A covariance S in one of its forms: 'full', a lower triangular factor (..., M, M); 'diagonal', standard
deviations (..., M); or ``LowRank``. The shape of the means tells the first two apart. Diagonal entries may
have either sign."""


def traces(mean: Tensor, spread: Spread) -> Tensor:
    """(...) traces of S, for means (..., M)."""
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
    """(..., R, M) C v with C C^T = S, for one component: spread (R, M, M), (R, M) or low-rank."""
    if isinstance(spread, LowRank):
        return spread.root_times(v)
    return spread * v if spread.dim() == 2 else torch.einsum("rmk,...rk->...rm", spread, v)


def root_transposed_times(spread: Spread, v: Tensor) -> Tensor:
    """(..., R, M) C^T v with the same C."""
    if isinstance(spread, LowRank):
        return spread.root_transposed_times(v)
    return spread * v if spread.dim() == 2 else torch.einsum("rkm,...rk->...rm", spread, v)


class _WeightedGram(torch.autograd.Function):
    """Takes one function after the other, forwards and backwards: no tensor (R, B, T, M) is ever held."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(A, weight)
        return torch.stack([(A * w) @ A.mT for w in weight], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        A, weight = ctx.saved_tensors
        needs_A, needs_weight = ctx.needs_input_grad
        grad_A = torch.zeros_like(A) if needs_A else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        for r, w in enumerate(weight):
            bent = grad[:, r] @ A
            if grad_weight is not None:
                grad_weight[r] = (bent * A).sum((0, 1))
            if grad_A is not None:
                grad_A += (bent + grad[:, r].mT @ A) * w
        return grad_A, grad_weight


def weighted_gram(A: Tensor, weight: Tensor) -> Tensor:
    """(B, R, T, T) A diag(weight_r) A^T, from A (B, T, M) and weight (R, M).

    Cost O(B R T^2 M), memory O(B T M) beside the result."""
    found: Tensor = _WeightedGram.apply(A, weight)
    return found
