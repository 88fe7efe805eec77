"""The tree-reweighted bound (Wainwright, Jaakkola and Willsky, 2005): log Z from above, for graphs too wide to
sum over.

log Z(f, g) <= sum_k w_k log Z_k(f + d_k, g_k): a weighted mean over forests that together have every factor,
convex in the scores, with the split d of node scores chosen to make it small. Its gradient at the best split
is what the forests agree on: marginals of every node and tuple. Where the graph is a forest, all is exact.

Examples whose factors all have two variables are covered by paths (``path_sweeps``); others, and graphs that
paths need many more forests for, by trees (``tree_steps``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from structgp.errors import InputError
from structgp.structures.graph.cover import Cover, Solution, factors_of, is_shared, join_draws, solve_all
from structgp.structures.graph.forests import cover_by_paths, cover_by_trees
from structgp.structures.graph.path_sweeps import PathCover
from structgp.structures.graph.program import GraphProgram
from structgp.structures.graph.tree_steps import TreeCover
from structgp.structures.program import Scores
from structgp.structures.semirings import LOG, Semiring

ENTRIES_AT_ONCE = 1 << 26
"""Numbers in tables of tuples that are held at once: beyond it, some draws at a time."""


@dataclass(frozen=True)
class Reweighted(GraphProgram):
    """sweeps : at most so many. tolerance : largest difference between a forest's node marginals and their
    mean at which the split counts as best; the bound is then off by about its square per node. warm : start
    from the split of the last call with as many draws and as many impossible labels: for optimisers, which
    call with scores that hardly change. Without it a call depends on nothing but its scores."""

    sweeps: int = 100
    tolerance: float = 1e-4
    warm: bool = False
    _kept: dict[Any, list[Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)

    exact = False

    def log_total(self, scores: Scores, semiring: Semiring) -> Tensor:
        """(S, B) an upper bound of log Z, convex in the scores."""
        if semiring is not LOG:
            self._refuse(f"no sum under {semiring}", "ask for log Z or marginals")
        return _Bound.apply(self, *scores)

    def solve(self, scores: Scores) -> Solution:
        """The bound and its gradients, some draws at a time."""
        f, *tables = (x.detach() for x in scores)
        given = (self._within_span(f), *tables)
        entries = sum(t.mask.numel() * prod(t.sizes) for t in self.layout.tuples)
        at_once = max(1, ENTRIES_AT_ONCE // max(1, entries))
        parts = zip(*(x.split(at_once) for x in given), strict=True)
        return join_draws([self._solve(part, n) for n, part in enumerate(parts)])

    def _solve(self, scores: Scores, part: int) -> Solution:
        f = scores[0]
        key = (part, len(f), f.dtype, int((f == -torch.inf).sum())) if self.warm else None
        splits = self._kept.get(key, [None] * len(self.covers))
        found, splits = solve_all(self.covers, self.layout, scores, self.sweeps, self.tolerance, splits)
        if self.warm:
            self._kept[key] = splits
        return found

    def _within_span(self, f: Tensor) -> Tensor:
        """-inf at labels that a variable does not have."""
        if self.layout.span is None:
            return f
        label = torch.arange(f.shape[-1], device=f.device)
        first, end = self.layout.span[..., None].unbind(-2)
        return f.masked_fill((label < first) | (label >= end), -torch.inf)

    @cached_property
    def covers(self) -> list[Cover]:
        """Paths where they need at most twice as many forests as trees do."""
        by_kind: dict[type, tuple[list[int], list[list[list[int]]]]] = {PathCover: ([], []), TreeCover: ([], [])}
        for b, found in enumerate(factors_of(self.layout)):
            factors = [factor for _, _, factor in found]
            trees, kind = cover_by_trees(factors), TreeCover
            if all(len(factor) == 2 for factor in factors):
                paths = cover_by_paths(factors)
                if len(paths) <= (2 * len(trees) if len(trees) > 1 else 1):
                    trees, kind = paths, PathCover
            by_kind[kind][0].append(b)
            by_kind[kind][1].append(trees)
        device = self.layout.mask.device
        return [
            kind(self.layout, torch.tensor(rows, device=device), forests)
            for kind, (rows, forests) in by_kind.items()
            if rows
        ]

    def _refuse(self, problem: str, remedy: str) -> NoReturn:
        raise InputError("structure", f"the tree-reweighted program has {problem}", remedy)


class _Bound(torch.autograd.Function):
    """The bound with the split held where it was left: marginals of the forests are then its gradient."""

    @staticmethod
    def forward(ctx: Any, program: Reweighted, *scores: Tensor) -> Tensor:
        found = program.solve(scores)
        shared = [is_shared(g, t) for g, t in zip(scores[1:], program.layout.tuples, strict=True)]
        ctx.slopes, ctx.shared = (found.node, *found.tables), (False, *shared)
        return found.log_z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slopes = []
        for p, shared in zip(ctx.slopes, ctx.shared, strict=True):
            if shared:
                slopes.append(torch.einsum("sb,sb...->s...", grad, p))
            else:
                slopes.append(p * grad.view(*grad.shape, *[1] * (p.dim() - 2)))
        return None, *slopes
