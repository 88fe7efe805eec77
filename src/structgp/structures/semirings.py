"""Semirings say what 'sum over labellings' means: one recursion, several algebras (Goodman, 1999).

A program only adds scores and sums over labels; the semiring says what a sum is. The gradient of the total
in the scores then tells which labels contributed to it:

    LOG       logsumexp            log Z, and its gradient the marginals
    MAX       maximum              the best score, and its gradient the best labelling, one-hot
    KMax(k)   the k largest        the k best scores, and the gradient of each its labelling
    Sampling  logsumexp            log Z, and a 'gradient' that is one labelling, drawn

Elements of KMax have an additional first dimension, k; scores are added by broadcasting.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Semiring(ABC):
    def lift(self, scores: Tensor) -> Tensor:
        """Scores as elements of the semiring."""
        return scores

    @abstractmethod
    def sum(self, x: Tensor, dim: int) -> Tensor:
        """The sum of elements over a dimension, given as a negative number, counted from the last."""


class _Log(Semiring):
    def sum(self, x: Tensor, dim: int) -> Tensor:
        nothing = x.detach().amax(dim, keepdim=True) == -torch.inf
        if not bool(nothing.any()):
            return x.logsumexp(dim)
        # Where all is -inf, torch's gradient is nan; here it is 0.
        found = x.masked_fill(nothing, 0).logsumexp(dim)
        return found.masked_fill(nothing.squeeze(dim), -torch.inf)


class _Max(Semiring):
    def sum(self, x: Tensor, dim: int) -> Tensor:
        return x.max(dim).values  # amax would divide the gradient among ties


LOG: Semiring = _Log()
MAX: Semiring = _Max()


@dataclass(frozen=True)
class KMax(Semiring):
    """Lists of the k largest, (k, ...), in descending order; -inf where there are fewer."""

    k: int

    def lift(self, scores: Tensor) -> Tensor:
        rest = scores.new_full((self.k - 1, *scores.shape), -torch.inf)
        return torch.cat([scores[None], rest])

    def sum(self, x: Tensor, dim: int) -> Tensor:
        flat = x.movedim((dim, 0), (-2, -1)).flatten(-2)  # (..., n k): entry i k + place of element i
        return flat.topk(self.k, -1).values.movedim(-1, 0)


@dataclass(frozen=True)
class Sampling(Semiring):
    """log Z whose backward pass draws a labelling: the gradient of a sum goes to one of its terms, drawn
    with its share as probability."""

    generator: torch.Generator

    def sum(self, x: Tensor, dim: int) -> Tensor:
        return _DrawnTerm.apply(x.movedim(dim, -1), self.generator)


class _DrawnTerm(torch.autograd.Function):
    """logsumexp over the last dimension, whose gradient goes to one drawn term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, generator: torch.Generator) -> Tensor:
        ctx.save_for_backward(x)
        ctx.generator = generator
        return x.logsumexp(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        drawn = draw(x.softmax(-1), ctx.generator)[..., None]
        return torch.zeros_like(x).scatter_(-1, drawn, grad[..., None]), None


def draw(p: Tensor, generator: torch.Generator) -> Tensor:
    """(...) indices into the last dimension, drawn with probabilities p (..., V)."""
    uniform = torch.rand(p.shape[:-1], generator=generator, dtype=p.dtype, device=generator.device)
    return invert(p, uniform.to(p.device))


def invert(p: Tensor, uniform: Tensor) -> Tensor:
    """(...) index of the entry of p (..., V) that a number (...) in [0, 1) falls on; never one of
    probability 0."""
    total = p.cumsum(-1)
    found = (total <= (uniform * total[..., -1])[..., None]).sum(-1)
    return found.clamp(max=p.shape[-1] - 1)
