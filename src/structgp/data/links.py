"""The tuples of every template in an example, and their features.

``Links`` holds what one example has besides the features of its nodes; ``GraphSplit`` finds these links,
and turns padded batches of nodes into batches of graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structgp.data.batch import UNUSED, Batch, GraphRows
from structgp.data.encode import FeatureEncoder
from structgp.data.graphs import Shape, edges_of, length_of, parents_of
from structgp.data.layout import GraphLayout, Tuples
from structgp.data.vocabulary import RowLayout
from structgp.errors import InputError, warn_caller


@dataclass(frozen=True)
class Links:
    """The links of one example, for every template but the nodes: ``tuples``, (E, a) the tokens of each
    tuple, and ``own``, (E, W) the tuples' own features, None where they have none."""

    tuples: tuple[np.ndarray, ...]
    own: tuple[np.ndarray | None, ...]


class TupleView(RowLayout):
    """What a template sees of the features of the tokens in its tuples: the categorical columns of each
    place side by side, and everything else as one block of sparse features.

    template : has ``features``, ``without``, ``ends`` and ``labels``. encoder : of the tokens, or of the
    tuples' own features."""

    dense_width = 0

    def __init__(self, encoder: FeatureEncoder, template: Any) -> None:
        names, self.own = template.features, template.ends == "own"
        self.places = list(range(template.labels)) if template.ends == "both" else [template.labels - 1]
        self.places = [0] if self.own else self.places
        self.node: Any = encoder if names is None else encoder.only(names)
        if template.without:
            self.node = encoder.without(template.without)
        marks = [f"@{j + 1}" for j in self.places] if len(self.places) > 1 else [""]
        self.templates = [f"{name}{mark}" for mark in marks for name in self.node.templates]
        self.has_sparse = bool(self.node.has_sparse or self.node.dense_width)
        self.lay_out()

    def rows(self, rows: np.ndarray, index: np.ndarray) -> np.ndarray:
        """(E, W) features of the tuples ``index`` (E, a), from the encoder's rows (T, W') of tokens, or of
        the tuples themselves."""
        rows = self.node.select(rows)
        chosen = [rows if self.own else rows[index[:, j]] for j in self.places]
        P, D = len(self.node.templates), self.node.dense_width
        parts = [part[:, :P] for part in chosen]
        known, n = D + self.node.n_sparse, len(chosen)
        for j, part in enumerate(chosen if self.has_sparse else ()):
            ids = np.broadcast_to(np.arange(D) + j * known, (len(part), D))
            parts.append(np.stack([ids, part[:, P : P + D]], -1).reshape(len(part), 2 * D))
            found = part[:, P + D :].reshape(len(part), (part.shape[1] - P - D) // 2, 2).copy()
            place, unseen = found[..., 0], found[..., 0] >= self.node.n_sparse
            there = place >= 0
            far = n * known + (place - self.node.n_sparse) * n + j
            found[..., 0] = np.where(there, np.where(unseen, far, place + D + j * known), place)
            parts.append(found.reshape(len(part), 2 * found.shape[1]))
        return np.concatenate(parts, 1)


class GraphSplit:
    """What each template of a structure sees of the tokens and the links between them.

    spec : of the structure. encoder : of the nodes; own : by template name, the encoders of tuples that
    have features of their own. classes : the labels; those of a layer begin with its name and '='. views :
    one per template, None for a template whose scores are a constant table. node, next : as in
    ``FeatureSplit``."""

    next = None
    is_whole = False

    def __init__(
        self, encoder: FeatureEncoder, spec: Any, own: Mapping[str, FeatureEncoder], classes: Sequence[str]
    ) -> None:
        self.encoder, self.spec, self.own = encoder, spec, dict(own)
        self.spans = spans_of(spec.layers, classes)
        self.node: Any = encoder.without(spec.node.without) if spec.node.without else encoder
        self.views: list[Any] = [self._view(template) for template in spec.templates]

    def _view(self, template: Any) -> Any:
        if template.rule == "node":
            return self.node
        if template.is_constant:
            return None
        return TupleView(self.own[template.name] if template.ends == "own" else self.encoder, template)

    def sizes(self, k: int) -> tuple[int, ...]:
        """Number of labels at each place of template k."""
        return tuple(stop - start for start, stop in self._places(self.spec.templates[k]))

    def _places(self, template: Any) -> list[tuple[int, int]]:
        return [self.spans[layer] for layer in template.layers or ("",) * template.labels]

    def links(self, rows: np.ndarray, shape: Shape, place: str) -> Links:
        """The tuples of an example, whose nodes are encoded as ``rows`` (T, W)."""
        n, found, own = len(rows), [], []
        self._check_names(shape, place)
        for template in self.spec.templates:
            if template.rule in ("node", "length"):
                continue
            index = self._tuples(template, rows, shape, n, place)
            found.append(index)
            own.append(self._own(template, shape, len(index), place) if template.ends == "own" else None)
        return Links(tuple(found), tuple(own))

    def _check_names(self, shape: Shape, place: str) -> None:
        """InputError for edges, or features of edges, that have another name than those of the structure:
        it may be misspelt. A structure without edges, or without features of theirs, leaves out all."""
        edges = [t for t in self.spec.templates if t.rule == "edge"]
        own, names = [t for t in edges if t.ends == "own"], {t.key for t in edges}
        parts = ("edges", "edges", edges), ("features", "features of edges", own)
        for field, what, templates in parts if shape.graph is not None else ():
            known, given = [t.key for t in templates], getattr(shape.graph, field)
            strange = [name for name, rows in given.items() if name not in names and length_of(rows)]
            if known and strange:
                problem = f"the structure {self.spec} has {what} named {', '.join(map(repr, known))}"
                remedy = "rename these, declare them, or leave them out"
                raise InputError(f"{place}.{field}[{strange[0]!r}]", problem, remedy)

    def _tuples(self, template: Any, rows: np.ndarray, shape: Shape, n: int, place: str) -> np.ndarray:
        a = template.labels
        if template.rule == "next":
            return np.arange(max(0, n - a + 1))[:, None] + np.arange(a)
        if template.rule == "tie":
            second = np.arange(n)
            both = np.stack([second + template.offset[1], second], 1)
            return both[(both[:, 0] >= 0) & (both[:, 0] < n)]
        if template.rule == "parent":
            return parents_of(shape.graph, n, place)
        if template.rule == "edge":
            return edges_of(shape.graph, template.key, a, n, place)
        if template.rule == "offset":
            return _at_offset(shape.size or (0, 0), template.offset)
        return self._same(template, rows)

    def _same(self, template: Any, rows: np.ndarray) -> np.ndarray:
        """(E, 2) pairs of tokens with the same value of a feature."""
        if not len(rows):
            return np.empty((0, 2), dtype=np.int64)
        (column,) = self.encoder.columns_named([template.key])
        ids = rows[:, column]
        there = ids >= 0
        for name, values in template.where:
            (other,) = self.encoder.columns_named([name])
            known = self.encoder.values[other]
            there &= np.isin(rows[:, other], [known[v] for v in values if v in known])
        links: list[tuple[int, int]] = []
        before: dict[float, list[int]] = {}
        for t in np.flatnonzero(there).tolist():
            earlier = before.setdefault(ids[t], [])
            links += [(s, t) for s in (earlier if template.every else earlier[-1:])]
            earlier.append(t)
        return np.array(links, dtype=np.int64).reshape(-1, 2)

    def _own(self, template: Any, shape: Shape, n: int, place: str) -> np.ndarray:
        given = None if shape.graph is None else shape.graph.features.get(template.key)
        place = f"{place}.features[{template.key!r}]"
        if n == 0:
            return np.empty((0, len(self.own[template.name].pad_row)))
        if given is None:
            raise InputError(place, f"no features for {n} edges", "pass one row of features per edge")
        found = self.own[template.name].encode(given, place)
        if len(found) != n:
            raise InputError(place, f"{len(found)} rows of features for {n} edges", "pass one row per edge")
        return found

    def tuple_rows(self, k: int, rows: np.ndarray, links: Links) -> np.ndarray:
        """(E, W) features of the tuples of template k in one example."""
        j = k - self._n_nodes_before(k)
        own = links.own[j]
        return self.views[k].rows(rows if own is None else own, links.tuples[j])

    def _n_nodes_before(self, k: int) -> int:
        return sum(t.rule in ("node", "length") for t in self.spec.templates[:k])

    def __call__(self, batch: Batch, rows: Sequence[np.ndarray], links: Sequence[Links]) -> Batch:
        """Turns a batch of nodes into a batch of graphs. rows, links : those of all examples, to which
        ``batch.index`` refers."""
        index = batch.index.tolist()
        T, templates = batch.mask.shape[1], self.spec.templates
        x = self.node.select(batch.x)
        found_rows: list[Tensor | None] = []
        masks: list[Tensor] = []
        tuples: list[Tuples] = []
        for k, template in enumerate(templates):
            if template.rule in ("node", "length"):
                found_rows.append(x if template.rule == "node" else None)
                masks.append(batch.mask)
                continue
            j = k - self._n_nodes_before(k)
            some = [links[i].tuples[j] for i in index]
            places, mask = _padded(some, template.labels)
            for place, layer in enumerate(template.layers):
                places[..., place] += T * self.spec.layers.index(layer)
            masks.append(mask)
            spans = self._places(template)
            first, sizes = tuple(s for s, _ in spans), tuple(e - s for s, e in spans)
            tuples.append(Tuples(template.name, places * mask[..., None], mask, first, sizes))
            view, width = self.views[k], places.shape[1]
            found_rows.append(
                None
                if view is None
                else _padded_rows([self.tuple_rows(k, rows[i], links[i]) for i in index], view, width)
            )
        graph = GraphRows(self._layout(batch, tuples), tuple(found_rows), tuple(masks))
        return replace(batch, x=x, graph=graph)

    def _layout(self, batch: Batch, tuples: Sequence[Tuples]) -> GraphLayout:
        layers, (B, T) = self.spec.layers, batch.mask.shape
        if not layers:
            return GraphLayout(batch.mask, tuple(tuples))
        spans = torch.tensor([self.spans[layer] for layer in layers])  # (L, 2)
        span = spans.repeat_interleave(T, 0).expand(B, -1, -1)
        return GraphLayout(batch.mask.repeat(1, len(layers)), tuple(tuples), span)


def spans_of(layers: Sequence[str], classes: Sequence[str]) -> dict[str, tuple[int, int]]:
    """First label of each layer and one past its last; without layers, the span of all labels, under ''."""
    if not layers:
        return {"": (0, len(classes))}
    found = {}
    for layer in layers:
        places = [i for i, label in enumerate(classes) if label.startswith(f"{layer}=")]
        if not places:
            problem = f"no token has a label of layer {layer!r}"
            raise InputError("y", problem, "label some, or leave the layer out")
        found[layer] = (places[0], places[-1] + 1)
    return found


def _at_offset(size: tuple[int, int], offset: tuple[int, int]) -> np.ndarray:
    """(E, 2) pairs of a pixel of a grid and the pixel at an offset (rows, columns) from it."""
    (H, W), (down, right) = size, offset
    place = np.arange(H * W).reshape(H, W)
    first = place[: max(0, H - down), max(0, -right) : max(0, W - right) if right > 0 else W]
    second = place[down:, max(0, right) : W + right if right < 0 else W]
    return np.stack([first.ravel(), second.ravel()], 1) if first.size else np.empty((0, 2), dtype=np.int64)


def _padded(tuples: Sequence[np.ndarray], a: int) -> tuple[Tensor, Tensor]:
    """(B, E, a) index and (B, E) mask of the tuples of B examples, padded to the largest number of
    tuples."""
    E = max((len(t) for t in tuples), default=0)
    index, mask = np.zeros((len(tuples), E, a), dtype=np.int64), np.zeros((len(tuples), E), dtype=bool)
    for b, t in enumerate(tuples):
        index[b, : len(t)], mask[b, : len(t)] = t, True
    return torch.from_numpy(index), torch.from_numpy(mask)


def _padded_rows(rows: Sequence[np.ndarray], view: RowLayout, n: int) -> Tensor:
    """(B, E, W) features of tuples, with ``pad_row`` at padding."""
    width = max(r.shape[1] for r in rows)
    width = max(width, len(view.pad_row) + 2 * view.has_sparse)
    unused = np.tile(UNUSED, (width - len(view.pad_row)) // 2)
    found = np.tile(np.concatenate([view.pad_row, unused]), (len(rows), n, 1))
    for b, r in enumerate(rows):
        if len(r):
            found[b, : len(r), : r.shape[1]] = r
    return torch.from_numpy(found)


def check_edges(spec: Any, shapes: Sequence[Shape]) -> None:
    """InputError if the structure declares edges of a name that no example has; a warning if these have
    features that it does not use."""
    graphs = [shape.graph for shape in shapes if shape.graph is not None]
    there = {name for graph in graphs for name, rows in graph.edges.items() if length_of(rows)}
    for template in spec.templates:
        name = template.key
        if template.rule == "edge" and name not in there:
            raise InputError("X", f"no example has edges {name!r}", "pass some, or declare none")
        is_plain = template.rule == "edge" and template.ends != "own"
        if is_plain and any(length_of(g.features.get(name, ())) for g in graphs):
            warn_caller(f"features of edges {name!r} are not used; declare edges({name!r}, features=True)")


def own_encoders(spec: Any, shapes: Sequence[Shape]) -> dict[str, FeatureEncoder]:
    """Encoders of the edges' own features, by template name."""
    found = {}
    for template in spec.templates:
        if template.ends == "own":
            graphs = [shape.graph for shape in shapes if shape.graph is not None]
            given = [g.features[template.key] for g in graphs if template.key in g.features]
            if not any(map(length_of, given)):
                place = f"features[{template.key!r}]"
                problem = f"no example has features of edges {template.key!r}"
                raise InputError(
                    place, problem, "pass Graph(..., features={name: (E, D)}), or features=False"
                )
            found[template.name] = FeatureEncoder().fit(given)
    return found
