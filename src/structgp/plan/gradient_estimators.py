"""Gradient estimators by name."""

from __future__ import annotations

from structgp.inference.estimators import Estimator, Pathwise, PathwiseSurrogate, Surrogate
from structgp.paper import Score

ESTIMATORS: dict[str, Estimator] = {
    e.name: e
    for e in (
        Pathwise(),
        PathwiseSurrogate(),
        Score("score", "iid", "none"),
        Score("control-variate", "iid", "control-variate"),
        Score("leave-one-out", "iid", "mean"),
        Score("antithetic-orthogonal", "orthogonal", "mean"),
        Score("sobol", "sobol", "mean"),
        Surrogate("surrogate-piecewise", "piecewise", uses_memory=False),
        Surrogate("surrogate-quadratic", None, uses_memory=True),
        Surrogate("surrogate", "composite", uses_memory=True),
    )
}
"""By name."""


def choose_estimator(name: str, *, has_gradient: bool) -> Estimator:
    """The estimator called ``name``; 'auto' is pathwise where the likelihood has a gradient, and
    the surrogate where there are only values."""
    if name == "auto":
        name = "pathwise" if has_gradient else "surrogate"
    return ESTIMATORS[name]
