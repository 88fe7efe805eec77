"""A table that is made cell by cell, and survives being killed.

A finished cell is one line of JSON, appended in one write and flushed to the disk. What a kill leaves of a
line is not JSON, and is skipped; the next row begins on a line of its own. So a run that is started
again does only the cells that are not there.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any, TypeVar

Row = dict[str, Any]
Task = TypeVar("Task")


@dataclass(frozen=True)
class Store:
    """Rows in a file; ``names`` are the fields that tell cells apart. The last row of a cell counts."""

    path: Path
    names: tuple[str, ...]

    def key(self, row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.names)

    def rows(self) -> dict[tuple[Any, ...], Row]:
        """The last whole row of each cell."""
        found = {}
        if self.path.exists():
            for line in self.path.read_bytes().split(b"\n"):
                row = _parsed(line)
                if row is not None and all(name in row for name in self.names):
                    found[self.key(row)] = row
        return found

    def add(self, row: Row) -> None:
        """Appends a row; when this returns, it is on the disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+", buffering=0) as file:
            line = json.dumps(row).encode() + b"\n"
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = b"\n" + line
            file.write(line)
            os.fsync(file.fileno())


def _parsed(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def run_all(
    work: Callable[[Task], Row], tasks: Sequence[Task], n_jobs: int
) -> Iterator[tuple[Task, Row | Exception]]:
    """``work`` of each task in a pool of single-threaded processes; its row or its error, as they come."""
    # Fresh processes, because forked ones may inherit locks of torch's threads. They read how many
    # threads to have when they import what has threads.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(n_jobs, max(1, len(tasks))), context, _start_worker)
    try:
        pending = {pool.submit(work, task): task for task in tasks}
        while pending:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                task = pending.pop(future)
                error = future.exception()
                if isinstance(error, Exception):
                    yield task, error
                else:
                    yield task, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    """A worker leaves Ctrl-C to its parent, and ends when the parent is gone, however that died."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait_for([sentinel])
    os._exit(1)


def say(words: Iterable[object]) -> None:
    """A line on standard error, at once."""
    print(*words, file=sys.stderr, flush=True)
