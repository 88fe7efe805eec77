"""Drawn potentials of a batch, under what is known of its labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from structgp.answers.draws import Draws
from structgp.data.batch import Batch
from structgp.gp import Posterior
from structgp.structures import Structure, keep_known

TRANSITIONS_AT_ONCE = 1 << 23


@dataclass(frozen=True)
class Potentials:
    """f : (S, B, T, V), -inf at labels that are known not to be; g : (S, V, V); mask : (B, T); share :
    (S, B),
    how much each draw counts, which sums to 1 over draws.

    Where labels are known, an answer is the probability of it together with them, over that of them
    alone: a draw counts as much as it expected what is known."""

    structure: Structure
    f: Tensor
    g: Tensor
    mask: Tensor
    share: Tensor

    def on_host(self) -> Potentials:
        f, g, mask, share = (x.cpu() for x in (self.f, self.g, self.mask, self.share))
        return Potentials(self.structure, f, g, mask, share)

    def one(self, b: int, length: int) -> Potentials:
        """Those of one example, without padding."""
        some = slice(b, b + 1)
        g = self.g if self.g.dim() == 3 else self.g[:, some, : max(0, length - 1)]
        f, mask = self.f[:, some, :length], self.mask[some, :length]
        return Potentials(self.structure, f, g, mask, self.share[:, some])

    def average(self, values: Tensor) -> Tensor:
        """(B, ...) mean over draws of values (S, B, ...)."""
        return torch.einsum("sb...,sb->b...", values, self.share)

    def walks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """``Structure.walk`` of some draws at a time, with which ones: there is a transition matrix for
        each
        position of each draw."""
        at_once = max(1, TRANSITIONS_AT_ONCE // max(1, self.f[0].numel() * self.f.shape[-1]))
        for start in range(0, len(self.f), at_once):
            some = slice(start, start + at_once)
            yield some, *self.structure.walk(self.f[some], self.g[some], self.mask)


def potentials(
    posterior: Posterior, structure: Structure, draws: Draws, batch: Batch, shift: Tensor | None = None
) -> Potentials:
    """Of a batch whose y has the labels that are known, and negative numbers where none is. ``shift`` :
    (V,),
    added to the scores of each position."""
    with torch.no_grad():
        f, g = draws.scores(posterior, batch)
        if shift is not None:
            f = f + shift.to(f)
        share = f.new_full(f.shape[:2], 1 / len(f))
        if bool(((batch.y >= 0) & batch.mask).any()):
            share = structure.log_prob(f, g, batch.y, batch.mask).softmax(0)
            f = keep_known(f, batch.y, batch.mask)
        return Potentials(structure, f, g, batch.mask, share)
