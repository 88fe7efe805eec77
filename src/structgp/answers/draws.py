"""Joint draws of all potentials from a posterior, which every answer averages over.

The draws are functions, fixed once from a seed: every example meets the same ones, so an answer does not
depend on what else is in the batch, on the order, or on padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from structgp.data.batch import Batch
from structgp.gp import Posterior

SALT = 1_000_003
"""Between the seeds of one block and of the next: what their draws leave open has nothing in common."""


@dataclass(frozen=True)
class Draws:
    """S draws, in mirrored pairs, one part per block; or the posterior mean as the only one."""

    parts: tuple[Any, ...]

    def scores(self, posterior: Posterior, batch: Batch) -> tuple[Tensor, ...]:
        """The scores of every template at the rows of a batch, joint over its tuples: (S, B, T, V) of
        nodes, (S, V, V) or (S, B, T - 1, V, V) of transitions."""
        with torch.no_grad():
            return tuple(
                part.at(block, rows, mask)
                for part, block, rows, mask in zip(
                    self.parts, posterior.blocks, batch.rows, batch.masks, strict=True
                )
            )


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
