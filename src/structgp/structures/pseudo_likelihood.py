"""Piecewise pseudo-likelihood of the linear chain (Sutton and McCallum, 2007).

Each factor is normalised on its own, conditional by conditional: the label of a position by its scores, and
each of two neighbouring labels given the other by the scores of the transition,

    sum_t [f_t(y_t) - log sum_j exp f_t(j)]
    + sum_t>1 [2 g(y_t-1, y_t) - log sum_j exp g(y_t-1, j) - log sum_i exp g(i, y_t)].

There is no recursion over positions, and the normalisers of a shared table g serve every sequence of the
batch, so the cost per position is linear in V. Exponentials of these values do not sum to 1 over
labellings: they are for training only, and f and g are then read as potentials of the chain."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from structgp.structures.base import Curvature, Structure
from structgp.structures.program import transition_scores, variance
from structgp.structures.spec import Spec, piecewise


class Piecewise(Structure):
    """Piecewise pseudo-likelihood. A factor whose labels are not all known is left out. Cost of each
    method: O(S (B T V + V^2)), or O(S B T V^2) with one table per position; the curvature also writes
    O(B T^2 V) numbers."""

    spec = piecewise()
    ignores_shift = handles_missing = takes_single = True

    def __init__(self, spec: Spec | None = None) -> None:
        if spec is not None:
            self.spec = spec

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        y, mask = _known(y, mask)
        total = _NodeTerms.apply(f, y, mask).sum(-1)
        table = _log_softmax(g, -1) + _log_softmax(g, -2)
        both = mask[:, 1:] & mask[:, :-1]
        return total + torch.where(both, transition_scores(table, y), 0).sum(-1)

    def curvature(
        self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor, basis: Tensor | None = None
    ) -> Curvature:
        """Exact. Positions do not interact, so ``node`` is diagonal over them; the score of i -> j has the
        curvature of the softmax over row i each time i is left, and of that over column j each time j is
        entered."""
        with torch.no_grad():
            y, mask = _known(y, mask)
            B, T = mask.shape
            V = g.shape[-1]
            f = f.masked_fill(~mask[..., None], 0)
            bend = variance(_log_softmax(f, -1).exp(), basis).mean(0) * mask[..., None]
            node = f.new_zeros((B, bend.shape[-1], T, T))
            node.diagonal(dim1=-1, dim2=-2).copy_(bend.mT)  # (B, R, T)
            both = (mask[:, 1:] & mask[:, :-1])[..., None]
            hot = torch.nn.functional.one_hot(y, V).to(g.dtype)
            left, entered = hot[:, :-1] * both, hot[:, 1:] * both  # (B, T-1, V)
            if g.dim() == 3:
                left, entered = left.sum(1), entered.sum(1)
            else:
                g = g.masked_fill(~both[..., None], 0)
            rows, columns = (variance(_log_softmax(g, dim).exp()).mean(0) for dim in (-1, -2))
            return Curvature(node, left[..., None] * rows + entered[..., None, :] * columns)


def _known(y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """y with 0 where there is no label, and the mask of positions with a label."""
    known = mask & (y >= 0)
    return torch.where(known, y, 0), known


class _NodeTerms(torch.autograd.Function):
    """(S, B, T) log-softmax of f at y, 0 at padding; the exponentials serve both passes."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        index = y.expand(f.shape[0], -1, -1).unsqueeze(-1)
        top = f.amax(-1, keepdim=True)
        weight = torch.exp_(f - top)
        total = weight.sum(-1, keepdim=True)
        value = (f.gather(-1, index) - top - total.log()).squeeze(-1)
        # Neither padding that is not a number nor impossible labels may put nan into the gradient.
        broken = ~total.isfinite()
        if bool(broken.any()):
            value = torch.where((top == -torch.inf).squeeze(-1), -torch.inf, value)
            weight, total = weight.masked_fill_(broken, 0), total.masked_fill(broken, 1)
        ctx.save_for_backward(weight, total, index, mask)
        return torch.where(mask, value, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight, total, index, mask = ctx.saved_tensors
        grad = torch.where(mask, grad, 0).unsqueeze(-1)
        return (weight * (-grad / total)).scatter_add_(-1, index, grad), None, None


def _log_softmax(x: Tensor, dim: int) -> Tensor:
    """Log-softmax; where all scores are -inf it is -inf with gradient 0, and not nan."""
    nothing = x.detach().amax(dim, keepdim=True) == -torch.inf
    if not bool(nothing.any()):
        return x.log_softmax(dim)
    return x.masked_fill(nothing, 0).log_softmax(dim).masked_fill(nothing, -torch.inf)
