"""Covers of a batch by forests, and what they find: the tree-reweighted bound, its gradients and its split.

Letters as in ``layout``; S draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from structgp.data.layout import GraphLayout, Tuples
from structgp.structures.graph.forests import Factor
from structgp.structures.program import Scores

FLOOR = -50.0
"""Floor of log-probabilities that are averaged: what is impossible in one forest becomes so in all."""


@dataclass(frozen=True)
class Solution:
    """log_z : (S, B) the bound. node : (S, B, N, V) its gradient in the node scores. tables : its gradients
    in the tables, (S, B, E, *sizes), or (S, B, *sizes), summed over tuples, for a shared table. split : the
    differences d of node scores between forests, as the cover stores them. sweeps : number of sweeps taken.
    gap : (S, B) largest difference between a forest's node marginals and their mean."""

    log_z: Tensor
    node: Tensor
    tables: tuple[Tensor, ...]
    split: Tensor
    sweeps: int
    gap: Tensor


class Cover(Protocol):
    """Forests that together have all factors of some examples, those at ``rows`` of the batch."""

    rows: Tensor

    def solve(self, scores: Scores, sweeps: int, tolerance: float, split: Tensor | None) -> Solution:
        """The solution for scores of these examples, which carry no gradient. split : starting value of d,
        zeros if None. Sweeps end once no gap is above ``tolerance``."""


def solve_all(
    covers: Sequence[Cover],
    layout: GraphLayout,
    scores: Scores,
    sweeps: int,
    tolerance: float,
    splits: Sequence[Tensor | None],
) -> tuple[Solution, list[Tensor]]:
    """The solution of the whole batch, and the split of each cover; with several covers, the solution's own
    split is empty."""
    if len(covers) == 1 and len(covers[0].rows) == len(layout):
        found = covers[0].solve(scores, sweeps, tolerance, splits[0])
        return found, [found.split]
    f, *tables = scores
    S, B = f.shape[:2]
    log_z, node, gap = f.new_zeros((S, B)), torch.zeros_like(f), f.new_zeros((S, B))
    slopes = [
        g.new_zeros((S, B, *t.sizes)) if is_shared(g, t) else torch.zeros_like(g)
        for g, t in zip(tables, layout.tuples, strict=True)
    ]
    most, kept = 0, []
    for cover, split in zip(covers, splits, strict=True):
        rows, matched = cover.rows, zip(tables, layout.tuples, strict=True)
        some = [f[:, rows], *(g if is_shared(g, t) else g[:, rows] for g, t in matched)]
        found = cover.solve(some, sweeps, tolerance, split)
        log_z[:, rows], node[:, rows], gap[:, rows] = found.log_z, found.node, found.gap
        for out, p in zip(slopes, found.tables, strict=True):
            out[:, rows] = p
        most = max(most, found.sweeps)
        kept.append(found.split)
    return Solution(log_z, node, tuple(slopes), f.new_zeros(0), most, gap), kept


class Solver(Protocol):
    @property
    def layout(self) -> GraphLayout: ...

    def solve(self, scores: Scores) -> Solution: ...


def with_slopes(solver: Solver, scores: Scores) -> Tensor:
    """(S, B) ``log_z`` of the solution, differentiable once in the scores. The split or messages that it
    also depends on are held fixed, since it is stationary in them."""
    return _Held.apply(solver, *scores)


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, solver: Solver, *scores: Tensor) -> Tensor:
        found = solver.solve(scores)
        shared = [is_shared(g, t) for g, t in zip(scores[1:], solver.layout.tuples, strict=True)]
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


def join_draws(parts: Sequence[Solution]) -> Solution:
    """Joins the solutions of several groups of draws into one."""
    if len(parts) == 1:
        return parts[0]
    log_z, node, split, gap = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("log_z", "node", "split", "gap")
    )
    tables = tuple(torch.cat(x) for x in zip(*(part.tables for part in parts), strict=True))
    return Solution(log_z, node, tables, split, max(part.sweeps for part in parts), gap)


def within_span(layout: GraphLayout, f: Tensor) -> Tensor:
    """f (S, B, N, V) with -inf at labels that a variable does not have."""
    if layout.span is None:
        return f
    label = torch.arange(f.shape[-1], device=f.device)
    first, end = layout.span[..., None].unbind(-2)
    return f.masked_fill((label < first) | (label >= end), -torch.inf)


def is_shared(g: Tensor, tuples: Tuples) -> bool:
    """True if one table serves all tuples."""
    return g.dim() == 1 + tuples.arity


def factors_of(layout: GraphLayout) -> list[list[tuple[int, int, Factor]]]:
    """For each example, (template, tuple, variables) of each of its factors other than nodes."""
    found: list[list[tuple[int, int, Factor]]] = [[] for _ in range(len(layout))]
    for t, tuples in enumerate(layout.tuples):
        index, mask = tuples.index.cpu(), tuples.mask.cpu()
        for (b, e), variables in zip(mask.nonzero().tolist(), index[mask].tolist(), strict=True):
            found[b].append((t, e, tuple(variables)))
    return found
