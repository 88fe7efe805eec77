"""Weights under a Gaussian prior and a log-likelihood of X w, by L-BFGS on one number per row.

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


@dataclass(frozen=True)
class Prior:
    """The prior of the F weights of one block that occur: precision and mean (F, R). rows : X (N, F)."""

    rows: Any
    precision: Tensor
    mean: Tensor

    @property
    def single(self) -> Prior:
        """The same in single precision."""
        largest = torch.finfo(torch.float32).max
        return Prior(self.rows.single, self.precision.clamp(max=largest).float(), self.mean.float())

    @property
    def home(self) -> Tensor:
        """(N, R) the functions at the prior's mean."""
        return self.rows.times(self.mean)

    def image(self, a: Tensor) -> Tensor:
        """(N, R) X L^-1 X^T a."""
        return self.rows.times(self.rows.transposed_times(a) / self.precision)


@dataclass(frozen=True)
class Vector:
    """Numbers of all blocks, one after another, and the functions that they stand for."""

    numbers: Tensor
    image: Tensor

    def plus(self, other: Vector, times: float) -> Vector:
        return Vector(
            torch.add(self.numbers, other.numbers, alpha=times),
            torch.add(self.image, other.image, alpha=times),
        )

    def dot(self, other: Vector) -> float:
        return float(self.numbers @ other.image)


@dataclass(frozen=True)
class Found:
    """a : (N, R) of each block; functions : (N, R) of each block there; calls : of the likelihood."""

    a: list[Tensor]
    functions: list[Tensor]
    calls: int


def climb(
    likelihood: Likelihood,
    priors: Sequence[Prior],
    start: Sequence[Tensor],
    steps: int,
    unsure: bool = False,
) -> Found:
    """Towards the most probable weights, from a as in ``start``, or if ``unsure`` from a part of it. Cost
    of a step: a likelihood, O((nnz + F) R) products, and O(MEMORY N R)."""
    search = _Search(likelihood, priors, [a.shape for a in start])
    x = search.vector(start)
    x, value, slopes = search.nearest(x) if unsure else (x, *search.look(x))
    slope, history = search.gradient(x, slopes), _History()
    for _ in range(steps):
        direction = history.direction(slope)
        falls = -slope.dot(direction)
        if not falls < 0:
            break
        t = 1.0
        if not history.steps:
            t = min(1.0, FIRST_CHANGE / max(float(direction.image.abs().max()), 1e-300))
        found = search.along(x, value, direction, falls, t)
        if found is None:
            break
        new, value, slopes = found
        new_slope = search.gradient(new, slopes)
        history.add(new.plus(x, -1.0), new_slope.plus(slope, -1.0))
        x, slope = new, new_slope
    return Found(search.apart(x.numbers), search.functions(x), search.calls)


class _Search:
    """Minus the log posterior, at vectors of all blocks' numbers."""

    def __init__(
        self, likelihood: Likelihood, priors: Sequence[Prior], shapes: Sequence[torch.Size]
    ) -> None:
        self.likelihood, self.priors, self.shapes = likelihood, priors, shapes
        self.sizes, self.calls = [shape.numel() for shape in shapes], 0
        self.home = [prior.home for prior in priors]

    def apart(self, flat: Tensor) -> list[Tensor]:
        return [x.view(s) for x, s in zip(flat.split(self.sizes), self.shapes, strict=True)]

    def vector(self, parts: Sequence[Tensor]) -> Vector:
        images = [prior.image(a) for prior, a in zip(self.priors, parts, strict=True)]
        return Vector(*(torch.cat([x.reshape(-1) for x in xs]) for xs in (parts, images)))

    def functions(self, x: Vector) -> list[Tensor]:
        return [home + image for home, image in zip(self.home, self.apart(x.image), strict=True)]

    def look(self, x: Vector) -> tuple[float, list[Tensor]]:
        """The value, and the slopes of the likelihood; infinite where that has no value."""
        self.calls += 1
        functions = self.functions(x)
        try:
            value, slopes = self.likelihood(functions)
        except LikelihoodError:
            if not bool(x.numbers.any()):
                raise  # where the prior is, it has to have one
            return float("inf"), functions
        return 0.5 * x.dot(x) - value, slopes

    def nearest(self, x: Vector) -> tuple[Vector, float, list[Tensor]]:
        """The best of x and shorter ones: since they were found, the prior may have become so much wider
        that the same numbers are far too much."""
        best = x, *self.look(x)
        while bool(x.numbers.any()):
            x = Vector(SHORTER * x.numbers, SHORTER * x.image)
            if float(x.image.abs().max()) < NEGLIGIBLE:
                x = Vector(torch.zeros_like(x.numbers), torch.zeros_like(x.image))
            tried = x, *self.look(x)
            if tried[1] >= best[1] and best[1] < float("inf"):
                break
            best = tried
        return best

    def gradient(self, x: Vector, slopes: Sequence[Tensor]) -> Vector:
        parts = self.apart(x.numbers)
        return self.vector([a - slope for a, slope in zip(parts, slopes, strict=True)])

    def along(
        self, x: Vector, value: float, direction: Vector, falls: float, t: float
    ) -> tuple[Vector, float, list[Tensor]] | None:
        """A step of length t, or shorter until the value falls enough; None if no try does."""
        for _ in range(TRIES):
            new = x.plus(direction, -t)
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


class _History:
    """Steps and changes of the gradient along them, the latest last."""

    def __init__(self) -> None:
        self.steps: list[tuple[Vector, Vector, float]] = []

    def add(self, step: Vector, change: Vector) -> None:
        curve = step.dot(change)
        if curve > 0:
            self.steps = [*self.steps[1 - MEMORY :], (step, change, 1 / curve)]

    def direction(self, slope: Vector) -> Vector:
        """The inverse of the curvature, so far as it is known, times the slope."""
        d, shares = slope, []
        for step, change, rho in reversed(self.steps):
            share = rho * step.dot(d)
            shares.append(share)
            d = d.plus(change, -share)
        if self.steps:
            _, change, rho = self.steps[-1]
            size = 1 / (rho * change.dot(change))
            d = Vector(size * d.numbers, size * d.image)
        for (step, change, rho), share in zip(self.steps, reversed(shares), strict=True):
            d = d.plus(step, share - rho * change.dot(d))
        return d
