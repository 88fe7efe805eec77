"""What a fitted estimator can be asked. Labels by name, one entry a sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from structgp.answers import SENSES
from structgp.answers.model import Known, Model
from structgp.data.labels import check_all_labelled, check_labels
from structgp.errors import InputError
from structgp.evaluation import metrics


class Span(NamedTuple):
    """Tokens ``start`` to before ``stop`` as one span with this label."""

    start: int
    stop: int
    label: str
    probability: float


class Labelling(NamedTuple):
    labels: list[str]
    probability: float


@dataclass(frozen=True)
class Doubts:
    """Entropy in nats, of every token (arrays (T,), one a sequence), of each sequence (N,), or of one span.

    total : of the prediction. data : what would remain if the functions were known. model : what more
    labels would take away; total = data + model."""

    total: Any
    data: Any
    model: Any


def as_list(X: Iterable[Any]) -> list[Any]:
    """X with generators read out; what is no sequence at all stays for the encoder to name."""
    return [x if hasattr(x, "__len__") or not isinstance(x, Iterable) else list(x) for x in X]


def _check_number(n: Any) -> None:
    if not isinstance(n, int | np.integer) or n < 1:
        raise InputError("n", f"{n!r} is no number of labellings", "use 1 or more")


class Answers:
    """The questions of :class:`structgp.StructuredGPClassifier`. All average over the posterior.

    ``known`` : labels that are given, for each sequence a list with None where there is none; every
    answer is then given those.
    """

    average: str
    decode: str

    def _ready(self) -> Model:
        """The fitted model, under the parameters as they are now."""
        raise NotImplementedError

    # -- labels ----------------------------------------------------------------------------------

    def predict(self, X: Iterable[Any], known: Known | None = None) -> list[list[str]]:
        """Labels of every token of every sequence."""
        model, X = self._ready(), as_list(X)
        if self.decode == "viterbi":
            best = model.viterbi(X, known)
        else:
            best = model.best_tokens(X, self.average, known)
        return [model.labels.names(indices) for indices in best]

    def predict_single(self, x: Any) -> list[str]:
        """Labels of one sequence."""
        return self.predict([x])[0]

    def predict_n_best(
        self, X: Iterable[Any], n: int, known: Known | None = None
    ) -> list[list[Labelling]]:
        """The n most probable whole labellings of each sequence, best first; fewer where there are not so
        many. Their probabilities are averaged exactly; which ones they are is searched for among the best
        of the posterior mean and of each draw."""
        _check_number(n)
        model = self._ready()
        return [
            [Labelling(model.labels.names(y), math.exp(value)) for y, value in found]
            for found in model.n_best(as_list(X), int(n), self.average, known)
        ]

    def sample_labellings(
        self, X: Iterable[Any], n: int, known: Known | None = None
    ) -> list[list[list[str]]]:
        """n labellings of each sequence, drawn from the posterior: functions first, labels given them."""
        _check_number(n)
        model = self._ready()
        return [
            [model.labels.names(y) for y in drawn]
            for drawn in model.samples(as_list(X), int(n), self.average, known)
        ]

    # -- probabilities ---------------------------------------------------------------------------

    def predict_marginals(
        self, X: Iterable[Any], known: Known | None = None
    ) -> list[list[dict[str, float]]]:
        """For every token a dict from label to its probability."""
        model = self._ready()
        classes = model.labels.classes
        return [
            [dict(zip(classes, map(float, p), strict=True)) for p in sequence]
            for sequence in model.marginals(as_list(X), self.average, known)
        ]

    def predict_marginals_single(self, x: Any) -> list[dict[str, float]]:
        """For every token of one sequence a dict from label to its probability."""
        return self.predict_marginals([x])[0]

    def predict_pair_marginals(
        self, X: Iterable[Any], known: Known | None = None
    ) -> list[np.ndarray]:
        """(T - 1, V, V) probabilities of the labels of each two neighbouring tokens, in the order of
        ``classes_``."""
        return self._ready().pair_marginals(as_list(X), self.average, known)

    def sequence_log_probs(
        self, X: Iterable[Any], y: Iterable[Sequence[str | None]]
    ) -> list[float | None]:
        """log p(y | x) of each whole labelling, averaged over the posterior; of its known part where it has
        None in it. None where a label was never seen in training."""
        model, X, y = self._ready(), as_list(X), list(y)
        return model.log_probs(X, check_labels(X, y), self.average)

    def span_probability(
        self,
        x: Any,
        start: int,
        stop: int,
        label: str | None = None,
        sense: str = "exact",
        known: Sequence[str | None] | None = None,
    ) -> float:
        """Probability that the sequence x has a span over the tokens ``start`` to before ``stop``.

        sense : 'covers', one span holds all of those tokens, and may be longer; 'bounds', a span begins at
        start and ends before stop, whatever its label; 'exact', the same with this label. For 'covers' a
        label may be given. What is a span is read off the labels as conlleval does.
        """
        self._check_sense(sense, label)
        return self._ready().span(x, start, stop, label, sense, self.average, known)[0]

    def predict_spans(
        self, X: Iterable[Any], threshold: float = 0.1, known: Known | None = None
    ) -> list[list[Span]]:
        """Spans of every sequence that are at least so probable, with exactly these bounds and label, most
        probable first. They may overlap: they are alternatives."""
        if not 0 < threshold <= 1:
            raise InputError("threshold", f"{threshold!r} is no probability", "use one above 0")
        found = self._ready().spans(as_list(X), threshold, self.average, known)
        return [[Span(*span) for span in spans] for spans in found]

    # -- doubt -----------------------------------------------------------------------------------

    def predict_doubt(
        self, X: Iterable[Any], of: str = "tokens", known: Known | None = None
    ) -> Doubts:
        """Where doubt comes from, of 'tokens' or of 'sequences' (whole labellings)."""
        model, X = self._ready(), as_list(X)
        if of == "tokens":
            both = model.token_doubt(X, self.average, known)
            return Doubts(
                [d[:, 0] for d in both], [d[:, 1] for d in both], [d[:, 0] - d[:, 1] for d in both]
            )
        if of == "sequences":
            total, data = model.sequence_doubt(X, self.average, known).T
            return Doubts(total, data, total - data)
        raise InputError("of", f"{of!r} is not known", "use 'tokens' or 'sequences'")

    def span_doubt(
        self,
        x: Any,
        start: int,
        stop: int,
        label: str | None = None,
        sense: str = "exact",
        known: Sequence[str | None] | None = None,
    ) -> Doubts:
        """Doubt whether the span is there, see ``span_probability``."""
        self._check_sense(sense, label)
        doubt = self._ready().span(x, start, stop, label, sense, self.average, known)[1]
        return Doubts(*map(float, (doubt.total, doubt.data, doubt.model)))

    @staticmethod
    def _check_sense(sense: str, label: str | None) -> None:
        if sense not in SENSES:
            raise InputError(
                "sense", f"{sense!r} is not known", f"use one of {', '.join(map(repr, SENSES))}"
            )
        if (sense == "exact" and label is None) or (sense == "bounds" and label is not None):
            problem = "'exact' asks for a label" if label is None else "'bounds' is of any label"
            raise InputError(
                "label", problem, "use sense='bounds' without a label, 'exact' with one"
            )

    # -- scores ----------------------------------------------------------------------------------

    def score(self, X: Iterable[Any], y: Iterable[Sequence[str]]) -> float:
        """Token accuracy."""
        X, y = as_list(X), list(y)
        return 1.0 - metrics.token_error(check_all_labelled(X, y), self.predict(X))

    def evaluate(self, X: Iterable[Any], y: Iterable[Sequence[str]]) -> metrics.Report:
        """Token error, span scores, NLL and calibration on labelled data."""
        X, y = as_list(X), list(y)
        truth = check_all_labelled(X, y)
        return metrics.evaluate(
            truth, self.predict(X), self.predict_marginals(X), self.sequence_log_probs(X, y)
        )
