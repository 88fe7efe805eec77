"""Gradient and curvature of a likelihood that only has values, by central differences.

Each score is moved up and down, which gives slope and curvature there for any function: 2 (T V + V^2)
values per draw, without the noise of estimators that work from random draws. Where sequences are short
and labels few that is cheap, and any function can be fitted with second-order inference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from structgp.structures.base import LocalCurvature, Structure
from structgp.structures.opaque.finite import all_finite, one_table

SLOPE_STEP = 1e-2
BEND_STEP = 0.1
"""Steps of the differences: errors are a millionth of the third derivative and a thousandth of the
fourth, and a function that computes in single precision still has three digits."""

VALUES_AT_ONCE = 1 << 21
"""Latent values that one call of the function sees at most."""

Values = Callable[[Tensor, Tensor], Tensor]


class Differences(Structure):
    """``inner`` with a gradient and a curvature position by position. Negative curvature counts as 0.
    ``n_values`` counts the values asked for, sequences times draws."""

    def __init__(self, inner: Structure) -> None:
        self.inner, self.n_values = inner, 0

    @staticmethod
    def evaluations(n_positions: float, n_labels: int) -> float:
        """Values that a gradient takes, for each draw and sequence."""
        return 2 * (n_positions * n_labels + n_labels**2)

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        one_table(g)
        # Where a shift changes nothing, one label's slope is minus the sum of the others'.
        directions = f.shape[-1] - int(self.ignores_shift)
        return _Values.apply(f, g, lambda f, g: self._finite(f, g, y, mask), directions)

    def marginals(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        return self.inner.marginals(f, g, mask)

    def decode(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        return self.inner.decode(f, g, mask)

    def local_curvature(
        self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor, basis: Tensor | None = None
    ) -> LocalCurvature:
        def values(f: Tensor, g: Tensor) -> Tensor:
            return self._finite(f, g, y, mask)

        one_table(g)
        with torch.no_grad():
            basis = torch.eye(f.shape[-1]).to(f) if basis is None else basis
            middle = values(f, g)
            bend = [
                (2 * middle - up - down).mean(0) / BEND_STEP**2
                for up, down in _moved_nodes(values, f, g, BEND_STEP * basis)
            ]
            node = torch.stack(bend, -1).view(len(mask), f.shape[2], basis.shape[1])  # (B, T, R)
            bend = [
                (2 * middle - up - down).mean(0) / BEND_STEP**2
                for up, down in _moved_table(values, f, g, BEND_STEP)
            ]
            table = torch.stack(bend, -1).view(len(mask), *g.shape[1:])
            return LocalCurvature(node.clamp(min=0) * mask[..., None], table.clamp(min=0))

    def _finite(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        found = self.inner.log_prob(f, g, y, mask)
        self.n_values += found.numel()
        return all_finite(found)

    @property
    def ignores_shift(self) -> bool:
        return self.inner.ignores_shift

    @property
    def handles_missing(self) -> bool:
        return self.inner.handles_missing

    @property
    def has_marginals(self) -> bool:
        return self.inner.has_marginals

    @property
    def has_decoder(self) -> bool:
        return self.inner.has_decoder


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
        slopes = [
            (up - down) / (2 * SLOPE_STEP) for up, down in _moved_nodes(ctx.values, f, g, SLOPE_STEP * eye)
        ]  # of (S, B)
        node = torch.stack(slopes, -1).view(*f.shape[:-1], ctx.directions)
        if ctx.directions < f.shape[-1]:
            node = torch.cat([node, -node.sum(-1, keepdim=True)], -1)
        table = [
            (grad * (up - down)).sum(1) / (2 * SLOPE_STEP)
            for up, down in _moved_table(ctx.values, f, g, SLOPE_STEP)
        ]
        return grad[..., None, None] * node, torch.stack(table, -1).view(*g.shape), None, None


def _moved_nodes(values: Values, f: Tensor, g: Tensor, steps: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Values (S, B) with position t moved by column r of ``steps`` (V, R), up and down, for all t and
    r."""
    T, R = f.shape[2], steps.shape[1]
    places = [(t, r) for t in range(T) for r in range(R)]
    for some in _groups(places, f.numel()):
        moved = f.new_zeros((len(some), *f.shape[2:]))
        for k, (t, r) in enumerate(some):
            moved[k, t] = steps[:, r]
        shift = moved[:, None, None]  # (K, 1, 1, T, V)
        yield from _both(values, f + shift, f - shift, g.expand(len(some), *g.shape), None)


def _moved_table(values: Values, f: Tensor, g: Tensor, step: float) -> Iterator[tuple[Tensor, Tensor]]:
    """The same with each entry of g (S, V, V) moved."""
    V = g.shape[-1]
    places = [(i, j) for i in range(V) for j in range(V)]
    for some in _groups(places, f.numel()):
        moved = g.new_zeros((len(some), 1, V, V))
        for k, (i, j) in enumerate(some):
            moved[k, 0, i, j] = step
        same = f.expand(len(some), *f.shape)
        yield from _both(values, same, same, g + moved, g - moved)


def _groups(places: list[tuple[int, int]], numbers: int) -> Iterator[list[tuple[int, int]]]:
    width = max(1, VALUES_AT_ONCE // max(1, 2 * numbers))
    for start in range(0, len(places), width):
        yield places[start : start + width]


def _both(
    values: Values, f_up: Tensor, f_down: Tensor, g_up: Tensor, g_down: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """K values moved up and K moved down, from one call with 2 K S draws."""
    K, S = f_up.shape[:2]
    f = torch.cat([f_up, f_down]).flatten(0, 1)
    g = torch.cat([g_up, g_up if g_down is None else g_down]).flatten(0, 1)
    found = values(f, g).view(2, K, S, -1)
    yield from zip(found[0], found[1], strict=True)
