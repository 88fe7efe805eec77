"""The loop: data -> problem -> optimiser steps -> history. Prints nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from structgp.data.batch import Batch, by_length, pad
from structgp.gp import Conditional, Posterior
from structgp.optimizers import Adam, LearnScales, Optimizer, Problem, SecondOrder, StepInfo
from structgp.structures import Structure

Callback = Callable[[StepInfo], bool | None]

CACHE_BYTES = 1 << 30
"""Up to here p(f | u) of every batch is kept; beyond it is computed again when needed."""


@dataclass
class History:
    """How a fit went.

    optimizer, reason : what was picked and why. steps : one entry a step. fresh_elbo : the bound on
    draws that nothing was fitted to; with the last step's ``elbo`` it brackets the optimum in
    expectation. stopped : 'converged', 'limit' or 'interrupted'.
    """

    optimizer: str
    reason: str
    steps: list[StepInfo] = field(default_factory=list)
    fresh_elbo: float = float("nan")
    seconds: float = 0.0
    stopped: str = "limit"

    @property
    def elbo(self) -> float:
        return self.steps[-1].elbo

    @property
    def evaluations(self) -> int:
        """Likelihoods computed: sequences times draws, over all steps."""
        return sum(step.evaluations for step in self.steps)


def make_batches(
    rows: Sequence[np.ndarray],
    labels: Sequence[np.ndarray],
    pad_row: Callable[[int], np.ndarray],
    batch_tokens: int,
) -> list[Batch]:
    """Training batches of similar length; sequences without tokens are left out."""
    lengths = [len(r) for r in rows]
    return [pad(rows, labels, pad_row, index) for index in by_length(lengths, batch_tokens)]


def choose_optimizer(
    inference: str, structure: Structure, *, learn_scales: LearnScales = "pairwise"
) -> tuple[Optimizer, str]:
    """The optimiser for ``inference`` ('auto', 'second-order' or 'adam'), and why."""
    if inference == "auto":
        if structure.has_curvature:
            return SecondOrder(learn_scales=learn_scales), "the structure gives its curvature"
        return Adam(learn_scales=learn_scales), "the structure gives no curvature"
    if inference == "second-order":
        return SecondOrder(learn_scales=learn_scales), "asked for"
    return Adam(learn_scales=learn_scales), "asked for"


def train(
    posterior: Posterior,
    structure: Structure,
    batches: Sequence[Batch],
    optimizer: Optimizer,
    reason: str,
    *,
    generator: torch.Generator,
    callback: Callback | None = None,
) -> History:
    """Fits ``posterior`` in place. ``callback`` sees every step; if it returns True, the fit stops
    there and what has been reached is kept."""
    began = time.monotonic()
    problem = Problem(posterior, structure, batches, _conditionals(posterior, batches))
    history = History(optimizer.name, reason)
    state = optimizer.start(problem, generator)
    while True:
        state, info = optimizer.step(problem, state)
        history.steps.append(info)
        if callback is not None and callback(info) and not info.finished:
            history.stopped = "interrupted"
            break
        if info.finished:
            history.stopped = "converged" if info.converged else "limit"
            break
    history.fresh_elbo = problem.fresh_bound(16, generator)
    history.seconds = time.monotonic() - began
    return history


def _conditionals(posterior: Posterior, batches: Sequence[Batch]) -> Callable[[int], Conditional]:
    def compute(i: int) -> Conditional:
        with torch.no_grad():
            return posterior.conditional(batches[i].x, batches[i].mask)

    numbers = sum(b.mask.numel() * (posterior.n_inducing + b.mask.shape[1]) for b in batches)
    if numbers * 8 > CACHE_BYTES:
        return compute
    kept = [compute(i) for i in range(len(batches))]
    return lambda i: kept[i]
