"""Where to look: standard normal points, in independent replicates.

An estimate is the mean of a few replicates, so that their scatter says how sure it is; points
may depend on one another only within a replicate.

    iid          independent points
    antithetic   each point with its mirror image: odd and even parts of l do not disturb each other
    orthogonal   antithetic, and the directions of a sequence at right angles to one another
    sobol        randomised Sobol points through the inverse normal distribution function
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from structgp.inference.estimators.moments import Draws, Target

Design: TypeAlias = Literal["iid", "antithetic", "orthogonal", "sobol"]


def replicate_sizes(n_draws: int, replicates: int, design: Design) -> list[int]:
    """How many of ``n_draws`` points each replicate has: whole pairs where the design has pairs,
    at least one pair each. An odd number of draws is rounded up to pairs."""
    unit = 1 if design in ("iid", "sobol") else 2
    units = max(1, -(-n_draws // unit))
    count = min(replicates, units)
    return [unit * (units // count + (r < units % count)) for r in range(count)]


def draw(
    target: Target, design: Design, sizes: list[int], generator: torch.Generator
) -> Iterator[Draws]:
    """One ``Draws`` a replicate, each computed when it is asked for."""
    (B, T), V, R, dtype = target.mask.shape, target.n_labels, target.n_functions, target.dtype
    generator = _on_device(generator, target.mask.device)
    for size in sizes:
        if design == "iid":
            unary = _normal((size, B, T, R), generator, dtype)
            yield Draws(unary, _normal((size, V, V), generator, dtype))
        elif design == "sobol":
            unary = _sobol(size, B, T * R, generator, dtype).reshape(size, B, T, R)
            yield Draws(unary, _sobol(size, 1, V * V, generator, dtype).reshape(size, V, V))
        else:
            half = size // 2
            if design == "antithetic":
                unary = _normal((half, B, T, R), generator, dtype)
                pairs = _normal((half, V, V), generator, dtype)
            else:
                unary = _orthogonal(half, B, T * R, generator, dtype).reshape(half, B, T, R)
                pairs = _orthogonal(half, 1, V * V, generator, dtype).reshape(half, V, V)
            yield Draws(torch.cat([unary, -unary]), torch.cat([pairs, -pairs]))


def split(draws: Draws, sizes: list[int], design: Design) -> Iterator[Draws]:
    """One replicate in parts of the given sizes, pairs kept together."""
    if design in ("iid", "sobol"):
        both = zip(draws.unary.split(sizes), draws.pairwise.split(sizes), strict=True)
        yield from (Draws(unary, pairs) for unary, pairs in both)
        return
    half = len(draws) // 2
    halves = [size // 2 for size in sizes]
    unary, pairs = draws.unary[:half].split(halves), draws.pairwise[:half].split(halves)
    for u, p in zip(unary, pairs, strict=True):
        yield Draws(torch.cat([u, -u]), torch.cat([p, -p]))


def _orthogonal(
    count: int, B: int, n: int, generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    """(count, B, n): for each b, blocks of n directions at right angles to one another, each as long
    as a normal vector is. Cost O(B n count min(n, count))."""
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


def _sobol(count: int, B: int, n: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """(count, B, n): one scrambled set of points, its digits shifted by a vector of its own for each
    b, which leaves the estimates of different sequences uncorrelated. Dimensions beyond what Sobol's
    table has are independent normal numbers."""
    known, device = min(n, SobolEngine.MAXDIM), generator.device
    engine = SobolEngine(known, scramble=True, seed=_seed(generator))
    cells = 1 << SobolEngine.MAXBIT
    digits = (engine.draw(count, dtype=torch.float64) * cells).long().to(device)
    shift = torch.randint(cells, (B, known), generator=generator, device=device)
    uniform = ((digits[:, None] ^ shift).double() + 0.5) / cells
    normal = torch.special.ndtri(uniform).to(dtype)
    return torch.cat([normal, _normal((count, B, n - known), generator, dtype)], -1)


def _normal(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=dtype, device=generator.device)


def _seed(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (), generator=generator, device=generator.device))


def _on_device(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """The generator, or one that follows from it where the numbers are needed elsewhere."""
    if generator.device.type == device.type:
        return generator
    return torch.Generator(device).manual_seed(_seed(generator))
