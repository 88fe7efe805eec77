"""Gradient and curvature of a likelihood that only has values, by central differences.

Each score is moved up and down, which gives slope and curvature there for any function: 2 (T V + V^2)
values per draw, without the noise of estimators that work from random draws. Where sequences are short and
labels few that is cheap, and any function can be fitted with second-order inference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from structgp.structures.base import Curvature, Structure, refuse
from structgp.structures.opaque.user_function import one_table

SLOPE_STEP = 1e-2
BEND_STEP = 0.1
"""Steps of the differences: errors are a millionth of the third derivative and a thousandth of the fourth,
and a function that computes in single precision still has three digits."""

VALUES_AT_ONCE = 1 << 21
"""Latent values that one call of the function sees at most."""

Values = Callable[[Tensor, Tensor], Tensor]


class Differences(Structure):
    """``inner`` with a gradient and a curvature position by position. Negative curvature counts as 0.
    ``n_values`` counts the values asked for, sequences times draws."""

    def __init__(self, inner: Structure) -> None:
        self.inner, self.n_values = inner, 0
        self.ignores_shift, self.handles_missing = inner.ignores_shift, inner.handles_missing
        self.has_marginals, self.has_decoder = inner.has_marginals, inner.has_decoder

    @staticmethod
    def evaluations(n_positions: float, n_labels: int) -> float:
        """Values that a gradient takes, for each draw and sequence."""
        return 2 * (n_positions * n_labels + n_labels**2)

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        one_table(g)
        # Where a shift changes nothing, one label's slope is minus the sum of the others'.
        directions = f.shape[-1] - int(self.ignores_shift)
        return _Values.apply(f, g, partial(self._finite, y, mask), directions)

    def marginals(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        return self.inner.marginals(f, g, mask)

    def decode(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        return self.inner.decode(f, g, mask)

    def local_curvature(
        self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor, basis: Tensor | None = None
    ) -> Curvature:
        one_table(g)
        with torch.no_grad():
            basis = torch.eye(f.shape[-1]).to(f) if basis is None else basis
            values = partial(self._finite, y, mask)
            middle, bends = values(f, g), []
            for steps in (_node_steps(f, basis), _table_steps(g)):
                moved = _moved(values, f, g, *(BEND_STEP * x for x in steps))
                bend = [(2 * middle - up - down).mean(0) / BEND_STEP**2 for up, down in moved]
                bends.append(torch.stack(bend, -1).clamp(min=0))
            node = bends[0].view(len(mask), f.shape[2], basis.shape[1])  # (B, T, R)
            return Curvature(node * mask[..., None], bends[1].view(len(mask), *g.shape[1:]))

    def _finite(self, y: Tensor, mask: Tensor, f: Tensor, g: Tensor) -> Tensor:
        found = self.inner.log_prob(f, g, y, mask)
        self.n_values += found.numel()
        if not bool(found.isfinite().all()):
            refuse(found)
        return found


class _Values(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: Tensor, g: Tensor, values: Values, directions: int) -> Tensor:
        ctx.save_for_backward(f, g)
        ctx.values, ctx.directions = values, directions
        return values(f.detach(), g.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        f, g = (x.detach() for x in ctx.saved_tensors)
        eye = torch.eye(f.shape[-1]).to(f)[:, : ctx.directions]
        slopes = []
        for steps in (_node_steps(f, eye), _table_steps(g)):
            moved = _moved(ctx.values, f, g, *(SLOPE_STEP * x for x in steps))
            slopes.append(torch.stack([grad * (up - down) for up, down in moved], -1) / (2 * SLOPE_STEP))
        node = slopes[0].view(*f.shape[:-1], ctx.directions)
        if ctx.directions < f.shape[-1]:
            node = torch.cat([node, -node.sum(-1, keepdim=True)], -1)
        return node, slopes[1].sum(1).view(*g.shape), None, None


def _node_steps(f: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Steps (K, T, V) in f, one for each position and column of ``directions`` (V, R), and 0 in g."""
    T, V = f.shape[2:]
    R = directions.shape[1]
    steps = f.new_zeros((T, R, T, V))
    steps.diagonal(dim1=0, dim2=2).copy_(directions.T[..., None])  # (R, V, T)
    return steps.flatten(0, 1), f.new_zeros((T * R, 1, 1))


def _table_steps(g: Tensor) -> tuple[Tensor, Tensor]:
    """Steps (K, 1, 1) in f and (K, V, V) in g, one for each entry of g."""
    V = g.shape[-1]
    return g.new_zeros((V * V, 1, 1)), torch.eye(V * V).to(g).view(-1, V, V)


def _moved(
    values: Values, f: Tensor, g: Tensor, f_steps: Tensor, g_steps: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Values (S, B) with f (S, B, T, V) and g (S, V, V) moved up and down by each of the K steps, of which
    some make up one call."""
    at_once = max(1, VALUES_AT_ONCE // max(1, 2 * f.numel()))
    for some_f, some_g in zip(f_steps.split(at_once), g_steps.split(at_once), strict=True):
        both_f = torch.cat([some_f, -some_f])[:, None, None]
        both_g = torch.cat([some_g, -some_g])[:, None]
        found = values((f + both_f).flatten(0, 1), (g + both_g).flatten(0, 1))
        yield from zip(*found.view(2, len(some_f), len(f), -1), strict=True)
