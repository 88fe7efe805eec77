"""The points at which estimators evaluate the likelihood: standard normal, in independent sets.

An estimate is the mean of a few replicates, whose scatter gives its variance; points may depend on one
another only within a replicate.

    iid          independent points
    antithetic   each point with its mirror image: odd and even parts of l do not disturb each other
    orthogonal   antithetic, and the directions of a sequence at right angles to one another
    sobol        randomised Sobol points through the inverse normal distribution function"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, TypeAlias

import torch
from torch import Generator, Tensor
from torch.quasirandom import SobolEngine

from structgp.inference.estimators.moments import Group, Noise, Target

Design: TypeAlias = Literal["iid", "antithetic", "orthogonal", "sobol"]


def replicate_sizes(n_draws: int, replicates: int, design: Design) -> list[int]:
    """Number of points in each replicate, ``n_draws`` in all. Where points are mirrored, each replicate has
    an even number, and an odd ``n_draws`` is rounded up."""
    unit = 1 if design in ("iid", "sobol") else 2
    units = max(1, -(-n_draws // unit))
    count = min(replicates, units)
    return [unit * (units // count + (r < units % count)) for r in range(count)]


def draw(target: Target, design: Design, sizes: list[int], generator: Generator) -> Iterator[Noise]:
    """Yields the random numbers of one replicate after the other, computed when they are asked for."""
    generator = _on_device(generator, target.weight.device)
    for size in sizes:
        yield tuple(_points(group, design, size, generator, target.dtype) for group in target.groups)


def _points(group: Group, design: Design, size: int, generator: Generator, dtype: torch.dtype) -> Tensor:
    """(S, B, T, R), or (S, R) if shared."""
    B = 1 if group.mask is None else len(group.mask)
    n = math.prod(group.shape(1)) // B  # numbers per example
    if design == "iid" or n == 0:  # no example has a tuple of this template
        return _normal(group.shape(size), generator, dtype)
    if design == "sobol":
        return _sobol(size, B, n, generator, dtype).reshape(group.shape(size))
    half = size // 2
    if design == "antithetic":
        points = _normal(group.shape(half), generator, dtype)
    else:
        points = _orthogonal(half, B, n, generator, dtype).reshape(group.shape(half))
    return torch.cat([points, -points])


def split(noise: Noise, sizes: list[int]) -> Iterator[Noise]:
    """Splits one replicate of mirrored points into parts of the given sizes; mirror images stay
    together."""
    parts = [eps[: len(eps) // 2].split([size // 2 for size in sizes]) for eps in noise]
    for some in zip(*parts, strict=True):
        yield tuple(torch.cat([eps, -eps]) for eps in some)


def _orthogonal(count: int, B: int, n: int, generator: Generator, dtype: torch.dtype) -> Tensor:
    """(count, B, n): for each b, blocks of n directions at right angles to one another, each as long as a
    normal vector is. Cost O(B n count min(n, count))."""
    blocks = []
    for start in range(0, count, n):
        width = min(n, count - start)
        normal = _normal((B, n, width), generator, dtype)
        directions, triangle = torch.linalg.qr(normal)
        # Signs of the diagonal make the directions uniform (Haar).
        directions = directions * triangle.diagonal(dim1=-1, dim2=-2).sign()[:, None]
        length = _normal((B, n, width), generator, dtype).norm(dim=1)
        blocks.append((directions * length[:, None]).permute(2, 0, 1))
    return torch.cat(blocks)


def _sobol(count: int, B: int, n: int, generator: Generator, dtype: torch.dtype) -> Tensor:
    """(count, B, n): one scrambled set of points, whose digits are shifted by a different random vector for
    each b, so that the estimates of different sequences are uncorrelated. Dimensions beyond Sobol's table
    are independent normal numbers."""
    known, device = min(n, SobolEngine.MAXDIM), generator.device
    engine = SobolEngine(known, scramble=True, seed=_seed(generator))
    cells = 1 << SobolEngine.MAXBIT
    digits = (engine.draw(count, dtype=torch.float64) * cells).long().to(device)
    shift = torch.randint(cells, (B, known), generator=generator, device=device)
    uniform = ((digits[:, None] ^ shift).double() + 0.5) / cells
    normal = torch.special.ndtri(uniform).to(dtype)
    return torch.cat([normal, _normal((count, B, n - known), generator, dtype)], -1)


def _normal(shape: tuple[int, ...], generator: Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=dtype, device=generator.device)


def _seed(generator: Generator) -> int:
    return int(torch.randint(2**31, (), generator=generator, device=generator.device))


def _on_device(generator: Generator, device: torch.device) -> Generator:
    """The generator, or one seeded from it if the numbers are needed on another device."""
    if generator.device.type == device.type:
        return generator
    return Generator(device).manual_seed(_seed(generator))
