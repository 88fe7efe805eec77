"""The tuples of templates, and their features, read off single examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from structgp import chain, edges, grid, same, tree
from structgp.data.batch import pad
from structgp.data.encode import FeatureEncoder
from structgp.data.graphs import Graph, shape_of
from structgp.data.links import GraphSplit
from structgp.structures import Spec
from structgp.structures.graph.elimination import Elimination
from structgp.structures.graph.factor_graph import Enumeration
from structgp.structures.graph.program_choice import AS_DEAR, MOST_ENTRIES, Mixed, budgets
from structgp.structures.semirings import LOG


def linked(spec: Spec, x: Any, own: dict[str, FeatureEncoder] | None = None) -> tuple[GraphSplit, Any, Any]:
    """What a split makes of one example: itself, the encoded nodes, and the tuples."""
    shape = shape_of(x, spec.form, "x")
    encoder = FeatureEncoder().fit([shape.nodes])
    split = GraphSplit(encoder, spec, own or {}, ["A", "B"])
    rows = encoder.encode(shape.nodes)
    return split, rows, split.links(rows, shape, "x")


def pixels(H: int, W: int) -> list[list[dict[str, str]]]:
    return [[{"w": f"{h}{w}"} for w in range(W)] for h in range(H)]


def test_neighbours_of_a_grid() -> None:
    """Pixel (h, w) of a 2 x 3 grid is number 3 h + w."""
    found = linked(grid(neighbours=8), pixels(2, 3))[2].tuples
    assert [sorted(map(tuple, t.tolist())) for t in found] == [
        [(0, 1), (1, 2), (3, 4), (4, 5)],
        [(0, 3), (1, 4), (2, 5)],
        [(0, 4), (1, 5)],
        [(1, 3), (2, 4)],
    ]


@pytest.mark.parametrize("size", [(1, 1), (1, 4), (4, 1)])
def test_thin_grids(size: tuple[int, int]) -> None:
    found = linked(grid(neighbours=8), pixels(*size))[2].tuples
    assert [len(t) for t in found] == [max(0, size[1] - 1), max(0, size[0] - 1), 0, 0]


def test_equal_words_are_linked_in_turn_or_all() -> None:
    words = [{"w": w, "s": "x" if w.islower() else "X"} for w in ["A", "b", "A", "b", "A"]]
    assert linked(same("w"), words)[2].tuples[0].tolist() == [[0, 2], [1, 3], [2, 4]]
    assert linked(same("w", every=True), words)[2].tuples[0].tolist() == [[0, 2], [1, 3], [0, 4], [2, 4]]
    assert linked(same("w", where={"s": "X"}), words)[2].tuples[0].tolist() == [[0, 2], [2, 4]]


def test_stretches_of_a_chain() -> None:
    pairs, triples = linked(chain(order=2), [{"w": w} for w in "abcd"])[2].tuples
    assert pairs.tolist() == [[0, 1], [1, 2], [2, 3]]
    assert triples.tolist() == [[0, 1, 2], [1, 2, 3]]


def test_features_of_both_ends_stay_apart() -> None:
    """Strings side by side; numbers as sparse features, those of the second end numbered behind."""
    nodes = [
        {"w": "a", "v": np.array([1.0, 2.0]), "n": 5.0},
        {"w": "b", "v": np.array([3.0, 4.0]), "n": 6.0},
    ]
    split, rows, links = linked(tree(features="both ends"), Graph(nodes, parents=[-1, 0]))
    (found,) = split.tuple_rows(1, rows, links)
    assert found[:2].tolist() == [0, 1]
    entries = {int(place): value for place, value in found[2:].reshape(-1, 2) if place >= 0}
    assert entries == {0: 1.0, 1: 2.0, 2: 5.0, 3: 3.0, 4: 4.0, 5: 6.0}


def test_unseen_attributes_of_both_ends_stay_apart() -> None:
    spec = tree(features="both ends")
    encoder = FeatureEncoder("bag").fit([[["a"], ["b"]]])
    split = GraphSplit(encoder, spec, {}, ["A", "B"])
    graph = Graph([["new", "a"], ["new", "b"]], parents=[-1, 0])
    rows = encoder.encode(graph.nodes)
    links = split.links(rows, shape_of(graph, "tree", "x"), "x")
    (found,) = split.tuple_rows(1, rows, links)
    places = [int(p) for p in found.reshape(-1, 2)[:, 0] if p >= 0]
    assert len(set(places)) == 4
    assert sorted(p for p in places if p < 4) == [0, 3]  # 'a' of the first end, 'b' of the second


def test_features_of_the_last_token() -> None:
    split, rows, links = linked(tree(features=["w"]), Graph([{"w": "a"}, {"w": "b"}], parents=[-1, 0]))
    assert split.tuple_rows(1, rows, links).tolist() == [[1]]


def test_edges_have_features_of_their_own() -> None:
    graph = Graph([{"w": "a"}, {"w": "b"}], edges={"e": [(1, 0)]}, features={"e": np.array([[7.0, 8.0]])})
    own = {"edge e": FeatureEncoder().fit([graph.features["e"]])}
    split, rows, links = linked(edges("e", features=True), graph, own)
    assert split.tuple_rows(1, rows, links).reshape(-1, 2).tolist() == [[0, 7], [1, 8]]


def layout_of(sizes: list[tuple[int, int]]) -> Any:
    """One batch of grids of these sizes."""
    shapes = [shape_of(pixels(*size), "grid", "x") for size in sizes]
    encoder = FeatureEncoder().fit([shape.nodes for shape in shapes])
    split = GraphSplit(encoder, grid(), {}, ["A", "B"])
    rows = encoder.transform([shape.nodes for shape in shapes])
    links = [split.links(r, shape, "x") for r, shape in zip(rows, shapes, strict=True)]
    return split(pad(rows, None, encoder.pad_row, range(len(rows))), rows, links).layout


def test_examples_of_several_programs_keep_their_places() -> None:
    layout = layout_of([(2, 2), (1, 3), (3, 2)])
    rows = [torch.tensor([1, 2]), torch.tensor([0])]
    mixed = Mixed(layout, None, tuple((r, Elimination(layout.rows(r))) for r in rows))
    generator = torch.Generator().manual_seed(0)
    scores = [torch.randn(2, 3, 6, 2, generator=generator, dtype=torch.float64)]
    scores += [torch.randn(2, 2, 2, generator=generator, dtype=torch.float64) for _ in range(2)]
    whole = Enumeration(layout)
    torch.testing.assert_close(mixed.log_total(scores, LOG), whole.log_total(scores, LOG))
    torch.testing.assert_close(mixed.node_marginals(scores), whole.node_marginals(scores))
    assert torch.equal(mixed.decode(scores), whole.decode(scores))


def test_large_examples_have_larger_budgets() -> None:
    small, large = budgets(layout_of([(2, 2), (40, 40)])).tolist()
    assert small == MOST_ENTRIES
    assert large == AS_DEAR * 4 * (2 * 40 * 39) > MOST_ENTRIES
    assert budgets(layout_of([(2, 2)]), 7).tolist() == [7]
