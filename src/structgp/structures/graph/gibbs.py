"""Gibbs sampling: marginals and labellings of any factor graph, with their Monte Carlo error.

Each draw of the scores has a chain of labellings of its own, which starts at a good labelling and changes
block by block (``local_moves``). Node marginals are means of the probabilities from which labels were
drawn, given the other blocks; these vary less than the labels drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import torch
from torch import Tensor

from structgp.data.layout import Tuples
from structgp.errors import InputError
from structgp.structures.graph.cover import within_span
from structgp.structures.graph.factor_graph import GraphProgram
from structgp.structures.graph.local_moves import (
    Block,
    blocks_of,
    entries,
    gibbs_sweep,
    improved,
    total_score,
)
from structgp.structures.program import Scores
from structgp.structures.semirings import Semiring

BATCHES = 10
"""Number of parts of a chain; their means give the Monte Carlo error."""


@dataclass(frozen=True)
class Gibbs(GraphProgram):
    """sweeps : number of sweeps that answers are averaged over. burn_in : number of sweeps before them.
    blocks : 'colour' for blocks of variables without a factor between them, 'forest' for larger blocks that
    are forests, which mix faster and cost more. seed : seed of the chains, so that an answer depends on the
    scores alone."""

    sweeps: int = 500
    burn_in: int = 50
    blocks: str = "colour"
    seed: int = 0

    exact = False

    def __post_init__(self) -> None:
        if self.blocks not in ("colour", "forest"):
            raise InputError(
                "blocks", f"must be 'colour' or 'forest', got {self.blocks!r}", "pass one of them"
            )
        if self.sweeps < BATCHES:
            raise InputError("sweeps", f"must be at least {BATCHES}, got {self.sweeps}", "pass more")

    def log_total(self, scores: Scores, semiring: Semiring) -> Tensor:
        self._refuse("no log Z, and no sum of any other kind", "use the tree-reweighted program for it")

    def log_prob(self, scores: Scores, y: Tensor) -> Tensor:
        self._refuse("no log-probabilities of labellings", "use the tree-reweighted program for them")

    def marginals(self, scores: Scores) -> tuple[Tensor, ...]:
        return self.estimates(scores)[0]

    def estimates(self, scores: Scores) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Marginals of every template, as from ``marginals``, and their standard errors."""
        scores = self._given(scores)
        generator = self._generator(scores[0])
        y = self._start(scores)
        for _ in range(self.burn_in):
            y = gibbs_sweep(self.layout, scores, y, self._parts, generator)
        f = scores[0]
        mask = self.layout.mask[..., None]
        sums = [torch.zeros_like(f), *(_zeros(f, t) for t in self.layout.tuples)]
        squares = [torch.zeros_like(x) for x in sums]
        length = self.sweeps // BATCHES
        for _ in range(BATCHES):
            part = [torch.zeros_like(x) for x in sums]
            p = torch.zeros_like(f)
            for _ in range(length):
                y = gibbs_sweep(self.layout, scores, y, self._parts, generator, p)
                part[0] += torch.where(mask, p, 0)
                for x, t in zip(part[1:], self.layout.tuples, strict=True):
                    _count(x, t, y)
            for total, square, x in zip(sums, squares, part, strict=True):
                total += x / length
                square += (x / length).square()
        means = tuple(x / BATCHES for x in sums)
        errors = (
            ((x / BATCHES - m.square()).clamp(min=0) / (BATCHES - 1)).sqrt()
            for x, m in zip(squares, means, strict=True)
        )
        return means, tuple(errors)

    def sample(self, scores: Scores, generator: torch.Generator) -> Tensor:
        """(S, B, N) one labelling per draw and example, after ``burn_in`` sweeps; 0 at padding."""
        scores = self._given(scores)
        y = self._start(scores)
        for _ in range(self.burn_in):
            y = gibbs_sweep(self.layout, scores, y, self._parts, generator)
        return y

    def decode(self, scores: Scores) -> Tensor:
        """(S, B, N) the best labelling near those of a chain of ``burn_in`` sweeps; 0 at padding."""
        scores = self._given(scores)
        generator, y = self._generator(scores[0]), self._start(scores)
        best, value = y, total_score(self.layout, scores, y)
        for _ in range(self.burn_in):
            y = gibbs_sweep(self.layout, scores, y, self._parts, generator)
            near = improved(self.layout, scores, y, self._parts, 5)
            found = total_score(self.layout, scores, near)
            best = torch.where((found > value)[..., None], near, best)
            value = torch.maximum(value, found)
        return best

    def slopes(self, scores: Scores) -> tuple[Tensor, ...]:
        return self.estimates(scores)[0]

    def entropy(self, scores: Scores) -> Tensor:
        self._refuse("no entropy", "use the tree-reweighted program for it")

    def best(self, scores: Scores, n: int) -> tuple[Tensor, Tensor]:
        self._refuse("no n best labellings", "use a graph narrow enough for exact sums, or draw samples")

    def n_best(self, scores: Scores, n: int) -> tuple[Tensor, Tensor]:
        return self.best(scores, n)

    def _start(self, scores: Scores) -> Tensor:
        f = scores[0]
        y = torch.where(self.layout.mask, f.argmax(-1), 0)
        return improved(self.layout, scores, y, self._parts, 20)

    def _given(self, scores: Scores) -> list[Tensor]:
        f, *tables = (x.detach() for x in self.restrict(scores))
        f = torch.where(self.layout.mask[..., None], f, 0)
        return [within_span(self.layout, f), *tables]

    def _generator(self, f: Tensor) -> torch.Generator:
        return torch.Generator(device=f.device).manual_seed(self.seed)

    @cached_property
    def _parts(self) -> list[Block]:
        return blocks_of(self.layout, self.blocks)

    def _refuse(self, problem: str, remedy: str) -> NoReturn:
        raise InputError("structure", f"Gibbs sampling has {problem}", remedy)


def _zeros(f: Tensor, t: Tuples) -> Tensor:
    return f.new_zeros((len(f), *t.mask.shape, *t.sizes))


def _count(counts: Tensor, t: Tuples, y: Tensor) -> None:
    """Adds 1 to counts (S, B, E, *sizes) at the entries that labellings y (S, B, N) pick at each tuple."""
    S, (B, E) = len(y), t.mask.shape
    place = entries(t, y)
    counts.view(S, B, E, -1).scatter_add_(
        -1, place[..., None], t.mask.to(counts).expand(S, B, E)[..., None]
    )
