"""The choice of a program to sum over the labellings of each example: exact elimination within a budget of
table entries, the tree-reweighted bound beyond it, or the one that the user names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Generator, Tensor

from structgp.data.layout import GraphLayout
from structgp.structures.graph.elimination import Elimination, entries_of
from structgp.structures.graph.factor_graph import GraphProgram
from structgp.structures.graph.gibbs import Gibbs
from structgp.structures.graph.loopy import Loopy
from structgp.structures.graph.reweighted import Reweighted
from structgp.structures.program import Scores
from structgp.structures.semirings import Semiring

MOST_ENTRIES = 1 << 15
"""Largest number of table entries per example and draw at which elimination is used: about a millisecond
per sum over the labellings. A chain of 100 tokens and 9 labels has 8,100; a 6 x 6 grid of 3 labels 30,000.
Chosen by computing time, not on data."""

AS_DEAR = 32
"""Table entries per entry of an example's own tables up to which larger examples, too, are summed over
exactly: about the cost of the sweeps of the tree-reweighted bound. A chain of 300 tokens and 9 labels may
have 800,000. Chosen by computing time, not on data."""

NAMED: dict[str, Callable[[GraphLayout], GraphProgram]] = {
    "exact": Elimination,
    "reweighted": Reweighted,
    "loopy": Loopy,
    "gibbs": Gibbs,
}


def choose_program(
    layout: GraphLayout,
    n_labels: int,
    program: str = "auto",
    most_entries: int | None = None,
    climbing: bool = False,
) -> GraphProgram:
    """The program for these examples, kept with their layout. climbing : True for an optimiser, see
    ``GraphProgram.climbing``."""
    kept, key = layout.kept, ("program", n_labels, program, most_entries)
    if key not in kept:
        found = _chosen(layout, n_labels, program, most_entries)
        kept[key] = found, found.climbing()
    return kept[key][climbing]


def _chosen(layout: GraphLayout, n_labels: int, program: str, most_entries: int | None) -> GraphProgram:
    if program in NAMED:
        return NAMED[program](layout)
    budget = budgets(layout, most_entries)
    small = entries_of(layout, n_labels, float(budget.max())) <= budget
    if bool(small.all()):
        return Elimination(layout)
    if not bool(small.any()):
        return Reweighted(layout)
    parts = []
    for kind, which in ((Elimination, small), (Reweighted, ~small)):
        rows = which.nonzero()[:, 0]
        parts.append((rows, kind(layout.rows(rows))))
    return Mixed(layout, None, tuple(parts))


def budgets(layout: GraphLayout, most_entries: int | None = None) -> Tensor:
    """(B,) largest number of table entries at which each example is summed over exactly: ``most_entries``
    if given, else what ``MOST_ENTRIES`` and ``AS_DEAR`` allow."""
    if most_entries is not None:
        return torch.full((len(layout),), float(most_entries))
    own = torch.zeros(len(layout))
    for t in layout.tuples:
        own += t.mask.sum(1).cpu() * float(prod(t.sizes))
    return (AS_DEAR * own).clamp(min=MOST_ENTRIES)


@dataclass(frozen=True)
class Mixed(GraphProgram):
    """Sums over some examples by one program, over others by another. parts : for each program, the numbers
    of its examples, and the program."""

    parts: tuple[tuple[Tensor, GraphProgram], ...] = ()

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return all(program.exact for _, program in self.parts)

    def climbing(self) -> Mixed:
        return replace(self, parts=tuple((rows, program.climbing()) for rows, program in self.parts))

    def _join(self, ask: Callable[[GraphProgram, Scores], Any], scores: Scores, dim: int = 1) -> Any:
        """The answers of all parts, put together in the order of the examples."""
        found = [ask(program, self._some(scores, rows)) for rows, program in self.parts]
        order = torch.cat([rows for rows, _ in self.parts]).argsort().to(scores[0].device)
        if isinstance(found[0], Tensor):
            return torch.cat(found, dim).index_select(dim, order)
        return tuple(torch.cat(each, dim).index_select(dim, order) for each in zip(*found, strict=True))

    def _some(self, scores: Scores, rows: Tensor) -> Sequence[Tensor]:
        rows = rows.to(scores[0].device)
        apart = [
            True,
            *(g.dim() > 1 + t.arity for g, t in zip(scores[1:], self.layout.tuples, strict=True)),
        ]
        return [x.index_select(1, rows) if own else x for x, own in zip(scores, apart, strict=True)]

    def log_total(self, scores: Scores, semiring: Semiring) -> Tensor:
        return self._join(lambda program, some: program.log_total(some, semiring), scores, -1)

    def slopes(self, scores: Scores) -> tuple[Tensor, ...]:
        return self._join(lambda program, some: program.slopes(some), scores)

    def node_marginals(self, scores: Scores) -> Tensor:
        return self._join(lambda program, some: program.node_marginals(some), scores)

    def bracket(self, scores: Scores) -> tuple[Tensor, Tensor]:
        return self._join(lambda program, some: program.bracket(some), scores)

    def decode(self, scores: Scores) -> Tensor:
        return self._join(lambda program, some: program.decode(some), scores)

    def n_best(self, scores: Scores, n: int) -> tuple[Tensor, Tensor]:
        return self._join(lambda program, some: program.n_best(some, n), scores)

    def sample(self, scores: Scores, generator: Generator) -> Tensor:
        return self._join(lambda program, some: program.sample(some, generator), scores)

    def entropy(self, scores: Scores) -> Tensor:
        return self._join(lambda program, some: program.entropy(some), scores)
