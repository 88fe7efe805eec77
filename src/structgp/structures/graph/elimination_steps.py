"""Elimination level by level, as torch operations: any semiring, any device, and any scores.

In each step, scores and messages are gathered and added up to tables, whose row sums are the next messages.
Nothing here waits for the device. The backward pass builds each table again instead of keeping it.

Letters: S draws, B examples, L scores of an example, R rows and n labels of a step. Draws come last, so
that numbers are gathered in runs of S. Messages are (M, S) elements of the semiring; with KMax (k, M,
S)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from structgp.structures.graph.elimination_levels import Step, steps_of
from structgp.structures.graph.elimination_schedule import Schedule
from structgp.structures.semirings import LOG, KMax, Semiring

NUMBERS_AT_ONCE = 1 << 25
"""Largest count of numbers, over all draws, that a step may gather; beyond it, a step takes some draws at a
time. It needs memory for up to four times as many, 1 GiB."""


def total_by_steps(scores: Tensor, schedule: Schedule, semiring: Semiring) -> Tensor:
    """(S, B) elements of the semiring: the sum over labellings, from scores (S, B, L)."""
    k = semiring.k if isinstance(semiring, KMax) else 1
    at_once = max(1, NUMBERS_AT_ONCE // (k * k * steps_of(schedule, scores.device).largest))
    parts = [_Total.apply(x, schedule, semiring) for x in scores.split(at_once)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, schedule: Schedule, semiring: Semiring) -> Tensor:
        ctx.steps, ctx.semiring, ctx.shape = steps_of(schedule, scores.device), semiring, scores.shape
        x = scores.flatten(1).T.contiguous()
        total = semiring.lift(x.new_zeros((scores.shape[1], len(scores))))
        messages = x.new_empty((*total.shape[:-2], schedule.n_messages, len(scores)))
        for step in ctx.steps.steps:
            found = _table(step, *_gathered(step, x, messages), semiring)
            messages[..., step.out, :] = _row_sums(found, semiring)
        ctx.save_for_backward(x, messages)
        total[..., ctx.steps.example, :] = messages[..., ctx.steps.total, :]
        return total.mT.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, messages = ctx.saved_tensors
        slope, message_slope = torch.zeros_like(x), torch.zeros_like(messages)
        if ctx.semiring is LOG:  # an impossible example has gradient 0, whatever comes from above
            grad = grad.masked_fill(~grad.isfinite(), 0)
        message_slope[..., ctx.steps.total, :] = grad.mT[..., ctx.steps.example, :]
        back = _log_back if ctx.semiring is LOG else _any_back
        for step in reversed(ctx.steps.steps):
            sums, above = messages[..., step.out, :], message_slope[..., step.out, :]
            found = back(step, _gathered(step, x, messages), sums, above, ctx.semiring)
            for rows, to, part in zip(
                (step.node, step.more, step.message), (slope, slope, message_slope), found, strict=True
            ):
                if len(rows):
                    to.index_add_(-2, rows.numbers().flatten(), part.flatten(-3, -2))
        S, B, L = ctx.shape
        return slope.view(B, L, S).permute(2, 0, 1).contiguous(), None, None


def _gathered(step: Step, x: Tensor, messages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(Q, n, S) rows of numbers: those of nodes, of other scores and of messages."""
    return x[step.node.numbers()], x[step.more.numbers()], messages[..., step.message.numbers(), :]


def _table(step: Step, node: Tensor, more: Tensor, message: Tensor, semiring: Semiring) -> Tensor:
    """(R, n, S) elements: the gathered numbers, added up."""
    scores = node.index_add(0, step.more.to, more) if len(more) else node
    if not isinstance(semiring, KMax):
        return scores.index_add(0, step.message.to, message) if len(message) else scores
    found = semiring.lift(scores)
    pieces = zip(message.split(step.slots, 1), step.message.to.split(step.slots), strict=True)
    for slot, (part, to) in enumerate(pieces if step.slots else ()):
        both = scores[to] + part if slot == 0 else _times(found[:, to], part, semiring)
        found = found.index_copy(1, to, both)
    return found


def _times(x: Tensor, y: Tensor, semiring: Semiring) -> Tensor:
    """The product of two lists of the k largest: the k largest of all sums of one element from each."""
    return semiring.sum(x[..., None] + y.movedim(0, -1), -1)


def _row_sums(table: Tensor, semiring: Semiring) -> Tensor:
    return table.logsumexp(-2) if semiring is LOG else semiring.sum(table, -2)


def _log_back(
    step: Step, given: tuple[Tensor, Tensor, Tensor], sums: Tensor, above: Tensor, semiring: Semiring
) -> tuple[Tensor, ...]:
    """Gradients in the gathered numbers: those in the sums, distributed by probability."""
    sums = sums.masked_fill(sums == -torch.inf, 0)  # exp(-inf) is 0 then, not nan
    slope = above[:, None] * (_table(step, *given, semiring) - sums[:, None]).exp()
    return slope, slope[step.more.to], slope[step.message.to]


def _any_back(
    step: Step, given: tuple[Tensor, Tensor, Tensor], sums: Tensor, above: Tensor, semiring: Semiring
) -> tuple[Tensor, ...]:
    """The same by autograd."""
    node, more, message = (x.detach().requires_grad_() for x in given)
    with torch.enable_grad():
        sums = _row_sums(_table(step, node, more, message, semiring), semiring)
    return torch.autograd.grad(sums, (node, more, message), above, allow_unused=True)
