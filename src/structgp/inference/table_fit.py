"""Tables of scores fitted to examples whose other scores are given.

The given scores are draws, and stay as they are; only the tables move. Means and covariances alternate as
in ``second_order``, and the prior's scale of each table moves after every round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from structgp.data.batch import Batch
from structgp.gp import Posterior
from structgp.inference.bound import lower_bound
from structgp.inference.lbfgs import minimize

STEPS, MOST_ROUNDS = 15, 10
"""Number of L-BFGS steps per round, and largest number of rounds."""

TOLERANCE = 0.02
"""Nats per example: from the third round on, one that changes the bound by less than this is the last."""


@dataclass(frozen=True)
class GivenScores:
    """A batch of examples with their given scores. structure : sums over their labellings. scores : S draws
    of the scores of each template, as the structure takes them; None for the tables that are fitted."""

    structure: Any
    batch: Batch
    scores: tuple[Tensor | None, ...]

    @property
    def weight(self) -> Tensor:
        """(B,) how often each example counts."""
        weight = self.batch.weight
        return torch.ones(len(self.batch), dtype=torch.float64) if weight is None else weight.double()

    def filled(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """The scores of every template: those given, and the tables' scores, (S, *labels) each, in their
        places."""
        missing = iter(tables)
        return [next(missing) if x is None else x for x in self.scores]

    def slopes(self, tables: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The log-likelihood, averaged over draws and summed over examples, and its derivatives in the
        scores of the tables."""
        leaves = [x.detach().requires_grad_() for x in tables]
        with torch.enable_grad():
            found = self.structure.log_prob(*self.filled(leaves), self.batch.y, self.batch.layout)
            total = found.mean(0) @ self.weight
            slopes = torch.autograd.grad(total, leaves)
        return total.detach(), list(slopes)

    def bends(self, tables: Sequence[Tensor], bases: Sequence[Tensor | None]) -> list[Tensor]:
        """Minus the second derivatives in the functions of each table, (B, R) or (B, *labels), averaged
        over draws. bases : (P, R) for each table, None for one function per score."""
        own = iter(bases)
        of_all = [next(own) if x is None else None for x in self.scores]
        found = self.structure.bends(self.filled(tables), self.batch.y, self.batch.layout, of_all)
        mine = [bend for bend, x in zip(found, self.scores, strict=True) if x is None]
        return [self.weight.view(-1, *[1] * (bend.dim() - 1)) * bend for bend in mine]


def fit_tables(
    tables: Mapping[str, Any], data: Sequence[GivenScores], generator: torch.Generator, learn: bool = True
) -> float:
    """Fits tables in place; returns the bound. tables : by the names of their templates, in the order of
    the templates. learn : whether the scale of their prior moves. Cost: up to ``MOST_ROUNDS`` times
    ``STEPS`` sums over the labellings of every example under every draw."""
    posterior, before = Posterior(tables), -math.inf
    if not data:
        return 0.0
    n_draws = next(len(x) for x in data[0].scores if x is not None)
    n_counted = float(sum(part.weight.sum() for part in data))
    with torch.no_grad():
        noise = [block.fixed_noise(n_draws // 2, (), generator) for block in posterior.blocks]
        for n in range(MOST_ROUNDS):
            expected = _fit_means(posterior, data, [0.0 * x for x in noise] if n == 0 else noise)
            bound = float(lower_bound(expected, posterior))
            _fit_covariances(posterior, data, noise)
            if n > 1 and abs(bound - before) < TOLERANCE * n_counted:
                break
            before = bound
            if learn:
                posterior.fit_tables()
    return bound


def _at(posterior: Posterior, functions: Sequence[Tensor], noise: Sequence[Tensor]) -> list[Tensor]:
    """(S, *labels) scores of each table at mean functions (R,) and noise (S, R)."""
    parts = zip(posterior.blocks, functions, noise, strict=True)
    return [b.scores(h + b.scale * b.conditional(None, h, b.prior_factor()).spread(b.factor, eps))
            for b, h, eps in parts]  # fmt: skip


def _fit_means(posterior: Posterior, data: Sequence[GivenScores], noise: Sequence[Tensor]) -> Tensor:
    """Maximises the bound over the means, in place; returns the expected log-likelihood there."""
    blocks = posterior.blocks
    searches = [block.mean_search(None) for block in blocks]
    here = [block.conditional(None, block.m, block.prior_factor()) for block in blocks]
    sizes = [search.begin(block.prior_factor()) for search, block in zip(searches, blocks, strict=True)]
    expected = torch.zeros((), dtype=torch.float64)

    def negative(flat: Tensor) -> tuple[float, Tensor]:
        nonlocal expected
        parts = zip(searches, flat.split(sizes), strict=True)
        divergence = torch.stack([search.move(x) for search, x in parts]).sum()
        functions = [search.functions(0, c) for search, c in zip(searches, here, strict=True)]
        at, expected = _at(posterior, functions, noise), torch.zeros((), dtype=torch.float64)
        for part in data:
            value, slopes = part.slopes(at)
            expected = expected + value
            for search, block, c, slope in zip(searches, blocks, here, slopes, strict=True):
                search.add(0, c, block.pull_back(slope.sum(0)))
        bound = float(lower_bound(expected, posterior, divergence=divergence))
        return -bound, torch.cat([search.slope() for search in searches])

    start = blocks[0].m.new_zeros(sum(sizes))
    x, _ = minimize(negative, start, steps=STEPS, memory=10, tolerance=1e-6)
    negative(x)
    for search in searches:
        search.settle()
    return expected


def _fit_covariances(posterior: Posterior, data: Sequence[GivenScores], noise: Sequence[Tensor]) -> None:
    """Sets the covariance of every table to the best one for the curvature at the draws, in place."""
    blocks = posterior.blocks
    here = [block.conditional(None, block.m, block.prior_factor()) for block in blocks]
    functions = [block.scale * c.times(block.m) for block, c in zip(blocks, here, strict=True)]
    at, sums = _at(posterior, functions, noise), [block.curvature_sum() for block in blocks]
    bases = [None if block.has_own_functions else block.basis for block in blocks]
    for part in data:
        for total, c, bend in zip(sums, here, part.bends(at, bases), strict=True):
            total.add(c, bend)
    for total in sums:
        total.finish()
