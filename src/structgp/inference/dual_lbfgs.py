"""Weights under a Gaussian prior and a log-likelihood of X w, by L-BFGS on a number for each token.

With prior precision L and mean c, the best weights are c + L^-1 X^T a for some a (N, R): one number for
each token and function, where there may be many times as many weights (the representer theorem). So L-BFGS
moves a, in the geometry of the prior: the length of a step is that of the weights it stands for, a^T K a
with K = X L^-1 X^T, which makes the prior's curvature 1 in every direction. Every vector is kept with its
image under K, so that of one step only the gradient has to be multiplied.

Pairwise scores g = d + P^-1 b are the last V^2 numbers of the same vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from structgp.errors import LikelihoodError
from structgp.gp.weights import SparseRows

MEMORY = 10
FIRST_CHANGE = 1.0
"""Of any latent value, in a step that knows nothing of the curvature."""

TRIES = 6
SHORTER, NEGLIGIBLE = 0.4, 0.01

Likelihood = Callable[[Tensor, Tensor], tuple[float, Tensor, Tensor]]
"""Of functions (N, R) and pairwise scores (V, V): the value, and its slopes in both."""


@dataclass(frozen=True)
class Prior:
    """Of the F weights that occur: precision and mean (F, R), of pairs (V, V) each. rows : X (N, F).
    fixed : pairs that do not move."""

    rows: SparseRows
    precision: Tensor
    mean: Tensor
    pair_precision: Tensor
    pair_mean: Tensor
    fixed: bool

    @property
    def single(self) -> Prior:
        """The same in single precision."""
        numbers = (self.precision, self.mean, self.pair_precision, self.pair_mean)
        precision, mean, pair_precision, pair_mean = (x.float() for x in numbers)
        return Prior(self.rows.single, precision, mean, pair_precision, pair_mean, self.fixed)

    def weights(self, a: Tensor) -> Tensor:
        """(F, R) L^-1 X^T a."""
        return self.rows.transposed_times(a) / self.precision

    def pairs(self, b: Tensor) -> Tensor:
        return torch.zeros_like(b) if self.fixed else b / self.pair_precision


@dataclass(frozen=True)
class Vector:
    """a and b side by side, and the functions and scores that they stand for."""

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
    """a : (N, R), b : (V, V); functions : (N, R), pairs : (V, V), there; calls of the likelihood."""

    a: Tensor
    b: Tensor
    functions: Tensor
    pairs: Tensor
    calls: int


def climb(
    likelihood: Likelihood, prior: Prior, a: Tensor, b: Tensor, steps: int, unsure: bool = False
) -> Found:
    """Towards the most probable weights, from a and b, or if ``unsure`` from a part of them. Cost of a
    step: a likelihood, O((nnz + F) R) products, and O(MEMORY N R)."""
    shapes = a.shape, b.shape
    sizes = [a.numel(), b.numel()]
    home, pair_home = prior.rows.times(prior.mean), prior.pair_mean

    def apart(flat: Tensor) -> tuple[Tensor, Tensor]:
        first, second = flat.split(sizes)
        return first.view(shapes[0]), second.view(shapes[1])

    def vector(a: Tensor, b: Tensor) -> Vector:
        images = prior.rows.times(prior.weights(a)), prior.pairs(b)
        return Vector(*(torch.cat([x.reshape(-1), y.reshape(-1)]) for x, y in ((a, b), images)))

    calls = 0

    def look(x: Vector) -> tuple[float, tuple[Tensor, Tensor]]:
        """Minus the log posterior, and the slopes of the likelihood; infinite where that has no value."""
        nonlocal calls
        calls += 1
        functions, pairs = apart(x.image)
        try:
            value, *slopes = likelihood(home + functions, pair_home + pairs)
        except LikelihoodError:
            if not bool(x.numbers.any()):
                raise  # where the prior is, it has to have one
            return float("inf"), (functions, pairs)
        return 0.5 * x.dot(x) - value, (slopes[0], slopes[1])

    def nearest(x: Vector) -> tuple[Vector, float, tuple[Tensor, Tensor]]:
        """The best of x and shorter ones: since they were found, the prior may have become so much wider
        that the same numbers are far too much."""
        best = x, *look(x)
        while bool(x.numbers.any()):
            x = Vector(SHORTER * x.numbers, SHORTER * x.image)
            if float(x.image.abs().max()) < NEGLIGIBLE:
                x = Vector(torch.zeros_like(x.numbers), torch.zeros_like(x.image))
            tried = x, *look(x)
            if tried[1] >= best[1] and best[1] < float("inf"):
                break
            best = tried
        return best

    def gradient(x: Vector, slopes: tuple[Tensor, Tensor]) -> Vector:
        a, b = apart(x.numbers)
        return vector(a - slopes[0], b - slopes[1])

    x = vector(a, b)
    x, value, slopes = nearest(x) if unsure else (x, *look(x))
    slope, history = gradient(x, slopes), _History()
    for _ in range(steps):
        direction = history.direction(slope)
        falls = -slope.dot(direction)
        if not falls < 0:
            break
        t = 1.0
        if not history.pairs:
            t = min(1.0, FIRST_CHANGE / max(float(direction.image.abs().max()), 1e-300))
        for _ in range(TRIES):
            new = x.plus(direction, -t)
            new_value, slopes = look(new)
            if new_value <= value + 1e-4 * t * falls:
                break
            if new_value == float("inf"):
                t *= 0.1
                continue
            # Where the parabola through what is known is lowest, within reason.
            bend = new_value - value - t * falls
            t *= min(0.5, max(0.1, -0.5 * t * falls / bend if bend > 0 else 0.1))
        else:
            break
        new_slope = gradient(new, slopes)
        history.add(new.plus(x, -1.0), new_slope.plus(slope, -1.0))
        x, value, slope = new, new_value, new_slope
    functions, pairs = apart(x.image)
    return Found(*apart(x.numbers), home + functions, pair_home + pairs, calls)


class _History:
    """Steps and changes of the gradient along them, the latest last."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Vector, Vector, float]] = []

    def add(self, step: Vector, change: Vector) -> None:
        curve = step.dot(change)
        if curve > 0:
            self.pairs = [*self.pairs[1 - MEMORY :], (step, change, 1 / curve)]

    def direction(self, slope: Vector) -> Vector:
        """The inverse of the curvature, so far as it is known, times the slope."""
        d, shares = slope, []
        for step, change, rho in reversed(self.pairs):
            share = rho * step.dot(d)
            shares.append(share)
            d = d.plus(change, -share)
        if self.pairs:
            _, change, rho = self.pairs[-1]
            size = 1 / (rho * change.dot(change))
            d = Vector(size * d.numbers, size * d.image)
        for (step, change, rho), share in zip(self.pairs, reversed(shares), strict=True):
            d = d.plus(step, share - rho * change.dot(d))
        return d
