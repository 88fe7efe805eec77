"""Elimination level by level, as torch operations: any semiring, any device, and any scores.

All tables of a level with the same number of labels are one step: scores and messages are gathered and added
up, and the sums of the rows are the next messages. Nothing of it waits for the device. The backward pass
builds each table again rather than keep it.

Letters: S draws, L scores of an example, R rows and n labels of a step. Draws come last, so that what is
gathered are runs of S numbers. Messages are (M, S) elements of the semiring; with KMax (k, M, S).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from structgp.structures.graph.elimination_schedule import Schedule
from structgp.structures.semirings import LOG, KMax, Semiring

ENTRIES_AT_ONCE = 1 << 20
"""Table entries of one draw that are summed in one step, unless a single table has more: 8 MiB, and enough
to keep a GPU busy."""

NUMBERS_AT_ONCE = 1 << 25
"""Table entries of all draws in one step: beyond it, some draws at a time. A step needs memory for about
four times as many numbers, 1 GiB."""


@dataclass(frozen=True)
class Step:
    """Tables of one level and label count, one after the other: R rows of n labels.

    node : (R n,) for each entry its number among the scores. more, more_to : further scores, and the entries
    they are added to. message, message_to : the same of messages. slots : how many of those are the first,
    second, ... message of their clique, in that order. rows : begin and end among the messages of the sums.
    """

    n_labels: int
    node: Tensor
    more: Tensor
    more_to: Tensor
    message: Tensor
    message_to: Tensor
    slots: tuple[int, ...]
    rows: slice


@dataclass(frozen=True)
class Steps:
    """total : the message that is the total of each example with variables; example : which one. largest :
    table entries of the largest step."""

    steps: tuple[Step, ...]
    total: Tensor
    example: Tensor
    largest: int


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
        one = semiring.lift(x.new_zeros((1, len(scores))))
        messages = x.new_empty((*one.shape[:-2], schedule.n_messages, len(scores)))
        for step in ctx.steps.steps:
            found = table(step, x[step.node], x[step.more], messages[..., step.message, :], semiring)
            messages[..., step.rows, :] = _row_sums(step, found, semiring)
        ctx.save_for_backward(x, messages)
        total = semiring.lift(x.new_zeros((scores.shape[1], len(scores))))
        total[..., ctx.steps.example, :] = messages[..., ctx.steps.total, :]
        return total.mT.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, messages = ctx.saved_tensors
        slope, message_slope = torch.zeros_like(x), torch.zeros_like(messages)
        if ctx.semiring is LOG:  # nothing depends on scores where no labelling is possible
            grad = grad.masked_fill(grad.isnan(), 0)
        message_slope[..., ctx.steps.total, :] = grad.mT[..., ctx.steps.example, :]
        for step in reversed(ctx.steps.steps):
            given = x[step.node], x[step.more], messages[..., step.message, :]
            above = message_slope[..., step.rows, :]
            back = _log_back if ctx.semiring is LOG else _any_back
            node, more, message = back(step, given, messages[..., step.rows, :], above, ctx.semiring)
            slope.index_add_(0, step.node, node)
            slope.index_add_(0, step.more, more)
            message_slope.index_add_(-2, step.message, message)
        S, B, L = ctx.shape
        return slope.view(B, L, S).permute(2, 0, 1).contiguous(), None, None


def table(step: Step, node: Tensor, more: Tensor, message: Tensor, semiring: Semiring) -> Tensor:
    """(R n, S) elements: what is gathered, added up."""
    scores = node.index_add(0, step.more_to, more) if len(more) else node
    if not isinstance(semiring, KMax):
        return scores.index_add(0, step.message_to, message) if len(message) else scores
    found = semiring.lift(scores)
    for slot, (part, to) in enumerate(
        zip(message.split(step.slots, -2), step.message_to.split(step.slots), strict=True)
    ):
        both = scores[to] + part if slot == 0 else _times(found[:, to], part, semiring)
        found = found.index_copy(1, to, both)
    return found


def _times(x: Tensor, y: Tensor, semiring: Semiring) -> Tensor:
    """The product of lists of the k largest: the k largest of all sums of one of each."""
    return semiring.sum(x[..., None] + y.movedim(0, -1), -1)


def _row_sums(step: Step, found: Tensor, semiring: Semiring) -> Tensor:
    rows = found.unflatten(-2, (-1, step.n_labels))
    return rows.logsumexp(-2) if semiring is LOG else semiring.sum(rows, -2)


def _log_back(
    step: Step, given: tuple[Tensor, ...], sums: Tensor, above: Tensor, semiring: Semiring
) -> tuple[Tensor, ...]:
    """Slopes in what was gathered: those of the sums, shared out by probability."""
    rows = table(step, *given, semiring).unflatten(0, (-1, step.n_labels))
    sums = sums.masked_fill(sums == -torch.inf, 0)  # exp(-inf) is 0 then, not nan
    slope = (above[:, None] * (rows - sums[:, None]).exp()).flatten(0, 1)
    return slope, slope[step.more_to], slope[step.message_to]


def _any_back(
    step: Step, given: tuple[Tensor, ...], _: Tensor, above: Tensor, semiring: Semiring
) -> tuple[Tensor, ...]:
    """The same by autograd."""
    leaves = [x.detach().requires_grad_() for x in given]
    with torch.enable_grad():
        sums = _row_sums(step, table(step, *leaves, semiring), semiring)
    found = torch.autograd.grad(sums, leaves, above, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(given, found, strict=True))


@lru_cache(maxsize=64)
def steps_of(schedule: Schedule, device: torch.device) -> Steps:
    """Cliques level by level and by label count; kept with their index tensors on the device."""
    s = schedule
    turn = np.lexsort((s.n_labels, s.level))
    n_rows, entries = s.n_rows[turn], (s.n_rows * s.n_labels)[turn]
    kinds = np.stack([s.level[turn], s.n_labels[turn], np.cumsum(entries) // ENTRIES_AT_ONCE], 1)
    cuts = (kinds[1:] != kinds[:-1]).any(1).nonzero()[0] + 1
    message = np.empty(len(turn), np.int64)  # where the message of each clique begins
    message[turn] = np.cumsum(n_rows) - n_rows
    steps = [_step(s, cliques, message, device) for cliques in np.split(turn, cuts) if len(cliques)]
    last = s.first_clique[1:][np.diff(s.first_clique) > 0] - 1
    return Steps(
        tuple(steps),
        torch.from_numpy(message[last]).to(device),
        torch.from_numpy(s.example[last]).to(device),
        max((len(step.node) + len(step.more) + len(step.message) for step in steps), default=1),
    )


def _step(s: Schedule, cliques: np.ndarray, message: np.ndarray, device: torch.device) -> Step:
    n_labels, n_rows = int(s.n_labels[cliques[0]]), s.n_rows[cliques]
    first_row = np.cumsum(n_rows) - n_rows
    local, part = _runs(s.part[cliques], s.part[cliques + 1] - s.part[cliques])
    is_message = s.parts.is_message[part]
    is_node = part == s.part[cliques][local]
    # Which of the messages of its clique each is.
    slot = np.cumsum(is_message) - is_message
    slot -= slot[is_node][local]
    base = s.parts.base[part] + s.example[cliques][local] * s.length
    base[is_message] = message[s.parts.source[part[is_message]]]

    def spread(which: np.ndarray) -> tuple[Tensor, Tensor]:
        """Of some parts the number, among scores or messages, of each of their entries; and those entries."""
        p, c = part[which], local[which]
        i, row = _runs(np.zeros(len(p), np.int64), n_rows[c])  # for each row of each part
        begin = base[which][i] + s.row_maps[s.parts.row_map[p][i] + np.where(s.parts.is_own[p][i], 0, row)]
        number = begin[:, None] + s.parts.stride[p][i][:, None] * np.arange(n_labels)
        entry = (first_row[c][i] + row)[:, None] * n_labels + np.arange(n_labels)
        return tuple(torch.from_numpy(x.reshape(-1)).to(device) for x in (number, entry))  # type: ignore[return-value]

    sent = is_message.nonzero()[0]
    sent = sent[np.argsort(slot[sent], kind="stable")]
    slots = np.bincount(slot[sent], n_rows[local[sent]]).astype(int) * n_labels
    begin = int(message[cliques[0]])
    return Step(
        n_labels,
        spread(is_node.nonzero()[0])[0],
        *spread((~is_node & ~is_message).nonzero()[0]),
        *spread(sent),
        tuple(slots.tolist()),
        slice(begin, begin + int(n_rows.sum())),
    )


def _runs(begin: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For i = 0, 1, ... the numbers from ``begin[i]`` on, ``length[i]`` of them; and i beside each."""
    i = np.repeat(np.arange(len(length)), length)
    return i, np.arange(len(i)) - (np.cumsum(length) - length - begin)[i]
