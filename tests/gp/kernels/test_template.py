"""The categorical kernel against two loops."""

from __future__ import annotations

from contextlib import nullcontext

import gpytorch
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from structgp.gp.kernels import TemplateKernel, covariance, variance
from structgp.gp.kernels.template import keeping_patterns

modes = pytest.mark.parametrize("mode", ["additive", "product"])


def slow(x1: np.ndarray, x2: np.ndarray, weights: np.ndarray, mode: str) -> np.ndarray:
    K = np.zeros((len(x1), len(x2)))
    for i, a in enumerate(x1):
        for j, b in enumerate(x2):
            agreed = sum(w for w, p, q in zip(weights, a, b, strict=True) if p == q and p != -1 and q != -1)
            if mode == "additive":
                K[i, j] = agreed / weights.sum()
            else:
                K[i, j] = np.exp(-(weights.sum() - agreed))
    return K


def kernel_with(weights: np.ndarray, mode: str) -> TemplateKernel:
    kernel = TemplateKernel(len(weights), mode).double()
    kernel.weights = torch.tensor(weights)
    return kernel


@modes
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_against_two_loops(mode: str, data: st.DataObject) -> None:
    P = data.draw(st.integers(1, 4))
    ids = st.integers(-1, 3).map(float)
    x1 = data.draw(arrays(float, (data.draw(st.integers(1, 4)), P), elements=ids))
    x2 = data.draw(arrays(float, (data.draw(st.integers(1, 4)), P), elements=ids))
    weights = data.draw(arrays(float, P, elements=st.floats(0.01, 5.0)))
    kernel = kernel_with(weights, mode)
    with torch.no_grad():
        K = covariance(kernel, torch.tensor(x1), torch.tensor(x2))
        diagonal = variance(kernel, torch.tensor(x1))
    np.testing.assert_allclose(K, slow(x1, x2, weights, mode), rtol=1e-10, atol=1e-12)
    expected = slow(x1, x1, weights, mode).diagonal()
    np.testing.assert_allclose(diagonal, expected, rtol=1e-10, atol=1e-12)


@modes
def test_one_where_nothing_is_missing(mode: str) -> None:
    x = torch.randint(0, 5, (20, 6), generator=torch.Generator().manual_seed(0)).double()
    kernel = kernel_with(np.linspace(0.1, 2, 6), mode)
    with torch.no_grad():
        one = torch.ones(20, dtype=torch.float64)
        torch.testing.assert_close(covariance(kernel, x, x).diagonal(), one)
        torch.testing.assert_close(variance(kernel, x), one)


def test_missing_agrees_with_nothing() -> None:
    x = torch.tensor([[-1.0, 3.0], [-1.0, -1.0]], dtype=torch.float64)
    with torch.no_grad():
        additive = covariance(kernel_with(np.array([1.0, 3.0]), "additive"), x, x)
        product = covariance(kernel_with(np.array([1.0, 3.0]), "product"), x, x)
    np.testing.assert_allclose(additive, [[0.75, 0], [0, 0]], atol=1e-12)
    np.testing.assert_allclose(product, np.exp([[-1, -4], [-4, -4]]), rtol=1e-10)


def test_ids_far_above_what_single_precision_counts() -> None:
    x = torch.tensor([[2.0**24], [2.0**24 + 1]], dtype=torch.float64)
    with torch.no_grad():
        K = covariance(TemplateKernel(1).double(), x, x)
    np.testing.assert_array_equal(K, np.eye(2))


@modes
@pytest.mark.parametrize("batch", [(), (2,)])
def test_weight_gradient(mode: str, batch: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x1 = torch.randint(-1, 3, (*batch, 4, 3), generator=generator).double()
    x2 = torch.randint(-1, 3, (*batch, 5, 3), generator=generator).double()
    kernel = kernel_with(np.array([0.2, 1.0, 2.5]), mode)

    def value(raw: Tensor) -> Tensor:
        with gpytorch.settings.lazily_evaluate_kernels(False):
            K = torch.func.functional_call(kernel, {"raw_weights": raw}, (x1, x2))
        return K.to_dense()

    assert torch.autograd.gradcheck(value, kernel.raw_weights.detach().clone().requires_grad_())

    def diagonal(raw: Tensor) -> Tensor:
        return torch.func.functional_call(kernel, {"raw_weights": raw}, (x1,), {"diag": True})

    assert torch.autograd.gradcheck(diagonal, kernel.raw_weights.detach().clone().requires_grad_())


def test_weights_can_be_set_and_read() -> None:
    kernel = TemplateKernel(3).double()
    np.testing.assert_allclose(kernel.weights.detach(), [1, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(TemplateKernel(4, "product").weights.detach(), 0.25, rtol=1e-6)
    kernel.weights = torch.tensor([0.5, 1.0, 4.0])
    np.testing.assert_allclose(kernel.weights.detach(), [0.5, 1, 4], rtol=1e-12)
    kernel.weights = 2.0
    np.testing.assert_allclose(kernel.weights.detach(), [2, 2, 2], rtol=1e-12)


def test_equal_tokens_stand_out_as_weights_grow() -> None:
    """A heavy product kernel is the identity, a heavy template decides an additive one."""
    x = torch.tensor([[0, 0], [0, 1], [1, 1]], dtype=torch.float64)
    with torch.no_grad():
        K = covariance(kernel_with(np.array([50.0, 50.0]), "product"), x, x)
        np.testing.assert_allclose(K, np.eye(3), atol=1e-12)
        K = covariance(kernel_with(np.array([1e9, 1.0]), "additive"), x, x)
        np.testing.assert_allclose(K, [[1, 1, 0], [1, 1, 0], [0, 0, 1]], atol=1e-8)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="mode must be 'additive' or 'product', not 'sum'"):
        TemplateKernel(2, "sum")
    kernel = TemplateKernel(2).double()
    x = torch.zeros(2, 2, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="last_dim_is_batch"):
        kernel.forward(x, x, last_dim_is_batch=True)


@pytest.mark.parametrize("mode", ["additive", "product"])
def test_kept_patterns_change_nothing(mode: str) -> None:
    """Neither the kernel nor its gradient, under any weights and after other rows."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-1, 3, (12, 4), generator=generator).double()
    found = []
    for keeping in (nullcontext, keeping_patterns):
        here = []
        with keeping():
            for x, z in ((rows, rows), (rows, rows), (rows[:5], rows), (rows, rows)):
                kernel = TemplateKernel(4, mode).double()
                kernel.weights = torch.tensor([0.3, 2.0, 1.0, 0.5]) + len(here)
                value = kernel(x, z).to_dense()
                value.square().sum().backward()
                assert kernel.raw_weights.grad is not None
                here += [value.detach(), kernel.raw_weights.grad]
        found.append(here)
    torch.testing.assert_close(found[0], found[1])
