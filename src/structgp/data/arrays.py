"""Numbers as users have them (NumPy arrays, torch tensors, SciPy matrices, lists of rows), checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.sparse
import torch

from structgp.errors import InputError

LARGEST = 1e100
"""Largest absolute value of a feature: kernels square it, which must not overflow."""

ARRAYS = (np.ndarray, torch.Tensor)
"""Types that a matrix or vector of dense numbers may have."""


def is_array(value: Any) -> bool:
    return isinstance(value, ARRAYS)


def is_dense(x: Any) -> bool:
    """True for an array of numbers and for any tensor; ``as_numpy`` refuses tensors of anything but real
    numbers."""
    return isinstance(x, torch.Tensor) or (isinstance(x, np.ndarray) and x.dtype.kind in "fiub")


def as_numpy(x: Any, place: str) -> Any:
    """A tensor (on any device, of any dtype of real numbers) as an array, detached from its graph; anything
    else is returned as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    remedy = "pass a dense tensor of floats, integers or flags"
    if x.layout != torch.strided or x.is_quantized or x.is_complex():
        kind = "quantized" if x.is_quantized else f"{x.layout}, {x.dtype}".replace("torch.", "")
        raise InputError(place, f"a tensor of another kind ({kind})", remedy)
    if x.is_meta:
        raise InputError(place, "a tensor on the device 'meta', which has no values", remedy)
    x = x.detach()
    # NumPy has no bfloat16, and no 8-bit floats.
    return (x.double() if x.is_floating_point() else x).cpu().numpy()


def as_csr(x: Any) -> Any:
    """A scipy-sparse matrix in CSR format; its entries may be in any order, and may be repeated."""
    return x if x.format == "csr" else scipy.sparse.csr_matrix(x)


def stacked(matrices: Sequence[Any]) -> Any:
    """The rows of all these matrices, which come from ``as_csr`` and have one width, as one matrix in
    double precision; entries are sorted, and repeated ones added up. Shares no memory with the
    originals."""
    lengths = np.concatenate([[0], *(np.diff(x.indptr) for x in matrices)])
    data = np.concatenate([x.data[: x.indptr[-1]] for x in matrices], dtype=np.float64)
    indices = np.concatenate([x.indices[: x.indptr[-1]] for x in matrices])
    shape = len(lengths) - 1, matrices[0].shape[1]
    found = scipy.sparse.csr_matrix((data, indices, np.cumsum(lengths)), shape=shape)
    found.sum_duplicates()
    return found


def refuse_odd(x: Any, place: str) -> None:
    """InputError for arrays that NumPy would turn into numbers although they are not numbers: dates and
    times, and arrays with masked values."""
    for part in [x] if isinstance(x, ARRAYS) else x:
        if isinstance(part, np.ma.MaskedArray) and np.ma.is_masked(part):
            raise InputError(place, "a masked array, with values that are missing", "fill them in")
        if getattr(getattr(part, "dtype", None), "kind", "") in ("m", "M"):
            raise InputError(place, "dates or times", "convert them to numbers of the size that you mean")


def as_dense(x: Any, place: str) -> np.ndarray:
    """(T, D) the rows of an array, a tensor or a list of either."""
    refuse_odd(x, place)
    x = (
        as_numpy(x, place)
        if isinstance(x, ARRAYS)
        else [as_numpy(v, f"{place}[{t}]") for t, v in enumerate(x)]
    )
    try:
        rows = np.asarray(x, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(place, f"not a matrix of numbers ({error})", "pass a 2-D array") from None
    if rows.ndim != 2:
        raise InputError(place, f"{rows.ndim} dimensions", "pass a 2-D array, one row per token")
    return rows


def as_vector(value: Any, name: str, place: str) -> np.ndarray:
    """The array or tensor under the key ``name``, which must be a vector that is not empty."""
    found: np.ndarray = as_numpy(value, place)
    if found.dtype.kind not in "fiub" or found.ndim != 1 or not len(found):
        problem = f"feature {name!r} is an array of {found.dtype} and shape {found.shape}"
        raise InputError(place, problem, "pass a 1-D array of numbers")
    return found


def check_finite(rows: np.ndarray, place: str, name: Callable[[int], str]) -> None:
    """InputError for a value of rows (T, D) that cannot be squared; ``name(d)`` is the name of column d."""
    wrong = ~(np.abs(rows) <= LARGEST)
    if wrong.any():
        t, d = map(int, np.argwhere(wrong)[0])
        raise not_usable(name(d), rows[t, d], f"{place}[{t}]")


def not_usable(name: str, value: Any, place: str) -> InputError:
    """The error for a number that is not finite, or cannot be squared."""
    if isinstance(value, int) or math.isfinite(value):
        size = "beyond 1e300" if isinstance(value, int) and abs(value) > 10**300 else f"{value:.3g}"
        return InputError(place, f"{name} is {size}, too large", "rescale the feature")
    return InputError(place, f"{name} is {value}", "replace NaN and infinite values")


def is_usable(value: Any) -> bool:
    """True if a number is finite and can be squared."""
    return abs(value) <= LARGEST if isinstance(value, int) else abs(float(value)) <= LARGEST
