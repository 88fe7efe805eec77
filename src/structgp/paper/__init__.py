"""The paper's own inference: score estimators, its two schedules, and mixtures."""

from structgp.paper.lbfgs_blocks import Blocks
from structgp.paper.mixture_fit import MixtureFit
from structgp.paper.saga import Stochastic
from structgp.paper.score import Score

__all__ = ["Blocks", "MixtureFit", "Score", "Stochastic"]
