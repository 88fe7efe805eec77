"""A table that is computed cell by cell, in a file that survives a kill at any time.

A finished cell is one line of JSON, appended in one write and flushed to the disk. If a kill leaves part of
a line, it is not JSON and is skipped; the next row begins on a new line. A run that is started again
therefore does only the missing cells.
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
    """Rows in a file. names : the fields that identify a cell. The last row of a cell counts."""

    path: Path
    names: tuple[str, ...]

    def key(self, row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.names)

    def rows(self) -> dict[tuple[Any, ...], Row]:
        """The last complete row of each cell."""
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
    """Runs ``work`` on each task in a pool of single-threaded processes; yields the row or the error of
    each as it finishes."""
    # Fresh processes, because forked ones may inherit locks of torch's threads. They read the number of
    # threads from the environment when they import libraries that have threads.
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
    """Makes a worker leave Ctrl-C to its parent, and end when the parent has ended for whatever reason."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait_for([sentinel])
    os._exit(1)


def say(words: Iterable[object]) -> None:
    """Writes a line to standard error at once."""
    print(*words, file=sys.stderr, flush=True)
