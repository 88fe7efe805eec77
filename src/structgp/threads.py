"""Shares out units of work, in loops compiled by numba or in torch, among as many threads as torch uses."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any, TypeVar

import torch

WORTH_A_THREAD = 1_000_000
"""Scalar multiplications per thread below which another thread does not pay."""

Result = TypeVar("Result")

_threads: ContextVar[int | None] = ContextVar("threads", default=None)
"""Number of threads for compiled work while torch itself is limited to one; None at other times."""

_lock = threading.Lock()
_found: list[int] = []
"""Torch's number of threads before it was limited: one entry per block of ``one_torch_thread`` that is open
now, all of them equal. A block that opens in another thread would find 1, and takes the number from
here."""


def _in_child() -> None:
    """Limits a forked child to one torch thread. OpenMP's threads stay behind in the parent, and a child
    that counts on them waits forever."""
    global _lock
    _lock, _found[:] = threading.Lock(), [1] * len(_found)
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Limits torch operations to one thread, while compiled work uses as many as before: waking a second
    thread for arrays of a few thousand numbers takes longer than it saves."""
    with _lock:
        n = _found[0] if _found else torch.get_num_threads()
        _found.append(n)
        torch.set_num_threads(1)
    token = _threads.set(_threads.get() or n)
    try:
        yield
    finally:
        _threads.reset(token)
        with _lock:
            torch.set_num_threads(_found.pop())


def if_numba(module: str, name: str | None = None) -> Callable[[], Any]:
    """A function that returns a module of compiled loops, or what ``name`` is there; None if numba is not
    installed, or does not work with the other packages. The module is imported at the first call."""

    @cache
    def found() -> Any:
        try:
            loops = import_module(module)
        except (ImportError, OSError, RuntimeError, SystemError):
            return None
        return loops if name is None else getattr(loops, name)

    return found


def share(work: Callable[[int, int], Result], units: int, cost: int) -> list[Result]:
    """Calls work(first, last) on ranges of units, so that each unit is done once; returns what the calls
    return. cost : scalar multiplications of all units together."""
    n = max(1, min(_threads.get() or torch.get_num_threads(), units, cost // WORTH_A_THREAD))
    first, *others = pairwise(units * i // n for i in range(n + 1))
    if not others:
        return [work(*first)]
    with ThreadPoolExecutor(len(others)) as pool:
        running = [pool.submit(work, *ends) for ends in others]
        done = work(*first)
    return [done, *(part.result() for part in running)]  # raises the errors of these threads


def share_matrices(
    work: Callable[[int, int], Result], units: int, cost: int, device: torch.device
) -> list[Result]:
    """``share`` for torch operations on several large matrices. Each thread works on matrices of its own:
    on two cores, factors and inverses of some hundred rows take two thirds of the time that they need if
    two threads work on the same matrix. Where there are fewer matrices than threads, torch splits the work
    on each matrix."""
    enough = 1 < torch.get_num_threads() <= min(units, cost // WORTH_A_THREAD)
    if device.type != "cpu" or not enough:
        return [work(0, units)]
    # These modes have to be set in each thread.
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def alike(first: int, last: int) -> Result:
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            return work(first, last)

    with one_torch_thread():
        return share(alike, units, cost)
