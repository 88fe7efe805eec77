"""Cholesky factors that do not fail, thanks to a little jitter, and other triangular algebra."""

from __future__ import annotations

import torch
from torch import Tensor

from structgp.threads import share_matrices

RELATIVE_JITTER = 1e-8

SMALL = 128
"""Size up to which a triangular matrix is inverted in one go."""


def cholesky(matrix: Tensor) -> Tensor:
    """Lower Cholesky factors of ``matrix`` (..., n, n) with a little jitter on the diagonal.

    The jitter is relative to the mean of the diagonal: it starts at 1e-8, and is multiplied by ten for each
    matrix that needs more until its factor exists. A matrix of zeros gets the factor of 1e-8 I.
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

    With rows and columns reversed, the factor of the precision comes out upper triangular, and its inverse
    transpose is the lower one wanted.
    """
    return factor_from_upper(0.5 * (precision + precision.mT))


def factor_from_upper(precision: Tensor) -> Tensor:
    """The same as ``factor_of_inverse``, but only the upper triangles of the matrices are read."""
    return upper_factor_of_inverse(precision.flip(-1, -2)).flip(-1, -2)


def upper_factor_of_inverse(precision: Tensor) -> Tensor:
    """Upper triangular U with U U^T = precision^-1, for (..., n, n) positive definite matrices, of which
    only the lower triangles are read. Without gradients. Cost 2/3 n^3."""
    precision = precision.detach()
    if precision.device.type != "cpu":
        return invert_lower_(_factor(precision)).mT
    n = precision.shape[-1]
    each = precision.reshape(precision.shape[:-2].numel(), n, n)
    found = torch.empty_like(each)

    def work(first: int, last: int) -> None:
        found[first:last].mT.copy_(_factor(each[first:last]))
        invert_lower_(found[first:last].mT)

    share_matrices(work, len(each), each.numel() * n, each.device)
    return found.view_as(precision)


def _factor(precision: Tensor) -> Tensor:
    """Lower Cholesky factors of matrices, of which only the lower triangles are read."""
    factor, failed = torch.linalg.cholesky_ex(precision)
    bad = failed > 0
    if bool(bad.any()):
        # With a kernel of very large variance, the matrix is singular up to rounding.
        factor[bad] = cholesky(precision[bad].tril() + precision[bad].tril(-1).mT)
    return factor


def invert_lower_(factor: Tensor) -> Tensor:
    """Inverts lower triangular matrices (..., n, n) in place, and returns them. Works by halves: matrix
    products are faster than solving for all columns of I, which does not exploit that the solution is
    triangular too. On the CPU, matrices that are large enough are inverted one after the other."""
    n = factor.shape[-1]
    if n <= SMALL:
        eye = torch.eye(n, dtype=factor.dtype, device=factor.device)
        return factor.copy_(torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False))
    if factor.dim() > 2 and factor.device.type == "cpu":
        for one in factor:
            invert_lower_(one)
        return factor
    first, second = slice(n // 2), slice(n // 2, n)
    before = invert_lower_(factor[..., first, first])
    after = invert_lower_(factor[..., second, second])
    across = factor[..., second, first]
    across.copy_(after @ (across @ before)).neg_()
    return factor


def panels(n: int) -> list[slice]:
    """At most eight slices of the n columns of a triangular matrix: products panel by panel leave out most
    of the zeros."""
    width = max(SMALL, -(-n // 8))
    return [slice(start, min(start + width, n)) for start in range(0, n, width)]


def times_lower(x: Tensor, lower: Tensor) -> Tensor:
    """(N, n) the product of x (N, n) with a lower triangular matrix (n, n)."""
    parts = (x[:, part.start :] @ lower[part.start :, part] for part in panels(len(lower)))
    return torch.cat(list(parts), 1)


def add_upper_gram(total: Tensor, x: Tensor, y: Tensor) -> None:
    """Adds x^T y (n, n), known to be symmetric, to ``total`` in place. Only the upper triangle of the
    result is valid: entries below the diagonal are meaningless. x, y : (N, n)."""
    for part in panels(len(total)):
        total[: part.stop, part].addmm_(x[:, : part.stop].T, y[:, part])


def inverse_from_lower(factor: Tensor) -> Tensor:
    """(L L^T)^-1 for lower triangular matrices L (..., n, n)."""
    if factor.device.type == "cpu":
        return torch.cholesky_inverse(factor)
    inverse = invert_lower_(factor.clone())  # on a GPU, cholesky_inverse goes through a batch one by one
    return inverse.mT @ inverse


def each_times(matrices: Tensor, vectors: Tensor) -> Tensor:
    """(..., R, n) products of each matrix (R, n, n) with its vectors (..., R, n)."""
    if matrices.device.type != "cpu":
        return (matrices @ vectors[..., None])[..., 0]
    if torch.is_grad_enabled() and (matrices.requires_grad or vectors.requires_grad):
        # Autograd cannot record what several threads write into one tensor.
        return torch.stack([vectors[..., j, :] @ matrices[j].T for j in range(len(matrices))], -2)
    found = torch.empty_like(vectors)

    def work(first: int, last: int) -> None:
        # One by one: a single call takes torch ten times as long.
        for j in range(first, last):
            found[..., j, :] = vectors[..., j, :] @ matrices[j].T

    share_matrices(work, len(matrices), matrices.numel(), matrices.device)
    return found
