"""What every kernel of ours must do, and GPyTorch's own through the same door."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from gpytorch.kernels import Kernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

import structgp.gp.kernels
from structgp.gp.kernels import (
    DenseKernel,
    RelevanceKernel,
    SparseLinearKernel,
    SparseRBFKernel,
    TemplateKernel,
    covariance,
    variance,
)
from structgp.gp.kernels.block_sum import BlockSumKernel
from structgp.gp.kernels.sparse import pack


def categorical_rows(n: int, seed: int) -> Tensor:
    """(n, 4) ids, some of them missing."""
    return torch.randint(-1, 3, (n, 4), generator=torch.Generator().manual_seed(seed)).double()


def sparse_rows(n: int, seed: int) -> Tensor:
    """(n, 6): up to three of ten features, the last row without any."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(n, 10, generator=generator).argsort(-1)[:, :3].double()
    values = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    unused = torch.rand(n, 3, generator=generator) < 0.3
    unused[-1] = True
    return pack(ids.masked_fill(unused, -1), values.masked_fill(unused, 0))


def mixed_rows(n: int, seed: int) -> Tensor:
    return torch.cat([categorical_rows(n, seed), sparse_rows(n, seed)], -1)


def dense_rows(n: int, seed: int) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def repeated_rows(n: int, seed: int) -> Tensor:
    return dense_rows(n, seed)[torch.arange(n) // 2]


@dataclass(frozen=True)
class Entry:
    make: Callable[[], Kernel]
    rows: Callable[[int, int], Tensor]


def dense_kernel(name: str) -> Kernel:
    return DenseKernel.of(name, dense_rows(40, 2))


KERNELS = {
    "DenseKernel": [
        Entry(lambda: dense_kernel("linear"), dense_rows),
        Entry(lambda: dense_kernel("linear+rbf-ard"), dense_rows),
        Entry(lambda: DenseKernel.of(MaternKernel(nu=1.5), dense_rows(2, 0)), dense_rows),
    ],
    "TemplateKernel": [
        Entry(lambda: TemplateKernel(4), categorical_rows),
        Entry(lambda: TemplateKernel(4, "product"), categorical_rows),
    ],
    "SparseLinearKernel": [
        Entry(SparseLinearKernel, sparse_rows),
        Entry(lambda: SparseLinearKernel(normalize=False), sparse_rows),
    ],
    "SparseRBFKernel": [Entry(SparseRBFKernel, sparse_rows)],
    "RelevanceKernel": [
        Entry(lambda: RelevanceKernel([2, 3, 2, 9]), categorical_rows),
        Entry(lambda: RelevanceKernel([4], sparse=True), sparse_rows),
    ],
    "BlockSumKernel": [
        Entry(
            lambda: BlockSumKernel(
                [ScaleKernel(TemplateKernel(4)), SparseRBFKernel()], [(0, 4), (4, None)]
            ),
            mixed_rows,
        )
    ],
}
GPYTORCH = {
    "RBF": [Entry(RBFKernel, dense_rows)],
    "RBF, ARD": [Entry(lambda: RBFKernel(ard_num_dims=4), dense_rows)],
    "Matern": [Entry(lambda: MaternKernel(nu=1.5), dense_rows)],
    "Scale": [Entry(lambda: ScaleKernel(RBFKernel()), dense_rows)],
    "sum": [Entry(lambda: RBFKernel() + ScaleKernel(MaternKernel(nu=2.5)), dense_rows)],
    "sum with a linear kernel": [
        Entry(lambda: RBFKernel() + ScaleKernel(RBFKernel()) + LinearKernel(), repeated_rows)
    ],
    "product": [Entry(lambda: LinearKernel() * RBFKernel(active_dims=(0, 2)), dense_rows)],
    "sum of ours": [Entry(lambda: TemplateKernel(4) + TemplateKernel(4, "product"), categorical_rows)],
}

each_kernel = pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=f"{name}-{i}")
        for name, entries in (KERNELS | GPYTORCH).items()
        for i, entry in enumerate(entries)
    ],
)


def test_every_kernel_has_an_entry() -> None:
    found = set()
    for info in pkgutil.iter_modules(structgp.gp.kernels.__path__):
        module = importlib.import_module(f"structgp.gp.kernels.{info.name}")
        for name, part in inspect.getmembers(module, inspect.isclass):
            if issubclass(part, Kernel) and part.__module__.startswith("structgp."):
                found.add(name)
    assert found == set(KERNELS)


@each_kernel
def test_symmetric_and_positive_semi_definite(entry: Entry) -> None:
    kernel, rows = entry.make().double(), entry.rows(40, 0)
    with torch.no_grad():
        K = covariance(kernel, rows, rows)
    assert K.dtype == torch.float64
    torch.testing.assert_close(K, K.mT)
    assert torch.linalg.eigvalsh(K).min() > -1e-10


@each_kernel
def test_variance_is_the_diagonal(entry: Entry) -> None:
    kernel, rows = entry.make().double(), entry.rows(12, 1)
    with torch.no_grad():
        diagonal = covariance(kernel, rows, rows).diagonal()
        torch.testing.assert_close(variance(kernel, rows), diagonal)
        batched = variance(kernel, rows.reshape(3, 4, -1))
        torch.testing.assert_close(batched, diagonal.reshape(3, 4))


@each_kernel
def test_diagonal_of_two_sets_of_rows(entry: Entry) -> None:
    kernel, x1, x2 = entry.make().double(), entry.rows(6, 6), entry.rows(6, 7)
    with torch.no_grad():
        diagonal = kernel(x1, x2, diag=True)
        torch.testing.assert_close(diagonal, covariance(kernel, x1, x2).diagonal())
        assert kernel.forward(x1, x2, diag=True).shape == (6,)


@each_kernel
def test_blocks_and_batches_are_parts_of_the_whole(entry: Entry) -> None:
    kernel, rows = entry.make().double(), entry.rows(12, 2)
    with torch.no_grad():
        whole = covariance(kernel, rows, rows)
        torch.testing.assert_close(covariance(kernel, rows[:5], rows[3:]), whole[:5, 3:])
        batched = covariance(kernel, rows.reshape(3, 4, -1), rows.reshape(3, 4, -1))
        for b in range(3):
            part = slice(4 * b, 4 * b + 4)
            torch.testing.assert_close(batched[b], whole[part, part])


@each_kernel
def test_one_value_at_a_time(entry: Entry) -> None:
    """A covariance depends on its two rows and on no other row of the call."""
    kernel, x1, x2 = entry.make().double(), entry.rows(4, 3), entry.rows(5, 4)
    with torch.no_grad():
        whole = covariance(kernel, x1, x2)
        for i in range(4):
            for j in range(5):
                alone = covariance(kernel, x1[i : i + 1], x2[j : j + 1])
                torch.testing.assert_close(whole[i : i + 1, j : j + 1], alone)


@each_kernel
def test_parameters_receive_gradients(entry: Entry) -> None:
    kernel, rows = entry.make().double(), entry.rows(8, 5)
    parameters = kernel.free_parameters() if isinstance(kernel, DenseKernel) else list(kernel.parameters())
    covariance_sum = covariance(kernel, rows, rows).square().sum()
    for parameter in parameters:
        (analytic,) = torch.autograd.grad(covariance_sum, parameter, retain_graph=True)
        for place in np.ndindex(*parameter.shape):
            change = 0.0
            for sign in (1, -1):
                with torch.no_grad():
                    parameter[place] += sign * 1e-6
                    change += sign * float(covariance(kernel, rows, rows).square().sum())
                    parameter[place] -= sign * 1e-6
            assert float(analytic[place]) == pytest.approx(change / 2e-6, rel=1e-5, abs=1e-6)


def test_ard_length_scales_reach_their_columns() -> None:
    kernel = RBFKernel(ard_num_dims=2).double()
    kernel.lengthscale = torch.tensor([1.0, 3.0])
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    expected = np.exp([[0, -0.5, -1 / 18], [-0.5, 0, -5 / 9], [-1 / 18, -5 / 9, 0]])
    np.testing.assert_allclose(covariance(kernel, x, x).detach(), expected, rtol=1e-6)
