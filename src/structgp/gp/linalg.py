"""Cholesky factors that do not fail, in the one place that adds jitter."""

from __future__ import annotations

import torch
from torch import Tensor

RELATIVE_JITTER = 1e-8


def cholesky(matrix: Tensor) -> Tensor:
    """Lower factors of ``matrix`` (..., n, n) with a little jitter on the diagonal.

    The jitter is relative to the mean of the diagonal: 1e-8, and for each matrix that needs more, ten
    times as much until it works. A matrix of zeros gets the factor of 1e-8 I.
    """
    mean = matrix.diagonal(dim1=-1, dim2=-2).detach().mean(-1)
    size = torch.where(mean > 0, mean, 1)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    jitter = torch.full_like(size, RELATIVE_JITTER)
    while True:
        factor, failed = torch.linalg.cholesky_ex(matrix + (jitter * size)[..., None, None] * eye)
        if not bool((failed > 0).any()):
            return factor
        if bool((jitter > 5e-4).any()):
            raise torch.linalg.LinAlgError(
                "covariance is not positive semi-definite even with a jitter of 1e-3 of its diagonal"
            )
        jitter = torch.where(failed > 0, 10 * jitter, jitter)


def factor_of_inverse(precision: Tensor) -> Tensor:
    """Lower triangular L with L L^T = precision^-1, for (..., n, n) positive definite matrices.

    One Cholesky and one triangular solve: with rows and columns reversed, the factor of the
    precision comes out upper triangular, and its inverse transpose is the lower one wanted.
    """
    symmetric = 0.5 * (precision + precision.mT)
    reverse = symmetric.flip(-1, -2)
    factor, failed = torch.linalg.cholesky_ex(reverse)
    # A kernel of very large variance leaves less than rounding between the matrix and singular.
    upper = (cholesky(reverse) if bool((failed > 0).any()) else factor).flip(-1, -2)
    eye = torch.eye(precision.shape[-1], dtype=precision.dtype, device=precision.device)
    return torch.linalg.solve_triangular(upper, eye.expand_as(upper), upper=True).mT
