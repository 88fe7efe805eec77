"""Rows far from all others: their distances, and everyone else's, are as exact as without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import Kernel, LinearKernel, MaternKernel, RBFKernel, RQKernel, ScaleKernel

from structgp import StructuredGPClassifier
from structgp.gp.kernels import covariance
from structgp.gp.kernels.block_sum import BlockSumKernel

OF_SQUARE = {
    RBFKernel: lambda s: np.exp(-s / 2),
    MaternKernel: lambda s: (1 + np.sqrt(5 * s) + 5 * s / 3) * np.exp(-np.sqrt(5 * s)),
    RQKernel: lambda s: (1 + s / 2) ** -1.0,
}


def far_rows(n: int = 12) -> torch.Tensor:
    """Rows around 0, and two pairs of near ones at 1e6 and at 1e9."""
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(n, 3)))
    x[3:5, 1] += 1e6
    x[7:9] += 1e9
    return x


def by_differences(kind: type[Kernel], a: torch.Tensor, b: torch.Tensor, length: float) -> np.ndarray:
    away = (a[:, None] - b[None]).numpy() / length
    return OF_SQUARE[kind]((away**2).sum(-1))


@pytest.mark.parametrize("kind", OF_SQUARE)
def test_covariances_are_those_of_differences(kind: type[Kernel]) -> None:
    kernel: Any = kind().double()
    kernel.lengthscale = 1.5
    if kind is RQKernel:
        kernel.alpha = 1.0
    x = far_rows()
    for a, b in ((x, x), (x[:5], x), (x, x[5:]), (x[3:4], x[:3]), (x[:2], x[3:4]), (x[7:9], x[3:5])):
        found = covariance(kernel, a, b).detach().numpy()
        # A number at 1e9 is itself right to 1e-7.
        np.testing.assert_allclose(found, by_differences(kind, a, b, 1.5), rtol=0, atol=1e-6)
    near = torch.cat([x[:3], x[5:7]])
    alone = covariance(kernel, near, near).detach()
    keep = torch.tensor([0, 1, 2, 5, 6])
    together = covariance(kernel, x, x).detach()[keep[:, None], keep]
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-12)


def test_batches_blocks_and_sums_see_them_too() -> None:
    rbf, linear = RBFKernel(), LinearKernel()
    x = far_rows()
    batch = x.view(3, 4, 3)
    found = covariance(ScaleKernel(rbf).double(), batch, batch)
    for one, rows in zip(found, batch, strict=True):
        torch.testing.assert_close(one, covariance(ScaleKernel(rbf).double(), rows, rows))
    total = covariance((rbf + linear).double(), x, x)
    apart = covariance(rbf.double(), x, x) + covariance(linear.double(), x, x)
    torch.testing.assert_close(total, apart)
    blocks = BlockSumKernel([rbf, linear], [(0, 2), (2, 3)]).double()
    apart = covariance(rbf, x[:, :2], x[:, :2]) + covariance(linear, x[:, 2:], x[:, 2:])
    torch.testing.assert_close(covariance(blocks, x, x), apart)


def test_length_scales_have_gradients() -> None:
    kernel, x = RBFKernel().double(), far_rows()
    far, near = covariance(kernel, x, x), covariance(kernel, x[:3], x[:3])
    (slope,) = torch.autograd.grad(far[:3, :3].sum(), [kernel.raw_lengthscale])
    (alone,) = torch.autograd.grad(near.sum(), [kernel.raw_lengthscale])
    torch.testing.assert_close(slope, alone)


@pytest.mark.parametrize("kernel", ["rbf", MaternKernel(nu=2.5)])
def test_one_wild_number_does_not_spoil_a_fit_or_an_answer(kernel: Any) -> None:
    rng = np.random.default_rng(0)
    X = [rng.normal(size=(5, 3)) for _ in range(12)]
    y = [["a" if row[0] > 0 else "b" for row in x] for x in X]
    tame = StructuredGPClassifier(kernel=kernel).fit(X, y)
    odd = np.array([[0.0, 0.0, 0.0], [1e7, 0.0, 0.0]])
    (asked,) = tame.predict_marginals([odd])
    assert asked[1]["a"] == pytest.approx(0.5, abs=0.2)  # nothing is known so far out
    X[3][2, 1] = 1e6
    wild = StructuredGPClassifier(kernel=kernel).fit(X, y)
    assert wild.score(X, y) >= tame.score(X, y) - 0.05
