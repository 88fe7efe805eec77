"""structgp: Bayesian structured prediction with Gaussian processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from structgp._version import __version__
from structgp.errors import InputError, ModelFileError, StructgpError, StructgpWarning

if TYPE_CHECKING:
    from structgp.estimator import StructuredGPClassifier, load

__all__ = [
    "InputError",
    "ModelFileError",
    "StructgpError",
    "StructgpWarning",
    "StructuredGPClassifier",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    # The estimator brings torch: it is imported when first asked for.
    if name in ("StructuredGPClassifier", "load"):
        return getattr(importlib.import_module("structgp.estimator"), name)
    raise AttributeError(f"module 'structgp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
