"""The greedy choice of inducing rows against a slow reference."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import torch
from gpytorch.kernels import Kernel, LinearKernel, RBFKernel, ScaleKernel
from torch import Tensor

from structgp.gp import choose_inducing
from structgp.gp.kernels import SparseLinearKernel, TemplateKernel, covariance
from structgp.gp.kernels.sparse import pack


def dense_case() -> tuple[Kernel, Tensor]:
    rows = torch.randn(30, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (RBFKernel() + LinearKernel()).double(), rows


def template_case() -> tuple[Kernel, Tensor]:
    """Four by three values: many duplicates among forty rows, some with missing values."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.stack(
        [torch.randint(-1, 3, (40,), generator=generator), torch.randint(0, 3, (40,), generator=generator)],
        -1,
    ).double()
    return ScaleKernel(TemplateKernel(2, "product")).double(), rows


def sparse_case() -> tuple[Kernel, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.rand(30, 12, generator=generator).argsort(-1)[:, :3]
    values = torch.rand(30, 3, generator=generator, dtype=torch.float64) + 0.1
    return SparseLinearKernel(normalize=False), pack(ids, values)


CASES = {"dense": dense_case, "template": template_case, "sparse": sparse_case}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def left_open(K: np.ndarray, chosen: list[int]) -> np.ndarray:
    """Variances given the chosen rows, from the definition."""
    if not chosen:
        return K.diagonal().copy()
    K_xz, K_zz = K[:, chosen], K[np.ix_(chosen, chosen)]
    return (K - K_xz @ np.linalg.solve(K_zz, K_xz.T)).diagonal()


def matrix(kernel: Kernel, rows: Tensor) -> np.ndarray:
    with torch.no_grad():
        return covariance(kernel, rows, rows).numpy()


@each_case
@pytest.mark.parametrize("whole", [True, False], ids=["whole matrix", "row by row"])
def test_each_choice_is_the_most_uncertain(
    case: object, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole:
        module = import_module("structgp.gp.inducing_inputs")  # the package has a function of that name
        monkeypatch.setattr(module, "WHOLE_MATRIX", 0)
    kernel, rows = case()  # type: ignore[operator]
    K = matrix(kernel, rows)
    choice = choose_inducing(kernel, rows, 8)
    chosen = choice.index.tolist()
    assert len(chosen) == len(set(chosen)) == 8
    for m, row in enumerate(chosen):
        left = left_open(K, chosen[:m])
        assert left[row] == pytest.approx(left.max(), rel=1e-8)


def test_order_equals_the_slow_reference() -> None:
    """No ties under this kernel: the order is unique."""
    kernel, rows = dense_case()
    K = matrix(kernel, rows)
    chosen: list[int] = []
    for _ in range(10):
        chosen.append(int(left_open(K, chosen).argmax()))
    assert choose_inducing(kernel, rows, 10).index.tolist() == chosen
    assert choose_inducing(kernel, rows, 4).index.tolist() == chosen[:4]


@each_case
@pytest.mark.parametrize("most", [1, 3, 7])
def test_residual_is_the_share_of_the_trace(case: object, most: int) -> None:
    kernel, rows = case()  # type: ignore[operator]
    K = matrix(kernel, rows)
    choice = choose_inducing(kernel, rows, most)
    left = left_open(K, choice.index.tolist())
    assert choice.residual == pytest.approx(left.sum() / K.trace(), rel=1e-8, abs=1e-12)
    assert 0 <= choice.residual < 1


def test_duplicates_are_never_chosen_and_end_the_choice() -> None:
    kernel, rows = template_case()
    distinct = rows.unique(dim=0)
    assert len(distinct) < len(rows)
    choice = choose_inducing(kernel, rows, len(rows))
    chosen = rows[choice.index]
    assert len(chosen.unique(dim=0)) == len(chosen) == len(distinct)
    assert choice.residual < 1e-6


def test_a_kernel_of_low_rank_ends_the_choice() -> None:
    """A linear kernel in two dimensions: two rows say everything."""
    rows = torch.randn(20, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    choice = choose_inducing(LinearKernel().double(), rows, 10)
    assert len(choice.index) == 2
    assert choice.residual < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_no_row_is_chosen_twice(seed: int) -> None:
    """Not even if rounding is all that is left of every variance."""
    rows = torch.randn(20, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    chosen = choose_inducing(LinearKernel().double(), rows, len(rows), tolerance=0.0).index.tolist()
    assert len(chosen) == len(set(chosen))


def test_tolerance() -> None:
    kernel, rows = dense_case()
    K = matrix(kernel, rows)
    choice = choose_inducing(kernel, rows, len(rows), tolerance=0.05)
    chosen = choice.index.tolist()
    assert left_open(K, chosen).max() <= 0.05 * K.diagonal().max()
    assert left_open(K, chosen[:-1]).max() > 0.05 * K.diagonal().max()


def test_more_than_there_are() -> None:
    kernel, rows = dense_case()
    assert sorted(choose_inducing(kernel, rows[:3], 50).index.tolist()) == [0, 1, 2]
    assert choose_inducing(kernel, rows[:1], 1).index.tolist() == [0]


def test_no_feature_anywhere() -> None:
    nothing = torch.tensor([[-1.0, 0.0]] * 4, dtype=torch.float64)
    choice = choose_inducing(SparseLinearKernel(), nothing, 3)
    assert choice.index.tolist() == [0]
    assert choice.residual == 0
