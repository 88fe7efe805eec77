"""Fits weights w under a Gaussian prior to a log-likelihood of X w, by L-BFGS over one number per row of X.

With prior precision L and mean c, the best weights are c + L^-1 X^T a for some a (N, R): one number for
each row of X and function, where there may be many times as many weights (the representer theorem). So
L-BFGS moves a, in the geometry of the prior: the length of a step is that of the weights it stands for, a^T
K a with K = X L^-1 X^T, which makes the prior's curvature 1 in every direction. Every vector is kept with
its image under K, so that of one step only the gradient has to be multiplied. The numbers of several blocks
stand one after another in the same vectors; a table of scores is a block with X = 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from structgp.errors import LikelihoodError

MEMORY = 10
FIRST_CHANGE = 1.0
"""Largest change of any latent value in a step that knows nothing of the curvature yet."""

TRIES = 6
SHORTER, NEGLIGIBLE = 0.4, 0.01

Likelihood = Callable[[list[Tensor]], tuple[float, list[Tensor]]]
"""Takes the functions (N, R) of each block; returns the log-likelihood and its slopes in them."""

Step = tuple[Tensor, Tensor, float]
"""A step, the change of the gradient along it, and 1 over their inner product."""


@dataclass(frozen=True)
class Prior:
    """The prior of the F weights of one block that occur: variance and mean (F, R). rows : X (N, F)."""

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
    """Towards the most probable weights, from a as in ``start``, or if ``unsure`` from a part of it.
    Returns a (N, R) of each block, the functions (N, R) of each block and the log-likelihood there, and the
    calls of the likelihood. Cost of a step: a likelihood, O((nnz + F) R) products, and O(MEMORY N R)."""
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
    """Minus the log posterior, at vectors (2, n): the numbers a of all blocks, one after another, and their
    images under K, which are the functions less those at the prior's mean."""

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
        """The value, and the slopes of the likelihood; infinite where that has no value."""
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
        """x, or if ``shorter`` the best of x and shorter ones, with the value and the gradient there: since
        they were found, the prior may have become so much wider that the same numbers are far too much. The
        value is convex, so where it still falls along x, nothing shorter is better. Of numbers that are not
        finite, 0 is the shorter one."""
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
        """A step of length t, or shorter until the value falls enough; None if no try does."""
        for _ in range(TRIES):
            new = torch.add(x, direction, alpha=-t)
            new_value, slopes = self.look(new)
            if new_value <= value + 1e-4 * t * falls:
                return new, new_value, slopes
            if new_value == float("inf"):
                t *= 0.1
                continue
            # Where the parabola through what is known is lowest, within reason.
            bend = new_value - value - t * falls
            t *= min(0.5, max(0.1, -0.5 * t * falls / bend if bend > 0 else 0.1))
        return None


def _dot(x: Tensor, y: Tensor) -> float:
    """The inner product of two vectors (2, n) in the geometry of the prior, a^T K b."""
    return float(x[0] @ y[1])


def _direction(history: Sequence[Step], slope: Tensor) -> Tensor:
    """The inverse of the curvature, so far as it is known, times the slope."""
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
