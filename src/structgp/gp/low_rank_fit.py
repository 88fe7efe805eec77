"""The best low-rank covariance for a precision matrix known by its diagonal and its products with vectors.

For a bound that is quadratic in the inducing values with precision P, the best S in the family
S^-1 = Q = D + W W^T (``gp.spreads``: D = s^-2, W = V / s) maximises

    -log det Q - tr P Q^-1,

which is the likelihood of a factor analysis of P. At its optimum, for a given D, the columns of D^-1 W
are the leading solutions b of P b = lambda D b, b^T D b = 1, each times sqrt(lambda - 1) (Joreskog,
1967); and D + diag(W W^T) = diag(P), which for r = 0 is the rule for diagonal covariances. The two are
found in turn: the directions within a subspace, which each product with P turns towards the leading one,
and D in between, which needs no new product."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from structgp.gp.spreads import LowRank

PASSES = 2
"""Number of products with the precision in one fit. Each starts from the subspace where the last one
ended."""

DIAGONAL_STEPS = 10

FIRST_PASSES = 4


def fit_low_rank(
    times: Callable[[Tensor], Tensor], diagonal: Tensor, start: LowRank, passes: int = PASSES
) -> LowRank:
    """R low-rank covariances for R precisions P, never worse than diag(P)^-1.

    times : maps x (R, M, r) to P x. diagonal : (R, M) diagonals of P. start : a covariance (R, M) and
    (R, M, r), whose directions say where to look first. Cost O(R M r^2) and the products.
    """
    D, basis = start.sd.square().reciprocal(), start.sd[..., None] * start.directions
    best = LowRank(diagonal.rsqrt(), torch.zeros_like(start.directions))
    highest = -(diagonal.log() + 1).sum(-1)
    for _ in range(passes):
        root = D.sqrt()[..., None]
        basis = torch.linalg.qr(root * basis)[0] / root
        moved = times(basis)
        known = basis.mT @ moved
        for step in range(DIAGONAL_STEPS + 1):
            b, gain = _leading(basis, known, D)
            if step < DIAGONAL_STEPS:
                # D + (diag W W^T) = diag P with b and lambda held, where W = D b sqrt(lambda - 1).
                w = (b.square() * gain[..., None, :]).sum(-1)
                D = 2 * diagonal / (1 + (1 + 4 * w * diagonal).sqrt())
        value = (gain - gain.log1p()).sum(-1) - (D.log() + diagonal / D).sum(-1)
        better = value > highest
        highest = torch.where(better, value, highest)
        V = D.sqrt()[..., None] * b * gain.sqrt()[..., None, :]
        best = LowRank(
            torch.where(better[:, None], D.rsqrt(), best.sd),
            torch.where(better[:, None, None], V, best.directions),
        )
        basis = moved / D[..., None]
    return best


def _leading(basis: Tensor, known: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """Solutions b (R, M, r) within the span of ``basis``, and lambda - 1 (R, r), or 0 where lambda is less
    than 1. known : (R, r, r) basis^T P basis."""
    lower = torch.linalg.cholesky(basis.mT @ (D[..., None] * basis))
    half = torch.linalg.solve_triangular(lower, known, upper=False)
    inner = torch.linalg.solve_triangular(lower, half.mT, upper=False)
    value, vector = torch.linalg.eigh(0.5 * (inner + inner.mT))
    turned = torch.linalg.solve_triangular(lower.mT, vector, upper=True)
    return basis @ turned, (value - 1).clamp(min=0)


def leading_directions(products: Sequence[tuple[Tensor, Tensor]], M: int, rank: int) -> Tensor:
    """(M, r) orthonormal directions along which the inputs differ most, approximately: the leading
    eigenvectors of sum_n A_n^T A_n, by subspace iteration from a fixed random start. products : for each
    batch, A (B, T, M) and the sample weights of the examples (B,). Cost O(N M r)."""
    like = products[0][0]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(M, rank, generator=generator, dtype=like.dtype).to(like)
    for _ in range(FIRST_PASSES):
        x, moved = torch.linalg.qr(x)[0], torch.zeros_like(x)
        for A, weight in products:
            seen = weight[:, None, None] * (A @ x)
            moved += A.flatten(0, 1).T @ seen.flatten(0, 1)
        x = moved
    return torch.linalg.qr(x)[0]
