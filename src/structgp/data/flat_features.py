"""Feature dicts -> sparse features by name, as python-crfsuite reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from structgp.data.arrays import is_usable, not_usable
from structgp.errors import InputError

DEEPEST = 20
"""Largest depth to which feature dicts may be nested."""


def flatten(
    items: Iterable[tuple[str, Any]], place: str, prefix: str = "", depth: int = 0
) -> dict[str, float]:
    """Features -> {name: value}, with strings, flags, lists and dicts read as python-crfsuite does."""
    found: dict[str, float] = {}
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(value, str):
            found[f"{name}:{value}"] = 1.0
        elif isinstance(value, Mapping):
            if depth == DEEPEST:
                problem = f"feature {name[:50]!r} has dicts in dicts, more than {DEEPEST} deep"
                raise InputError(place, problem, "name features flatly; a dict must not hold itself")
            found.update(flatten(value.items(), place, f"{name}:", depth + 1))
        elif isinstance(value, bool | np.bool_ | int | float | np.integer | np.floating):
            if not is_usable(value):
                raise not_usable(f"feature {name!r}", value, place)
            if value != 0:
                found[name] = float(value)
        elif isinstance(value, list | tuple | set | frozenset):
            if any(isinstance(v, float | np.floating) for v in value):  # a feature for each makes no sense
                problem = f"feature {name!r} is a {type(value).__name__} of numbers"
                raise InputError(place, problem, "make it a vector with np.array, or use strings")
            found.update({f"{name}:{v}": 1.0 for v in value})
        elif value is not None:
            problem = f"feature {name!r} is a {type(value).__name__}"
            raise InputError(place, problem, "use strings, numbers, flags, lists of strings or dicts")
    return found
