"""Labels <-> numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from structgp.data.forms import length
from structgp.errors import InputError

MISSING = -1
"""The index of a missing label."""

UNSEEN = -2
"""The index of a label that training never saw."""


@dataclass
class LabelEncoder:
    """Labels <-> 0 to V-1, in sorted order (``classes``). None becomes ``MISSING``, an unknown label
    ``UNSEEN``."""

    classes: list[str] = field(default_factory=list)

    def fit(self, y: Iterable[Iterable[str | None]]) -> LabelEncoder:
        self.classes = sorted({label for labels in y for label in labels if label is not None})
        return self

    def transform(self, y: Iterable[Iterable[str | None]]) -> list[np.ndarray]:
        index: dict[str | None, int] = {label: i for i, label in enumerate(self.classes)}
        index[None] = MISSING
        return [np.array([index.get(v, UNSEEN) for v in labels], dtype=np.int64) for labels in y]

    def names(self, indices: Iterable[int]) -> list[str]:
        return [self.classes[i] for i in indices]


def check_labels(X: Sequence[Any], y: Sequence[Any], name: str = "y") -> list[list[str | None]]:
    """y as lists of labels, None where one is missing, after checking that each fits its sequence of
    X."""
    if len(X) != len(y):
        raise InputError(
            name, f"{len(y)} label sequences for {len(X)} sequences of tokens", "pass one per sequence"
        )
    return [check_sequence(x, labels, n, name) for n, (x, labels) in enumerate(zip(X, y, strict=True))]


def check_sequence(x: Any, labels: Any, n: int, name: str = "y") -> list[str | None]:
    """The labels of x, sequence number n, as a list, None where one is missing."""
    if isinstance(labels, str) or not hasattr(labels, "__len__"):
        kind = type(labels).__name__
        raise InputError(f"{name}[{n}]", f"expected a list of labels, got a {kind}", "pass a list")
    n_tokens = length(x, f"X[{n}]")
    if len(labels) != n_tokens:
        raise InputError(
            f"{name}[{n}]",
            f"{len(labels)} labels for {n_tokens} tokens",
            "give every token one label, or None",
        )
    for t, label in enumerate(labels):
        if label is not None and not isinstance(label, str):
            raise InputError(
                f"{name}[{n}][{t}]",
                f"label {label!r} is not a string",
                "convert labels with str(); None stands for a missing label",
            )
    return [None if label is None else str(label) for label in labels]


def check_classes(classes: Sequence[str], place: str) -> None:
    """InputError where there is nothing to tell apart."""
    if len(classes) < 2:
        raise InputError(
            place,
            f"every token has the same label, {classes[0]!r}: only one class",
            "pass data with at least two labels",
        )


def check_all_labelled(X: Sequence[Any], y: Sequence[Any]) -> list[list[str]]:
    """Like ``check_labels``, but every token must have a label."""
    whole = []
    for n, labels in enumerate(check_labels(X, y)):
        known = [label for label in labels if label is not None]
        if len(known) < len(labels):
            raise InputError(
                f"y[{n}][{labels.index(None)}]",
                "the token has no label",
                "leave such sequences out, or label them",
            )
        whole.append(known)
    return whole
