"""Kernel on categorical columns that measures how far two tokens agree, template by template."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from gpytorch.constraints import Positive
from gpytorch.kernels import Kernel
from torch import Tensor
from torch.autograd.function import once_differentiable

MISSING = -1.0
"""Id of 'no value here'. It agrees with nothing, not even with itself."""


class TemplateKernel(Kernel):
    """Agreement of two tokens, with one non-negative weight per template; normalised, so that k(x, x) = 1
    if no value is missing.

    Rows hold the P value ids of a token. With a_p(x, z) = [x_p = z_p]:

    * ``additive``: k = sum_p w_p a_p / sum_p w_p: a linear kernel on one-hot features, with one
      relevance weight per template;
    * ``product``: k = exp(-sum_p w_p (1 - a_p)): tokens must agree in every template with a large weight.

    Put a ``ScaleKernel`` around it for the amplitude. Cost O(N M P) time, O(N M) memory, however
    many distinct values there are; the backward pass compares again instead of keeping P matrices.

    Parameters
    ----------
    n_templates : P.
    mode : 'additive' or 'product'.
    """

    has_lengthscale = False

    def __init__(self, n_templates: int, mode: str = "additive", **kwargs: Any) -> None:
        if mode not in ("additive", "product"):
            raise ValueError(f"mode must be 'additive' or 'product', not {mode!r}")
        super().__init__(**kwargs)
        self.n_templates = n_templates
        self.mode = mode
        self.register_parameter("raw_weights", torch.nn.Parameter(torch.zeros(n_templates)))
        self.register_constraint("raw_weights", Positive())
        self.weights = 1.0 if mode == "additive" else 1.0 / n_templates

    @property
    def weights(self) -> Tensor:
        """(P,) positive weights."""
        return self.raw_weights_constraint.transform(self.raw_weights)

    @weights.setter
    def weights(self, value: Tensor | float) -> None:
        value = torch.as_tensor(value).to(self.raw_weights).expand_as(self.raw_weights)
        self.initialize(raw_weights=self.raw_weights_constraint.inverse_transform(value))

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **_: Any
    ) -> Tensor:
        if last_dim_is_batch:
            raise NotImplementedError("TemplateKernel has no last_dim_is_batch form")
        weights = self.weights
        if x1.shape[-1] != len(weights):
            raise ValueError(f"rows of {x1.shape[-1]} columns for {len(weights)} templates")
        if diag:
            agree = (x1 == x2) & (x1 != MISSING)
            agreement = (agree * weights).sum(-1)
        else:
            agreement = _Agreement.apply(x1, x2, weights)
        if self.mode == "additive":
            return agreement / weights.sum()
        return torch.exp(agreement - weights.sum())


MOST_TEMPLATES, MOST_COMPARED = 62, 1 << 22
"""Most templates whose agreement fits into the bits of one number, and most pairs of rows whose patterns
are kept (32 MB)."""


class Patterns:
    """The pattern of each pair of rows: the templates in which they agree. There are far fewer patterns
    than pairs, and sums over templates are needed only once per pattern. number : (N, M) index of each
    pair's pattern. agree : (U, P) the patterns, 1 where rows agree."""

    def __init__(self, x1: Tensor, x2: Tensor) -> None:
        P = x1.shape[-1]
        packed = torch.zeros(len(x1), len(x2), dtype=torch.int64, device=x1.device)
        for p in range(P):
            packed |= _agree(x1, x2, p).long() << p
        patterns, self.number = torch.unique(packed, return_inverse=True)
        self.agree = (patterns[:, None] >> torch.arange(P, device=x1.device) & 1).double()
        self.rows = x1, x2


_kept: ContextVar[list[Patterns] | None] = ContextVar("patterns", default=None)


@contextmanager
def keeping_patterns() -> Iterator[None]:
    """Keeps the patterns of the last rows while this context is open, so that the kernel under other
    weights takes a hundredth of the work. For searches over weights."""
    token = _kept.set([])
    try:
        yield
    finally:
        _kept.reset(token)


def _patterns(x1: Tensor, x2: Tensor) -> Patterns | None:
    """The patterns of two sets of rows; None where they are not kept."""
    kept = _kept.get()
    if kept is None or x1.dim() > 2 or x2.dim() > 2 or x1.shape[1] > MOST_TEMPLATES:
        return None
    if len(x1) * len(x2) > MOST_COMPARED:
        return None
    if not kept or not all(map(torch.equal, kept[0].rows, (x1, x2))):
        kept[:] = [Patterns(x1, x2)]
    return kept[0]


class _Agreement(torch.autograd.Function):
    """(..., N, M) sum_p w_p [x1_p = x2_p], without a stack of P comparison matrices."""

    @staticmethod
    def forward(ctx: Any, x1: Tensor, x2: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x1, x2)
        ctx.patterns = _patterns(x1, x2)
        if ctx.patterns is not None:
            return (ctx.patterns.agree.to(weights) @ weights)[ctx.patterns.number]
        total: Tensor | None = None
        for p in range(weights.shape[0]):
            term = _agree(x1, x2, p).to(weights.dtype).mul_(weights[p])
            total = term if total is None else total.add_(term)
        assert total is not None, "a template kernel has at least one template"
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        x1, x2 = ctx.saved_tensors
        if ctx.patterns is not None:
            agree, number = ctx.patterns.agree.to(grad), ctx.patterns.number.flatten()
            return None, None, grad.new_zeros(len(agree)).index_add_(0, number, grad.flatten()) @ agree
        sums = [(grad * _agree(x1, x2, p)).sum() for p in range(x1.shape[-1])]
        return None, None, torch.stack(sums)


def _agree(x1: Tensor, x2: Tensor, p: int) -> Tensor:
    # A missing value on the left is replaced by NaN, which equals nothing.
    left = x1[..., p].masked_fill(x1[..., p] == MISSING, float("nan"))
    return left[..., :, None] == x2[..., None, :, p]
