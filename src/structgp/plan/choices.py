"""The choices that a plan is made of: structure, kernel, posterior, optimiser, gradient estimator.

Each function reads the user's options, the structure and the features, and returns a value with its
reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from gpytorch.kernels import Kernel

from structgp.data.examples import Examples
from structgp.data.shards import ShardedExamples
from structgp.data.vocabulary import Block
from structgp.errors import InputError
from structgp.gp import RANK
from structgp.gp.kernels import RelevanceKernel, has_weights
from structgp.gp.kernels.build import KernelChoice
from structgp.gp.low_rank_fit import PASSES
from structgp.inference import Adam, LearnScales, Minibatch, Natural, Optimizer, SecondOrder
from structgp.inference.estimators import Estimator, Pathwise
from structgp.inference.minibatch import MANY_TOKENS
from structgp.paper import LbfgsBlocks, MixtureFit, Preset
from structgp.plan.optimizers import ESTIMATORS, NAMED
from structgp.plan.options import Family, Inducing, Mixture, Options, Prior, Weights
from structgp.structures import BlackBox, Chain, Differences, Rules, Spec, Structure, as_structure
from structgp.structures.choose import Custom

T = TypeVar("T")

N_INDUCING = 1000
CHEAP_DIFFERENCES = 400
"""Values that a gradient by differences may take, for each draw and sequence."""

OPEN_DRAWS = 32
"""Draws of pathwise gradients for natural gradients and L-BFGS, where the user names none."""

MOST_BYTES = 1 << 29
"""Memory of the covariance factors. A round holds a few times as much."""

MOST_WORK = 2e12
"""Multiplications per round: a minute or two on one core."""

ASKED = "asked for"
PAPER = "as in the paper"

LEARNED_KERNELS = {"categorical": "relevance", "sparse": "relevance", "dense": "rbf"}
FIXED_KERNELS = {"categorical": "template", "sparse": "linear", "dense": "rbf"}
"""What 'auto' stands for, by kind of feature, where the fit itself learns scales and where it does not."""


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A value, and in a few words why."""

    value: T
    reason: str


NO_INDUCING: Choice[int | None] = Choice(None, "weights need none")
UNCORRELATED = Choice("diagonal", "weights have no correlations")
TIGHTER = Choice("bhattacharyya", "exact for one component, and tighter than the paper's for several")


# -- the structure ---------------------------------------------------------------------------------


def structure_of(options: Options, examples: Examples | ShardedExamples) -> Choice[Structure]:
    """The structure, under the constraints if it is the chain."""
    structure = as_structure(options.structure)
    answers = options.structure.predict_with if isinstance(options.structure, Custom) else None
    for name, chosen in (("structure", structure), ("predict_with", answers)):
        if type(chosen) is Chain and chosen.rules is not None:
            raise InputError(name, "a chain with rules", "declare them as constraints")
    if isinstance(structure, BlackBox):
        structure.probe(examples.n_labels)
    if examples.some_missing and not structure.handles_missing:
        problem = f"labels are missing, and {name_of(structure)} does not say what to do with them"
        remedy = "set its attribute handles_missing if it knows -1 for a missing label, or use 'chain'"
        raise InputError("y", problem, remedy)
    if type(structure) is Chain:
        allowed = examples.constraints
        return Choice(Chain(None if allowed is None else Rules.of(allowed), structure.spec), ASKED)
    if not isinstance(structure, BlackBox) or structure.has_gradient:
        return Choice(structure, ASKED)
    cost = Differences.evaluations(examples.typical_length, examples.n_labels)
    if cost <= CHEAP_DIFFERENCES and _may_be_weights(options, examples.encoder.blocks):
        return Choice(Differences(structure), "slopes by differences of values, which are cheap here")
    return Choice(structure, ASKED)


def name_of(structure: Structure) -> str:
    return repr(structure.inner) if isinstance(structure, Differences) else type(structure).__name__


def spec_of(structure: Structure, prior: Prior) -> Spec:
    """The declared structure whose templates have potentials, and which answers unless a structure of the
    user's own does. A transition sd of 0 leaves transitions out."""
    spec, transition = structure.spec, structure.spec.next
    if float(prior.transition_sd) > 0 or transition is None or transition.is_constant:
        return spec if spec.likelihood == "exact" else Spec(spec.templates)
    problem = f"0 leaves transitions out, and {spec} gives them features"
    raise InputError("transition_sd", problem, "use a transition_sd above 0, or chain(order=0)")


def check_transition_features(spec: Spec, optimizer: Optimizer, family: Family, on_disk: bool) -> None:
    """InputError where transitions have features and this fit cannot learn their weights."""
    if on_disk:
        problem, remedy = "shards do not keep the features of transitions", "pass X and y"
    elif family.transition_covariance == "full":
        problem = "a full covariance is for one table of transition scores"
        remedy = "use transition_covariance='diagonal'"
    elif not isinstance(optimizer, SecondOrder | Minibatch):
        problem = f"the {optimizer.name!r} optimiser does not fit weights of transitions"
        remedy = "use 'second-order' or 'minibatch', with a structure that gives its curvature"
    else:
        return
    problem = f"{spec} gives transitions features, and {problem}"
    raise InputError("structure", problem, f"{remedy}, or use chain() without features")


def predictor_of(options: Options, structure: Structure) -> Structure | None:
    """The structure that answers; None for the chain."""
    custom = options.structure if isinstance(options.structure, Custom) else None
    asked: str | Structure = "auto" if custom is None else custom.predict_with
    if not isinstance(asked, Structure):
        if asked == "chain" or not structure.has_marginals:
            return None
        asked = structure
    if not asked.has_marginals:
        problem = f"{type(asked).__name__} offers no marginals"
        raise InputError("predict_with", problem, "use 'chain', or a structure that does")
    if type(asked) is Chain:
        return None
    if options.constraints is not None:
        remedy = "use structure=Custom(..., predict_with='chain')"
        raise InputError("constraints", f"{name_of(asked)} does not know them", remedy)
    return asked


# -- the posterior ---------------------------------------------------------------------------------


def learns_on_bound(options: Options, structure: Structure, blocks: Sequence[Block]) -> bool:
    """Whether the fit itself learns what each feature is worth."""
    if not options.learns_kernel:
        return False
    if options.optimizer is not None:
        learns = isinstance(options.optimizer, SecondOrder | Minibatch)
        return learns and options.optimizer.learn_scales in ("auto", "all")  # type: ignore[attr-defined]
    if options.family is not None and options.family.transition_covariance == "full":
        return False
    return structure.has_curvature or (structure.has_local_curvature and _may_be_weights(options, blocks))


def _may_be_weights(options: Options, blocks: Sequence[Block]) -> bool:
    """Whether a second-order fit of weights is possible, apart from what it asks of the structure."""
    return (
        options.optimizer is None
        and options.learns_kernel
        and isinstance(options.kernel, str)
        and options.kernel in ("auto", "relevance")
        and not isinstance(options.family, Inducing | Mixture)
        and getattr(options.family, "transition_covariance", None) != "full"
        and all(block.kind != "dense" for block in blocks)
    )


def kernel_of(choice: KernelChoice, blocks: Sequence[Block], on_bound: bool) -> Choice[KernelChoice]:
    """The kernel of each kind of feature, with 'auto' replaced by a name: one relevance per feature where
    the fit learns it, else one weight per template; RBF on dense features."""
    is_auto = isinstance(choice, str) and choice == "auto"
    if not is_auto and not isinstance(choice, Mapping):
        return Choice(choice, ASKED)
    given = {} if isinstance(choice, str) else dict(choice)
    usual = LEARNED_KERNELS if on_bound else FIXED_KERNELS
    for block in blocks:
        name = given.get(block.kind, "auto")
        given[block.kind] = usual[block.kind] if isinstance(name, str) and name == "auto" else name
    learned = "the fit learns what each feature is worth"
    reason = learned if on_bound else "the fit does not learn single features"
    return Choice(given, reason if is_auto else ASKED)


def _linear_in_weights(kernel: KernelChoice) -> bool:
    if isinstance(kernel, Kernel):
        return has_weights(kernel)
    parts = kernel.values() if isinstance(kernel, Mapping) else [kernel]
    return all(isinstance(k, RelevanceKernel) or (isinstance(k, str) and k == "relevance") for k in parts)


def family_of(options: Options, kernel: KernelChoice, on_bound: bool) -> Choice[Family]:
    """Weights or inducing inputs; InputError if what is asked for does not go together."""
    asked = options.family
    if isinstance(asked, Inducing | Mixture):
        return Choice(asked, ASKED)
    linear = _linear_in_weights(kernel)
    if asked is None and on_bound and linear:
        return Choice(Weights(), "the fit learns a kernel that is linear in features")
    if asked is None:
        reason = "the kernel is not linear in features"
        if not on_bound:
            reason = PAPER if options.preset else "the fit does not learn the kernel in closed form"
        return Choice(Inducing(), reason)
    if not on_bound:
        problem = (
            "'weights' is for the fit that learns the kernel in closed form, and inference, learn_scales, "
        )
        problem += (
            "learn_kernel or transition_covariance ask for another, or the structure has no curvature"
        )
        raise InputError("posterior", problem, "leave those at 'auto', or use posterior='inducing'")
    if not linear:
        problem = "'weights' needs a kernel that is linear in features that can be told apart"
        remedy = "use kernel='relevance' on categorical or sparse features, or posterior='inducing'"
        raise InputError("posterior", problem, remedy)
    return Choice(asked, ASKED)


def basis_of(family: Family, structure: Structure, preset: Preset | None) -> Choice[str]:
    """'contrast' or 'label'."""
    if family.basis == "contrast" and not structure.ignores_shift:
        problem = f"'contrast' leaves out a direction that {name_of(structure)} may depend on"
        remedy = "use 'auto' or 'label', or a structure whose ignores_shift is True"
        raise InputError("basis", problem, remedy)
    if family.basis != "auto":
        return Choice(family.basis, ASKED)
    if preset is not None:
        return Choice(preset.basis, PAPER)
    if structure.ignores_shift:
        return Choice("contrast", "the structure ignores what all labels share")
    return Choice("label", "the structure may depend on what all labels share")


def inducing_of(family: Family, preset: Preset | None) -> tuple[Choice[int | None], Choice[str]]:
    """Most inducing inputs, and the entropy of a mixture."""
    most: Choice[int | None] = NO_INDUCING
    if not isinstance(family, Weights):
        most = Choice(N_INDUCING, "as many as tell the training tokens apart")
        if family.n_inducing is not None:
            most = Choice(int(family.n_inducing), ASKED)
        elif preset is not None:
            most = Choice(preset.n_inducing, PAPER)
    jensen = isinstance(family, Mixture) and family.entropy == "jensen"
    return most, Choice("jensen", ASKED) if jensen else TIGHTER


def covariance_of(
    family: Family, optimizer: Optimizer, preset: Preset | None, R: int, M: int, N: int
) -> tuple[Choice[str], int]:
    """The form of the covariances of inducing values, and its rank (0 unless low-rank).

    With R functions, K components, M inducing inputs, N tokens and rank r,

        full        8 K R M^2 bytes        R (N M^2 + M^3) multiplications per round
        low-rank    8 K R M (r + 1)        4 R N M r, two products with the precision, each there and back
        diagonal    8 K R M                R N M T, next to nothing

    and 'auto' is the first of them that keeps within ``MOST_BYTES`` and ``MOST_WORK``. Natural gradients
    solve for the means with the whole precision of a function, so their time is the same under every form
    and only memory decides. SAGA holds gradients in the covariance itself, which a low-rank one never
    forms.
    """
    assert isinstance(family, Inducing | Mixture)
    first = first_stage(optimizer)
    rank = min(M, RANK if family.rank is None else int(family.rank))
    if family.covariance != "auto":
        return Choice(family.covariance, ASKED), rank if family.covariance == "low-rank" else 0
    if preset is not None:
        return Choice("full", PAPER), 0
    pieces = int(getattr(family, "n_components", 1)) * R
    space = {"full": 8 * pieces * M**2, "low-rank": 8 * pieces * M * (rank + 1)}
    work = {"full": R * (N * M**2 + M**3), "low-rank": 2 * PASSES * R * N * M * rank}
    if isinstance(first, Natural):
        work = dict.fromkeys(work, 0)
    fits = {name: space[name] <= MOST_BYTES and work[name] <= MOST_WORK for name in space}
    price = f"full ones take {space['full'] / 1e9:.2g} GB"
    price += f" and {work['full']:.1e} multiplications per round" if work["full"] else ""
    if fits["full"]:
        return Choice("full", price), 0
    cheaper = rank < M and work["low-rank"] <= work["full"]
    if fits["low-rank"] and cheaper and isinstance(first, Adam | LbfgsBlocks | Natural | SecondOrder):
        return Choice("low-rank", price), rank
    return Choice("diagonal", price), 0


# -- the optimiser ---------------------------------------------------------------------------------


def first_stage(optimizer: Optimizer) -> Optimizer:
    """The optimiser of one component, where a mixture starts from one."""
    return first_stage(optimizer.first) if isinstance(optimizer, MixtureFit) else optimizer


def optimizer_of(
    options: Options, structure: Structure, family: Family, on_bound: bool, n_tokens: int = 0
) -> Choice[Optimizer]:
    """The optimiser that ``inference`` stands for, with its ``learn_scales`` settled.

    'auto' takes the second-order fit if the structure gives its curvature, batch by batch where weights are
    fitted to very many tokens (``n_tokens``), else natural gradients: pathwise where the structure can be
    differentiated, surrogate plus residual where it only has values. A mixture starts from one component
    fitted so, and goes on with Adam."""
    asked, reason = options.optimizer, ASKED if isinstance(options.inference, str) else "given"
    if asked is None:
        asked, reason = _open_optimizer(structure, family, n_tokens)
    if getattr(asked, "learn_scales", None) == "auto":
        scales: LearnScales = "all" if on_bound else "transitions"
        asked = replace(asked, learn_scales=scales)  # type: ignore[type-var]
    if getattr(family, "n_components", 1) > 1 and isinstance(asked, SecondOrder | Natural):
        scales = asked.learn_scales
        # What the first stage has learned of the kernel stays.
        after = Adam(0.01, learn_scales="transitions" if scales == "all" else scales)
        asked, reason = MixtureFit(asked, then=after), f"{reason}; a mixture starts from one component"
    return Choice(asked, reason)


def _open_optimizer(structure: Structure, family: Family, n_tokens: int) -> tuple[Optimizer, str]:
    """The optimiser where the user leaves it open."""
    weights = isinstance(family, Weights)
    closed = structure.has_curvature and family.transition_covariance != "full"
    closed = closed or (weights and structure.has_local_curvature)
    if weights and closed and n_tokens >= MANY_TOKENS:
        return NAMED["minibatch"], "there is much data"
    if closed and isinstance(structure, Differences):
        return NAMED["second-order"], "values alone, and few enough of them tell slope and curvature"
    if closed:
        return NAMED["second-order"], "the structure gives its curvature"
    how = "pathwise gradients" if structure.has_gradient else "gradients from values alone"
    return NAMED["natural"], how


def gradient_of(first: Optimizer, structure: Structure) -> Choice[Estimator]:
    """The gradient estimator of an optimiser's first stage: pathwise where the structure has a gradient,
    else the surrogate."""
    name, draws = getattr(first, "gradient", "auto"), getattr(first, "n_draws", None)
    reason = ASKED
    if name == "auto":
        name = "pathwise" if structure.has_gradient else "surrogate"
        can = "can" if structure.has_gradient else "cannot"
        reason = f"the structure {can} be differentiated"
    estimator = ESTIMATORS[name]
    if estimator.needs_gradient and not structure.has_gradient:
        problem = f"{name!r} needs a structure that can be differentiated"
        raise InputError("gradient", problem, "use gradient='auto', or write the structure in torch")
    if draws is None and isinstance(estimator, Pathwise) and isinstance(first, Natural | LbfgsBlocks):
        draws = OPEN_DRAWS
    return Choice(estimator if draws is None else estimator.with_draws(int(draws)), reason)
