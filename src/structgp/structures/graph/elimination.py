"""Exact sums over the labellings of any factor graph, by variable elimination.

log Z and its gradient come from compiled loops in probability space (``elimination_compiled``) if numba is
installed, the scores are on the CPU and there is enough to do. Torch operations (``elimination_steps``)
serve otherwise, for all other semirings, and if the spread of scores is too large for probability space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from structgp.structures.graph.elimination_order import MOST_ENTRIES, Cost, cost, entries_of
from structgp.structures.graph.elimination_schedule import Schedule, schedule_of
from structgp.structures.graph.elimination_steps import total_by_steps
from structgp.structures.graph.factor_graph import GraphProgram
from structgp.structures.program import Scores
from structgp.structures.semirings import LOG, Semiring
from structgp.threads import if_numba

__all__ = ["MOST_ENTRIES", "Cost", "Elimination", "cost", "entries_of"]

WORTH_COMPILING = 50_000
"""Smallest number of table entries, over all draws, at which compiled loops are used; the same as for
chains. Shapes alone decide, so that tiny problems never wait for numba to start."""


@dataclass(frozen=True)
class Elimination(GraphProgram):
    """Every answer costs O(S sum of ``entries_of(layout)``), times n log n for the n best; for a tree this
    is O(N V^2) per example and draw. Needs memory for a copy of all scores for each draw and example,
    shared tables included."""

    def log_total(self, scores: Scores, semiring: Semiring) -> Tensor:
        f, *tables = scores
        shared = [g.dim() == 1 + t.arity for g, t in zip(tables, self.layout.tuples, strict=True)]
        schedule = schedule_of(self.layout, f.shape[-1], shared)
        if semiring is LOG and _can_compile(scores, schedule):
            found = _Compiled.apply(schedule, shared, *scores)
            if found is not None:
                return found
        parts = [
            g.flatten(1)[:, None].expand(-1, len(self.layout), -1) if one else g.flatten(2)
            for g, one in zip(tables, shared, strict=True)
        ]
        return total_by_steps(torch.cat([f.flatten(2), *parts], -1), schedule, semiring)

    def node_marginals(self, scores: Scores) -> Tensor:
        """(S, B, N, V) the first of ``marginals``. Shared tables stay shared, which takes a third of the
        time."""
        f, *tables = self.restrict(scores)
        leaf = f.detach().requires_grad_()
        with torch.enable_grad():
            total = self.log_total((leaf, *tables), LOG).sum()
        return torch.autograd.grad(total, leaf)[0].contiguous()  # not a view of what else was computed


class _Compiled(torch.autograd.Function):
    """log Z (S, B); None if the spread of the scores is too large. Scores and gradients may take gigabytes:
    scores are copied once, and gradients, except those of shared tables, are views of one tensor."""

    @staticmethod
    def forward(ctx: Any, schedule: Schedule, shared: Sequence[bool], *scores: Tensor) -> Tensor | None:
        ctx.schedule, ctx.shared = schedule, [False, *shared]
        ctx.shapes = [x.shape[1 if one else 2 :] for x, one in zip(scores, ctx.shared, strict=True)]
        ctx.save_for_backward(*scores)
        found = _totals(ctx, scores, any(ctx.needs_input_grad))
        if found is None:
            return None
        ctx.gradient = found[1]
        return found[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Whoever asked may change what is handed out, so a second backward pass computes it again.
        found, ctx.gradient = ctx.gradient, None
        found = _totals(ctx, ctx.saved_tensors, True)[1] if found is None else found
        if not bool((grad == 1).all()):
            # An impossible example has gradient 0, whatever comes from above.
            found.mul_(grad.masked_fill(~grad.isfinite(), 0)[..., None])
        parts = zip(_apart(found, ctx.shapes), ctx.shared, strict=True)
        return None, None, *(part.sum(1) if one else part for part, one in parts)


def _totals(ctx: Any, scores: Sequence[Tensor], with_gradient: bool) -> Any:
    """The result of the compiled loops, from the scores of all templates one after another."""
    f = scores[0]
    flat = f.new_empty((*f.shape[:2], sum(map(prod, ctx.shapes))))
    for part, x, one in zip(_apart(flat, ctx.shapes), scores, ctx.shared, strict=True):
        part.copy_(x[:, None] if one else x)
    return compiled_loops().totals(flat, ctx.schedule, with_gradient)


def _apart(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views (S, B, *shape) of flat (S, B, L), one per template."""
    parts = flat.split([prod(shape) for shape in shapes], -1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


def _can_compile(scores: Scores, schedule: Schedule) -> bool:
    f = scores[0]
    enough = len(f) * schedule.entries >= max(1, WORTH_COMPILING)
    alike = all(x.dtype == f.dtype in (torch.float32, torch.float64) for x in scores)
    return enough and alike and f.device.type == "cpu" and compiled_loops() is not None


compiled_loops = if_numba("structgp.structures.graph.elimination_compiled")
