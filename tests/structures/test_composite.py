"""Windows against enumeration of what may stand in each."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from structgp.plan.options import ESTIMATORS
from structgp.structures import PARTS, Chain, Piecewise
from structgp.structures.composite import WIDTHS, windows

every_width = pytest.mark.parametrize("width", [1, 2, 3, 4, 9])


def case(
    lengths: tuple[int, ...] = (4, 1, 3, 2), V: int = 3, S: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    B, T = len(lengths), max(lengths)
    f = 1.5 * torch.randn(S, B, T, V, generator=generator, dtype=torch.float64)
    g = 1.5 * torch.randn(S, V, V, generator=generator, dtype=torch.float64)
    y = torch.randint(V, (B, T), generator=generator)
    return f, g, y, torch.arange(T) < torch.tensor(lengths)[:, None]


def score(f: np.ndarray, g: np.ndarray, y: np.ndarray) -> float:
    return sum(f[t, j] for t, j in enumerate(y)) + sum(g[i, j] for i, j in pairwise(y))


def by_enumeration(f: np.ndarray, g: np.ndarray, y: np.ndarray, width: int, oracles: ModuleType) -> float:
    """All that may stand in each window, with the rest of y left as it is."""
    (T, V), total = f.shape, 0.0
    width = min(width, T)
    for start in range(T - width + 1):
        scores = []
        for inside in oracles.labellings(width, V):
            other = y.copy()
            other[start : start + width] = inside
            scores.append(score(f, g, other))
        total += score(f, g, y) - np.logaddexp.reduce(scores)
    return total


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    V=st.integers(1, 3),
    width=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_windows_by_enumeration(
    lengths: list[int], V: int, width: int, seed: int, oracles: ModuleType
) -> None:
    f, g, y, mask = case(tuple(lengths), V, S=1, seed=seed)
    found = windows(f, g, y, mask, width)
    for b, T in enumerate(lengths):
        one = (f[0, b, :T].numpy(), g[0].numpy(), y[b, :T].numpy())
        expected = by_enumeration(*one, width, oracles)
        assert float(found[0, b]) == pytest.approx(expected, rel=1e-10, abs=1e-10)


def test_each_draw_for_itself(oracles: ModuleType) -> None:
    f, g, y, mask = case(S=3)
    found = windows(f, g, y, mask, 2)
    assert found.shape == (3, 4)
    for s in range(3):
        torch.testing.assert_close(found[s : s + 1], windows(f[[s]], g[[s]], y, mask, 2))


@pytest.mark.parametrize("width", [4, 5, 100])
def test_a_window_that_holds_the_sequence_is_the_chain(width: int) -> None:
    f, g, y, mask = case()
    torch.testing.assert_close(windows(f, g, y, mask, width), Chain().log_prob(f, g, y, mask))


def test_one_position_is_a_softmax() -> None:
    f, g, y, mask = case((1, 1))
    expected = f.log_softmax(-1).gather(-1, y.expand(2, -1, -1)[..., None])[..., 0].sum(-1)
    for width in WIDTHS:
        torch.testing.assert_close(windows(f, g, y, mask, width), expected)


@every_width
def test_gradient(width: int) -> None:
    f, g, y, mask = case((3, 1, 2), V=2)
    f.requires_grad_()
    g.requires_grad_()
    assert torch.autograd.gradcheck(lambda f, g: windows(f, g, y, mask, width), (f, g))


@pytest.mark.parametrize("name", PARTS)
def test_gradient_of_the_parts(name: str) -> None:
    f, g, y, mask = case((3, 1), V=2)
    f.requires_grad_()
    g.requires_grad_()
    assert torch.autograd.gradcheck(lambda f, g: PARTS[name](f, g, y, mask), (f, g))


@pytest.mark.parametrize("name", PARTS)
def test_padding_and_batching_change_nothing(name: str) -> None:
    """Whatever stands there, nan and labels that do not exist included; nor has it a gradient."""
    f, g, y, mask = case()
    expected = PARTS[name](f, g, y, mask)
    wide = torch.nn.functional.pad(mask, (0, 2))
    for filling in (0.0, 1e6, torch.nan):
        f_ = torch.full((2, 4, 6, 3), filling, dtype=torch.float64)
        f_[:, wide] = f[:, mask]
        y_ = torch.full((4, 6), 77)
        y_[wide] = y[mask]
        f_.requires_grad_()
        found = PARTS[name](f_, g, y_, wide)
        torch.testing.assert_close(found, expected)
        (gradient,) = torch.autograd.grad(found.sum(), f_)
        assert (gradient[:, ~wide] == 0).all()
        assert gradient.isfinite().all()
    for b, T in enumerate(mask.sum(-1).tolist()):
        alone = PARTS[name](f[:, [b], :T], g, y[[b], :T], mask[[b], :T])
        torch.testing.assert_close(alone[:, 0], expected[:, b])


def test_a_sequence_of_nothing() -> None:
    f, g, y, mask = case((3, 2))
    mask = mask & torch.tensor([[True], [False]])
    for parts in PARTS.values():
        found = parts(f, g, y, mask)
        assert (found[:, 1] == 0).all()
        torch.testing.assert_close(found[:, :1], parts(f[:, :1], g, y[:1], mask[:1]))


@every_width
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [30.0, 200.0])
def test_finite_at_large_scores(width: int, dtype: torch.dtype, size: float) -> None:
    """Values and gradients, with scores of either sign as large as that."""
    f, g, y, mask = case((5, 2), V=3, S=8)
    f, g = (size * torch.sign(a) for a in (f, g))
    f, g = f.to(dtype).requires_grad_(), g.to(dtype).requires_grad_()
    found = windows(f, g, y, mask, width)
    assert found.dtype == dtype
    assert found.isfinite().all()
    assert (found <= 1e-3).all()
    assert all(a.isfinite().all() for a in torch.autograd.grad(found.sum(), (f, g)))


def test_right_at_moderate_scores_in_single_precision() -> None:
    f, g, y, mask = case((5, 2), V=3, S=8)
    wide = PARTS["composite"](4 * f, 4 * g, y, mask)
    narrow = PARTS["composite"](4 * f.float(), 4 * g.float(), y, mask)
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-4, atol=1e-4)


def test_parts() -> None:
    """One function an entry, and a name for every one that an estimator asks for."""
    f, g, y, mask = case()
    one, all_of_them = PARTS["piecewise"](f, g, y, mask), PARTS["composite"](f, g, y, mask)
    assert one.shape == (2, 4, 1)
    assert all_of_them.shape == (2, 4, 1 + len(WIDTHS))
    torch.testing.assert_close(one[..., 0], Piecewise().log_prob(f, g, y, mask))
    torch.testing.assert_close(all_of_them[..., :1], one)
    for i, width in enumerate(WIDTHS):
        torch.testing.assert_close(all_of_them[..., i + 1], windows(f, g, y, mask, width))
    assert set(PARTS) == {e.parts for e in ESTIMATORS.values()} - {None}


def test_everything_stays_where_the_latent_values_are() -> None:
    """On a device without numbers, which forgives no tensor made elsewhere."""
    f = torch.empty(2, 3, 4, 5, device="meta")
    g = torch.empty(2, 5, 5, device="meta")
    y = torch.zeros(3, 4, dtype=torch.int64, device="meta")
    mask = torch.ones(3, 4, dtype=torch.bool, device="meta")
    for width in (1, 2, 3):
        assert windows(f, g, y, mask, width).shape == (2, 3)
