"""Estimators of the expected log-likelihood and its gradients, all behind one interface.

An estimator sees a function of standard normal numbers (a ``Target``), never a structure or a posterior,
and returns an ``Estimate`` of its mean, slope and bend with a variance of each."""

from __future__ import annotations

from typing import Protocol

import torch

from structgp.inference.estimators.moments import Estimate, Group, Moments, Noise, Target
from structgp.inference.estimators.pathwise import Pathwise
from structgp.inference.estimators.surrogate import PathwiseSurrogate, Surrogate


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


__all__ = [
    "Estimate",
    "Estimator",
    "Group",
    "Moments",
    "Noise",
    "Pathwise",
    "PathwiseSurrogate",
    "Surrogate",
    "Target",
]
