"""Forward-backward over a chain: log Z, its gradients, and the posterior as a Markov chain.

One recursion, with several representations of its numbers:

* probability space, rescaled at each step: a step is one matrix product. Exact to rounding as long as no
  number under- or overflows, which the spread of the potentials bounds: a forward message at t spans at
  most exp(range f_t + range g). Compiled loops (``Compiled``) where numba is installed, the tensors are on
  the CPU and there is enough to do; otherwise torch operations (``Scaled``).
* the same in one kernel for each pass on a GPU (``fused``), which handles wide spreads itself.
* log space (``Logs``): slower, but correct for any potentials, infinite ones included.

None of them builds an autograd graph of T steps: the gradient of log Z is the marginals, so the backward
pass IS forward-backward. Transition scores g are one table, (S, V, V), or one per position,
(S, B, T-1, V, V).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from structgp.structures.linear_chain import fused
from structgp.structures.masks import steps_to_anywhere
from structgp.threads import if_numba

# Largest log-ratio between numbers of one message that probability space is trusted with: about two
# thirds of what the type can span, so that a product of two messages does not underflow either.
SAFE_SPREAD = {torch.float64: 450.0, torch.float32: 55.0}

# Smallest S B T V^2 for which compiled loops are used. Decided by shapes alone, so that it does not depend
# on what ran before; tiny problems never wait for numba to start.
WORTH_COMPILING = 50_000


class Messages(Protocol):
    """The results of the forward pass, and what follows from them.

    log_z : (S, B). gradients : those of log Z times weight (S, B), in f (S, B, T, V), and in g: (S, V, V),
    summed over sequences and positions, for a shared table, else (S, B, T-1, V, V). node_marginals :
    (S, B, T, V). walk : the posterior as a Markov chain, node marginals and transition matrices
    (S, B, T-1, V, V) from each position to the next; all 0 at padding. next_variances : node marginals, and
    p (1 - p) of each label with the next one: (S, B, V, V), summed over positions, for a shared table, else
    (S, B, T-1, V, V)."""

    log_z: Tensor

    def gradients(self, weight: Tensor) -> tuple[Tensor, Tensor]: ...
    def node_marginals(self) -> Tensor: ...
    def walk(self) -> tuple[Tensor, Tensor]: ...
    def next_variances(self) -> tuple[Tensor, Tensor]: ...


class _LogPartition(torch.autograd.Function):
    """log Z, with ``Messages.gradients`` of the forward pass as its gradient."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(f, g)
        if is_fused(f, g, mask):
            log_z, ctx.messages = fused.forward(f, g, mask)
            return log_z
        ctx.messages = pass_messages(f, g, mask)
        # A copy: an output that is held by the context of its own function would keep itself alive.
        return ctx.messages.log_z.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        _ = ctx.saved_tensors  # raises if they were changed in place: messages may be passed again
        return *ctx.messages.gradients(grad), None


log_partition: Callable[[Tensor, Tensor, Tensor], Tensor] = _LogPartition.apply
"""(S, B) log Z of f (S, B, T, V), g and mask, differentiable once in f and g."""


def is_fused(f: Tensor, g: Tensor, mask: Tensor) -> bool:
    """True if the kernels of ``fused`` are used for these scores."""
    return (f.is_cuda or "TRITON_INTERPRET" in os.environ) and fused.supports(f, g, mask)


def node_marginals(f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    """(S, B, T, V) probabilities of labels, 0 at padding."""
    if is_fused(f, g, mask):
        return fused.node_marginals(f, g, mask)
    return pass_messages(f, g, mask).node_marginals()


def next_variances(f: Tensor, g: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """``Messages.next_variances``."""
    if is_fused(f, g, mask):
        return fused.next_variances(f.detach(), g.detach(), mask)
    return pass_messages(f, g, mask).next_variances()


def pass_messages(f: Tensor, g: Tensor, mask: Tensor) -> Messages:
    """The forward pass over f (S, B, T, V) and g, without a gradient."""
    f, g, quick = f.detach(), g.detach(), None
    enough = f.numel() * f.shape[-1] >= max(1, WORTH_COMPILING) and f.device.type == "cpu"
    if enough and f.dtype in SAFE_SPREAD and g.dtype == f.dtype and compiled_loops() is not None:
        quick = compiled_loops()(f, g, mask)
        spread = quick.spread
        if spread == torch.inf:  # not nan: every position has a label
            spread = quick.finite_spread * detour(g, quick.is_barred, f.shape[2])
        if spread <= SAFE_SPREAD[torch.float64] and not (quick.spread == torch.inf and quick.ends_nowhere):
            return quick
    # Whatever stands at padding, infinite or nan, must have no effect.
    f = f.masked_fill(~mask[..., None], 0)
    if g.dim() > 3:
        g = g.masked_fill(~mask[:, 1:, None, None], 0)
    spread = widest(f, (-1,)) + widest(g, (-1, -2))
    restricted = bool(spread == torch.inf)
    if restricted:
        spread = restricted_spread(f, g, mask)
    # `not <=` so that inf - inf = nan takes the careful path as well.
    if not bool(spread <= SAFE_SPREAD[f.dtype]):
        if f.dtype == torch.float32 and bool(spread <= SAFE_SPREAD[torch.float64]):
            return cast(Messages, _Narrowed(pass_messages(f.double(), g.double(), mask)))
        return Logs(f, g, mask)
    scaled = Scaled(f, g, mask, restricted) if quick is None else quick
    return Logs(f, g, mask) if restricted and scaled.ends_nowhere else scaled


def likely_spans(
    f: Tensor,
    g: Tensor,
    mask: Tensor,
    share: Tensor,
    inside: Tensor,
    parts: Tensor,
    edges: tuple[Tensor, Tensor],
    least: float,
) -> list[list[tuple[int, int, int, float]]] | None:
    """``compiled_spans.search_spans``; None where that is not possible, or would not pay off."""
    enough = f.numel() * f.shape[-1] >= max(1, WORTH_COMPILING) and f.device.type == "cpu"
    if not enough or not f.dtype == g.dtype == torch.float64 or compiled_loops() is None:
        return None
    from structgp.structures.linear_chain.compiled_spans import search_spans

    if g.dim() > 3:
        g = g.masked_fill(~mask[:, 1:, None, None], 0)
    at = search_spans(f, g, mask, share, inside, parts, edges, least)
    spread = at.width + widest(g, (-1, -2), g.masked_fill(g == -torch.inf, torch.inf))
    is_safe = bool(spread * detour(g, at.is_barred, f.shape[2]) <= SAFE_SPREAD[f.dtype])
    return at.found if is_safe and at.possible else None


def widest(x: Tensor, dims: tuple[int, ...], lowest: Tensor | None = None) -> Tensor:
    """() largest difference between entries of x within ``dims``, with minima taken from ``lowest`` if
    given; inf where all entries are -inf."""
    if not x.numel():
        return x.new_zeros(())
    top = x.amax(dims)
    width = top - (x if lowest is None else lowest).amin(dims)
    return width.masked_fill(top == -torch.inf, torch.inf).amax()


compiled_loops = if_numba("structgp.structures.linear_chain.compiled", "Compiled")


def restricted_spread(f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    """() upper bound of the log-ratio between numbers of one message where some scores are -inf, but not
    all of a position.

    A label that not every label can precede is reached on a detour, each step of which may cost the spread
    of the finite scores. Labels that are ruled out in the middle of a sequence may make the detour as long
    as the sequence. With a table per position, what any of the tables forbids counts as forbidden.
    """
    spread = f.new_zeros(())
    for x, dims in ((f, (-1,)), (g, (-1, -2))):
        spread = spread + widest(x, dims, x.masked_fill(x == -torch.inf, torch.inf))
    # Padding has no -inf: positions in the middle are those after the first that another one follows.
    within = (f[:, :, 1:-1] == -torch.inf).any(-1).any(0) & mask[:, 2:]
    return spread * detour(g, bool(within.any()), f.shape[2])


def steps_back(g: Tensor) -> float:
    """Number of steps after which every label can follow every label under tables (..., V, V) with -inf at
    what is forbidden; inf where there is none."""
    steps = steps_to_anywhere(~(g == -torch.inf).flatten(0, -3).any(0))
    return torch.inf if steps is None else steps


def detour(g: Tensor, is_barred: bool, T: int) -> int:
    """Number of steps after which every label can follow every label, at most T. is_barred : True if labels
    are ruled out in the middle of a sequence."""
    banned = (g == -torch.inf).flatten(0, -3).any(0)
    if not bool(banned.any()):
        return 1
    steps = T if is_barred else steps_to_anywhere(~banned)
    return T if steps is None else min(steps, T)


class _Narrowed:
    """Messages in double precision that give answers in single precision: where the potentials are too wide
    for single precision but not for double, that is quicker than log space."""

    def __init__(self, messages: Messages) -> None:
        self._messages, self.log_z = messages, messages.log_z.float()

    def __getattr__(self, name: str) -> Any:
        def ask(*given: Tensor) -> Any:
            found = getattr(self._messages, name)(*(x.double() for x in given))
            return found.float() if isinstance(found, Tensor) else tuple(x.float() for x in found)

        return ask


class Scaled:
    """Forward-backward in probability space as torch operations, every forward message scaled to sum to 1.
    ``restricted`` : True if some scores are -inf, so that a message may be empty."""

    def __init__(self, f: Tensor, g: Tensor, mask: Tensor, restricted: bool = False) -> None:
        self.mask, self.shared = mask, g.dim() == 3
        f_max, g_max = f.amax(-1), g.amax((-1, -2))  # (S, B, T), and (S,) or (S, B, T-1)
        # Time first: each step then reads one contiguous (S, B, V) slab.
        self.node = torch.exp(f - f_max[..., None]).permute(2, 0, 1, 3).contiguous()
        self.edge = torch.exp(g - g_max[..., None, None])  # as g
        self.alpha, self.prior = torch.empty_like(self.node), torch.ones_like(self.node)
        self.scale = self.node.new_empty((*self.node.shape[:-1], 1))
        for t in range(len(self.node)):
            # prior: the message that a position gets from the one before
            if t > 0 and self.shared:
                torch.bmm(self.alpha[t - 1], self.edge, out=self.prior[t])
            elif t > 0:
                told = self.alpha[t - 1, ..., None, :] @ self.edge[:, :, t - 1]
                self.prior[t] = told.squeeze(-2)
            alpha = torch.mul(self.prior[t], self.node[t], out=self.alpha[t])
            torch.sum(alpha, -1, keepdim=True, out=self.scale[t])
            if restricted:
                self.scale[t].clamp_(min=torch.finfo(f.dtype).tiny)
            alpha.div_(self.scale[t])
        # Padding comes last, so the recursion may run into it: its terms are left out here.
        terms = self.scale.squeeze(-1).log().permute(1, 2, 0) + f_max
        tables = g_max[:, None, None] if self.shared else g_max
        self.log_z = torch.where(mask, terms, 0).sum(-1) + torch.where(mask[:, 1:], tables, 0).sum(-1)

    @property
    def ends_nowhere(self) -> bool:
        """True if some sequence has no labelling at all."""
        empty = self.scale.squeeze(-1) <= torch.finfo(self.scale.dtype).tiny  # (T, S, B)
        return bool((empty & self.mask.T[:, None]).any())

    def _backward(self) -> tuple[Tensor, Tensor]:
        """Node marginals (S, B, T, V), and (S, B, T, V) node * beta / scale: what a position passes back to
        the one before it."""
        passed = torch.empty_like(self.node)
        here = (self.node / self.scale) * self.mask.T[:, None, :, None]
        for t in reversed(range(len(passed))):
            if t == len(passed) - 1:
                passed[t] = here[t]
                continue
            if self.shared:
                beta = torch.bmm(passed[t + 1], self.edge.mT)
            else:
                beta = (self.edge[:, :, t] @ passed[t + 1, ..., None]).squeeze(-1)
            # The last real position has nothing after it: its beta is 1.
            beta.masked_fill_(~self.mask[:, t + 1, None], 1.0)
            torch.mul(here[t], beta, out=passed[t])
        # alpha * beta = prior * passed, without dividing by a node that may be tiny
        return (self.prior * passed).permute(1, 2, 0, 3), passed.permute(1, 2, 0, 3)

    def node_marginals(self) -> Tensor:
        return self._backward()[0]

    def walk(self) -> tuple[Tensor, Tensor]:
        nodes, passed = self._backward()
        weight = (self.edge[:, None, None] if self.shared else self.edge) * passed[:, :, 1:, None, :]
        total = weight.sum(-1, keepdim=True)
        return nodes, weight / torch.where(total > 0, total, 1)

    def next_variances(self) -> tuple[Tensor, Tensor]:
        nodes, passed = self._backward()
        p = self.alpha[:-1].permute(1, 2, 0, 3)[..., None] * passed[:, :, 1:, None, :]
        p *= self.edge[:, None, None] if self.shared else self.edge
        bend = p - p.square()
        return nodes, bend.sum(2) if self.shared else bend

    def gradients(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        nodes, passed = self._backward()
        before = (self.alpha[:-1] * weight[..., None]).permute(1, 2, 0, 3)
        if self.shared:
            tables = torch.bmm(before.flatten(1, 2).mT, passed[:, :, 1:].flatten(1, 2))
        else:
            tables = before[..., None] * passed[:, :, 1:, None, :]
        return weight[..., None, None] * nodes, self.edge * tables


class Logs:
    """Forward-backward in log space, for any potentials, -inf included."""

    def __init__(self, f: Tensor, g: Tensor, mask: Tensor) -> None:
        self.f, self.mask, self.shared = f, mask, g.dim() == 3
        self.g = g[:, None, None] if self.shared else g  # (S, B or 1, T-1 or 1, V, V)
        self.alpha = torch.empty_like(f)
        alpha = f[:, :, 0]
        for t in range(f.shape[2]):
            if t > 0:
                moved = torch.logsumexp(alpha[..., :, None] + self._table(t), -2) + f[:, :, t]
                alpha = torch.where(mask[:, t, None], moved, alpha)
            self.alpha[:, :, t] = alpha
        self.log_z = torch.where(mask.any(-1), torch.logsumexp(alpha, -1), 0)
        # 0 where nothing is possible, so that all there has probability 0
        self.total = self.log_z.masked_fill(self.log_z == -torch.inf, 0)[..., None, None]

    def _table(self, t: int) -> Tensor:
        """(S, B or 1, V, V) scores of the transitions into t."""
        return self.g[:, :, 0 if self.shared else t - 1]

    def _backward(self) -> tuple[Tensor, Tensor]:
        """Node marginals, and logarithms of the message that each position gets from all that follows,
        (S, B, T, V) each."""
        beta = torch.zeros_like(self.f)
        for t in reversed(range(self.f.shape[2] - 1)):
            ahead = self.f[:, :, t + 1] + beta[:, :, t + 1]
            moved = torch.logsumexp(self._table(t + 1) + ahead[..., None, :], -1)
            beta[:, :, t] = torch.where(self.mask[:, t + 1, None], moved, 0)
        return torch.where(self.mask[..., None], torch.exp(self.alpha + beta - self.total), 0), beta

    def node_marginals(self) -> Tensor:
        return self._backward()[0]

    def rest(self) -> Tensor:
        """(S, B, T, V) logarithms of the message that each position gets from all others, up to a
        constant."""
        before = torch.zeros_like(self.f)
        for t in range(1, self.f.shape[2]):
            before[:, :, t] = torch.logsumexp(self.alpha[:, :, t - 1, :, None] + self._table(t), -2)
        return before + self._backward()[1]

    def walk(self) -> tuple[Tensor, Tensor]:
        nodes, beta = self._backward()
        # A label that nothing can follow is never visited: its row may be anything finite.
        step = torch.softmax(self.g + (self.f + beta)[:, :, 1:, None, :], -1).nan_to_num(0)
        return nodes, torch.where(self.mask[:, 1:, None, None], step, 0)

    def next_variances(self) -> tuple[Tensor, Tensor]:
        node, step = self.walk()
        both = node[:, :, :-1, :, None] * step
        bend = both - both.square()
        return node, bend.sum(2) if self.shared else bend

    def gradients(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        nodes, beta = self._backward()
        tables = torch.zeros_like(self.g)
        for t in range(1, self.f.shape[2]):
            ahead = (self.f + beta)[:, :, t, None, :] + self._table(t)
            p = torch.exp(self.alpha[:, :, t - 1, :, None] + ahead - self.total)
            p = torch.where(self.mask[:, t, None, None], p * weight[..., None, None], 0)
            if self.shared:
                tables[:, 0, 0] += p.sum(1)
            else:
                tables[:, :, t - 1] = p
        return weight[..., None, None] * nodes, tables[:, 0, 0] if self.shared else tables
