"""Fits to the labels of several annotators: rounds of another optimiser, each followed by an update of the
annotators' confusion matrices.

The bound is

    eta (E_q[ sum_n log Z(f_n + E_n) - log Z(f_n) ] + log prior of confusion matrices) - KL of potentials,

where E_n is the evidence of the annotations under the confusion matrices (``answers.confusions``), and eta
is how often the data count. Given the potentials, the optimal confusion matrices count each given label
once, divided among the true labels by their probabilities; these are the slopes of log Z(f + E) in E. The
prior is centred at how often an annotator is right on the whole, which is set to its value in the round
before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Generator, Tensor

from structgp.answers.confusions import Confusions, rows_of
from structgp.data.annotations import Given
from structgp.data.batch import Batch
from structgp.inference.problem import Problem, StepInfo
from structgp.inference.second_order import Draws, SecondOrder, SecondOrderState

SETTLED = 2e-3
"""Share of all given labels that may still move from one true label to another in the last round."""

MORE_ROUNDS = 2
"""Factor on the number of rounds that the other optimiser may take: where annotators hardly overlap, the
confusion matrices move slowly."""


@dataclass
class AnnotatedState:
    """inner : state of the other optimiser. counts : ``Confusions.counts``."""

    inner: SecondOrderState
    counts: Tensor


@dataclass
class Annotated:
    """Learns confusion matrices beside the potentials. then : the optimiser of the potentials. given : all
    annotations. known : what is known of the annotators, updated in place. data_weight : how often the data
    count."""

    then: SecondOrder
    given: Given
    known: Confusions
    data_weight: float = 1.0
    name: str = field(default=SecondOrder.name, init=False)
    _places: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)

    def start(self, problem: Problem, generator: Generator) -> AnnotatedState:
        self._tell(problem)
        return AnnotatedState(self.then.start(problem, generator), self.known.counts)

    def step(self, problem: Problem, state: AnnotatedState) -> tuple[AnnotatedState, StepInfo]:
        """One round. Cost: a round of the other optimiser, whose likelihoods cost twice as much here, and S
        likelihoods of every example."""
        self.known.counts = state.counts
        self._tell(problem)  # a checkpoint may have brought other counts than the batches have
        inner, info = self.then.step(problem, state.inner)
        if info.finished and not info.converged and inner.iteration < self._limit:
            info = replace(info, finished=False)
        counts = self._counts(problem, inner)
        moved = float((counts - state.counts).abs().sum() / (2 * counts.sum()))
        told = replace(info, elbo=info.elbo - self.penalty)
        if info.converged and moved > SETTLED:
            more = inner.iteration < self._limit
            told = replace(told, converged=False, finished=not more)
        self.known.counts = counts
        self._tell(problem)
        return AnnotatedState(inner, counts), told

    @property
    def _limit(self) -> int:
        return MORE_ROUNDS * self.then.max_rounds

    @property
    def penalty(self) -> float:
        """Nats that the prior of the confusion matrices takes off the bound."""
        return -self.data_weight * self.known.log_prior

    def _tell(self, problem: Problem) -> None:
        """Writes the evidence of the annotations, under the current confusion matrices, into the
        batches."""
        table = self.known.evidence
        for i, batch in enumerate(problem.batches):
            place, rows = self._place(i, batch)
            told = batch.y.zero_().view(-1, batch.y.shape[-1])
            told.index_add_(0, place, table[rows].to(told))

    def _place(self, i: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """For each label given in batch i: the number of its variable, counted through all examples of the
        batch, and the number of its row of evidence."""
        if i not in self._places:
            part = self.given.part(batch.index.tolist())
            lengths, T = batch.mask.sum(1).cpu().numpy(), batch.mask.shape[1]
            n = lengths[part.sequence]
            layer, token = part.token // n, part.token % n  # layers come one after the other
            place = part.sequence * batch.y.shape[1] + layer * T + token
            device = batch.y.device
            self._places[i] = torch.from_numpy(place).to(device), rows_of(part).to(device)
        return self._places[i]

    @torch.no_grad()
    def _counts(self, problem: Problem, state: SecondOrderState) -> Tensor:
        """New counts, from the probabilities of the true labels under the draws that stand for the
        posterior."""
        found, draws = Confusions(torch.zeros_like(self.known.counts)), Draws(problem, state.noise)
        for i, batch in enumerate(problem.batches):
            truth = truth_of(problem.structure.log_prob, draws.scores(i, draws.functions(i)), batch)
            truth = truth * (problem.weights[i] / self.data_weight).view(-1, 1, 1)
            place, rows = self._place(i, batch)
            found.add(rows.to(found.counts.device), truth.flatten(0, 1)[place].to(found.counts))
        if problem.together.size > 1:
            (found.counts,) = problem.together.sum(found.counts)
        return found.counts


def truth_of(log_prob: Callable[..., Tensor], scores: list[Tensor], batch: Batch) -> Tensor:
    """(B, N, V) probabilities of the true labels given the evidence in the batch, averaged over draws."""
    evidence = batch.y.detach().clone().requires_grad_()
    with torch.enable_grad():
        total: Any = log_prob(*scores, evidence, batch.layout).mean(0).sum()
    (found,) = torch.autograd.grad(total, evidence)
    return found
