"""What a model says about some text, and how that compares with its labels: all that a page shows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from structgp.answers.ask import Asked
from structgp.answers.expected import ExpectedScores, scores_of
from structgp.api.estimator import StructuredGPClassifier
from structgp.evaluation import metrics

Labels = list[list[str]]
LEVEL = 0.9
"""Probability of the intervals of expected scores."""


@dataclass(frozen=True)
class Text:
    """Sequences as the reader knows them. name : of the file. words : one string per token. lines : where
    each sequence begins in the file. labels : the true ones, None where the file has none."""

    name: str
    words: list[list[str]]
    lines: list[int]
    labels: Labels | None


@dataclass(frozen=True)
class Truth:
    """What is known only with labels. ``log_probs`` : of each true labelling, None where training never saw
    one of its labels; ``confusion`` : tokens by (true, predicted) label."""

    labels: Labels
    log_probs: list[float | None]
    scores: metrics.Report
    calibration: metrics.Calibration
    risk: metrics.RiskCoverage
    confusion: Counter[tuple[str, str]]


@dataclass(frozen=True)
class TokenUncertainty:
    """One kind of uncertainty, which the text can be shaded by. ``values`` : (T,) nats per sequence;
    ``full`` : where the shading is darkest; ``title`` and ``meaning`` are for the reader."""

    name: str
    title: str
    meaning: str
    values: list[NDArray[np.float64]]
    full: float


@dataclass(frozen=True)
class Findings:
    """``templates`` : names of the keys of ``kernel_scales`` in the log of the fit; ``uncertainties`` : the
    one to begin with first; ``expected`` : scores without true labels, None where the structure draws no
    labellings; ``deferral`` : what leaving unsure tokens to a person leads to."""

    estimator: StructuredGPClassifier
    model_name: str
    templates: dict[str, str]
    text: Text
    predicted: Labels
    marginals: list[list[dict[str, float]]]
    uncertainties: list[TokenUncertainty]
    truth: Truth | None
    expected: ExpectedScores | None
    deferral: metrics.Deferral


def examine(
    estimator: StructuredGPClassifier,
    X: Sequence[Any],
    text: Text,
    *,
    model_name: str,
    templates: dict[str, str] | None = None,
) -> Findings:
    """Asks the model everything at once. X are the features of ``text``."""
    asked = estimator.ask(X)
    marginals = estimator.marginals_of(asked)
    if asked.question.decode == "accuracy" and estimator.model_.rules is None:
        # What predict says, without asking the draws again.
        predicted = [[max(p, key=p.__getitem__) for p in sequence] for sequence in marginals]
    else:
        predicted = estimator.labels_of(asked)
    truth = None if text.labels is None else _compare(asked, text.labels, predicted, marginals)
    kinds = token_uncertainties(asked)
    left, expected = metrics.deferral(predicted, marginals), None
    if asked.model.structure.has_sample:
        expected = scores_of(asked, asked.model.labels.transform(predicted), LEVEL)
        if left.expected[-1] > 0:  # what cross-validation has found counts for the curve too
            left = replace(left, expected=left.expected * (expected.error.mean / left.expected[-1]))
    found = estimator, model_name, templates or {}, text, predicted, marginals, kinds, truth
    return Findings(*found, expected, left)


def token_uncertainties(asked: Asked) -> list[TokenUncertainty]:
    """The total uncertainty about each token, and the model's (epistemic) part of it."""
    both = asked.token_uncertainty()
    total, model = [u[:, 0] for u in both], [u[:, 0] - u[:, 1] for u in both]
    # More than eight equally probable labels hardly occur, however many labels there are.
    full = math.log(min(8, max(2, len(asked.model.labels.classes))))
    entropy, removable = (
        "entropy of a token's label probabilities",
        "the part that more labels would remove",
    )
    return [
        TokenUncertainty("total", "uncertainty", entropy, total, full),
        TokenUncertainty("model", "uncertainty of the model", removable, model, full / 2),
    ]


def _compare(asked: Asked, labels: Labels, predicted: Labels, marginals: metrics.Marginals) -> Truth:
    log_probs = asked.log_probs(labels)
    return Truth(
        labels,
        log_probs,
        metrics.evaluate(labels, predicted, marginals, log_probs),
        metrics.calibration(labels, marginals),
        metrics.risk_coverage(labels, marginals, predicted),
        Counter(zip(chain(*labels), chain(*predicted), strict=True)),
    )
