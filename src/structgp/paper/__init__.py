"""The paper's own inference: score estimators, its two schedules, mixtures, and its settings by name."""

from __future__ import annotations

from dataclasses import dataclass

from structgp.paper.lbfgs_blocks import LbfgsBlocks
from structgp.paper.mixture_fit import MixtureFit
from structgp.paper.saga import Saga
from structgp.paper.score import Score

__all__ = ["PRESETS", "LbfgsBlocks", "MixtureFit", "Preset", "Saga", "Score"]


@dataclass(frozen=True)
class Preset:
    """A setting of the paper: the optimiser, with its gradient estimator, its number of draws and the
    hyper-parameters that it moves; the number of inducing inputs; whether the kernel's shape is learned
    before the fit; the basis of the labels."""

    optimizer: LbfgsBlocks | Saga
    n_inducing: int = 500
    learn_kernel: bool = False
    basis: str = "label"


PRESETS = {
    "paper-batch": Preset(
        LbfgsBlocks(name="paper-batch", gradient="control-variate", n_draws=10_000, learn_scales="all")
    ),
    "paper-stochastic": Preset(
        Saga(name="paper-stochastic", gradient="control-variate", n_draws=4_000, learn_scales=False)
    ),
}
"""The paper's two settings (supplement, 'Experimental set-up')."""
