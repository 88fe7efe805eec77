"""Labelled data as a fit needs it: labels as numbers, sequences encoded and checked, without those that
teach nothing."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from structgp.data.batch import MISSING
from structgp.data.encode import FeatureEncoder
from structgp.data.schemes import Allowed, allowed
from structgp.data.vocabulary import length
from structgp.errors import InputError, StructgpWarning

UNSEEN = -2
"""The index of a label that training never saw."""


@dataclass
class LabelEncoder:
    """Labels <-> 0 to V-1, as in ``classes``; None becomes ``MISSING``, an unknown label ``UNSEEN``."""

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


def as_list(X: Iterable[Any]) -> list[Any]:
    """X with generators read out; what is not a sequence is left for the encoder to name."""
    return [x if hasattr(x, "__len__") or not isinstance(x, Iterable) else list(x) for x in X]


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
        if isinstance(labels, str) or not hasattr(labels, "__len__"):
            kind = type(labels).__name__
            raise InputError(place, f"expected a list of labels, got a {kind}", "pass a list")
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
    found = check_labels(X, y)
    for n, labels in enumerate(found):
        if None in labels:
            place = f"y[{n}][{labels.index(None)}]"
            raise InputError(place, "the token has no label", "leave such sequences out, or label them")
    return found  # type: ignore[return-value]


def only_one_class(label: str, place: str) -> InputError:
    """The error for data with nothing to tell apart."""
    problem = f"every token has the same label, {label!r}: only one class"
    return InputError(place, problem, "pass data with at least two labels")


@dataclass(frozen=True)
class Examples:
    """Encoded training data.

    rows : one (T, W) matrix per sequence; y : one (T,) array of label indices, ``MISSING`` for missing
    labels; weights : (N,) how often each sequence counts, None for once; constraints : on labellings.

    Of these: n_labels; n_sequences, those with tokens; n_tokens; typical_length, the mean over tokens of
    the length of their sequence; label_counts, (V,) how often each label occurs, sequences counted by their
    weights; in_many_parts, whether no sequence has more than a tenth of the tokens; some_missing, whether
    labels are."""

    encoder: FeatureEncoder
    labels: LabelEncoder
    rows: list[np.ndarray]
    y: list[np.ndarray]
    weights: np.ndarray | None
    constraints: Allowed | None
    n_labels: int = field(init=False)
    n_sequences: int = field(init=False)
    n_tokens: int = field(init=False)
    typical_length: float = field(init=False)
    label_counts: np.ndarray = field(init=False)
    in_many_parts: bool = field(init=False)
    some_missing: bool = field(init=False)

    def __post_init__(self) -> None:
        lengths = np.array([len(r) for r in self.rows])
        n_known = [int((y >= 0).sum()) for y in self.y]
        counted = None if self.weights is None else np.repeat(self.weights, n_known)
        known = np.concatenate([y[y >= 0] for y in self.y])
        vars(self).update(
            n_labels=len(self.labels.classes),
            n_sequences=int((lengths > 0).sum()),
            n_tokens=int(lengths.sum()),
            typical_length=float((lengths**2).sum() / max(1, lengths.sum())),
            label_counts=np.bincount(known, counted, minlength=len(self.labels.classes)),
            in_many_parts=bool(10 * lengths.max() <= lengths.sum()),
            some_missing=sum(n_known) < lengths.sum(),
        )

    def part(self, index: Sequence[int]) -> Examples:
        """Some of the sequences, with all labels and features: those that do not occur in them are like
        ones that were never seen."""
        some = [self.rows[i] for i in index], [self.y[i] for i in index]
        weights = None if self.weights is None else self.weights[list(index)]
        return Examples(self.encoder, self.labels, *some, weights, self.constraints)

    def under(self, constraints: Allowed) -> Examples:
        """The same under constraints that all labellings obey."""
        return replace(self, constraints=constraints)

    @property
    def digest(self) -> str:
        """SHA-256 of all data."""
        digest = hashlib.sha256()
        for array in (*self.rows, *self.y, self.weights):
            if array is not None:
                digest.update(repr(array.shape).encode())
                digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


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

    encoder : a fitted one to extend by the new features, None for a new one; classes : labels besides those
    of y, which with an encoder come first, in their order. Sequences without any label (with a warning) and
    those of weight 0 are replaced by empty ones."""
    labels_of = check_labels(X, y)
    counts = None if weights is None else _check_weights(weights, len(X))
    if any(labels_of) and not any(v is not None for of in labels_of for v in of):
        raise InputError("y", "no token has a label", "label some of them")
    labelled = [i for i, of in enumerate(labels_of) if not of or any(v is not None for v in of)]
    if len(labelled) < len(X):
        message = f"{len(X) - len(labelled)} of {len(X)} sequences have no label at all and are left out"
        warnings.warn(message, StructgpWarning, stacklevel=3)
    used = {i for i in labelled if counts is None or counts[i] > 0}
    # Empty sequences keep the places of the others, which errors name.
    X = [x if i in used else [] for i, x in enumerate(X)]
    labels_of = [of if i in used else [] for i, of in enumerate(labels_of)]
    if len(used) < len(X) and not any(labels_of):
        raise InputError("y", "no token with a label is in a sequence with weight", "label some tokens")
    if not any(labels_of):
        raise InputError("X", "no tokens", "pass at least one sequence with one token")
    known = classes if encoder is not None else ()
    found = {label for labels in labels_of for label in labels if label is not None}
    labels = LabelEncoder([*known, *sorted({*classes, *found} - set(known))])
    encoder = FeatureEncoder(features).fit(X) if encoder is None else encoder.extended(X)
    if len(labels.classes) < 2:
        raise only_one_class(labels.classes[0], "y")
    encoded = labels.transform(labels_of)
    rules = None if constraints is None else allowed(constraints, labels.classes)
    if rules is not None:
        check_obeyed(rules, enumerate(encoded), labels.classes)
    return Examples(encoder, labels, encoder.transform(X), encoded, counts, rules)


def _check_weights(weights: Any, n: int) -> np.ndarray:
    place, remedy = "sample_weight", "pass one number per sequence"
    try:
        found = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(place, "not all numbers", remedy) from None
    if found.shape != (n,):
        raise InputError(place, f"shape {found.shape} for {n} sequences", remedy)
    if not np.isfinite(found).all() or (found < 0).any() or not (found > 0).any():
        remedy = "pass positive numbers, or 0 to leave a sequence out"
        raise InputError(place, "must be finite, not negative, and not all zero", remedy)
    return found


def check_obeyed(rules: Allowed, y: Iterable[tuple[int, np.ndarray]], classes: Sequence[str]) -> None:
    """InputError for the first of the numbered label sequences that the rules forbid."""
    for n, sequence in y:
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
