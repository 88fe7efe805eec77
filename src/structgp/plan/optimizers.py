"""Optimisers and gradient estimators by name."""

from __future__ import annotations

from structgp.inference import Adam, Minibatch, Natural, Optimizer, SecondOrder
from structgp.inference.estimators import Estimator, Pathwise, PathwiseSurrogate, Surrogate
from structgp.paper import PRESETS, LbfgsBlocks, Saga, Score

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

NAMED: dict[str, Optimizer] = {
    "second-order": SecondOrder(learn_scales="auto"),
    "minibatch": Minibatch(learn_scales="auto"),
    "natural": Natural(learn_scales="auto"),
    "adam": Adam(learn_scales="auto"),
    "saga": Saga(
        mean_step=None, covariance_step=None, node_steps=None, transition_steps=None, learn_scales="auto"
    ),
    "lbfgs": LbfgsBlocks(learn_scales="auto"),
}
INFERENCE = ("auto", *NAMED, *PRESETS)
GRADIENTS = ("auto", *ESTIMATORS)
