"""The answers of a factor graph, derived from its sum over labellings.

p(y) = exp(sum_n f[n, y_n] + sum_k sum_e g_k[e, y at the tuple e of template k]) / Z.

``scores`` is (f, g_1, g_2, ...): f (S, B, N, V) of nodes, -inf where a label is impossible; g_k (S, *sizes)
if one table serves all tuples of template k, else (S, B, E, *sizes), -inf allowed. Values at padding play
no part in any answer. Letters as in ``data.layout``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from structgp.data.layout import GraphLayout, Tuples
from structgp.structures.program import Program, Scores
from structgp.structures.semirings import LOG, Semiring


@dataclass(frozen=True)
class GraphProgram(Program):
    """A program for factor graphs; ``log_total`` is all that it must define."""

    layout: GraphLayout  # type: ignore[assignment]

    exact = True
    """False if ``log_total`` under the log semiring is a bound or an approximation."""

    def climbing(self) -> GraphProgram:
        """The program for an optimiser, which asks for log Z of the same examples again and again, at
        scores that hardly change."""
        return self

    def score(self, scores: Scores, y: Tensor) -> Tensor:
        told = self.node_score(scores[0], y)
        for g, tuples in zip(scores[1:], self.layout.tuples, strict=True):
            told = told + picked_scores(g, tuples, y).sum(-1)
        return told

    def slopes(self, scores: Scores) -> tuple[Tensor, ...]:
        """For each template, the probability of the labels of each of its tuples: (S, B, N, V), then
        (S, B, E, *sizes); 0 at padding."""
        parts = zip(scores[1:], self.layout.tuples, strict=True)
        return self._gradients([scores[0], *(by_tuple(g, t) for g, t in parts)], LOG)

    def bracket(self, scores: Scores) -> tuple[Tensor, Tensor]:
        """(S, B) each, a lower and an upper bound of log Z."""
        log_z = self.log_total(scores, LOG)
        return log_z, log_z

    def _entropy(self, scores: Scores) -> Tensor:
        total = self.log_total(scores, LOG)
        for x, p in zip(scores, self.slopes(scores), strict=True):
            x = x if x.dim() == p.dim() else x[:, None, None]
            total = total - torch.where(p > 0, x * p, 0).flatten(2).sum(-1)
        return total.clamp(min=0)


def by_tuple(g: Tensor, tuples: Tuples) -> Tensor:
    """(S, B, E, *sizes) scores of every tuple: a view of a shared table, other scores as they are."""
    if g.dim() > 1 + tuples.arity:
        return g
    B, E = tuples.mask.shape
    return g[:, None, None].expand(-1, B, E, *g.shape[1:])


def picked_scores(g: Tensor, tuples: Tuples, y: Tensor) -> Tensor:
    """(S, B, E) the score that labelling y (B, N) picks at each tuple; 0 at padding."""
    place, S = tuples.places(y), len(g)
    if g.dim() > 1 + tuples.arity:
        found = g.flatten(3).gather(-1, place[None, ..., None].expand(S, -1, -1, -1)).squeeze(-1)
    else:
        found = g.flatten(1).gather(-1, place.reshape(1, -1).expand(S, -1)).view(S, *place.shape)
    return torch.where(tuples.mask, found, 0)


@dataclass(frozen=True)
class Enumeration(GraphProgram):
    """Sums over all V^N labellings one by one, for tiny graphs and as the reference for other programs."""

    def log_total(self, scores: Scores, semiring: Semiring) -> Tensor:
        f, *tables = scores
        rows = [self._example(f, tables, b, semiring) for b in range(len(self.layout))]
        return torch.stack(rows, -1)

    def _example(self, f: Tensor, tables: Sequence[Tensor], b: int, semiring: Semiring) -> Tensor:
        """The sum of example b, (S,)."""
        there = self.layout.mask[b].nonzero()[:, 0]
        labellings = torch.tensor(
            list(product(range(f.shape[-1]), repeat=len(there))), dtype=torch.long, device=f.device
        )
        y = torch.zeros((len(labellings), f.shape[2]), dtype=torch.long, device=f.device)
        y[:, there] = labellings
        if self.layout.span is not None:
            low, high = self.layout.span[b, there].unbind(-1)
            y = y[((labellings >= low) & (labellings < high)).all(-1)]
        total = f.new_zeros((len(f), len(y)))
        for n in there.tolist():
            total = total + f[:, b, n].index_select(-1, y[:, n])
        for g, tuples in zip(tables, self.layout.tuples, strict=True):
            g = by_tuple(g, tuples)[:, b].flatten(2)
            for e in tuples.mask[b].nonzero()[:, 0].tolist():
                place = torch.zeros_like(y[:, 0])
                for j, n in enumerate(tuples.index[b, e].tolist()):
                    place = place * tuples.sizes[j] + (y[:, n] - tuples.first[j])
                total = total + g[:, e].index_select(-1, place)
        return semiring.sum(semiring.lift(total), -1)
