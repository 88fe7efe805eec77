"""Elliptical slice sampling (Murray, Adams and MacKay 2010) of many chains side by side.

The target is N(x; 0, C) exp(ratio(x)). An iteration of a chain at x draws nu from N(0, C) and a height
below ratio(x), and tries points x cos a + nu sin a on the ellipse through both. The angle a comes from a
bracket that shrinks towards 0, the angle of x, until the ratio at a point is above the height. There is
nothing to tune, and every iteration moves.

The chains do not wait for each other: each call of ``ratio`` has one point of every chain, and a chain
whose point is accepted begins its next iteration at once. All chains do equally many iterations, so that no
state counts for more because its iteration was quick.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

DRAWS_AT_ONCE = 32


@dataclass(frozen=True)
class Samples:
    """The result of sampling. kept : (S, K, P), every ``thin``-th state of each chain after burn-in.
    evaluations : number of evaluations of the ratio, for all chains together. angle : mean size of an
    accepted step after burn-in, in radians."""

    kept: Tensor
    evaluations: int
    angle: float


def elliptical_slices(
    ratio: Callable[[Tensor], Tensor],
    draw: Callable[[int], Tensor],
    start: Tensor,
    *,
    n_iterations: int,
    burn_in: int,
    thin: int,
    generator: torch.Generator,
) -> Samples:
    """Runs S chains from ``start`` (S, P). ``ratio`` (S, P) -> (S,); ``draw`` n -> (n, P) draws from N(0,
    C).

    Memory O(S K P) for the kept states, K = (n_iterations - burn_in) / thin.
    """
    chains = _Chains(ratio, draw, start, generator)
    S, K = len(start), (n_iterations - burn_in) // thin
    kept = start.new_empty(S, K, start.shape[1])
    angles: list[float] = []
    while int(chains.done.min()) < n_iterations:
        for s, angle in chains.advance():
            number = int(chains.done[s])
            behind = number - burn_in
            if behind <= 0 or number > n_iterations:
                continue
            angles.append(abs(angle))
            if behind % thin == 0:
                kept[s, behind // thin - 1] = chains.x[s]
    return Samples(kept, chains.evaluations, sum(angles) / max(1, len(angles)))


class _Chains:
    """States x (S, P), their values (S,), the numbers of finished iterations (S,); and for the iteration
    that each chain is in: nu, the height, the angle to try next and its bracket."""

    def __init__(
        self,
        ratio: Callable[[Tensor], Tensor],
        draw: Callable[[int], Tensor],
        start: Tensor,
        generator: torch.Generator,
    ) -> None:
        self.ratio, self.draw, self.generator = ratio, draw, generator
        self.pool = start.new_empty(0, start.shape[1])
        self.x, self.value = start.clone(), ratio(start)
        self.done = torch.zeros(len(start), dtype=torch.int64)
        self.nu = torch.empty_like(start)
        self.height, self.angle = torch.empty_like(self.value), torch.empty_like(self.value)
        self.low, self.high = torch.empty_like(self.value), torch.empty_like(self.value)
        self.evaluations = len(start)
        self._begin(torch.arange(len(start)))

    def advance(self) -> list[tuple[int, float]]:
        """Tries one point for each chain; returns the chains whose point was accepted, with the angles."""
        point = self.x * self.angle.cos()[:, None] + self.nu * self.angle.sin()[:, None]
        value = self.ratio(point)
        self.evaluations += len(value)
        # >= and not >: a bracket that has shrunk to 0 gives x itself, and a start may have density 0.
        inside = value >= self.height
        found = inside.nonzero()[:, 0]
        accepted = list(zip(found.tolist(), self.angle[found].tolist(), strict=True))
        self.x[found], self.value[found] = point[found], value[found]
        self.done[found] += 1
        self.low = torch.where(~inside & (self.angle < 0), self.angle, self.low)
        self.high = torch.where(~inside & (self.angle >= 0), self.angle, self.high)
        self.angle = self.low + (self.high - self.low) * self._uniform(len(value))
        self._begin(found)
        return accepted

    def _begin(self, chains: Tensor) -> None:
        """Begins the next iteration of these chains."""
        n = len(chains)
        if n > len(self.pool):
            # Many at once, since a draw is a product with a large matrix, which is read once for all draws.
            self.pool = torch.cat([self.pool, self.draw(max(n, DRAWS_AT_ONCE))])
        self.nu[chains], self.pool = self.pool[:n], self.pool[n:]
        self.height[chains] = self.value[chains] + self._uniform(n).log()
        angle = 2 * math.pi * self._uniform(n)
        self.angle[chains], self.high[chains], self.low[chains] = angle, angle, angle - 2 * math.pi

    def _uniform(self, n: int) -> Tensor:
        return torch.rand(n, generator=self.generator, dtype=self.value.dtype)


def split_rhat(kept: Tensor) -> Tensor:
    """(P,) potential scale reduction of each quantity in (S, K, P), with every chain split into two halves
    (Gelman et al. 2013, 11.4): 1 if all halves agree; nan for a quantity that never changes."""
    half = kept.shape[1] // 2
    halves = torch.cat([kept[:, :half], kept[:, half : 2 * half]])  # (2S, half, P)
    within = halves.var(1).mean(0)
    between = halves.mean(1).var(0)
    return ((half - 1) / half + between / within).sqrt()
