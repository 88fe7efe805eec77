"""Joint draws of all potentials from a posterior, and their scores on a batch: what every answer averages
over.

The draws are functions, fixed once from a seed: every example meets the same ones, so an answer does not
depend on what else is in the batch, on the order, or on padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from structgp.data.batch import Batch
from structgp.gp import Posterior
from structgp.structures import Structure, keep_known

SALT = 1_000_003
"""Between the seeds of one block and of the next: what their draws leave open has nothing in common."""

TRANSITIONS_AT_ONCE = 1 << 23


@dataclass(frozen=True)
class Draws:
    """S draws, each with its mirror image, one part per block; or the posterior mean as the only one."""

    parts: tuple[Any, ...]

    def scores(self, posterior: Posterior, batch: Batch) -> tuple[Tensor, ...]:
        """The scores of every template at the rows of a batch, joint over its tuples: (S, B, T, V) of
        nodes, (S, V, V) or (S, B, T - 1, V, V) of transitions."""
        found = zip(self.parts, posterior.blocks, batch.rows, batch.masks, strict=True)
        with torch.no_grad():
            return tuple(part.at(block, rows, mask) for part, block, rows, mask in found)


def sample(posterior: Posterior, n: int, seed: int) -> Draws:
    """n draws, rounded up to an even number."""
    generator = torch.Generator().manual_seed(seed)
    blocks, found = posterior.blocks, {}
    with torch.no_grad():
        # What all examples share is drawn first: a larger vocabulary then leaves it as it is.
        for k in sorted(range(len(blocks)), key=lambda k: not blocks[k].shared):
            found[k] = blocks[k].draws(n, seed + SALT * k, generator)
    return Draws(tuple(found[k] for k in range(len(blocks))))


def mean(posterior: Posterior) -> Draws:
    """The posterior mean as one 'draw'."""
    with torch.no_grad():
        return Draws(tuple(block.mean_draw() for block in posterior.blocks))


@dataclass(frozen=True)
class Potentials:
    """f : (S, B, T, V), -inf at labels that are known not to be; g : (S, V, V), or (S, B, T - 1, V, V);
    mask : (B, T); share : (S, B), how much each draw counts, which sums to 1 over draws.

    Where labels are known, an answer is its probability together with them, divided by theirs: a draw
    counts as much as it expected what is known."""

    structure: Structure
    f: Tensor
    g: Tensor
    mask: Tensor
    share: Tensor

    def on_host(self) -> Potentials:
        return Potentials(self.structure, *(x.cpu() for x in (self.f, self.g, self.mask, self.share)))

    def one(self, b: int, length: int, draws: Tensor | slice = slice(None)) -> Potentials:
        """Those of one example, without padding, under some draws."""
        some = slice(b, b + 1)
        g = self.g[draws] if self.g.dim() == 3 else self.g[draws][:, some, : max(0, length - 1)]
        f, share = self.f[draws][:, some, :length], self.share[draws][:, some]
        return Potentials(self.structure, f, g, self.mask[some, :length], share)

    def marginals(self) -> Tensor:
        """(B, T, V) label probabilities, averaged over draws: Bayes-optimal token by token."""
        return self.average(self.structure.marginals(self.f, self.g, self.mask))

    def average(self, values: Tensor) -> Tensor:
        """(B, ...) mean over draws of values (S, B, ...)."""
        return torch.einsum("sb...,sb->b...", values, self.share)

    def walks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """``Structure.walk`` of some draws at a time, with which ones: there is a transition matrix for
        each position of each draw."""
        at_once = max(1, TRANSITIONS_AT_ONCE // max(1, self.f[0].numel() * self.f.shape[-1]))
        for start in range(0, len(self.f), at_once):
            some = slice(start, start + at_once)
            yield some, *self.structure.walk(self.f[some], self.g[some], self.mask)


def potentials(
    posterior: Posterior, structure: Structure, draws: Draws, batch: Batch, shift: Tensor | None = None
) -> Potentials:
    """Those of a batch whose y has the labels that are known, and negative numbers where none is. shift :
    (V,), added to the scores of each position."""
    with torch.no_grad():
        f, g = draws.scores(posterior, batch)
        f = f if shift is None else f + shift.to(f)
        share = f.new_full(f.shape[:2], 1 / len(f))
        if bool(((batch.y >= 0) & batch.mask).any()):
            share = structure.log_prob(f, g, batch.y, batch.mask).softmax(0)
            f = keep_known(f, batch.y, batch.mask)
        return Potentials(structure, f, g, batch.mask, share)
