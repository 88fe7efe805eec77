"""Examples beyond sequences: what is accepted, and what is refused where, with which remedy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from structgp import (
    Graph,
    InputError,
    Prior,
    StructgpWarning,
    StructuredGPClassifier,
    chain,
    edges,
    grid,
    layers,
    same,
    segments,
    tree,
)

NODES = [{"w": "a"}, {"w": "b"}, {"w": "a"}]
QUICK = {"prior": Prior(data_weight=1), "n_draws": 4}


def fitted(structure: Any, X: Any, y: Any) -> StructuredGPClassifier:
    return StructuredGPClassifier(structure=structure, **QUICK).fit(X, y)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: segments(3) + chain(order=2), "nothing can be added"),
        (lambda: segments(3) + tree(), "nothing can be added"),
        (lambda: layers(a=segments(3), b=chain()), r"layers\.a: must be a structure|nothing can be added"),
        (lambda: segments(3).using("loopy"), "nothing can be added"),
        (lambda: grid() + edges("x"), "a grid and edges do not go together"),
        (lambda: tree().using("auto", -3), "most_entries: must be a number of table entries, got -3"),
        (lambda: edges("x", labels=1), "labels: must be 2 to 4 for 'edge x', got 1"),
        (lambda: edges("x", labels="2"), "labels: must be 2 to 4"),
        (lambda: same("w", where={"s": 3}), "must be a value or several, got 3"),
        (lambda: same("w", where=["a"]), "where: must be a dict"),
        (lambda: tree(features=3), "features: must be names of features, got 3"),
        (lambda: chain().using("gibbs") + same("w").using("loopy"), "cannot add 'gibbs' and 'loopy'"),
        (lambda: Graph(NODES, edges=[(0, 1)]), r"Graph\.edges: expected a dict by name, got a list"),
    ],
)
def test_what_cannot_be_declared(make: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()


@pytest.mark.parametrize(
    ("graph", "structure", "says"),
    [
        (Graph(NODES, parents=3), tree(), r"X\[0\]\.parents: expected a list, got a int"),
        (Graph(NODES, parents=[[-1], [0], [0]]), tree(), r"X\[0\]\.parents: not all numbers"),
        (Graph(NODES, parents=[1, 2, 0]), tree(), "lead around in a circle"),
        (Graph(NODES, parents=[-1, 0]), tree(), "2 parents for 3 nodes"),
        (Graph(NODES, edges={"x": [(0, 3)]}), edges("x"), r"edges\['x'\]\[0\]: .*names no node"),
        (Graph(NODES, edges={"x": [(1, 1)]}), edges("x"), "joins a node with itself"),
        (Graph(NODES, edges={"x": [(0, 1), (2,)]}), edges("x"), "not rows of 2 numbers"),
        (Graph(NODES, edges={"y": [(0, 1)]}), edges("x"), r"X\[0\]\.edges\['y'\]: .*has edges named 'x'"),
        (
            Graph(NODES, edges={"x": [(0, 1)]}, features={"x": [[0.5]], "z": [[0.5]]}),
            edges("x", features=True),
            r"X\[0\]\.features\['z'\]: .*has features of edges named 'x'",
        ),
        (Graph(NODES, edges={"x": []}), edges("x"), "no example has edges 'x'; pass some"),
        (Graph(NODES, edges=None), edges("x"), "no example has edges 'x'"),
    ],
)
def test_errors_name_example_and_remedy(graph: Graph, structure: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        fitted(structure, [graph], [["A", "B", "A"]])


def test_features_that_the_structure_does_not_use() -> None:
    graph = Graph(NODES, edges={"x": [(0, 1), (1, 2)], "y": None}, features={"x": [[0.5], [1.0]]})
    with pytest.warns(StructgpWarning, match=r"features of edges 'x' are not used; .*features=True"):
        model = fitted(edges("x"), [graph], [["A", "B", "A"]])
    assert model.predict([graph]) == [["A", "B", "A"]]


def test_edges_may_be_a_set() -> None:
    model = fitted(edges("x"), [Graph(NODES, edges={"x": {(0, 1), (1, 2)}})], [["A", "B", "A"]])
    assert model.predict([Graph(NODES)]) == [["A", "B", "A"]]


@pytest.mark.parametrize("names", [("tag", "tag2"), ("tag2", "tag")])
def test_a_layer_may_be_named_as_the_beginning_of_another(names: tuple[str, str]) -> None:
    first, second = names
    y = [{first: ["A", "B", "A"], second: ["x", "y", "z"]}] * 4
    model = fitted(layers(**dict.fromkeys(names, chain())), [NODES] * 4, y)
    assert set(model.predict([NODES])[0]) == set(names)
    given = model.predict([NODES], known=[{second: ["x", None, "z"]}])[0]
    assert (given[second][0], given[second][2]) == ("x", "z")


def test_a_layer_without_labels_is_named() -> None:
    with pytest.raises(InputError, match="no token has a label in layer 'v'"):
        fitted(layers(u=chain(), v=chain()), [NODES], [{"u": ["A", "B", "A"], "v": [None] * 3}])


@pytest.mark.parametrize(
    "labels",
    [
        np.array([[0, 1], [1, 0]]),
        torch.tensor([[0, 1], [1, 0]]),
        [[0, 1], [1, None]],
        np.array([[0, None], [1, 0]], dtype=object),
    ],
    ids=["array", "tensor", "lists", "objects"],
)
def test_labels_of_a_grid_may_be_numbers(labels: Any) -> None:
    X = [np.arange(4.0).reshape(2, 2, 1)] * 3
    model = fitted(grid(), X, [labels] * 3)
    found = model.predict(X[:1])[0]
    assert found.shape == (2, 2)
    assert found.dtype.kind == "i"
