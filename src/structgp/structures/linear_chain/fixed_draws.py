"""The log-likelihood of a chain, averaged over draws, and its slopes in the mean of the draws.

Each draw is the mean plus an amount of its own. An optimiser moves the mean many times while the amounts
stay as they are, so exponentials of the amounts are computed once (``compiled_draws``), and no autograd
graph is built. Letters as in ``program``.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from structgp.structures.linear_chain.fused_draws import FusedDraws
from structgp.structures.linear_chain.messages import compiled_loops, is_fused
from structgp.structures.masks import keep_known, leaves_open
from structgp.structures.program import Program, Scores
from structgp.threads import share

LANES = 8
"""Number of draws that fill a vector instruction (``compiled_draws``)."""

WORTH_COMPILING = 500
"""Smallest B T V^2 for which compiled loops are used, whatever the number of draws. An optimiser comes back
a thousand times: torch operations, at some 50 microseconds per position, would then take longer than numba
takes to start."""

MOST_LABELS = 64
"""Largest number of labels: beyond it, the tables of eight draws do not fit into the nearest caches."""


class FixedDraws:
    """The expected log-likelihood as a function of the mean of the draws. scores : the amounts, of nodes
    (S, B, T, V) and of a table (S, V, V), -inf at what is not allowed. y : labels of the training data.
    weight : (B,) how often each sequence counts."""

    def __init__(self, program: Program, scores: Scores, y: Tensor, weight: Tensor) -> None:
        (f, g), mask = scores, program.layout.mask
        self._open: _Totals | None = None
        if leaves_open(y, mask):
            self._totals = _Totals(f, g, mask, weight)
            self._open = _Totals(keep_known(f, y, mask), g, mask, weight)
            return
        known, V = torch.where(mask, y, -1), f.shape[-1]
        self._totals = _Totals(f, g, mask, weight, known)
        steps, times = known[:, :-1] * V + known[:, 1:], mask[:, 1:] * weight[:, None]
        table = g.new_zeros(V * V).index_add(0, steps.clamp(min=0).flatten(), times.flatten())
        self._table, mean = table.view(V, V), g.mean(0)
        self._told = self._totals.told + float(torch.where(self._table > 0, self._table * mean, 0).sum())

    def value_and_slopes(self, f: Tensor, g: Tensor) -> tuple[float, Tensor, Tensor] | None:
        """At mean scores f (B, T, V) and g (V, V): the log-likelihood, averaged over draws and summed over
        sequences, and its slopes in f and g. None where a sequence has no labelling, or scores are not
        finite."""
        whole = self._totals.value_and_slopes(f, g, -1.0)
        if whole is None:
            return None
        if self._open is not None:
            told = self._open.value_and_slopes(f, g, 1.0)
            return (
                None if told is None else (told[0] - whole[0], whole[1].add_(told[1]), told[2] - whole[2])
            )
        value = self._told + float((self._table * g).sum()) - whole[0]
        return (value, whole[1], self._table - whole[2]) if math.isfinite(value) else None

    def variances(self, f: Tensor, g: Tensor, basis: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """``Chain.local_curvature`` at the same draws: (B, T, R) and (B, V, V). None if they are not
        finite."""
        found = self._totals.variances(f, g, basis)
        if found is not None and self._open is not None:
            left = self._open.variances(f, g, basis)
            found = None if left is None else (found[0] - left[0], found[1] - left[1])
        return None if found is None else (found[0].clamp_(min=0), found[1].clamp_(min=0))


class _Totals:
    """The sum of log Z over sequences, averaged over draws, minus the mean scores of ``known`` labels
    (B, T) where these are given and not negative. told : what the draws add to the scores of these labels,
    also averaged and summed."""

    def __init__(
        self, f: Tensor, g: Tensor, mask: Tensor, weight: Tensor, known: Tensor | None = None
    ) -> None:
        from structgp.structures.linear_chain.compiled_draws import PACKS_AT_ONCE
        from structgp.structures.linear_chain.compiled_factors import WIDEST, fill_factors, width_of

        (S, B, T, V), L = f.shape, LANES
        K, own, lengths = max(1, S // L), min(S, L), mask.sum(-1).numpy()
        self._packs, self._lengths = packs_of(lengths, L // own), lengths
        self._weight = weight.contiguous().numpy()
        scores, N, G = f.contiguous().numpy(), *self._packs.shape
        width = width_of(scores, lengths)
        is_log = not width <= WIDEST  # scores could not be recovered from exponentials
        self._known = np.full((B, T), -1) if known is None else known.numpy()
        self._factor, highest, told = np.empty((N, K, T * V * L)), np.empty(B), np.empty(B)
        given = scores, self._packs, lengths, self._known, is_log, self._factor, highest, told
        share(partial(fill_factors, *given), N, 8 * S * B * T * V)
        self.told = float(self._weight @ told)
        top = g.amax((-1, -2))
        edge = (g - top[:, None, None]).view(K, own, V * V).mT.repeat(1, 1, G).view(K, V * V * L)
        self._edge = edge.exp().numpy()
        self._logs = edge.numpy(), is_log, width
        self._steps = float(self._weight @ np.maximum(lengths - 1, 0))
        self._tops = float(self._weight @ highest) + self._steps * float(top.mean())
        self._shape, self._units = f.shape, -(-N // PACKS_AT_ONCE)

    def value_and_slopes(self, f: Tensor, g: Tensor, sign: float) -> tuple[float, Tensor, Tensor] | None:
        """The value, its slopes in f times ``sign``, and the slopes of log Z in g; None where the value is
        not finite."""
        from structgp.structures.linear_chain.compiled_draws import draw_totals

        S, B, T, V = self._shape
        log_z, nodes, tables = np.empty(B), np.empty((B, T, V)), np.empty((self._units, V, V))
        given = self._factor, self._edge, self._logs, self._packs, f.contiguous().numpy()
        rest = g.contiguous().numpy(), self._lengths, self._weight, self._known, sign, log_z, nodes, tables
        share(partial(draw_totals, *given, *rest), self._units, S * B * T * V * V)
        value = self._tops + self._steps * float(g.max()) + float(self._weight @ log_z)
        if not math.isfinite(value):
            return None
        return value, torch.from_numpy(nodes), torch.from_numpy(tables.sum(0))

    def variances(self, f: Tensor, g: Tensor, basis: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """``draw_variances``; None where they are not finite."""
        from structgp.structures.linear_chain.compiled_draws import draw_variances

        S, B, T, V = self._shape
        columns = np.eye(V) if basis is None else basis.contiguous().numpy()
        nodes, tables = np.empty((B, T, columns.shape[1])), np.empty((B, V, V))
        given = self._factor, self._edge, self._logs, self._packs, f.contiguous().numpy()
        rest = g.contiguous().numpy(), self._lengths, columns, columns**2, nodes, tables
        share(partial(draw_variances, *given, *rest), self._units, S * B * T * V * V)
        if not (math.isfinite(nodes.sum()) and math.isfinite(tables.sum())):
            return None
        return torch.from_numpy(nodes), torch.from_numpy(tables)


def packs_of(lengths: np.ndarray, G: int) -> np.ndarray:
    """(packs, G) the sequences, where those of one pack have the same length; -1 fills up packs that are
    not full."""
    if G == 1:
        return np.arange(len(lengths))[:, None]
    order = np.argsort(lengths, kind="stable")
    ends = np.flatnonzero(np.diff(lengths[order])) + 1
    found = [same[at : at + G] for same in np.split(order, ends) for at in range(0, len(same), G)]
    return np.array([[*pack, *[-1] * (G - len(pack))] for pack in found])


def fixed_draws(
    program: Program, f: Tensor, g: Tensor, y: Tensor, weight: Tensor
) -> FixedDraws | FusedDraws | None:
    """``Chain.fixed_draws`` of a program; None where neither compiled loops nor kernels are available, pay
    off, and support such scores."""
    mask, V = program.layout.mask, f.shape[-1]
    if g.dim() != 3 or not f.numel():
        return None
    if is_fused(f, g, mask):
        return FusedDraws(program, program.restrict((f, g)), y, weight)
    enough = f[0].numel() * V >= WORTH_COMPILING and V <= MOST_LABELS
    known = f.dtype == g.dtype == weight.dtype == torch.float64 and f.device.type == "cpu"
    if not enough or not known or compiled_loops() is None:
        return None
    if len(f) % LANES and LANES % len(f):
        return None
    return FixedDraws(program, program.restrict((f, g)), y, weight)
