"""structgp: Bayesian structured prediction with Gaussian processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from structgp._version import __version__
from structgp.errors import InputError, ModelFileError, StructgpError, StructgpWarning

if TYPE_CHECKING:
    from structgp.active import select
    from structgp.estimator import StructuredGPClassifier, load
    from structgp.reasons import explain
    from structgp.summary import describe

__all__ = [
    "InputError",
    "ModelFileError",
    "StructgpError",
    "StructgpWarning",
    "StructuredGPClassifier",
    "__version__",
    "describe",
    "explain",
    "load",
    "select",
]

_ROOMS = {
    "StructuredGPClassifier": "estimator",
    "describe": "summary",
    "explain": "reasons",
    "load": "estimator",
    "select": "active",
}


def __getattr__(name: str) -> Any:
    # These bring torch: they are imported when first asked for.
    if name in _ROOMS:
        return getattr(importlib.import_module(f"structgp.{_ROOMS[name]}"), name)
    raise AttributeError(f"module 'structgp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
