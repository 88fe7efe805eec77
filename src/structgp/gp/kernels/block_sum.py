"""Evaluates kernels, and adds kernels that each act on some columns of a row."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import gpytorch
import torch
from gpytorch.kernels import AdditiveKernel, Kernel, MaternKernel, RBFKernel, RQKernel
from torch import Tensor

FARTHEST = 1e3
"""Distance from the middle of all rows, in length-scales, up to which squared distances are computed from
squared norms, as GPyTorch does: they are then right to some 1e-10 of a squared length-scale, well below the
jitter of a Cholesky factor."""

NUMBERS_AT_ONCE = 1 << 24


class BlockSumKernel(Kernel):
    """k(x, z) = sum_i k_i(x[bounds_i], z[bounds_i]).

    Like GPyTorch's sums with ``active_dims``, but ``stop`` may be None, as for the sparse block. bounds :
    one (start, stop) per kernel.
    """

    asks_for_parts = True

    def __init__(
        self, kernels: Sequence[Kernel], bounds: Sequence[tuple[int, int | None]], **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.kernels = torch.nn.ModuleList(kernels)
        self.bounds = [(start, stop) for start, stop in bounds]

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **_: Any) -> Tensor:
        total = None
        for kernel, (start, stop) in zip(self.kernels, self.bounds, strict=True):
            a, b = x1[..., start:stop], x2[..., start:stop]
            part = (elementwise if diag else covariance)(kernel, a, b)
            total = part if total is None else total + part
        assert total is not None, "a sum of at least one kernel"
        return total


def covariance(kernel: Kernel, x1: Tensor, x2: Tensor) -> Tensor:
    """(..., N, M) dense covariance k(x1, x2), differentiable in the kernel's parameters.

    Evaluated eagerly: GPyTorch's lazy sums and products lose time on small blocks. Rows that are far away
    cost O(M W) memory and time each, and are as accurate as the others.
    """
    if isinstance(kernel, AdditiveKernel):
        # Term by term: if a term after the first is a LinearKernel, GPyTorch's own sum needlessly
        # factorises the whole matrix, with a warning where rows repeat.
        terms = (covariance(term, x1, x2) for term in kernel.kernels)
        return functools.reduce(torch.add, terms)
    width = max(x1.shape[-1], x2.shape[-1])
    x1, x2 = _widen(x1, width), _widen(x2, width)
    with gpytorch.settings.lazily_evaluate_kernels(False):
        reach = _reach(kernel)
        if reach is None or not _is_wide(x1, x2, reach):
            return _dense(kernel(x1, x2))
        if x1.dim() == 2:
            return _wide_covariance(kernel, x1, x2, reach)
        return torch.stack([covariance(kernel, a, b) for a, b in zip(x1, x2, strict=True)])


def _reach(kernel: Kernel) -> float | None:
    """How far rows may be from their middle for GPyTorch's distances to be accurate; None for kernels that
    use no distances, or that bring far rows near first (``brings_rows_near``)."""
    near = {id(m) for k in kernel.modules() if getattr(k, "brings_rows_near", False) for m in k.modules()}
    leaves = [
        k
        for k in kernel.modules()
        if isinstance(k, RBFKernel | MaternKernel | RQKernel) and id(k) not in near
    ]
    return FARTHEST * min(float(k.lengthscale.detach().min()) for k in leaves) if leaves else None


def _is_wide(x1: Tensor, x2: Tensor, reach: float) -> bool:
    if not (x1.numel() and x2.numel()):
        return False
    middle = x1.detach().mean(-2, keepdim=True)  # GPyTorch's own
    each = (x1,) if x1 is x2 else (x1, x2)
    return any(float((x.detach() - middle).square().sum(-1).amax()) > reach**2 for x in each)


def _wide_covariance(kernel: Kernel, x1: Tensor, x2: Tensor, reach: float) -> Tensor:
    """(N, M) covariance of rows, some of which are so far away that their squared norms would swallow all
    other distances: the distances of these rows are computed from differences."""
    middle = x2.median(0).values
    near1, near2 = ((x - middle).norm(dim=-1) <= reach for x in (x1, x2))
    found = x1.new_empty((len(x1), len(x2)))
    found[~near1] = _by_differences(kernel, x1[~near1], x2)
    rows, columns = (near.nonzero()[:, 0] for near in (near1, ~near2))
    found[rows[:, None], columns] = _by_differences(kernel, x1[near1], x2[~near2])
    if bool(near1.any()) and bool(near2.any()):
        found[rows[:, None], near2.nonzero()[:, 0]] = _dense(kernel(x1[near1], x2[near2]))
    return found


def _by_differences(kernel: Kernel, x1: Tensor, x2: Tensor) -> Tensor:
    """(N, M) covariance, pair by pair: for its diagonals, GPyTorch takes the differences of rows."""
    if not (x1.numel() and x2.numel()):
        return x1.new_empty((len(x1), len(x2)))
    both = (
        torch.broadcast_tensors(a[:, None], x2) for a in x1.split(max(1, NUMBERS_AT_ONCE // x2.numel()))
    )
    return torch.cat([elementwise(kernel, a, b) for a, b in both])


def variance(kernel: Kernel, x: Tensor) -> Tensor:
    """(..., N) prior variances k(x_i, x_i)."""
    return _dense(kernel(x, diag=True))


def elementwise(kernel: Kernel, x1: Tensor, x2: Tensor) -> Tensor:
    """(..., N) covariances k(x1_i, x2_i)."""
    return _dense(kernel(x1, x2, diag=True))


def _widen(x: Tensor, width: int) -> Tensor:
    """Rows that end in a sparse block, with unused pairs (-1, 0) added up to ``width``."""
    missing = width - x.shape[-1]
    if missing == 0:
        return x
    unused = x.new_tensor([-1.0, 0.0]).repeat(missing // 2)
    return torch.cat([x, unused.expand(*x.shape[:-1], missing)], -1)


def _dense(value: Any) -> Tensor:
    return cast(Tensor, value if isinstance(value, Tensor) else value.to_dense())
