"""Fits weights w under a Gaussian prior to a log-likelihood of X w, by L-BFGS over one number per row of X.

With prior precision L and mean c, the best weights are c + L^-1 X^T a for some a (N, R): one number for
each row of X and function, where there may be many times as many weights (the representer theorem). So
L-BFGS moves a, in the geometry of the prior: the squared length of a step is that of the step in the
weights, a^T K a with K = X L^-1 X^T, which makes the prior's curvature 1 in every direction. Every vector
is kept together with its image under K, so that each step needs only one multiplication by K, that of the
gradient. The numbers of several blocks stand one after another in the same vectors; a table of scores is a
block with X = 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from structgp.errors import LikelihoodError

MEMORY = 10
FIRST_CHANGE = 1.0
"""Largest change of any latent value in a step while nothing is known of the curvature."""

TRIES = 6
SHORTER, NEGLIGIBLE = 0.4, 0.01

Likelihood = Callable[[list[Tensor]], tuple[float, list[Tensor]]]
"""Takes the functions (N, R) of each block; returns the log-likelihood and its slopes in them."""

Step = tuple[Tensor, Tensor, float]
"""A step, the change of the gradient along it, and 1 over their inner product."""


@dataclass(frozen=True)
class Prior:
    """The prior of the F weights of one block that occur in the data: variance and mean (F, R). rows : X
    (N, F)."""

    rows: Any
    variance: Tensor
    mean: Tensor

    def image(self, a: Tensor) -> Tensor:
        """(N, R) X L^-1 X^T a."""
        return self.rows.times(self.rows.transposed_times(a) * self.variance)


def climb(
    likelihood: Likelihood,
    priors: Sequence[Prior],
    start: Sequence[Tensor],
    steps: int,
    unsure: bool = False,
) -> tuple[list[Tensor], list[Tensor], float, int]:
    """Climbs towards the most probable weights, from the a in ``start``, or if ``unsure`` from a shorter
    one where that is better. Returns a (N, R) of each block, the functions (N, R) of each block and the
    log-likelihood there, and the number of calls of the likelihood. Cost per step: a likelihood, O((nnz +
    F) R) multiplications, and O(MEMORY N R)."""
    search = _Search(likelihood, priors, start)
    x = search.vector(start)
    x, value, slope = search.nearest(x, shorter=unsure)
    history = list[Step]()
    for _ in range(steps):
        direction = _direction(history, slope)
        falls = -_dot(slope, direction)
        if not falls < 0:
            break
        t = 1.0 if history else min(1.0, FIRST_CHANGE / max(float(direction[1].abs().max()), 1e-300))
        found = search.along(x, value, direction, falls, t)
        if found is None:
            break
        new, value, slopes = found
        new_slope = search.gradient(new, slopes)
        curve = _dot(new - x, new_slope - slope)
        if curve > 0:
            history = [*history[1 - MEMORY :], (new - x, new_slope - slope, 1 / curve)]
        x, slope = new, new_slope
    return search.apart(x[0]), search.functions(x), 0.5 * _dot(x, x) - value, search.calls


class _Search:
    """Minus the log posterior as a function of vectors (2, n). The first row holds the numbers a of all
    blocks, one after another; the second row holds their images under K, which are the functions minus
    their values at the prior's mean."""

    def __init__(self, likelihood: Likelihood, priors: Sequence[Prior], start: Sequence[Tensor]) -> None:
        self.likelihood, self.priors, self.calls = likelihood, priors, 0
        self.shapes, self.sizes = [a.shape for a in start], [a.numel() for a in start]
        self.home = [prior.rows.times(prior.mean) for prior in priors]

    def apart(self, flat: Tensor) -> list[Tensor]:
        return [x.view(s) for x, s in zip(flat.split(self.sizes), self.shapes, strict=True)]

    def vector(self, parts: Sequence[Tensor]) -> Tensor:
        images = [prior.image(a) for prior, a in zip(self.priors, parts, strict=True)]
        return torch.stack([torch.cat([x.reshape(-1) for x in xs]) for xs in (parts, images)])

    def functions(self, x: Tensor) -> list[Tensor]:
        return [home + image for home, image in zip(self.home, self.apart(x[1]), strict=True)]

    def look(self, x: Tensor) -> tuple[float, list[Tensor]]:
        """The value, infinite where the likelihood has none, and the slopes of the likelihood."""
        self.calls += 1
        functions = self.functions(x)
        try:
            value, slopes = self.likelihood(functions)
        except LikelihoodError:
            if not bool(x[0].any()):
                raise  # at the prior's mean it must have one
            return float("inf"), functions
        return 0.5 * _dot(x, x) - value, slopes

    def nearest(self, x: Tensor, shorter: bool) -> tuple[Tensor, float, Tensor]:
        """x, or if ``shorter`` the best of x and shortened copies of it, with the value and the gradient
        there. Since x was found, the prior may have become so much wider that x is far too long. The value
        is convex, so where it still falls along x, nothing shorter is better. Where the functions change by
        next to nothing or are not finite, x is shortened to 0."""
        value, slopes = self.look(x)
        slope = self.gradient(x, slopes)
        shorter = shorter and not (value < float("inf") and _dot(x, slope) <= 0)
        while shorter and bool(x[0].any()):
            before, x = x, SHORTER * x
            if not NEGLIGIBLE <= float(x[1].abs().max()) < float("inf"):
                x = torch.zeros_like(x)
            tried, slopes = self.look(x)
            if tried >= value and value < float("inf"):
                return before, value, slope
            value, slope = tried, self.gradient(x, slopes)
        return x, value, slope

    def gradient(self, x: Tensor, slopes: Sequence[Tensor]) -> Tensor:
        return self.vector([a - slope for a, slope in zip(self.apart(x[0]), slopes, strict=True)])

    def along(
        self, x: Tensor, value: float, direction: Tensor, falls: float, t: float
    ) -> tuple[Tensor, float, list[Tensor]] | None:
        """A step of length t, shortened until the value falls enough; None if it never does."""
        for _ in range(TRIES):
            new = torch.add(x, direction, alpha=-t)
            new_value, slopes = self.look(new)
            if new_value <= value + 1e-4 * t * falls:
                return new, new_value, slopes
            if new_value == float("inf"):
                t *= 0.1
                continue
            # The minimum of the parabola through what is known, within limits.
            bend = new_value - value - t * falls
            t *= min(0.5, max(0.1, -0.5 * t * falls / bend if bend > 0 else 0.1))
        return None


def _dot(x: Tensor, y: Tensor) -> float:
    """The inner product of two vectors (2, n) in the geometry of the prior, a^T K b."""
    return float(x[0] @ y[1])


def _direction(history: Sequence[Step], slope: Tensor) -> Tensor:
    """The slope times the inverse of the curvature, as far as ``history`` tells it."""
    d, shares = slope, []
    for step, change, rho in reversed(history):
        shares.append(rho * _dot(step, d))
        d = torch.add(d, change, alpha=-shares[-1])
    if history:
        _, change, rho = history[-1]
        d = d / (rho * _dot(change, change))
    for (step, change, rho), share in zip(history, reversed(shares), strict=True):
        d = torch.add(d, step, alpha=share - rho * _dot(change, d))
    return d
