"""Estimates how long a fit with a likelihood that only gives values will take, and whether to use all
cores.

A likelihood in NumPy may take a microsecond or a second. Users should know which before they wait for the
fit, and other cores should help where that is worth starting them. Letters: S draws."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from structgp.data.examples import Examples
from structgp.errors import LikelihoodError
from structgp.inference import Natural, SecondOrder
from structgp.plan.resolve import Plan
from structgp.structures import BlackBox, Differences

logger = logging.getLogger("structgp")

FEW, MANY = 16, 256
"""Numbers of draws of two calls, whose times tell the time per call from the time per draw."""

NATURAL_STEPS = 20, 60
"""Fewest and most steps of natural gradients, each with all draws, that fits of the paper's tasks take."""

GRADIENTS = 40, 150
"""The same for gradients by differences, in a second-order fit."""

WORTH = 5.0
"""Shortest time of a fit, in seconds, for which other processes are started. Starting them takes about one
second."""

LONG = 60.0
"""Seconds from which the estimate is logged as a warning."""


@dataclass(frozen=True)
class Foreseen:
    """The expected time of a fit. seconds : the shortest and the longest time that calls of the function
    are likely to take in all. per_call, per_draw : seconds, on a sequence of median length. processes :
    number of processes that share the sequences. name : that of the function."""

    seconds: tuple[float, float]
    per_call: float
    per_draw: float
    processes: int = 1
    name: str = "the likelihood"

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "seconds": list(self.seconds)}

    def __str__(self) -> str:
        low, high = (_words(s) for s in self.seconds)
        call = self.per_call + MANY * self.per_draw
        of = f"{1e3 * call:.2g} ms" if call < 0.1 else f"{call:.1f} s"
        of += f" for {MANY} draws of a sequence"
        where = f", in {self.processes} processes" if self.processes > 1 else ""
        return f"{self.name} takes {of}: the fit will take some {low} to {high}{where}"


def foresee(plan: Plan, examples: Any) -> Foreseen | None:
    """The time that calls of a function without a gradient will take; None for other likelihoods and
    optimisers, and where the function fails on the trial, which the fit will report. Cost: three calls."""
    structure, optimizer, box = plan.structure.value, plan.optimizer.value, _function(plan)
    if box is None or box.has_gradient or not isinstance(examples, Examples):
        return None
    if not isinstance(optimizer, Natural | SecondOrder):
        return None
    lengths = np.array([len(y) for y in examples.y])
    n = int(np.argsort(lengths, kind="stable")[len(lengths) // 2])
    if not lengths[n]:
        return None
    try:
        per_call, per_draw = _timed(box, examples.y[n], examples.n_labels)
    except LikelihoodError:
        return None
    if isinstance(structure, Differences):
        S, times = float(optimizer.n_draws or (32 if examples.n_labels <= 3 else 16)), GRADIENTS
        S *= Differences.evaluations(float(lengths[n]), examples.n_labels)
    else:
        S, times = float(plan.gradient.value.n_draws), NATURAL_STEPS
    one = float((per_call + S * per_draw) * lengths.sum() / lengths[n])
    found = Foreseen((times[0] * one, times[1] * one), per_call, per_draw, name=box.name)
    return _shared(found, box)


def _function(plan: Plan) -> BlackBox | None:
    """The user's function, where the structure is one."""
    structure: Any = plan.structure.value
    inner = structure.inner if isinstance(structure, Differences) else structure
    return inner if isinstance(inner, BlackBox) else None


def _timed(box: BlackBox, y: np.ndarray, n_labels: int) -> tuple[float, float]:
    """Seconds per call, and per draw in it."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def seconds(n_draws: int) -> float:
        shapes = (n_draws, 1, len(y), n_labels), (n_draws, n_labels, n_labels)
        f, g = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        labels = torch.from_numpy(np.asarray(y, dtype=np.int64))[None]
        began = time.perf_counter()
        box.log_prob(f, g, labels, torch.ones_like(labels, dtype=torch.bool))
        return time.perf_counter() - began

    seconds(FEW)  # the first call may compile or import
    few, many = seconds(FEW), seconds(MANY)
    per_draw = max(0.0, many - few) / (MANY - FEW)
    return max(0.0, few - FEW * per_draw), per_draw


def _shared(found: Foreseen, box: BlackBox) -> Foreseen:
    """The estimate with the processes that the user asks for, or one per core where that is worth it and
    the function can be sent to them."""
    from joblib import effective_n_jobs

    single = box.kind != "numpy" or box.batched
    if single or (box.n_jobs is None and found.seconds[0] < WORTH):
        return found
    n_jobs = effective_n_jobs(-1 if box.n_jobs is None else box.n_jobs)
    if box.n_jobs is None and not box.can_be_sent:
        n_jobs = 1
    low, high = found.seconds
    return replace(found, seconds=(low / n_jobs, high / n_jobs), processes=n_jobs)


@contextmanager
def in_processes(plan: Plan, examples: Any) -> Iterator[Foreseen | None]:
    """Logs how long a fit will take, and has its function called in as many processes as are worth
    starting."""
    found, box = foresee(plan, examples), _function(plan)
    if found is None or box is None:
        yield None
        return
    logger.log(logging.WARNING if found.seconds[0] >= LONG else logging.INFO, "%s", found)
    before, box.n_jobs = box.n_jobs, found.processes
    try:
        yield found
    finally:
        box.n_jobs = before


def _words(seconds: float) -> str:
    """A time in words."""
    for size, name in ((3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{max(1, round(seconds))} s"
