"""The forms that a sequence may come in, and how a token of each form is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse

from structgp.errors import InputError

LARGEST = 1e100
"""Larger dense values cannot be squared in floating point, as kernels do."""


def length(x: Any, place: str) -> int:
    if not (hasattr(x, "shape") and len(x.shape)) and not hasattr(x, "__len__"):
        raise not_a_sequence(x, place)
    return int(x.shape[0]) if hasattr(x, "shape") else len(x)


def not_a_sequence(x: Any, place: str) -> InputError:
    return InputError(
        place,
        f"expected a sequence of tokens, got a {type(x).__name__}",
        "pass a list of feature dicts, a list of lists of strings, or a 2-D array",
    )


def form_of(x: Any, place: str) -> str:
    if scipy.sparse.issparse(x):
        if x.ndim != 2:
            raise InputError(place, f"{x.ndim} dimensions", "pass a 2-D array, one row per token")
        return "sparse"
    if isinstance(x, np.ndarray) and x.dtype.kind in "fiub":
        return "dense"
    if isinstance(x, str) or not isinstance(x, Sequence | np.ndarray):
        raise not_a_sequence(x, place)
    token = x[0]
    if isinstance(token, Mapping):
        return "dicts"
    if isinstance(token, Sequence | np.ndarray | set | frozenset) and not isinstance(token, str):
        kind = next((type(v) for v in token), str)
        return "strings" if issubclass(kind, str) else "dense"
    raise InputError(
        f"{place}[0]",
        f"expected the features of a token, got a {type(token).__name__}",
        "make each token a dict, a list of strings, or a row of numbers",
    )


def as_csr(x: Any) -> Any:
    matrix = scipy.sparse.csr_matrix(x)
    if not matrix.has_canonical_format:
        matrix = matrix.copy()  # it may share its arrays with x, which is not ours to change
        matrix.sum_duplicates()
    return matrix


def as_dense(x: Any, place: str) -> np.ndarray:
    try:
        rows = np.asarray(x, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(place, f"not a matrix of numbers ({error})", "pass a 2-D array") from None
    if rows.ndim != 2:
        raise InputError(place, f"{rows.ndim} dimensions", "pass a 2-D array, one row per token")
    return rows


def check_finite(rows: np.ndarray, place: str, name: Callable[[int], str]) -> None:
    """InputError for a value of rows (T, D) that cannot be squared; ``name(d)`` is the name of column
    d."""
    bad = ~np.isfinite(rows)
    if bad.any():
        t, d = map(int, np.argwhere(bad)[0])
        raise InputError(f"{place}[{t}]", f"{name(d)} is {rows[t, d]}", "replace NaN and infinite values")
    huge = np.abs(rows) > LARGEST
    if huge.any():
        t, d = map(int, np.argwhere(huge)[0])
        raise InputError(f"{place}[{t}]", f"{name(d)} is {rows[t, d]}, too large", "rescale the feature")


def vector_length(value: np.ndarray, name: str, place: str) -> int:
    """The length of the array under ``name``, which must be a vector that is not empty."""
    if value.dtype.kind not in "fiub" or value.ndim != 1 or not len(value):
        raise InputError(
            place,
            f"feature {name!r} is an array of {value.dtype} and shape {value.shape}",
            "pass a 1-D array of numbers",
        )
    return len(value)


def as_vector(token: Mapping[str, Any], name: str, width: int, place: str) -> np.ndarray:
    """(width,) the vector of a feature dict under ``name``.

    A missing vector is an error and not read as zeros: most often its key is mistyped, and to a kernel
    zeros are a place like any other.
    """
    value = token.get(name)
    if isinstance(value, np.ndarray) and vector_length(value, name, place) == width:
        return value
    problem = f"feature {name!r} is a {type(value).__name__}, but training had a vector"
    if value is None:
        problem = f"vector {name!r} is missing"
    elif isinstance(value, np.ndarray):
        problem = f"vector {name!r} has {len(value)} numbers, but the first in training had {width}"
    raise InputError(place, problem, f"pass {width} numbers with every token, zeros where nothing is known")


def check_mapping(token: Any, place: str) -> None:
    if not isinstance(token, Mapping):
        raise InputError(
            place, f"expected a feature dict, got a {type(token).__name__}", "use one form throughout"
        )
    stray = next((key for key in token if not isinstance(key, str)), None)
    if stray is not None:
        raise InputError(place, f"feature name {stray!r} is not a string", "convert it with str()")


def check_strings(token: Any, place: str) -> None:
    if isinstance(token, str) or not isinstance(token, Sequence | np.ndarray | set | frozenset):
        raise InputError(place, f"{token!r} is not a list of strings", "use one form throughout")


def bag(token: Any, place: str) -> dict[str, float]:
    check_strings(token, place)
    found = {}
    for name in token:
        if not isinstance(name, str):
            raise InputError(place, f"{name!r} is not a string", "use strings throughout")
        found[name] = 1.0
    return found


def flatten(token: Mapping[str, Any], place: str, prefix: str = "") -> dict[str, float]:
    """Feature dict -> {name: value}, with strings, flags, lists and dicts read as python-crfsuite
    does."""
    found: dict[str, float] = {}
    for key, value in token.items():
        name = f"{prefix}{key}"
        if isinstance(value, str):
            found[f"{name}:{value}"] = 1.0
        elif isinstance(value, Mapping):
            found.update(flatten(value, place, f"{name}:"))
        elif isinstance(value, bool | np.bool_ | int | float | np.integer | np.floating):
            if not math.isfinite(value):
                raise InputError(place, f"feature {name!r} is {value}", "replace NaN and infinite values")
            if value != 0:
                found[name] = float(value)
        elif isinstance(value, list | tuple | set | frozenset):
            found.update({f"{name}:{v}": 1.0 for v in value})
        elif value is not None:
            raise InputError(
                place,
                f"feature {name!r} is a {type(value).__name__}",
                "use strings, numbers, flags, lists of strings or dicts",
            )
    return found
