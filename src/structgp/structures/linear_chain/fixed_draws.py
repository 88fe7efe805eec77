"""The log-likelihood of a chain, averaged over draws, and its slopes in the mean of the draws.

Each draw is the mean plus an amount of its own. An optimiser moves the mean many times while the amounts
stay as they are, so exponentials of the amounts are taken once (``compiled_draws``), and no graph is built.
Letters as in ``program``.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from structgp.structures.linear_chain.messages import (
    SAFE_SPREAD,
    WORTH_COMPILING,
    compiled_loops,
    detour,
    widest,
)
from structgp.structures.masks import keep_known, leaves_open
from structgp.structures.program import Program, Scores
from structgp.structures.threads import share

LANES = 8
"""Draws that fill a vector instruction (``compiled_draws``)."""

MOST_LABELS = 64
"""Beyond it, the tables of eight draws do not fit into the nearest caches."""


class FixedDraws:
    """scores : of the amounts, nodes (S, B, T, V) and a table (S, V, V), -inf at what is not allowed. y :
    labels of the training data, weight : (B,) how often each sequence counts."""

    def __init__(self, program: Program, scores: Scores, y: Tensor, weight: Tensor) -> None:
        (f, g), mask = scores, program.layout.mask
        self._totals = _Totals(f, g, mask, weight)
        self._open: _Totals | None = None
        if leaves_open(y, mask):
            self._open = _Totals(keep_known(f, y, mask), g, mask, weight)
            return
        known, self._padding = torch.where(mask, y, 0), ~mask[..., None]
        self._told = weight @ program.score(scores, known).mean(0)
        hot = torch.nn.functional.one_hot(known, f.shape[-1]).to(f)
        self._nodes = hot * (mask * weight[:, None])[..., None]
        self._table = torch.einsum("bti,btj->ij", hot[:, :-1], self._nodes[:, 1:])

    def value_and_slopes(self, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """At mean scores f (B, T, V) and g (V, V): the log-likelihood, averaged over draws and summed over
        sequences, and its slopes in f and g. None where scores are too wide for probability space, or a
        sequence has no labelling."""
        whole = self._totals.value_and_slopes(f, g)
        if whole is None:
            return None
        if self._open is not None:
            told = self._open.value_and_slopes(f, g)
        else:
            value = (
                self._told + (self._nodes * f.masked_fill(self._padding, 0)).sum() + (self._table * g).sum()
            )
            told = (value, self._nodes, self._table) if bool(value.isfinite()) else None
        if told is None:
            return None
        return told[0] - whole[0], told[1] - whole[1], told[2] - whole[2]


class _Totals:
    """The sum of log Z over sequences, averaged over draws."""

    def __init__(self, f: Tensor, g: Tensor, mask: Tensor, weight: Tensor) -> None:
        from structgp.structures.linear_chain.compiled_draws import CHAINS_AT_ONCE

        (S, B, T, V), L = f.shape, LANES
        f = f.masked_fill(~mask[..., None], 0)
        top = f.amax(-1)
        factor = torch.exp(f - top[..., None]).view(S // L, L, B, T, V)
        self._factor = factor.permute(2, 0, 3, 4, 1).reshape(B, S // L, T * V * L).numpy()
        self._tops = weight @ torch.where(mask, top, 0).sum(-1).mean(0)
        self._width = widest(f, (-1,), f.masked_fill(f == -torch.inf, torch.inf))
        within = (f[:, :, 1:-1] == -torch.inf).any(-1).any(0) & mask[:, 2:]
        self._detour = detour(g, bool(within.any()), T)
        self._g, self._lengths, self._weight = g, mask.sum(-1), weight
        self._steps = weight @ (self._lengths - 1).clamp(min=0).to(weight)
        self._shape, self._units = f.shape, -(-B // CHAINS_AT_ONCE)

    def value_and_slopes(self, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        from structgp.structures.linear_chain.compiled_draws import draw_totals

        (S, B, T, V), L = self._shape, LANES
        table = self._g + g
        top = table.amax((-1, -2))
        lanes = torch.exp(table - top[:, None, None]).view(S // L, L, V * V).mT
        log_z, wide, nodes = np.empty(B), np.empty(B), np.empty((B, T, V))
        tables = np.empty((self._units, V, V))
        given = self._factor, f.contiguous().numpy(), lanes.reshape(S // L, -1).numpy()
        rest = self._lengths.numpy(), self._weight.numpy(), log_z, wide, nodes, tables
        share(partial(draw_totals, *given, *rest), self._units, S * B * T * V * V)
        finite = table.masked_fill(table == -torch.inf, torch.inf)
        spread = (self._width + wide.max() + widest(table, (-1, -2), finite)) * self._detour
        if not bool(spread <= SAFE_SPREAD[torch.float64]):  # nan where a draw has lost all its labellings
            return None
        value = self._tops + self._steps * top.mean() + self._weight @ torch.from_numpy(log_z)
        return value, torch.from_numpy(nodes), torch.from_numpy(tables.sum(0))


def fixed_draws(program: Program, f: Tensor, g: Tensor, y: Tensor, weight: Tensor) -> FixedDraws | None:
    """None where compiled loops are not to be had, would not pay, or do not know such scores."""
    draws = max(LANES, len(f))  # eight cost as much as one or two
    enough = draws * f[0].numel() * f.shape[-1] >= max(1, WORTH_COMPILING) and f.shape[-1] <= MOST_LABELS
    known = f.dtype == g.dtype == weight.dtype == torch.float64 and f.device.type == "cpu" and g.dim() == 3
    if not enough or not known or compiled_loops() is None:
        return None
    if LANES % len(f) == 0:
        f, g = f.repeat(LANES // len(f), 1, 1, 1), g.repeat(LANES // len(f), 1, 1)
    if len(f) % LANES:
        return None
    return FixedDraws(program, program.restrict((f, g)), y, weight)
