"""Small data for every kind of declared structure, and direct enumeration of its labellings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from structgp import Graph, Prior, StructuredGPClassifier, chain, edges, grid, layers, same, segments, tree
from structgp.structures import Spec

N = 14


@dataclass(frozen=True)
class Case:
    """A declared structure with examples and their labels."""

    spec: Spec
    X: list[Any]
    y: list[Any]

    def fit(self, **more: Any) -> StructuredGPClassifier:
        settings: dict[str, Any] = {"prior": Prior(data_weight=1.0), "n_draws": 4, "constraints": None}
        given = {name: more.pop(name) for name in list(more) if name in FIT}
        return StructuredGPClassifier(structure=self.spec, **settings | more).fit(self.X, self.y, **given)


FIT = ("X_dev", "y_dev", "sample_weight", "early_stopping", "callback", "checkpoint")


def _tokens(rng: np.random.Generator, labels: list[str]) -> list[dict[str, str]]:
    """Tokens whose word tells their label, half of the time."""
    words = [label if rng.random() < 0.5 else rng.choice(list("xyz")) for label in labels]
    return [{"w": str(word), "s": str(rng.choice(list("uv")))} for word in words]


def _walk(rng: np.random.Generator, n: int, labels: str = "abc") -> list[str]:
    """Labels that like to stay as they are."""
    found = [str(rng.choice(list(labels)))]
    while len(found) < n:
        found.append(found[-1] if rng.random() < 0.6 else str(rng.choice(list(labels))))
    return found


def _each(make: Callable[[np.random.Generator, int], tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    rng = np.random.default_rng(0)
    pairs = [make(rng, 2 + i % 3) for i in range(N)]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _sequence(rng: np.random.Generator, n: int) -> tuple[Any, Any]:
    y = _walk(rng, n + 1)
    return _tokens(rng, y), y


def _spans(rng: np.random.Generator, n: int) -> tuple[Any, Any]:
    y = (["O", "B-X", "I-X", "I-X", "O"] if rng.random() < 0.5 else ["B-X", "I-X", "O", "O"])[: n + 1]
    return _tokens(rng, y), y


def _tree(rng: np.random.Generator, n: int) -> tuple[Any, Any]:
    y, x = _walk(rng, n + 1), None
    x = Graph(_tokens(rng, y), parents=[-1, *(int(rng.integers(i)) for i in range(1, n + 1))])
    return x, y


def _image(rng: np.random.Generator, n: int) -> tuple[Any, Any]:
    y = np.array(_walk(rng, 2 * n, "012"), dtype=np.int64).reshape(2, n)
    return np.stack([y + rng.normal(0, 0.7, y.shape), rng.normal(0, 1, y.shape)], -1), y


def _rows(rng: np.random.Generator, n: int) -> tuple[Any, Any]:
    y = _walk(rng, 2 * n)
    tokens = _tokens(rng, y)
    return [tokens[:n], tokens[n:]], [y[:n], y[n:]]


def _two(rng: np.random.Generator, n: int) -> tuple[Any, Any]:
    first = _walk(rng, n, "ab")
    second = [{"a": "p", "b": "q"}[v] if rng.random() < 0.8 else "r" for v in first]
    return _tokens(rng, first), {"pos": first, "chunk": second}


def _graph(k: int, own: bool) -> Callable[[np.random.Generator, int], tuple[Any, Any]]:
    def make(rng: np.random.Generator, n: int) -> tuple[Any, Any]:
        y = _walk(rng, n + 1)
        found = [rng.permutation(n + 1)[:k] for _ in range(n)]
        rows = {"cites": rng.normal(0, 1, (n, 2))} if own else {}
        return Graph(_tokens(rng, y), edges={"cites": np.stack(found)}, features=rows), y

    return make


CASES: dict[str, Case] = {
    "order 2": Case(chain(order=2), *_each(_sequence)),
    "skip": Case(chain() + same("w"), *_each(_sequence)),
    "tree": Case(tree(), *_each(_tree)),
    "tree features": Case(tree(features="both ends"), *_each(_tree)),
    "grid": Case(grid(), *_each(_image)),
    "grid 8": Case(grid(neighbours=8), *_each(_rows)),
    "grid features": Case(grid(features="both ends"), *_each(_image)),
    "layers": Case(layers(pos=chain(), chunk=chain(), ties=(0, 1)), *_each(_two)),
    "edges": Case(edges("cites", symmetric=True), *_each(_graph(2, False))),
    "edges features": Case(edges("cites", features=True), *_each(_graph(2, True))),
    "three": Case(edges("cites", labels=3), *_each(_graph(3, False))),
    "segments": Case(segments(3), *_each(_spans)),
}


@dataclass(frozen=True)
class Enumerated:
    """All labellings of one example under the posterior mean. labellings : (C, N) numbers of labels. p :
    (C,) their probabilities."""

    labellings: np.ndarray
    p: np.ndarray

    def marginals(self, n_labels: int) -> np.ndarray:
        """(N, V)."""
        hot = np.eye(n_labels)[self.labellings]  # (C, N, V)
        return np.einsum("c,cnv->nv", self.p, hot)

    def given(self, known: dict[int, int]) -> Enumerated:
        """Of those with these labels."""
        keep = np.all([self.labellings[:, n] == v for n, v in known.items()], 0)
        return Enumerated(self.labellings[keep], self.p[keep] / self.p[keep].sum())

    def of(self, y: Any) -> float:
        return float(self.p[(self.labellings == np.asarray(y)).all(1)].sum())

    @property
    def entropy(self) -> float:
        return float(-(self.p * np.log(self.p)).sum())


def enumerated(model: StructuredGPClassifier, X: list[Any]) -> Iterator[Enumerated]:
    """From the scores of the posterior mean: sums over templates written out tuple by tuple."""
    asked = model.ask(X)
    spec, classes = model.model_.spec, model.model_.labels.classes
    found: dict[int, Enumerated] = {}
    for batch, at in asked.potentials(n_draws=0):
        scores = [x[0].numpy() for x in at.scores]
        for b, i in enumerate(batch.index.tolist()):
            found[i] = _all_labellings(scores, batch.layout, b, spec, classes)
    return (found[i] for i in range(len(asked.rows)))


def _all_labellings(scores: list[np.ndarray], layout: Any, b: int, spec: Spec, classes: Any) -> Enumerated:
    mask, n_layers = layout.mask[b].numpy(), max(1, len(spec.layers))
    T = len(mask) // n_layers
    n = int(mask[:T].sum())
    ranges, firsts = [], {}
    for name in spec.layers or [""]:
        own = [v for v, c in enumerate(classes) if not name or c.startswith(f"{name}=")]
        firsts[name] = own[0]
        ranges += [own] * n
    every = np.array(list(product(*ranges)))
    total, others = np.zeros(len(every)), iter(layout.tuples)
    for template, g in zip(spec.templates, scores, strict=True):
        if template.rule == "node":
            layer = template.layers[0] if template.layers else ""
            at = list(firsts).index(layer) * n
            for t in range(n):
                total += g[b, t][every[:, at + t] - firsts[layer]]
        elif template.rule == "length":
            names = [[classes[v] for v in y] for y in every]
            total += np.array([_length_scores(g, y) for y in names])
        else:
            tuples = next(others)
            for e in np.flatnonzero(tuples.mask[b].numpy()):
                table = g if g.ndim == template.labels else g[b, e]
                places = []
                for j, node in enumerate(tuples.index[b, e].tolist()):
                    variable = node % T + n * (node // T)
                    places.append(every[:, variable] - tuples.first[j])
                total += table[tuple(places)]
    p = np.exp(total - total.max())
    return Enumerated(every, p / p.sum())


def _length_scores(h: np.ndarray, y: list[str]) -> float:
    """Of the spans X of a BIO labelling; I-X after O begins one too. h : (1, L + 1)."""
    found, length = 0.0, 0
    for label, after in zip(y, [*y[1:], "O"], strict=True):
        length = 0 if label == "O" else length + 1
        if length and after != "I-X":
            found += h[0, min(length, h.shape[1]) - 1]
            length = 0
    return found
