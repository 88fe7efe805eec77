"""Reads items in chunks of whatever has arrived: one at a time from a slow pipe, many from a fast one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

_END = object()


def arriving(items: Iterable[Any], most: int) -> Iterator[list[Any]]:
    """Lists of 1 to ``most`` items, in order. A list only waits for its first item: it holds the items that
    arrived while the previous list was processed. At most twice ``most`` items are read ahead.

    Items are read in a separate thread, which ends with the program; an exception there is raised here,
    after the items that came before it."""
    waiting: queue.Queue[Any] = queue.Queue(2 * most)

    def read() -> None:
        try:
            for item in items:
                waiting.put((item, None))
            waiting.put((_END, None))
        except BaseException as error:
            waiting.put((_END, error))

    threading.Thread(target=read, name="structgp-input", daemon=True).start()
    while True:
        found, end = [waiting.get()], None
        while len(found) < most and not waiting.empty():
            found.append(waiting.get())
        if found[-1][0] is _END:
            end = found.pop()
        if found:
            yield [item for item, _ in found]
        if end is not None:
            if end[1] is not None:
                raise end[1]
            return
