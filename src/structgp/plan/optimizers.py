"""Optimisers, gradient estimators and the paper's presets, by name."""

from __future__ import annotations

from dataclasses import dataclass

from structgp.inference import Adam, Minibatch, Natural, Optimizer, SecondOrder
from structgp.inference.estimators import Estimator, Pathwise, PathwiseSurrogate, Surrogate
from structgp.paper import Blocks, Score, Stochastic

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
"""Gradient estimators by name."""


@dataclass(frozen=True)
class Preset:
    """A setting of the paper: the optimiser with its gradient estimator, number of draws and
    hyper-parameters that move; the number of inducing inputs; whether the kernel's shape is learned before
    the fit; the basis of the labels."""

    optimizer: Blocks | Stochastic
    n_inducing: int = 500
    learn_kernel: bool = False
    basis: str = "label"


PRESETS = {
    "paper-batch": Preset(
        Blocks(name="paper-batch", gradient="control-variate", n_draws=10_000, learn_scales="all")
    ),
    "paper-stochastic": Preset(
        Stochastic(name="paper-stochastic", gradient="control-variate", n_draws=4_000, learn_scales=False)
    ),
}
"""The paper's two settings (supplement, 'Experimental set-up')."""

NAMED: dict[str, Optimizer] = {
    "second-order": SecondOrder(learn_scales="auto"),
    "minibatch": Minibatch(learn_scales="auto"),
    "natural": Natural(learn_scales="auto"),
    "adam": Adam(learn_scales="auto"),
    "saga": Stochastic(
        mean_step="auto",
        covariance_step="auto",
        node_steps=None,
        transition_steps=None,
        learn_scales="auto",
    ),
    "lbfgs": Blocks(learn_scales="auto"),
}
INFERENCE = ("auto", *NAMED, *PRESETS)
GRADIENTS = ("auto", *ESTIMATORS)
