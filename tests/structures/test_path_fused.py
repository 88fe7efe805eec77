"""The sweeps as one kernel against the sweeps as torch operations, which enumeration has checked.

On a CUDA device (marker ``gpu``) for real; elsewhere in Triton's interpreter, which is chosen before the
kernels are imported, and so in a process of its own.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from tests.structures.kernels import DEVICE, INTERPRETED, on_kernels, run_interpreted
from torch import Tensor

from structgp.data.layout import GraphLayout, Tuples
from structgp.structures.graph import path_fused
from structgp.structures.graph.path_sweeps import PathCover, PathSweeps
from structgp.structures.graph.reweighted import Reweighted

SIZES = (2, 2, 3, 2) if INTERPRETED else (5, 4, 6, 5)
"""Draws, rows, columns, labels: the interpreter takes milliseconds for one step."""


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    """All tests below."""
    run_interpreted(__file__)


def test_needs_a_device() -> None:
    cover, scores = problem("cpu")
    assert path_fused.supports(cover, scores[0]) == (
        INTERPRETED and importlib.util.find_spec("triton") is not None
    )


def problem(device: str, neighbours: int = 4) -> tuple[PathCover, list[Tensor]]:
    """Two grids, the second without its last pixel: a shared table to the right, tables of their own below,
    whose tuples name the later pixel first, and on the diagonals."""
    S, H, W, V = SIZES
    at = torch.arange(H * W).view(H, W)
    ends = [
        (at[:, :-1], at[:, 1:]),
        (at[1:], at[:-1]),
        (at[:-1, :-1], at[1:, 1:]),
        (at[:-1, 1:], at[1:, :-1]),
    ]
    mask = torch.ones(2, H * W, dtype=torch.bool)
    mask[1, -1] = False
    tuples = []
    for n, (u, v) in enumerate(ends[: neighbours // 2]):
        index = torch.stack([u.flatten(), v.flatten()], -1).expand(2, -1, -1)
        there = mask.gather(1, index.flatten(1)).view(index.shape).all(-1)
        tuples.append(Tuples(str(n), torch.where(there[..., None], index, 0), there, (0, 0), (V, V)))
    layout = GraphLayout(mask, tuple(tuples))
    generator = torch.Generator().manual_seed(0)
    shapes = [(S, 2, H * W, V), (S, V, V), *((S, *t.mask.shape, V, V) for t in tuples[1:])]
    scores = [torch.randn(s, generator=generator, dtype=torch.float64).to(device) for s in shapes]
    (cover,) = Reweighted(layout.to(device)).covers
    assert isinstance(cover, PathCover)
    return cover, scores


def both(cover: PathCover, scores: list[Tensor], sweeps: int, split: Tensor | None = None) -> None:
    f, *tables = scores
    # Without a tolerance all units take all sweeps, in both ways.
    found = path_fused.solve_fused(cover, f, tables, sweeps, 0.0, split)
    assert found is not None
    walk = PathSweeps(cover.plan, cover.layout.mask, f, cover.edge_tables(f, tables), split)
    wanted = walk.run(sweeps, 0.0, cover, tables)
    for name in ("log_z", "node", "split", "gap"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-9, atol=1e-9)
    for one, other in zip(found.tables, wanted.tables, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    if cover.plan.into.shape[1] > 1:  # one forest alone has nothing to agree on
        assert found.sweeps == wanted.sweeps


@on_kernels
@pytest.mark.parametrize("neighbours", [2, 4, 8])
def test_values_and_gradients(neighbours: int) -> None:
    """Rows alone are exact; two and four directions are not."""
    both(*problem(DEVICE, neighbours), sweeps=2)


@on_kernels
def test_from_a_split() -> None:
    cover, scores = problem(DEVICE)
    S, B, N, V = scores[0].shape
    generator = torch.Generator().manual_seed(1)
    split = torch.randn((S, B * N, 2, V), generator=generator, dtype=torch.float64)
    both(cover, scores, 1, split.to(DEVICE))


@on_kernels
def test_rules() -> None:
    """Impossible labels and pairs of labels."""
    cover, scores = problem(DEVICE)
    scores[0][:, 0, 1, 0] = -torch.inf
    scores[1][:, 0, 1] = -torch.inf
    both(cover, scores, 1)


@on_kernels
def test_nothing_possible_is_left_to_others() -> None:
    cover, (f, *tables) = problem(DEVICE)
    f[0, 0, 0] = -torch.inf
    assert path_fused.solve_fused(cover, f, tables, 1, 0.0, None) is None


@on_kernels
def test_single_precision() -> None:
    cover, (f, *tables) = problem(DEVICE)
    found = path_fused.solve_fused(cover, f.float(), [t.float() for t in tables], 1, 0.0, None)
    wanted = path_fused.solve_fused(cover, f, tables, 1, 0.0, None)
    assert found is not None
    assert wanted is not None
    assert found.log_z.dtype == torch.float32
    torch.testing.assert_close(found.log_z.double(), wanted.log_z, rtol=1e-5, atol=1e-5)
