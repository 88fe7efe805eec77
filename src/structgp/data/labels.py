"""Labels as names and as numbers, and checks that they fit their sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from structgp.data.batch import MISSING
from structgp.data.graphs import Shape, flat_labels
from structgp.data.schemes import Allowed
from structgp.data.token_forms import length
from structgp.errors import InputError

UNSEEN = -2
"""Index of a label that training never saw."""


@dataclass
class LabelEncoder:
    """Labels <-> 0 to V-1, as in ``classes``; None becomes ``MISSING``, an unknown label ``UNSEEN``."""

    classes: list[str] = field(default_factory=list)
    integers: bool = False
    """True if labels were given, and are returned, as numbers."""

    def fit(self, y: Iterable[Iterable[str | None]]) -> LabelEncoder:
        self.classes = sorted({label for labels in y for label in labels if label is not None})
        return self

    def transform(self, y: Iterable[Iterable[str | None]]) -> list[np.ndarray]:
        index: dict[str | None, int] = {label: i for i, label in enumerate(self.classes)}
        index[None] = MISSING
        return [np.array([index.get(v, UNSEEN) for v in labels], dtype=np.int64) for labels in y]

    def names(self, indices: Iterable[int]) -> list[str]:
        # Python's integers index a list faster than NumPy's.
        places = indices.tolist() if isinstance(indices, np.ndarray) else indices
        return list(map(self.classes.__getitem__, places))


def as_label_lists(y: Any, name: str = "y") -> list[Any]:
    """y as a list, with a generator read out; InputError if it cannot be a list of label sequences."""
    remedy = "pass one list of labels per sequence, in a list"
    if isinstance(y, str | bytes | Mapping | set | frozenset):
        raise InputError(name, f"expected a list of label sequences, got a {type(y).__name__}", remedy)
    return listed(y, name, "label sequences", remedy)


def listed(given: Any, name: str, what: str, remedy: str) -> list[Any]:
    """``given`` as a list of ``what``; InputError if it cannot be iterated over."""
    try:
        return list(given)
    except TypeError:
        problem = f"expected a list of {what}, got a {type(given).__name__}"
        raise InputError(name, problem, remedy) from None


def check_labels(
    X: Sequence[Any], y: Sequence[Any], name: str = "y", first: int = 0
) -> list[list[str | None]]:
    """y as lists of labels, None where one is missing, after checking that each fits its sequence of X.
    first : number of the first sequence."""
    if len(X) != len(y):
        problem = f"{len(y)} label sequences for {len(X)} sequences of tokens"
        raise InputError(name, problem, "pass one per sequence")
    for n, (x, labels) in enumerate(zip(X, y, strict=True), first):
        place = f"{name}[{n}]"
        is_row = hasattr(labels, "__len__") and len(getattr(labels, "shape", (0,))) == 1
        if isinstance(labels, str | Mapping | set | frozenset) or not is_row:
            kind, remedy = type(labels).__name__, "pass a list"
            if len(shape := getattr(labels, "shape", ())) > 1:
                kind, remedy = (
                    f"{kind} of shape {tuple(shape)}",
                    "pass a list; for an image, structure=grid()",
                )
            raise InputError(place, f"expected a list of labels, got a {kind}", remedy)
        n_tokens = length(x, f"X[{n}]")
        if len(labels) != n_tokens:
            problem = f"{len(labels)} labels for {n_tokens} tokens"
            raise InputError(place, problem, "give every token one label, or None")
        for t, label in enumerate(labels):
            if label is not None and not isinstance(label, str):
                remedy = "convert labels with str(); None stands for a missing label"
                raise InputError(f"{place}[{t}]", f"label {label!r} is not a string", remedy)
    return [[None if label is None else str(label) for label in labels] for labels in y]


def check_all_labelled(X: Sequence[Any], y: Sequence[Any]) -> list[list[str]]:
    """Like ``check_labels``, but every token must have a label."""
    return all_labelled(check_labels(X, y))


def all_labelled(found: list[list[str | None]]) -> list[list[str]]:
    """The labels as they are; InputError where one is missing."""
    for n, labels in enumerate(found):
        if None in labels:
            place = f"y[{n}][{labels.index(None)}]"
            raise InputError(place, "the token has no label", "leave such sequences out, or label them")
    return found  # type: ignore[return-value]


def only_one_class(label: str, place: str) -> InputError:
    """The error for data in which all tokens have the same label."""
    problem = f"every token has the same label, {label!r}: only one class"
    return InputError(place, problem, "pass data with at least two labels")


def check_several(classes: Sequence[str], layers: Sequence[str]) -> None:
    """InputError unless there are at least two labels, and at least two in each layer."""
    if len(classes) < 2:
        raise only_one_class(classes[0], "y")
    for layer in layers:
        own = [label.split("=", 1)[1] for label in classes if label.startswith(f"{layer}=")]
        if len(own) < 2:
            problem = f"every token has the same label, {own[0]!r}" if own else "no token has a label"
            raise InputError("y", f"{problem} in layer {layer!r}", "leave the layer out, or pass more data")


def by_layer(layers: Sequence[str], values: Sequence[Any]) -> dict[str, list[Any]]:
    """Splits values of variables, which come one layer after the other, into a dict by layer; the layer's
    name is removed from labels."""
    n, found = len(values) // len(layers), {}
    for k, layer in enumerate(layers):
        start, own = f"{layer}=", []
        for value in values[k * n : (k + 1) * n]:
            if isinstance(value, str):
                value = value.removeprefix(start)
            elif isinstance(value, dict):
                value = {
                    label.removeprefix(start): p for label, p in value.items() if label.startswith(start)
                }
            elif isinstance(value, list):
                value = [label.removeprefix(start) for label in value]
            own.append(value)
        found[layer] = own
    return found


def node_labels(
    shapes: Sequence[Shape], y: Sequence[Any], layers: Sequence[str], name: str = "y"
) -> list[list[str | None]]:
    """The labels of all nodes of each example, in order; with layers, one layer after the other, each label
    with its layer's name before it."""
    nodes = [shape.nodes for shape in shapes]
    if len(nodes) != len(y):
        problem = f"{len(y)} labellings for {len(nodes)} examples"
        raise InputError(name, problem, "pass one per example")
    if not layers:
        parts = enumerate(zip(y, shapes, strict=True))
        return check_labels(nodes, [flat_labels(v, s, f"{name}[{n}]") for n, (v, s) in parts], name)
    for n, labels in enumerate(y):
        if not isinstance(labels, Mapping) or set(labels) != set(layers):
            got = (
                ", ".join(map(str, labels)) if isinstance(labels, Mapping) else f"a {type(labels).__name__}"
            )
            problem = f"expected a dict with {', '.join(layers)}, got {got}"
            raise InputError(f"{name}[{n}]", problem, "pass one list of labels per layer")
    each = [check_labels(nodes, [labels[layer] for labels in y], name) for layer in layers]
    return [
        [
            None if v is None else f"{layer}={v}"
            for layer, labels in zip(layers, of, strict=True)
            for v in labels
        ]
        for of in zip(*each, strict=True)
    ]


def check_obeyed(rules: Allowed, y: Iterable[tuple[int, np.ndarray]], classes: Sequence[str]) -> None:
    """InputError for the first of the numbered label sequences that breaks the rules."""
    for n, sequence in y if not rules.follows_freely else ():
        t = rules.breaks(sequence.tolist())
        possible = np.ones((len(sequence), len(classes)), bool)
        possible[sequence >= 0] = np.eye(len(classes), dtype=bool)[sequence[sequence >= 0]]
        if t is None and rules.has_labelling(possible):
            continue
        what = "no labelling that agrees with its labels"
        if t is not None:
            before, label = (sequence[t - 1] if t else -1), sequence[t]
            after = before >= 0 and not rules.follows[before, label]
            where = f"after {classes[before]!r}" if after else f"at token {t + 1} of {len(sequence)}"
            what = f"label {classes[label]!r} {where}"
        problem = f"{what}, which the constraints forbid"
        raise InputError(f"y[{n}][{t or 0}]", problem, "correct the labels or the constraints")
