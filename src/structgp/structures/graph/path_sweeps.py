"""The tree-reweighted bound over forests of monotone paths, by sweeps over the variables.

log Z(f, g) <= sum_k w_k log Z_k(f + d_k, g_k) with sum_k w_k d_k = 0 for each variable and label, w_k = 1 /
K, and tables of forest k scaled by K / (number of forests that have the edge). If one variable alone may
change, the bound falls most when its marginals in all forests are made their geometric mean: d_k += mean_j
log p_j - log p_k. A sweep does this for each variable in turn, forth and back (Kolmogorov's order; Meltzer,
Globerson and Weiss, 2009); messages along the paths are renewed on the way, so that the bound never rises.
Variables of one level have no edge in common and are updated together: a grid of H x W needs H + W - 1
steps each way.

Letters: as in ``layout``; M edges of all examples and templates together, K forests. A variable is known by
its place b N + n.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structgp.data.layout import GraphLayout
from structgp.structures.graph.cover import FLOOR, Solution, factors_of, is_shared
from structgp.structures.graph.edge_rows import label_ranges
from structgp.structures.graph.forests import levels
from structgp.structures.program import Scores
from structgp.threads import if_numba

WORTH_COMPILING = 10_000
"""Smallest S B N V^2 at which compiled loops are used: tiny problems never wait for numba to start. Less
than for chains, since there are many sweeps."""


@dataclass(frozen=True)
class PathPlan:
    """weight : (B, K) weights of the forests of each example, 0 at padding. into, out : (B N, K) the edge
    that leads into a variable in a forest, and the one out of it; -1 for none. ends : (M, 2) earlier and
    later variable of each edge. template, place : (M,) its template and its tuple, b E + e. flip : (M,)
    true where the tuple names the later variable first. scale : (M,) multiplier of its table.
    levels : variables, level by level."""

    weight: Tensor
    into: Tensor
    out: Tensor
    ends: Tensor
    template: Tensor
    place: Tensor
    flip: Tensor
    scale: Tensor
    levels: tuple[Tensor, ...]

    @staticmethod
    def of(layout: GraphLayout, covers: list[list[list[int]]]) -> PathPlan:
        """covers : for each example its forests, lists of positions in its ``factors_of``."""
        B, N = layout.mask.shape
        K = max([1, *map(len, covers)])
        into, out, weight = np.full((B * N, K), -1), np.full((B * N, K), -1), np.zeros((B, K))
        edges: list[tuple[int, int, int, int, bool]] = []
        scale: list[float] = []
        by_level: dict[int, list[int]] = {}
        there = layout.mask.cpu().numpy()
        for b, (found, forests) in enumerate(zip(factors_of(layout), covers, strict=True)):
            first, times = len(edges), np.zeros(len(found), dtype=int)
            for t, e, (u, v) in found:
                at = b * layout.tuples[t].index.shape[1] + e
                edges.append((b * N + min(u, v), b * N + max(u, v), t, at, u > v))
            for k, forest in enumerate(forests):
                for e in forest:
                    u, v = edges[first + e][:2]
                    out[u, k] = into[v, k] = first + e
                    times[e] += 1
            k = max(1, len(forests))
            weight[b, :k] = 1 / k
            scale += (k / times).tolist()
            for n, level in enumerate(levels([x[2] for x in found], N)):
                if there[b, n]:
                    by_level.setdefault(level, []).append(b * N + n)
        table = torch.tensor(edges, dtype=torch.long).reshape(-1, 5)
        return PathPlan(
            torch.from_numpy(weight),
            torch.from_numpy(into),
            torch.from_numpy(out),
            table[:, :2].contiguous(),
            table[:, 2].contiguous(),
            table[:, 3].contiguous(),
            table[:, 4] > 0,
            torch.tensor(scale, dtype=torch.float64),
            tuple(torch.tensor(by_level[level]) for level in sorted(by_level)),
        )

    def to(self, device: torch.device) -> PathPlan:
        moved = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved, levels=tuple(x.to(device) for x in self.levels))


class PathCover:
    """A cover of examples whose factors all have two variables. covers : as in ``PathPlan.of``."""

    def __init__(self, layout: GraphLayout, rows: Tensor, covers: list[list[list[int]]]) -> None:
        self.rows, self.layout = rows, layout.rows(rows)
        self.plan = PathPlan.of(self.layout, covers).to(rows.device)
        self.kept: dict[Any, Any] = {}

    def solve(self, scores: Scores, sweeps: int, tolerance: float, split: Tensor | None) -> Solution:
        f, *tables = scores
        quick = self._quick_way(f)
        found = quick and quick(self, f, tables, sweeps, tolerance, split)
        if found is not None:
            return found
        walk = PathSweeps(self.plan, self.layout.mask, f, self.edge_tables(f, tables), split)
        return walk.run(sweeps, tolerance, self, tables)

    def _quick_way(self, f: Tensor) -> Any:
        """The solver by a kernel or by compiled loops; None if neither is there or the problem is tiny."""
        from structgp.structures.graph import path_fused

        if path_fused.supports(self, f):
            return path_fused.solve_fused
        enough = f.numel() * f.shape[-1] >= WORTH_COMPILING and f.device.type == "cpu"
        return compiled_loops() if enough else None

    def edge_tables(self, f: Tensor, tables: Scores) -> Tensor:
        """(S, M, V, V) scores of each edge, scaled, earlier variable first; 0 outside a tuple's labels."""
        plan, (S, V) = self.plan, (f.shape[0], f.shape[-1])
        found = f.new_zeros((S, len(plan.ends), V, V))
        for at, t, g in zip(self._of_template, self.layout.tuples, tables, strict=True):
            if not len(at):
                continue
            rows, columns = label_ranges(t)
            found[:, at, rows, columns] = (
                g[:, None] if is_shared(g, t) else g.flatten(1, 2)[:, plan.place[at]]
            )
        found = torch.where(plan.flip[:, None, None], found.mT, found)
        return found.mul_(plan.scale[:, None, None].to(found))

    def table_slopes(self, joint: Tensor, tables: Scores) -> tuple[Tensor, ...]:
        """Gradients in the tables, by tuple or, for a shared table, by example. joint : (S, M, V, V)
        gradients in the unscaled table of each edge, earlier variable first."""
        plan, S, slopes = self.plan, len(joint), []
        joint = torch.where(plan.flip[:, None, None], joint.mT, joint)
        for at, t, g in zip(self._of_template, self.layout.tuples, tables, strict=True):
            (B, E), shared = t.mask.shape, is_shared(g, t)
            found = joint.new_zeros((S, B if shared else B * E, *t.sizes))
            if len(at):
                rows, columns = label_ranges(t)
                place = plan.place[at] // E if shared else plan.place[at]
                found.index_add_(1, place, joint[:, at, rows, columns])
            slopes.append(found if shared else found.view(S, B, E, *t.sizes))
        return tuple(slopes)

    @cached_property
    def _of_template(self) -> list[Tensor]:
        """The edges of each template."""
        return [(self.plan.template == t).nonzero()[:, 0] for t in range(len(self.layout.tuples))]


compiled_loops = if_numba("structgp.structures.graph.path_compiled", "solve_compiled")


class PathSweeps:
    """The sweeps in log space, as torch operations, for any scores, -inf included. Cost O(S M K V^2) for
    one sweep, memory O(S (M V^2 + B N K V))."""

    def __init__(
        self, plan: PathPlan, mask: Tensor, f: Tensor, tables: Tensor, split: Tensor | None
    ) -> None:
        """f : (S, B, N, V). tables : ``edge_tables``. split : (S, B N, K, V) starting value of d, zeros if
        None."""
        self.plan, self.tables, self.mask, (_, N) = plan, tables, mask, mask.shape
        self.weight = plan.weight.to(f).repeat_interleave(N, 0)[..., None]  # (B N, K, 1)
        K = self.weight.shape[1]
        self.f = f.flatten(1, 2)[:, :, None].expand(-1, -1, K, -1)
        self.h = self.f.clone() if split is None else self.f + centred(split, self.weight)
        self.alpha, self.beta = torch.zeros_like(self.h), torch.zeros_like(self.h)
        self.forest = torch.arange(K, device=f.device)
        self.gap = f.new_zeros((len(f), mask.numel()))

    def run(self, sweeps: int, tolerance: float, cover: PathCover, tables: Scores) -> Solution:
        self._go(forth=False, move=False)
        done, gap = 0, torch.inf
        while done < sweeps and gap > tolerance:
            self._go(forth=True, move=True)
            self._go(forth=False, move=True)
            done, gap = done + 1, float(self.gap.amax())
        self._go(forth=True, move=False)
        S, (B, N), V = len(self.h), self.mask.shape, self.h.shape[-1]
        there = self.mask.flatten()[:, None]
        p = torch.where(there[..., None], self._log_p(slice(None)).exp(), 0)
        # The total of a path is found at its end.
        last = (self.plan.out < 0) & there & (self.weight[..., 0] > 0)
        total = torch.where(last, (self.h + self.alpha).logsumexp(-1) * self.weight[..., 0], 0)
        return Solution(
            total.sum(-1).view(S, B, N).sum(-1),
            (p * self.weight).sum(2).view(S, B, N, V),
            cover.table_slopes(self._joints(), tables),
            torch.where(self.f > -torch.inf, self.h - self.f, 0),
            done,
            self.gap.view(S, B, N).amax(-1),
        )

    def _go(self, *, forth: bool, move: bool) -> None:
        """Renews the messages of one direction, and also d if ``move``."""
        plan, S, V = self.plan, len(self.h), self.h.shape[-1]
        side, told = (plan.into, self.alpha) if forth else (plan.out, self.beta)
        for at in plan.levels if forth else reversed(plan.levels):
            edge = side[at]  # (L, K)
            if len(plan.ends):
                other = plan.ends[edge, 0 if forth else 1]
                ahead = self.h[:, other, self.forest] + told[:, other, self.forest]
                scores = self.tables[:, edge.flatten()].view(S, *edge.shape, V, V)
                moved = (scores + ahead.unsqueeze(-1 if forth else -2)).logsumexp(-2 if forth else -1)
                told[:, at] = torch.where((edge >= 0)[..., None], moved, 0)
            if move:
                self._move(at)

    def _move(self, at: Tensor) -> None:
        log_p, weight = self._log_p(at), self.weight[at]
        floored = log_p.clamp(min=FLOOR)
        self.h[:, at] -= centred(floored, weight)
        apart = centred(log_p.exp(), weight).abs()
        self.gap[:, at] = apart.amax((-1, -2))

    def _log_p(self, at: Tensor | slice) -> Tensor:
        """(S, L, K, V) log-marginals in each forest; -inf where no labelling is possible."""
        x = self.h[:, at] + self.alpha[:, at] + self.beta[:, at]
        total = x.logsumexp(-1, keepdim=True)
        return x - total.masked_fill(total == -torch.inf, 0)

    def _joints(self) -> Tensor:
        """(S, M, V, V) gradients in the unscaled tables: means of marginals over the forests that have the
        edge."""
        plan, (S, _, K, V) = self.plan, self.h.shape
        joint = self.h.new_zeros((S, len(plan.ends), V, V))
        for k in range(K):
            v = (plan.into[:, k] >= 0).nonzero()[:, 0]
            edge = plan.into[v, k]
            before = (self.h + self.alpha)[:, plan.ends[edge, 0], k, :, None]
            x = self.tables[:, edge] + before + (self.h + self.beta)[:, v, k, None]
            total = x.flatten(2).logsumexp(-1)[..., None, None]
            x = (x - total.masked_fill(total == -torch.inf, 0)).exp()
            joint[:, edge] += x * (plan.scale[edge].to(x) * self.weight[v, k, 0])[:, None, None]
        return joint


def centred(x: Tensor, weight: Tensor) -> Tensor:
    """x (S, L, K, V) less its mean over forests, weighted by weight (L, K, 1); 0 where the weight is 0."""
    return torch.where(weight > 0, x - (weight * x).sum(2, keepdim=True), 0)
