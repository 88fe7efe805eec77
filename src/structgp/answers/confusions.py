"""Confusion matrices of annotators: for each of them, how often each true label is given as which label.

The labels that annotators give are independent given the true ones: annotator a writes w where v is true
with probability pi_a[v, w]. Each row of pi_a has a Dirichlet prior, in which the probability of the right
label is the annotator's overall rate of right labels, so that rare labels borrow from frequent ones. Given
the expected number of times that v was given as w, the posterior of the row is a Dirichlet too, and what
was said of a token is evidence about its true label,

    E[v] = sum over annotators a of log of the mean of pi_a[v, what a said],

which is added to the scores of the structure: log p(annotations | f) = log Z(f + E) - log Z(f). These means
are the most probable matrices under a prior whose concentrations are larger by 1, so that alternating
between counts and matrices is an EM algorithm. (Variational Bayes would use E[log pi] in place of the log
of the mean. That trusts the best annotator too much: a confusion that was never seen counts as all but
impossible.)

If an annotator's labels also depend on the label they gave before, there is one matrix for each such label,
with a prior centred at the annotator's overall matrix.

Letters: A annotators, C contexts (1, or V + 1), V labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from structgp.data.annotations import Given

RIGHT, WRONG = 4.0, 2.0
"""Prior counts of right and wrong labels of an annotator: before they have given any, two thirds count as
right. Not chosen on data."""

STRENGTH = 2.0
"""Mean prior count per entry of a confusion matrix. Chosen after a look at four simulations on the embedded
corpus (6 per row was about as good), with other seeds than ``experiments.annotators`` uses."""


@dataclass
class Confusions:
    """The posterior of all confusion matrices. counts : (A, C, V, V) expected number of times that a true
    label (row) was given as another (column)."""

    counts: Tensor

    @classmethod
    def unknown(cls, given: Given) -> Confusions:
        shape = given.n_annotators, given.n_contexts, given.n_labels, given.n_labels
        return cls(torch.zeros(shape, dtype=torch.float64))

    @property
    def prior(self) -> Tensor:
        """(A, C, V, V) prior concentrations, given the current rate of right labels, which all rows of an
        annotator share."""
        V, whole = self.counts.shape[-1], self.counts.sum(1, keepdim=True)
        right = whole.diagonal(dim1=-1, dim2=-2).sum(-1) + RIGHT
        share = (right / (whole.sum((-1, -2)) + RIGHT + WRONG))[..., None, None]
        same = torch.eye(V, dtype=torch.float64, device=self.counts.device)
        row = STRENGTH * V * (share * same + (1 - share) * (1 - same) / (V - 1))
        if self.counts.shape[1] == 1:
            return row
        mean = (row + whole) / (row + whole).sum(-1, keepdim=True)
        return (STRENGTH * V * mean).expand_as(self.counts)

    @property
    def concentration(self) -> Tensor:
        """(A, C, V, V) concentrations of the posterior."""
        return self.prior + self.counts

    @property
    def evidence(self) -> Tensor:
        """(A C V, V) log p(given | true): one row per annotator, context and given label, one column per
        true label."""
        return self.mean.log().mT.reshape(-1, self.counts.shape[-1])

    @property
    def mean(self) -> Tensor:
        """(A, C, V, V) probability that a true label (row) is given as another (column)."""
        alpha = self.concentration
        return alpha / alpha.sum(-1, keepdim=True)

    @property
    def log_prior(self) -> float:
        """Log prior density of the current matrices, with concentrations larger by 1."""
        prior = self.prior + 1
        normaliser = prior.sum(-1).lgamma() - prior.lgamma().sum(-1)
        return float((normaliser + ((prior - 1) * self.mean.log()).sum(-1)).sum())

    def add(self, rows: Tensor, truth: Tensor) -> None:
        """Counts labels that were given, in place. rows : (E,) their rows in ``evidence``. truth : (E, V)
        probabilities of the true label of each, times its sample weight."""
        A, C, V, _ = self.counts.shape
        found = truth.new_zeros((A * C * V, V)).index_add_(0, rows, truth)
        self.counts += found.view(A, C, V, V).mT


def rows_of(given: Given) -> Tensor:
    """(E,) the row of ``Confusions.evidence`` of each label that was given."""
    row = (given.annotator * given.n_contexts + given.context) * given.n_labels + given.label
    return torch.from_numpy(row)


def evidence_of(given: Given, lengths: list[int], known: Confusions) -> list[np.ndarray]:
    """(N, V) for each example: the log-likelihood of the labels given to each variable, by its true
    label."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    place = torch.from_numpy(starts[given.sequence] + given.token)
    whole = torch.zeros((int(starts[-1]), given.n_labels), dtype=torch.float64)
    whole.index_add_(0, place, known.evidence.cpu()[rows_of(given)])
    return [part.numpy() for part in whole.split(lengths)]
