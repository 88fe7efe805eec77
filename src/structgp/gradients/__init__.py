"""Estimators of the expected log-likelihood and its gradients, all behind one interface.

An estimator sees a function of standard normal numbers (a ``Target``), never a structure or a
posterior, and returns an ``Estimate`` of its mean, slope and bend with a variance of each.
"""

from __future__ import annotations

from typing import Protocol

import torch

from structgp.gradients.moments import Draws, Estimate, Moments, Target
from structgp.gradients.pathwise import Pathwise
from structgp.gradients.score import Score
from structgp.gradients.surrogate import PathwiseSurrogate, Surrogate


class Estimator(Protocol):
    """What every estimator is: a name, a number of draws, and a call."""

    @property
    def name(self) -> str: ...
    @property
    def n_draws(self) -> int: ...
    @property
    def needs_gradient(self) -> bool: ...
    @property
    def parts(self) -> str | None: ...
    @property
    def uses_memory(self) -> bool: ...
    def with_draws(self, n_draws: int) -> Estimator: ...
    def __call__(
        self, target: Target, generator: torch.Generator, memory: Moments | None = None
    ) -> Estimate: ...


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


__all__ = [
    "ESTIMATORS",
    "Draws",
    "Estimate",
    "Estimator",
    "Moments",
    "Pathwise",
    "Score",
    "Surrogate",
    "Target",
    "choose_estimator",
]
