"""log Z of a chain and its gradients: which recursion carries the numbers.

One recursion, several ways:

* probability space, rescaled at each step: a step is one matrix product. Exact to rounding
  as long as no number under- or overflows, which the spread of the potentials bounds:
  a forward message at t spans at most exp(range f_t + range g). Compiled loops (``Compiled``) where numba
  is there, the numbers are on the CPU and there is enough to do; otherwise torch operations (``Scaled``).
* the same in one kernel for each pass on a GPU (``fused``), which looks after the spread itself.
* log space (``Logs``): slower, and right for any potentials, infinite ones included.

None builds a graph of T steps: the gradient of log Z is the marginals, so the backward pass IS
forward-backward.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from structgp.structures.linear_chain import fused
from structgp.structures.linear_chain.recursions import Logs, Scaled
from structgp.structures.masks import steps_to_anywhere

# Largest log-ratio between numbers of one message that probability space is trusted with: about two
# thirds of what the type can span, so that a product of two messages does not underflow either.
SAFE_SPREAD = {torch.float64: 450.0, torch.float32: 55.0}

# S B T V^2 from which compiled loops are used. Decided by shapes alone, so that what ran before changes
# nothing; tiny problems never wait for numba to start.
WORTH_COMPILING = 50_000


class Messages(Protocol):
    """What the forward pass leaves."""

    def log_partition(self) -> Tensor: ...  # (S, B)

    def gradients(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Of log Z times weight (S, B): in f (S, B, T, V), and in g: (S, V, V), summed over sequences and
        positions, for a shared table, else (S, B, T-1, V, V)."""
        ...

    def node_marginals(self) -> Tensor: ...  # (S, B, T, V)

    def walk(self) -> tuple[Tensor, Tensor]:
        """The posterior as a Markov chain: node marginals (S, B, T, V), and transition matrices
        (S, B, T-1, V, V) from each position to the next; both 0 at padding."""
        ...

    def next_variances(self) -> tuple[Tensor, Tensor]:
        """Node marginals (S, B, T, V), and p (1 - p) of each label with the next one: (S, B, V, V),
        summed over positions, for a shared table, else (S, B, T-1, V, V)."""
        ...


def log_partition(f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    """(S, B) log Z of f (S, B, T, V) and g (S, V, V) or (S, B, T-1, V, V), differentiable once in
    both."""
    return _LogPartition.apply(f, g, mask)


class _LogPartition(torch.autograd.Function):
    """All that ``backward`` asks of what the forward pass leaves is ``gradients``."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(f, g)
        if fused.supports(f, g, mask):
            log_z, ctx.messages = fused.forward(f, g, mask)
            return log_z
        ctx.messages = pass_messages(f, g, mask)
        return ctx.messages.log_partition()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        _ = ctx.saved_tensors  # raises if they were changed in place: messages may be passed again
        return *ctx.messages.gradients(grad), None


def node_marginals(f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    """(S, B, T, V) probabilities of labels, 0 at padding."""
    if fused.supports(f, g, mask):
        return fused.node_marginals(f, g, mask)
    return pass_messages(f, g, mask).node_marginals()


def pass_messages(f: Tensor, g: Tensor, mask: Tensor) -> Messages:
    """The forward pass over f (S, B, T, V) and g (S, V, V) or (S, B, T-1, V, V)."""
    quick = _in_compiled_loops(f, g, mask)
    if quick is not None and quick.spread <= SAFE_SPREAD[f.dtype]:
        return quick
    # Whatever stands at padding, infinite or nan, has no part in any of it.
    f = f.masked_fill(~mask[..., None], 0)
    if g.dim() > 3:
        g = g.masked_fill(~(mask[:, 1:] & mask[:, :-1])[..., None, None], 0)
    spread = _widest(f, (-1,)) + _widest(g, (-1, -2))
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


class _Narrowed:
    """Messages in double precision whose answers are wanted in single: where the potentials are too wide
    for single precision and not for double, that is quicker than log space."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    def __getattr__(self, name: str) -> Any:
        def ask(*given: Tensor) -> Any:
            found = getattr(self._messages, name)(*(x.double() for x in given))
            return found.float() if isinstance(found, Tensor) else tuple(x.float() for x in found)

        return ask


def _widest(x: Tensor, dims: tuple[int, ...], lowest: Tensor | None = None) -> Tensor:
    """() largest difference between entries of x within ``dims``, with minima taken of ``lowest`` if
    given; inf where all entries are -inf."""
    if not x.numel():
        return x.new_zeros(())
    top = x.amax(dims)
    width = top - (x if lowest is None else lowest).amin(dims)
    return width.masked_fill(top == -torch.inf, torch.inf).amax()


def _in_compiled_loops(f: Tensor, g: Tensor, mask: Tensor) -> Any:
    if f.device.type != "cpu" or f.dtype not in SAFE_SPREAD or g.dtype != f.dtype:
        return None
    if f.numel() * f.shape[-1] < max(1, WORTH_COMPILING):
        return None
    loops = compiled_loops()
    return None if loops is None else loops(f, g, mask)


@cache
def compiled_loops() -> Any:
    """The class ``Compiled``; None where numba is not installed, or cannot work with what is."""
    try:
        from structgp.structures.linear_chain.compiled import Compiled
    except (ImportError, OSError, RuntimeError, SystemError):
        return None
    return Compiled


def restricted_spread(f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    """() largest log-ratio between numbers of one message where some scores are -inf, but not all of a
    position: an upper bound.

    A label that not every label can precede is reached on a detour, and each step of it may cost the
    spread of the scores that are left. Bans in the middle of a sequence may make it as long as the
    sequence; with a table per position, what any of them forbids counts as forbidden.
    """
    spread = f.new_zeros(())
    for x, dims in ((f, (-1,)), (g, (-1, -2))):
        spread = spread + _widest(x, dims, x.masked_fill(x == -torch.inf, torch.inf))
    banned = (g == -torch.inf).flatten(0, -3).any(0)
    if not bool(banned.any()):
        return spread  # from any label to any in one step
    inner = mask.clone()
    inner[:, 0] = False
    inner[:, :-1] &= mask[:, 1:]
    inner[:, -1] = False
    within = (f == -torch.inf).any(-1).any(0) & inner
    detour = f.shape[2] if bool(within.any()) else steps_to_anywhere(~banned)
    return spread * (f.shape[2] if detour is None else min(detour, f.shape[2]))
