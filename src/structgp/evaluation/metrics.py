"""Metrics of predictions: token error, conlleval spans, likelihood and calibration.

Labels are lists of lists of strings, one inner list per sequence. Marginals are lists of lists of dicts
label -> probability, one dict per token. A label that is not in its token's dict was never seen in training
('unseen'): it is an error for every decoder, and has no likelihood."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from structgp.data.span_labels import chunks
from structgp.errors import InputError
from structgp.evaluation.score_table import table

Labels = Sequence[Sequence[str]]
Marginals = Sequence[Sequence[Mapping[str, float]]]
LogProbs = Sequence[float | None]

# Distance outside [0, 1] that rounding may explain; a probability further out is a mistake of the caller.
_ROUNDING = 1e-6


def check_lengths(first: Sequence[Sized], other: Sequence[Sized], name: str, of: str = "y_true") -> None:
    """Raise unless ``other`` has as many sequences as ``first``, and as many tokens in each. Messages call
    them ``name`` and ``of``."""
    if len(first) != len(other):
        problem = f"{len(other)} sequences where {of} has {len(first)}"
        raise InputError(name, problem, f"give one sequence for each of {of}, in the same order")
    for i, (tokens, given) in enumerate(zip(first, other, strict=True)):
        if len(tokens) != len(given):
            problem = f"{len(given)} tokens where {of}[{i}] has {len(tokens)}"
            raise InputError(f"{name}[{i}]", problem, "give one entry for each token")


def _tokens(y_true: Labels, other: Sequence[Sequence[Any]], name: str) -> list[tuple[str, Any]]:
    """The true label of every token, with its entry in ``other``."""
    check_lengths(y_true, other, name)
    return list(zip(chain(*y_true), chain(*other), strict=True))


def token_error(y_true: Labels, y_pred: Labels) -> float:
    """Fraction of tokens whose predicted label differs from the true one, over all sequences."""
    tokens = _tokens(y_true, y_pred, "y_pred")
    if not tokens:
        raise InputError("y_true", "no tokens", "give at least one labelled token")
    return sum(truth != guess for truth, guess in tokens) / len(tokens)


@dataclass(frozen=True)
class SpanCounts:
    """Numbers of true, predicted and correctly predicted chunks, or of tokens with a label, and the scores
    that follow from them.

    As in conlleval, 0 / 0 is 0: without chunks, precision, recall and f1 of a perfect prediction are 0."""

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

    def as_dict(self) -> dict[str, float]:
        """Precision, recall and F1, and the numbers of true ones (``support``) and predicted ones."""
        found = {name: getattr(self, name) for name in ("precision", "recall", "f1")}
        return found | {"support": self.n_true, "predicted": self.n_pred}


@dataclass(frozen=True)
class SpanScores(SpanCounts):
    """Counts over all chunks (micro average) and, in ``by_type``, over the chunks of each type."""

    by_type: dict[str, SpanCounts] = field(default_factory=dict)


def span_scores(y_true: Labels, y_pred: Labels) -> SpanScores:
    """Chunk precision, recall and F1 as conlleval computes them.

    A predicted chunk is correct if a true chunk has its first token, last token and type.

    - ``B-X``, ``I-X``, ``E-X``, ``S-X``: chunks of type X by the rules of :func:`chunks`; so an ``I-X``
      after ``O`` or after another type starts a chunk. ``[-X`` and ``]-X`` are chunks of one token, as is
      ``S-X``. ``L-X`` and ``U-X`` are other names of ``E-X`` and ``S-X``.
    - ``B``, ``I``, ``E``, ``S``, ``[``, ``]`` alone: chunks of one unnamed type, ``""``.
    - ``O`` and ``.``: outside.
    - any other label, such as ``NOUN``: a chunk of one token whose type is the whole label (conlleval's
      ``-r``).

    Without an ``O`` in the label set, every token is in a chunk: for word segmentation with labels B and I,
    chunks are words; for labels without a prefix, every token is a chunk and F1 is the token accuracy."""
    check_lengths(y_true, y_pred, "y_pred")
    true, pred = ({(i, *c) for i, labels in enumerate(y) for c in chunks(labels)} for y in (y_true, y_pred))
    counts = [Counter(kind for *_, kind in found) for found in (true, pred, true & pred)]
    by_type = {kind: SpanCounts(*(n[kind] for n in counts)) for kind in sorted(counts[0] | counts[1])}
    return SpanScores(len(true), len(pred), len(true & pred), by_type)


def label_scores(y_true: Labels, y_pred: Labels) -> dict[str, SpanCounts]:
    """Precision, recall and F1 of each label by itself, token by token, in alphabetical order.

    Example
    -------
    >>> label_scores([["B", "I", "O"]], [["B", "O", "O"]])["O"]
    SpanCounts(n_true=1, n_pred=2, n_correct=1)
    """
    tokens = _tokens(y_true, y_pred, "y_pred")
    both = ([truth for truth, _ in tokens], [guess for _, guess in tokens])
    counts = [Counter(both[0]), Counter(both[1]), Counter(a for a, b in tokens if a == b)]
    return {label: SpanCounts(*(n[label] for n in counts)) for label in sorted(counts[0] | counts[1])}


def token_nll(y_true: Labels, marginals: Marginals) -> float:
    """Mean of -log p(y_t) in nats, over the tokens whose true label is in their dict.

    A true label of probability 0 makes the mean infinite; nothing is clipped."""
    p = [float(dist[label]) for label, dist in _tokens(y_true, marginals, "marginals") if label in dist]
    if not p:
        remedy = "score data whose labels occur in the training data"
        raise InputError("y_true", "no token has a label that training saw", remedy)
    if not all(-_ROUNDING <= q <= 1 + _ROUNDING for q in p):
        raise InputError("marginals", "a probability is not in [0, 1]", "pass probabilities")
    return math.fsum(-math.log(q) if q > 0 else math.inf for q in p) / len(p)


def sequence_nll(log_probs: LogProbs) -> float:
    """Mean of -log p(y | x) per sequence in nats.

    None (a sequence with a label never seen in training) is left out; -inf makes the mean infinite."""
    known = [float(v) for v in log_probs if v is not None]
    if not known:
        remedy = "score sequences whose labels all occur in the training data"
        raise InputError("log_probs", "no sequence has a log-probability", remedy)
    if any(math.isnan(v) for v in known):
        raise InputError("log_probs", "a log-probability is not a number", "check the model")
    return math.fsum(-v for v in known) / len(known)


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
    """Calibration: are labels that are predicted with confidence 0.8 right in 80 of 100 cases?

    The confidence of a token is the largest probability of its dict (the first of equal ones); the token is
    right if the label with that probability is the true one, so a token whose label is unseen is wrong.
    With equal-width bins b = [i / n_bins, (i + 1) / n_bins), the last one closed::

        ece = sum_b  (n_b / N) |accuracy_b - mean confidence_b|.
    """
    if n_bins < 1:
        raise InputError("n_bins", f"must be 1 or more, got {n_bins}", "leave it out for 15")
    confidence, right = _confidences(y_true, marginals)
    which = np.minimum((confidence * n_bins).astype(np.int64), n_bins - 1)
    bins = []
    for b in np.unique(which).tolist():
        means = float(confidence[which == b].mean()), float(right[which == b].mean())
        bins.append(CalibrationBin(b / n_bins, (b + 1) / n_bins, *means, int((which == b).sum())))
    ece = sum(b.count * abs(b.accuracy - b.confidence) for b in bins) / len(confidence)
    return Calibration(float(ece), tuple(bins))


@dataclass(frozen=True)
class RiskCoverage:
    """``risk[k - 1]`` : error rate among the k most confident of N tokens. ``coverage[k - 1]`` : their
    share, k / N. ``area`` : area under the curve, the mean of ``risk``."""

    coverage: NDArray[np.float64]
    risk: NDArray[np.float64]
    area: float


def risk_coverage(y_true: Labels, marginals: Marginals, y_pred: Labels | None = None) -> RiskCoverage:
    """The error that is left if only the most confident tokens are answered.

    Confidence and correctness are as in :func:`calibration`, or those of the labels ``y_pred`` if given.
    Tokens of equal confidence come in random order, and the risk is the expectation over that order."""
    confidence, right = _confidences(y_true, marginals, y_pred)
    _, group, size = np.unique(-confidence, return_inverse=True, return_counts=True)
    wrong = np.bincount(group, weights=1 - right) / size
    number = np.arange(1, len(right) + 1)
    risk = np.cumsum(np.repeat(wrong, size)) / number
    return RiskCoverage(number / len(right), risk, float(risk.mean()))


@dataclass(frozen=True)
class Deferral:
    """Errors to expect if only the k most confident of N tokens are answered, a share ``coverage[k - 1]`` =
    k / N. ``expected[k - 1]`` is the error rate that their probabilities imply; ``doubt[k - 1]`` is the
    probability that the label of token k is wrong, so that ``predict(defer=doubt[k - 1])`` answers it and
    those before it."""

    coverage: NDArray[np.float64]
    expected: NDArray[np.float64]
    doubt: NDArray[np.float64]


def deferral(y_pred: Labels, marginals: Marginals) -> Deferral:
    """The error to expect if unsure tokens are left to a person. Needs no true labels."""
    doubt = np.sort(1 - _confidences(y_pred, marginals, y_pred)[0])
    number = np.arange(1, len(doubt) + 1)
    return Deferral(number / len(doubt), np.cumsum(doubt) / number, doubt)


def _confidences(
    y_true: Labels, marginals: Marginals, y_pred: Labels | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """For every token, the probability of its predicted label (by default the most probable one), and 1 if
    that label is the true one, else 0."""
    tokens = _tokens(y_true, marginals, "marginals")
    if not tokens:
        raise InputError("y_true", "no tokens", "give at least one labelled token")
    for i, dists in enumerate(marginals):
        for t, dist in enumerate(dists):
            if not dist:
                raise InputError(f"marginals[{i}][{t}]", "no labels", "give label -> probability")
            if not -_ROUNDING <= max(dist.values()) <= 1 + _ROUNDING:
                problem = f"{max(dist.values())} is not in [0, 1]"
                raise InputError(f"marginals[{i}][{t}]", problem, "pass probabilities")
    if y_pred is None:
        guesses = [max(dist, key=dist.__getitem__) for _, dist in tokens]
    else:
        guesses = [guess for _, guess in _tokens(y_true, y_pred, "y_pred")]
    right = [guess == label for guess, (label, _) in zip(guesses, tokens, strict=True)]
    confidence = np.array([dist.get(guess, 0.0) for guess, (_, dist) in zip(guesses, tokens, strict=True)])
    return np.clip(confidence, 0.0, 1.0), np.array(right, dtype=np.float64)


@dataclass(frozen=True)
class Report:
    """All metrics of one set of predictions; fractions, not percentages.

    ``token_nll`` is None if no token's label was seen in training, ``sequence_nll`` if no sequence has a
    log-probability. Either can be ``inf``. ``layers`` : the metrics of each layer by itself, where tokens
    have several labels; the overall metrics count every label as a token. ``by_type``,
    ``by_label`` : precision, recall, F1 and support of each type of span and of each label."""

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
    layers: dict[str, Report] = field(default_factory=dict)
    by_type: dict[str, SpanCounts] = field(default_factory=dict)
    by_label: dict[str, SpanCounts] = field(default_factory=dict)

    def __str__(self) -> str:
        """The table that ``structgp evaluate`` prints."""
        whole = "score" if not self.layers else "all" if "all" not in self.layers else "all layers"
        return table({whole: self, **self.layers})

    def as_dict(self) -> dict[str, Any]:
        """Name -> value, in the order of the fields; empty dicts are left out."""
        found: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, dict):
                value = {key: each.as_dict() for key, each in value.items()}
            if value != {}:
                found[name] = value
        return found


def evaluate(
    y_true: Labels,
    y_pred: Labels,
    marginals: Marginals,
    log_probs: LogProbs,
    spans_of: tuple[Labels, Labels] | None = None,
) -> Report:
    """All metrics at once. log_probs : log p(y_true | x) of each sequence, None where a label is unseen.
    spans_of : true and predicted labels to read spans from, if not ``y_true`` and ``y_pred``."""
    tokens = _tokens(y_true, marginals, "marginals")
    if len(log_probs) != len(y_true):
        problem = f"{len(log_probs)} values where y_true has {len(y_true)} sequences"
        raise InputError("log_probs", problem, "give one log-probability (or None) for each sequence")
    n_unseen = sum(label not in dist for label, dist in tokens)
    spans = span_scores(*(spans_of or (y_true, y_pred)))
    return Report(
        token_error=token_error(y_true, y_pred),
        span_f1=spans.f1,
        span_precision=spans.precision,
        span_recall=spans.recall,
        token_nll=token_nll(y_true, marginals) if n_unseen < len(tokens) else None,
        sequence_nll=None if all(v is None for v in log_probs) else sequence_nll(log_probs),
        ece=calibration(y_true, marginals).ece,
        n_tokens=len(tokens),
        n_sequences=len(y_true),
        n_unseen_tokens=n_unseen,
        by_type=spans.by_type,
        by_label=label_scores(y_true, y_pred),
    )
