"""Cholesky factors with and without jitter."""

from __future__ import annotations

import pytest
import torch

from structgp import threads
from structgp.gp import linalg
from structgp.gp.linalg import (
    RELATIVE_JITTER,
    cholesky,
    each_times,
    factor_of_inverse,
    invert_lower_,
    upper_factor_of_inverse,
)


def covariances() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(3, 4, 4, generator=generator, dtype=torch.float64)
    return root @ root.mT + 0.1 * torch.eye(4, dtype=torch.float64)


def test_factor() -> None:
    K = covariances()
    L = cholesky(K)
    assert (L.triu(1) == 0).all()
    size = K.diagonal(dim1=-1, dim2=-2).mean(-1)
    expected = K + RELATIVE_JITTER * size[:, None, None] * torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(L @ L.mT, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_singular_matrices_have_one(size: float) -> None:
    K = torch.full((5, 5), size, dtype=torch.float64)
    L = cholesky(K)
    torch.testing.assert_close(L @ L.mT, K, rtol=1e-6, atol=0)


def test_slightly_indefinite_matrices_have_one() -> None:
    K = torch.diag(torch.tensor([1.0, 1.0, -1e-6], dtype=torch.float64))
    L = cholesky(K)
    torch.testing.assert_close(L @ L.mT, K, rtol=0, atol=2e-5)


def test_a_matrix_that_is_no_covariance() -> None:
    with pytest.raises(torch.linalg.LinAlgError, match="not positive semi-definite"):
        cholesky(torch.diag(torch.tensor([1.0, -0.5], dtype=torch.float64)))


def test_gradient() -> None:
    K = covariances().requires_grad_()
    # The jitter is held fixed in the gradient, so that it has a part of 1e-8 left out.
    assert torch.autograd.gradcheck(lambda K: cholesky(0.5 * (K + K.mT)), K, rtol=1e-4)


def test_factor_of_inverse() -> None:
    P = covariances()
    L = factor_of_inverse(P)
    assert (L.triu(1).abs() < 1e-14).all()
    torch.testing.assert_close(L @ L.mT, torch.linalg.inv(P))
    torch.testing.assert_close(factor_of_inverse(P[0]), L[0])


def test_upper_factors_come_from_lower_triangles() -> None:
    P = covariances()
    U = upper_factor_of_inverse(P.tril())
    assert not U.tril(-1).any()
    torch.testing.assert_close(U @ U.mT, torch.linalg.inv(P))
    singular = torch.ones(2, 3, 3, dtype=torch.float64)
    assert upper_factor_of_inverse(singular.tril()).isfinite().all()


def test_inverse_by_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linalg, "SMALL", 2)
    factor = torch.linalg.cholesky(covariances())
    found = invert_lower_(factor.clone())
    assert not found.triu(1).any()
    torch.testing.assert_close(found @ factor, torch.eye(factor.shape[-1]).double().expand_as(factor))


def test_inverses_of_batches_within_larger_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linalg, "SMALL", 2)
    factor = torch.linalg.cholesky(covariances())
    n = factor.shape[-1]
    whole = torch.zeros(2, len(factor), 3, n, n + 1, dtype=torch.float64)
    inside = whole[:, :, 1, :, :n]
    inside.copy_(factor)
    assert invert_lower_(inside) is inside
    torch.testing.assert_close(whole[1, :, 1, :, :n] @ factor, torch.eye(n).double().expand_as(factor))


def test_each_matrix_of_a_batch_has_its_own_jitter() -> None:
    eye = torch.eye(3, dtype=torch.float64)
    bad = torch.ones(3, 3, dtype=torch.float64) - 1e-6 * eye
    together = cholesky(torch.stack([eye, bad]))
    assert torch.equal(together[0], cholesky(eye[None])[0])
    torch.testing.assert_close(together[1] @ together[1].mT, bad, atol=1e-4, rtol=0)


def test_a_matrix_of_zeros_has_a_factor() -> None:
    factor = cholesky(torch.zeros(2, 4, 4, dtype=torch.float64))
    assert factor.isfinite().all()
    assert factor.abs().max() < 1e-3


@pytest.mark.parametrize("n", [1, 5, 9, 30])
def test_products_with_triangular_matrices(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linalg, "SMALL", 4)
    generator = torch.Generator().manual_seed(n)
    x, y, lower = (torch.randn(k, n, generator=generator, dtype=torch.float64) for k in (7, 7, n))
    lower = lower.tril()
    torch.testing.assert_close(linalg.times_lower(x, lower), x @ lower)
    bend = y @ y.T
    total = torch.eye(n, dtype=torch.float64)
    linalg.add_upper_gram(total, x, bend @ x)
    torch.testing.assert_close(total.triu(), (torch.eye(n) + x.T @ bend @ x).triu())
    found = linalg.factor_from_upper(total)
    whole = total.triu() + total.triu(1).T
    torch.testing.assert_close(found @ found.T, torch.linalg.inv(whole))


@pytest.mark.parametrize("inference", [False, True])
def test_matrices_shared_out_to_threads(inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with one thread, even beside one that is singular, which has a jitter of its own."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 30, 30, generator=generator, dtype=torch.float64)
    matrices, vectors = x @ x.mT + torch.eye(30), torch.randn(5, 30, generator=generator).double()
    matrices[4] = 1.0
    monkeypatch.setattr(threads, "WORTH_A_THREAD", 1)
    found = []
    for n in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=n: n)
        with torch.inference_mode(inference):
            roots = upper_factor_of_inverse(matrices)
            found.append((roots, each_times(roots, vectors), each_times(roots.mT, vectors)))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one[:4], two[:4], rtol=1e-12, atol=1e-12)
        assert two[4].isfinite().all()
    roots, products, _ = found[1]
    torch.testing.assert_close(products, torch.einsum("rij,rj->ri", roots, vectors))
    torch.testing.assert_close(roots[:4] @ roots[:4].mT, matrices[:4].inverse())
    assert not roots.requires_grad


def test_products_with_each_matrix_have_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    vectors = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    matrices = torch.arange(36, dtype=torch.float64).view(4, 3, 3)
    for _ in range(50):  # two threads that write into one tensor fail now and then
        vectors.grad = None
        each_times(matrices, vectors).sum().backward()
        torch.testing.assert_close(vectors.grad, matrices.sum(1))


def test_no_matrices_have_no_factors() -> None:
    assert upper_factor_of_inverse(torch.zeros(2, 0, 0)).shape == (2, 0, 0)
