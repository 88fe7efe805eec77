"""A likelihood that is a function: the engine needs nothing of it but its values.

Letters: S draws, B sequences in a batch, T positions (padded), V labels.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structgp.errors import InputError, LikelihoodError, StructgpWarning
from structgp.structures.base import Structure
from structgp.structures.opaque.detect import Found, Kind, find_kind
from structgp.structures.opaque.finite import one_table
from structgp.structures.opaque.user_function import Caller, name_of, told

CHUNKS_PER_WORKER = 4
"""Sequences differ in length: a worker that finishes early can take another chunk."""


class BlackBox(Structure):
    """log p(y | f, g) computed by a callable, in torch or NumPy, with or without a gradient.

    Which of these it is, ``probe`` finds out by calling it on a small example. A likelihood that also
    offers marginals, decoding or curvature should subclass :class:`Structure`. Transitions that depend on
    features are refused: the function sees one table g.

    Parameters
    ----------
    function : log-probabilities of one sequence, ``function(f, g, y)`` with f (S, T, V) and
        g (S, V, V) float64, y (T,) label indices from 0 to V - 1 -> (S,) real numbers, one per draw,
        each computed from that draw alone. With an attribute ``handles_missing = True`` it may be given
        -1 in y, for a label that is missing. -inf means that a labelling is impossible; nan and +inf are
        errors. NumPy functions are given read-only arrays, torch functions copies.
    batched : the function computes a whole batch, ``function(f, g, y, mask)`` with f (S, B, T, V),
        g (S, V, V), y and mask (B, T) -> (S, B). Where the mask is false, f and y are 0 and must
        not count.
    n_jobs : processes that share the sequences of a batch, -1 for one per core. Only for NumPy
        functions of one sequence; ignored for others. joblib must be able to pickle the function,
        which it can for most closures and lambdas.
    """

    def __init__(self, function: Callable[..., Any], *, batched: bool = False, n_jobs: int = 1) -> None:
        if not callable(function):
            raise InputError(
                "structure", f"a {type(function).__name__} cannot be called", "pass a function"
            )
        if not isinstance(n_jobs, int | np.integer) or n_jobs == 0:
            raise InputError(
                "n_jobs", f"must be an integer other than 0, got {n_jobs!r}", "pass 1 or more, or -1"
            )
        self.function = function
        self.batched = batched
        self.n_jobs = n_jobs
        self._found: Found | None = None

    def __repr__(self) -> str:
        return f"BlackBox({name_of(self.function)}, batched={self.batched}, n_jobs={self.n_jobs})"

    def probe(self, n_labels: int) -> Kind:
        """'torch with gradient', 'numpy', or 'torch, values only', found by a trial with n_labels labels
        at the first call. Warns if the function carries a gradient that differences of its values
        contradict; that gradient is not used."""
        if self._found is None:
            self._found = find_kind(self._caller, n_labels)
            if self._found.gradient_problem:
                warnings.warn(
                    f"{self._caller.place}: the gradient it carries is incomplete or wrong"
                    f" ({self._found.gradient_problem}); only its values are used",
                    StructgpWarning,
                    stacklevel=2,
                )
        return self._found.kind

    @property
    def kind(self) -> Kind:
        """What ``probe`` found; it tries 3 labels if it was not called before. A function that only works
        with another number of labels must be probed with that number first."""
        return self.probe(3)

    @property
    def gradient_problem(self) -> str | None:
        """Why the gradient that the function carries is not used; None if it is, or there is none."""
        return self._found.gradient_problem if self._found else None

    @property
    def ignores_shift(self) -> bool:
        """Whether all trials of ``probe`` found it so; False before the first."""
        return self._found is not None and self._found.ignores_shift

    @property
    def handles_missing(self) -> bool:
        """The function's attribute of that name; False without one."""
        return getattr(self.function, "handles_missing", False) is True

    @property
    def has_gradient(self) -> bool:
        return self.kind == "torch with gradient"

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
            elif kind == "numpy":
                values = self._pool(f, g, y, mask.sum(-1).tolist(), real.tolist())
            else:
                values = self._one_by_one(f, g, y, mask.sum(-1).tolist(), real.tolist())
            return full.index_copy(1, real, values.to(f.device)).to(f.dtype)

    @property
    def _caller(self) -> Caller:
        return Caller(self.function, self.batched)

    def _batch(self, kind: Kind, f: Tensor, g: Tensor, y: Tensor, mask: Tensor, real: Tensor) -> Tensor:
        only = 0 if len(real) == 1 else None
        try:
            if kind == "numpy":
                arrays = (_array(f), _array(g), _array(y), _array(mask))
                return torch.from_numpy(self._caller.numpy(*arrays, sequence=only))
            return self._caller.torch(f, g, y, mask, only)
        except LikelihoodError as error:
            if error.sequence is not None:
                error.sequence = int(real[error.sequence])
            raise

    def _one_by_one(self, f: Tensor, g: Tensor, y: Tensor, lengths: list[int], real: list[int]) -> Tensor:
        caller = self._caller
        values = [caller.torch(f[:, b, : lengths[b]], g, y[b, : lengths[b]], sequence=b) for b in real]
        return torch.stack(values, 1)

    def _pool(self, f: Tensor, g: Tensor, y: Tensor, lengths: list[int], real: list[int]) -> Tensor:
        """(S, len(real)) NumPy values of the sequences that have tokens, computed by ``n_jobs``
        processes.

        A task is some sequences with all draws; with fewer sequences than processes, one sequence with
        some of the draws.
        """
        from joblib import Parallel, delayed, effective_n_jobs, parallel_config

        f_, g_, y_ = _array(f), _array(g), _array(y)
        caller, n_jobs = self._caller, effective_n_jobs(self.n_jobs) if self.n_jobs != 1 else 1
        S, n = len(f_), len(real)
        if n_jobs == 1:
            items = [(b, f_[:, b, : lengths[b]], y_[b, : lengths[b]]) for b in real]
            return torch.from_numpy(_work(caller, g_, items))
        pieces = min(S, math.ceil(n_jobs / n)) if n < n_jobs else 1
        draws = np.array_split(np.arange(S), pieces)
        groups = np.array_split(np.array(real), min(n, CHUNKS_PER_WORKER * n_jobs))
        tasks = [
            delayed(_work)(
                caller, g_[s], [(int(b), f_[s, b, : lengths[b]], y_[b, : lengths[b]]) for b in group]
            )
            for group in groups
            for s in draws
        ]
        try:
            # One thread per process: the processes already use all cores.
            with parallel_config("loky", n_jobs=n_jobs, inner_max_num_threads=1):
                parts = Parallel(batch_size=1, max_nbytes=None)(tasks)
        except LikelihoodError:
            raise
        except Exception as error:
            raise LikelihoodError(
                caller.place,
                f"could not be computed in {n_jobs} processes: {told(error)}",
                "pass n_jobs=1, or make sure that joblib can pickle it",
            ) from error
        rows = [np.concatenate(parts[i : i + pieces]) for i in range(0, len(parts), pieces)]
        return torch.from_numpy(np.concatenate(rows, 1))


def _work(
    caller: Caller, g: NDArray[Any], items: list[tuple[int, NDArray[Any], NDArray[Any]]]
) -> NDArray[Any]:
    """(S, number of items) values; runs in a worker."""
    return np.stack([caller.numpy(f, g, y, sequence=b) for b, f, y in items], 1)


def _array(x: Tensor) -> NDArray[Any]:
    return x.detach().cpu().numpy()
