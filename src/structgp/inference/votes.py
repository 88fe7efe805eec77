"""A first guess at what annotators' labels are worth, from the annotations alone, before any fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from structgp.answers.confusions import Confusions, evidence_of, rows_of
from structgp.data.annotations import Given
from structgp.data.batch import MISSING
from structgp.data.examples import Examples

FIRST_ROUNDS = 10
"""Number of rounds of the first guess, which does not look at features."""


def weigh_votes(examples: Examples) -> tuple[Examples, Confusions]:
    """The examples with evidence in place of their annotations, and what is known of the annotators: first
    guesses, from which a fit starts. y becomes the label that is most probable by this guess."""
    given = examples.given
    assert given is not None
    lengths = [len(y) for y in examples.y]
    known, frequency = first_guess(given, lengths, examples.weights)
    evidence, best = evidence_of(given, lengths, known), []
    for y, told in zip(examples.y, evidence, strict=True):
        best.append(np.where(y >= 0, (told + frequency).argmax(-1), MISSING) if len(y) else y)
    return replace(examples, y=best, evidence=evidence), known


def first_guess(
    given: Given, lengths: list[int], weights: np.ndarray | None
) -> tuple[Confusions, np.ndarray]:
    """Confusion matrices from the annotations alone, each token by itself: starting from the shares of
    votes, some rounds of Dawid and Skene's alternation; and (V,) the logs of the labels' frequencies.
    lengths : number of variables of each example. weights : how often each example counts, None for once.
    Cost O(E V) per round."""
    V, starts = given.n_labels, np.concatenate([[0], np.cumsum(lengths)])
    place = torch.from_numpy(starts[given.sequence] + given.token)
    rows, labels = rows_of(given), torch.from_numpy(given.label)
    often = torch.ones(len(rows), dtype=torch.float64)
    if weights is not None:
        often = torch.from_numpy(weights[given.sequence])
    votes = torch.zeros((int(starts[-1]), V), dtype=torch.float64)
    votes.index_put_((place, labels), torch.ones(len(place), dtype=torch.float64), accumulate=True)
    frequency = (1 + votes.sum(0)) / (V + votes.sum())
    truth = votes + frequency
    truth /= truth.sum(-1, keepdim=True)
    found = Confusions.unknown(given)
    for _ in range(FIRST_ROUNDS):
        found = Confusions.unknown(given)
        found.add(rows, truth[place] * often[:, None])
        told = frequency.log().expand_as(truth).clone().index_add_(0, place, found.evidence[rows])
        truth = told.softmax(-1)
    return found, frequency.log().numpy()
