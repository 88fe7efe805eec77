"""A fitted model, and its answers to several questions about sequences that are encoded once.

Answers take ``known``, labels that are given: for each sequence, a list with None where a label is not
known."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from structgp.answers import labellings
from structgp.answers.annotators import Annotators
from structgp.answers.best_spans import SpanDecoder
from structgp.answers.conformal import Calibration
from structgp.answers.encoded import BATCH_TOKENS, Encoded, Known
from structgp.answers.local_points import LocalPoints
from structgp.answers.potentials import Draws, Potentials, mean, sample
from structgp.answers.spans import Boundaries, TokenRatios, likely_spans, span_probability
from structgp.answers.uncertainty import Parts, event_uncertainty, sequence_uncertainty, token_uncertainty
from structgp.data.batch import MISSING, by_length
from structgp.data.encode import FeatureEncoder, FeatureSplit
from structgp.data.examples import links_of
from structgp.data.graphs import shape_of
from structgp.data.labels import UNSEEN, LabelEncoder
from structgp.data.links import GraphSplit
from structgp.data.rules import broken_tuple
from structgp.data.schemes import Allowed
from structgp.errors import InputError
from structgp.gp import Posterior
from structgp.structures import ByValues, Rules, Spec, Structure, chain, structure_for

KEPT_DRAWS = 4
"""Number of sets of draws that a model keeps for further questions: those used last."""

ENTROPY_SAMPLES = 64

MOST_DRAWS = 10_000
"""Most draws that an answer may average over. The Monte Carlo error of a probability is then at most .005,
and the scores of 1,000 tokens with 10 labels take 800 MB."""


@dataclass(frozen=True)
class Question:
    """How a question is answered.

    n_draws : number of draws of the potentials that an answer averages over; 0 plugs in the posterior mean.
    shift : (V,), added to the node scores of every token. device : where the answer is computed. decode :
    the criterion by which labels are chosen: 'accuracy', 'f1', 'sequence' or 'cost'. costs : (V, V) cost of
    each predicted label (column) for each true label (row), for 'cost'. local : True if probabilities of
    single labels come from ``local_points``, if the model has them, rather than from the draws."""

    n_draws: int = 128
    shift: Tensor | None = None
    device: str = "cpu"
    decode: str = "accuracy"
    costs: np.ndarray | None = None
    local: bool = False

    @property
    def by_tokens(self) -> bool:
        """True if ``local_points`` are wanted, and the device allows them."""
        return self.local and torch.device(self.device).type == "cpu"


@dataclass(frozen=True)
class Model:
    """A fitted posterior with the encoders of its features and labels. Answering changes nothing visible in
    it, so several threads may ask at once.

    spec : the declared structure that answers. predictor : a structure of the user's own that answers in
    its place, which a file does not keep. n_draws : number of draws that an answer averages over unless the
    question says otherwise; 0 plugs in the posterior mean. seed : that of those draws. info : facts about
    the fit that are worth keeping (bound, time, versions). extra : anything that the caller wants kept with
    the model, such as the source of a feature template; JSON values only. constraints : those on labellings
    in every answer. spread : factor on how far draws lie from the posterior mean. calibration : what sets
    with a guarantee need, None if the model is not calibrated. own : encoders of features that belong to
    edges alone, by template. annotators : the reliability of those whose labels the model was fitted to,
    None if labels were taken as true."""

    encoder: FeatureEncoder
    labels: LabelEncoder
    posterior: Posterior
    spec: Spec = field(default_factory=chain)
    n_draws: int = 128
    seed: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    predictor: Structure | None = None
    constraints: Allowed | None = None
    spread: float = 1.0
    calibration: Calibration | None = None
    own: dict[str, FeatureEncoder] = field(default_factory=dict)
    annotators: Annotators | None = None
    _lock: Any = field(default_factory=threading.RLock, init=False, repr=False, compare=False)
    _kept: dict[tuple[int, str], Draws] = field(default_factory=dict, init=False, repr=False, compare=False)
    _placed: dict[str, Posterior] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[type[Model], tuple[Any, ...]]:
        """A copy starts without kept draws."""
        return Model, tuple(getattr(self, f.name) for f in fields(self) if f.init)

    @cached_property
    def structure(self) -> Structure:
        """The structure that answers."""
        if self.predictor is not None:
            return self.predictor
        return structure_for(self.spec, self.rules, self.labels.classes)

    @cached_property
    def split(self) -> Any:
        """The features that each template sees: a ``FeatureSplit``, or a ``GraphSplit``."""
        if self.spec.is_chain:
            return FeatureSplit(self.encoder, self.spec)
        return GraphSplit(self.encoder, self.spec, self.own, self.labels.classes)

    @cached_property
    def local_points(self) -> LocalPoints | None:
        """A quicker way to compute label probabilities; None if the model has none."""
        return LocalPoints.of(self)

    @cached_property
    def rules(self) -> Rules | None:
        """The constraints, if they forbid anything."""
        rules = None if self.constraints is None else Rules.of(self.constraints)
        return None if rules is None or rules.is_free else rules

    def ask(self, X: Sequence[Any], question: Question | None = None) -> Asked:
        """The examples X, encoded once, to be asked several questions under the same settings."""
        question = question or Question(self.n_draws)
        if self.spec.is_chain:
            if question.by_tokens and self.local_points is not None:
                return Asked(self, question, self.encoder.transform(X, apart=False), given=X)
            return Asked(self, question, self.encoder.transform(X))
        shapes = [shape_of(x, self.spec.form, f"X[{n}]") for n, x in enumerate(X)]
        rows = self.encoder.transform([shape.nodes for shape in shapes])
        return Asked(self, question, rows, links_of(self.split, rows, shapes), shapes)

    def draws(self, n_draws: int, device: str = "cpu") -> Draws:
        """Joint draws of all potentials, or the posterior mean for 0 draws. They are kept for further
        questions, since a fitted posterior does not change any more."""
        with self._lock:
            found = self._kept.pop((n_draws, device), None)
            if found is None:
                if device not in self._placed:
                    is_there = torch.empty(0, device=device).device == self.posterior.node.m.device
                    there = self.posterior if is_there else copy.deepcopy(self.posterior).to(device)
                    self._placed[device] = there
                here = self._placed[device]
                found = sample(here, n_draws, self.seed, self.spread) if n_draws else mean(here)
            self._kept[n_draws, device] = found  # the latest comes last
            while len(self._kept) > KEPT_DRAWS:
                del self._kept[next(iter(self._kept))]
            return found


class Asked(Encoded):
    """Examples and the answers about them. If there are several layers, answers about tokens come one layer
    after the other."""

    def marginals(self, known: Known | None = None) -> list[np.ndarray]:
        """(T, V) label probabilities of each sequence."""
        if self.local_points(known) is not None:
            return self._quick_marginals
        return self._each(known, np.empty((0, len(self.model.labels.classes))), Potentials.marginals)

    @cached_property
    def _quick_marginals(self) -> list[np.ndarray]:
        """``marginals`` from ``local_points``, computed once: labels are chosen by them, and they are
        answers themselves."""
        quick = self.model.local_points
        assert quick is not None
        return quick.marginals(self.rows, self.question.shift)

    def local_points(self, known: Known | None = None) -> LocalPoints | None:
        """The ``LocalPoints`` that answer in place of draws; None if draws are used."""
        if known is not None or not self.question.by_tokens:
            return None
        if self.model.rules is not None:
            self._checked(None)
        return self.model.local_points

    def monte_carlo_error(self, known: Known | None = None) -> list[np.ndarray]:
        """(T, V) standard errors of ``marginals`` due to sampling labellings, for a likelihood that only
        gives values; 0 if answers are exact given the draws."""
        none = np.empty((0, len(self.model.labels.classes)))
        if not isinstance(self.model.structure, ByValues):
            return [np.zeros((len(r), none.shape[1])) for r in self.rows]
        return self._each(known, none, lambda at: at.monte_carlo_error())

    def best_tokens(self, known: Known | None = None) -> list[np.ndarray]:
        """(T,) label indices: the labelling with the most tokens right in expectation, among those that the
        constraints allow."""
        rules = self.model.rules
        return self._chosen(known, lambda p, at, by: labellings.best_tokens(p, at, rules, by))

    def labels(self, known: Known | None = None) -> list[np.ndarray]:
        """(T,) label indices of each sequence, chosen by the question's ``decode``."""
        ways = {
            "accuracy": self.best_tokens,
            "f1": self.best_spans,
            "sequence": self.best_sequences,
            "cost": self.cheapest_tokens,
        }
        return ways[self.question.decode](known)

    def best_spans(self, known: Known | None = None) -> list[np.ndarray]:
        """(T,) label indices: the labelling with the highest expected span F1, among those that the
        constraints allow."""
        self.require("has_spans", "spans", "decode", "accuracy")
        model, rules, quick = self.model, self.model.rules, self.local_points(known)
        decoder = SpanDecoder.of(model.labels.classes, model.info.get("threshold"), model.constraints)
        found: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(self.rows)
        if quick is not None:
            p_of = self.marginals()
            each: list[Any] = [[] for _ in self.rows]
            for i, spans in quick.spans(self.rows, self.question.shift, decoder.boundaries, decoder.least):
                each[i] = spans

            def usual_of(i: int) -> np.ndarray:
                one = [p_of[i]]
                return self._chosen_by(one, lambda p, at, by: labellings.best_tokens(p, at, rules, by))[0]

            return decoder.all_labels(each, p_of, usual_of)
        for batch, at in self.potentials(known):
            at = at.on_host()
            each, p = likely_spans(at, decoder.boundaries, decoder.least), at.marginals()
            usual = labellings.best_tokens(p, at.layout, rules, at.structure).numpy()
            ps, usuals = ([batch.real(x, b) for b in range(len(batch.index))] for x in (p, usual))
            labels = decoder.all_labels(each, [q.numpy() for q in ps], usuals.__getitem__)
            for b, i in enumerate(batch.index.tolist()):
                found[i] = labels[b] if self._obeyed(i, labels[b]) else usuals[b]
        return found

    def cheapest_tokens(self, known: Known | None = None) -> list[np.ndarray]:
        """(T,) label indices: the labelling with the lowest expected cost, summed over tokens, among those
        that the constraints allow."""
        assert self.question.costs is not None
        costs, rules = torch.from_numpy(self.question.costs), self.model.rules
        return self._chosen(known, lambda p, at, by: labellings.cheapest_tokens(p, at, rules, costs, by))

    def _chosen(
        self, known: Known | None, choose: Callable[[Tensor, Any, Structure | None], Tensor]
    ) -> list[np.ndarray]:
        """(T,) label indices of each sequence, as returned by ``choose`` for marginals (B, T, V), layout
        and structure."""
        if self.local_points(known) is not None:
            return self._chosen_by(self.marginals(known), choose)
        none = np.empty(0, dtype=np.int64)
        return self._each(known, none, lambda at: choose(at.marginals(), at.layout, at.structure))

    def _chosen_by(
        self, found: list[np.ndarray], choose: Callable[[Tensor, Any, Structure | None], Tensor]
    ) -> list[np.ndarray]:
        """The same from the marginals (T, V) of each sequence."""
        if self.model.rules is None:  # tokens are independent, so all sequences go in one call
            p = torch.from_numpy(np.concatenate([np.empty((0, len(self.model.labels.classes))), *found]))
            labels = choose(p[None], None, None)[0].numpy()
            return np.split(labels, np.cumsum([len(q) for q in found])[:-1]) if found else []
        answers = [np.empty(0, dtype=np.int64)] * len(found)
        for index in by_length([len(p) for p in found], BATCH_TOKENS):
            padded = pad_sequence([torch.from_numpy(found[i]) for i in index], batch_first=True)
            lengths = torch.tensor([len(found[i]) for i in index])
            mask = torch.arange(padded.shape[1]) < lengths[:, None]
            labels = choose(padded, mask, self.model.structure).numpy()
            for b, i in enumerate(index):
                answers[i] = labels[b, : len(found[i])]
        return answers

    def _obeyed(self, i: int, labels: np.ndarray) -> bool:
        """True if labels of example i obey the rules on templates other than those of a chain."""
        rules = self.model.constraints
        if rules is None or not rules.more or self.links is None:
            return True
        return broken_tuple(rules, self.model.split, labels, self.links[i]) is None

    def best_sequences(self, known: Known | None = None) -> list[np.ndarray]:
        """(T,) label indices of the most probable whole labelling of each sequence."""
        self.require("has_decoder", "decoder", "decode", "accuracy")
        return [found[0][0] for found in self._n_best(1, known)]

    def n_best(self, n: int, known: Known | None = None) -> list[list[tuple[np.ndarray, float]]]:
        """The n most probable labellings of each sequence with their log-probabilities, best first; fewer
        if the sequence has fewer."""
        _check_number(n)
        self.require("has_n_best", "n best labellings")
        return self._n_best(n, known)

    def _n_best(self, n: int, known: Known | None) -> list[list[tuple[np.ndarray, float]]]:
        model, question = self.model, self.question
        found = [[] if len(r) else [(np.empty(0, dtype=np.int64), 0.0)] for r in self.rows]
        for batch, at in self.potentials(known):
            plugged = at
            if question.n_draws:
                mean_draw = model.draws(0, question.device)
                plugged = mean_draw.potentials(model.structure, batch, question.shift).given(batch.y)
            here = labellings.at_most(n, at)
            labels, values = labellings.n_best(at.on_host(), plugged.on_host(), here)
            for b, i in enumerate(batch.index.tolist()):
                found[i] = [
                    (batch.real(labels[:, k], b).numpy(), float(value))
                    for k, value in enumerate(values[b])
                    if value > -torch.inf
                ]
        return found

    def samples(self, n: int, known: Known | None = None) -> list[np.ndarray]:
        """(n, T) labellings of each sequence, drawn from the posterior; the same when asked again."""
        _check_number(n)
        self.require("has_sample", "labellings to draw")
        longest = max(map(len, self.rows), default=0) * len(self.model.labels.classes)
        if n * longest > labellings.MOST_NUMBERS:
            most = max(1, labellings.MOST_NUMBERS // longest)
            problem = f"{n:,} labellings would take too much memory"
            raise InputError("n", problem, f"draw at most {most:,} at once")
        found = [np.empty((n, 0), dtype=np.int64)] * len(self.rows)
        for i, at in self.one_by_one(known):
            seed = np.random.SeedSequence([self.model.seed, i]).generate_state(1)[0]
            generator = torch.Generator().manual_seed(int(seed))
            found[i] = labellings.sample_labellings(at, n, generator)[:, 0, at.mask[0]].numpy()
        return found

    def transition_marginals(self, known: Known | None = None) -> list[np.ndarray]:
        """(T - 1, V, V) joint probabilities of neighbouring labels; (0, V, V) for at most one token."""
        self.require("has_spans", "transition marginals")
        V = len(self.model.labels.classes)
        found = self._each(known, np.empty((0, V, V)), labellings.transition_marginals)
        return [p[: max(0, len(r) - 1)] for p, r in zip(found, self.rows, strict=True)]

    def log_probs(self, y: Sequence[Sequence[str | None]]) -> list[float | None]:
        """log p(y | x) of each labelling, or of its known part if it contains None. The answer is None if a
        label was never seen in training, and -inf for a labelling that the constraints forbid."""
        model, question = self.model, self.question
        encoded = model.labels.transform(y)
        if any((e == MISSING).any() for e in encoded):
            self.require("handles_missing", "answers where labels are missing")
        answers: list[float | None] = [0.0 if not len(r) else None for r in self.rows]
        known = [len(r) * bool((e > UNSEEN).all()) for r, e in zip(self.rows, encoded, strict=True)]
        for batch in self._batches(known, encoded, question.n_draws):
            draws = model.draws(self._affordable(batch, question.n_draws), question.device)
            at = draws.potentials(model.structure, batch, question.shift)
            values = labellings.log_prob(at, batch.y)
            for i, value in zip(batch.index.tolist(), values.tolist(), strict=True):
                answers[i] = value
        return answers

    def draw_marginals(self) -> Iterator[tuple[int, Tensor]]:
        """The index of each sequence in turn, with its label probabilities under each draw, (S, T, V)."""
        for i, at in self.one_by_one():
            yield i, at.ask("marginals")[:, 0]

    def spans(self, least: float, known: Known | None = None) -> list[list[tuple[int, int, str, float]]]:
        """Spans (start, stop, label, probability) of each sequence with a probability of at least
        ``least``."""
        self.require("has_spans", "spans")
        boundaries = Boundaries.of(self.model.labels.classes)
        found: list[list[tuple[int, int, str, float]]] = [[] for _ in self.rows]
        told = None if self.local_points(known) is None else self.marginals()
        for batch, at in self.potentials(known):
            at = at.on_host()
            each = likely_spans(at, boundaries, least if told is None else least / 2)
            q = None if told is None else at.marginals()
            for b, (i, spans) in enumerate(zip(batch.index.tolist(), each, strict=True)):
                if told is not None and q is not None:
                    both = told[i], batch.real(q, b).numpy()
                    spans = TokenRatios(*both, boundaries, self.model.constraints).agreeing(spans, least)
                found[i] = [(start, stop, boundaries.kinds[k], p) for start, stop, k, p in spans]
        return found

    def decoded_spans(self, least: float) -> list[list[tuple[int, int, str, float]]]:
        """``spans``, but from the draws by which labels are chosen for F1."""
        quick = self.local_points()
        if quick is None:
            return self.spans(least)
        boundaries = Boundaries.of(self.model.labels.classes)
        found: list[list[tuple[int, int, str, float]]] = [[] for _ in self.rows]
        for i, spans in quick.spans(self.rows, self.question.shift, boundaries, least):
            found[i] = [(start, stop, boundaries.kinds[k], p) for start, stop, k, p in spans]
        return found

    def span(
        self, start: int, stop: int, label: str | None, sense: str, known: Known | None = None
    ) -> tuple[float, Parts]:
        """Probability of a span in the only sequence, and the uncertainty about whether it is there."""
        self.require("has_spans", "spans")
        boundaries = Boundaries.of(self.model.labels.classes)
        kind = boundaries.kind_of(label, sense, start, stop, len(self.rows[0]))
        ((_, at),) = self.one_by_one(known)
        p = span_probability(at, boundaries, start, stop, sense, kind)
        average = float(at.average(p[:, None])[0])
        if self.local_points(known) is not None:
            both = self.marginals()[0], at.marginals()[0].numpy()
            ratios = TokenRatios(*both, boundaries, self.model.constraints)
            kinds = range(len(boundaries.kinds)) if kind is None else [kind]
            average = sum(ratios.probability(at, boundaries, start, stop, sense, k) for k in kinds)
        return average, event_uncertainty(p, at.share[:, 0])

    def token_uncertainty(self, known: Known | None = None) -> list[np.ndarray]:
        """(T, 2) total uncertainty of each token, and the part that is due to the data, in nats."""
        return self._each(known, np.empty((0, 2)), lambda at: torch.stack(token_uncertainty(at), -1))

    def sequence_uncertainty(self, known: Known | None = None) -> np.ndarray:
        """(N, 2) the same for each whole labelling."""
        self.require("has_entropy", "entropy")
        found = np.zeros((len(self.rows), 2))
        for i, at in self.one_by_one(known):
            generator = torch.Generator().manual_seed(self.model.seed)
            found[i] = [float(part[0]) for part in sequence_uncertainty(at, ENTROPY_SAMPLES, generator)]
        return found


def _check_number(n: Any) -> None:
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
        raise InputError("n", f"must be a number of labellings, got {n!r}", "use 1 or more")
