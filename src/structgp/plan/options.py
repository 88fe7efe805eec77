"""The parameters of a fit as plain data: optimisers by name, option objects, their checks, and their JSON.

Checks here need no data; ``resolve`` decides what depends on the data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral, Real
from typing import Any, TypeAlias

import numpy as np
import torch

from structgp.answers.ask import MOST_DRAWS
from structgp.errors import InputError
from structgp.gp.kernels.build import KernelChoice
from structgp.inference import Adam, Minibatch, Natural, Optimizer, SecondOrder
from structgp.inference.estimators import Estimator, Pathwise, PathwiseSurrogate, Surrogate
from structgp.paper import PRESETS, LbfgsBlocks, Preset, Saga, Score
from structgp.structures import Spec, Structure
from structgp.structures.choose import Custom, check_structure

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


@dataclass(frozen=True)
class Prior:
    """The prior of the potentials.

    Parameters
    ----------
    amplitude : prior variance of a node score, where the kernel is chosen by name, before anything is
        learned on the bound; 'auto' gives every active feature a weight of variance 1.
    transition_sd : prior standard deviation of a transition score; 0 leaves transitions out.
    learn_kernel : whether to learn the kernel: length-scales (and without the second-order fit template
        weights and the balance of blocks) on the evidence of a Gaussian relaxation before the fit, the rest
        as the optimiser's ``learn_scales`` says. 'auto' is True, except for the paper's presets.
    data_weight : how often every training sequence counts against the prior. 1 is Bayes' rule; more makes
        predictions more confident. 'auto' chooses it by cross-validation within the training set, which
        also tells how confident and how often right the model is on held-out tokens
        (``training_log_['held_out']``); 1 where that is not possible or too expensive, and for the paper's
        presets. The plan gives the reason.
    spread : factor on how far draws lie from the posterior mean in every answer; 1 is Bayes' rule. 'auto'
        chooses it together with ``data_weight``, and is 1 where that is not chosen.
    """

    amplitude: float | str = "auto"
    transition_sd: float = 1.5
    learn_kernel: bool | str = "auto"
    data_weight: float | str = "auto"
    spread: float | str = "auto"


@dataclass(frozen=True)
class Weights:
    """A posterior over one weight per feature, without correlations between weights: no inducing inputs,
    time linear in the data. Needs kernel 'relevance' and a second-order fit.

    Parameters
    ----------
    basis : 'label' gives each label a function of its own; 'contrast' leaves out the direction in which all
        labels move alike: V - 1 functions, the same model, a higher bound. 'auto' is 'contrast' where the
        structure ignores that direction, except for the paper's presets.
    transition_covariance : covariance of the transition scores, 'diagonal' or 'full'.
    """

    basis: str = "auto"
    transition_covariance: str = "diagonal"


@dataclass(frozen=True)
class Inducing:
    """A posterior over the values of the functions at M inducing inputs, for any kernel.

    Parameters
    ----------
    n_inducing : largest number of inducing inputs, picked from at most 8,000 training tokens. If fewer
        reproduce all tokens, the model is the full GP. None for 1000, or one per token up to some 2,000
        tokens where the fit is second-order, or as many as leave 2 % of the prior variance open if those
        are fewer; or the preset's number.
    covariance : form of the covariance of a function's inducing values: 'full'; 'low-rank', whose precision
        is a diagonal plus ``rank`` directions; or 'diagonal' (in whitened coordinates). 'auto' is the first
        of them that takes at most 512 MB and 2e12 multiplications per round.
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


@dataclass(eq=False, repr=False)
class Parameters:
    """The parameters of :class:`structgp.StructuredGPClassifier`, which says what they mean."""

    structure: Any = "chain"
    kernel: KernelChoice = "auto"
    prior: Prior = Prior()
    posterior: str | Family = "auto"
    inference: str | Optimizer = "auto"
    features: str = "auto"
    word_parts: str | None = "auto"
    constraints: str | dict[str, Any] | None = "auto"
    class_weight: str | dict[str, float] | None = None
    decode: str = "auto"
    costs: Any = None
    n_draws: int | str = "auto"
    device: str = "cpu"
    random_state: int = 0
    warm_start: bool = False
    verbose: bool = False


Parameters.__init__.__qualname__ = "StructuredGPClassifier"  # for Python's error about an unknown name


@dataclass
class Options(Parameters):
    """Parameters, checked, and what their names stand for. family, optimizer : None where they are left
    open. preset : one of the paper's, or None. local : whether probabilities of single labels may come from
    points for each token rather than from the draws (``answers.local_points``). InputError for the first
    parameter whose value is not possible."""

    family: Family | None = field(init=False)
    optimizer: Optimizer | None = field(init=False)
    preset: Preset | None = field(init=False)
    learns_kernel: bool = field(init=False)
    torch_device: str = field(init=False)
    local: bool = field(init=False)

    def __post_init__(self) -> None:
        _check_fields(self)
        check_structure(self.structure)
        custom = [self.structure] if isinstance(self.structure, Custom) else []
        for option in (self.prior, self.posterior, self.inference, *custom):
            if not isinstance(option, str):
                _check_fields(option)
        if self.class_weight is not None:
            check_class_weight(self.class_weight)
        if (self.decode == "cost") != (self.costs is not None):
            problem, remedy = "no costs to decode by", "pass costs={true: {predicted: cost}}"
            if self.costs is not None:
                problem, remedy = (
                    f"given beside decode={self.decode!r}",
                    "use decode='cost', or leave it out",
                )
            raise InputError("costs", problem, remedy)
        name = self.inference if isinstance(self.inference, str) else ""
        self.family = FAMILIES.get(self.posterior) if isinstance(self.posterior, str) else self.posterior
        self.preset = PRESETS.get(name)
        self.optimizer = NAMED.get(name) if isinstance(self.inference, str) else self.inference
        if self.preset is not None:
            self.optimizer = self.preset.optimizer
        learn = self.prior.learn_kernel
        self.learns_kernel = self.preset is None if learn == "auto" else bool(learn)
        self.torch_device = self.device if self.device == "cpu" else device_of(self.device)
        self.local = self.n_draws == "auto"


_CHOICES: dict[str, tuple[Any, ...]] = {
    "basis": ("auto", "contrast", "label"),
    "covariance": ("auto", "full", "low-rank", "diagonal"),
    "decode": ("auto", "f1", "accuracy", "sequence", "cost"),
    "entropy": ("auto", "exact", "bhattacharyya", "jensen"),
    "gradient": GRADIENTS,
    "inference": INFERENCE,
    "learn_kernel": ("auto", True, False),
    "learn_scales": ("auto", "transitions", True, "all", False),
    "posterior": ("auto", *FAMILIES),
    "transition_covariance": ("diagonal", "full"),
    "warm_start": (True, False),
}


ANSWER_DRAWS = 128
"""Default number of draws that answers average over: with fewer, the NLL on left-out thirds of the training
data is higher by several hundredths (``python -m experiments.answer_draws``)."""


LINKED_DRAWS = 512
"""The same for a chain with tables of links, ``Spec.is_linked_chain``: a draw tells little there, since all
of a document has to be right in it. Chosen on the TRAINING announcements of fold 0 of
``experiments.seminars``, cut into fifths, two of which were predicted, each by a fit to the other four.
Their NLL, averaged over two to four seeds, was .0351 and .0304 with 128 draws, .0337 and .0304 with 256,
.0328 and .0303 with 512, and .0321 and .0293 with 1,024, which take twice as long."""


def answer_draws(n_draws: int | str, spec: Spec) -> int:
    """The number of draws that the parameter stands for, in answers of a model with this structure."""
    if n_draws == "auto":
        return LINKED_DRAWS if spec.is_linked_chain else ANSWER_DRAWS
    return int(n_draws)


WHOLE = {"n_draws": 0, "random_state": 0, "n_components": 1, "n_inducing": 1, "rank": 1}
"""Parameters that are whole numbers, and the least that each may be; None leaves the last two open."""

LARGEST_AMPLITUDE = 1e6
"""Largest prior variance of a score: beyond scores of 1000 every probability is 0 or 1, and no bound can be
estimated from draws."""

_POSSIBLE: dict[str, Callable[[Any], bool]] = {
    "prior": lambda v: isinstance(v, Prior),
    "posterior": lambda v: isinstance(v, str | Family),
    "inference": lambda v: isinstance(v, str) or callable(getattr(v, "step", None)),
    "amplitude": lambda v: (isinstance(v, Real) and 0 < float(v) <= LARGEST_AMPLITUDE) or v == "auto",
    "data_weight": lambda v: (isinstance(v, Real) and 0 < float(v) < np.inf) or v == "auto",
    "spread": lambda v: (isinstance(v, Real) and 0 < float(v) < np.inf) or v == "auto",
    "transition_sd": lambda v: isinstance(v, Real) and 0 <= float(v) < np.inf,
    "word_parts": lambda v: v is None or isinstance(v, str),
    "predict_with": lambda v: isinstance(v, Structure) or v in ("auto", "chain"),
    "n_jobs": lambda v: v is None or (isinstance(v, Integral) and int(v) != 0),
}
_WORDS = {
    "prior": ("a prior", "a structgp.Prior"),
    "posterior": (
        "a name or a family",
        "'auto', 'weights', 'inducing', structgp.Weights, Inducing or Mixture",
    ),
    "inference": ("a name or an optimiser", f"one of {', '.join(INFERENCE)}"),
    "amplitude": ("a variance above 0, at most 1e6", "a number above 0, or 'auto'"),
    "data_weight": ("a number above 0", "a number above 0, or 'auto'"),
    "spread": ("a number above 0", "a number above 0, or 'auto'"),
    "transition_sd": ("a standard deviation of at least 0", "a number, 0 or more"),
    "word_parts": ("the name of a feature", "'auto', None or the name of a feature"),
    "predict_with": ("a structure", "'auto', 'chain' or a structure"),
    "n_jobs": ("a number of processes", "1 or more, -1 for one per core, or None"),
}
"""What a field must be and what to use instead, for error messages."""

MAY_BE_0 = {"max_seconds", "reductions", "learning_rounds", "node_steps", "transition_steps", "hyper_steps"}
"""Numbers of an optimiser that may be 0, beside its tolerances."""


def _check_fields(owner: Any) -> None:
    """InputError for the first field of an option object whose value is not possible."""
    is_optimizer = not isinstance(owner, Options | Prior | Family | Custom)
    for name, value in vars(owner).items():
        what, remedy = _WORDS.get(name, ("", ""))
        possible = not what or _POSSIBLE[name](value)
        if name in WHOLE and not is_optimizer and not (value is None and name in ("n_inducing", "rank")):
            least = WHOLE[name]
            possible = isinstance(value, Integral) and least <= int(value) < 2**63
            what, remedy = f"a whole number of at least {least}", f"{least} or more"
            if possible and name == "n_draws" and int(value) > MOST_DRAWS:
                possible, what, remedy = False, f"at most {MOST_DRAWS:,}", f"{MOST_DRAWS:,} or fewer"
            elif name == "n_draws":
                possible, remedy = (
                    possible or (isinstance(value, str) and value == "auto"),
                    "'auto', or 0 or more",
                )
        if not possible:
            raise InputError(name, f"must be {what}, got {value!r}", f"use {remedy}")
        known = _CHOICES.get(name, ())
        if known and (isinstance(value, str) or name not in ("posterior", "inference")):
            plain = bool(value) if isinstance(value, np.bool_) else value
            # 1 == True: numbers are not choices.
            if not any(plain is k or (isinstance(k, str) and plain == k) for k in known):
                remedy = f"use one of {', '.join(map(str, known))}"
                raise InputError(name, f"{value!r} is not known", remedy)
        if is_optimizer and isinstance(value, int | float) and not isinstance(value, bool):
            zero = name in MAY_BE_0 or name.endswith("tolerance")
            if not (value >= 0 if zero else value > 0):
                problem = f"{type(owner).__name__}({name}={value!r})"
                remedy = f"use a number {'of at least' if zero else 'above'} 0"
                raise InputError("inference", problem, remedy)
    if isinstance(owner, Inducing | Mixture) and owner.rank is not None and owner.covariance != "low-rank":
        problem = f"{owner.rank} is given beside covariance={owner.covariance!r}"
        raise InputError("rank", problem, "use covariance='low-rank', or leave it out")
    if isinstance(owner, Mixture) and owner.entropy == "exact" and owner.n_components > 1:
        problem = f"'exact' has no closed form with {owner.n_components} components"
        raise InputError("entropy", problem, "use 'bhattacharyya' or 'jensen'")


def check_class_weight(given: Any, classes: Sequence[str] | None = None) -> None:
    """Checks ``class_weight`` alone; ``classes`` : the labels that it may name."""
    if given is None or (isinstance(given, str) and given == "balanced"):
        return
    if not isinstance(given, Mapping):
        remedy = "use 'balanced', or a dict from label to factor"
        raise InputError("class_weight", f"{given!r} is not known", remedy)
    for label, weight in given.items():
        if not (isinstance(weight, Real) and 0 < float(weight) < np.inf):
            problem = f"must be a factor above 0, got {weight!r} for {label!r}"
            raise InputError("class_weight", problem, "use a number above 0")
        if classes is not None and label not in classes:
            problem = f"{label!r} is not a label of the training data"
            raise InputError("class_weight", problem, f"use {', '.join(classes)}")


def device_of(name: Any) -> str:
    """The torch device that ``name`` stands for; 'auto' is the GPU where there is one. InputError if it
    cannot be used."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=torch.device(str(name)))
    except (RuntimeError, TypeError, AssertionError):
        remedy = "use 'auto', 'cpu', or 'cuda' where there is a GPU"
        raise InputError("device", f"{name!r} cannot be used here", remedy) from None
    return str(name)


SAVED: dict[str, type] = {
    kind.__name__: kind
    for kind in (Prior, Weights, Inducing, Mixture, SecondOrder, Minibatch, Natural, Adam)
}
"""Option objects that a model file keeps."""

NOT_OF_THE_FIT = ("inference", "n_draws", "decode", "costs", "class_weight", "device", "verbose")
"""Parameters that a fit does not depend on, so that an interrupted fit may go on with other values of them;
and the optimiser, which its plan names."""


def to_json(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that JSON can hold: numbers, strings, lists, dicts and option objects. The device is
    left out: another machine may not have it."""
    found = {}
    for name, value in params.items():
        if isinstance(value, Spec):
            value = {"option": "Spec"} | value.to_json()
        elif type(value) in SAVED.values():
            value = {"option": type(value).__name__} | asdict(value)
        plain = _plain(value)
        if (value is None or plain is not None) and name != "device":
            found[name] = plain
    return found


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
    """Identifies a fit with these options among fits with others."""
    names = [f.name for f in fields(options) if f.init and f.name not in NOT_OF_THE_FIT]
    found = {name: _told(getattr(options, name)) for name in names}
    if isinstance(options.structure, Custom):
        found["structure"] = _told(options.structure.log_prob), _told(options.structure.predict_with)
    return found


def _told(value: Any) -> Any:
    """Identifies the value of a parameter where its text may not: by the code of functions, the numbers of
    kernels."""
    if isinstance(value, torch.nn.Module):
        return type(value).__name__, [(k, v.tolist()) for k, v in value.state_dict().items()]
    code = getattr(value, "__code__", None)
    if code is not None:
        cells = [repr(cell.cell_contents) for cell in getattr(value, "__closure__", None) or ()]
        return value.__qualname__, code.co_code.hex(), repr(code.co_consts), cells
    if callable(value) or isinstance(value, Structure):
        return type(value).__qualname__, repr(sorted(getattr(value, "__dict__", {}).items()))
    plain = _plain(value)
    return repr(value if plain is None else plain)


def _plain(value: Any) -> Any:
    """The value as JSON gives it back, with NumPy's numbers and arrays made plain; None where JSON cannot
    hold it."""
    try:
        return json.loads(json.dumps(value, default=lambda number: number.tolist()))
    except (AttributeError, TypeError, ValueError):
        return None
