"""Exact sums over the labellings of any factor graph, by variable elimination."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from structgp.structures.graph.elimination_order import MOST_ENTRIES, Cost, cost, entries_of
from structgp.structures.graph.elimination_schedule import schedule_of
from structgp.structures.graph.elimination_steps import total_by_steps
from structgp.structures.graph.program import GraphProgram
from structgp.structures.program import Scores
from structgp.structures.semirings import Semiring

__all__ = ["MOST_ENTRIES", "Cost", "Elimination", "cost", "entries_of"]


@dataclass(frozen=True)
class Elimination(GraphProgram):
    """Cost O(S sum of ``entries_of(layout)``) of every answer: for a tree O(N V^2) per example and draw."""

    def log_total(self, scores: Scores, semiring: Semiring) -> Tensor:
        f, *tables = scores
        pairs = list(zip(tables, self.layout.tuples, strict=True))
        shared = [g.dim() == 1 + t.arity for g, t in pairs]
        schedule = schedule_of(self.layout, f.shape[-1], shared)
        B = len(self.layout)
        parts = [
            g.flatten(1)[:, None].expand(-1, B, -1) if one else g.flatten(2)
            for g, one in zip(tables, shared, strict=True)
        ]
        flat = torch.cat([f.flatten(2), *parts], -1)
        return total_by_steps(flat, schedule, semiring)
