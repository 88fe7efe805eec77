"""Ensures one writer at a time: two trainings with the same output would overwrite each other's files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from structgp.errors import InputError


@contextmanager
def one_writer(output: str) -> Iterator[None]:
    """Holds a lock file beside ``output``; raises InputError if another process holds it. The system
    releases the lock when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    path = f"{output}.lock"
    if os.path.exists(output) and not os.path.isfile(output):
        yield  # a device, which is not replaced
        return
    with open(path, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            remedy = "wait until it has ended, or name another output"
            raise InputError(output, "another training is writing it", remedy) from None
        try:
            yield
        finally:
            with suppress(OSError):
                os.unlink(path)
