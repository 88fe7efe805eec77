"""structgp: Bayesian structured prediction with Gaussian processes."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from structgp.errors import InputError, ModelFileError, StructgpError, StructgpWarning

__version__ = "0.1.0"

# Read by OpenMP when torch is imported. Its threads spin while they wait for each other; where other work
# needs the cores too, fits take ten times as long as with threads that sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from structgp.api.active import select
    from structgp.api.annotate import annotate
    from structgp.api.asking import who_to_ask
    from structgp.api.batch_tagger import BatchTagger
    from structgp.api.describe import describe
    from structgp.api.estimator import StructuredGPClassifier, load
    from structgp.api.explain import explain
    from structgp.data.annotations import Annotations
    from structgp.data.graphs import Graph
    from structgp.evaluation import metrics
    from structgp.inference import Adam, Minibatch, Natural, SecondOrder
    from structgp.plan.options import Inducing, Mixture, Prior, Weights
    from structgp.structures import (
        Custom,
        Spec,
        chain,
        edges,
        grid,
        layers,
        piecewise,
        same,
        segments,
        tree,
    )

__all__ = [
    "Adam",
    "Annotations",
    "BatchTagger",
    "Custom",
    "Graph",
    "Inducing",
    "InputError",
    "Minibatch",
    "Mixture",
    "ModelFileError",
    "Natural",
    "Prior",
    "SecondOrder",
    "Spec",
    "StructgpError",
    "StructgpWarning",
    "StructuredGPClassifier",
    "Weights",
    "__version__",
    "annotate",
    "chain",
    "describe",
    "edges",
    "explain",
    "grid",
    "layers",
    "load",
    "metrics",
    "piecewise",
    "same",
    "segments",
    "select",
    "tree",
    "who_to_ask",
]

_ROOMS = {
    "Adam": "inference",
    "Annotations": "data.annotations",
    "BatchTagger": "api.batch_tagger",
    "Custom": "structures",
    "Inducing": "plan.options",
    "Minibatch": "inference",
    "Mixture": "plan.options",
    "Natural": "inference",
    "Prior": "plan.options",
    "SecondOrder": "inference",
    "Spec": "structures",
    "Weights": "plan.options",
    "StructuredGPClassifier": "api.estimator",
    "annotate": "api.annotate",
    "chain": "structures",
    "piecewise": "structures",
    "Graph": "data.graphs",
    "edges": "structures",
    "grid": "structures",
    "layers": "structures",
    "same": "structures",
    "segments": "structures",
    "tree": "structures",
    "describe": "api.describe",
    "explain": "api.explain",
    "load": "api.estimator",
    "metrics": "evaluation",
    "select": "api.active",
    "who_to_ask": "api.asking",
}


def __getattr__(name: str) -> Any:
    # These bring torch: they are imported when first asked for.
    if name in _ROOMS:
        return getattr(importlib.import_module(f"structgp.{_ROOMS[name]}"), name)
    raise AttributeError(f"module 'structgp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
