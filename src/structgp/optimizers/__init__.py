"""Optimisers of the bound: which parameters move when, and when to stop."""

from structgp.optimizers.adam import Adam
from structgp.optimizers.base import Optimizer, Problem, StepInfo
from structgp.optimizers.blocks import Blocks
from structgp.optimizers.minibatch import Minibatch
from structgp.optimizers.mixture import Mixture
from structgp.optimizers.natural import Natural
from structgp.optimizers.scales import LearnScales
from structgp.optimizers.second_order import SecondOrder
from structgp.optimizers.stochastic import Stochastic

__all__ = [
    "Adam",
    "Blocks",
    "LearnScales",
    "Minibatch",
    "Mixture",
    "Natural",
    "Optimizer",
    "Problem",
    "SecondOrder",
    "StepInfo",
    "Stochastic",
]
