"""One call of a user's likelihood: what it is given, and what it may return.

Letters: S draws, B sequences in a batch, T positions, V labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structgp.errors import LikelihoodError

LABELS_SHOWN = 12
TEXT_SHOWN = 300


@dataclass(frozen=True)
class Caller:
    """A user's function in one of two forms, with all its errors as LikelihoodError.

    Single: function(f, g, y) with f (S, T, V), g (S, V, V), y (T,) -> (S,). Batched:
    function(f, g, y, mask) with f (S, B, T, V), g (S, V, V), y and mask (B, T) -> (S, B).
    """

    function: Callable[..., Any]
    batched: bool = False

    @property
    def place(self) -> str:
        return f"likelihood {name_of(self.function)}"

    def numpy(
        self,
        f: NDArray[Any],
        g: NDArray[Any],
        y: NDArray[Any],
        mask: NDArray[Any] | None = None,
        sequence: int | None = None,
    ) -> NDArray[Any]:
        """Values from read-only float64 arrays, int64 labels and, in the batched form, the mask."""
        given = [_frozen(f, np.float64), _frozen(g, np.float64), _frozen(y, np.int64)]
        if mask is not None:
            given.append(_frozen(mask, np.bool_))
        result = self._call(given, sequence)
        values = self._real(result, given, sequence)
        if isinstance(values, Tensor):
            values = values.detach().cpu().numpy()
        values = np.asarray(values, dtype=np.float64)
        self._check(values, y, sequence)
        return values

    def torch(
        self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor | None = None, sequence: int | None = None
    ) -> Tensor:
        """Values from float64 tensors, differentiable where the function is and autograd is on.

        The function is given copies, which it may change.
        """
        given = [f.to(torch.float64, copy=True), g.to(torch.float64, copy=True), y.clone()]
        if mask is not None:
            given.append(mask.clone())
        result = self._call(given, sequence)
        values = self._real(result, given, sequence)
        if not isinstance(values, Tensor):
            if given[0].requires_grad or given[1].requires_grad:
                raise LikelihoodError(
                    self.place,
                    f"returned {_described(result, values)}, which carries no gradient, with"
                    f" {_labels(y, sequence)}",
                    "return a torch tensor for every sequence, or NumPy numbers for every sequence",
                    sequence,
                )
            values = torch.as_tensor(np.asarray(values, dtype=np.float64))
        values = values.to(f.device, torch.float64)
        self._check(values.detach().cpu().numpy(), y.cpu().numpy(), sequence)
        return values

    def _call(self, given: list[Any], sequence: int | None) -> Any:
        try:
            return self.function(*given)
        except Exception as error:
            raise LikelihoodError(
                self.place,
                f"raised {told(error)}, with {_labels(given[2], sequence)}",
                "call it with these labels to see where",
                sequence,
            ) from error

    def _real(self, result: Any, given: list[Any], sequence: int | None) -> NDArray[Any] | Tensor:
        """The result as an array or tensor of real numbers of the right shape."""
        f, y = given[0], given[2]
        shape = tuple(f.shape[:2]) if self.batched else tuple(f.shape[:1])
        values = _as_array(result)
        if values is None or tuple(values.shape) != shape:
            letters, each = ("(S, B)", "draw and sequence") if self.batched else ("(S,)", "draw")
            raise LikelihoodError(
                self.place,
                f"returned {_described(result, values)} where {letters} = {shape} real numbers"
                f" were expected, with {_labels(y, sequence)}",
                f"return one log-probability for each {each}",
                sequence,
            )
        return values

    def _check(self, values: NDArray[Any], y: NDArray[Any], sequence: int | None) -> None:
        bad = np.isnan(values) | (values == np.inf)
        if not bad.any():
            return
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        if self.batched:
            sequence, y = first[1], y[first[1]]
        raise LikelihoodError(
            self.place,
            f"returned {values[first]} for draw {first[0]} of {len(values)}, with {_labels(y, sequence)}",
            "return a finite log-probability, or -inf where the labelling is impossible",
            sequence,
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


def _frozen(x: NDArray[Any], dtype: type) -> NDArray[Any]:
    # A new view, so that the caller's array stays writable.
    x = np.ascontiguousarray(x, dtype=dtype).view()
    x.flags.writeable = False
    return x


def _as_array(result: Any) -> NDArray[Any] | Tensor | None:
    """The result as an array; None if it does not hold real numbers."""
    try:
        if isinstance(result, list | tuple) and any(isinstance(x, Tensor) for x in result):
            result = torch.stack([torch.as_tensor(x) for x in result])
        if isinstance(result, Tensor):
            real = not result.is_complex() and result.dtype != torch.bool
            return result if real else None
        array = np.asarray(result)
    except Exception:
        return None
    return array if array.dtype.kind in "iuf" else None


def _described(result: Any, values: NDArray[Any] | Tensor | None) -> str:
    if values is not None and values.ndim == 0:
        return "one number"
    kind = f"{type(result).__module__.partition('.')[0]}.{type(result).__name__}"
    kind = kind.removeprefix("builtins.")
    if values is not None:
        return f"a {kind} of shape {tuple(values.shape)}"
    dtype = getattr(result, "dtype", None)
    return f"a {kind}" if dtype is None else f"a {kind} of {dtype}"


def _labels(y: Any, sequence: int | None) -> str:
    """The length and first labels of a sequence, by which a user can find it."""
    if y.ndim > 1 and sequence is not None:
        y = y[sequence]
    if y.ndim > 1:
        return f"{y.shape[0]} sequences of T = {y.shape[1]} or less"
    first = ", ".join(str(int(label)) for label in y[:LABELS_SHOWN])
    more = ", ..." if len(y) > LABELS_SHOWN else ""
    return f"T = {len(y)} and y = [{first}{more}]"
