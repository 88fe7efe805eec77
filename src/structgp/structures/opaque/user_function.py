"""One call of a user's likelihood: what it is given, and what it may return.

Letters: S draws, B sequences in a batch, T positions, V labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structgp.errors import InputError, LikelihoodError

LABELS_SHOWN = 12
TEXT_SHOWN = 300


@dataclass(frozen=True)
class Caller:
    """A user's function in one of two forms; all its errors are raised as LikelihoodError.

    Single: function(f, g, y) with f (S, T, V), g (S, V, V), y (T,) -> (S,). Batched: function(f, g, y,
    mask) with f (S, B, T, V), g (S, V, V), y and mask (B, T) -> (S, B).
    """

    function: Callable[..., Any]
    batched: bool = False

    @property
    def place(self) -> str:
        return f"likelihood {name_of(self.function)}"

    def numpy(self, *given: NDArray[Any], sequence: int | None = None) -> NDArray[Any]:
        """Values from f, g, y and, in the batched form, the mask. The function is given read-only arrays of
        float64, int64 and bool."""
        frozen = []
        for x, dtype in zip(given, (np.float64, np.float64, np.int64, np.bool_), strict=False):
            view = np.ascontiguousarray(x, dtype=dtype).view()  # the caller's array stays writable
            view.flags.writeable = False
            frozen.append(view)
        values = self._call(frozen, sequence)
        if isinstance(values, Tensor):
            values = values.detach().cpu().numpy()
        return self._checked(np.asarray(values, dtype=np.float64), given[2], sequence)

    def torch(self, f: Tensor, g: Tensor, *labels: Tensor, sequence: int | None = None) -> Tensor:
        """Values from float64 tensors f and g, then y and, in the batched form, the mask; differentiable
        where the function is differentiable and autograd is on. The function is given copies, which it may
        change."""
        given = [x.to(torch.float64, copy=True) for x in (f, g)] + [x.clone() for x in labels]
        values = self._call(given, sequence)
        if not isinstance(values, Tensor):
            values = torch.as_tensor(np.asarray(values, dtype=np.float64))
        values = values.to(f.device, torch.float64)
        self._checked(values.detach().cpu().numpy(), labels[0].cpu().numpy(), sequence)
        return values

    def _call(self, given: Sequence[Any], sequence: int | None) -> NDArray[Any] | Tensor:
        """The result as an array or tensor of real numbers of the right shape."""
        f, g, y = given[:3]
        try:
            result = self.function(*given)
        except Exception as error:
            remedy = "call it with these labels to see where"
            raise self._error(f"raised {told(error)}", remedy, y, sequence) from error
        shape = tuple(f.shape[:2]) if self.batched else tuple(f.shape[:1])
        values = _as_array(result)
        if values is None or tuple(values.shape) != shape:
            letters, each = ("(S, B)", "draw and sequence") if self.batched else ("(S,)", "draw")
            problem = f" where {letters} = {shape} real numbers were expected"
            remedy = f"return one log-probability for each {each}"
        elif not isinstance(values, Tensor) and any(getattr(x, "requires_grad", False) for x in (f, g)):
            problem = ", which carries no gradient"
            remedy = "return a torch tensor for every sequence, or NumPy numbers for every sequence"
        else:
            return values
        raise self._error(f"returned {_described(result, values)}{problem}", remedy, y, sequence)

    def _checked(self, values: NDArray[Any], y: NDArray[Any], sequence: int | None) -> NDArray[Any]:
        bad = np.isnan(values) | (values == np.inf)
        if not bad.any():
            return values
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        if self.batched:
            sequence, y = first[1], y[first[1]]
        remedy = "return a finite log-probability, or -inf where the labelling is impossible"
        raise self._error(
            f"returned {values[first]} for draw {first[0]} of {len(values)}", remedy, y, sequence
        )

    def _error(self, problem: str, remedy: str, y: Any, sequence: int | None) -> LikelihoodError:
        """The error, with the length and first labels of the sequence, by which a user can find it."""
        if y.ndim > 1 and sequence is not None:
            y = y[sequence]
        if y.ndim > 1:
            labels = f"{y.shape[0]} sequences of T = {y.shape[1]} or less"
        else:
            first = ", ".join(str(int(label)) for label in y[:LABELS_SHOWN])
            labels = f"T = {len(y)} and y = [{first}{', ...' if len(y) > LABELS_SHOWN else ''}]"
        return LikelihoodError(self.place, f"{problem}, with {labels}", remedy, sequence)


def one_table(g: Tensor) -> None:
    """Raises InputError unless g is (S, V, V): a function sees one table of transition scores."""
    if g.dim() != 3:
        problem = "a function cannot have transitions that depend on features"
        raise InputError(
            "structure", problem, "use chain(features=...), or leave the features to the tokens"
        )


def name_of(function: Callable[..., Any]) -> str:
    if isinstance(function, partial):
        return name_of(function.func)
    return getattr(function, "__name__", None) or type(function).__name__


def told(error: BaseException) -> str:
    """The type and message of an exception, on one line and not too long."""
    text = " ".join(str(error).split())
    shown = text if len(text) <= TEXT_SHOWN else text[:TEXT_SHOWN] + "..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


def _as_array(result: Any) -> NDArray[Any] | Tensor | None:
    """The result as an array; None if it does not hold real numbers."""
    try:
        if isinstance(result, list | tuple) and any(isinstance(x, Tensor) for x in result):
            result = torch.stack([torch.as_tensor(x) for x in result])
        if isinstance(result, Tensor):
            return None if result.is_complex() or result.dtype == torch.bool else result
        array = np.asarray(result)
    except Exception:
        return None
    return array if array.dtype.kind in "iuf" else None


def _described(result: Any, values: NDArray[Any] | Tensor | None) -> str:
    if values is not None and values.ndim == 0:
        return "one number"
    kind = f"{type(result).__module__.partition('.')[0]}.{type(result).__name__}".removeprefix("builtins.")
    if values is not None:
        return f"a {kind} of shape {tuple(values.shape)}"
    dtype = getattr(result, "dtype", None)
    return f"a {kind}" if dtype is None else f"a {kind} of {dtype}"
