"""A covariance of low rank, fitted to a precision."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from structgp.gp.low_rank_fit import fit_low_rank
from structgp.gp.spreads import LowRank

R, M = 2, 12


def precision(seed: int = 0) -> Tensor:
    """(R, M, M) I and what some tokens say, some directions much more than others."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(R, 40, M, generator=generator, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(M, M, generator=generator, dtype=torch.float64))[0]
    A = A * torch.logspace(0.5, -1.5, M, dtype=torch.float64) @ turn
    return torch.eye(M) + A.mT @ A


def fitted(P: Tensor, rank: int, passes: int) -> LowRank:
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(R, M, rank, generator=generator, dtype=torch.float64)
    start = LowRank(torch.ones(R, M, dtype=torch.float64), directions)
    return fit_low_rank(P.matmul, P.diagonal(dim1=-1, dim2=-2), start, passes)


def value(P: Tensor, S: Tensor) -> Tensor:
    """(R,) twice the bound as function of S, but for constants."""
    return torch.linalg.slogdet(S)[1] - (P * S).sum((-1, -2))


def test_all_directions_are_the_inverse() -> None:
    P = precision()
    torch.testing.assert_close(fitted(P, M, 1).matrix, torch.linalg.inv(P), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("rank", [1, 4])
def test_few_directions_come_to_the_best_of_their_number(rank: int) -> None:
    """Against L-BFGS on sd and directions; what is left is a share of what the directions bring."""
    P = precision()
    start = fitted(P, rank, 2)
    leaves = [x.clone().requires_grad_() for x in (start.sd, start.directions)]
    climber = torch.optim.LBFGS(leaves, max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        climber.zero_grad()
        total = -value(P, LowRank(*leaves).matrix).sum()
        total.backward()
        return total

    climber.step(loss)
    best = value(P, LowRank(*leaves).matrix).detach()
    brings = best - value(P, fitted(P, 0, 1).matrix)
    for passes, share in ((5, 0.3), (100, 0.05)):
        left = (best - value(P, fitted(P, rank, passes).matrix)) / brings
        assert bool((left < share).all())
        assert bool((left > -1e-6).all())


def test_each_direction_helps_and_one_pass_never_harms() -> None:
    P = precision()
    thin = torch.diag_embed(1 / P.diagonal(dim1=-1, dim2=-2))
    values = [value(P, fitted(P, rank, 20).matrix) for rank in (0, 1, 2, 4, 8)]
    torch.testing.assert_close(values[0], value(P, thin))
    for less, more in pairwise(values):
        assert bool((more > less).all())
    assert bool((values[-1] < value(P, torch.linalg.inv(P))).all())
    for rank in (1, 4):
        assert bool((value(P, fitted(P, rank, 1).matrix) >= values[0] - 1e-12).all())
