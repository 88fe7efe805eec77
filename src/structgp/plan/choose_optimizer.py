"""Which optimiser and which gradient estimator fit a likelihood, and the paper's presets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from structgp.errors import InputError
from structgp.gp import Posterior
from structgp.inference import Adam, LearnScales, Minibatch, Natural, Optimizer, SecondOrder
from structgp.inference.distributed import Together
from structgp.inference.estimators import Estimator, Pathwise
from structgp.inference.minibatch import MANY_TOKENS
from structgp.paper import Blocks, MixtureFit, Stochastic
from structgp.plan.gradient_estimators import ESTIMATORS, choose_estimator
from structgp.structures import Differences, Structure


@dataclass(frozen=True)
class Preset:
    """What a preset changes beside the optimiser: S, M, its estimator, and which hyper-parameters
    move. learn_kernel : whether the kernel's shape is learned before the fit. basis : of the labels."""

    gradient: str
    n_gradient_draws: int
    n_inducing: int
    learn_kernel: bool
    learn_scales: LearnScales
    basis: str = "label"


PRESETS = {
    "paper-batch": Preset("control-variate", 10_000, 500, False, "all"),
    "paper-stochastic": Preset("control-variate", 4_000, 500, False, False),
}
"""The paper's two settings (supplement, 'Experimental set-up')."""

INFERENCE = (
    "auto",
    "second-order",
    "minibatch",
    "natural",
    "adam",
    "sgd",
    "saga",
    "lbfgs",
    *PRESETS,
)
GRADIENTS = ("auto", *ESTIMATORS)

NATURAL_PATHWISE_DRAWS = 32
LBFGS_PATHWISE_DRAWS = 32

MAY_BE_ZERO = (
    "max_seconds",
    "reductions",
    "learning_rounds",
    "node_steps",
    "transition_steps",
    "hyper_steps",
)
"""Numbers of an optimiser, beside its tolerances, of which none is a choice too."""


@dataclass(frozen=True)
class Choice:
    """optimizer, estimator, and in a few words why."""

    optimizer: Optimizer
    estimator: Estimator
    reason: str


def choose(
    inference: str | Optimizer,
    structure: Structure,
    posterior: Posterior,
    *,
    gradient: str = "auto",
    n_gradient_draws: int | None = None,
    learn_scales: LearnScales | Literal["auto"] = "auto",
    n_tokens: int = 0,
) -> Choice:
    """The optimiser and estimator for ``inference`` and ``gradient``, names or 'auto'.

    'auto' takes the second-order fit if the structure gives its curvature, batch by batch where weights are
    fitted to very many tokens (``n_tokens``), else natural gradients: pathwise where the likelihood can be
    differentiated, surrogate plus residual where it only has values. A mixture starts from one component
    fitted so, and goes on with Adam.
    """
    estimator = choose_estimator(
        _gradient_name(inference, gradient), has_gradient=structure.has_gradient
    )
    if estimator.needs_gradient and not structure.has_gradient:
        raise InputError(
            "gradient",
            f"{estimator.name!r} needs a likelihood that can be differentiated",
            "use gradient='auto', or write the likelihood in torch",
        )
    name = inference if isinstance(inference, str) else inference.name
    if name in ("second-order", "minibatch") and gradient not in ("auto", "pathwise"):
        raise InputError(
            "gradient",
            f"{name!r} does not use {gradient!r}",
            "use gradient='auto', or inference='natural'",
        )
    closed = takes_second_order("auto", structure, gradient, posterior["next"].is_full)
    closed = closed or (posterior.node.name == "weights" and structure.has_local_curvature)
    if learn_scales == "auto":
        found = takes_second_order(inference, structure, gradient, posterior["next"].is_full)
        learn_scales = "all" if found else "transitions"
    how = "pathwise gradients" if estimator.needs_gradient else "gradients from values alone"
    own = {} if n_gradient_draws is None else {"n_draws": int(n_gradient_draws)}
    second = SecondOrder(learn_scales=learn_scales, **own)
    # What the first stage of a mixture has learned of the kernel stays.
    after = Adam(0.01, learn_scales="transitions" if learn_scales == "all" else learn_scales)
    optimizer: Optimizer
    if not isinstance(inference, str):
        optimizer, reason = inference, "given"
        _check_numbers(optimizer)
        if isinstance(inference, SecondOrder | Minibatch) and n_gradient_draws is not None:
            optimizer = replace(inference, n_draws=int(n_gradient_draws))
    elif inference == "auto":
        if posterior.node.name == "weights" and closed and n_tokens >= MANY_TOKENS:
            optimizer = Minibatch(n_draws=own.get("n_draws"), learn_scales=learn_scales)
            reason = "there is much data"
        elif closed:
            optimizer = second
            reason = "the structure gives its curvature"
            if isinstance(structure, Differences):
                reason = "values alone, and few enough of them tell slope and curvature"
        else:
            optimizer, reason = Natural(learn_scales=learn_scales), how
        if posterior.n_components > 1:
            optimizer = MixtureFit(optimizer, then=after)
            reason += "; a mixture starts from one component"
    else:
        optimizer, reason = second, "asked for"
        if inference != "second-order":
            optimizer = _named(inference, learn_scales)
            if isinstance(optimizer, Minibatch) and n_gradient_draws is not None:
                optimizer = replace(optimizer, n_draws=int(n_gradient_draws))
            reason += f"; {how}"
        if inference in ("second-order", "natural") and posterior.n_components > 1:
            optimizer = MixtureFit(optimizer, then=after)
    return Choice(optimizer, _with_draws(estimator, optimizer, inference, n_gradient_draws), reason)


def _check_numbers(optimizer: Optimizer) -> None:
    for name, value in vars(optimizer).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        none_will_do = name in MAY_BE_ZERO or name.endswith("tolerance")
        if not (value >= 0 if none_will_do else value > 0):
            raise InputError(
                "inference",
                f"{type(optimizer).__name__}({name}={value!r})",
                f"use a number {'of at least' if none_will_do else 'above'} 0",
            )


def check_alone(together: Together) -> None:
    if together.size > 1:
        raise InputError(
            "torchrun",
            "data on disk is for one process",
            "pass the data itself, or start one process",
        )


def check_together(together: Together, optimizer: Optimizer, posterior: Posterior) -> None:
    """Several processes can fit weights in closed form."""
    if together.size == 1:
        return
    if not (isinstance(optimizer, SecondOrder) and posterior.node.name == "weights"):
        raise InputError(
            "torchrun",
            f"the {optimizer.name} fit of this posterior is for one process",
            "use categorical or sparse features with the default fit, or start it without torchrun",
        )


def takes_second_order(
    inference: str | Optimizer, structure: Structure, gradient: str, pairs_are_full: bool
) -> bool:
    """Whether the fit has the curvature in closed form, and learns the kernel on the bound as it goes."""
    if inference == "auto":
        return structure.has_curvature and not pairs_are_full and gradient == "auto"
    if isinstance(inference, str):
        return inference in ("second-order", "minibatch")
    return isinstance(inference, SecondOrder | Minibatch)


def _gradient_name(inference: str | Optimizer, gradient: str) -> str:
    if gradient == "auto" and isinstance(inference, str) and inference in PRESETS:
        return PRESETS[inference].gradient
    return gradient


def _named(inference: str, learn_scales: LearnScales) -> Optimizer:
    own_pace: dict[str, Any] = {
        "mean_step": "auto",
        "covariance_step": "auto",
        "node_steps": None,
        "transition_steps": None,
    }
    make: dict[str, Callable[[], Optimizer]] = {
        "minibatch": lambda: Minibatch(learn_scales=learn_scales),
        "natural": lambda: Natural(learn_scales=learn_scales),
        "adam": lambda: Adam(learn_scales=learn_scales),
        "sgd": lambda: Stochastic(**own_pace, learn_scales=learn_scales, name="sgd"),
        "saga": lambda: Stochastic(**own_pace, learn_scales=learn_scales, name="saga"),
        "lbfgs": lambda: Blocks(learn_scales=learn_scales),
        "paper-batch": lambda: Blocks(learn_scales=learn_scales, name="paper-batch"),
        "paper-stochastic": lambda: Stochastic(learn_scales=learn_scales, name="paper-stochastic"),
    }
    return make[inference]()


def _with_draws(
    estimator: Estimator, optimizer: Optimizer, inference: str | Optimizer, wanted: int | None
) -> Estimator:
    if wanted is not None:
        return estimator.with_draws(wanted)
    if isinstance(inference, str) and inference in PRESETS:
        return estimator.with_draws(PRESETS[inference].n_gradient_draws)
    if isinstance(estimator, Pathwise):
        first = optimizer.first if isinstance(optimizer, MixtureFit) else optimizer
        if isinstance(first, Natural):
            return replace(estimator, n_draws=NATURAL_PATHWISE_DRAWS)
        if isinstance(first, Blocks):
            return replace(estimator, n_draws=LBFGS_PATHWISE_DRAWS)
    return estimator
