"""Joint draws of all potentials from a posterior, and their scores on a batch: what every answer averages
over.

The draws are functions, fixed once from a seed: every example meets the same ones, so an answer does not
depend on what else is in the batch, on the order, or on padding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from structgp.data.batch import Batch
from structgp.gp import Posterior
from structgp.structures import ByValues, Structure, keep_known

SALT = 1_000_003
"""Between the seeds of one block and of the next: what their draws leave open has nothing in common."""


@dataclass(frozen=True)
class Draws:
    """S draws from a posterior, each with its mirror image, one part per block; or the posterior mean as
    the only one. spread : a factor on how far they lie from the posterior mean, whose parts are ``middle``;
    those are only needed where it is not 1."""

    posterior: Posterior
    parts: tuple[Any, ...]
    spread: float = 1.0
    middle: tuple[Any, ...] = ()

    def potentials(self, structure: Structure, batch: Batch, shift: Tensor | None = None) -> Potentials:
        """The scores of every template at the rows of a batch, joint over its tuples. shift : (V,), added
        to the scores of each position."""
        with torch.no_grad():
            f, g = self._scores(self.parts, batch)
            if self.spread != 1:
                parts = zip(self._scores(self.middle, batch), (f, g), strict=True)
                f, g = (torch.lerp(middle, drawn, self.spread) for middle, drawn in parts)
        f = f if shift is None else f + shift.to(f)
        return Potentials(structure, f, g, batch.mask, f.new_full(f.shape[:2], 1 / len(f)))

    def _scores(self, parts: tuple[Any, ...], batch: Batch) -> list[Tensor]:
        found = zip(parts, self.posterior.blocks, batch.rows, batch.masks, strict=True)
        return [part.at(block, rows, mask) for part, block, rows, mask in found]


def sample(posterior: Posterior, n: int, seed: int, spread: float = 1.0) -> Draws:
    """n draws, rounded up to an even number."""
    generator = torch.Generator().manual_seed(seed)
    blocks, found = posterior.blocks, {}
    with torch.no_grad():
        # What all examples share is drawn first: a larger vocabulary then leaves it as it is.
        for k in sorted(range(len(blocks)), key=lambda k: not blocks[k].shared):
            found[k] = blocks[k].draws(n, seed + SALT * k, generator)
    middle = () if spread == 1 else mean(posterior).parts
    return Draws(posterior, tuple(found[k] for k in range(len(blocks))), spread, middle)


def mean(posterior: Posterior) -> Draws:
    """The posterior mean as one 'draw'."""
    with torch.no_grad():
        return Draws(posterior, tuple(block.mean_draw() for block in posterior.blocks))


@dataclass(frozen=True)
class Potentials:
    """likelihood : that answers, before anything is known. f : (S, B, T, V), -inf at labels that are known
    not to be; g : (S, V, V), or (S, B, T - 1, V, V); mask : (B, T); share : (S, B), how much each draw
    counts, which sums to 1 over draws. known : (B, T) labels that are known, negative where none is, for a
    likelihood that cannot read them off f; else None."""

    likelihood: Structure
    f: Tensor
    g: Tensor
    mask: Tensor
    share: Tensor
    known: Tensor | None = None

    @property
    def structure(self) -> Structure:
        """That answers, given what is known."""
        told = None if self.known is None else self.likelihood.given(self.known)
        return self.likelihood if told is None else told

    def given(self, y: Tensor) -> Potentials:
        """The same given labels y (B, T) that are known, negative where none is: an answer is then its
        probability together with them, divided by theirs, and a draw counts as much as it expected them."""
        if not bool(((y >= 0) & self.mask).any()):
            return self
        with torch.no_grad():
            share = self.structure.log_prob(self.f, self.g, y, self.mask).softmax(0)
            if self.likelihood.given(y) is not None:
                return replace(self, known=y, share=share)
            return replace(self, f=keep_known(self.f, y, self.mask), share=share)

    def on_host(self) -> Potentials:
        known = None if self.known is None else self.known.cpu()
        f, g, mask, share = (x.cpu() for x in (self.f, self.g, self.mask, self.share))
        return Potentials(self.likelihood, f, g, mask, share, known)

    def one(self, b: int, length: int, draws: Tensor | slice = slice(None)) -> Potentials:
        """Those of one example, without padding, under some draws."""
        some = slice(b, b + 1)
        g = self.g[draws] if self.g.dim() == 3 else self.g[draws][:, some, : max(0, length - 1)]
        f, share = self.f[draws][:, some, :length], self.share[draws][:, some]
        known = None if self.known is None else self.known[some, :length]
        return Potentials(self.likelihood, f, g, self.mask[some, :length], share, known)

    def marginals(self) -> Tensor:
        """(B, T, V) label probabilities, averaged over draws: Bayes-optimal token by token."""
        return self.average(self.structure.marginals(self.f, self.g, self.mask))

    def monte_carlo_error(self) -> Tensor:
        """(B, T, V) standard errors of ``marginals`` that come from sampling labellings."""
        answering = self.structure
        assert isinstance(answering, ByValues)
        return answering.monte_carlo_error(self.f, self.g, self.mask, self.share)

    def average(self, values: Tensor) -> Tensor:
        """(B, ...) mean over draws of values (S, B, ...)."""
        return torch.einsum("sb...,sb->b...", values, self.share)
