"""Evaluates kernels, and adds kernels that each act on some columns of a row."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import gpytorch
import torch
from gpytorch.kernels import AdditiveKernel, Kernel
from torch import Tensor


class BlockSumKernel(Kernel):
    """k(x, z) = sum_i k_i(x[bounds_i], z[bounds_i]).

    Like GPyTorch's sums with ``active_dims``, but a bound may be open-ended, as the sparse block's
    is. ``bounds`` holds one (start, stop) per kernel.
    """

    def __init__(
        self, kernels: Sequence[Kernel], bounds: Sequence[tuple[int, int | None]], **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.kernels = torch.nn.ModuleList(kernels)
        self.bounds = [(start, stop) for start, stop in bounds]

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        total = None
        for kernel, (start, stop) in zip(self.kernels, self.bounds, strict=True):
            part = kernel(x1[..., start:stop], x2[..., start:stop], diag=diag, **params)
            part = part if isinstance(part, Tensor) else part.to_dense()
            total = part if total is None else total + part
        assert total is not None, "a sum of at least one kernel"
        return total


def covariance(kernel: Kernel, x1: Tensor, x2: Tensor) -> Tensor:
    """(..., N, M) dense covariance k(x1, x2), differentiable in the kernel's parameters.

    Evaluated at once: GPyTorch would put off sums and products and lose time on small blocks.
    """
    if isinstance(kernel, AdditiveKernel):
        # Term by term: GPyTorch's own sum factorises the whole matrix, for nothing and with a
        # warning where rows repeat, when a term after the first is a LinearKernel.
        terms = (covariance(term, x1, x2) for term in kernel.kernels)
        return functools.reduce(torch.add, terms)
    width = max(x1.shape[-1], x2.shape[-1])
    with gpytorch.settings.lazily_evaluate_kernels(False):
        return _dense(kernel(_widen(x1, width), _widen(x2, width)))


def variance(kernel: Kernel, x: Tensor) -> Tensor:
    """(..., N) prior variances k(x_i, x_i)."""
    return _dense(kernel(x, diag=True))


def _widen(x: Tensor, width: int) -> Tensor:
    """Rows that end in a sparse block, with unused pairs (-1, 0) added up to ``width``."""
    missing = width - x.shape[-1]
    if missing == 0:
        return x
    unused = x.new_tensor([-1.0, 0.0]).repeat(missing // 2)
    return torch.cat([x, unused.expand(*x.shape[:-1], missing)], -1)


def _dense(value: Any) -> Tensor:
    return cast(Tensor, value if isinstance(value, Tensor) else value.to_dense())
