"""The questions that a fitted estimator answers, with labels by name and one entry per sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from structgp.answers import sets
from structgp.answers.ask import Asked, Known, Model
from structgp.answers.expected import ExpectedScores, scores_of
from structgp.answers.tuples import TupleMarginals, template_marginals
from structgp.data.examples import as_list
from structgp.data.labels import all_labelled, by_layer
from structgp.errors import InputError
from structgp.evaluation import metrics

Given: TypeAlias = Known | None


class Span(NamedTuple):
    """A span: the tokens from ``start`` to before ``stop``, with this label, and its probability."""

    start: int
    stop: int
    label: str
    probability: float


class Labelling(NamedTuple):
    """The labels of a whole sequence (or other example, in its shape), with their joint probability."""

    labels: Any
    probability: float


@dataclass(frozen=True)
class Uncertainty:
    """Entropy in nats: for tokens, an array (T,) per sequence; for sequences, (N,); for one span, a number.

    total : entropy of the prediction. data : the part that would remain if the functions were known
    (aleatoric). model : the part that more labels would remove (epistemic); total = data + model."""

    total: Any
    data: Any
    model: Any


def class_shift(class_weight: str | dict[str, float], model: Model) -> torch.Tensor:
    """(V,) logarithms of the class weights."""
    classes = model.labels.classes
    if isinstance(class_weight, str):
        counts = np.array([model.info["label_counts"].get(c, 0) for c in classes])
        weights = counts.sum() / (len(classes) * np.where(counts > 0, counts, 1))
    else:
        weights = np.array([float(class_weight.get(c, 1.0)) for c in classes])
    return torch.from_numpy(np.log(weights))


def _each_shaped(asked: Asked, found: Sequence[Any]) -> list[list[Any]]:
    """Several labellings of each example, converted from label indices to names, in the example's shape."""
    names = asked.model.labels.names
    return [[asked.some([i]).shaped([names(y)])[0] for y in some] for i, some in enumerate(found)]


def _labellings(asked: Asked, found: Sequence[Sequence[tuple[Any, float]]]) -> list[list[Labelling]]:
    """Converts labellings by label index, with their log-probabilities, to what the user sees."""
    shaped = _each_shaped(asked, [[y for y, _ in some] for some in found])
    parts = zip(shaped, found, strict=True)
    return [
        [Labelling(y, math.exp(v)) for y, (_, v) in zip(labels, some, strict=True)]
        for labels, some in parts
    ]


class Answers:
    """The questions of :class:`structgp.StructuredGPClassifier`. All answers average over the posterior.

    ``known`` : labels that are known: for each sequence a list, with None for tokens without a known label.
    Every answer is then conditional on them. Or, for a model that was fitted to annotations,
    :class:`structgp.Annotations`: every answer is then conditional on what the annotators said, each
    trusted as far as it is reliable."""

    def ask(self, X: Iterable[Any]) -> Asked:
        """X, encoded once, so that several questions can be asked about it, under the current
        parameters."""
        raise NotImplementedError

    def predict(
        self, X: Iterable[Any], known: Given = None, *, defer: float | None = None
    ) -> list[list[Any]]:
        """Labels of every token of every sequence, chosen by the criterion ``decode``. defer : cost of
        asking a person about a token, where an error costs 1, or in the units of ``costs``. A label whose
        expected cost is higher is replaced by None."""
        asked = self.ask(X)
        labels: list[Any] = self.labels_of(asked, known)
        return asked.shaped(labels if defer is None else self.deferred(asked, labels, defer, known))

    @staticmethod
    def deferred(
        asked: Asked, labels: list[list[str]], defer: float, known: Given = None
    ) -> list[list[str | None]]:
        """The labels, with None in place of those whose expected cost is more than ``defer``."""
        if isinstance(defer, bool) or not isinstance(defer, int | float | np.number) or not defer >= 0:
            problem = f"must be 0 or more, got {defer!r}"
            raise InputError("defer", problem, "use the cost of asking divided by the cost of an error")
        encoder, costs = asked.model.labels, asked.question.costs
        costs = 1.0 - np.eye(len(encoder.classes)) if costs is None else costs
        found: list[list[str | None]] = []
        for y, p in zip(labels, asked.marginals(known), strict=True):
            (places,) = encoder.transform([y])
            cost = (p @ costs)[np.arange(len(y)), places]
            found.append([label if c <= defer else None for label, c in zip(y, cost, strict=True)])
        return found

    def predict_single(self, x: Any) -> list[str]:
        """Labels of one sequence."""
        return self.predict([x])[0]

    def predict_n_best(self, X: Iterable[Any], n: int, known: Given = None) -> list[list[Labelling]]:
        """The n most probable whole labellings of each sequence, best first; fewer if there are not that
        many. Their probabilities are averaged exactly; the candidates are the best labellings under the
        posterior mean, and the best one under each of up to 128 draws."""
        asked = self.ask(X)
        return _labellings(asked, asked.n_best(n, known))

    def sample_labellings(self, X: Iterable[Any], n: int, known: Given = None) -> list[list[list[str]]]:
        """n labellings of each sequence, drawn from the posterior: first functions, then labels given
        them."""
        asked = self.ask(X)
        return _each_shaped(asked, asked.samples(n, known))

    def labels_of(self, asked: Asked, known: Given = None) -> list[list[str]]:
        """``predict`` for sequences that are already encoded."""
        return [asked.model.labels.names(indices) for indices in asked.labels(known)]

    def predict_marginals(self, X: Iterable[Any], known: Given = None) -> list[list[dict[str, float]]]:
        """For every token, a dict from label to its probability."""
        asked = self.ask(X)
        return asked.shaped(self.marginals_of(asked, known))

    @staticmethod
    def marginals_of(asked: Asked, known: Given = None) -> list[list[dict[str, float]]]:
        """``predict_marginals`` for sequences that are already encoded."""
        classes, found = asked.model.labels.classes, asked.marginals(known)
        return [[dict(zip(classes, p, strict=True)) for p in sequence.tolist()] for sequence in found]

    def monte_carlo_error(self, X: Iterable[Any], known: Given = None) -> list[np.ndarray]:
        """(T, V) standard errors of the probabilities of ``predict_marginals`` due to sampling of
        labellings, ordered as in ``classes_``. They are 0 unless a likelihood of your own answers, about
        sequences with too many labellings to enumerate."""
        return self.ask(X).monte_carlo_error(known)

    def predict_marginals_single(self, x: Any) -> list[dict[str, float]]:
        """For every token of one sequence, a dict from label to its probability."""
        return self.predict_marginals([x])[0]

    def predict_transition_marginals(self, X: Iterable[Any], known: Given = None) -> list[np.ndarray]:
        """(T - 1, V, V) joint probabilities of the labels of neighbouring tokens, ordered as in
        ``classes_``."""
        return self.ask(X).transition_marginals(known)

    def predict_template_marginals(
        self, X: Iterable[Any], template: str, known: Given = None
    ) -> list[TupleMarginals]:
        """Probabilities of the joint labels of every tuple of a template of the structure, such as 'next',
        'parent', 'right' or 'edge cites' (``model_.spec.templates`` has the names): for each example the
        tuples (E, a), numbers of nodes, and probabilities ``(E, *sizes)`` in the order of ``classes_``."""
        return template_marginals(self.ask(X), template, known)

    def sequence_log_probs(self, X: Iterable[Any], y: Iterable[Sequence[str | None]]) -> list[float | None]:
        """log p(y | x) of each whole labelling, averaged over the posterior; if y contains None, the log
        probability of its known part. None if a label was never seen in training."""
        asked = self.ask(as_list(X))
        return asked.log_probs(asked.labels_given(y))

    def span_probability(
        self,
        x: Any,
        start: int,
        stop: int,
        label: str | None = None,
        sense: str = "exact",
        known: Sequence[str | None] | None = None,
    ) -> float:
        """Probability that the sequence x has a span over the tokens from ``start`` to before ``stop``.

        sense : 'covers', one span holds all of those tokens, and may be longer; 'bounds', a span begins at
        start and ends before stop, whatever its label; 'exact', the same with this label. For 'covers', a
        label is optional. Spans are read from the labels as conlleval does. Exact given the draws, for
        structures whose labellings are summed over exactly."""
        return self.ask([x]).span(start, stop, label, sense, None if known is None else [known])[0]

    def predict_spans(
        self, X: Iterable[Any], threshold: float = 0.1, known: Given = None
    ) -> list[list[Span]]:
        """Spans of every sequence whose probability, of exactly these bounds and this label, is at least
        the threshold, most probable first. They are alternatives, so they may overlap. Probabilities are
        exact given the draws for chains, and for segments up to ``max_length``; for other structures of
        sequences, they are those of the Markov chain with the same joint probabilities of neighbouring
        labels."""
        if not 0 < threshold <= 1:
            problem = f"must be above 0 and at most 1, got {threshold!r}"
            raise InputError("threshold", problem, "use a probability")
        return [[Span(*span) for span in spans] for spans in self.ask(X).spans(threshold, known)]

    def predict_uncertainty(self, X: Iterable[Any], of: str = "tokens", known: Given = None) -> Uncertainty:
        """Uncertainty of 'tokens' or of 'sequences' (whole labellings), and its sources."""
        if of == "tokens":
            asked = self.ask(X)
            both = asked.token_uncertainty(known)
            parts = [u[:, 0] for u in both], [u[:, 1] for u in both], [u[:, 0] - u[:, 1] for u in both]
            return Uncertainty(*map(asked.shaped, parts))
        if of == "sequences":
            whole, part = self.ask(X).sequence_uncertainty(known).T
            return Uncertainty(whole, part, whole - part)
        raise InputError("of", f"{of!r} is not known", "use 'tokens' or 'sequences'")

    def span_uncertainty(
        self,
        x: Any,
        start: int,
        stop: int,
        label: str | None = None,
        sense: str = "exact",
        known: Sequence[str | None] | None = None,
    ) -> Uncertainty:
        """Uncertainty about whether the span is there, see ``span_probability``."""
        _, parts = self.ask([x]).span(start, stop, label, sense, None if known is None else [known])
        return Uncertainty(*map(float, (parts.total, parts.data, parts.model)))

    def expected_scores(self, X: Iterable[Any], level: float = 0.9) -> ExpectedScores:
        """How good the labels of ``predict`` are expected to be on X, for which no labels are known: error,
        precision, recall and F1, with credible intervals. level : probability of the intervals.

        The labels are scored against labellings of all of X that are drawn from the posterior, functions
        first. The estimates rely on X being like the training data: they do not hold for text of another
        kind."""
        asked = self.ask(X)
        guess = asked.model.labels.transform(self.labels_of(asked))
        return scores_of(asked, guess, level)

    def calibrate(
        self, X: Iterable[Any], y: Iterable[Sequence[str]], of: Sequence[str] | None = None
    ) -> Any:
        """Prepares ``predict_sets`` with labelled sequences that the model was not trained on. The result
        is kept in the model and its file, until the next fit. of : 'tokens', 'spans', 'labellings' or
        several of them; None for all that the structure can answer. Returns the estimator."""
        asked = self.ask(as_list(X))
        truth = all_labelled(asked.labels_given(y))
        kinds = [of] if isinstance(of, str) else of
        self.model_ = replace(asked.model, calibration=sets.calibrated(asked, truth, kinds))
        return self

    def predict_sets(
        self, X: Iterable[Any], coverage: float = 0.9, of: str = "tokens", by_length: bool = True
    ) -> list[list[Any]]:
        """Sets that hold the truth with a guarantee, after ``calibrate``.

        of : 'tokens', for each token a list of labels, most probable first; 'spans', the spans that a
        sequence may have; 'labellings', its possible labellings. For tokens (or spans), the average share
        of a sequence's true labels (or true spans) that are in its sets is at least ``coverage``, over
        sequences like those of the calibration; for labellings, the true labelling is in the set with at
        least that probability. by_length : whether the guarantee should also hold among sequences of
        similar length, if there are enough of them."""
        return self.sets_of(self.ask(X), coverage, of, by_length)

    @staticmethod
    def sets_of(
        asked: Asked, coverage: float, of: str = "tokens", by_length: bool = True
    ) -> list[list[Any]]:
        """``predict_sets`` for sequences that are already encoded."""
        limits = sets.thresholds(asked, of, coverage, by_length)
        names = asked.model.labels.names
        if of == "tokens":
            return asked.shaped(
                [[names(held) for held in tokens] for tokens in sets.token_sets(asked, limits)]
            )
        if of == "spans":
            return [[Span(*span) for span in spans] for spans in sets.span_sets(asked, limits)]
        return _labellings(asked, sets.labelling_sets(asked, limits))

    def score(self, X: Iterable[Any], y: Iterable[Sequence[str]]) -> float:
        """Token accuracy of ``predict``."""
        asked = self.ask(as_list(X))
        truth = all_labelled(asked.labels_given(y))
        return 1.0 - metrics.token_error(truth, self.labels_of(asked))

    def evaluate(self, X: Iterable[Any], y: Iterable[Sequence[str]]) -> metrics.Report:
        """Token error and span scores of ``predict``, NLL and calibration of the probabilities, on labelled
        data. X is encoded once for labels, and once more if whole labellings need unknown values to be told
        apart. With layers, the scores are for all labels together; those of each layer are in
        ``layers``."""
        asked = self.ask(as_list(X))
        truth = all_labelled(asked.labels_given(y))
        return report_of(asked, truth, self.labels_of(asked), self.marginals_of(asked))


def report_of(
    asked: Asked,
    truth: Sequence[Sequence[str]],
    guess: Sequence[Sequence[str]],
    marginals: metrics.Marginals,
    log_probs: metrics.LogProbs | None = None,
) -> metrics.Report:
    """All scores of predicted labels and their probabilities. log_probs : log-probabilities of the true
    labellings, if they have been computed already."""
    spans = asked.span_labels(truth), asked.span_labels(guess)
    log_probs = log_probs_of(asked, truth) if log_probs is None else log_probs
    whole = metrics.evaluate(truth, guess, marginals, log_probs, spans)
    layers = asked.model.spec.layers
    if not layers:
        return whole
    of_layers = [[by_layer(layers, each) for each in some] for some in (truth, guess, marginals)]
    found = {}
    for k, layer in enumerate(layers):
        own = [[each[layer] for each in some] for some in of_layers]
        known = [_only(labels, k, len(layers)) for labels in truth]
        found[layer] = metrics.evaluate(own[0], own[1], own[2], log_probs_of(asked, known))
    return replace(whole, layers=found)


def log_probs_of(asked: Asked, y: Sequence[Sequence[str | None]]) -> list[float | None]:
    """log p(y | x) of each labelling; all None for structures that sample labellings, which lack it."""
    return asked.log_probs(y) if asked.model.spec.program != "gibbs" else [None] * len(y)


def _only(labels: Sequence[str], k: int, n_layers: int) -> list[str | None]:
    """The labels of all layers, with None for those of every layer but k."""
    n = len(labels) // n_layers
    return [label if i // max(n, 1) == k else None for i, label in enumerate(labels)]
