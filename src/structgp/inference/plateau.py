"""When a noisy bound has stopped rising."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Plateau:
    """Looks at the mean of so many values at a time.

    window : values between two looks. tolerance : by how much a mean must exceed the best one before."""

    window: int
    tolerance: float
    recent: list[float] = field(default_factory=list)
    best: float = -float("inf")
    mean: float = float("nan")

    def add(self, value: float) -> None:
        self.recent.append(value)
        self.mean = sum(self.recent) / len(self.recent)

    @property
    def is_full(self) -> bool:
        return len(self.recent) >= self.window

    def look(self) -> bool:
        """Whether the bound has stalled since the last look; starts the next window."""
        stalled = self.mean - self.best < self.tolerance
        self.best = max(self.best, self.mean)
        self.recent = []
        return stalled
