"""Training data as a fit needs it: encoded, checked, with what teaches nothing left out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from structgp.data.encode import FeatureEncoder
from structgp.data.extend import extended
from structgp.data.labels import LabelEncoder, check_labels
from structgp.data.schemes import Allowed, allowed
from structgp.errors import InputError, StructgpWarning


@dataclass(frozen=True)
class Examples:
    """rows : (T, W) a sequence; y : (T,) label indices, ``MISSING`` where there is none; weights : (N,) how
    often each sequence counts, None for once; constraints : on labellings."""

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
    def label_counts(self) -> np.ndarray:
        """(V,) how often each label comes."""
        known = np.concatenate([y[y >= 0] for y in self.y])
        return np.bincount(known, minlength=self.n_labels)

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
    """X and y as examples. ``encoder`` : one to go on with, which learns the new features; ``classes`` :
    labels
    that are known already, in their order."""
    labels_of = check_labels(X, y)
    counts = _check_weights(weights, len(X))
    labelled = [i for i, of in enumerate(labels_of) if not of or any(v is not None for v in of)]
    if len(labelled) < len(X):
        warnings.warn(
            f"{len(X) - len(labelled)} of {len(X)} sequences have no label at all and are left out",
            StructgpWarning,
            stacklevel=3,
        )
    # What counts 0 times is not there: neither its features nor its labels.
    kept = [i for i in labelled if counts is None or counts[i] > 0]
    if len(kept) < len(X):
        X, labels_of = [X[i] for i in kept], [labels_of[i] for i in kept]
        counts = None if counts is None else counts[kept]
    labels = LabelEncoder().fit(labels_of)
    labels.classes = [*classes, *(c for c in labels.classes if c not in set(classes))]
    encoder = FeatureEncoder(features).fit(X) if encoder is None else extended(encoder, X)
    if len(labels.classes) < 2:
        raise InputError(
            "y",
            f"every token has the same label, {labels.classes[0]!r}: only one class",
            "pass data with at least two labels",
        )
    encoded = labels.transform(labels_of)
    rules = None if constraints is None else allowed(constraints, labels.classes)
    if rules is not None:
        _check_obeyed(rules, encoded, labels, kept)
    return Examples(encoder, labels, encoder.transform(X), encoded, counts, rules)


def _check_weights(weights: Any, n: int) -> np.ndarray | None:
    if weights is None:
        return None
    try:
        found = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError("sample_weight", "not all numbers", "pass one number a sequence") from None
    if found.shape != (n,):
        raise InputError(
            "sample_weight", f"shape {found.shape} for {n} sequences", "pass one number a sequence"
        )
    if not np.isfinite(found).all() or (found < 0).any() or not (found > 0).any():
        raise InputError(
            "sample_weight",
            "negative, infinite, or all 0",
            "pass numbers above 0, or some of them 0",
        )
    return found


def _check_obeyed(
    rules: Allowed, y: Sequence[np.ndarray], labels: LabelEncoder, places: Sequence[int]
) -> None:
    for n, sequence in zip(places, y, strict=True):
        t = rules.breaks(sequence.tolist())
        possible = np.ones((len(sequence), len(labels.classes)), bool)
        known = sequence >= 0
        possible[known] = np.eye(len(labels.classes), dtype=bool)[sequence[known]]
        if t is not None or not rules.has_labelling(possible):
            at = 0 if t is None else t
            what = "no labelling that agrees with its labels" if t is None else "a label"
            if t is not None:
                before = labels.classes[sequence[t - 1]] if t and sequence[t - 1] >= 0 else None
                after = f" after {before!r}" if before else f" at token {t + 1} of {len(sequence)}"
                what = f"label {labels.classes[sequence[t]]!r}{after}"
            raise InputError(
                f"y[{n}][{at}]",
                f"{what}, which the constraints forbid",
                "mend the labels or the constraints",
            )
