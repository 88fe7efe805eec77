"""Cholesky factors that do not fail, in the one place that adds jitter."""

from __future__ import annotations

import torch
from torch import Tensor

RELATIVE_JITTER = 1e-8


def cholesky(matrix: Tensor) -> Tensor:
    """Lower factor of ``matrix`` (..., n, n) plus the least jitter that works.

    The jitter is relative to the mean of the diagonal, starts at 1e-8 and grows tenfold.
    """
    size = matrix.diagonal(dim1=-1, dim2=-2).detach().mean(-1)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    jitter = RELATIVE_JITTER
    while True:
        factor, failed = torch.linalg.cholesky_ex(matrix + (jitter * size)[..., None, None] * eye)
        if not bool(failed.any()):
            return factor
        if jitter >= 1e-3:
            raise torch.linalg.LinAlgError(
                "covariance is not positive semi-definite even with a jitter of 1e-3 of its diagonal"
            )
        jitter *= 10


def factor_of_inverse(precision: Tensor) -> Tensor:
    """Lower triangular L with L L^T = precision^-1, for (..., n, n) positive definite matrices.

    One Cholesky and one triangular solve: with rows and columns reversed, the factor of the
    precision comes out upper triangular, and its inverse transpose is the lower one wanted.
    """
    symmetric = 0.5 * (precision + precision.mT)
    upper = torch.linalg.cholesky(symmetric.flip(-1, -2)).flip(-1, -2)
    eye = torch.eye(precision.shape[-1], dtype=precision.dtype, device=precision.device)
    return torch.linalg.solve_triangular(upper, eye.expand_as(upper), upper=True).mT
