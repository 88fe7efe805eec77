"""Processes that fit together: each has some of the sequences, and what they find is added up.

Every process holds the whole posterior and takes the same steps, because all of them see the same sums. So
there is no master, and a sum is all that goes between them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from structgp.errors import InputError

LONGEST_WAIT = timedelta(days=1)
"""For the others: one process may encode a large corpus while they wait. torchrun notices sooner than this
if one of them dies."""


@dataclass(frozen=True)
class Processes:
    """rank : which of ``size`` processes this one is."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Any]) -> Sequence[Any]:
        """The items of this process: every ``size``-th, so that neighbours in order of length are dealt
        out."""
        return items[self.rank :: self.size]

    def sum(self, *tensors: Tensor) -> list[Tensor]:
        """Each tensor summed over processes, the same in all of them to the last bit. One message."""
        if self.size == 1:
            return list(tensors)
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.all_reduce(flat)
        parts = flat.split([t.numel() for t in tensors])
        return [part.view_as(t) for part, t in zip(parts, tensors, strict=True)]

    def range(self, n: int, rank: int | None = None) -> range:
        """The part of n things in a row that belongs to one process, by default this one: neighbours, as
        many as others have, or one more."""
        rank = self.rank if rank is None else rank
        return range(n * rank // self.size, n * (rank + 1) // self.size)

    def add_up(self, tensor: Tensor) -> None:
        """Sums a tensor over processes in place, without a copy of it."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def wait(self) -> None:
        """Until all processes have come here."""
        if self.size > 1:
            dist.barrier()

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true in any process."""
        return bool(self.sum(torch.tensor([float(flag)]))[0])

    def gather(self, item: Any) -> list[Any]:
        """The items of all processes, in order, to the first one; nothing to the others."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.gather_object(item, items if self.is_first else None)
        return items if self.is_first else []


ALONE = Processes()


def n_started() -> int:
    """Processes that ``torchrun`` has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def joined(device: str = "cpu") -> Iterator[Processes]:
    """The processes that ``torchrun`` has started, or this one alone. A process group that is there already
    is taken as it is."""
    if dist.is_available() and dist.is_initialized():
        yield Processes(dist.get_rank(), dist.get_world_size())
        return
    if n_started() == 1:
        yield ALONE
        return
    if "MASTER_ADDR" not in os.environ:
        raise InputError("WORLD_SIZE", "is set, but not MASTER_ADDR", "start it with torchrun")
    # Sums on the GPU go over nccl; objects and sums on the CPU over gloo.
    kind = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
    dist.init_process_group(kind, timeout=LONGEST_WAIT, **_meeting_point())
    try:
        yield Processes(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _meeting_point() -> dict[str, Any]:
    """Where the processes find each other, as arguments of ``init_process_group``. The store of torchrun
    outlives the processes that it starts again, and still holds the addresses of dead ones, so each start
    has names of its own in it. On several machines starts are counted by each of them, and torchrun itself
    has to be told (docs/cluster.md)."""
    if os.environ.get("GROUP_WORLD_SIZE") != "1" or "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return {}
    store, rank, size = next(dist.rendezvous("env://", timeout=LONGEST_WAIT))
    own = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    return {"store": own, "rank": rank, "world_size": size}


def local_device(device: str) -> str:
    """The GPU of this process, where a machine has several: 'cuda' is one per process."""
    number = os.environ.get("LOCAL_RANK")
    return f"cuda:{number}" if device == "cuda" and number is not None else device
