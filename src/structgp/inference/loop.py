"""The loop: data -> problem -> optimiser steps -> history. Prints nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import scipy  # its parts are imported when they are used
import torch
from threadpoolctl import ThreadpoolController

from structgp.data.batch import Batch, by_length, pad
from structgp.data.shards import ShardBatches
from structgp.errors import InputError, StructgpError
from structgp.gp import Entropy, Posterior
from structgp.inference import Minibatch, Optimizer, Problem, StepInfo
from structgp.inference.annotated import Annotated
from structgp.inference.batch_sites import SitesOnDisk
from structgp.inference.checkpoint import Keeper, Reached
from structgp.inference.distributed import ALONE, Processes, local_device
from structgp.inference.estimators import Estimator, Pathwise
from structgp.inference.minibatch import MinibatchState, known_value, release, settle
from structgp.structures import Structure

Callback = Callable[[StepInfo], bool | None]

LARGE = 31 << 18
"""Number of single-precision numbers in 31 MB. Until an array of that size has been freed, glibc returns
the memory of smaller ones to the system, which clears it anew each time; that takes up to a third of a
fit."""

PATIENCE = 2
"""Number of steps in a row that fail to lower the loss on dev data after which a fit stops."""


@dataclass
class History:
    """How a fit went.

    optimizer, reason, gradient : the optimiser, why it was chosen, and the gradient estimator. steps : one
    entry per step. elbo : bound of the last step. fresh_elbo : the bound on draws that nothing was fitted
    to; in expectation the two bracket the optimum. stopped : 'converged', 'limit' or 'interrupted'.
    evaluations : likelihoods computed, sequences times draws, over all steps."""

    optimizer: str
    reason: str
    gradient: str
    steps: list[StepInfo]
    elbo: float
    fresh_elbo: float
    seconds: float
    stopped: str
    evaluations: int


@dataclass
class Best:
    """The lowest loss so far, the posterior that had it, and the number of steps since then."""

    loss: float = float("inf")
    posterior: dict[str, torch.Tensor] | None = None
    worse: int = 0


@dataclass
class Watch:
    """Early stopping: ``loss`` is looked at after every step, and the posterior with the lowest one is
    kept."""

    posterior: Posterior
    loss: Callable[[], float]
    best: Best = field(default_factory=Best)

    def enough(self) -> bool:
        """True if the fit should stop."""
        loss = self.loss()
        if loss < self.best.loss:
            self.best = Best(loss, self.posterior.snapshot())
        else:
            self.best.worse += 1
        return self.best.worse >= PATIENCE

    def restore(self) -> None:
        if self.best.posterior is not None:
            self.posterior.load_state_dict(self.best.posterior)


def make_batches(
    rows: Sequence[np.ndarray],
    labels: Sequence[np.ndarray],
    pad_row: np.ndarray,
    batch_tokens: int,
    weights: np.ndarray | None = None,
    together: Processes = ALONE,
    layers: int = 1,
) -> list[Batch]:
    """Training batches of sequences of similar length, without those that have no tokens or no weight. Each
    of several processes makes batches of its share."""
    lengths = [len(r) for r in rows]
    if weights is not None:
        lengths = [n if w > 0 else 0 for n, w in zip(lengths, weights, strict=True)]
    batches = list(by_length(lengths, batch_tokens))
    if together.size == 1:
        return [pad(rows, labels, pad_row, index, weights, layers) for index in batches]
    order = [i for index in batches for i in index]
    if len(order) < together.size:
        problem = f"{together.size} processes for {len(order)} sequences"
        raise InputError("torchrun", problem, "start fewer of them")
    number, own, found = {i: n for n, i in enumerate(order)}, together.share(order), []
    for places in by_length([lengths[i] for i in own], batch_tokens):
        index = [own[j] for j in places]
        batch = pad(rows, labels, pad_row, index, weights, layers)
        found.append(replace(batch, number=torch.tensor([number[i] for i in index])))
    return found


def _placed(posterior: Posterior, batches: Sequence[Batch], device: str) -> Sequence[Batch]:
    """Moves the posterior and the batches to the device; batches on disk move when they are read."""
    posterior.to(device)
    return batches.to(device) if isinstance(batches, ShardBatches) else [b.to(device) for b in batches]


_lock = threading.Lock()
_limits: list[Any] = []
"""One entry per fit that is running now, all equal: the limits that the first of them found."""


@cache
def _openblas() -> Any:
    """The controller of OpenBLAS, kept: looking through all libraries of the process takes milliseconds."""
    scipy.optimize  # noqa: B018  loads what is looked for
    return ThreadpoolController().select(internal_api="openblas")


@contextmanager
def one_thread_for_vectors() -> Iterator[None]:
    """Limits OpenBLAS to one thread. SciPy's L-BFGS adds and multiplies vectors in OpenBLAS, whose threads
    spin while they wait: several times the work where cores are shared. torch has a BLAS of its own.

    Fits may overlap, in threads of the caller: the last one to end restores what the first one found."""
    with _lock:
        _limits.append(_limits[0] if _limits else _openblas().limit(limits=1))
    try:
        yield
    finally:
        with _lock:
            limit = _limits.pop()
            if not _limits:
                limit.restore_original_limits()


@one_thread_for_vectors()
def train(
    posterior: Posterior,
    structure: Structure,
    batches: Sequence[Batch],
    optimizer: Optimizer,
    reason: str,
    *,
    estimator: Estimator | None = None,
    entropy: Entropy = "bhattacharyya",
    device: str = "cpu",
    generator: torch.Generator,
    callback: Callback | None = None,
    checkpoint: Keeper | None = None,
    watch: Watch | None = None,
    together: Processes = ALONE,
    on_fresh_draws: bool = True,
) -> History:
    """Fits ``posterior`` in place. estimator : for the expected log-likelihood. device : where everything
    is computed; the posterior moves back afterwards. callback : is given every step; if it returns True,
    the fit stops and keeps what it has reached. checkpoint : if its file exists, the fit goes on from it;
    it is written after steps, and the caller removes it. watch : may end the fit; afterwards the posterior
    is the one with the lowest loss. together : all processes that share the fit. on_fresh_draws : whether
    to compute the bound on fresh draws at the end."""
    home = posterior.node.m.device
    torch.empty(LARGE)  # freed at once, which teaches the allocator to keep what is freed later
    if torch.device(device).type != "cpu":
        batches = _placed(posterior, batches, local_device(device))
    saved = None if checkpoint is None else checkpoint.read(posterior, generator)
    began = time.monotonic() - (0.0 if saved is None else saved.elapsed)
    given = posterior, structure, batches, estimator or Pathwise(), entropy
    problem = Problem(*given, together=together, sees_all=isinstance(optimizer, Minibatch))
    state = _first_state(optimizer, problem, generator, saved, watch)
    steps: list[StepInfo] = [] if saved is None else saved.steps
    resumed = -1 if saved is None else len(steps)
    while True:
        state, info = _step(optimizer, problem, state, checkpoint if len(steps) == resumed else None)
        steps.append(info)
        # One batch of many says little about whether the fit as a whole gets better.
        within_pass = isinstance(state, MinibatchState) and bool(state.order)
        stop = watch is not None and not within_pass and watch.enough()
        stop = (callback is not None and bool(callback(info))) or stop
        if info.finished or (together.any(stop) if together.size > 1 else stop):
            break
        best, elapsed = None if watch is None else watch.best, time.monotonic() - began
        reached, is_first = Reached(state, steps, elapsed, problem.memory, best), together.rank == 0
        # Without a checkpoint each process has a folder of its own; with one, the first process cleans up.
        written = is_first and checkpoint.write(posterior, generator, reached) if checkpoint else True
        if written and isinstance(getattr(state, "sites", None), SitesOnDisk):
            state.sites.release()
    settle(posterior, state)
    if watch is not None:
        watch.restore()
    if watch is not None or not info.finished:  # a kernel may have moved since the last refresh
        problem.refresh()
    fresh = _fresh_bound(problem, optimizer, state, generator) if on_fresh_draws else float("nan")
    release(posterior, state)
    posterior.to(home)
    stopped = ("converged" if info.converged else "limit") if info.finished else "interrupted"
    names, evaluations = (optimizer.name, reason, problem.estimator.name), sum(s.evaluations for s in steps)
    return History(*names, steps, info.elbo, fresh, time.monotonic() - began, stopped, evaluations)


def _first_state(
    optimizer: Optimizer,
    problem: Problem,
    generator: torch.Generator,
    saved: Reached | None,
    watch: Watch | None,
) -> Any:
    """The optimiser's state at its start, or as a checkpoint holds it; in the latter case, problem and
    watch are restored too, in place."""
    if saved is None:
        return optimizer.start(problem, generator)
    problem.memory, state, folder = saved.memory, saved.state, getattr(optimizer, "sites_folder", None)
    if isinstance(getattr(state, "sites", None), SitesOnDisk):
        state.sites.go_on(problem.together)
    elif isinstance(state, MinibatchState) and isinstance(state.sites, list) and folder is not None:
        functions = [block.n_functions for block in problem.posterior.blocks]
        state.sites = SitesOnDisk.of(state.sites, folder, functions, problem.together)
    if watch is not None and saved.best is not None:
        watch.best = saved.best
    return saved.state


def _step(optimizer: Optimizer, problem: Problem, state: Any, kept: Keeper | None) -> tuple[Any, StepInfo]:
    """One step. kept : the checkpoint that the state has just been read from; if the step fails, the
    checkpoint is to blame."""
    try:
        return optimizer.step(problem, state)
    except (StructgpError, MemoryError):
        raise
    except Exception as error:
        if kept is None:
            raise
        raise kept.unfit(error) from error


def _fresh_bound(problem: Problem, optimizer: Optimizer, state: Any, generator: torch.Generator) -> float:
    """The bound on draws that nothing was fitted to."""
    fresh = problem.fresh_bound(4 if getattr(optimizer, "single", None) else 16, generator)
    if isinstance(optimizer, Annotated):
        fresh -= optimizer.penalty
    if isinstance(state, MinibatchState):
        fresh += known_value(problem.posterior, state) - state.known_at_start
    return fresh
