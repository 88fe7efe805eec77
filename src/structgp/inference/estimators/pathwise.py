"""Pathwise gradients: differentiate through the draws.

Needs a likelihood that can be differentiated; 8 to 32 draws then do what score estimators need
thousands for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from structgp.inference.estimators.designs import Design, draw, replicate_sizes, split
from structgp.inference.estimators.moments import Estimate, Moments, Target, combine, path_moments

REPLICATES = 4

MANY_DRAWS = 32
"""From so many on, orthogonal directions are worth their making."""


@dataclass(frozen=True)
class Pathwise:
    """E[grad l] and E[sym(eps grad l^T)] over draws.

    design : None takes orthogonal directions from 32 draws on, else antithetic ones. All draws are
    one replicate of it, since the more directions are orthogonal the better; parts of it give the
    variance, which is then if anything too large.
    """

    name: str = "pathwise"
    design: Design | None = None
    n_draws: int = 8
    needs_gradient = True
    parts = None
    uses_memory = False

    def with_draws(self, n_draws: int) -> Pathwise:
        return replace(self, n_draws=n_draws)

    def __call__(
        self, target: Target, generator: torch.Generator, memory: Moments | None = None
    ) -> Estimate:
        """Cost: S likelihoods of every sequence with their gradient. ``memory`` is not used."""
        design = self.design or ("orthogonal" if self.n_draws >= MANY_DRAWS else "antithetic")
        sizes = replicate_sizes(self.n_draws, REPLICATES, design)
        parts, values = [], []
        for noise in split(next(draw(target, design, [sum(sizes)], generator)), sizes, design):
            moments, l = path_moments(target, noise, target.log_prob)
            parts.append(moments)
            values.append(l)
        mean, variance = combine(parts, sizes)
        every = torch.cat(values)
        return Estimate(mean, variance, every.std(0, correction=0), every.numel())
