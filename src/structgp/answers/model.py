"""The fitted model: a value that can be asked, saved (``model_file``) and inspected."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structgp import answers as predict
from structgp.answers import Boundaries, Potentials, Uncertainty
from structgp.data.batch import Batch, by_length, pad
from structgp.data.encode import FeatureEncoder
from structgp.data.labels import MISSING, UNSEEN, LabelEncoder, check_labels
from structgp.data.schemes import Allowed
from structgp.errors import InputError
from structgp.gp import Posterior
from structgp.structures import Chain, Rules, Structure

STRUCTURES: dict[str, type[Chain]] = {"chain": Chain}

Known = Sequence[Sequence[str | None]]

_BATCH_TOKENS = 2_000
_DOUBT_SAMPLES = 64


def as_rules(found: Allowed | None) -> Rules | None:
    if found is None:
        return None
    return Rules(*map(torch.from_numpy, (found.follows, found.starts, found.ends)))


@dataclass
class Model:
    """A fitted posterior with the encoders that lead to it.

    likelihood : the name of what the posterior was fitted with, 'custom' for a user's function; for
    the reader. predict_with : the structure that answers, one of ``STRUCTURES``; predictor : another
    one in its place, which a file does not keep. constraints : on labellings, in every answer. n_draws,
    seed : of the draws that predictions average over. info : what is worth keeping of the fit (bound,
    time, versions). extra : what the caller wants kept with the model, such as the source of a feature
    template; JSON values only. shift : (V,), added to the scores of the labels of every token.

    Answers take ``known``, labels that are given: for each sequence a list with None where there is none.
    """

    encoder: FeatureEncoder
    labels: LabelEncoder
    posterior: Posterior
    likelihood: str = "chain"
    n_draws: int = 128
    seed: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    predict_with: str = "chain"
    predictor: Structure | None = None
    constraints: Allowed | None = None
    shift: Tensor | None = None
    device: str = "cpu"
    _kept: dict[tuple[str, int, int, str], predict.Draws] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _there: Posterior | None = field(default=None, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": {}, "_there": None}

    @property
    def structure(self) -> Structure:
        """What predictions are asked of."""
        if self.predictor is not None:
            return self.predictor
        return STRUCTURES[self.predict_with](self.rules)

    @property
    def rules(self) -> Rules | None:
        """The constraints, if they forbid anything."""
        rules = as_rules(self.constraints)
        return None if rules is None or rules.is_free else rules

    @property
    def _placed(self) -> Posterior:
        """The posterior, or a copy of it on the device where answers are computed."""
        if torch.device(self.device).type == "cpu":
            return self.posterior
        if self._there is None:
            self._there = copy.deepcopy(self.posterior)
        return self._there.to(self.device)

    def draws(self, average: str) -> predict.Draws:
        """'draws': joint draws of (f, g); 'mean': the posterior mean plugged in. Kept for the next
        call: a fitted posterior does not change any more."""
        key = (average, self.n_draws, self.seed, self.device)
        if key not in self._kept:
            self._kept = {k: v for k, v in self._kept.items() if k[1:] == key[1:]}
            self._kept[key] = (
                predict.mean(self._placed)
                if average == "mean"
                else predict.sample(self._placed, self.n_draws, self.seed)
            )
        return self._kept[key]

    # -- answers -------------------------------------------------------------------------------

    def marginals(
        self, X: Sequence[Any], average: str = "draws", known: Known | None = None
    ) -> list[np.ndarray]:
        """(T, V) label probabilities of each sequence."""
        empty = np.empty((0, len(self.labels.classes)))
        return self._each(X, known, average, empty, predict.marginals)

    def best_tokens(
        self, X: Sequence[Any], average: str = "draws", known: Known | None = None
    ) -> list[np.ndarray]:
        """(T,) label indices: the labelling with the most tokens right in expectation, of those that the
        constraints allow."""

        def ask(at: Potentials) -> Tensor:
            return predict.best_tokens(predict.marginals(at), at.mask, self.rules)

        return self._each(X, known, average, np.empty(0, dtype=np.int64), ask)

    def viterbi(self, X: Sequence[Any], known: Known | None = None) -> list[np.ndarray]:
        """(T,) label indices of the best whole labelling of each sequence."""
        self._require("has_decoder", "decoder", ("decode", "use 'marginal'"))
        return self._each(X, known, "mean", np.empty(0, dtype=np.int64), predict.viterbi)

    def pair_marginals(
        self, X: Sequence[Any], average: str = "draws", known: Known | None = None
    ) -> list[np.ndarray]:
        """(T - 1, V, V) probabilities of each label with the next one; (0, V, V) for at most one token."""
        self._require("has_walk", "pair marginals")
        V = len(self.labels.classes)
        found = self._each(X, known, average, np.empty((0, V, V)), predict.transition_marginals)
        lengths = [len(r) for r in self.encoder.transform(X)]
        return [p[: max(0, n - 1)] for p, n in zip(found, lengths, strict=True)]

    def n_best(
        self, X: Sequence[Any], n: int, average: str = "draws", known: Known | None = None
    ) -> list[list[tuple[np.ndarray, float]]]:
        """The n most probable labellings of each sequence with their log-probabilities, best first; fewer
        where there are not so many."""
        self._require("has_n_best", "n best labellings")
        rows = self.encoder.transform(X)
        found: list[list[tuple[np.ndarray, float]]] = [[] for _ in rows]
        for batch in self._batches(rows, known):
            plugged = self._potentials(batch, "mean").on_host()
            at = plugged if average == "mean" else self._potentials(batch, average).on_host()
            labels, values = predict.n_best(at, plugged, n)
            for b, i in enumerate(batch.index.tolist()):
                found[i] = [
                    (y[: len(rows[i])].numpy(), float(value))
                    for y, value in zip(labels[b], values[b], strict=True)
                    if value > -torch.inf
                ]
        for i, r in enumerate(rows):
            if not len(r):
                found[i] = [(np.empty(0, dtype=np.int64), 0.0)]
        return found

    def samples(
        self, X: Sequence[Any], n: int, average: str = "draws", known: Known | None = None
    ) -> list[np.ndarray]:
        """(n, T) labellings of each sequence, drawn from the posterior; the same when asked again."""
        self._require("has_walk", "labellings to draw")
        rows = self.encoder.transform(X)
        found = [np.empty((n, 0), dtype=np.int64)] * len(rows)
        for i, at in self._one_by_one(rows, known, average):
            seed = np.random.SeedSequence([self.seed, i]).generate_state(1)[0]
            generator = torch.Generator().manual_seed(int(seed))
            found[i] = predict.sample_labellings(at, n, generator)[:, 0].numpy()
        return found

    def token_doubt(
        self, X: Sequence[Any], average: str = "draws", known: Known | None = None
    ) -> list[np.ndarray]:
        """(T, 2) total doubt of each token, and the part that is the data's, in nats."""

        def ask(at: Potentials) -> Tensor:
            doubt = predict.token_uncertainty(at)
            return torch.stack([doubt.total, doubt.data], -1)

        return self._each(X, known, average, np.empty((0, 2)), ask)

    def sequence_doubt(
        self, X: Sequence[Any], average: str = "draws", known: Known | None = None
    ) -> np.ndarray:
        """(N, 2) the same of each whole labelling."""
        self._require("has_walk", "entropy")
        rows = self.encoder.transform(X)
        found = np.zeros((len(rows), 2))
        for i, at in self._one_by_one(rows, known, average):
            generator = torch.Generator().manual_seed(self.seed)
            doubt = predict.sequence_uncertainty(at, _DOUBT_SAMPLES, generator)
            found[i] = float(doubt.total[0]), float(doubt.data[0])
        return found

    def spans(
        self, X: Sequence[Any], least: float, average: str = "draws", known: Known | None = None
    ) -> list[list[tuple[int, int, str, float]]]:
        """Spans (start, stop, label) that are at least so probable, with their probabilities."""
        self._require("has_walk", "spans")
        boundaries = Boundaries.of(self.labels.classes)
        rows = self.encoder.transform(X)
        found: list[list[tuple[int, int, str, float]]] = [[] for _ in rows]
        for i, at in self._one_by_one(rows, known, average):
            found[i] = [
                (start, stop, boundaries.kinds[k], p)
                for start, stop, k, p in predict.likely_spans(at, boundaries, least)
            ]
        return found

    def span(
        self,
        x: Any,
        start: int,
        stop: int,
        label: str | None,
        sense: str,
        average: str = "draws",
        known: Sequence[str | None] | None = None,
    ) -> tuple[float, Uncertainty]:
        """Probability of a span in one sequence, and the doubt whether it is there."""
        self._require("has_walk", "spans")
        boundaries = Boundaries.of(self.labels.classes)
        if label is not None and label not in boundaries.kinds:
            kinds = ", ".join(map(repr, boundaries.kinds))
            raise InputError("label", f"{label!r} is no type of span", f"use one of {kinds}")
        rows = self.encoder.transform([x])
        if not 0 <= start < stop <= len(rows[0]):
            raise InputError(
                "start, stop",
                f"{start} to {stop} is no span of {len(rows[0])} tokens",
                "count from 0; stop is one past the last token",
            )
        kind = None if label is None else boundaries.kinds.index(label)
        ((_, at),) = self._one_by_one(rows, None if known is None else [known], average)
        p = predict.span_probability(at, boundaries, start, stop, sense, kind)
        return float(at.average(p[:, None])[0]), predict.event_uncertainty(p, at.share[:, 0])

    def draw_marginals(
        self, X: Sequence[Any], average: str = "draws"
    ) -> Iterator[tuple[int, Tensor]]:
        """(S, T, V) label probabilities under each draw, of sequence after sequence, with its place in
        X."""
        for i, at in self._one_by_one(self.encoder.transform(X), None, average):
            yield i, at.structure.marginals(at.f, at.g, at.mask)[:, 0]

    def log_probs(self, X: Sequence[Any], y: Known, average: str = "draws") -> list[float | None]:
        """log p(y | x) of each labelling, of its known part where there are None in it; None where a label
        was never seen in training. -inf for one that the constraints forbid."""
        encoded = self.labels.transform(y)
        if any((e == MISSING).any() for e in encoded):
            self._require("handles_missing", "answers where labels are missing")
        draws = self.draws(average)
        rows = self.encoder.transform(X)
        answers: list[float | None] = [0.0 if not len(r) else None for r in rows]
        known = [len(r) * bool((e > UNSEEN).all()) for r, e in zip(rows, encoded, strict=True)]
        for index in by_length(known, _BATCH_TOKENS):
            batch = pad(rows, encoded, self.encoder.pad_row, index).to(self.device)
            values = predict.log_prob(self._placed, self.structure, draws, batch, self.shift)
            for i, value in zip(index, values.tolist(), strict=True):
                answers[i] = value
        return answers

    # -- how ------------------------------------------------------------------------------------

    def _potentials(self, batch: Batch, average: str) -> Potentials:
        return predict.potentials(
            self._placed, self.structure, self.draws(average), batch, self.shift
        )

    def _each(
        self,
        X: Sequence[Any],
        known: Known | None,
        average: str,
        empty: np.ndarray,
        ask: Callable[[Potentials], Tensor],
    ) -> list[np.ndarray]:
        rows = self.encoder.transform(X)
        answers = [empty] * len(rows)
        for batch in self._batches(rows, known):
            values = ask(self._potentials(batch, average)).cpu().numpy()
            for b, i in enumerate(batch.index.tolist()):
                answers[i] = values[b, : len(rows[i])]
        return answers

    def _one_by_one(
        self, rows: Sequence[np.ndarray], known: Known | None, average: str
    ) -> Iterator[tuple[int, Potentials]]:
        """The potentials of each sequence that has tokens, without padding."""
        for batch in self._batches(rows, known):
            at = self._potentials(batch, average).on_host()
            for b, i in enumerate(batch.index.tolist()):
                yield i, at.one(b, len(rows[i]))

    def _batches(self, rows: Sequence[np.ndarray], known: Known | None) -> Iterator[Batch]:
        encoded = None if known is None else self._known(rows, known)
        if self.rules is not None:
            self._check_possible(rows, encoded)
        for index in by_length([len(r) for r in rows], _BATCH_TOKENS):
            yield pad(rows, encoded, self.encoder.pad_row, index).to(self.device)

    def _known(self, rows: Sequence[np.ndarray], known: Known) -> list[np.ndarray]:
        self._require("handles_missing", "answers where labels are known")
        encoded = self.labels.transform(check_labels(rows, known, "known"))
        for n, labels in enumerate(encoded):
            if (labels == UNSEEN).any():
                t = int((labels == UNSEEN).argmax())
                raise InputError(
                    f"known[{n}][{t}]",
                    f"{known[n][t]!r} is no label of the training data",
                    f"use None, or one of {', '.join(self.labels.classes)}",
                )
        return encoded

    def _check_possible(
        self, rows: Sequence[np.ndarray], known: Sequence[np.ndarray] | None
    ) -> None:
        assert self.constraints is not None
        V, judged = len(self.labels.classes), set()
        for n, r in enumerate(rows):
            if known is None and len(r) in judged:
                continue
            judged.add(len(r))
            possible = np.ones((len(r), V), bool)
            if known is not None:
                there = known[n] >= 0
                possible[there] = np.eye(V, dtype=bool)[known[n][there]]
            if not self.constraints.has_labelling(possible):
                agrees = "" if known is None else " and with the labels that are known"
                raise InputError(
                    f"sequence {n}",
                    f"no labelling of its {len(r)} tokens agrees with the constraints{agrees}",
                    "check the labels, or fit without constraints",
                )

    def _require(
        self, ability: str, what: str, mend: tuple[str, str] = ("predict_with", "use 'chain'")
    ) -> None:
        if not getattr(self.structure, ability):
            place, remedy = mend
            raise InputError(place, f"{type(self.structure).__name__} offers no {what}", remedy)
