"""The columns of the paper's table of errors, each as a function of a fold.

svm, crf and gp-ess are the methods compared with; svm and crf have their regulariser cross-validated on the
training half. gp-var-b is the preset 'paper-batch', gp-var-s is 'paper-stochastic', and gp-var-p is the
same on the piecewise pseudo-likelihood; all use the linear kernel of unit variance, one function per label
and unit transition scale. ours is the default fit. ``quick`` means fewer draws, iterations and inducing
inputs, and limits on steps instead of time, so that it gives the same figures on every machine.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from experiments.data import Fold
from experiments.methods.ess import GPStruct
from experiments.methods.svm import StructuredSVM
from experiments.presets import paper_model
from structgp import StructgpWarning, StructuredGPClassifier
from structgp.evaluation.crf import LinearCRF
from structgp.inference.loop import Callback

ESS_ITERATIONS = 2000
FEW_VALUES = 5000
"""Number of function values at training tokens below which an iteration costs little."""

MIXED = 1.05
"""R-hat of the likelihood above which a chain counts as too short."""


@dataclass(frozen=True)
class Fitted:
    """A fitted model. has_probabilities : whether it has probabilities of labels. hit_limit : whether the
    fit was cut short by a limit of time, passes or iterations. details : entries of its log, for the
    record."""

    model: Any
    has_probabilities: bool
    hit_limit: bool
    details: dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """The circumstances of a fit. quick : see the module's docstring. minutes : time limit of a paper's
    preset. device : the device of the paper's presets."""

    quick: bool
    minutes: float
    seed: int
    device: str = "cpu"


def _svm(fold: Fold, setting: Setting) -> Fitted:
    smaller: dict[str, Any] = {"C": (0.03, 0.1, 0.3), "tolerance": 0.02} if setting.quick else {}
    model = StructuredSVM(**smaller, random_state=setting.seed).fit(fold.X, fold.y)
    log = model.training_log_
    return Fitted(model, False, log["stopped"] == "limit", {"C": model.C_, **log})


def _crf(fold: Fold, setting: Setting) -> Fitted:
    smaller: dict[str, Any] = {"c2": (0.3, 1.0, 3.0), "n_folds": 3} if setting.quick else {}
    model = LinearCRF(**smaller, random_state=setting.seed).fit(fold.X, fold.y)
    return Fitted(model, True, False, {"c2": model.c2_})


def _gp_ess(fold: Fold, setting: Setting) -> Fitted:
    n, thin = (90, 2) if setting.quick else (ESS_ITERATIONS, 10)
    labels = {label for y in fold.y for label in y}
    if not setting.quick and sum(map(len, fold.y)) * len(labels) < FEW_VALUES:
        n *= 5  # iterations that are cheap
    model = GPStruct(n, thin=thin, random_state=setting.seed).fit(fold.X, fold.y)
    log = model.training_log_
    return Fitted(model, True, log["rhat_likelihood"] > MIXED, {"iterations": n, **log})


QUICK_OPTIMIZERS = {
    "paper-batch": {"node_steps": 4, "transition_steps": 1, "hyper_steps": 0, "max_iterations": 1},
    "paper-stochastic": {
        "mean_step": None,
        "covariance_step": None,
        "node_steps": None,
        "transition_steps": None,
        "max_steps": 400,
    },
}
QUICK_DRAWS, QUICK_INDUCING = 256, 200


def _paper(preset_name: str, likelihood: str) -> Callable[[Setting], StructuredGPClassifier]:
    def make(setting: Setting) -> StructuredGPClassifier:
        if not setting.quick:
            own: dict[str, Any] = {"max_seconds": 60 * setting.minutes}
        else:
            own = {"n_inducing": QUICK_INDUCING, "n_draws": QUICK_DRAWS}
            own |= QUICK_OPTIMIZERS[preset_name]
        return paper_model(
            preset_name, structure=likelihood, seed=setting.seed, device=setting.device, **own
        )

    return make


def _ours(setting: Setting) -> StructuredGPClassifier:
    return StructuredGPClassifier(random_state=setting.seed)


GP_MODELS: dict[str, Callable[[Setting], StructuredGPClassifier]] = {
    "gp-var-b": _paper("paper-batch", "chain"),
    "gp-var-s": _paper("paper-stochastic", "chain"),
    "gp-var-p": _paper("paper-stochastic", "piecewise"),
    "ours": _ours,
}
LOGGED = ("stopped", "elbo", "fresh_elbo", "evaluations", "n_inducing")


def fit_quietly(model: StructuredGPClassifier, fold: Fold, callback: Callback | None = None) -> Fitted:
    """Fits without the warning that a limit was reached; the result says so instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StructgpWarning)
        model.fit(fold.X, fold.y, callback=callback)
    log = model.training_log_
    details = {name: log[name] for name in LOGGED} | {"steps": len(log["steps"])}
    return Fitted(model, True, log["stopped"] == "limit", details)


def _gp(name: str) -> Callable[[Fold, Setting], Fitted]:
    return lambda fold, setting: fit_quietly(GP_MODELS[name](setting), fold)


METHODS: dict[str, Callable[[Fold, Setting], Fitted]] = {
    "svm": _svm,
    "crf": _crf,
    "gp-ess": _gp_ess,
    **{name: _gp(name) for name in GP_MODELS},
}
TIME_LIMITED = ("gp-var-b", "gp-var-s", "gp-var-p")
