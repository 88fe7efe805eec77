"""How reliable annotators are, as summarised from the posterior of their confusion matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_matrix
from scipy.special import entr

from structgp.answers.confusions import Confusions
from structgp.data.annotations import Given
from structgp.data.json_form import NUMBER, WHOLE, FormError, check_form
from structgp.errors import InputError

LEVEL, INTERVAL_DRAWS = 0.9, 4_000
"""Probability of credible intervals, and number of draws that they are computed from, which gives their
ends to about a twentieth of their width."""

DIGITS = 6
"""Decimal places of expected counts, so that a model from a file answers as the one that was saved."""


_ARRAYS = ("counts", "n_given", "common", "agreed")
_FORM = {"names": [str], "classes": [str], "counts": [[[[NUMBER]]]], "n_given": [WHOLE]}
_FORM |= {"common": [[WHOLE]], "agreed": [[WHOLE]]}
"""Form of the JSON in a model file."""


class Reliability(NamedTuple):
    """Probability that a label given by the annotator is right: its posterior mean, and the bounds of a
    credible interval, of 90 % unless another level is asked for."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Annotators(Mapping[str, Reliability]):
    """A mapping from the name of each annotator to their reliability, averaged over labels in proportion to
    their frequency among the tokens that they labelled.

    classes : the labels. counts : (A, C, V, V) expected number of times that a true label (row) was given
    as another (column), in each context. n_given : (A,) number of labels that each annotator gave. common :
    (A, A) number of tokens that both labelled. agreed : (A, A) number of those with the same label."""

    names: list[str]
    classes: list[str]
    counts: np.ndarray
    n_given: np.ndarray
    common: np.ndarray
    agreed: np.ndarray

    @classmethod
    def of(cls, known: Confusions, given: Given, classes: Sequence[str]) -> Annotators:
        """From the posterior ``known`` and the labels that were given. Cost O(E A) for E labels."""
        A, V = given.n_annotators, given.n_labels
        ones, n = np.ones(len(given.token), dtype=np.int64), int(given.token.max(initial=0)) + 1
        variable = given.sequence * n + given.token
        _, place = np.unique(variable, return_inverse=True)
        by_token = csr_matrix((ones, (place, given.annotator)), shape=(len(ones), A))
        by_label = csr_matrix((ones, (place * V + given.label, given.annotator)), shape=(len(ones) * V, A))
        common, agreed = ((m.T @ m).toarray() for m in (by_token, by_label))
        counts = known.counts.cpu().numpy().round(DIGITS)
        return cls(list(given.names), list(classes), counts, common.diagonal().copy(), common, agreed)

    @property
    def known(self) -> Confusions:
        """The posterior of the confusion matrices."""
        return Confusions(torch.from_numpy(self.counts))

    @property
    def agreement(self) -> np.ndarray:
        """(A, A) share of the tokens labelled by both that got the same label; nan if there are no such
        tokens."""
        return np.where(self.common > 0, self.agreed / np.maximum(self.common, 1), np.nan)

    def confusion(self, name: str) -> np.ndarray:
        """(V, V) posterior mean of the probability that a true label (row) is given as another (column),
        ordered as ``classes``; averaged over contexts by their frequency."""
        return self._whole(self.place(name)).mean

    def information(self, name: str, p: np.ndarray) -> np.ndarray:
        """(T,) information in nats that a label from this annotator would give about the true label of each
        token, whose probabilities are p (T, V): their mutual information under the mean confusion
        matrix."""
        table = self.confusion(name)
        return np.maximum(0, entr(p @ table).sum(-1) - p @ entr(table).sum(-1))

    def reliability(self, name: str, level: float = LEVEL) -> Reliability:
        """The reliability of an annotator, with a credible interval of probability ``level``."""
        if not 0 < level < 1:
            raise InputError("level", f"must be between 0 and 1, got {level}", "use 0.9 for 90 %")
        return self._whole(self.place(name)).reliability(level)

    def place(self, name: str) -> int:
        """The index of an annotator; InputError if the name is not known."""
        if name not in self.names:
            problem = f"{name!r} is not an annotator of the training data"
            raise InputError("annotator", problem, f"use one of {', '.join(self.names)}")
        return self.names.index(name)

    def _whole(self, a: int) -> _Rows:
        """The rows of annotator a, over all contexts."""
        counts = self.counts[a].sum(0)
        plain = Confusions(torch.from_numpy(counts[None, None]))
        return _Rows(plain.concentration[0, 0].numpy(), counts.sum(-1))

    def __getitem__(self, name: str) -> Reliability:
        return self.reliability(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """A table for people to read, the most reliable annotator first: number of labels, probability of
        being right with its interval, and agreement with the others on the tokens that they share."""
        width = max([len("annotator"), *map(len, self.names)])
        found = [f"{'annotator':<{width}}    labels   right  90 % interval  agrees with others"]
        for name in sorted(self.names, key=lambda name: -self[name].mean):
            a, (mean, low, high) = self.place(name), self[name]
            others = np.arange(len(self.names)) != a
            shared = self.common[a, others].sum()
            agrees = f"{self.agreed[a, others].sum() / shared:.1%}" if shared else "none shared"
            right = f"{mean:6.1%}  {low:5.1%} - {high:5.1%}"
            found.append(f"{name:<{width}}  {self.n_given[a]:8}  {right}  {agrees:>18}")
        return found

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"names": self.names, "classes": self.classes}
        return found | {name: getattr(self, name).tolist() for name in _ARRAYS}

    @classmethod
    def from_json(cls, state: dict[str, Any] | None) -> Annotators | None:
        if state is None:
            return None
        check_form(state, _FORM, "annotators")
        counts, n_given, common, agreed = (np.array(state[name]) for name in _ARRAYS)
        A, V = len(state["names"]), len(state["classes"])
        shapes = [counts.shape[:1] + counts.shape[2:], n_given.shape, common.shape, agreed.shape]
        if shapes != [(A, V, V), (A,), (A, A), (A, A)] or counts.min(initial=0) < 0:
            raise FormError("annotators do not fit their names and labels")
        return cls(state["names"], state["classes"], counts.astype(float), n_given, common, agreed)


@dataclass(frozen=True)
class _Rows:
    """concentration : (V, V) parameters of one annotator's Dirichlet posteriors. seen : (V,) expected
    number of times that each label was the true one of what they labelled."""

    concentration: np.ndarray
    seen: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        return self.concentration / self.concentration.sum(-1, keepdims=True)

    def reliability(self, level: float) -> Reliability:
        V, total = len(self.seen), self.seen.sum()
        share = self.seen / total if total > 0 else np.full(V, 1 / V)
        right = self.concentration.diagonal()
        wrong = self.concentration.sum(-1) - right
        draws = np.random.default_rng(0).beta(right, wrong, size=(INTERVAL_DRAWS, V)) @ share
        low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
        return Reliability(float(share @ self.mean.diagonal()), float(low), float(high))
