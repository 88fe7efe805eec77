"""The choices that a plan is made of: structure, kernel, posterior, optimiser, gradient estimator.

Each function reads the user's options, the structure and the features, and returns a value with its
reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from gpytorch.kernels import Kernel

from structgp.data.annotations import Given
from structgp.data.encode import FeatureEncoder
from structgp.data.examples import Examples
from structgp.data.shards import ShardedExamples
from structgp.data.vocabulary import Block
from structgp.errors import InputError
from structgp.gp import RANK
from structgp.gp.kernels import has_weights
from structgp.gp.kernels.build import KernelChoice
from structgp.gp.kernels.dense import BY_NAME
from structgp.gp.low_rank_fit import PASSES
from structgp.inference import Adam, LearnScales, Minibatch, Natural, Optimizer, SecondOrder
from structgp.inference.minibatch import MANY_TOKENS
from structgp.paper import LbfgsBlocks, MixtureFit, Preset
from structgp.plan.label_cost import MANY_LABELS, MANY_TRANSITIONS, leaves_out_transitions, n_transitions
from structgp.plan.options import NAMED, Family, Inducing, Mixture, Options, Weights
from structgp.structures import (
    BlackBox,
    Chain,
    Custom,
    Declared,
    Differences,
    Piecewise,
    Rules,
    Segments,
    Spec,
    Structure,
    as_structure,
    chain,
    choose,
    structure_for,
)

T = TypeVar("T")

N_INDUCING = 1000
"""Largest number of inducing inputs, unless a second-order fit can afford one per token."""

ALL_TOKENS_WORK = 2e11
"""Multiplications per round up to which a fit can afford one inducing input per token: some seconds on one
core. With 1,000 inducing inputs for the 1,492 tokens of 60 sequences of basenp, under a kernel that is not
learned and a data weight of 24, the bound was 230 nats lower, and the NLL of other sequences .214 instead
of .199."""

CHEAP_DIFFERENCES = 400
"""Largest number of function values per draw and sequence that a gradient by differences may take."""

FEWEST_SEQUENCES = 5
"""Number of sequences below which the data count once: so few left-out sequences cannot tell anything."""

MANY_DENSE_TOKENS = 10_000
"""Number of tokens from which data with dense features count once: cross-validation would take minutes, and
with this many the prior matters little."""

BATCHWISE_TOKENS = 100_000
"""Number of tokens from which weights are fitted batch by batch. With two draws per visit, that ends short
of the optimum: on 60 TRAINING announcements of ``experiments.seminars`` (18,000 tokens) the bound on fresh
draws was -1,341 where the second-order fit has -952, and the NLL of 60 others .0549 against .0525, in a
third of the time. A second-order fit to 100,000 tokens takes some four minutes of one core with the chain,
and eight with links."""

FOR_MANY_LABELS: dict[str, Any] = {"batch_tokens": 500, "steps": 4, "n_draws": 2, "single": True}
"""How weights are fitted where transitions are left out because of the number of labels: a second-order fit
holds 16 draws of all scores and ten copies of all weights. On generated data of 900 tokens with 300 labels
this took 1.3 s instead of 12 s (with contrasts 19 s), and the NLL of 600 other tokens was .85 (.80,
.92)."""

SETTLED_TOKEN = 0.02
"""Nats per token by which the bound of such a fit may still change when it ends: two draws cannot tell
less. Not chosen on data."""

MOST_BYTES = 1 << 29
"""Largest number of bytes of the covariance factors. A round needs a few times as much."""

MOST_WORK = 2e12
"""Largest number of multiplications per round: a minute or two on one core."""

ASKED = "asked for"
DEFAULT = "default"
AS_BEFORE = "as in the earlier fit"
PAPER = "as in the paper"

LEARNED_KERNELS = {"categorical": "relevance", "sparse": "relevance", "dense": "linear+rbf"}
FIXED_KERNELS = {"categorical": "template", "sparse": "linear", "dense": "rbf"}
"""Kernels that 'auto' stands for, by kind of feature, where the fit itself learns scales and where it does
not."""

WIDE, REPEATED = 32, 20
"""Number of dense columns from which their kernel is linear, if other features tell words apart. Word
vectors have more columns, measurements fewer. A smooth function of vectors hardly adds to templates of
words: cross-validation within four TRAINING sets of ``experiments.vectors`` (recipes and chunking) gave an
NLL of .355 with the linear part alone and .356 with an RBF of 300 inducing inputs, which took twice the
time. The second number is the tokens per known feature up to which features are taken to tell words apart
(``tells_words_apart``): templates of words have a feature for every few tokens, flags and tags one for
hundreds. Neither number was chosen on data."""


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A value, and the reason for it in a few words."""

    value: T
    reason: str


VERY_MANY_LABELS = "there are very many labels"
NO_INDUCING: Choice[int | None] = Choice(None, "weights need none")
UNCORRELATED = Choice("diagonal", "weights have no correlations")
CORRELATED = Choice("full", "weights of dense features are correlated")
PLAIN_BAYES: Choice[float | None] = Choice(1.0, "Bayes' rule")
PLAIN_SPREAD = Choice(1.0, "Bayes' rule")
OWN = "the structure is your own, and is not cross-validated: compare it with Prior(data_weight=1)"
UNCONSTRAINED: Choice[Any] = Choice(None, DEFAULT)
TOKENS = Choice("accuracy", "labels are not spans")
TIGHTER = Choice("bhattacharyya", "exact for one component, and tighter than the paper's for several")


def shown(value: Any) -> Any:
    """The value of a choice as JSON can hold it and as messages name it."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {k: shown(v) for k, v in value.items()}
    if isinstance(value, Differences):
        return shown(value.inner)
    if type(value) in (Chain, Piecewise, Declared, Segments):
        names = [name for name, spec in choose.NAMED.items() if spec == value.spec]
        return names[0] if names else repr(value.spec)
    if isinstance(value, Family):
        return type(value).__name__.lower()
    named = getattr(value, "name", None)
    if isinstance(named, str):
        return named
    return type(value).__name__ if isinstance(value, Kernel | Structure) else repr(value)


def structure_of(options: Options, examples: Examples | ShardedExamples) -> Choice[Structure]:
    """The structure, under the constraints if it is the chain or a declared one."""
    structure = as_structure(options.structure)
    answers = options.structure.predict_with if isinstance(options.structure, Custom) else None
    for name, chosen in (("structure", structure), ("predict_with", answers)):
        if type(chosen) is Chain and chosen.rules is not None:
            raise InputError(name, "a chain with rules", "declare them as constraints")
    if isinstance(structure, BlackBox):
        structure.probe(examples.n_labels)
    if examples.some_missing and not structure.handles_missing:
        problem = f"labels are missing, and {shown(structure)} does not say what to do with them"
        remedy = "set its attribute handles_missing if it knows -1 for a missing label, or use 'chain'"
        raise InputError("y", problem, remedy)
    if type(structure) is Chain:
        reason = DEFAULT if structure.spec == Structure.spec else ASKED
        is_open = isinstance(options.structure, str) and options.preset is None  # no spec was asked for
        if is_open and leaves_out_transitions(examples):
            why = f"the data can hold few of the {examples.n_labels**2:,} transitions"
            return Choice(Chain(spec=chain(order=0)), why)
        if examples.constraints is not None:
            structure = Chain(Rules.of(examples.constraints), structure.spec)
        return Choice(structure, reason)
    if isinstance(structure, Declared):
        rules = None if examples.constraints is None else Rules.of(examples.constraints)
        return Choice(structure_for(structure.spec, rules, examples.labels.classes, True), ASKED)
    if isinstance(structure, BlackBox) and not structure.has_gradient:
        cost = Differences.evaluations(examples.typical_length, examples.n_labels)
        if cost <= CHEAP_DIFFERENCES and _may_be_weights(options, examples.encoder.blocks):
            return Choice(Differences(structure), "slopes by differences of values, which are cheap here")
    return Choice(structure, ASKED)


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
    what = "transitions" if spec.is_chain else "tuples"
    problem = f"{spec} gives {what} features, and {problem}"
    raise InputError("structure", problem, f"{remedy}, or use chain() without features")


def annotators_of(given: Given, structure: Structure, optimizer: Optimizer) -> Choice[str]:
    """What is learned of annotators; InputError where structure or optimiser cannot learn from them."""
    if not structure.takes_evidence:
        problem = f"labels are those of several annotators, and {shown(structure)} cannot weigh them"
        raise InputError("y", problem, "use 'chain' or another declared structure, or pass one labelling")
    if not isinstance(optimizer, SecondOrder):
        problem = f"the {optimizer.name!r} optimiser does not learn what annotators' labels are worth"
        raise InputError("inference", problem, "use 'auto' or 'second-order', or pass one labelling")
    each = "one confusion matrix for each"
    if given.sequential:
        each = "one confusion matrix for each and each label they gave before"
    return Choice(f"{given.n_annotators}, {each}", "labels are those of several annotators")


def learns_on_bound(options: Options, structure: Structure, blocks: Sequence[Block]) -> bool:
    """True if the fit itself learns what each feature is worth."""
    if not options.learns_kernel:
        return False
    if options.optimizer is not None:
        learns = isinstance(options.optimizer, SecondOrder | Minibatch)
        return learns and options.optimizer.learn_scales in ("auto", "all")  # type: ignore[attr-defined]
    if options.family is not None and options.family.transition_covariance == "full":
        return False
    return structure.has_curvature or (structure.has_local_curvature and _may_be_weights(options, blocks))


def _may_be_weights(options: Options, blocks: Sequence[Block]) -> bool:
    """True if a second-order fit of weights is possible, apart from what it requires of the structure."""
    return (
        options.optimizer is None
        and options.learns_kernel
        and not isinstance(options.family, Inducing | Mixture)
        and getattr(options.family, "transition_covariance", None) != "full"
        and are_weights(options.kernel, blocks)
    )


def are_weights(kernel: KernelChoice, blocks: Sequence[Block]) -> bool:
    """True if the kernel is a prior on weights: on those of single features, or any kernel on dense
    columns."""

    def one(part: Any, kind: str) -> bool:
        if kind == "dense":
            return isinstance(part, Kernel) or part in ("auto", *BY_NAME)
        return part in ("auto", "relevance") if isinstance(part, str) else has_weights(part)

    if isinstance(kernel, Mapping):
        return all(one(kernel.get(block.kind, "auto"), block.kind) for block in blocks)
    return all(one(kernel, block.kind) for block in blocks)


def tells_words_apart(encoder: FeatureEncoder, n_tokens: int) -> bool:
    """True if there are so many other features that the dense ones need not tell words apart."""
    known = sum(map(len, encoder.values)) + encoder.n_sparse
    return known >= max(WIDE, n_tokens / REPEATED)


def kernel_of(
    choice: KernelChoice, blocks: Sequence[Block], on_bound: bool, beside_words: bool = False
) -> Choice[KernelChoice]:
    """The kernel of each kind of feature, with 'auto' replaced by a name: one relevance per feature where
    the fit learns it, else one weight per template; on dense features linear plus RBF, RBF alone, or
    linear where there are many columns (``WIDE``) beside features that tell words apart."""
    is_auto = isinstance(choice, str) and choice == "auto"
    if not is_auto and not isinstance(choice, Mapping):
        return Choice(choice, ASKED)
    given = {} if isinstance(choice, str) else dict(choice)
    reason = ASKED
    if is_auto:
        learned = "the fit learns what each feature is worth"
        reason = learned if on_bound else "the fit does not learn single features"
    usual = dict(LEARNED_KERNELS if on_bound else FIXED_KERNELS)
    for block in blocks:
        name = given.get(block.kind, "auto")
        if isinstance(name, str) and name == "auto":
            name = usual[block.kind]
            if on_bound and beside_words and _is_wide(block):
                name = "linear"
                reason += f"; {WIDE} dense columns or more beside templates of words have no smooth part"
        given[block.kind] = name
    return Choice(given, reason)


def _is_wide(block: Block) -> bool:
    return block.kind == "dense" and block.stop is not None and block.stop - block.start >= WIDE


def family_of(
    options: Options, kernel: KernelChoice, blocks: Sequence[Block], on_bound: bool
) -> Choice[Family]:
    """Weights or inducing inputs; InputError if what is asked for does not go together."""
    asked = options.family
    if isinstance(asked, Inducing | Mixture):
        return Choice(asked, ASKED)
    linear = are_weights(kernel, blocks)
    if asked is None and on_bound and linear:
        return Choice(Weights(), "the fit learns a kernel that is a prior on weights")
    if asked is None:
        reason = "the kernel is not linear in features"
        if not on_bound:
            reason = PAPER if options.preset else "the fit does not learn the kernel in closed form"
        return Choice(Inducing(), reason)
    if not on_bound:
        problem = "'weights' is for the fit that learns the kernel in closed form, and inference, "
        problem += "learn_scales, learn_kernel or transition_covariance ask for another, or the structure "
        problem += "has no curvature"
        raise InputError("posterior", problem, "leave those at 'auto', or use posterior='inducing'")
    if not linear:
        problem = "'weights' needs a kernel that is a prior on the weights of features"
        remedy = (
            "use kernel='auto' or 'relevance' for categorical or sparse features, or posterior='inducing'"
        )
        raise InputError("posterior", problem, remedy)
    return Choice(asked, ASKED)


def basis_of(family: Family, structure: Structure, preset: Preset | None, V: int) -> Choice[str]:
    """'contrast' or 'label'; 'label' for very many labels, since contrasts are then nearly the labels
    themselves, while every score is a sum over all of them."""
    if family.basis == "contrast" and not structure.ignores_shift:
        problem = f"'contrast' leaves out a direction that {shown(structure)} may depend on"
        remedy = "use 'auto' or 'label', or a structure whose ignores_shift is True"
        raise InputError("basis", problem, remedy)
    if family.basis != "auto":
        return Choice(family.basis, ASKED)
    if preset is not None:
        return Choice(preset.basis, PAPER)
    if V >= MANY_LABELS:
        return Choice("label", f"sums over {V:,} contrasts would take long")
    if structure.ignores_shift:
        return Choice("contrast", "the structure ignores what all labels share")
    return Choice("label", "the structure may depend on what all labels share")


def n_inducing_of(
    family: Inducing | Mixture, preset: Preset | None, optimizer: Optimizer, R: int, N: int
) -> Choice[int | None]:
    """Largest number of inducing inputs, for R functions and N tokens; the same in cross-validation, where
    fits have fewer tokens."""
    if family.n_inducing is not None:
        return Choice(int(family.n_inducing), ASKED)
    if preset is not None:
        return Choice(preset.n_inducing, PAPER)
    affordable = 2 * R * N**3 <= ALL_TOKENS_WORK and 8 * R * N**2 <= MOST_BYTES
    most = max(N, N_INDUCING) if affordable and isinstance(optimizer, SecondOrder) else N_INDUCING
    return Choice(most, "as many as tell the training tokens apart")


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
    first = getattr(optimizer, "first", optimizer)
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


def optimizer_of(
    options: Options,
    structure: Structure,
    family: Family,
    on_bound: bool,
    n_tokens: int = 0,
    many_labels: bool = False,
) -> Choice[Optimizer]:
    """The optimiser that ``inference`` stands for, with its ``learn_scales`` settled.

    'auto' takes the second-order fit if the structure gives its curvature, batch by batch where weights are
    fitted to very many tokens (``n_tokens``) or labels (``many_labels``), else natural gradients: pathwise
    where the structure can be differentiated, surrogate plus residual where it only has values. A mixture
    starts from one component that is fitted like this, and goes on with Adam."""
    asked, reason = options.optimizer, ASKED
    if asked is None:
        weights = isinstance(family, Weights)
        closed = structure.has_curvature and family.transition_covariance != "full"
        closed = closed or (weights and structure.has_local_curvature)
        asked, reason = NAMED["second-order"], "the structure gives its curvature"
        if not closed:
            asked = NAMED["natural"]
            reason = "pathwise gradients" if structure.has_gradient else "gradients from values alone"
        elif weights and n_tokens >= BATCHWISE_TOKENS:
            asked, reason = NAMED["minibatch"], "there is much data"
        elif weights and many_labels:
            batchwise: Any = NAMED["minibatch"]
            asked, reason = replace(batchwise, **FOR_MANY_LABELS), VERY_MANY_LABELS
        elif isinstance(structure, Differences):
            reason = "values alone, and few enough of them tell slope and curvature"
    if getattr(asked, "learn_scales", None) == "auto":
        scales: LearnScales = "all" if on_bound else "transitions"
        asked = replace(asked, learn_scales=scales)  # type: ignore[type-var]
    if getattr(family, "n_components", 1) > 1 and isinstance(asked, SecondOrder | Natural):
        scales = asked.learn_scales
        # What the first stage has learned of the kernel stays.
        after = Adam(0.01, learn_scales="transitions" if scales == "all" else scales)
        asked, reason = MixtureFit(asked, then=after), f"{reason}; a mixture starts from one component"
    return Choice(asked, reason)


def has_much_data(examples: Examples | ShardedExamples) -> bool:
    """True if there are so many tokens that what a model expects of them is close to what it expects of
    other tokens."""
    return examples.n_tokens >= (MANY_DENSE_TOKENS if _has_dense(examples) else MANY_TOKENS)


def has_too_much_to_repeat(examples: Examples | ShardedExamples) -> bool:
    """True if there are so many tokens that the data count once, without cross-validation. As long as all
    weights are fitted at once, cross-validation takes less time than the fit. On 160 TRAINING announcements
    of ``experiments.seminars`` (48,000 tokens), the NLL of 80 others, averaged over three parts, is .0392,
    .0382 and .0388 where sequences count 2, 8 and 32 times, and span F1 86.3, 87.0 and 86.8 %."""
    return examples.n_tokens >= (MANY_DENSE_TOKENS if _has_dense(examples) else BATCHWISE_TOKENS)


def _has_dense(examples: Examples | ShardedExamples) -> bool:
    return any(block.kind == "dense" for block in examples.encoder.blocks)


def data_weight_of(
    options: Options,
    examples: Examples | ShardedExamples,
    structure: Structure,
    optimizer: Optimizer,
    predictor: Structure | None,
) -> Choice[float | None]:
    """How often every training sequence counts; None where cross-validation will choose it
    (``plan.held_out``)."""
    asked, on_disk = options.prior.data_weight, isinstance(examples, ShardedExamples)
    if not isinstance(asked, str):
        if on_disk and asked != 1:
            problem = f"{asked} is given, and sequences on disk count once"
            raise InputError("data_weight", problem, "use 'auto' or 1, or pass X and y")
        return Choice(float(asked), ASKED)
    if options.preset is not None:
        return Choice(1.0, PAPER)
    why_not = {
        "the data is on disk": on_disk,
        "there is much data": has_too_much_to_repeat(examples),
        "there are many labels": n_transitions(structure, examples) > MANY_TRANSITIONS,
        f"there are fewer than {FEWEST_SEQUENCES} sequences": examples.n_sequences < FEWEST_SEQUENCES,
        "the posterior is a mixture": isinstance(options.family, Mixture),
        OWN: type(structure) not in (Chain, Piecewise, Declared, Segments) or predictor is not None,
        f"the {optimizer.name} fit is not repeated to choose it": not isinstance(optimizer, SecondOrder),
    }
    for reason, holds in why_not.items():
        if holds:
            return Choice(1.0, reason)
    return Choice(None, "cross-validation will choose it")


def spread_of(options: Options) -> Choice[float]:
    """Factor on how far draws lie from the posterior mean; 1 where it has yet to be chosen."""
    asked = options.prior.spread
    return PLAIN_SPREAD if isinstance(asked, str) else Choice(float(asked), ASKED)
