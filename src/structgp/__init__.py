"""structgp: Bayesian structured prediction with Gaussian processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from structgp.errors import InputError, ModelFileError, StructgpError, StructgpWarning

__version__ = "0.1.0"

if TYPE_CHECKING:
    from structgp.api.active import select
    from structgp.api.describe import describe
    from structgp.api.estimator import StructuredGPClassifier, load
    from structgp.api.explain import explain
    from structgp.evaluation import metrics

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
    "metrics",
    "select",
]

_ROOMS = {
    "StructuredGPClassifier": "api.estimator",
    "describe": "api.describe",
    "explain": "api.explain",
    "load": "api.estimator",
    "metrics": "evaluation",
    "select": "api.active",
}


def __getattr__(name: str) -> Any:
    # These bring torch: they are imported when first asked for.
    if name in _ROOMS:
        return getattr(importlib.import_module(f"structgp.{_ROOMS[name]}"), name)
    raise AttributeError(f"module 'structgp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
