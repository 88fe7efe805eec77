"""Points: each is standard normal, replicates are independent, and each design has its shape."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from structgp.inference.estimators import Noise, Target, designs
from structgp.inference.estimators.designs import Design, draw, replicate_sizes, split
from structgp.inference.estimators.moments import Group

DESIGNS: tuple[Any, ...] = get_args(Design)

every_design = pytest.mark.parametrize("design", DESIGNS)

B, T, V = 2, 3, 2


def target(dtype: torch.dtype = torch.float64, B: int = B, T: int = T, V: int = V) -> Target:
    """Only its shape matters: numbers of T V per sequence, and V V that all sequences share."""
    return Target(
        lambda noise: noise[0].sum((-1, -2)),
        (Group(torch.ones(B, T, dtype=torch.bool), V), Group(None, V * V)),
        torch.ones(B, dtype=torch.float64),
        dtype=dtype,
    )


def points(design: Design, sizes: list[int], seed: int = 0, **shape: int) -> list[Noise]:
    return list(draw(target(**shape), design, sizes, torch.Generator().manual_seed(seed)))


def together(draws: list[Noise]) -> Tensor:
    """(S, B T V + V V)."""
    return torch.cat([torch.cat([eps.flatten(1) for eps in d], 1) for d in draws])


REPLICATES = 400


@cache
def eights(design: Design) -> Tensor:
    """(replicates, 8, coordinates)."""
    return together(points(design, [8] * REPLICATES)).reshape(REPLICATES, 8, -1)


@given(n_draws=st.integers(1, 5000), replicates=st.integers(1, 12), design=st.sampled_from(DESIGNS))
def test_sizes_add_up(n_draws: int, replicates: int, design: Design) -> None:
    """Pairs stay together, no replicate is empty, and sizes differ by one point or one pair."""
    sizes = replicate_sizes(n_draws, replicates, design)
    unit = 2 if design in ("antithetic", "orthogonal") else 1
    assert sum(sizes) == n_draws + n_draws % unit
    assert 1 <= len(sizes) <= replicates
    assert min(sizes) >= unit
    assert all(size % unit == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= unit
    assert len(sizes) == min(replicates, sum(sizes) // unit)


@every_design
def test_shapes(design: Design) -> None:
    found = points(design, [4, 2])
    assert [len(d[0]) for d in found] == [4, 2]
    for d, S in zip(found, (4, 2), strict=True):
        assert d[0].shape == (S, B, T, V)
        assert d[1].shape == (S, V * V)
        assert d[0].dtype == torch.float64
    (narrow,) = draw(target(torch.float32), design, [2], torch.Generator())
    assert narrow[0].dtype == narrow[1].dtype == torch.float32


@every_design
def test_each_coordinate_is_standard_normal(design: Design) -> None:
    """Mean, variance, fourth moment, and the share beyond 1 and 2 standard deviations, of each coordinate
    over 400 replicates of 8 points. Points of a replicate depend on one another, so standard errors are
    taken from the replicates' means; 4.5 of them for 80 comparisons."""
    each = eights(design)
    tail = torch.tensor([0.31731, 0.04550], dtype=torch.float64)
    for function, expected in [
        (lambda e: e, 0.0),
        (lambda e: e.square(), 1.0),
        (lambda e: e.pow(4), 3.0),
        (lambda e: (e.abs() > 1).double(), tail[0]),
        (lambda e: (e.abs() > 2).double(), tail[1]),
    ]:
        means = function(each).mean(1)
        error = means.std(0) / REPLICATES**0.5
        assert ((means.mean(0) - expected).abs() <= 4.5 * error + 1e-12).all()


@every_design
def test_coordinates_of_a_point_are_independent(design: Design) -> None:
    """As far as products, and products of squares, of two coordinates can tell; 4.5 standard errors for 240
    comparisons. Coordinates of a sequence and shared ones are among them, and those of two sequences."""
    each = eights(design)
    for values in (each, each.square() - 1):
        products = torch.einsum("rsi,rsj->rij", values, values) / 8
        off = ~torch.eye(products.shape[-1], dtype=torch.bool)
        error = products.std(0) / REPLICATES**0.5
        assert (products.mean(0).abs() <= 4.5 * error)[off].all()


@every_design
def test_replicates_are_independent(design: Design) -> None:
    """Means, and means of squares, of neighbouring replicates do not go together."""
    each = eights(design)
    summaries = [each[:, 0], each.square().mean(1), each.amax(1)]
    for summary in summaries:
        away = (summary - summary.mean(0)) / summary.std(0)
        correlation = (away[1:] * away[:-1]).mean(0)
        assert (correlation.abs() < 4.5 / REPLICATES**0.5).all()
    assert len(each.reshape(-1).unique()) > each.numel() // 3


@pytest.mark.parametrize("design", ["antithetic", "orthogonal"])
def test_each_point_comes_with_its_mirror_image(design: Design) -> None:
    for d in points(design, [10, 4]):
        half = len(d[0]) // 2
        assert torch.equal(d[0][:half], -d[0][half:])
        assert torch.equal(d[1][:half], -d[1][half:])
        assert len(d[0][:half].abs().unique()) == d[0][:half].numel()


def test_no_mirror_images_elsewhere() -> None:
    for design in ("iid", "sobol"):
        (d,) = points(design, [10])
        assert not torch.isclose(d[0][:5], -d[0][5:]).any()


def test_right_angles_within_each_block() -> None:
    """Of T V directions for a sequence, V^2 that are shared; what is left over is a block too."""
    (d,) = points("orthogonal", [2 * 15])
    for half, n in [(d[0][:15, b].flatten(1), T * V) for b in range(B)] + [(d[1][:15].flatten(1), V * V)]:
        direction = half / half.norm(dim=-1, keepdim=True)
        for start in range(0, 15, n):
            block = direction[start : start + n]
            torch.testing.assert_close(block @ block.T, torch.eye(len(block)).double())
        between = (direction[0] @ direction[n]).abs()
        assert 1e-6 < between < 1 - 1e-6


def test_lengths_are_those_of_normal_vectors() -> None:
    """Squared, chi-square with T V degrees of freedom: mean n, variance 2 n; and lengths of one block do
    not depend on one another."""
    n = T * V
    found = points("orthogonal", [2 * n] * 1000)
    length = torch.stack([d[0][:n, 0].flatten(1).norm(dim=-1) for d in found]).square()
    count = length.numel()
    assert float(length.mean()) == pytest.approx(n, abs=4 * (2 * n / count) ** 0.5)
    # Var[(chi2 - n)^2] = 8 n^2 + 48 n.
    scatter = float((length - n).square().mean())
    assert scatter == pytest.approx(2 * n, abs=4 * ((8 * n * n + 48 * n) / count) ** 0.5)
    product = (length[:, 0] - n) * (length[:, 1] - n)
    assert abs(float(product.mean())) < 4 * float(product.std()) / 1000**0.5


def test_directions_are_uniform() -> None:
    """No sign and no coordinate is preferred: the first direction's mean is 0 and its second moments are 1
    / n, at four standard errors over 2,000 blocks. A QR factor whose signs are left alone has a mean."""
    n = T * V
    first = torch.stack([d[0][0, 0].flatten() for d in points("orthogonal", [2] * 2000, seed=3)])
    first = first / first.norm(dim=-1, keepdim=True)
    assert (first.mean(0).abs() < 4 * (1 / n / 2000) ** 0.5).all()
    second = first.square()
    assert ((second.mean(0) - 1 / n).abs() < 4 * second.std(0) / 2000**0.5).all()


def test_sobol_points_fill_the_cube() -> None:
    """Of 64 points, each 64th of every axis holds exactly one."""
    (d,) = points("sobol", [64])
    cells = (torch.special.ndtr(together([d])) * 64).floor().long()
    for axis in cells.T:
        assert torch.equal(axis.sort().values, torch.arange(64))


def test_sobol_beyond_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dimensions that the table lacks are independent normal numbers; the others are as before."""
    whole = points("sobol", [64])[0]
    monkeypatch.setattr(designs.SobolEngine, "MAXDIM", 4)
    (d,) = points("sobol", [64])
    cells = (torch.special.ndtr(d[0].flatten(2)) * 64).floor().long()
    for b in range(B):
        for axis in range(T * V):
            filled = torch.equal(cells[:, b, axis].sort().values, torch.arange(64))
            assert filled == (axis < 4)
    assert not torch.equal(whole[0][..., -1, :], d[0][..., -1, :])
    many = together(points("sobol", [16] * 200, seed=5))
    assert ((many.var(0) - 1).abs() < 4.5 * (2 / 3200) ** 0.5).all()
    assert (many.mean(0).abs() < 4.5 / 3200**0.5).all()
    products = many.T @ many / 3200 - torch.eye(many.shape[1])
    assert (products.abs() < 4.5 * (2 / 3200) ** 0.5).all()


@every_design
def test_the_generator_alone_decides(design: Design) -> None:
    """And numbers of the global generator are neither used nor moved."""
    torch.manual_seed(1)
    one = together(points(design, [4, 6], seed=7))
    after = torch.rand(())
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(()))
    assert torch.equal(one, together(points(design, [4, 6], seed=7)))
    assert not torch.equal(one, together(points(design, [4, 6], seed=8)))
    generator = torch.Generator().manual_seed(7)
    first, second = (together(list(draw(target(), design, [4], generator))) for _ in range(2))
    assert not torch.isclose(first, second).any()


def test_sequences_do_not_share_sobol_points() -> None:
    """Of one table each has its own shift: means over a replicate are uncorrelated."""
    means = torch.stack([d[0].square().mean((0, 2, 3)) for d in points("sobol", [16] * 400)])
    assert abs(float(torch.corrcoef(means.T)[0, 1])) < 4 / 400**0.5
    (d,) = points("sobol", [16])
    assert not torch.isclose(d[0][:, 0].sort(0).values, d[0][:, 1].sort(0).values).all()


@pytest.mark.parametrize("design", ["antithetic", "orthogonal"])
def test_parts_of_a_replicate(design: Design) -> None:
    """All points, each once, and mirror images together."""
    (d,) = points(design, [10])
    pieces = list(split(d, [4, 2, 4]))
    assert [len(piece[0]) for piece in pieces] == [4, 2, 4]
    found = together(pieces)
    whole = together([d])
    assert torch.equal(found.sort(0).values, whole.sort(0).values)
    assert len(torch.cdist(found, whole).argmin(0).unique()) == 10
    for piece in pieces:
        half = len(piece[0]) // 2
        assert torch.equal(piece[0][:half], -piece[0][half:])
        assert torch.equal(piece[1][:half], -piece[1][half:])


@every_design
def test_one_position_and_one_label(design: Design) -> None:
    (d,) = points(design, [6], B=1, T=1, V=1)
    assert d[0].shape == (6, 1, 1, 1)
    assert d[0].isfinite().all()
