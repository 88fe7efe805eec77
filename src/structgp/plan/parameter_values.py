"""Parameters of the estimator as plain values: for a file, and to tell one fit from another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from structgp.structures import Structure

ABOUT_ANSWERS = (
    "n_draws",
    "average",
    "decode",
    "class_weight",
    "device",
    "n_jobs",
    "verbose",
)
"""Parameters that a fit does not depend on: one that was cut off may go on with others."""


def plain(params: Mapping[str, Any]) -> dict[str, Any]:
    """Those that JSON can hold: numbers, strings, lists and dicts of them. The device is left out: another
    machine may not have it."""
    return {k: _unboxed(v) for k, v in params.items() if _is_plain(v) and k != "device"}


def told_apart(params: Mapping[str, Any]) -> dict[str, Any]:
    """What tells a fit with them from one with others."""
    return {k: _told(v) for k, v in params.items() if k not in ABOUT_ANSWERS}


def _told(value: Any) -> Any:
    """What tells one value of a parameter from another, where its text may not: of functions their code,
    of kernels their numbers."""
    if isinstance(value, torch.nn.Module):
        return type(value).__name__, [(k, v.tolist()) for k, v in value.state_dict().items()]
    code = getattr(value, "__code__", None)
    if code is not None:
        cells = [repr(cell.cell_contents) for cell in getattr(value, "__closure__", None) or ()]
        return value.__qualname__, code.co_code.hex(), repr(code.co_consts), cells
    if callable(value) or isinstance(value, Structure):
        return type(value).__qualname__, repr(sorted(getattr(value, "__dict__", {}).items()))
    return repr(_unboxed(value))


def _unboxed(value: Any) -> Any:
    """The same without NumPy's numbers."""
    if isinstance(value, dict):
        return {k: _unboxed(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_unboxed(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


def _is_plain(value: Any, inside: bool = False) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v, True) for k, v in value.items())
    if isinstance(value, list | tuple):
        return inside and all(_is_plain(v, True) for v in value)
    return isinstance(value, str | int | float | bool | np.generic) or (inside and value is None)
