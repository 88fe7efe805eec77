"""Kernels on packed sparse rows against dense matrices."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from structgp.data.encode import FeatureEncoder
from structgp.gp.kernels import SparseLinearKernel, SparseRBFKernel, covariance, variance
from structgp.gp.kernels.sparse import inner_product, pack, unpack

D = 6

matrices = st.integers(1, 5).flatmap(
    lambda n: arrays(float, (n, D), elements=st.sampled_from([0.0, 0.0, 0.0, 1.0, -2.0, 0.3]))
)


def packed(dense: np.ndarray) -> Tensor:
    """Packed rows of a dense matrix, as wide as its fullest row needs, at least one pair."""
    width = max(1, int((dense != 0).sum(1).max()))
    rows = np.tile([-1.0, 0.0], (len(dense), width))
    for i, row in enumerate(dense):
        for a, d in enumerate(np.flatnonzero(row)):
            rows[i, 2 * a : 2 * a + 2] = d, row[d]
    return torch.tensor(rows)


def cosine(x: np.ndarray, z: np.ndarray) -> np.ndarray:
    def unit(rows: np.ndarray) -> np.ndarray:
        norm = np.linalg.norm(rows, axis=1, keepdims=True)
        return rows / np.where(norm > 0, norm, 1)

    return unit(x) @ unit(z).T


def rbf(x: np.ndarray, z: np.ndarray, length: float) -> np.ndarray:
    square = ((x[:, None] - z[None]) ** 2).sum(-1)
    return np.exp(-0.5 * square / length**2)


def rbf_kernel(length: float) -> SparseRBFKernel:
    kernel = SparseRBFKernel().double()
    kernel.lengthscale = torch.tensor(length, dtype=torch.float64)
    return kernel


@settings(max_examples=60, deadline=None, derandomize=True)
@given(matrices, matrices, st.floats(0.5, 3.0))
def test_against_dense_matrices(x: np.ndarray, z: np.ndarray, length: float) -> None:
    """Rows of different widths, rows without a feature, features on one side only."""
    cases = [
        (SparseLinearKernel(), cosine),
        (SparseLinearKernel(normalize=False), lambda x, z: x @ z.T),
        (rbf_kernel(length), lambda x, z: rbf(x, z, length)),
    ]
    for kernel, dense in cases:
        with torch.no_grad():
            K = covariance(kernel, packed(x), packed(z))
            batched = covariance(kernel, packed(x)[None], packed(z)[None])[0]
            diagonal = variance(kernel, packed(x))
        np.testing.assert_allclose(K, dense(x, z), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(batched, dense(x, z), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(diagonal, dense(x, x).diagonal(), rtol=1e-9, atol=1e-9)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(matrices, st.permutations(range(D)), st.integers(0, 3))
def test_order_and_width_do_not_matter(x: np.ndarray, order: list[int], extra: int) -> None:
    rows = packed(x)
    ids, values = unpack(rows)
    shuffle = torch.tensor([a for a in order if a < ids.shape[1]])
    unused = rows.new_tensor([-1.0, 0.0]).repeat(len(rows), extra)
    other = torch.cat([pack(ids[:, shuffle], values[:, shuffle]), unused], -1)
    for kernel in (SparseLinearKernel(), rbf_kernel(1.3)):
        with torch.no_grad():
            K = covariance(kernel, rows, rows)
            torch.testing.assert_close(covariance(kernel, other, rows), K)
            torch.testing.assert_close(covariance(kernel, rows, other), K)


def test_pack_and_unpack() -> None:
    ids = torch.tensor([[3, 1], [0, -1]])
    values = torch.tensor([[0.5, 2.0], [1.5, 0.0]], dtype=torch.float64)
    rows = pack(ids, values)
    assert rows.tolist() == [[3, 0.5, 1, 2], [0, 1.5, -1, 0]]
    for part, expected in zip(unpack(rows), (ids.double(), values), strict=True):
        torch.testing.assert_close(part, expected)


def test_a_row_without_features() -> None:
    rows = packed(np.array([[0.0] * D, [1.0] + [0.0] * (D - 1)]))
    with torch.no_grad():
        linear = covariance(SparseLinearKernel(), rows, rows)
    np.testing.assert_array_equal(linear, [[0, 0], [0, 1]])
    nothing = torch.tensor([[-1.0, 0.0]] * 3, dtype=torch.float64)
    assert inner_product(rows[:, :2], nothing).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_batches_of_one_side() -> None:
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(2, 3, D)), rng.normal(size=(4, D))
    rows = torch.stack([packed(x[0]), packed(x[1])])
    expected = x @ z.T
    np.testing.assert_allclose(inner_product(rows, packed(z)), expected, rtol=1e-12)
    np.testing.assert_allclose(inner_product(packed(z), rows), expected.swapaxes(1, 2), rtol=1e-12)


def test_refusals() -> None:
    rows = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    for kernel in (SparseLinearKernel(), SparseRBFKernel()):
        with pytest.raises(NotImplementedError, match="last_dim_is_batch"):
            kernel.forward(rows, rows, last_dim_is_batch=True)


class _Largest(TorchDispatchMode):
    """Remembers the size in bytes of the largest tensor that any operation makes."""

    size = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in tree_leaves(out):
            if isinstance(part, Tensor):
                stored = part._nnz() if part.is_sparse else part.untyped_storage().nbytes() / 8
                self.size = max(self.size, int(stored) * 8)
        return out


def test_the_gauge_sees_large_tensors() -> None:
    with _Largest() as largest:
        torch.zeros(1000, 1000, dtype=torch.float64).sum()
    assert largest.size == 8_000_000


@pytest.mark.parametrize("kernel", [SparseLinearKernel(), SparseRBFKernel().double()])
def test_many_features_stay_sparse(kernel: SparseLinearKernel | SparseRBFKernel) -> None:
    """300,000 features, each of 25,000 tokens with twelve of them: as a dense matrix, 60 GB."""
    per_token, per_sequence, sequences = 12, 50, 500
    X = [
        [
            [str(per_token * (per_sequence * n + t) + a) for a in range(per_token)]
            for t in range(per_sequence)
        ]
        for n in range(sequences)
    ]
    tracemalloc.start()
    try:
        encoder = FeatureEncoder(features="bag").fit(X)
        encoded = encoder.transform(X)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(encoder.attributes) == 300_000
    assert sum(rows.nbytes for rows in encoded) == 25_000 * per_token * 2 * 8
    assert peak < 150e6

    rows = torch.from_numpy(np.concatenate(encoded))
    # Every row of z is one of x.
    x, z = rows[:20_000:10], rows[:10_000:20]
    with torch.no_grad(), _Largest() as largest:
        K = covariance(kernel, x, z)
        turned = covariance(kernel, z, x)
    assert K.shape == (2_000, 500)
    assert ((K - 1).abs() < 1e-12).sum(0).tolist() == [1] * 500
    torch.testing.assert_close(turned, K.mT)
    assert largest.size < 50e6
