"""Stochastic gradient ascent without SAGA's memory, for comparisons: the same steps at their own pace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from structgp.inference import LearnScales
from structgp.paper import Stochastic


@dataclass(frozen=True)
class SGD(Stochastic):
    """:class:`structgp.paper.Stochastic` that remembers no gradients, with step sizes from the curvature
    and all parameters moving at once. Its noise does not vanish, so its steps have to."""

    remembers: bool = False
    mean_step: float | Literal["auto"] = "auto"
    covariance_step: float | Literal["auto"] = "auto"
    unary_steps: int | None = None
    pairwise_steps: int | None = None
    learn_scales: LearnScales = "auto"
    name: str = "sgd"
