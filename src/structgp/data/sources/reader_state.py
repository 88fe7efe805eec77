"""Checks what a model file says about the reader of its files, before a reader is built from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from structgp.data.json_form import NUMBER, WHOLE, FormError, check_form
from structgp.errors import InputError

TEXT = (None, str)
COVERAGE = {"as_written": WHOLE, "lower_case": WHOLE, "missing": WHOLE}
VECTORS = {
    "path": str,
    "sha256": str,
    "size?": WHOLE,
    "encoding": str,
    "lower_case?": bool,
    "column": WHOLE,
    "scale": NUMBER,
    "coverage?": (None, COVERAGE),
}
STATE = {
    "format?": TEXT,
    "template?": str,
    "dialect?": str,
    "n_columns?": WHOLE,
    "missing?": TEXT,
    "transitions?": bool,
    "keys?": [str],
    "form?": TEXT,
    "numeric?": {"columns": [WHOLE], "mean": [NUMBER], "sd": [NUMBER]},
    "vectors?": VECTORS,
}


def check_state(state: Mapping[str, Any], model: str) -> None:
    """InputError that names the model if the state of its reader is not what ``to_json`` writes."""
    try:
        check_form(state, STATE)
        if "template" in state:
            _check_columns(state)
    except FormError as error:
        problem = f"does not say how to read files ({error})"
        raise InputError(model, problem, "get it again, or train it again") from None


def _check_columns(state: Mapping[str, Any]) -> None:
    n_columns, numeric, vectors = (state.get(name) for name in ("n_columns", "numeric", "vectors"))
    if not n_columns:
        raise FormError("n_columns must be 1 or more")
    if numeric is not None:
        sizes = {len(numeric[name]) for name in ("columns", "mean", "sd")}
        if len(sizes) > 1 or not all(sd > 0 for sd in numeric["sd"]):
            raise FormError("numeric columns, means and standard deviations do not fit each other")
        if not all(column < n_columns for column in numeric["columns"]):
            raise FormError("numeric columns that do not exist")
    if vectors is not None and (vectors["column"] >= n_columns or "\0" in vectors["path"]):
        raise FormError("vectors of a column, or at a path, that cannot exist")
