"""log Z over labels and spans, its gradient, and probabilities of labels, transitions and spans.

Compiled loops (``compiled_ages``) are used where numba is installed, the tensors are on the CPU and there
is enough to do; otherwise, and for sequences whose scores are too far apart for probability space, the
recursion of ``ages`` in log space. Letters and arguments as in ``ages``: w has the scores of spans by type
and length, (S, K, L+1), or by the position where the span ends as well, (S, B, T, K, L+1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from structgp.structures.linear_chain import messages as chain_messages
from structgp.structures.segments.ages import recursion
from structgp.structures.segments.span_scheme import SpanScheme
from structgp.structures.semirings import LOG
from structgp.threads import if_numba


@dataclass(frozen=True)
class Expectations:
    """log Z and probabilities, 0 at padding; or p (1 - p) instead of all probabilities but those of labels.
    log_z : (S, B). node : (S, B, T, V). next : (S, B, T-1, V, V), or (S, B, 1, V, V) if summed over
    positions. length : (S, B, K, L+1), spans of each type and length, summed over positions. ends :
    (S, B, T, K, L+1), the same by last position; (S, B, 0, K, L+1) if not asked for."""

    log_z: Tensor
    node: Tensor
    next: Tensor
    length: Tensor
    ends: Tensor


def log_partition(f: Tensor, g: Tensor, w: Tensor, mask: Tensor, scheme: SpanScheme) -> Tensor:
    """(S, B) log Z, differentiable in f, g and w."""
    if not _in_loops(f, w):
        return recursion(f, g, w, mask, scheme, LOG)
    found: Tensor = _LogPartition.apply(f, g, w, mask, scheme)
    return found


class _LogPartition(torch.autograd.Function):
    """The forward pass already computes all that the gradient needs, sequence by sequence."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, g: Tensor, w: Tensor, mask: Tensor, scheme: SpanScheme) -> Tensor:
        found = expectations(f, g, w, mask, scheme, g.dim() > 3, w.dim() > 3)
        ctx.shared = g.dim() == 3, w.dim() == 3
        ctx.save_for_backward(found.node, found.next, found.length if w.dim() == 3 else found.ends)
        return found.log_z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        node, tables, spans = ctx.saved_tensors
        one_table, one_w = ctx.shared
        node = node * grad[..., None, None]
        tables = (
            torch.einsum("sb...,sb->s...", tables[:, :, 0], grad) if one_table else _times(tables, grad)
        )
        spans = torch.einsum("sb...,sb->s...", spans, grad) if one_w else _times(spans, grad)
        return node, tables, spans, None, None


def _times(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight[(...,) + (None,) * (x.dim() - 2)]


def expectations(
    f: Tensor,
    g: Tensor,
    w: Tensor,
    mask: Tensor,
    scheme: SpanScheme,
    by_position: bool = True,
    by_end: bool = True,
    spread: bool = False,
) -> Expectations:
    """All expectations, without a gradient. by_position : True for transitions position by position, False
    for their sum. by_end : True to give spans by last position as well. spread : p (1 - p) instead of p."""
    f, g, w = f.detach(), g.detach(), w.detach()
    if not _in_loops(f, w):
        return _by_recursion(f, g, w, mask, scheme, by_position, by_end, spread)
    T = f.shape[2]
    steps, ends = max(T - 1, 0) if by_position else 1, T if by_end else 0
    log_z, safe, *parts = _loops().passes(f, g, w, mask, scheme, steps, ends, spread)
    if not bool(safe.all()):
        s, b = (~safe).nonzero(as_tuple=True)
        tables = (g[s][:, None].expand(-1, max(T - 1, 0), -1, -1) if g.dim() == 3 else g[s, b])[None]
        spans = (w[s][:, None].expand(-1, T, -1, -1) if w.dim() == 3 else w[s, b])[None]
        given = f[s, b][None].double(), tables.double(), spans.double()
        careful = _by_recursion(*given, mask[b], scheme, by_position, by_end, spread)
        log_z[s, b] = careful.log_z[0]
        for part, name in zip(parts, ("node", "next", "length", "ends"), strict=True):
            part[s, b] = getattr(careful, name)[0]
    return Expectations(*(x.to(f.dtype) for x in (log_z, *parts)))


def _by_recursion(
    f: Tensor,
    g: Tensor,
    w: Tensor,
    mask: Tensor,
    scheme: SpanScheme,
    by_position: bool,
    by_end: bool,
    spread: bool,
) -> Expectations:
    """``expectations`` from the gradient of the recursion in scores by position."""
    B, T = mask.shape
    if g.dim() == 3:
        g = g[:, None, None].expand(-1, B, max(T - 1, 0), -1, -1)
    if w.dim() == 3:
        w = w[:, None, None].expand(-1, B, T, -1, -1)
    f, g, w = (x.detach().requires_grad_() for x in (f, g, w))
    with torch.enable_grad():
        log_z = recursion(f, g, w, mask, scheme, LOG)
        total = log_z.sum()
    node, tables, ends = torch.autograd.grad(total, (f, g, w), materialize_grads=True)
    if spread:
        tables, ends = tables - tables.square(), ends - ends.square()
    length = ends.sum(2)
    tables = tables if by_position else tables.sum(2, keepdim=True)
    return Expectations(log_z.detach(), node, tables, length, ends if by_end else ends[:, :, :0])


def _in_loops(f: Tensor, w: Tensor) -> bool:
    """True if compiled loops are possible and pay off. Decided by shapes alone."""
    work = f.numel() * (f.shape[-1] + w.shape[-1])
    return (
        f.device.type == "cpu" and work >= max(1, chain_messages.WORTH_COMPILING) and _loops() is not None
    )


_loops = if_numba("structgp.structures.segments.compiled_ages")
