"""Gradient and curvature of a likelihood that only has values, by central differences.

Each score is moved up and down, which gives the slope and the curvature in that score for any function.
This takes 2 (T V + V^2) values per draw and has none of the noise of gradient estimators that work from
random draws. Where sequences are short and labels few, it is cheap, and any function can be fitted with
second-order inference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from structgp.structures.base import Curvature, Structure, refuse
from structgp.structures.opaque.user_function import one_table

SLOPE_STEP = 1e-2
BEND_STEP = 0.1
"""Steps of the differences, for slopes and for curvature: errors are about 2e-5 times the third derivative
and a thousandth of the fourth, and a function that computes in single precision still has three digits."""

VALUES_AT_ONCE = 1 << 21
"""Largest number of latent values that one call of the function sees."""

Values = Callable[[Tensor, Tensor], Tensor]


class Differences(Structure):
    """``inner`` with a gradient, and with a curvature position by position, where negative values count as
    0. ``n_values`` counts the values asked for, one per sequence and draw."""

    def __init__(self, inner: Structure) -> None:
        self.inner, self.n_values = inner, 0
        self.ignores_shift, self.handles_missing = inner.ignores_shift, inner.handles_missing
        self.has_marginals, self.has_decoder = inner.has_marginals, inner.has_decoder

    @staticmethod
    def evaluations(n_positions: float, n_labels: int) -> float:
        """Number of values that a gradient takes, per draw and sequence."""
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
            middle = values(f, g)
            node, table = (
                ((2 * middle - up - down).mean(1).T / BEND_STEP**2).clamp(min=0)  # (B, K)
                for up, down in _moved(values, f, g, basis, BEND_STEP)
            )
            node = node.reshape(*mask.shape, -1) * mask[..., None]  # (B, T, R)
            return Curvature(node, table.reshape(-1, *g.shape[1:]))

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
        node, table = (
            (grad * (up - down)).movedim(0, -1) / (2 * SLOPE_STEP)  # (S, B, K)
            for up, down in _moved(ctx.values, f, g, eye, SLOPE_STEP)
        )
        node = node.reshape(*f.shape[:-1], ctx.directions)
        if ctx.directions < f.shape[-1]:
            node = torch.cat([node, -node.sum(-1, keepdim=True)], -1)
        return node, table.sum(1).reshape(g.shape), None, None


def _moved(values: Values, f: Tensor, g: Tensor, directions: Tensor, size: float) -> list[Tensor]:
    """Two tensors of values (2, K, S, B) after each of K steps of length ``size``, up and down. The first
    has one step in f (S, B, T, V) per position and column of ``directions`` (V, R), the second one step in
    g (S, V, V) per entry. One call of ``values`` takes several steps."""
    (T, V), R = f.shape[2:], directions.shape[1]
    nodes = f.new_zeros((T, R, T, V))
    nodes.diagonal(dim1=0, dim2=2).copy_(directions.T[..., None])  # (R, V, T)
    tables, stay = torch.eye(V * V).to(g).view(-1, V, V), f.new_zeros((1, 1, 1))
    at_once = max(1, VALUES_AT_ONCE // max(1, 2 * f.numel()))
    found = []
    for steps in ((nodes.flatten(0, 1), stay.expand(T * R, 1, 1)), (stay.expand(V * V, 1, 1), tables)):
        parts = []
        for some_f, some_g in zip(*((size * x).split(at_once) for x in steps), strict=True):
            moved_f = f + torch.cat([some_f, -some_f])[:, None, None]
            moved_g = g + torch.cat([some_g, -some_g])[:, None]
            part = values(moved_f.flatten(0, 1), moved_g.flatten(0, 1))
            parts.append(part.view(2, len(some_f), len(f), -1))
        found.append(torch.cat(parts, 1))
    return found
