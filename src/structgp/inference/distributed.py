"""Processes that fit together: each has some of the sequences, and what they find is added up.

Every process holds the whole posterior and takes the same steps, because all of them see the same sums. So
there is no master process, and a fit exchanges nothing but sums."""

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
"""Longest time that a process waits for the others: one may encode a large corpus while they wait. torchrun
notices sooner than this if one of them dies."""


@dataclass(frozen=True)
class Processes:
    """rank : number of this process among ``size`` processes."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Any]) -> Sequence[Any]:
        """The items of this process: every ``size``-th, so that neighbours, which are similar in length, go
        to different processes."""
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
        """The contiguous part of n things that belongs to one process, by default this one. Parts differ in
        length by at most one."""
        rank = self.rank if rank is None else rank
        return range(n * rank // self.size, n * (rank + 1) // self.size)

    def add_up(self, tensor: Tensor) -> None:
        """Sums a tensor over processes in place, without a copy of it."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def wait(self) -> None:
        """Waits until all processes have come here."""
        if self.size > 1:
            dist.barrier()

    def any(self, flag: bool) -> bool:
        """True if ``flag`` is true in any process."""
        return bool(self.sum(torch.tensor([float(flag)]))[0])

    def gather(self, item: Any) -> list[Any]:
        """The items of all processes, in order, in the first process; an empty list in the others."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.gather_object(item, items if self.is_first else None)
        return items if self.is_first else []


ALONE = Processes()


def n_started() -> int:
    """Number of processes that ``torchrun`` has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def joined(device: str = "cpu") -> Iterator[Processes]:
    """The processes that ``torchrun`` has started, or this one alone. An existing process group is used as
    it is."""
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
    outlives the processes that it restarts, and still holds the addresses of dead ones, so each start uses
    a prefix of its own in the store. With several machines, each of them counts starts by itself, and
    torchrun itself has to be told (docs/cluster.md)."""
    if os.environ.get("GROUP_WORLD_SIZE") != "1" or "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return {}
    store, rank, size = next(dist.rendezvous("env://", timeout=LONGEST_WAIT))
    own = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    return {"store": own, "rank": rank, "world_size": size}


def local_device(device: str) -> str:
    """The device of this process: where torchrun numbers the processes of a machine, 'cuda' is the GPU with
    the process's number."""
    number = os.environ.get("LOCAL_RANK")
    return f"cuda:{number}" if device == "cuda" and number is not None else device
