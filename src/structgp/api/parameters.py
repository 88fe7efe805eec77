"""What the parameters of the estimator may be, as far as they can be judged without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from structgp.answers.model import STRUCTURES
from structgp.errors import InputError
from structgp.plan.choose_optimizer import GRADIENTS, INFERENCE
from structgp.structures import Structure

_CHOICES = {
    "average": ("draws", "mean"),
    "basis": ("auto", "contrast", "label"),
    "covariance": ("auto", "full", "low-rank", "diagonal"),
    "decode": ("marginal", "viterbi"),
    "entropy": ("auto", "exact", "bhattacharyya", "jensen"),
    "gradient": GRADIENTS,
    "learn_kernel": ("auto", True, False),
    "learn_scales": ("auto", "transitions", True, "all", False),
    "pairwise_covariance": ("diagonal", "full"),
    "space": ("auto", "weights", "functions"),
}


def check_parameters(given: Any) -> None:
    """InputError, naming parameter and remedy, for the first of ``given``'s parameters that cannot be."""
    choices: dict[str, tuple[Any, ...]] = dict(_CHOICES)
    if isinstance(given.inference, str):
        choices["inference"] = INFERENCE
    if isinstance(given.predict_with, str):
        choices["predict_with"] = ("auto", *STRUCTURES)
    for name, known in choices.items():
        value = getattr(given, name)
        if value not in known:
            raise InputError(
                name, f"{value!r} is not known", f"use one of {', '.join(map(str, known))}"
            )
    if not isinstance(given.predict_with, str | Structure):
        raise InputError(
            "predict_with", f"{given.predict_with!r} is no structure", "use 'auto' or 'chain'"
        )
    if not isinstance(given.inference, str) and not callable(
        getattr(given.inference, "step", None)
    ):
        raise InputError(
            "inference",
            f"{given.inference!r} is no optimiser",
            f"use one of {', '.join(INFERENCE)}",
        )
    if not isinstance(given.inference, str) and given.learn_scales != "auto":
        raise InputError(
            "learn_scales",
            f"{given.learn_scales!r} is given beside an optimiser, which has its own",
            "set it on the optimiser, and leave 'auto' here",
        )
    numbers = {"n_draws": 1, "random_state": 0, "n_components": 1}
    for name in ("n_inducing", "n_gradient_draws", "covariance_rank"):
        if getattr(given, name) is not None:
            numbers[name] = 1
    for name, least in numbers.items():
        value = getattr(given, name)
        if not isinstance(value, Integral) or not least <= int(value) < 2**63:
            raise InputError(
                name, f"{value!r} is not possible", f"use a whole number, {least} or more"
            )
    if given.covariance_rank is not None and given.covariance != "low-rank":
        raise InputError(
            "covariance_rank",
            f"{given.covariance_rank} is given beside covariance={given.covariance!r}",
            "use covariance='low-rank', or leave it out",
        )
    jobs = given.n_jobs
    if not isinstance(jobs, Integral) or int(jobs) == 0:
        raise InputError("n_jobs", f"{jobs!r} is no number of processes", "pass 1 or more, or -1")
    if given.entropy == "exact" and given.n_components > 1:
        raise InputError(
            "entropy",
            f"'exact' has no closed form with {given.n_components} components",
            "use 'bhattacharyya' or 'jensen'",
        )
    for name in ("warm_start", "early_stopping"):
        if not isinstance(getattr(given, name), bool | np.bool_):
            raise InputError(name, f"{getattr(given, name)!r} is not possible", "use True or False")
    check_class_weight(given.class_weight)
    _check_device(given.device)
    amplitude, sd = given.amplitude, given.pairwise_sd
    if not (isinstance(amplitude, Real) and 0 < float(amplitude) < np.inf) and amplitude != "auto":
        raise InputError(
            "amplitude", f"{amplitude!r} is no variance", "use a number above 0, or 'auto'"
        )
    if not (isinstance(sd, Real) and 0 <= float(sd) < np.inf):
        raise InputError("pairwise_sd", f"{sd!r} is no deviation", "use a number, 0 or more")


def check_class_weight(given: Any, classes: Sequence[str] | None = None) -> None:
    """The same of ``class_weight`` alone, with the labels that it may name."""
    if given is None or (isinstance(given, str) and given == "balanced"):
        return
    if not isinstance(given, Mapping):
        raise InputError(
            "class_weight",
            f"{given!r} is not known",
            "use 'balanced', or a dict from label to factor",
        )
    for label, weight in given.items():
        if not (isinstance(weight, Real) and 0 < float(weight) < np.inf):
            raise InputError(
                "class_weight", f"{weight!r} for {label!r} is no factor", "use a number above 0"
            )
        if classes is not None and label not in classes:
            raise InputError(
                "class_weight",
                f"{label!r} is no label of the training data",
                f"use {', '.join(classes)}",
            )


def device_of(name: Any) -> str:
    """The torch device that ``name`` stands for; 'auto' is the GPU where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return str(name)


def _check_device(name: Any) -> None:
    try:
        torch.empty(0, device=torch.device(device_of(name)))
    except (RuntimeError, TypeError, AssertionError):
        raise InputError(
            "device",
            f"{name!r} cannot be used here",
            "use 'auto', 'cpu', or 'cuda' where there is a GPU",
        ) from None
