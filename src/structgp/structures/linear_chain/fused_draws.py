"""``fixed_draws`` on a GPU: two kernels and a dozen small operations per evaluation, without an autograd
graph. Letters as in ``program``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structgp.structures.linear_chain import fused
from structgp.structures.masks import keep_known, leaves_open
from structgp.structures.program import TRANSITIONS_AT_ONCE, Program, Scores, variance


class FusedDraws:
    """Arguments and methods as in ``FixedDraws``. Numbers stay in the precision of the scores; values are
    summed in double precision."""

    def __init__(self, program: Program, scores: Scores, y: Tensor, weight: Tensor) -> None:
        self._f, self._g = scores
        kind, self._mask, self._open = self._f.dtype, program.layout.mask, None
        (S, B, _, V) = self._f.shape
        self._share = (weight / S).to(kind).expand(S, B).contiguous()
        if leaves_open(y, self._mask):
            self._open = keep_known(self._f, y, self._mask)
            return
        labels = torch.where(self._mask, y, 0)
        told = program.score(scores, labels)
        self._told = (told.double() * self._share).sum()
        times = (self._mask * weight[:, None]).to(kind)
        self._labels = torch.zeros_like(self._f[0]).scatter_(-1, labels[..., None], times[..., None])
        steps = (labels[:, :-1] * V + labels[:, 1:]).flatten()
        self._steps = self._g.new_zeros(V * V).index_add_(0, steps, times[:, 1:].flatten()).view(V, V)

    def value_and_slopes(self, f: Tensor, g: Tensor) -> tuple[float, Tensor, Tensor] | None:
        """As in ``FixedDraws``."""
        total, nodes, table = self._totals(self._f, f, g)
        if self._open is not None:
            told, told_nodes, told_table = self._totals(self._open, f, g)
        else:
            told = self._told + (self._labels * f).sum(dtype=torch.float64)
            told = told + (self._steps * g).sum(dtype=torch.float64)
            told_nodes, told_table = self._labels, self._steps
        value = float(told - total)
        return (value, told_nodes - nodes, told_table - table) if math.isfinite(value) else None

    def variances(self, f: Tensor, g: Tensor, basis: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """As in ``FixedDraws``."""
        node, table = self._variances(self._f, f, g, basis)
        if self._open is not None:
            left = self._variances(self._open, f, g, basis)
            node, table = node - left[0], table - left[1]
        if not math.isfinite(float(node.sum() + table.sum())):
            return None
        return node.clamp_(min=0), table.clamp_(min=0)

    def _totals(self, added: Tensor, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log Z, averaged over draws and summed over sequences, and its slopes in f and g."""
        log_z, saved = fused.forward(f + added, g + self._g, self._mask)
        nodes, tables = saved.gradients(self._share)
        return (log_z.double() * self._share).sum(), nodes.sum(0), tables.sum(0)

    def _variances(
        self, added: Tensor, f: Tensor, g: Tensor, basis: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        at_once = max(1, TRANSITIONS_AT_ONCE // (len(f) * g.numel()))
        at_node, at_next = f.new_zeros(()), g.new_zeros(())
        for some, tables in zip(added.split(at_once), self._g.split(at_once), strict=True):
            node, bend = fused.next_variances(f + some, g + tables, self._mask)
            at_node, at_next = at_node + variance(node, basis).sum(0), at_next + bend.sum(0)
        return at_node / len(added), at_next / len(added)
