"""A likelihood that is given as a function: the engine needs nothing but its values.

Letters: S draws, B sequences in a batch, T positions (padded), V labels.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structgp.errors import InputError, LikelihoodError, StructgpWarning
from structgp.structures.base import Structure
from structgp.structures.opaque.detect import Kind, find_kind
from structgp.structures.opaque.user_function import Caller, name_of, one_table, told

Array = NDArray[Any]

CHUNKS_PER_WORKER = 4
"""Chunks per worker. Sequences differ in length: a worker that finishes early can take another chunk."""


class BlackBox(Structure):
    """log p(y | f, g) computed by a callable, in torch or NumPy, with or without a gradient.

    ``probe`` finds out which of these it is by calling it on a small example. A likelihood that also offers
    marginals, decoding or curvature should subclass :class:`Structure`. Transitions that depend on features
    are refused, because the function sees a single table g.

    Parameters
    ----------
    function : log-probabilities of one sequence, ``function(f, g, y)`` with f (S, T, V) and
        g (S, V, V) float64, y (T,) label indices from 0 to V - 1 -> (S,) real numbers, one per draw,
        each computed from that draw alone. With an attribute ``handles_missing = True`` it may be given
        -1 in y, for a label that is missing. -inf means that a labelling is impossible; nan and +inf are
        errors. NumPy functions are given read-only arrays, torch functions copies.
    batched : the function computes a whole batch, ``function(f, g, y, mask)`` with f (S, B, T, V),
        g (S, V, V), y and mask (B, T) -> (S, B). Where the mask is false, f and y are 0 and must not count.
    n_jobs : processes that share the sequences of a batch, -1 for one per core; None for one, unless a fit
        would take long (``plan.foreseen``). Only for NumPy functions of one sequence; ignored for others.
        joblib must be able to pickle the function, which it can for most closures and lambdas.
    """

    def __init__(
        self, function: Callable[..., Any], *, batched: bool = False, n_jobs: int | None = None
    ) -> None:
        if not callable(function):
            problem = f"a {type(function).__name__} cannot be called"
            raise InputError("structure", problem, "pass a function")
        if n_jobs is not None and (not isinstance(n_jobs, int | np.integer) or n_jobs == 0):
            problem = f"must be an integer other than 0, got {n_jobs!r}"
            raise InputError("n_jobs", problem, "pass 1 or more, or -1")
        self.function, self.batched, self.n_jobs = function, batched, n_jobs
        self.handles_missing = getattr(function, "handles_missing", False) is True
        self.gradient_problem: str | None = None
        """Why the gradient that the function carries is not used; None if it is used or there is none."""
        self._caller, self._kind = Caller(function, batched), cast("Kind | None", None)

    @property
    def name(self) -> str:
        """The name of the function."""
        return name_of(self.function)

    def __repr__(self) -> str:
        return f"BlackBox({name_of(self.function)}, batched={self.batched}, n_jobs={self.n_jobs})"

    def probe(self, n_labels: int) -> Kind:
        """'torch with gradient', 'numpy', or 'torch, values only'. The first call finds this by a trial
        with n_labels labels, and also sets ``ignores_shift``. Warns if the function carries a gradient that
        differences of its values contradict; such a gradient is not used."""
        if self._kind is None:
            self._kind, self.gradient_problem, self.ignores_shift = find_kind(self._caller, n_labels)
            if self.gradient_problem:
                said = f"the gradient it carries is incomplete or wrong ({self.gradient_problem})"
                text = f"{self._caller.place}: {said}; only its values are used"
                warnings.warn(text, StructgpWarning, stacklevel=2)
        return self._kind

    @property
    def kind(self) -> Kind:
        """What ``probe`` found; calls it with 3 labels if it was not called before."""
        return self.probe(3)

    @property
    def can_be_sent(self) -> bool:
        """True if joblib can send the function to other processes."""
        from multiprocessing.reduction import ForkingPickler

        from joblib import wrap_non_picklable_objects

        try:
            ForkingPickler.dumps(wrap_non_picklable_objects(self.function, keep_wrapper=False))
        except Exception:  # whatever a user's object does when it is pickled
            return False
        return True

    @property
    def has_gradient(self) -> bool:  # type: ignore[override]
        """Calls ``probe`` with 3 labels if it was not called before. A function that only works with
        another number of labels must be probed with that number first."""
        return self.probe(3) == "torch with gradient"

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """One call per sequence, or per batch in the batched form; 0 for an empty sequence."""
        one_table(g)
        kind = self.probe(f.shape[-1])
        full = torch.zeros(f.shape[:2], dtype=torch.float64, device=f.device)
        real = mask.any(-1).nonzero().squeeze(-1)
        if not len(real):
            return full.to(f.dtype)
        y = torch.where(mask, y, 0)
        with torch.set_grad_enabled(torch.is_grad_enabled() and kind == "torch with gradient"):
            if self.batched:
                f = f.masked_fill(~mask[..., None], 0)
                values = self._batch(kind, f[:, real], g, y[real], mask[real], real)
            else:
                ends = [(b, n) for b, n in enumerate(mask.sum(-1).tolist()) if n]
                if kind == "numpy":
                    values = torch.from_numpy(self._pool(_array(f), _array(g), _array(y), ends))
                else:
                    one = self._caller.torch
                    values = torch.stack([one(f[:, b, :n], g, y[b, :n], sequence=b) for b, n in ends], 1)
            return full.index_copy(1, real, values.to(f.device)).to(f.dtype)

    def _batch(self, kind: Kind, f: Tensor, g: Tensor, y: Tensor, mask: Tensor, real: Tensor) -> Tensor:
        only = 0 if len(real) == 1 else None
        try:
            if kind == "numpy":
                values = self._caller.numpy(*map(_array, (f, g, y, mask)), sequence=only)
                return torch.from_numpy(values)
            return self._caller.torch(f, g, y, mask, sequence=only)
        except LikelihoodError as error:
            if error.sequence is not None:
                error.sequence = int(real[error.sequence])
            raise

    def _pool(self, f: Array, g: Array, y: Array, ends: list[tuple[int, int]]) -> Array:
        """(S, len(ends)) values of a NumPy function from ``n_jobs`` processes. ends : (index, length) of
        each sequence.

        A task is some sequences with all draws; with fewer sequences than processes, one sequence with some
        of the draws.
        """
        from joblib import Parallel, delayed, effective_n_jobs, parallel_config

        def task(draws: Any, group: Any) -> tuple[Any, ...]:
            return self._caller, g[draws], [(b, f[draws, b, :n], y[b, :n]) for b, n in group]

        S, n = len(f), len(ends)
        n_jobs = effective_n_jobs(self.n_jobs) if self.n_jobs not in (None, 1) else 1
        if n_jobs == 1:
            return _work(*task(slice(None), ends))
        pieces = min(S, math.ceil(n_jobs / n)) if n < n_jobs else 1
        groups = np.array_split(np.array(ends), min(n, CHUNKS_PER_WORKER * n_jobs))
        draws = np.array_split(np.arange(S), pieces)
        tasks = [delayed(_work)(*task(s, group.tolist())) for group in groups for s in draws]
        try:
            # One thread per process: the processes already use all cores.
            with parallel_config("loky", n_jobs=n_jobs, inner_max_num_threads=1):
                parts = Parallel(batch_size=1, max_nbytes=None)(tasks)
        except LikelihoodError:
            raise
        except Exception as error:
            problem = f"could not be computed in {n_jobs} processes: {told(error)}"
            remedy = "pass n_jobs=1, or make sure that joblib can pickle it"
            raise LikelihoodError(self._caller.place, problem, remedy) from error
        rows = [np.concatenate(parts[i : i + pieces]) for i in range(0, len(parts), pieces)]
        return np.concatenate(rows, 1)


def _work(caller: Caller, g: Array, items: list[tuple[int, Array, Array]]) -> Array:
    """(S, number of items) values; runs in a worker."""
    return np.stack([caller.numpy(f, g, y, sequence=b) for b, f, y in items], 1)


def _array(x: Tensor) -> Array:
    return x.detach().cpu().numpy()
