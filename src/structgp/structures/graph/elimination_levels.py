"""The schedule of elimination as index tensors, level by level, for torch operations on any device.

All tables of a level with rows of the same number n of labels form one step, their R rows one after the
other. Summands are indexed by rows, so that index tensors have one number for n table entries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from structgp.structures.graph.elimination_schedule import Schedule

ENTRIES_AT_ONCE = 1 << 20
"""Largest number of table entries of one draw that are summed in one step, unless a single table has more:
8 MiB, and enough to keep a GPU busy."""


@dataclass(frozen=True)
class Rows:
    """Q rows of n numbers, at places ``begin + label * stride`` of a vector. begin, stride : (Q,).
    to : (Q,) the row of the step to which each is added. labels : (n,)."""

    begin: Tensor
    stride: Tensor
    to: Tensor
    labels: Tensor

    def numbers(self) -> Tensor:
        """(Q, n) places in the vector."""
        return self.begin[:, None] + self.stride[:, None] * self.labels

    def __len__(self) -> int:
        return len(self.begin)


@dataclass(frozen=True)
class Step:
    """node : scores of the eliminated variable for each of the R rows. more : further scores.
    message : messages of earlier steps. slots : how many rows of ``message`` belong to the first message of
    their table, to the second, ...; they come in that order. out : where the sums go among the messages."""

    node: Rows
    more: Rows
    message: Rows
    slots: tuple[int, ...]
    out: slice


@dataclass(frozen=True)
class Steps:
    """total : for each example with variables, the message that is its total; example : the number of that
    example. largest : how many numbers one draw gathers in the largest step."""

    steps: tuple[Step, ...]
    total: Tensor
    example: Tensor
    largest: int

    @property
    def n_bytes(self) -> int:
        return 24 * sum(len(rows) for x in self.steps for rows in (x.node, x.more, x.message))


def steps_of(schedule: Schedule, device: torch.device) -> Steps:
    """The steps on this device, which are kept with the schedule."""
    if device not in schedule.on_device:
        schedule.on_device[device] = _steps(schedule, device)
    return schedule.on_device[device]


def _steps(s: Schedule, device: torch.device) -> Steps:
    turn = np.lexsort((s.n_labels, s.level))
    n_rows, entries = s.n_rows[turn], (s.n_rows * s.n_labels)[turn]
    kinds = np.stack([s.level[turn], s.n_labels[turn], np.cumsum(entries) // ENTRIES_AT_ONCE], 1)
    cuts = (kinds[1:] != kinds[:-1]).any(1).nonzero()[0] + 1
    message = np.empty(len(turn), np.int64)  # where the message of each clique begins
    message[turn] = np.cumsum(n_rows) - n_rows
    labels = [torch.arange(n, device=device) for n in range(int(s.n_labels.max(initial=0)) + 1)]
    steps = [_step(s, cliques, message, labels) for cliques in np.split(turn, cuts) if len(cliques)]
    last = s.first_clique[1:][np.diff(s.first_clique) > 0] - 1
    gathered = (len(x.node.labels) * (len(x.node) + len(x.more) + len(x.message)) for x in steps)
    return Steps(
        tuple(steps),
        torch.from_numpy(message[last]).to(device),
        torch.from_numpy(s.example[last]).to(device),
        max(gathered, default=1),
    )


def _step(s: Schedule, cliques: np.ndarray, message: np.ndarray, labels: list[Tensor]) -> Step:
    n_rows, here = s.n_rows[cliques], labels[int(s.n_labels[cliques[0]])]
    first_row = np.cumsum(n_rows) - n_rows
    local, part = _runs(s.part[cliques], s.part[cliques + 1] - s.part[cliques])
    is_message = s.parts.is_message[part]
    is_node = part == s.part[cliques][local]
    # For each part, how many messages of its clique come before it.
    slot = np.cumsum(is_message) - is_message
    slot -= slot[is_node][local]
    base = s.parts.base[part] + s.example[cliques][local] * s.length
    base[is_message] = message[s.parts.source[part[is_message]]]

    def rows(which: np.ndarray) -> Rows:
        p, c = part[which], local[which]
        i, row = _runs(np.zeros(len(p), np.int64), n_rows[c])
        mapped = s.row_maps[s.parts.row_map[p][i] + np.where(s.parts.is_own[p][i], 0, row)]
        found = base[which][i] + mapped, s.parts.stride[p][i], first_row[c][i] + row
        begin, stride, to = (torch.from_numpy(x).to(here.device) for x in found)
        return Rows(begin, stride, to, here)

    sent = is_message.nonzero()[0]
    sent = sent[np.argsort(slot[sent], kind="stable")]
    slots = np.bincount(slot[sent], n_rows[local[sent]]).astype(int)
    begin = int(message[cliques[0]])
    return Step(
        rows(is_node.nonzero()[0]),
        rows((~is_node & ~is_message).nonzero()[0]),
        rows(sent),
        tuple(slots.tolist()),
        slice(begin, begin + int(n_rows.sum())),
    )


def _runs(begin: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For i = 0, 1, ...: i repeated ``length[i]`` times, and as many numbers from ``begin[i]`` on."""
    i = np.repeat(np.arange(len(length)), length)
    return i, np.arange(len(i)) - (np.cumsum(length) - length - begin)[i]
