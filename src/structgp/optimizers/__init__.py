"""Optimisers of the bound: which parameters move when, and when to stop."""

from structgp.optimizers.adam import Adam
from structgp.optimizers.base import Optimizer, Problem, StepInfo
from structgp.optimizers.scales import LearnScales
from structgp.optimizers.second_order import SecondOrder

__all__ = ["Adam", "LearnScales", "Optimizer", "Problem", "SecondOrder", "StepInfo"]
