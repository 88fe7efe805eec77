"""The forms that tokens may have: dicts, strings, dense and sparse arrays; and errors for anything else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse

from structgp.data.arrays import ARRAYS, is_dense
from structgp.errors import InputError

# Types that need no closer look.
_PLAIN, _USUAL = {str}, {list, tuple, set, frozenset}

LISTS = (Sequence, *ARRAYS, set, frozenset)
"""Types of a token that is a list of strings."""


def not_empty(X: Iterable[Any], form: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the sequences that have tokens, each with the place by which errors call it; InputError for a
    sequence that does not have the given form."""
    for n, x in enumerate(X):
        if form_of(x, place := f"X[{n}]", form):
            yield place, x


def length(x: Any, place: str) -> int:
    if isinstance(x, str) or not (len(x.shape) if hasattr(x, "shape") else hasattr(x, "__len__")):
        raise _not_a_sequence(x, place)
    return int(x.shape[0]) if hasattr(x, "shape") else len(x)


def _not_a_sequence(x: Any, place: str) -> InputError:
    problem = f"expected a sequence of tokens, got a {type(x).__name__}"
    remedy = "pass a list of feature dicts, a list of lists of strings, or a 2-D array or tensor"
    return InputError(place, problem, remedy)


def form_of(x: Any, place: str, expected: str = "") -> str:
    """The form of a sequence: 'dicts', 'strings', 'dense' or 'sparse'; '' if it has no tokens. InputError
    if it is not the expected form."""
    if not length(x, place):
        return ""
    if scipy.sparse.issparse(x):
        form = "sparse"
    elif is_dense(x):
        form = "dense"
    elif isinstance(x, str) or not isinstance(x, Sequence | np.ndarray):
        raise _not_a_sequence(x, place)
    elif is_dense(token := x[0]):
        form = "dense"
    elif isinstance(token, Mapping):
        form = "dicts"
    elif isinstance(token, LISTS) and not isinstance(token, str):
        form = "strings" if issubclass(next((type(v) for v in token), str), str) else "dense"
    else:
        problem = f"expected the features of a token, got a {type(token).__name__}"
        remedy = "make each token a dict, a list of strings, or a row of numbers"
        raise InputError(f"{place}[0]", problem, remedy)
    if expected not in ("", form):
        problem = f"tokens are {form}, but training had {expected}"
        raise InputError(place, problem, "use one form throughout")
    if form == "sparse" and x.ndim != 2:
        raise InputError(place, f"{x.ndim} dimensions", "pass a 2-D array, one row per token")
    if form == "dicts":
        check_dicts(x, place)
    return form


def check_dicts(x: Iterable[Any], place: str) -> None:
    """InputError for a token that is not a feature dict."""
    for t, token in enumerate(x):
        if type(token) is not dict and not isinstance(token, Mapping):
            problem = f"expected a feature dict, got a {type(token).__name__}"
            raise InputError(f"{place}[{t}]", problem, "use one form throughout")
        if set(map(type, token)) != _PLAIN and (stray := [k for k in token if not isinstance(k, str)]):
            problem = f"feature name {stray[0]!r} is not a string"
            raise InputError(f"{place}[{t}]", problem, "convert it with str()")


def check_strings(x: Iterable[Any], place: str) -> None:
    """InputError for a token that is not a list or set of strings."""
    for t, token in enumerate(x):
        if type(token) in _USUAL and set(map(type, token)) <= _PLAIN:
            continue
        if isinstance(token, str) or not isinstance(token, LISTS):
            problem = f"{token!r} is not a list of strings"
            raise InputError(f"{place}[{t}]", problem, "use one form throughout")
        if stray := [value for value in token if not isinstance(value, str)]:
            raise InputError(f"{place}[{t}]", f"{stray[0]!r} is not a string", "use strings throughout")
