"""What a model says about some text, and how that compares with its labels: all that a page shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from structgp.answers.ask import Asked
from structgp.api.estimator import StructuredGPClassifier
from structgp.evaluation import metrics
from structgp.report.doubt import Doubt, token_doubts


@dataclass(frozen=True)
class Text:
    """Sequences as the reader knows them.

    name : of the file. words : one string a token. lines : where each sequence begins in the file.
    labels : the true ones, None where the file has none.
    """

    name: str
    words: list[list[str]]
    lines: list[int]
    labels: list[list[str]] | None


@dataclass(frozen=True)
class Truth:
    """What only labels can tell. ``log_probs`` : of each true labelling, None where training never saw
    one of its labels; ``confusion`` : tokens by (true, predicted) label."""

    labels: list[list[str]]
    log_probs: list[float | None]
    scores: metrics.Report
    calibration: metrics.Calibration
    risk: metrics.RiskCoverage
    confusion: Counter[tuple[str, str]]


@dataclass(frozen=True)
class Findings:
    """``log`` : what the model keeps of its fit; ``templates`` : what its 'kernel_scales' are called."""

    estimator: StructuredGPClassifier
    model_name: str
    templates: dict[str, str]
    text: Text
    predicted: list[list[str]]
    marginals: list[list[dict[str, float]]]
    doubts: list[Doubt]
    truth: Truth | None

    @property
    def log(self) -> dict[str, Any]:
        return self.estimator.model_.info


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
    if estimator.decode == "marginal" and estimator.model_.rules is None:
        # What predict says, without asking the draws again.
        predicted = [[max(p, key=p.__getitem__) for p in sequence] for sequence in marginals]
    else:
        predicted = estimator.labels_of(asked)
    truth = None
    if text.labels is not None:
        truth = _compare(asked, text.labels, predicted, marginals)
    return Findings(
        estimator, model_name, templates or {}, text, predicted, marginals, token_doubts(asked), truth
    )


def _compare(
    asked: Asked,
    labels: list[list[str]],
    predicted: list[list[str]],
    marginals: list[list[dict[str, float]]],
) -> Truth:
    log_probs = asked.log_probs(labels)
    return Truth(
        labels,
        log_probs,
        metrics.evaluate(labels, predicted, marginals, log_probs),
        metrics.calibration(labels, marginals),
        metrics.risk_coverage(labels, marginals),
        Counter(
            pair
            for truth, guess in zip(labels, predicted, strict=True)
            for pair in zip(truth, guess, strict=True)
        ),
    )
