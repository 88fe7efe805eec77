"""The kernel on dense columns: its features against its covariances, and what columns may do to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

from structgp.gp.kernels import DenseKernel, covariance, variance
from structgp.gp.kernels.block_sum import elementwise
from structgp.gp.kernels.dense import BY_NAME, FARTHEST
from structgp.gp.linalg import RELATIVE_JITTER

SCALES = torch.tensor([0.7, 2.0, 3.0], dtype=torch.float64)
SIZES = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)


def some_rows(n: int = 9, seed: int = 0) -> Tensor:
    """(n, 3) columns of different sizes around different means."""
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=(n, 3)))
    return x * SIZES + torch.tensor([3.0, -1.0, 0.0])


def make(choice: Any, rows: Tensor, evenness: float = 0.5) -> DenseKernel:
    made = DenseKernel.of(choice, rows).requires_grad_(False)
    made.log_scale.copy_(SCALES.log())
    made.evenness.fill_(evenness)
    return made


def check_close(found: Tensor, wanted: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


# -- features ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_inducing", [1, 3, 9])
@pytest.mark.parametrize("choice", [*BY_NAME, ScaleKernel(RBFKernel())], ids=[*BY_NAME, "own"])
def test_features_and_open_variance_make_the_covariance(choice: Any, n_inducing: int) -> None:
    """Exactly on the diagonal; everywhere where the inducing inputs are all rows."""
    x = some_rows()
    kernel = make(choice, x)
    kernel.place(x[:n_inducing])
    found = kernel.features(x, kernel.prior_factor())
    assert found.values.shape == (9, kernel.n_features)
    whole, product = covariance(kernel, x, x), found.values @ found.values.T
    check_close(product.diagonal() + found.left, whole.diagonal())
    check_close(variance(kernel, x), whole.diagonal())
    check_close(elementwise(kernel, x[:4], x[5:]), whole[:4, 5:].diagonal())
    assert float(kernel.mean_variance(x)) == pytest.approx(float(whole.diagonal().mean()))
    if kernel.smooth is None or n_inducing == len(x):
        check_close(product, whole, atol=100 * RELATIVE_JITTER)
    if kernel.smooth is not None and n_inducing:
        mean = float(variance(kernel.smooth, x).mean())
        assert float(kernel.nystrom_variance(kernel.inducing).mean()) == pytest.approx(3.0 * mean)


def test_the_linear_kernel_is_plain_algebra() -> None:
    x = some_rows()
    kernel = make("linear", x, evenness=1.0)
    z = ((x - x.mean(0)) / x.std(0, correction=0)).numpy()
    wanted = 0.7 + 2.0 * z @ z.T / 3
    np.testing.assert_allclose(covariance(kernel, x, x), wanted, atol=1e-12)


def test_the_sum_is_plain_algebra() -> None:
    """Columns as they are but for one number (evenness 0), one length-scale."""
    x = some_rows()
    kernel = make("linear+rbf", x, evenness=0.0)
    kernel.log_length.fill_(0.4)
    size = x.std(0, correction=0).square().mean().sqrt()
    z = ((x - x.mean(0)) / size).numpy()
    far = ((z[:, None] - z) ** 2).sum(-1) / np.exp(0.4) ** 2
    wanted = 0.7 + 2.0 * z @ z.T / 3 + 3.0 * np.exp(-far / 2)
    np.testing.assert_allclose(covariance(kernel, x, x), wanted, atol=1e-10)


@pytest.mark.parametrize("choice", ["rbf", "rbf-ard", "linear+rbf-ard"])
def test_lengths_are_in_units_of_the_columns(choice: str) -> None:
    """An RBF of the raw columns with these length-scales is the smooth part."""
    x = some_rows()
    kernel = make(choice, x, evenness=0.3)
    kernel.log_length.add_(0.1 * torch.arange(len(kernel.log_length)))
    lengths = kernel.lengths()
    assert lengths is not None
    far = ((x[:, None] - x) / lengths).square().sum(-1)
    kernel.log_scale[:2] = -torch.inf
    check_close(covariance(kernel, x, x), 3.0 * (-far / 2).exp(), atol=1e-10)
    shown = kernel.typical_lengths()
    if kernel.ard:
        assert shown == lengths.tolist()
    else:
        assert shown == pytest.approx(float(lengths.log().mean().exp()))


def test_without_a_smooth_part_of_ours_there_are_no_lengths() -> None:
    for choice in ("linear", RBFKernel()):
        assert DenseKernel.of(choice, some_rows()).lengths() is None
        assert DenseKernel.of(choice, some_rows()).typical_lengths() is None


# -- columns -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("evenness", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("constant", [0.0, 1.0, -3e7])
@pytest.mark.parametrize("choice", BY_NAME)
def test_a_constant_column_changes_nothing(choice: str, constant: float, evenness: float) -> None:
    x = some_rows()
    wide = torch.cat([x, torch.full((9, 1), constant, dtype=torch.float64)], 1)
    alone, beside = make(choice, x, evenness), make(choice, wide, evenness)
    check_close(covariance(beside, wide, wide), covariance(alone, x, x))
    # Where it is not constant after all, training has said nothing about it.
    odd = wide.clone()
    odd[0, 3] += 5
    check_close(covariance(beside, odd, wide), covariance(alone, x, x))
    lengths, known = beside.lengths(), alone.lengths()
    if lengths is None or known is None:
        assert lengths is known is beside.smooth is None
        return
    check_close(lengths[:3], known)
    assert lengths[3] == torch.inf
    shown = beside.typical_lengths()
    assert shown == ([*known.tolist(), None] if beside.ard else alone.typical_lengths())


@pytest.mark.parametrize("choice", BY_NAME)
def test_units_change_nothing_where_columns_are_brought_to_one_size(choice: str) -> None:
    x, units = some_rows(), torch.tensor([1000.0, 1.0, 0.001]).double()
    other = x * units + torch.tensor([0.0, 5.0, -2.0])
    a, b = (DenseKernel.of(choice, rows).requires_grad_(False) for rows in (x, other))
    for kernel in (a, b):
        kernel.evenness.fill_(1.0)
        kernel.log_length.fill_(0.3)
    check_close(covariance(b, other, other), covariance(a, x, x), atol=1e-9)
    if a.smooth is not None:
        found, wanted = b.lengths(), a.lengths()
        assert found is not None
        assert wanted is not None
        torch.testing.assert_close(found, wanted * units)


def test_one_far_value_counts_as_thirty_standard_deviations() -> None:
    x = some_rows()
    kernel, odd = make("linear+rbf", x, evenness=1.0), some_rows(2, seed=1)
    odd[0, 0] = 1e7
    assert float(kernel.scaled(odd)[0, 0]) == pytest.approx(FARTHEST)
    found = covariance(kernel, odd, x)
    assert found.isfinite().all()
    check_close(found[1], covariance(kernel, odd[1:], x)[0])


@pytest.mark.parametrize("evenness", [-2.0, 3.0])
def test_evenness_has_ends(evenness: float) -> None:
    x = some_rows()
    at_end = make("rbf", x, evenness=min(1.0, max(0.0, evenness)))
    check_close(make("rbf", x, evenness=evenness).scaled(x), at_end.scaled(x))


def test_rows_that_are_all_alike_have_a_kernel() -> None:
    x = torch.ones(4, 2).double()
    for choice in BY_NAME:
        kernel = DenseKernel.of(choice, x).requires_grad_(False)
        assert covariance(kernel, x, x).isfinite().all()
        assert kernel.typical_lengths() is None
