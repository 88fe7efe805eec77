"""Sets with a guarantee: conformal risk control (Angelopoulos et al., 2024), sequence by sequence.

A set holds everything with a probability of at least lambda. Each calibration sequence has targets (the
true labels of its tokens, its true spans, or its true labelling), and its loss at lambda is the share of
its targets that the sets miss, which never exceeds 1. With n sequences, lambda is the largest number with

    (sum of their losses at lambda + 1) / (n + 1)  <=  1 - coverage.

If a new sequence is exchangeable with those n, its expected loss is then at most 1 - coverage, whatever the
model: tokens of a sequence may depend on each other, and probabilities may be wrong. With one target per
sequence, this is split conformal prediction. Each stratum of lengths has a lambda of its own, and the
guarantee holds in each of them; the bounds of the strata come from the training data, so that they favour
no sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from structgp.errors import InputError

KINDS = ("tokens", "spans", "labellings")
"""Kinds of sets: of the labels of a token, of the spans of a sequence, of the labellings of a sequence."""

STRATUM = 10
"""Smallest number of sequences in a stratum, approximately, times 1 - coverage: a guarantee from finitely
many sequences then gives away a tenth of the loss that is allowed. Not chosen on data."""


@dataclass(frozen=True)
class Targets:
    """The targets that the sets of calibration sequences should hold. sizes : (n,) number of targets of
    each sequence. owner, score : (m,) for each target that a set may miss, the sequence that it belongs to,
    and the largest lambda whose sets hold it; 0 if no set holds it."""

    sizes: np.ndarray
    owner: np.ndarray
    score: np.ndarray

    @staticmethod
    def of(scores: Sequence[np.ndarray]) -> Targets:
        """From the scores of all targets of each sequence. A target with a score of 1 or more is in every
        set."""
        sizes = np.array([len(s) for s in scores], dtype=np.int64)
        owner = np.repeat(np.arange(len(scores)), sizes)
        score = np.concatenate([*scores, np.empty(0)])
        return Targets(sizes, owner[score < 1], score[score < 1])

    def part(self, which: np.ndarray) -> Targets:
        """The targets of some sequences. which : (n,), True for those sequences."""
        here = which[self.owner]
        return Targets(self.sizes[which], (np.cumsum(which) - 1)[self.owner[here]], self.score[here])

    def threshold(self, coverage: float) -> float | None:
        """lambda; None if no set is large enough."""
        allowed = (1 - coverage) * (len(self.sizes) + 1) - 1 + 1e-9
        if allowed < 0:
            return None
        order = np.argsort(self.score, kind="stable")
        score, lost = self.score[order], np.cumsum(1 / self.sizes[self.owner[order]])
        k = int(np.searchsorted(lost, allowed, side="right"))  # the first that must be held
        found = 1.0 if k == len(score) else float(score[k])
        return found if found > 0 else None

    def to_json(self) -> list[list[float]]:
        return [self.sizes.tolist(), self.owner.tolist(), self.score.tolist()]

    @staticmethod
    def from_json(parts: Sequence[Sequence[float]]) -> Targets:
        """ValueError if the parts do not fit each other."""
        sizes, owner, score = parts
        if len(owner) != len(score) or any(not 0 <= i < len(sizes) for i in owner):
            raise ValueError("scores without a sequence")
        return Targets(
            np.array(sizes, dtype=np.int64), np.array(owner, dtype=np.int64), np.array(score, float)
        )


@dataclass(frozen=True)
class Thresholds:
    """values : lambda of each stratum of lengths, the shortest first; None where no set is large enough.
    cuts : the largest length of each stratum but the last."""

    cuts: np.ndarray
    values: list[float | None]

    def of(self, length: int) -> float | None:
        return self.values[int(np.searchsorted(self.cuts, length))]


@dataclass(frozen=True)
class Calibration:
    """The result of calibration. lengths : (n,) those of the calibration sequences. targets : by kind of
    set. quartiles : those of the lengths of training sequences, empty if not known. settings : those under
    which the probabilities were computed; sets must be computed under the same settings."""

    lengths: np.ndarray
    targets: dict[str, Targets]
    quartiles: tuple[int, ...]
    settings: dict[str, Any]

    def thresholds(self, kind: str, coverage: float, by_length: bool = True) -> Thresholds:
        """InputError if there are too few sequences, or if not even the largest sets hold enough."""
        check_coverage(coverage)
        if kind not in self.targets:
            known = ", ".join(map(repr, self.targets))
            raise InputError("of", f"not calibrated for {kind!r}", f"use {known}, or calibrate again")
        targets, n = self.targets[kind], len(self.lengths)
        if n < needed(coverage):
            problem = f"{n} calibration sequences are too few for a coverage of {coverage:g}"
            remedy = (
                f"calibrate with at least {needed(coverage)}, or ask for at most {_below(1 - 1 / (n + 1))}"
            )
            raise InputError("coverage", problem, remedy)
        if targets.threshold(coverage) is None:
            lost = (targets.score == 0) / targets.sizes[targets.owner]
            problem = f"the largest sets of {kind} hold too little in calibration for {coverage:g}"
            most = _below(max(0, 1 - (lost.sum() + 1) / (n + 1)))
            remedy = "calibrate with labels that training saw" if most == "0" else f"ask for at most {most}"
            raise InputError("coverage", problem, remedy)
        cuts = self.cuts(coverage) if by_length else np.empty(0)
        stratum = np.searchsorted(cuts, self.lengths)
        parts = [targets.part(stratum == k) for k in range(len(cuts) + 1)]
        return Thresholds(cuts, [part.threshold(coverage) for part in parts])

    def cuts(self, coverage: float) -> np.ndarray:
        """Bounds between four, two or one strata: how many is decided by ``coverage`` and the number of
        calibration sequences alone."""
        enough = len(self.lengths) * (1 - coverage) / STRATUM + 1e-9
        return np.array(self.quartiles if enough >= 4 else self.quartiles[1:2] if enough >= 2 else ())

    def to_json(self) -> dict[str, Any]:
        targets = {kind: found.to_json() for kind, found in self.targets.items()}
        whole = {"lengths": self.lengths.tolist(), "quartiles": list(self.quartiles)}
        return whole | {"targets": targets, "settings": self.settings}

    @staticmethod
    def from_json(found: dict[str, Any] | None) -> Calibration | None:
        """ValueError if its parts do not fit each other."""
        if found is None:
            return None
        targets = {kind: Targets.from_json(parts) for kind, parts in found["targets"].items()}
        lengths, quartiles = np.array(found["lengths"], dtype=np.int64), tuple(found["quartiles"])
        if any(len(part.sizes) != len(lengths) for part in targets.values()):
            raise ValueError("targets of other sequences")
        return Calibration(lengths, targets, quartiles, found["settings"])


def check_coverage(coverage: Any) -> None:
    if not isinstance(coverage, int | float | np.number) or not 0 < coverage < 1:
        raise InputError("coverage", f"must be between 0 and 1, got {coverage!r}", "use 0.9, for example")


def needed(coverage: float) -> int:
    """The smallest number of calibration sequences with which a coverage can be guaranteed."""
    return math.ceil(1 / (1 - coverage) - 1e-9) - 1


def _below(share: float) -> str:
    """The share as text, rounded down to three decimal places."""
    return f"{math.floor(1000 * share + 1e-9) / 1000:g}"


def label_scores(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(T,) scores of the true labels y (T,) of tokens with probabilities p (T, V): 1 for the most probable
    label, which every set holds, 0 for a label that is not among the V (a negative number)."""
    found = np.where(y < 0, 0.0, p[np.arange(len(y)), np.maximum(y, 0)])
    return np.where(p.argmax(1) == y, 1.0, np.minimum(found, 1 - 1e-12))


def label_sets(p: np.ndarray, threshold: float | None) -> np.ndarray:
    """(T, V) True for the labels that the sets of a sequence hold; without a threshold, for all labels."""
    if threshold is None:
        return np.ones_like(p, dtype=bool)
    return (p >= threshold) | (np.arange(p.shape[1]) == p.argmax(1)[:, None])
