"""The parameters of a fit as plain data: option objects, their checks, and their JSON.

Checks here need no data; what depends on the data is decided in ``resolve``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral, Real
from typing import Any, TypeAlias

import numpy as np
import torch

from structgp.errors import InputError
from structgp.gp.kernels.build import KernelChoice
from structgp.inference import Adam, Minibatch, Natural, Optimizer, SecondOrder
from structgp.plan.optimizers import GRADIENTS, INFERENCE
from structgp.structures import Spec, Structure
from structgp.structures.choose import Custom


@dataclass(frozen=True)
class Prior:
    """The prior of the potentials.

    Parameters
    ----------
    amplitude : prior variance of a node score, where the kernel is chosen by name, before anything is
        learned on the bound; 'auto' gives every active feature a weight of variance 1.
    transition_sd : prior standard deviation of a transition score; 0 leaves transitions out.
    learn_kernel : learn the kernel: length-scales (and without the second-order fit template weights and
        the balance of blocks) on the evidence of a Gaussian relaxation before the fit, the rest as the
        optimiser's ``learn_scales`` says. 'auto' is True, except for the paper's presets.
    """

    amplitude: float | str = "auto"
    transition_sd: float = 1.5
    learn_kernel: bool | str = "auto"


@dataclass(frozen=True)
class Weights:
    """A posterior over one weight per feature, without correlations between weights: no inducing inputs,
    time linear in the data. Needs kernel 'relevance' and a second-order fit.

    Parameters
    ----------
    basis : 'label' gives each label a function of its own; 'contrast' leaves out the direction in which
        all labels move alike: V - 1 functions, the same model, a higher bound. 'auto' is 'contrast' where
        the structure ignores that direction, except for the paper's presets.
    transition_covariance : of the transition scores, 'diagonal' or 'full'.
    """

    basis: str = "auto"
    transition_covariance: str = "diagonal"


@dataclass(frozen=True)
class Inducing:
    """A posterior over the values of the functions at M inducing inputs, for any kernel.

    Parameters
    ----------
    n_inducing : most inducing inputs, picked from at most 8,000 training tokens. If fewer reproduce all
        tokens, the model is the full GP. None for 1000, or as many as leave 2 % of the prior variance
        open if those are fewer, or the preset's number.
    covariance : of the inducing values of a function: 'full'; 'low-rank', whose precision is a diagonal
        plus ``rank`` directions; or 'diagonal' (in whitened coordinates). 'auto' is the first of them
        that takes at most 512 MB and 2e12 multiplications per round.
    rank : number of directions of 'low-rank', at most M; None for 64.
    basis, transition_covariance : see :class:`Weights`.
    """

    n_inducing: int | None = None
    covariance: str = "auto"
    rank: int | None = None
    basis: str = "auto"
    transition_covariance: str = "diagonal"


@dataclass(frozen=True)
class Mixture:
    """A posterior that is a mixture of Gaussians over the values at inducing inputs.

    Parameters
    ----------
    n_components : number of mixture components.
    entropy : bound on the mixture's entropy: 'bhattacharyya' (the choice of 'auto', exact for one
        component), 'jensen' (the paper's, looser), or 'exact' for one component.
    n_inducing, covariance, rank, basis, transition_covariance : see :class:`Inducing`.
    """

    n_components: int = 2
    entropy: str = "auto"
    n_inducing: int | None = None
    covariance: str = "auto"
    rank: int | None = None
    basis: str = "auto"
    transition_covariance: str = "diagonal"


Family: TypeAlias = Weights | Inducing | Mixture
FAMILIES: dict[str, Family] = {"weights": Weights(), "inducing": Inducing()}


@dataclass(frozen=True)
class Options:
    """All parameters of the estimator, see :class:`structgp.StructuredGPClassifier`."""

    structure: Any = "chain"
    kernel: KernelChoice = "auto"
    prior: Prior = field(default_factory=Prior)
    posterior: str | Family = "auto"
    inference: str | Optimizer = "auto"
    features: str = "auto"
    constraints: str | dict[str, Any] | None = None
    class_weight: str | dict[str, float] | None = None
    decode: str = "marginal"
    n_draws: int = 128
    device: str = "cpu"
    random_state: int = 0
    warm_start: bool = False
    verbose: bool = False

    @property
    def family(self) -> Family | None:
        """The posterior that was asked for; None where it is left open."""
        return FAMILIES.get(self.posterior) if isinstance(self.posterior, str) else self.posterior


# -- checks ----------------------------------------------------------------------------------------

_CHOICES: dict[str, tuple[Any, ...]] = {
    "basis": ("auto", "contrast", "label"),
    "covariance": ("auto", "full", "low-rank", "diagonal"),
    "decode": ("marginal", "viterbi"),
    "entropy": ("auto", "exact", "bhattacharyya", "jensen"),
    "gradient": GRADIENTS,
    "inference": INFERENCE,
    "learn_kernel": ("auto", True, False),
    "learn_scales": ("auto", "transitions", True, "all", False),
    "posterior": ("auto", *FAMILIES),
    "transition_covariance": ("diagonal", "full"),
    "warm_start": (True, False),
}
_LEAST = {"n_draws": 0, "random_state": 0, "n_inducing": 1, "n_components": 1, "rank": 1}
MAY_BE_ZERO = (
    "max_seconds",
    "reductions",
    "learning_rounds",
    "node_steps",
    "transition_steps",
    "hyper_steps",
)
"""Numbers of an optimiser that may be 0, beside its tolerances."""


def check_options(options: Options) -> None:
    """InputError, with the parameter and a remedy, for the first parameter that is not possible."""
    if not isinstance(options.prior, Prior):
        raise InputError("prior", f"got {options.prior!r}", "use a structgp.Prior")
    if not isinstance(options.posterior, str | Weights | Inducing | Mixture):
        names = "'auto', 'weights', 'inducing', or structgp.Weights, Inducing or Mixture"
        raise InputError("posterior", f"got {options.posterior!r}", f"use {names}")
    if not isinstance(options.inference, str):
        if not callable(getattr(options.inference, "step", None)):
            raise InputError(
                "inference",
                f"must be a name or an optimiser, got {options.inference!r}",
                f"use one of {', '.join(INFERENCE)}",
            )
        _check_optimizer(options.inference)
    for owner in (options, options.prior, options.family):
        if owner is not None:
            _check_fields(owner)
    _check_prior(options.prior)
    if isinstance(options.family, Inducing | Mixture):
        _check_inducing(options.family)
    if isinstance(options.structure, Custom):
        _check_custom(options.structure)
    check_class_weight(options.class_weight)
    try:
        torch.empty(0, device=torch.device(device_of(options.device)))
    except (RuntimeError, TypeError, AssertionError):
        raise InputError(
            "device",
            f"{options.device!r} cannot be used here",
            "use 'auto', 'cpu', or 'cuda' where there is a GPU",
        ) from None


def _check_fields(owner: Any) -> None:
    """Choices and whole numbers of an option object, by the names of its fields."""
    for name in (f.name for f in fields(owner)):
        value = getattr(owner, name)
        if name in _CHOICES and (isinstance(value, str) or name not in ("posterior", "inference")):
            _check_choice(name, value)
        if name in _LEAST and not (value is None and name in ("n_inducing", "rank")):
            least = _LEAST[name]
            if not isinstance(value, Integral) or not least <= int(value) < 2**63:
                problem = f"must be a whole number of at least {least}, got {value!r}"
                raise InputError(name, problem, f"use {least} or more")


def _check_choice(name: str, value: Any) -> None:
    # 1 == True: numbers are not choices.
    known = _CHOICES[name]
    plain = bool(value) if isinstance(value, np.bool_) else value
    if not any(plain is k or (isinstance(k, str) and plain == k) for k in known):
        raise InputError(name, f"{value!r} is not known", f"use one of {', '.join(map(str, known))}")


def _check_optimizer(optimizer: Optimizer) -> None:
    for name in ("gradient", "learn_scales"):
        if hasattr(optimizer, name):
            _check_choice(name, getattr(optimizer, name))
    for name, value in vars(optimizer).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        zero = name in MAY_BE_ZERO or name.endswith("tolerance")
        if not (value >= 0 if zero else value > 0):
            raise InputError(
                "inference",
                f"{type(optimizer).__name__}({name}={value!r})",
                f"use a number {'of at least' if zero else 'above'} 0",
            )


def _check_inducing(family: Inducing | Mixture) -> None:
    if family.rank is not None and family.covariance != "low-rank":
        raise InputError(
            "rank",
            f"{family.rank} is given beside covariance={family.covariance!r}",
            "use covariance='low-rank', or leave it out",
        )
    if isinstance(family, Mixture) and family.entropy == "exact" and family.n_components > 1:
        raise InputError(
            "entropy",
            f"'exact' has no closed form with {family.n_components} components",
            "use 'bhattacharyya' or 'jensen'",
        )


def _check_prior(prior: Prior) -> None:
    amplitude, sd = prior.amplitude, prior.transition_sd
    if not (isinstance(amplitude, Real) and 0 < float(amplitude) < np.inf) and amplitude != "auto":
        problem = f"must be a variance above 0, got {amplitude!r}"
        raise InputError("amplitude", problem, "use a number above 0, or 'auto'")
    if not (isinstance(sd, Real) and 0 <= float(sd) < np.inf):
        problem = f"must be a standard deviation of at least 0, got {sd!r}"
        raise InputError("transition_sd", problem, "use a number, 0 or more")


def _check_custom(custom: Custom) -> None:
    if not isinstance(custom.predict_with, Structure) and custom.predict_with not in ("auto", "chain"):
        problem = f"must be a structure, got {custom.predict_with!r}"
        raise InputError("predict_with", problem, "use 'auto', 'chain' or a structure")
    if not isinstance(custom.n_jobs, Integral) or int(custom.n_jobs) == 0:
        problem = f"must be a number of processes, got {custom.n_jobs!r}"
        raise InputError("n_jobs", problem, "use 1 or more, or -1 for one per core")


def check_class_weight(given: Any, classes: Sequence[str] | None = None) -> None:
    """Checks ``class_weight`` alone; ``classes`` : the labels that it may name."""
    if given is None or (isinstance(given, str) and given == "balanced"):
        return
    if not isinstance(given, Mapping):
        raise InputError(
            "class_weight", f"{given!r} is not known", "use 'balanced', or a dict from label to factor"
        )
    for label, weight in given.items():
        if not (isinstance(weight, Real) and 0 < float(weight) < np.inf):
            problem = f"must be a factor above 0, got {weight!r} for {label!r}"
            raise InputError("class_weight", problem, "use a number above 0")
        if classes is not None and label not in classes:
            problem = f"{label!r} is not a label of the training data"
            raise InputError("class_weight", problem, f"use {', '.join(classes)}")


def device_of(name: Any) -> str:
    """The torch device that ``name`` stands for; 'auto' is the GPU where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return str(name)


# -- JSON, and what tells one fit from another -----------------------------------------------------

SAVED: dict[str, type] = {
    kind.__name__: kind
    for kind in (Prior, Weights, Inducing, Mixture, SecondOrder, Minibatch, Natural, Adam)
}
"""Option objects that a model file keeps."""

NOT_OF_THE_FIT = ("n_draws", "decode", "class_weight", "device", "verbose")
"""Parameters that a fit does not depend on: a fit that was cut off may go on with others."""


def to_json(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that JSON can hold: numbers, strings, lists, dicts and option objects. The device is
    left out: another machine may not have it."""
    boxed = dict(params)
    for name, value in params.items():
        if isinstance(value, Spec):
            boxed[name] = {"option": "Spec"} | value.to_json()
        elif type(value) in SAVED.values():
            boxed[name] = {"option": type(value).__name__} | asdict(value)
    return {k: _unboxed(v) for k, v in boxed.items() if _is_plain(v) and k != "device"}


def from_json(params: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of ``to_json``."""
    found = dict(params)
    for name, value in params.items():
        if isinstance(value, dict) and "option" in value:
            rest = {k: v for k, v in value.items() if k != "option"}
            kind = value["option"]
            found[name] = Spec.from_json(rest) if kind == "Spec" else SAVED[kind](**rest)
    return found


def fingerprint(options: Options) -> dict[str, Any]:
    """What tells a fit with these options from a fit with others."""
    structure = options.structure
    if isinstance(structure, Custom):
        told = _told(structure.log_prob), _told(structure.predict_with)
    else:
        told = _told(structure)
    rest = {f.name: getattr(options, f.name) for f in fields(options) if f.name != "structure"}
    return {"structure": told} | {
        k: _told(v) for k, v in rest.items() if k not in NOT_OF_THE_FIT and k != "inference"
    }


def _told(value: Any) -> Any:
    """What tells one value of a parameter from another, where its text may not: the code of functions,
    the numbers of kernels."""
    if isinstance(value, torch.nn.Module):
        return type(value).__name__, [(k, v.tolist()) for k, v in value.state_dict().items()]
    code = getattr(value, "__code__", None)
    if code is not None:
        cells = [repr(cell.cell_contents) for cell in getattr(value, "__closure__", None) or ()]
        return value.__qualname__, code.co_code.hex(), repr(code.co_consts), cells
    if callable(value) or isinstance(value, Structure):
        return type(value).__qualname__, repr(sorted(getattr(value, "__dict__", {}).items()))
    return repr(_unboxed(value))


def _unboxed(value: Any) -> Any:
    """The same without NumPy's numbers."""
    if isinstance(value, dict):
        return {k: _unboxed(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_unboxed(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


def _is_plain(value: Any, inside: bool = False) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v, True) for k, v in value.items())
    if isinstance(value, list | tuple):
        return inside and all(_is_plain(v, True) for v in value)
    return isinstance(value, str | int | float | bool | np.generic) or (inside and value is None)
