"""Chunks of what has arrived: nothing waits for more than its first item, nothing is lost or reordered."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from structgp.cli.arriving import arriving


def test_one_by_one_where_they_come_one_by_one() -> None:
    answered = threading.Semaphore(0)

    def typed() -> Iterator[int]:
        for i in range(5):
            yield i
            assert answered.acquire(timeout=20), "the next is typed when this one is answered"

    for chunk in arriving(typed(), 200):
        assert len(chunk) == 1
        answered.release()


def test_many_at_once_where_they_are_there() -> None:
    read, busy = threading.Event(), []

    def fast() -> Iterator[int]:
        yield from range(100)
        read.set()
        yield from range(100, 1000)

    sizes = []
    for chunk in arriving(fast(), 60):
        assert read.wait(20), "reads ahead while the first chunk is answered"
        sizes.append(len(chunk))
        busy += chunk
    assert busy == list(range(1000))
    assert max(sizes) == 60
    assert len(sizes) < 40


def test_an_error_comes_after_what_was_read_before_it() -> None:
    def broken() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("line 3")

    seen: list[int] = []

    def read() -> None:
        for chunk in arriving(broken(), 10):
            seen.extend(chunk)

    with pytest.raises(ValueError, match="line 3"):
        read()
    assert seen == [1, 2]
