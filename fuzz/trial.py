"""One campaign: many damaged files, each tried with limits on time and memory. A file that is neither
answered nor refused in one line is a failure, and is kept."""

from __future__ import annotations

import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECONDS = 60
"""Seconds that one file may take."""

GROWTH = 2 << 30
"""Bytes of address space that a campaign may use in addition to what it began with."""


@dataclass
class Tally:
    """The results of a campaign: the count of each outcome, and the failures with what was done to their
    files."""

    name: str
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: float = 0.0

    def __str__(self) -> str:
        counts = ", ".join(f"{n:,} {outcome}" for outcome, n in self.outcomes.most_common())
        lines = [f"{self.name}: {counts or 'nothing tried'}; slowest {self.slowest:.1f} s"]
        return "\n".join([*lines, *(f"  FAILED {failure}" for failure in self.failures)])

    def add(self, outcome: str, told: str = "") -> None:
        self.outcomes[outcome] += 1
        if outcome == "failed":
            self.failures.append(told)


@contextmanager
def within_limits() -> Iterator[None]:
    """Limits the address space within the context. Threads of libraries must have started before."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + GROWTH
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def try_files(
    name: str,
    files: Iterator[tuple[str, bytes, str]],
    answers: Callable[[str, str], str],
    folder: Path,
    kept: Path,
) -> Tally:
    """Tries all files. files : kind and content of each, and what was done to it. answers : called with a
    path and a kind. kept : a folder for the files that fail."""
    tally, path = Tally(name), folder / "trial"
    before = signal.signal(signal.SIGALRM, _too_long)
    try:
        with within_limits():
            for number, (kind, content, done) in enumerate(files):
                path.write_bytes(content)
                began = time.monotonic()
                signal.alarm(SECONDS)
                try:
                    tally.add(answers(str(path), kind).partition(":")[0])
                except KeyboardInterrupt:
                    raise
                except BaseException as error:
                    kept.mkdir(parents=True, exist_ok=True)
                    saved = kept / f"{name.replace(' ', '-')}-{number}-{kind.replace(' ', '-')}"
                    saved.write_bytes(content)
                    tally.add("failed", f"{saved} ({done[:100]}): {_place(error)}")
                finally:
                    signal.alarm(0)
                tally.slowest = max(tally.slowest, time.monotonic() - began)
    finally:
        signal.signal(signal.SIGALRM, before)
    return tally


class TooLong(BaseException):
    """Raised at the time limit. It is not an Exception, so that it is not turned into an error for
    users."""


def _too_long(*_: Any) -> None:
    raise TooLong(f"more than {SECONDS} seconds")


def _place(error: BaseException) -> str:
    """The type, place and message of an error."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {str(error)[:200]}"
