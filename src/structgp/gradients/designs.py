"""Where to look: standard normal points, in independent replicates.

An estimate is the mean of a few replicates, so that their scatter says how sure it is; points
may depend on one another only within a replicate.

    iid          independent points
    antithetic   each point with its mirror image: odd and even parts of l do not disturb each other
    orthogonal   antithetic, and the directions of a sequence at right angles to one another
    sobol        scrambled Sobol points through the inverse normal distribution function
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from structgp.gradients.moments import Draws, Target

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
    (B, T), V, dtype = target.mask.shape, target.n_labels, target.dtype
    for size in sizes:
        if design == "iid":
            unary = torch.randn(size, B, T, V, generator=generator, dtype=dtype)
            yield Draws(unary, torch.randn(size, V, V, generator=generator, dtype=dtype))
        elif design == "sobol":
            unary = torch.stack([_sobol(size, T * V, generator, dtype) for _ in range(B)], 1)
            pairs = _sobol(size, V * V, generator, dtype)
            yield Draws(unary.reshape(size, B, T, V), pairs.reshape(size, V, V))
        else:
            half = size // 2
            if design == "antithetic":
                unary = torch.randn(half, B, T, V, generator=generator, dtype=dtype)
                pairs = torch.randn(half, V, V, generator=generator, dtype=dtype)
            else:
                unary = _orthogonal(half, B, T * V, generator, dtype).reshape(half, B, T, V)
                pairs = _orthogonal(half, 1, V * V, generator, dtype).reshape(half, V, V)
            yield Draws(torch.cat([unary, -unary]), torch.cat([pairs, -pairs]))


def _orthogonal(
    count: int, B: int, n: int, generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    """(count, B, n): for each b, blocks of n directions at right angles to one another, each as long
    as a normal vector is. Cost O(B n count min(n, count))."""
    blocks = []
    for start in range(0, count, n):
        width = min(n, count - start)
        normal = torch.randn(B, n, width, generator=generator, dtype=dtype)
        directions, triangle = torch.linalg.qr(normal)
        # Signs of the diagonal make the directions uniform (Haar).
        directions = directions * triangle.diagonal(dim1=-1, dim2=-2).sign()[:, None]
        length = torch.randn(B, n, width, generator=generator, dtype=dtype).norm(dim=1)
        blocks.append((directions * length[:, None]).permute(2, 0, 1))
    return torch.cat(blocks)


def _sobol(count: int, n: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """(count, n); dimensions beyond what Sobol's table has are independent normal numbers."""
    known = min(n, SobolEngine.MAXDIM)
    seed = int(torch.randint(2**31, (), generator=generator))
    points = SobolEngine(known, scramble=True, seed=seed).draw(count, dtype=torch.float64)
    tiny = torch.finfo(torch.float64).eps
    normal = torch.special.ndtri(points.clamp(tiny, 1 - tiny)).to(dtype)
    rest = torch.randn(count, n - known, generator=generator, dtype=dtype)
    return torch.cat([normal, rest], 1)
