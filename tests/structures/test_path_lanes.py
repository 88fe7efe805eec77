"""Tree-reweighted sweeps over eight draws side by side, and as an optimiser asks for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from structgp.data.layout import GraphLayout, Tuples
from structgp.structures.graph import path_compiled
from structgp.structures.graph.path_lanes import log_in_place
from structgp.structures.graph.program_choice import choose_program
from structgp.structures.graph.reweighted import Reweighted
from structgp.structures.semirings import LOG

V = 5


def grids(sizes: list[tuple[int, int]]) -> GraphLayout:
    """Rows and columns of pixels; pictures of one row are chains."""
    N = max(h * w for h, w in sizes)
    mask, found = torch.zeros((len(sizes), N), dtype=torch.bool), []
    for b, (h, w) in enumerate(sizes):
        mask[b, : h * w] = True
    for name in ("right", "down"):
        some = []
        for h, w in sizes:
            place = torch.arange(h * w).view(h, w)
            ends = (place[:, :-1], place[:, 1:]) if name == "right" else (place[:-1], place[1:])
            some.append(torch.stack([end.flatten() for end in ends], 1))
        E = max(map(len, some))
        index, there = (
            torch.zeros((len(sizes), E, 2), dtype=torch.long),
            torch.zeros((len(sizes), E), dtype=torch.bool),
        )
        for b, x in enumerate(some):
            index[b, : len(x)], there[b, : len(x)] = x, True
        found.append(Tuples(name, index, there, (0, 0), (V, V)))
    return GraphLayout(mask, tuple(found))


def drawn(layout: GraphLayout, S: int, shared: bool, seed: int = 0) -> list[Tensor]:
    seeded = torch.Generator().manual_seed(seed)
    f = torch.randn((S, *layout.mask.shape, V), generator=seeded, dtype=torch.float64)
    f[:, :, 1, 2] = -torch.inf
    shapes = [(S, V, V) if shared else (S, *t.mask.shape, V, V) for t in layout.tuples]
    return [f, *(torch.randn(shape, generator=seeded, dtype=torch.float64) for shape in shapes)]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("S", [3, 8, 19])
def test_draws_side_by_side_are_as_one_after_the_other(
    shared: bool, S: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = grids([(4, 5), (1, 4), (3, 3), (6, 6)] * 3)
    scores, others = drawn(layout, S, shared), drawn(layout, S, shared, 1)
    found = {}
    for least in (1, S + 1):
        monkeypatch.setattr(path_compiled, "LEAST_DRAWS", least)
        program = Reweighted(layout, tolerance=1e-9, sweeps=500, warm=True)
        first = program.solve(scores)
        found[least] = first, program.solve(others)
    for one, other in zip(*found.values(), strict=True):
        assert one.sweeps > 3
        for a, b in zip(
            (one.log_z, one.node, *one.tables), (other.log_z, other.node, *other.tables), strict=True
        ):
            torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-9)


def test_logarithms() -> None:
    x = np.exp(np.random.default_rng(0).uniform(-690, 600, 1_000))
    found = x.copy()
    log_in_place(found)
    np.testing.assert_allclose(found, np.log(x), atol=1e-11, rtol=1e-12)


def test_an_optimiser_comes_to_the_same_bound_call_by_call() -> None:
    layout = grids([(5, 5), (4, 6)])
    scores = drawn(layout, 4, True)
    answer = choose_program(layout, V, "reweighted")
    climbing = choose_program(layout, V, "reweighted", climbing=True)
    exact = answer.log_total(scores, LOG)
    values = [climbing.log_total(scores, LOG) for _ in range(6)]
    assert all(bool((value >= exact - 1e-5).all()) for value in values)
    assert float((values[0] - exact).abs().max()) < 0.1
    torch.testing.assert_close(values[-1], exact, atol=0.01, rtol=0)
    torch.testing.assert_close(answer.log_total(scores, LOG), exact, atol=0, rtol=0)
