"""The handle on the background process: gives it one task at a time, and passes on its results."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from structgp.service import refit

Listener = Callable[[str, Any], None]
PATIENCE = 5.0
"""Seconds that the process is given to end before it is killed."""


class Background:
    """Runs tasks in a background process. ``listener(name, value)``, to be set before the first task, is
    called in a separate thread with every result: the pairs from ``Refitter.run``, 'error' with a message,
    and 'done' at the end of each task. A process that dies is started again with the next task."""

    listener: Listener

    def __init__(self, features: Sequence[Any], model_path: str, settings: dict[str, Any]) -> None:
        self._given = list(features), model_path, settings
        self._lock, self._starting, self._closed = threading.Lock(), threading.Lock(), False
        self._process: Any = None
        self._connection: Any = None
        self.busy: str | None = None
        "The task under way, such as 'fit' or 'sweep', or None."

    def start(self, task: dict[str, Any]) -> bool:
        """Starts a task and returns True, or False if another one is under way. Returns at once."""
        with self._lock:
            if self.busy is not None or self._closed:
                return False
            self.busy = task["do"]
        threading.Thread(target=self._run, args=(task,), daemon=True).start()
        return True

    def _run(self, task: dict[str, Any]) -> None:
        try:
            self._ensure()
            if self._closed:
                return
            self._connection.send(task)
            while True:
                name, value = self._connection.recv()
                if name == "done":
                    break
                self.listener(name, value)
        except (EOFError, OSError) as error:
            if not self._closed:
                self._end()
                what = f"the background process ended ({type(error).__name__}); it starts again"
                self.listener("error", what)
        except Exception as error:
            self.listener("error", f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self.busy = None
            if not self._closed:
                self.listener("done", task["do"])

    def _ensure(self) -> None:
        with self._starting:
            if self._closed or (self._process is not None and self._process.is_alive()):
                return
            # A fresh interpreter: a fork would copy the threads' locks, and torch does not survive it.
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            given = theirs, os.getpid(), *self._given
            made = context.Process(target=refit.serve_tasks, args=given, daemon=True)
            made.start()
            self._process = made
            theirs.close()

    def _end(self) -> None:
        with self._starting:
            process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            self._connection.close()
        process.terminate()
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()

    def close(self) -> None:
        """Ends the process; a task under way is lost."""
        with self._lock:
            self._closed = True
        self._end()
