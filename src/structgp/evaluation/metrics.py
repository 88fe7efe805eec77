"""How good the answers are: token error, conlleval spans, likelihood and calibration.

Labels come as lists of lists of strings, one inner list a sequence. Marginals come as lists of
lists of dicts label -> probability, one dict a token. A label that no dict of its token holds was
never seen in training ('unseen'): it is an error for every decoder, and has no likelihood.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from structgp.errors import InputError

Labels = Sequence[Sequence[str]]
Marginals = Sequence[Sequence[Mapping[str, float]]]

# How far outside [0, 1] rounding may push a probability before it is the caller's mistake.
_ROUNDING = 1e-6


def _check_lengths(y_true: Labels, other: Sequence[Sequence[Any]], name: str) -> None:
    """Raise unless ``other`` has as many sequences, and tokens in each, as ``y_true``."""
    if len(y_true) != len(other):
        raise InputError(
            name,
            f"{len(other)} sequences where y_true has {len(y_true)}",
            "give one sequence for each true one, in the same order",
        )
    for i, (truth, given) in enumerate(zip(y_true, other, strict=True)):
        if len(truth) != len(given):
            raise InputError(
                f"{name}[{i}]",
                f"{len(given)} tokens where y_true[{i}] has {len(truth)}",
                "give one entry for each token",
            )


def _no_tokens() -> InputError:
    return InputError("y_true", "no tokens", "give at least one labelled token")


def token_error(y_true: Labels, y_pred: Labels) -> float:
    """Fraction of tokens whose predicted label differs from the true one, over all sequences."""
    _check_lengths(y_true, y_pred, "y_pred")
    n_tokens = sum(map(len, y_true))
    if n_tokens == 0:
        raise _no_tokens()
    wrong = sum(
        a != b
        for truth, guess in zip(y_true, y_pred, strict=True)
        for a, b in zip(truth, guess, strict=True)
    )
    return wrong / n_tokens


# --- spans -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpanCounts:
    """Numbers of true, predicted and correctly predicted chunks, and what follows from them.

    As in conlleval a ratio over nothing is 0: without chunks, precision, recall and f1 are 0 even
    if the prediction is perfect.
    """

    n_true: int
    n_pred: int
    n_correct: int

    @property
    def precision(self) -> float:
        return self.n_correct / self.n_pred if self.n_pred else 0.0

    @property
    def recall(self) -> float:
        return self.n_correct / self.n_true if self.n_true else 0.0

    @property
    def f1(self) -> float:
        total = self.n_true + self.n_pred
        return 2 * self.n_correct / total if total else 0.0


@dataclass(frozen=True)
class SpanScores(SpanCounts):
    """Counts over all chunks (micro average) and, in ``by_type``, over those of each type."""

    by_type: dict[str, SpanCounts] = field(default_factory=dict)


_CHUNK_TAGS = frozenset("BIES[]")
_BILOU = {"L": "E", "U": "S"}
_OUTSIDE_TAGS = frozenset("O.")
_ALWAYS_STARTS = frozenset("BS[]")
_ALWAYS_ENDS = frozenset("ES[]")


def _parse(label: str) -> tuple[str, str]:
    """Label -> (tag, type); the tag is one of B I E S [ ], or O for a token outside all chunks."""
    tag, _, kind = label.partition("-")
    if tag in _OUTSIDE_TAGS:
        return "O", ""
    if tag in _CHUNK_TAGS:
        return tag, kind
    if tag in _BILOU and kind:
        return _BILOU[tag], kind
    return "S", label


def chunks(labels: Sequence[str]) -> list[tuple[int, int, str]]:
    """The chunks of one sequence as (first token, one past the last token, type), in order.

    A chunk starts at a token that is not outside if it is the first, if the token before it is
    outside, of another type, or tagged E, S, [ or ]; or if it is itself tagged B, S, [ or ]. It
    ends before the next chunk or the next token outside.
    """
    found: list[tuple[int, int, str]] = []
    start, before, before_kind = 0, "O", ""
    for t, (tag, kind) in enumerate([*map(_parse, labels), ("O", "")]):
        boundary = (
            "O" in (tag, before) or kind != before_kind or tag in _ALWAYS_STARTS or before in _ALWAYS_ENDS
        )
        if boundary:
            if before != "O":
                found.append((start, t, before_kind))
            start = t
        before, before_kind = tag, kind
    return found


def span_scores(y_true: Labels, y_pred: Labels) -> SpanScores:
    """Chunk precision, recall and F1 as conlleval computes them.

    A predicted chunk is correct if a true chunk has its first token, last token and type.

    - ``B-X``, ``I-X``, ``E-X``, ``S-X``: chunks of type X by the rules of :func:`chunks`; so an
      ``I-X`` after ``O`` or after another type starts a chunk. ``[-X`` and ``]-X`` are chunks of
      one token, as is ``S-X``. ``L-X`` and ``U-X`` are other names of ``E-X`` and ``S-X``.
    - ``B``, ``I``, ``E``, ``S``, ``[``, ``]`` alone: chunks of one unnamed type, ``""``.
    - ``O`` and ``.``: outside.
    - any other label, such as ``NOUN``: a chunk of one token whose type is the whole label
      (conlleval's option ``-r``).

    A label set need not have an ``O``: then every token is in a chunk. For word segmentation with
    B and I these are the words; for labels without prefix every token is its own chunk and F1 is
    the token accuracy.
    """
    _check_lengths(y_true, y_pred, "y_pred")
    n_true: Counter[str] = Counter()
    n_pred: Counter[str] = Counter()
    n_correct: Counter[str] = Counter()
    for truth, guess in zip(y_true, y_pred, strict=True):
        true_chunks, pred_chunks = set(chunks(truth)), set(chunks(guess))
        n_true.update(kind for *_, kind in true_chunks)
        n_pred.update(kind for *_, kind in pred_chunks)
        n_correct.update(kind for *_, kind in true_chunks & pred_chunks)
    return SpanScores(
        n_true.total(),
        n_pred.total(),
        n_correct.total(),
        by_type={
            kind: SpanCounts(n_true[kind], n_pred[kind], n_correct[kind])
            for kind in sorted(n_true.keys() | n_pred.keys())
        },
    )


# --- likelihood ------------------------------------------------------------------------------


def token_nll(y_true: Labels, marginals: Marginals) -> float:
    """Mean of -log p(y_t) in nats, over the tokens whose true label is in their marginals' dict.

    A true label of probability 0 makes the mean infinite; nothing is clipped.
    """
    _check_lengths(y_true, marginals, "marginals")
    p = [
        float(dist[label])
        for truth, dists in zip(y_true, marginals, strict=True)
        for label, dist in zip(truth, dists, strict=True)
        if label in dist
    ]
    if not p:
        raise InputError(
            "y_true",
            "no token has a label that training saw",
            "score data whose labels occur in the training data",
        )
    if not all(-_ROUNDING <= q <= 1 + _ROUNDING for q in p):
        raise InputError("marginals", "a probability is not in [0, 1]", "pass probabilities")
    return math.fsum(-math.log(q) if q > 0 else math.inf for q in p) / len(p)


def sequence_nll(log_probs: Sequence[float | None]) -> float:
    """Mean of -log p(y | x) per sequence in nats.

    None (a sequence with a label never seen in training) is left out. A log-probability of
    -inf makes the mean infinite.
    """
    known = [float(v) for v in log_probs if v is not None]
    if not known:
        raise InputError(
            "log_probs",
            "no sequence has a log-probability",
            "score sequences whose labels all occur in the training data",
        )
    if any(math.isnan(v) for v in known):
        raise InputError("log_probs", "a log-probability is not a number", "check the model")
    return math.fsum(-v for v in known) / len(known)


# --- calibration -----------------------------------------------------------------------------


@dataclass(frozen=True)
class CalibrationBin:
    """Tokens whose confidence lies in [low, high): their number, mean confidence, accuracy."""

    low: float
    high: float
    confidence: float
    accuracy: float
    count: int


@dataclass(frozen=True)
class Calibration:
    """Expected calibration error in [0, 1] and the bins that are not empty, in rising order."""

    ece: float
    bins: tuple[CalibrationBin, ...]


def calibration(y_true: Labels, marginals: Marginals, n_bins: int = 15) -> Calibration:
    """Does a token called with confidence 0.8 turn out right in 80 of 100 cases?

    The confidence of a token is the largest probability of its dict (among equals, the label that
    comes first); it is right if that label is the true one, so a token whose label is unseen is
    wrong. With equal-width bins b = [i / n_bins, (i + 1) / n_bins), the last one closed::

        ece = sum_b  (n_b / N) |accuracy_b - mean confidence_b|.
    """
    if n_bins < 1:
        raise InputError("n_bins", f"{n_bins} bins", "give at least 1")
    confidence, right = _confidences(y_true, marginals)
    which = np.minimum((confidence * n_bins).astype(np.int64), n_bins - 1)
    bins = tuple(
        CalibrationBin(
            low=b / n_bins,
            high=(b + 1) / n_bins,
            confidence=float(confidence[which == b].mean()),
            accuracy=float(right[which == b].mean()),
            count=int((which == b).sum()),
        )
        for b in np.unique(which).tolist()
    )
    ece = sum(b.count * abs(b.accuracy - b.confidence) for b in bins) / len(confidence)
    return Calibration(ece=float(ece), bins=bins)


@dataclass(frozen=True)
class RiskCoverage:
    """Error of the most confident tokens: ``risk[k - 1]`` of the first k of N, a share
    ``coverage[k - 1]`` = k / N of all. ``area`` is the mean of ``risk``: under the curve."""

    coverage: NDArray[np.float64]
    risk: NDArray[np.float64]
    area: float


def risk_coverage(y_true: Labels, marginals: Marginals) -> RiskCoverage:
    """How much error is left if only the most confident tokens are answered?

    Confidence and right answers are those of :func:`calibration`. Tokens of equal confidence come in
    random order, and the risk is its expectation over that order.
    """
    confidence, right = _confidences(y_true, marginals)
    _, group, size = np.unique(-confidence, return_inverse=True, return_counts=True)
    wrong = np.bincount(group, weights=1 - right) / size
    number = np.arange(1, len(right) + 1)
    risk = np.cumsum(np.repeat(wrong, size)) / number
    return RiskCoverage(number / len(right), risk, float(risk.mean()))


def _confidences(y_true: Labels, marginals: Marginals) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The confidence of every token, and 1 where its most probable label is the true one, else 0."""
    _check_lengths(y_true, marginals, "marginals")
    confidences: list[float] = []
    rights: list[bool] = []
    for i, (truth, dists) in enumerate(zip(y_true, marginals, strict=True)):
        for t, (label, dist) in enumerate(zip(truth, dists, strict=True)):
            if not dist:
                raise InputError(f"marginals[{i}][{t}]", "no labels", "give label -> probability")
            top = max(dist, key=dist.__getitem__)
            if not -_ROUNDING <= dist[top] <= 1 + _ROUNDING:
                raise InputError(
                    f"marginals[{i}][{t}]", f"{dist[top]} is not in [0, 1]", "pass probabilities"
                )
            confidences.append(dist[top])
            rights.append(top == label)
    if not confidences:
        raise _no_tokens()
    confidence = np.clip(np.array(confidences, dtype=np.float64), 0.0, 1.0)
    return confidence, np.array(rights, dtype=np.float64)


# --- all of them -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """Every figure for one set of predictions; fractions, not percentages.

    ``token_nll`` is None if no token's label was seen in training, ``sequence_nll`` if no sequence
    has a log-probability. Either can be ``inf``.
    """

    token_error: float
    span_f1: float
    span_precision: float
    span_recall: float
    token_nll: float | None
    sequence_nll: float | None
    ece: float
    n_tokens: int
    n_sequences: int
    n_unseen_tokens: int

    def as_dict(self) -> dict[str, float | int | None]:
        """Name -> value, in the order of the fields."""
        return dict(vars(self))


def evaluate(
    y_true: Labels, y_pred: Labels, marginals: Marginals, log_probs: Sequence[float | None]
) -> Report:
    """All figures at once.

    Parameters
    ----------
    y_true, y_pred : labels, one list a sequence.
    marginals : dicts label -> probability, one a token.
    log_probs : log p(y_true | x), one a sequence, None where a label was never seen in training.
    """
    _check_lengths(y_true, marginals, "marginals")
    if len(log_probs) != len(y_true):
        raise InputError(
            "log_probs",
            f"{len(log_probs)} values where y_true has {len(y_true)} sequences",
            "give one log-probability (or None) for each sequence",
        )
    n_tokens = sum(map(len, y_true))
    n_unseen = sum(
        label not in dist
        for truth, dists in zip(y_true, marginals, strict=True)
        for label, dist in zip(truth, dists, strict=True)
    )
    spans = span_scores(y_true, y_pred)
    return Report(
        token_error=token_error(y_true, y_pred),
        span_f1=spans.f1,
        span_precision=spans.precision,
        span_recall=spans.recall,
        token_nll=token_nll(y_true, marginals) if n_unseen < n_tokens else None,
        sequence_nll=None if all(v is None for v in log_probs) else sequence_nll(log_probs),
        ece=calibration(y_true, marginals).ece,
        n_tokens=n_tokens,
        n_sequences=len(y_true),
        n_unseen_tokens=n_unseen,
    )
