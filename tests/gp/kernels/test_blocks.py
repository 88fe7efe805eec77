"""Sums over the blocks of a row, and the choice of a kernel by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

from structgp.data.encode import FeatureEncoder
from structgp.data.vocabulary import Block
from structgp.errors import InputError
from structgp.gp.kernels import SparseLinearKernel, SparseRBFKernel, TemplateKernel, covariance, variance
from structgp.gp.kernels.block_sum import BlockSumKernel
from structgp.gp.kernels.build import build_kernel

CATEGORICAL, SPARSE, DENSE = (
    Block("categorical", 0, 2, ("word", "tag")),
    Block("sparse", 2, None),
    Block("dense", 0, 3),
)


def mixed_rows() -> Tensor:
    X = [
        [{"word": "a", "tag": "X", "size": 2.0, "up": True}, {"word": "b", "tag": "X"}],
        [{"word": "a", "size": 1.0}, {"word": "c", "tag": "Y", "more": ["p", "q"]}],
    ]
    encoder = FeatureEncoder().fit(X)
    assert [(b.kind, b.start, b.stop) for b in encoder.blocks] == [
        ("categorical", 0, 2),
        ("sparse", 2, None),
    ]
    rows = encoder.transform(X)
    width = max(r.shape[1] for r in rows)
    wide = [np.hstack([r, np.tile([-1.0, 0.0], (2, (width - r.shape[1]) // 2))]) for r in rows]
    return torch.from_numpy(np.concatenate(wide))


def dense_rows(n: int = 20) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_block_sum_is_the_sum_of_its_parts() -> None:
    rows = mixed_rows()
    parts = [ScaleKernel(TemplateKernel(2)).double(), SparseRBFKernel().double()]
    parts[0].outputscale = 2.5
    kernel = BlockSumKernel(parts, [(0, 2), (2, None)])
    with torch.no_grad():
        first = covariance(parts[0], rows[:, :2], rows[:, :2])
        second = covariance(parts[1], rows[:, 2:], rows[:, 2:])
        torch.testing.assert_close(covariance(kernel, rows, rows), first + second)
        torch.testing.assert_close(variance(kernel, rows), (first + second).diagonal())
        batched = covariance(kernel, rows.reshape(2, 2, -1), rows.reshape(2, 2, -1))
        torch.testing.assert_close(batched[1], (first + second)[2:, 2:])


def test_rows_of_different_widths_meet() -> None:
    rows = mixed_rows()
    wider = torch.cat([rows, rows.new_tensor([-1.0, 0.0]).expand(len(rows), 2)], -1)
    kernel = BlockSumKernel([TemplateKernel(2), SparseLinearKernel()], [(0, 2), (2, None)]).double()
    with torch.no_grad():
        expected = covariance(kernel, rows, rows)
        torch.testing.assert_close(covariance(kernel, wider, rows), expected)
        torch.testing.assert_close(covariance(kernel, rows, wider), expected)


@pytest.mark.parametrize(
    ("choice", "block", "kind", "mode"),
    [
        ("linear", CATEGORICAL, TemplateKernel, "additive"),
        ("template", CATEGORICAL, TemplateKernel, "additive"),
        ("template-product", CATEGORICAL, TemplateKernel, "product"),
        ("linear", Block("sparse", 0, None), SparseLinearKernel, None),
        ("rbf", Block("sparse", 0, None), SparseRBFKernel, None),
        ("rbf", DENSE, RBFKernel, None),
        ("linear", DENSE, LinearKernel, None),
    ],
)
def test_names(choice: str, block: Block, kind: type, mode: str | None) -> None:
    rows = {"categorical": mixed_rows()[:, :2], "sparse": mixed_rows()[:, 2:], "dense": dense_rows()}
    kernel = build_kernel(choice, [block], rows[block.kind], 3.0)
    assert isinstance(kernel, ScaleKernel)
    assert type(kernel.base_kernel) is kind
    assert getattr(kernel.base_kernel, "mode", None) == mode
    assert kernel.outputscale.item() == pytest.approx(3.0)
    assert all(p.dtype == torch.float64 for p in kernel.parameters())
    by_kind = build_kernel({block.kind: choice}, [block], rows[block.kind], 3.0)
    with torch.no_grad():
        expected = covariance(kernel, rows[block.kind], rows[block.kind])
        found = covariance(by_kind, rows[block.kind], rows[block.kind])
    torch.testing.assert_close(found, expected)


def test_amplitude_is_the_prior_variance_and_shared_out() -> None:
    rows = mixed_rows()[[0, 3]]  # every block of these has something in it
    for choice in ("linear", {"sparse": "rbf", "categorical": "template-product"}):
        kernel = build_kernel(choice, [CATEGORICAL, SPARSE], rows, 6.0)
        assert isinstance(kernel, BlockSumKernel)
        assert [k.outputscale.item() for k in kernel.kernels] == pytest.approx([3.0, 3.0])
        with torch.no_grad():
            np.testing.assert_allclose(variance(kernel, rows), [6.0, 6.0], rtol=1e-6)
    kernel = build_kernel("linear", [DENSE], dense_rows(), 2.0)
    with torch.no_grad():
        assert float(variance(kernel, dense_rows()).mean()) == pytest.approx(2.0, rel=1e-6)


def test_length_scale_starts_at_the_median_distance() -> None:
    rows = dense_rows(9)
    distances = [float((a - b).norm()) for i, a in enumerate(rows) for b in rows[:i]]
    kernel = build_kernel("rbf", [DENSE], rows, 1.0)
    assert kernel.base_kernel.lengthscale.item() == pytest.approx(sorted(distances)[17], rel=1e-6)
    same = build_kernel("rbf", [DENSE], rows[:1].repeat(5, 1), 1.0)
    assert same.base_kernel.lengthscale.item() == pytest.approx(1.0)

    sparse = torch.tensor([[0.0, 3.0], [1.0, 4.0], [0.0, 3.0]], dtype=torch.float64)
    kernel = build_kernel("rbf", [Block("sparse", 0, None)], sparse, 1.0)
    assert kernel.base_kernel.lengthscale.item() == pytest.approx(5.0)
    same = build_kernel("rbf", [Block("sparse", 0, None)], sparse[[0, 2]], 1.0)
    assert same.base_kernel.lengthscale.item() == pytest.approx(1.0)


def test_a_kernel_object_keeps_its_own_scale() -> None:
    mine = ScaleKernel(MaternKernel(nu=1.5))
    mine.outputscale = 0.7
    kernel = build_kernel(mine, [DENSE], dense_rows(), 100.0)
    assert kernel.outputscale.item() == pytest.approx(0.7)
    assert next(kernel.parameters()).dtype == torch.float64
    mine = ScaleKernel(SparseRBFKernel())
    mine.outputscale = 0.7
    within = build_kernel(
        {"sparse": mine, "categorical": "template"}, [CATEGORICAL, SPARSE], mixed_rows(), 4.0
    )
    assert within.kernels[1].outputscale.item() == pytest.approx(0.7)
    assert within.kernels[0].outputscale.item() == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("choice", "blocks", "message"),
    [
        (
            RBFKernel(),
            [CATEGORICAL, SPARSE],
            "kernel: one kernel for features of 2 kinds (categorical, sparse); "
            "pass a dict that gives each kind its kernel",
        ),
        (
            {"dense": "rbf"},
            [CATEGORICAL, SPARSE],
            "kernel: no dense features in the data; name only: categorical, sparse",
        ),
        (
            "cosine",
            [DENSE],
            "kernel: 'cosine' is not a kernel for dense features (arrays); use one of linear, "
            "linear+matern, linear+rbf, linear+rbf-ard, matern, rbf, rbf-ard, or pass a GPyTorch kernel",
        ),
        (
            {"categorical": "rbf"},
            [CATEGORICAL],
            "kernel: 'rbf' is not a kernel for categorical features (strings); "
            "use one of linear, relevance, template, template-product, or pass a GPyTorch kernel",
        ),
        (
            "template",
            [CATEGORICAL, SPARSE],
            "kernel: 'template' is not a kernel for sparse features (numbers and flags); "
            "use one of linear, rbf, relevance, or pass a GPyTorch kernel",
        ),
    ],
)
def test_choices_that_cannot_be(choice: Any, blocks: list[Block], message: str) -> None:
    with pytest.raises(InputError) as caught:
        build_kernel(choice, blocks, mixed_rows(), 1.0)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("kernel", "block", "message"),
    [
        (RBFKernel(), CATEGORICAL, "a RBFKernel on categorical features (strings), whose rows"),
        (ScaleKernel(RBFKernel()), SPARSE, "a RBFKernel on sparse features (numbers and flags),"),
        (RBFKernel(ard_num_dims=7), DENSE, "RBFKernel does not work on these features"),
        (RBFKernel(active_dims=(99,)), DENSE, "RBFKernel does not work on these features"),
        (TemplateKernel(9), CATEGORICAL, "TemplateKernel does not work on these features"),
    ],
)
def test_a_kernel_that_does_not_fit_the_data_says_so(kernel, block, message) -> None:
    rows = dense_rows() if block is DENSE else mixed_rows()[:, block.start : block.stop]
    whole = Block(block.kind, 0, None)
    with pytest.raises(InputError, match=r"^kernel: ") as caught:
        build_kernel(kernel, [whole], rows, 1.0)
    assert message in str(caught.value)
