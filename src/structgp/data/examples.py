"""Training data as a fit needs it: encoded and checked, without the sequences that teach nothing."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from structgp.data.encode import FeatureEncoder
from structgp.data.labels import LabelEncoder, check_classes, check_labels
from structgp.data.schemes import Allowed, allowed
from structgp.errors import InputError, StructgpWarning


def as_list(X: Iterable[Any]) -> list[Any]:
    """X with generators read out; what is not a sequence is left for the encoder to name."""
    return [x if hasattr(x, "__len__") or not isinstance(x, Iterable) else list(x) for x in X]


@dataclass(frozen=True)
class Examples:
    """rows : one (T, W) matrix per sequence; y : one (T,) array of label indices, ``MISSING`` for missing
    labels; weights : (N,) how often each sequence counts, None for once; constraints : on labellings."""

    encoder: FeatureEncoder
    labels: LabelEncoder
    rows: list[np.ndarray]
    y: list[np.ndarray]
    weights: np.ndarray | None
    constraints: Allowed | None

    @property
    def n_labels(self) -> int:
        return len(self.labels.classes)

    @property
    def n_sequences(self) -> int:
        """The number of sequences with tokens."""
        return sum(len(r) > 0 for r in self.rows)

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.rows))

    @property
    def typical_length(self) -> float:
        """The mean over tokens of the length of their sequence."""
        return sum(len(r) ** 2 for r in self.rows) / max(1, self.n_tokens)

    @property
    def digest(self) -> str:
        """SHA-256 of all data."""
        digest = hashlib.sha256()
        for array in (*self.rows, *self.y, self.weights):
            if array is not None:
                digest.update(repr(array.shape).encode())
                digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    @property
    def label_counts(self) -> np.ndarray:
        """(V,) how often each label occurs, sequences counted by their weights."""
        known = np.concatenate([y[y >= 0] for y in self.y])
        often = None
        if self.weights is not None:
            often = np.repeat(self.weights, [int((y >= 0).sum()) for y in self.y])
        return np.bincount(known, often, minlength=self.n_labels)

    @property
    def in_many_parts(self) -> bool:
        """Whether no sequence has more than a tenth of the tokens."""
        return 10 * max(map(len, self.rows)) <= self.n_tokens

    @property
    def some_missing(self) -> bool:
        return any((y < 0).any() for y in self.y)


def read_examples(
    X: Sequence[Any],
    y: Sequence[Any],
    *,
    features: str = "auto",
    weights: Any = None,
    constraints: Any = None,
    encoder: FeatureEncoder | None = None,
    classes: Sequence[str] = (),
) -> Examples:
    """X and y as examples.

    encoder : a fitted one to extend by the new features, None for a new one; classes : labels besides
    those of y, which with an encoder come first, in their order. Sequences without any label (with a
    warning) and those of weight 0 are replaced by empty ones."""
    labels_of = check_labels(X, y)
    counts = _check_weights(weights, len(X))
    if any(labels_of) and not any(v is not None for of in labels_of for v in of):
        raise InputError("y", "no token has a label", "label some of them")
    labelled = [i for i, of in enumerate(labels_of) if not of or any(v is not None for v in of)]
    if len(labelled) < len(X):
        warnings.warn(
            f"{len(X) - len(labelled)} of {len(X)} sequences have no label at all and are left out",
            StructgpWarning,
            stacklevel=4,
        )
    used = {i for i in labelled if counts is None or counts[i] > 0}
    # Empty sequences keep the places of the others, which errors name.
    X = [x if i in used else [] for i, x in enumerate(X)]
    labels_of = [of if i in used else [] for i, of in enumerate(labels_of)]
    if len(used) < len(X) and not any(labels_of):
        raise InputError("y", "no token with a label is in a sequence with weight", "label some tokens")
    if not any(labels_of):
        raise InputError("X", "no tokens", "pass at least one sequence with one token")
    labels = LabelEncoder().fit(labels_of)
    known = classes if encoder is not None else ()
    labels.classes = [*known, *sorted({*classes, *labels.classes} - set(known))]
    encoder = FeatureEncoder(features).fit(X) if encoder is None else encoder.extended(X)
    check_classes(labels.classes, "y")
    encoded = labels.transform(labels_of)
    rules = None if constraints is None else allowed(constraints, labels.classes)
    if rules is not None:
        check_obeyed(rules, enumerate(encoded), labels)
    return Examples(encoder, labels, encoder.transform(X), encoded, counts, rules)


def _check_weights(weights: Any, n: int) -> np.ndarray | None:
    if weights is None:
        return None
    try:
        found = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError("sample_weight", "not all numbers", "pass one number per sequence") from None
    if found.shape != (n,):
        raise InputError(
            "sample_weight", f"shape {found.shape} for {n} sequences", "pass one number per sequence"
        )
    if not np.isfinite(found).all() or (found < 0).any() or not (found > 0).any():
        raise InputError(
            "sample_weight",
            "must be finite, not negative, and not all zero",
            "pass positive numbers, or 0 to leave a sequence out",
        )
    return found


def check_obeyed(rules: Allowed, y: Iterable[tuple[int, np.ndarray]], labels: LabelEncoder) -> None:
    """InputError for the first of the numbered label sequences that the rules forbid."""
    for n, sequence in y:
        t = rules.breaks(sequence.tolist())
        possible = np.ones((len(sequence), len(labels.classes)), bool)
        known = sequence >= 0
        possible[known] = np.eye(len(labels.classes), dtype=bool)[sequence[known]]
        if t is None and rules.has_labelling(possible):
            continue
        what = "no labelling that agrees with its labels"
        if t is not None:
            before, label = (sequence[t - 1] if t else -1), sequence[t]
            after = before >= 0 and not rules.follows[before, label]
            where = f"at token {t + 1} of {len(sequence)}"
            where = f"after {labels.classes[before]!r}" if after else where
            what = f"label {labels.classes[label]!r} {where}"
        raise InputError(
            f"y[{n}][{t or 0}]",
            f"{what}, which the constraints forbid",
            "correct the labels or the constraints",
        )
