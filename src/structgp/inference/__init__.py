"""Variational inference: the bound, optimisers of it, and the loop that runs them."""

from structgp.inference.adam import Adam
from structgp.inference.minibatch import Minibatch
from structgp.inference.natural import Natural
from structgp.inference.problem import LearnScales, Optimizer, Problem, StepInfo
from structgp.inference.second_order import SecondOrder

__all__ = ["Adam", "LearnScales", "Minibatch", "Natural", "Optimizer", "Problem", "SecondOrder", "StepInfo"]
