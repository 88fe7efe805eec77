"""Labels <-> numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from structgp.data.forms import length
from structgp.errors import InputError


@dataclass
class LabelEncoder:
    """Labels <-> 0..V-1, in sorted order (``classes``). An unknown label becomes -1."""

    classes: list[str] = field(default_factory=list)

    def fit(self, y: Iterable[Iterable[str]]) -> LabelEncoder:
        self.classes = sorted({label for labels in y for label in labels})
        return self

    def transform(self, y: Iterable[Iterable[str]]) -> list[np.ndarray]:
        index = {label: i for i, label in enumerate(self.classes)}
        return [np.array([index.get(v, -1) for v in labels], dtype=np.int64) for labels in y]

    def names(self, indices: Iterable[int]) -> list[str]:
        return [self.classes[i] for i in indices]


def check_labels(X: Sequence[Any], y: Sequence[Any]) -> list[list[str]]:
    """y as lists of labels, after checking that each fits its sequence of X."""
    if len(X) != len(y):
        raise InputError(
            "y", f"{len(y)} label sequences for {len(X)} sequences of tokens", "pass one for each"
        )
    checked = []
    for n, (x, labels) in enumerate(zip(X, y, strict=True)):
        if isinstance(labels, str) or not hasattr(labels, "__len__"):
            kind = type(labels).__name__
            raise InputError(f"y[{n}]", f"a {kind} where a list of labels belongs", "pass a list")
        n_tokens = length(x, f"X[{n}]")
        if len(labels) != n_tokens:
            raise InputError(
                f"y[{n}]",
                f"{len(labels)} labels for {n_tokens} tokens",
                "give every token exactly one label",
            )
        for t, label in enumerate(labels):
            if not isinstance(label, str):
                raise InputError(
                    f"y[{n}][{t}]", f"label {label!r} is not a string", "convert labels with str()"
                )
        checked.append([str(label) for label in labels])
    return checked
