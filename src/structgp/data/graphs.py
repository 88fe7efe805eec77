"""Examples that are not sequences (graphs, trees and grids), and answers about their nodes in the shape of
the example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from structgp.data.arrays import ARRAYS
from structgp.errors import InputError


@dataclass(frozen=True)
class Graph:
    """Nodes and the edges that join them.

    nodes : N of them, with features in any form that the tokens of a sequence may have. edges : {name: (E,
    2)} numbers of the nodes that each edge of this name joins; (E, k) where the structure declares k
    labels. features : {name: (E, D)} numbers, or a list of dicts, for edges that have features of their
    own. parents : (N,) the number of each node's parent, -1 or None for a root, where the structure is a
    tree. Labels are in the order of the nodes."""

    nodes: Any
    edges: Mapping[str, Any] = field(default_factory=dict)
    features: Mapping[str, Any] = field(default_factory=dict)
    parents: Sequence[int | None] | None = None

    def __post_init__(self) -> None:
        for name in ("edges", "features"):
            found = getattr(self, name)
            given = {} if found is None else found
            if not isinstance(given, Mapping):
                problem = f"expected a dict by name, got a {type(given).__name__}"
                raise InputError(f"Graph.{name}", problem, f"pass {name}={{name: rows}}")
            object.__setattr__(self, name, {k: rows for k, rows in given.items() if rows is not None})

    def __len__(self) -> int:
        return length_of(self.nodes)


@dataclass(frozen=True)
class Shape:
    """What an example looks like: its nodes as one sequence, the graph that it came with, if any, and (H,
    W) if it is a grid."""

    nodes: Any
    graph: Graph | None = None
    size: tuple[int, int] | None = None

    def fold(self, values: Any, integers: bool = False) -> Any:
        """Values of the nodes, (N, ...) or a list of N, in the shape of the example. Labels of a grid
        become an array (H, W), of numbers if they were given as numbers (``integers``)."""
        if self.size is None:
            return values
        H, W = self.size
        if isinstance(values, np.ndarray):
            return values.reshape(H, W, *values.shape[1:])
        if all(isinstance(v, str) for v in values):
            return np.array([int(v) if integers else v for v in values]).reshape(H, W)
        return [list(values[h * W : (h + 1) * W]) for h in range(H)]


def length_of(nodes: Any) -> int:
    shape = getattr(nodes, "shape", None)  # a scipy-sparse matrix has no length
    return int(shape[0]) if shape is not None and len(shape) else len(nodes)


def shape_of(x: Any, form: str, place: str) -> Shape:
    """The shape of an example, for a structure of this form: 'sequence', 'grid', 'tree' or 'graph'."""
    if form == "grid":
        return _grid(x, place)
    if isinstance(x, Graph):
        return Shape(x.nodes, x)
    if form == "sequence":
        return Shape(x)
    if hasattr(x, "__len__") and not isinstance(x, Mapping | str) and length_of(x) == 0:
        return Shape(x, Graph(x, parents=[]))
    kind, needed = type(x).__name__, "parents=..." if form == "tree" else "edges={...}"
    raise InputError(place, f"expected a Graph, got a {kind}", f"pass structgp.Graph(nodes, {needed})")


def _grid(x: Any, place: str) -> Shape:
    if isinstance(x, Graph):
        raise InputError(
            place, "a Graph where a grid was declared", "pass an array (H, W, D), or rows of tokens"
        )
    if isinstance(x, ARRAYS):
        array = np.asarray(x)
        if array.ndim == 2:  # one number per pixel
            array = array[..., None]
        if array.ndim != 3:
            problem = f"shape {array.shape} is not (H, W, D)"
            raise InputError(place, problem, "pass one array (H, W, D) per image")
        H, W, D = array.shape
        return Shape(array.reshape(H * W, D), size=(H, W))
    rows = list(x) if isinstance(x, Sequence) and not isinstance(x, str) else None
    if rows is None or not all(
        hasattr(row, "__len__") and not isinstance(row, str | Mapping) for row in rows
    ):
        kind = type(x).__name__
        raise InputError(
            place, f"expected a grid, got a {kind}", "pass an array (H, W, D), or rows of tokens"
        )
    widths = sorted({len(row) for row in rows})
    if len(widths) > 1:
        wrong = next(h for h, row in enumerate(rows) if len(row) != len(rows[0]))
        problem = f"{len(rows[wrong])} pixels where the first row has {len(rows[0])}"
        raise InputError(f"{place}[{wrong}]", problem, "pass rows of one length")
    W = widths[0] if widths else 0
    tokens = [token for row in rows for token in row]
    nodes: Any = tokens
    if tokens and isinstance(tokens[0], ARRAYS) and not isinstance(tokens[0], Mapping):
        nodes = np.asarray(tokens)
    return Shape(nodes, size=(len(rows), W))


def flat_labels(y: Any, shape: Shape, place: str) -> list[Any]:
    """The labels of all nodes, in order, of an example that has this shape."""
    if shape.size is None:
        if isinstance(y, str | Mapping) or not hasattr(y, "__len__"):
            return y  # an error that is named later
        return y if isinstance(y, list) else list(y)
    H, W = shape.size
    found: Any = y.tolist() if isinstance(y, ARRAYS) else y
    rows = list(found) if hasattr(found, "__len__") and not isinstance(found, str) else []
    if len(rows) != H:
        raise InputError(
            place, f"{len(rows)} rows of labels for {H} rows of pixels", "give every pixel one label"
        )
    for h, row in enumerate(rows):
        if not hasattr(row, "__len__") or isinstance(row, str) or len(row) != W:
            count = len(row) if hasattr(row, "__len__") and not isinstance(row, str) else "no"
            problem = f"{count} labels for {W} pixels"
            raise InputError(f"{place}[{h}]", problem, "give every pixel one label, or None")
    labels = [label for row in rows for label in row]
    return [str(int(v)) if isinstance(v, int | np.integer) else v for v in labels]


def has_integers(y: Any) -> bool:
    """True if all labels of a grid that are not missing (None) are whole numbers, as in images, or
    flags."""
    rows = y.tolist() if isinstance(y, ARRAYS) else y
    there = [v for row in rows for v in row if v is not None]
    return all(isinstance(v, int | np.integer) for v in there)


def parents_of(graph: Graph | None, n: int, place: str) -> np.ndarray:
    """(E, 2) parent and child of each link, from the parents of n nodes. InputError if they are not a
    forest."""
    if n == 0:
        return np.empty((0, 2), dtype=np.int64)
    if graph is None or graph.parents is None:
        raise InputError(place, "no parents", "pass structgp.Graph(nodes, parents=[...]), -1 for a root")
    if not hasattr(graph.parents, "__len__") or isinstance(graph.parents, str):
        problem = f"expected a list, got a {type(graph.parents).__name__}"
        raise InputError(f"{place}.parents", problem, "give one per node, -1 for a root")
    given = [-1 if p is None else p for p in graph.parents]
    if len(given) != n:
        raise InputError(
            f"{place}.parents", f"{len(given)} parents for {n} nodes", "give one per node, -1 for a root"
        )
    try:
        parents = np.asarray(given, dtype=np.float64)
        found = parents.astype(np.int64)
        if parents.ndim != 1:
            raise ValueError
    except (TypeError, ValueError):
        raise InputError(
            f"{place}.parents", "not all numbers", "use numbers of nodes, -1 for a root"
        ) from None
    bad = (found != parents) | (found >= n) | (found < -1) | (found == np.arange(n))
    if bad.any():
        t = int(bad.argmax())
        problem = f"{given[t]!r} is not the number of another node"
        raise InputError(f"{place}.parents[{t}]", problem, f"use -1, or 0 to {n - 1}")
    _check_forest(found, place)
    child = np.flatnonzero(found >= 0)
    return np.stack([found[child], child], 1)


def _check_forest(parents: np.ndarray, place: str) -> None:
    """InputError if some node never leads to a root, which means that there is a circle. All nodes move
    towards their roots at once, each step twice as far as the one before."""
    at, n = parents.copy(), len(parents)
    for _ in range(max(1, n).bit_length() + 1):
        if not (at >= 0).any():
            return
        at = np.where(at >= 0, at[np.maximum(at, 0)], -1)
    if (at >= 0).any():
        t = int((at >= 0).argmax())
        problem = f"the parents of node {t} lead around in a circle"
        raise InputError(f"{place}.parents[{t}]", problem, "every node must lead to a root")


def edges_of(graph: Graph | None, name: str, labels: int, n: int, place: str) -> np.ndarray:
    """(E, labels) the tuples that an example has under a name, checked; empty if it has no such name."""
    given = None if graph is None else graph.edges.get(name)
    place = f"{place}.edges[{name!r}]"
    if given is None:
        return np.empty((0, labels), dtype=np.int64)
    given = given if hasattr(given, "__getitem__") else list(given)
    try:
        numbers = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        problem = f"not rows of {labels} numbers"
        raise InputError(place, problem, f"pass (E, {labels}) numbers of nodes") from None
    numbers = numbers if numbers.size else numbers.reshape(-1, labels)
    if numbers.ndim != 2 or numbers.shape[1] != labels:
        raise InputError(place, f"shape {numbers.shape} is not (E, {labels})", "pass one row per edge")
    found = numbers.astype(np.int64)
    bad = ((found != numbers) | (found < 0) | (found >= n)).any(1)
    if bad.any():
        e = int(bad.argmax())
        raise InputError(f"{place}[{e}]", f"{given[e]!r} names no node", f"use numbers from 0 to {n - 1}")
    ordered = np.sort(found, 1)
    loops = (ordered[:, 1:] == ordered[:, :-1]).any(1)
    if loops.any():
        e = int(loops.argmax())
        raise InputError(f"{place}[{e}]", "joins a node with itself", "leave such edges out")
    return found
