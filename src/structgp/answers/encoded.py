"""Examples that are encoded once: their batches and potentials given known labels, and the conversion of
labels and answers from and to the shape of the examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from structgp.answers.confusions import evidence_of
from structgp.answers.potentials import Potentials
from structgp.data.annotations import Annotations, Given
from structgp.data.batch import Batch, by_length, pad
from structgp.data.graphs import Shape
from structgp.data.labels import UNSEEN, as_label_lists, by_layer, check_labels, node_labels
from structgp.data.links import Links
from structgp.errors import InputError, warn_caller
from structgp.structures import Declared

if TYPE_CHECKING:
    from typing_extensions import Self

    from structgp.answers.ask import Model, Question

Known: TypeAlias = Sequence[Sequence[str | None]] | Annotations

BATCH_TOKENS, CACHED_NUMBERS = 2_000, 800_000
"""Most tokens of a batch, and most node scores of all its draws, so that they fit into a cache."""

MOST_SCORES = 1 << 26
"""Most scores of an example under all its draws: half a gigabyte, and an answer takes up to four times
that. A longer example gets fewer draws, with a warning."""

FEWEST_DRAWS = 16
"""Smallest number of draws that a long example gets, as many as represent the posterior in a fit. An
example that is too long even for them is refused."""


@dataclass(frozen=True)
class Encoded:
    """model : the model that answers. question : the settings of all answers. rows : (T, W) encoded tokens
    of each sequence. links, shapes : the tuples and shapes of examples that are not chains. kept :
    potentials for further questions, None if they are not to be kept. given : the sequences themselves, if
    ``rows`` do not yet distinguish values that training never saw."""

    model: Model
    question: Question
    rows: list[np.ndarray]
    links: list[Links] | None = None
    shapes: list[Shape] | None = None
    kept: list[tuple[Batch, Potentials]] | None = None
    given: Sequence[Any] | None = None

    @cached_property
    def rows_apart(self) -> list[np.ndarray]:
        """``rows`` in which values that training never saw are distinguished, as draws of scores need."""
        return self.rows if self.given is None else self.model.encoder.transform(self.given)

    @property
    def n_layers(self) -> int:
        """Number of labels per token."""
        return max(1, len(self.model.spec.layers))

    def some(self, index: Sequence[int]) -> Self:
        """The examples with these indices, in this order."""
        links = None if self.links is None else [self.links[i] for i in index]
        shapes = None if self.shapes is None else [self.shapes[i] for i in index]
        rows, given = [self.rows[i] for i in index], self.given and [self.given[i] for i in index]
        return replace(self, rows=rows, links=links, shapes=shapes, kept=None, given=given)

    def keeping(self) -> Self:
        """The same examples, with potentials that are computed only once for all questions without known
        labels, which is half of the cost of an answer. Memory: one number per draw, token and label."""
        return replace(self, kept=[])

    def narrowed(self, spread: float) -> Self:
        """The same, with draws that lie ``spread`` times as far from the posterior mean; for examples whose
        potentials are kept. Draws come with their mirror images, so their average is the mean."""
        found = []
        for batch, at in self.potentials():
            scores = tuple(torch.lerp(x.mean(0, keepdim=True), x, spread) for x in at.scores)
            found.append((batch, replace(at, scores=scores)))
        return replace(self, kept=found)

    def potentials(
        self, known: Known | None = None, n_draws: int | None = None
    ) -> Iterator[tuple[Batch, Potentials]]:
        """Batch after batch, with its potentials given the known labels. n_draws : None for as many as the
        question says."""
        if self.kept is None or known is not None or n_draws is not None:
            yield from self._computed(known, n_draws)
            return
        if not self.kept:
            self.kept.extend(self._computed(None, None))
        yield from self.kept

    def _computed(self, known: Known | None, n_draws: int | None) -> Iterator[tuple[Batch, Potentials]]:
        model, question, labels = self.model, self.question, None
        if known is not None or model.constraints is not None:
            labels = self._checked(known)
        n_draws = question.n_draws if n_draws is None else n_draws
        for batch in self._batches([len(r) for r in self.rows], labels, n_draws):
            draws = model.draws(self._affordable(batch, n_draws), question.device)
            at = draws.potentials(model.structure, batch, question.shift)
            if model.rules is not None and isinstance(model.structure, Declared):
                self._check_graphs(batch, at, known is not None)
            yield batch, at if labels is None else at.given(batch.y)

    def one_by_one(
        self, known: Known | None = None, n_draws: int | None = None
    ) -> Iterator[tuple[int, Potentials]]:
        """The index of each sequence that has tokens, with its potentials, without padding."""
        for batch, at in self.potentials(known, n_draws):
            at = at.on_host()
            for b, i in enumerate(batch.index.tolist()):
                yield i, at.one(b, len(self.rows[i]))

    def _each(
        self, known: Known | None, empty: np.ndarray, ask: Callable[[Potentials], Tensor]
    ) -> list[np.ndarray]:
        answers = [empty] * len(self.rows)
        for batch, at in self.potentials(known):
            values = ask(at).cpu().numpy()
            for b, i in enumerate(batch.index.tolist()):
                answers[i] = batch.real(values, b)
        return answers

    def _batches(
        self, lengths: Sequence[int], labels: Sequence[np.ndarray] | None, n_draws: int
    ) -> Iterator[Batch]:
        model, most, device = self.model, BATCH_TOKENS, self.question.device
        n_labels = len(model.labels.classes)
        if self._has_features:
            most = max(1, most // n_labels)
        most = min(most, max(1, MOST_SCORES // (max(1, n_draws) * self._scores_per_token)))
        fewest = min(max(1, n_draws), FEWEST_DRAWS)
        self._check_lengths(lengths, MOST_SCORES // (fewest * self._scores_per_token))
        if device == "cpu" and labels is None:  # with known labels, rounding depends on the padding
            most = min(most, max(1, CACHED_NUMBERS // (n_labels * max(1, n_draws))))
        for index in by_length(lengths, most):
            batch = pad(self.rows_apart, labels, model.encoder.pad_row, index, None, self.n_layers)
            batch = model.split(batch) if self.links is None else model.split(batch, self.rows, self.links)
            yield batch if device == "cpu" else batch.to(device)

    @property
    def _has_features(self) -> bool:
        """True if transitions, or tuples, have features: each of them then has its own table of scores."""
        split = self.model.split
        return split.next is not None or (self.links is not None and any(split.views[1:]))

    @property
    def _scores_per_token(self) -> int:
        """Scores per token under one draw: one per label, or a table of them if transitions have
        features."""
        n_labels = len(self.model.labels.classes)
        return n_labels**2 if self._has_features else n_labels

    def _affordable(self, batch: Batch, n_draws: int) -> int:
        """``n_draws``, or, if an example is very long, as many as there is memory for. Such an example has
        a batch for itself, so that no other answer depends on it."""
        length = batch.mask.shape[1]
        most = max(FEWEST_DRAWS, MOST_SCORES // max(1, length * self._scores_per_token) // 2 * 2)
        if n_draws <= most:
            return n_draws
        message = f"X[{int(batch.index[0])}]: an example of {length:,} tokens; its answers average over "
        message += f"{most} draws, not {n_draws}, for want of memory; shorter parts have them all"
        warn_caller(message)
        return most

    def require(self, ability: str, what: str, place: str = "predict_with", use: str = "chain") -> None:
        """InputError if the structure that answers lacks an ability."""
        structure = self.model.structure
        if not getattr(structure, ability):
            if structure.many_templates:
                problem = f"the structure {structure.spec} offers no {what}"
                raise InputError(
                    "structure", problem, "ask for predict_marginals or predict_template_marginals"
                )
            problem = f"{getattr(structure, 'name', type(structure).__name__)} offers no {what}"
            raise InputError(place, problem, f"use {use!r}")

    def _checked(self, known: Known | None) -> list[np.ndarray] | None:
        """The known labels as numbers, or, for annotations, the evidence that they give. InputError if the
        known labels or the constraints leave a sequence without any labelling."""
        model, encoded = self.model, None
        if isinstance(known, Annotations):
            if model.rules is not None and not isinstance(model.structure, Declared):
                self._check_possible(None)
            return self._weighed(known)
        if known is not None:
            self.require("handles_missing", "answers where labels are known")
            given = self.labels_given(known, "known")
            encoded = model.labels.transform(given)
            for n, labels in enumerate(encoded):
                if (labels == UNSEEN).any():
                    t = int((labels == UNSEEN).argmax())
                    problem = f"{given[n][t]!r} is not a label of the training data"
                    remedy = f"use None, or one of {', '.join(model.labels.classes)}"
                    raise InputError(f"known[{n}][{t}]", problem, remedy)
        if model.rules is not None and not isinstance(model.structure, Declared):
            self._check_possible(encoded)
        return encoded

    def _weighed(self, known: Annotations) -> list[np.ndarray]:
        """(N, V) for each example, the log-likelihood of what annotators said of each variable given its
        label, under the confusion matrices learned by the fit."""
        model, flat = self.model, []
        if model.annotators is None:
            problem = "annotations, and the model was fitted to labels that were taken for true"
            raise InputError("known", problem, "pass lists of labels, or fit it to annotations")
        if len(known) != len(self.rows):
            problem = f"annotations of {len(known)} sequences for {len(self.rows)} sequences of tokens"
            raise InputError("known", problem, "pass one dict per sequence")
        self.require("takes_evidence", "answers where annotations are known")
        for name in known.names:
            model.annotators.place(name)
        flat = known.flat(lambda n, y: self.some([n]).labels_given([y], "known")[0])
        seen = set(model.labels.classes)
        for n, of in enumerate(flat):
            for name, labels in of.items():
                strange = next((v for v in labels if v is not None and v not in seen), None)
                if strange is not None:
                    problem = f"{strange!r} is not a label of the training data"
                    remedy = f"use None, or one of {', '.join(model.labels.classes)}"
                    raise InputError(f"known[{n}][{name!r}]", problem, remedy)
        table, sequential = model.annotators.known, model.annotators.counts.shape[1] > 1
        given = Given.read(flat, model.annotators.names, model.labels.classes, sequential)
        return evidence_of(given, [self.n_layers * len(rows) for rows in self.rows], table)

    def _check_lengths(self, lengths: Sequence[int], most: int) -> None:
        longest = max(range(len(lengths)), key=lengths.__getitem__, default=0)
        if lengths and lengths[longest] > max(1, most):
            problem = f"an example of {lengths[longest]:,} tokens would take too much memory"
            remedy = f"split it into parts of at most {max(1, most):,}, or use fewer draws (n_draws)"
            raise InputError(f"X[{longest}]", problem, remedy)

    def _check_graphs(self, batch: Batch, at: Potentials, given: bool) -> None:
        """InputError if the known labels or the constraints leave an example of the batch without any
        labelling. Cost: that of one more draw."""
        structure, one = at.structure, next(at.some_draws(1))
        assert isinstance(structure, Declared)
        scores = structure.keep_known(one.scores, batch.y, at.layout) if given else one.scores
        possible = structure.has_labelling(scores, at.layout)
        if not bool(possible.all()):
            n = int(batch.index[int((~possible).nonzero()[0, 0])])
            raise _no_labelling(n, len(self.rows[n]), given)

    def _check_possible(self, known: Sequence[np.ndarray] | None) -> None:
        constraints = self.model.constraints
        assert constraints is not None
        V, judged = len(self.model.labels.classes), set()
        for n, r in enumerate(self.rows):
            if known is None and len(r) in judged:
                continue
            judged.add(len(r))
            possible = np.ones((len(r), V), bool)
            if known is not None:
                there = known[n] >= 0
                possible[there] = np.eye(V, dtype=bool)[known[n][there]]
            if not constraints.has_labelling(possible):
                raise _no_labelling(n, len(r), known is not None)

    def labels_given(self, y: Any, name: str = "y") -> list[list[str | None]]:
        """Labels of each example as a list over its nodes in order, after checking that they fit."""
        y, layers = as_label_lists(y, name), self.model.spec.layers
        if self.shapes is None:
            return check_labels(self.rows, y, name)
        if name == "known" and layers:  # nothing is known about a layer that is not named
            empty = [{layer: [None] * len(rows) for layer in layers} for rows in self.rows]
            if len(empty) == len(y):
                each = zip(empty, y, strict=True)
                y = [{**e, **given} if isinstance(given, Mapping) else given for e, given in each]
        return node_labels(self.shapes, y, layers, name)

    def shaped(self, values: Sequence[Any]) -> list[Any]:
        """Values of the variables of each example, in the shape of the example: (H, W) for a grid, a dict
        by layer if there are several layers."""
        if self.shapes is None:
            return list(values)
        layers, whole = self.model.spec.layers, self.model.labels.integers
        if not layers:
            return [shape.fold(v, whole) for shape, v in zip(self.shapes, values, strict=True)]
        return [by_layer(layers, v) for v in values]

    @property
    def span_names(self) -> list[str]:
        """The labels in the form from which spans are read: B-chunk=NP for the label B-NP of a layer
        'chunk'."""
        return [self._span_name(label) for label in self.model.labels.classes]

    def span_labels(self, y: Sequence[Sequence[str]]) -> list[list[str]]:
        """Labels of each sequence in the form from which spans are read, one sequence per layer."""
        if not self.model.spec.layers:
            return [list(labels) for labels in y]
        found = []
        for labels in y:
            n = len(labels) // self.n_layers
            found += [[*map(self._span_name, labels[k * n : (k + 1) * n])] for k in range(self.n_layers)]
        return found

    def _span_name(self, label: str) -> str:
        layer, _, own = label.partition("=")
        if layer not in self.model.spec.layers:
            return label
        tag, dash, kind = own.partition("-")
        prefixed = own == tag == "O" or (len(tag) == 1 and dash)
        return f"{tag}-{layer}={kind}" if prefixed and dash else own if prefixed else label


def _no_labelling(n: int, n_tokens: int, given: bool) -> InputError:
    agrees = " and with the labels that are known" if given else ""
    problem = f"no labelling of its {n_tokens} tokens agrees with the constraints{agrees}"
    return InputError(f"sequence {n}", problem, "check the labels, or fit without constraints")
