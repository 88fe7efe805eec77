"""Stochastic gradient ascent without SAGA's memory, for comparisons, with step sizes of its own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from structgp.inference import LearnScales, Problem
from structgp.paper import Saga
from structgp.paper.saga import Gradient, SagaState, project


@dataclass(frozen=True)
class SGD(Saga):
    """:class:`structgp.paper.Saga` without stored gradients, with step sizes from the curvature, which
    moves all parameters at once. Its noise does not vanish, so its steps have to."""

    mean_step: float | None = None
    covariance_step: float | None = None
    node_steps: int | None = None
    transition_steps: int | None = None
    learn_scales: LearnScales = "auto"
    name: str = "sgd"

    def fills(self, state: SagaState, n: int) -> bool:
        return False

    def combine(self, problem: Problem, state: SagaState, i: int, new: Gradient) -> tuple[Gradient, Tensor]:
        n, one = len(problem.batches), project(problem, i, new)
        whole = one.plus(one, n - 1)
        return whole, problem.posterior.mixing @ whole.value
