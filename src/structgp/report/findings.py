"""A model's predictions for some text, and how they compare with its labels: all that a page shows."""

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
from structgp.api.questions import log_probs_of, report_of
from structgp.data.graphs import Shape
from structgp.errors import InputError
from structgp.evaluation import metrics

Labels = list[list[str]]
LEVEL = 0.9
"""Probability of the intervals of expected scores."""


@dataclass(frozen=True)
class Text:
    """Sequences as the reader knows them. name : name of the file. words : one string per token.
    lines : line of the file where each sequence begins. labels : true labels, None if the file has none;
    for examples that are not sequences, those of all nodes in order, or in the shape that the estimator
    takes."""

    name: str
    words: list[list[str]]
    lines: list[int]
    labels: Sequence[Any] | None


@dataclass(frozen=True)
class Truth:
    """Findings that need true labels. ``log_probs`` : log-probability of each true labelling, None where
    training never saw one of its labels; ``confusion`` : numbers of tokens by (true, predicted) label."""

    labels: Labels
    log_probs: list[float | None]
    scores: metrics.Report
    calibration: metrics.Calibration
    risk: metrics.RiskCoverage
    confusion: Counter[tuple[str, str]]


@dataclass(frozen=True)
class TokenUncertainty:
    """One kind of uncertainty by which the text can be shaded. ``values`` : for each sequence, (T,) nats;
    ``full`` : value at which the shading is darkest; ``title`` and ``meaning`` are for the reader."""

    name: str
    title: str
    meaning: str
    values: list[NDArray[np.float64]]
    full: float


@dataclass(frozen=True)
class Findings:
    """All that a page shows. ``templates`` : names for the keys of ``kernel_scales`` in the log of the fit;
    ``uncertainties`` : the first is the one shown at the start; ``expected`` : the scores to expect without
    true labels, None if the structure cannot draw labellings; ``deferral`` : the error to expect if unsure
    tokens are left to a person; ``form`` : an example's form, 'sequence', 'grid', 'tree' or 'graph';
    ``shapes`` : shapes of examples that are not chains. With layers, every layer of an example is a
    sequence of its own."""

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
    form: str = "sequence"
    shapes: list[Shape] | None = None


def examine(
    estimator: StructuredGPClassifier,
    X: Sequence[Any],
    text: Text,
    *,
    model_name: str,
    templates: dict[str, str] | None = None,
) -> Findings:
    """Asks the model for everything at once. X : the features of ``text``."""
    asked = estimator.ask(X)
    marginals = estimator.marginals_of(asked)
    if asked.question.decode == "accuracy" and estimator.model_.rules is None:
        # The labels that predict would give, without going through the draws again.
        predicted = [[max(p, key=p.__getitem__) for p in sequence] for sequence in marginals]
    else:
        predicted = estimator.labels_of(asked)
    labels = None if text.labels is None else _flat(asked, text.labels)
    truth = None if labels is None else _compare(asked, labels, predicted, marginals)
    kinds = token_uncertainties(asked)
    left, expected = metrics.deferral(predicted, marginals), _expected(asked, predicted)
    if expected is not None and left.expected[-1] > 0:
        # The correction found by cross-validation applies to the curve too.
        left = replace(left, expected=left.expected * (expected.error.mean / left.expected[-1]))
    found = estimator, model_name, templates or {}, text, predicted, marginals, kinds, truth
    findings = Findings(*found, expected, left, asked.model.spec.form, asked.shapes)
    return _layer_by_layer(asked, findings) if asked.model.spec.layers else findings


def _flat(asked: Asked, labels: Sequence[Any]) -> Labels:
    """The true labels of all nodes of each example, in order."""
    is_flat = all(isinstance(of, list) and all(isinstance(v, str) for v in of) for of in labels)
    if is_flat and not asked.model.spec.layers:
        return list(labels)
    found = asked.labels_given(list(labels))
    return [[label for label in of if label is not None] for of in found]


def _expected(asked: Asked, predicted: Labels) -> ExpectedScores | None:
    """The scores to expect without true labels, None where labellings cannot be drawn."""
    if not asked.model.structure.has_sample:
        return None
    try:
        return scores_of(asked, asked.model.labels.transform(predicted), LEVEL)
    except InputError:  # the program of some example cannot draw labellings
        return None


def _layer_by_layer(asked: Asked, found: Findings) -> Findings:
    """The findings with each layer of an example as a sequence of its own."""
    n_layers, text, truth = asked.n_layers, found.text, found.truth

    def split(values: Sequence[Any]) -> list[Any]:
        parts = [(of, len(of) // n_layers) for of in values]
        return [of[k * n : (k + 1) * n] for of, n in parts for k in range(n_layers)]

    def repeat(values: Sequence[Any]) -> list[Any]:
        return [value for value in values for _ in range(n_layers)]

    if truth is not None:
        labels = split(truth.labels)
        known: list[list[str | None]] = []
        for i, of in enumerate(truth.labels):
            for k in range(n_layers):
                before, own = [len(labels[i * n_layers + j]) for j in range(k)], labels[i * n_layers + k]
                rest = len(of) - sum(before) - len(own)
                known.append([*[None] * sum(before), *own, *[None] * rest])
        again = asked.some(repeat(range(len(truth.labels))))
        truth = replace(truth, labels=labels, log_probs=log_probs_of(again, known))
    return replace(
        found,
        text=replace(text, words=repeat(text.words), lines=repeat(text.lines)),
        predicted=split(found.predicted),
        marginals=split(found.marginals),
        uncertainties=[replace(u, values=split(u.values)) for u in found.uncertainties],
        truth=truth,
        shapes=None,
    )


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
    log_probs = log_probs_of(asked, labels)
    return Truth(
        labels,
        log_probs,
        report_of(asked, labels, predicted, marginals, log_probs),
        metrics.calibration(labels, marginals),
        metrics.risk_coverage(labels, marginals, predicted),
        Counter(zip(chain(*labels), chain(*predicted), strict=True)),
    )
