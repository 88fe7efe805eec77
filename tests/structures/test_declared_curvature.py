"""Curvature of declared structures: second derivatives of log p, by autograd through all labellings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from structgp.data.layout import GraphLayout, Tuples
from structgp.structures import Declared, grid
from structgp.structures.graph.factor_graph import Enumeration

V, N = 3, 4
COMPLETE, PARTLY = [0, 2, 1, 0], [0, -1, 1, -1]


def square() -> tuple[GraphLayout, list[Tensor]]:
    """One 2 x 2 grid, and one draw of scores, with a table for every edge."""
    pairs = {"right": [[0, 1], [2, 3]], "down": [[0, 2], [1, 3]]}
    there = torch.ones(1, 2, dtype=torch.bool)
    tuples = tuple(Tuples(name, torch.tensor([p]), there, (0, 0), (V, V)) for name, p in pairs.items())
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 1, N, V), (1, 1, 2, V, V), (1, 1, 2, V, V)]
    scores = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return GraphLayout(torch.ones(1, N, dtype=torch.bool), tuples), scores


def hessian(layout: GraphLayout, scores: list[Tensor], y: Tensor, k: int) -> Tensor:
    """Minus the second derivatives of log p(y) in the scores of template k, flat."""

    def value(flat: Tensor) -> Tensor:
        moved = [flat.view_as(s) if n == k else s for n, s in enumerate(scores)]
        return Enumeration(layout).log_prob(moved, y).sum()

    return -torch.autograd.functional.hessian(value, scores[k].flatten())


@pytest.mark.parametrize("labels", [COMPLETE, PARTLY], ids=["complete", "partly"])
def test_tuple_by_tuple(labels: list[int]) -> None:
    """What missing labels gain counts as flat."""
    layout, scores = square()
    y = torch.tensor([labels])
    found = Declared(grid()).bends(scores, y, layout, [None] * 3)
    for k, bend in enumerate(found):
        exact = hessian(layout, scores, y, k).diagonal().view_as(bend)
        torch.testing.assert_close(bend, exact.clamp(min=0), rtol=0, atol=1e-8)


def test_along_a_basis() -> None:
    layout, scores = square()
    y, basis = torch.tensor([COMPLETE]), torch.tensor([[1.0, 0], [-1, 2], [0, -2]], dtype=torch.float64)
    found = Declared(grid()).bends(scores, y, layout, [basis, None, None])[0]
    exact = hessian(layout, scores, y, 0).view(N, V, N, V)
    for t in range(N):
        along = torch.einsum("vr,vw,wr->r", basis, exact[t, :, t], basis)
        torch.testing.assert_close(found[0, t], along, rtol=0, atol=1e-8)


def test_a_shared_table_has_the_sum_over_its_tuples() -> None:
    layout, scores = square()
    y = torch.tensor([COMPLETE])
    apart = Declared(grid()).bends(
        [scores[0], scores[1], scores[2][:, :, :1].expand_as(scores[2])], y, layout, [None] * 3
    )
    shared = Declared(grid()).bends([scores[0], scores[1], scores[2][:, 0, 0]], y, layout, [None] * 3)
    torch.testing.assert_close(shared[2], apart[2].sum(1))


def test_between_nodes() -> None:
    layout, scores = square()
    y = torch.tensor([COMPLETE])
    found = Declared(grid()).bends(scores, y, layout, [None] * 3, [True, False, False])[0]
    exact = hessian(layout, scores, y, 0).view(N, V, N, V)
    for v in range(V):
        torch.testing.assert_close(found[0, v], exact[:, v, :, v], rtol=0, atol=1e-6)


def test_nodes_without_a_label_are_flat_between_nodes() -> None:
    layout, scores = square()
    found = Declared(grid()).bends(
        scores, torch.tensor([PARTLY]), layout, [None] * 3, [True, False, False]
    )[0]
    assert not found[:, :, [1, 3]].any()
    assert not found[:, :, :, [1, 3]].any()
    assert bool((found[:, :, 0, 0] > 0).all())
