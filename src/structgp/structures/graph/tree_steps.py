"""The tree-reweighted bound over forests of any factors, by damped steps.

The same bound as in ``path_sweeps``, for factors of any number of variables. All variables move together:
d_k += step (mean_j log p_j - log p_k), with the step of an example halved whenever its bound would rise.

Letters: as in ``layout``; P forests of all examples together.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from structgp.data.layout import GraphLayout
from structgp.structures.graph.cover import FLOOR, Solution, factors_of, is_shared
from structgp.structures.graph.elimination import Elimination
from structgp.structures.graph.factor_graph import by_tuple
from structgp.structures.program import Scores
from structgp.structures.semirings import LOG
from structgp.threads import if_numba

SMALLEST_STEP = 1e-3

WORTH_COMPILING = 10_000
"""Smallest S B N V^2 at which compiled loops are used: tiny problems never wait for numba to start. Less
than for chains, since there are many sweeps."""


compiled_loops = if_numba("structgp.structures.graph.tree_compiled", "solve_compiled")


class TreeCover:
    """covers : for each example its forests, lists of positions in its ``factors_of``.

    forests : a layout whose P examples are the forests of all examples, one after the other. owner : (P,)
    the example of each forest. weight : (P,) its weight in that example. scale : for each template, (P, E)
    multipliers of the tuples' tables, 0 where the forest does not have the tuple."""

    def __init__(self, layout: GraphLayout, rows: Tensor, covers: list[list[list[int]]]) -> None:
        self.rows, self.covers = rows, covers
        self.layout = layout = layout.rows(rows)
        counts = torch.tensor([max(1, len(forests)) for forests in covers])
        self.owner = torch.arange(len(covers)).repeat_interleave(counts).to(rows.device)
        self.rank = torch.cat([torch.arange(int(n)) for n in counts]).to(rows.device)
        self.weight = (1 / counts.double()).repeat_interleave(counts).to(rows.device)
        spread = layout.rows(self.owner)
        scale = [torch.zeros(t.mask.shape, dtype=torch.float64) for t in spread.tuples]
        first = 0
        for found, forests in zip(factors_of(layout), covers, strict=True):
            members = [set(forest) for forest in forests]
            for e, (t, place, _) in enumerate(found):
                having = [k for k, forest in enumerate(members) if e in forest]
                scale[t][[first + k for k in having], place] = len(forests) / len(having)
            first += max(1, len(forests))
        self.scale = [x.to(rows.device) for x in scale]
        tuples = (replace(t, mask=x > 0) for t, x in zip(spread.tuples, self.scale, strict=True))
        self.forests = replace(spread, tuples=tuple(tuples))
        self.program = Elimination(self.forests)

    def solve(self, scores: Scores, sweeps: int, tolerance: float, split: Tensor | None) -> Solution:
        """split : (S, B N, K, V)."""
        f, *tables = scores
        if self.index is not None and f.numel() * f.shape[-1] >= WORTH_COMPILING and f.device.type == "cpu":
            found = compiled_loops()(self.index, self.layout, scores, sweeps, tolerance, split)
            if found is not None:
                return found
        owner, given = self.owner, self._scaled(tables)
        d = torch.zeros_like(f[:, owner]) if split is None else self._by_forest(split, f)
        d = d - self._mean(d)[:, owner]
        value, slopes = self._look(f[:, owner] + d, given)
        step, gap, done = torch.full_like(value, 0.5), self._gap(slopes[0]), 0
        while done < sweeps and float(gap.amax()) > tolerance and float(step.amax()) > SMALLEST_STEP:
            log_p = slopes[0].log().clamp(min=FLOOR)
            moved = d + step[:, owner, None, None] * (self._mean(log_p)[:, owner] - log_p)
            new_value, new_slopes = self._look(f[:, owner] + moved, given)
            better = new_value <= value
            kept = better[:, owner]
            d = torch.where(kept[..., None, None], moved, d)
            slopes = [torch.where(_like(kept, a), a, b) for a, b in zip(new_slopes, slopes, strict=True)]
            value = torch.where(better, new_value, value)
            step = torch.where(better, (step * 1.2).clamp(max=1.0), step / 2)
            gap, done = self._gap(slopes[0]), done + 1
        found = [self._mean(p * _like(x, p[0])) for p, x in zip(slopes[1:], self.scale, strict=True)]
        matched = zip(found, tables, self.forests.tuples, strict=True)
        by_template = tuple(p.sum(2) if is_shared(g, t) else p for p, g, t in matched)
        return Solution(value, self._mean(slopes[0]), by_template, self._by_place(d), done, gap)

    @cached_property
    def index(self) -> Any:
        """Index arrays for compiled loops; None without numba, or unless all factors have two variables."""
        matched = all(len(factor) == 2 for found in factors_of(self.layout) for _, _, factor in found)
        if not matched or compiled_loops() is None:
            return None
        from structgp.structures.graph.tree_compiled import TreeIndex

        return TreeIndex.of(self.layout, self.covers)

    def _by_forest(self, split: Tensor, f: Tensor) -> Tensor:
        """(S, P, N, V) from (S, B N, K, V)."""
        return split.unflatten(1, f.shape[1:3]).transpose(2, 3)[:, self.owner, self.rank]

    def _by_place(self, d: Tensor) -> Tensor:
        K = int(self.rank.max()) + 1
        out = d.new_zeros((len(d), len(self.rows), K, *d.shape[2:]))
        out[:, self.owner, self.rank] = d
        return out.transpose(2, 3).flatten(1, 2)

    def _scaled(self, tables: Scores) -> list[Tensor]:
        """(S, P, E, *sizes) tables of each forest."""
        found = []
        for g, t, x in zip(tables, self.forests.tuples, self.scale, strict=True):
            g = by_tuple(g, t) if is_shared(g, t) else g[:, self.owner]
            x = _like(x.to(g), g[0])
            found.append(torch.where(x > 0, g * torch.where(x > 0, x, 1), 0))
        return found

    def _look(self, h: Tensor, given: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """(S, B) the bound with node scores h (S, P, N, V), and marginals in each forest."""
        leaves = [x.detach().requires_grad_() for x in (h, *given)]
        with torch.enable_grad():
            total = self.program.log_total(leaves, LOG)
            slopes = torch.autograd.grad(total.sum(), leaves)
        return self._mean(total.detach()), list(slopes)

    def _mean(self, x: Tensor) -> Tensor:
        """(S, B, ...) weighted mean over the forests of each example, from (S, P, ...)."""
        out = x.new_zeros((len(x), len(self.rows), *x.shape[2:]))
        return out.index_add_(1, self.owner, x * _like(self.weight.to(x), x[0]))

    def _gap(self, p: Tensor) -> Tensor:
        apart = (p - self._mean(p)[:, self.owner]).abs().flatten(2).amax(-1)  # (S, P)
        out = p.new_zeros((len(p), len(self.rows)))
        return out.scatter_reduce_(1, self.owner.expand_as(apart), apart, "amax")


def _like(x: Tensor, other: Tensor) -> Tensor:
    """x with dimensions of 1 appended, so that it has as many as ``other``."""
    return x.reshape(*x.shape, *[1] * (other.dim() - x.dim()))
