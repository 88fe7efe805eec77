"""Times that can be compared: contestants take turns, in many rounds, and medians are used.

A busy or throttled machine slows down whatever runs at the time. So contestants take turns, each round
begins with another one, and a ratio is the median over rounds of the ratios within a round. The CPU time of
all threads, on which other processes have little effect, is recorded beside the wall-clock time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Times:
    """The measured times of one contestant. wall : wall-clock seconds of each round. cpu : CPU seconds of
    each round, for all threads of this process."""

    wall: tuple[float, ...]
    cpu: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return statistics.median(self.wall)

    @property
    def cpu_seconds(self) -> float:
        return statistics.median(self.cpu)

    def over(self, other: Times) -> float:
        """Median ratio of this time to the other, over the rounds that both took part in."""
        return statistics.median(a / b for a, b in zip(self.wall, other.wall, strict=False))

    def cpu_over(self, other: Times) -> float:
        return statistics.median(a / b for a, b in zip(self.cpu, other.cpu, strict=False))


def take_turns(
    contestants: dict[str, Callable[[], object]],
    *,
    rounds: int,
    device: str = "cpu",
    at_least: float = 0.0,
    slow: float = 2.0,
) -> dict[str, Times]:
    """Runs each contestant once without measuring it, then measures ``rounds`` rounds, or more until
    ``at_least`` seconds have passed. Contestants that took more than ``slow`` seconds take part in the
    first two rounds only."""
    wall: dict[str, list[float]] = {name: [] for name in contestants}
    cpu: dict[str, list[float]] = {name: [] for name in contestants}
    is_slow = {}
    for name, call in contestants.items():
        at = time.perf_counter()
        call()
        wait_for(device)
        is_slow[name] = time.perf_counter() - at > slow
    began = time.perf_counter()
    done = 0
    while done < rounds or time.perf_counter() - began < at_least:
        first = done % len(contestants)
        for name, call in [*contestants.items()][first:] + [*contestants.items()][:first]:
            if is_slow[name] and done >= 2:
                continue
            wait_for(device)
            at, at_cpu = time.perf_counter(), time.process_time()
            call()
            wait_for(device)
            wall[name].append(time.perf_counter() - at)
            cpu[name].append(time.process_time() - at_cpu)
        done += 1
    return {name: Times(tuple(wall[name]), tuple(cpu[name])) for name in contestants}


def wait_for(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def exponent(sizes: list[float], seconds: list[float]) -> float:
    """The least-squares slope of log seconds against log size."""
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (sizes, seconds))
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / x.square().sum())
