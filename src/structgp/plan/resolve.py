"""Parameters and examples -> one Plan: what is fitted and how, each choice with its reason.

Every 'auto' is resolved here. The form of the covariances and the number of inducing inputs follow when the
inducing inputs have been picked (``Plan.with_covariance``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from structgp.data.encode import FeatureSplit
from structgp.data.examples import Examples
from structgp.data.shards import ShardedExamples
from structgp.errors import InputError
from structgp.gp import Posterior
from structgp.gp.kernels.build import KernelChoice
from structgp.inference import LearnScales, Minibatch, Optimizer, SecondOrder
from structgp.inference.distributed import ALONE, Processes
from structgp.inference.estimators import Estimator
from structgp.paper import Preset
from structgp.plan import choices
from structgp.plan.choices import ASKED, Choice
from structgp.plan.gradient_choice import gradient_of
from structgp.plan.label_cost import leaves_out_transitions
from structgp.plan.options import Family, Inducing, Mixture, Options, Weights
from structgp.plan.predictor import answers_by, predictor_of
from structgp.plan.programs import program_of
from structgp.plan.word_choice import words_of
from structgp.structures import (
    ByValues,
    Chain,
    Custom,
    Declared,
    Differences,
    Segments,
    Spec,
    Structure,
    Template,
)

LATER_LEARNING_ROUNDS = 0
"""Number of times that the kernel moves in a ``partial_fit`` that knows earlier data through their
posterior alone: with every part it would move a little further, and never back."""


@dataclass(frozen=True)
class Plan:
    """What is fitted and how.

    structure : with constraints, and with differences for slopes where it has only values. spec : the
    templates that have potentials. split : what each template sees of a token's features. transition_sd :
    prior sd of a transition score, 0 without transitions. predictor : a structure of the user's own that
    answers, None for the declared one. kernel : names or kernels by kind of feature. posterior : the
    family, with 'auto' left only where the inducing inputs decide. has_dense : whether nodes have dense
    features. shape : that of the kernel on dense features, a ``DenseShape``, None until it has been
    learned. tails : degrees of freedom of the prior of sparse features' relevances, None for the usual
    ones. trial : whether this fit only serves to choose. covariance : 'full', 'low-rank' with ``rank``
    directions, or 'diagonal'. precision : floating-point precision of the fit. on_bound : whether the fit
    itself learns what each feature is worth. data_weight : how often every training sequence counts; None,
    which stands for once, until cross-validation has chosen it. constraints : the scheme that all training
    labellings obey, or the user's. decode : the measure that labels are chosen for, unless the user names
    one. threshold : least probability of a span that is predicted for the best F1, None where labels are
    not spans. program : how labellings are summed over, None for a chain. answers : how a likelihood of the
    user's own answers. annotators : what is learned of annotators, None where labels are not those of
    several. word_parts : the feature whose values are taken apart. tables : what the tables beyond a chain
    are learned from, where they are not fitted with the rest. spread : factor on how far draws lie from the
    posterior mean."""

    structure: Choice[Structure]
    kernel: Choice[KernelChoice]
    posterior: Choice[Family]
    basis: Choice[str]
    optimizer: Choice[Optimizer]
    gradient: Choice[Estimator]
    learn_scales: Choice[LearnScales]
    precision: Choice[str]
    device: Choice[str]
    spec: Spec
    split: Any  # a FeatureSplit, or a GraphSplit for structures beyond the chain
    transition_sd: float
    predictor: Structure | None
    has_weights: bool
    has_dense: bool
    on_bound: bool
    preset: Preset | None = None
    n_inducing: Choice[int | None] = choices.NO_INDUCING
    covariance: Choice[str] = choices.UNCORRELATED
    entropy: Choice[str] = choices.TIGHTER
    rank: int = 0
    data_weight: Choice[float | None] = choices.PLAIN_BAYES
    spread: Choice[float] = choices.PLAIN_SPREAD
    constraints: Choice[Any] = choices.UNCONSTRAINED
    decode: Choice[str] = choices.TOKENS
    threshold: Choice[float] | None = None
    program: Choice[str] | None = None
    answers: Choice[str] | None = None
    annotators: Choice[str] | None = None
    word_parts: Choice[str | None] | None = None
    tables: Choice[str] | None = None
    shape: Any = None
    tails: float | None = None
    trial: bool = False

    @property
    def answers_spans(self) -> bool:
        """True if the structure that answers knows probabilities of spans."""
        if self.structure.value.many_templates:
            return self.structure.value.has_walk
        return self.predictor is None or self.predictor.has_spans

    @property
    def n_components(self) -> int:
        return int(getattr(self.posterior.value, "n_components", 1))

    def transition_labels(self, V: int) -> tuple[int, int]:
        """Shape of the table of transition scores. Without transitions it has one score, which nothing
        reads: V^2 of them would take most of the time and memory where there are many labels."""
        return (1, 1) if self.spec.next is None else (V, V)

    def of_tokens(self) -> Plan:
        """The plan for nodes by themselves."""
        spec = Spec((Template("node", 1, None, self.spec.node.without),))
        split = FeatureSplit(self.split.encoder, spec)
        alone = Choice[Structure](Chain(spec=spec), "nodes by themselves")
        return replace(self, spec=spec, split=split, structure=alone, transition_sd=0.0)

    def with_covariance(self, n_functions: int, n_inducing: int, n_tokens: int) -> Plan:
        """The plan with the form of the covariances settled for this number of inducing inputs."""
        if self.has_weights:
            return self
        sizes = n_functions, n_inducing, n_tokens
        form, rank = choices.covariance_of(self.posterior.value, self.optimizer.value, self.preset, *sizes)
        picked = replace(self.n_inducing, value=n_inducing)
        return replace(self, covariance=form, rank=rank, n_inducing=picked)

    def sequence_weights(self, examples: Examples) -> np.ndarray | None:
        """(N,) how often each sequence counts in the fit; None for once."""
        weight, given = self.data_weight.value or 1.0, examples.weights
        if weight == 1.0:
            return given
        return weight * (np.ones(len(examples.rows)) if given is None else given)

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Each choice with its reason, as plain values."""
        found = {
            f.name: {"value": choices.shown(choice.value), "reason": choice.reason}
            for f in fields(self)
            if isinstance(choice := getattr(self, f.name), Choice)
        }
        if isinstance(self.structure.value, Differences):
            found["gradient"] = {"value": "differences", "reason": "the function gives values alone"}
        if self.rank:
            found["covariance"]["rank"] = self.rank
        if self.tails is not None:
            reason = "predicts left-out training data best"
            found["tails"] = {"value": self.tails, "reason": reason}
        if self.shape is not None:
            found["shape"] = {
                "value": self.shape.name,
                "reason": "how the kernel on dense features was learned",
            }
        return found


def plan_lines(plan: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line per choice of ``Plan.to_json``: name, value, reason."""
    width = max(map(len, plan), default=0)
    return [f"{k.replace('_', ' '):<{width}}  {c['value']} ({c['reason']})" for k, c in plan.items()]


def resolve(options: Options, examples: Examples | ShardedExamples, together: Processes = ALONE) -> Plan:
    """The plan for these parameters and examples; InputError where they do not go together."""
    asked, on_disk = options.optimizer, isinstance(examples, ShardedExamples)
    model = _model(options, examples)
    structure, blocks = model["structure"].value, model["split"].node.blocks
    options = _for_shards(options) if on_disk else options
    on_bound = choices.learns_on_bound(options, structure, blocks)
    beside_words = choices.tells_words_apart(examples.encoder, examples.n_tokens)
    kernel = choices.kernel_of(options.kernel, blocks, on_bound, beside_words)
    family = choices.family_of(options, kernel.value, blocks, on_bound)
    n_tokens, dense = examples.n_tokens, any(block.kind == "dense" for block in blocks)
    if dense and isinstance(family.value, Weights):
        model["covariance"] = choices.CORRELATED
        n_tokens = 0  # all at once
    if not on_disk and (together.size > 1 or not examples.in_many_parts):  # type: ignore[union-attr]
        n_tokens = 0
    annotated = isinstance(examples, Examples) and examples.given is not None
    n_tokens = 0 if annotated else n_tokens
    alone = together.size == 1 and not annotated and not dense
    many_labels = alone and model["spec"].next is None and leaves_out_transitions(examples)
    optimizer = choices.optimizer_of(options, structure, family.value, on_bound, n_tokens, many_labels)
    if on_disk and asked is None:
        optimizer = replace(optimizer, reason="the data is on disk, and this way needs a batch at a time")
    if isinstance(examples, Examples) and examples.given is not None:
        model["annotators"] = choices.annotators_of(examples.given, structure, optimizer.value)
    if optimizer.reason == choices.VERY_MANY_LABELS:
        settled = choices.SETTLED_TOKEN * examples.n_tokens / examples.n_sequences
        value = replace(optimizer.value, tolerance=settled)  # type: ignore[type-var]
        optimizer = replace(optimizer, value=value)
    if isinstance(optimizer.value, Minibatch):
        optimizer = replace(optimizer, value=optimizer.value.paced(examples.n_tokens, options.torch_device))
    scales = "the fit learns the kernel" if on_bound else "the fit does not learn the kernel"
    if getattr(asked, "learn_scales", "auto") != "auto":
        scales = choices.PAPER if options.preset else ASKED
    if model["split"].next is not None or any(getattr(model["split"], "views", ())[1:]):
        choices.check_transition_features(model["spec"], optimizer.value, family.value, on_disk)
    basis = choices.basis_of(family.value, structure, options.preset, examples.n_labels)
    if not isinstance(family.value, Weights):
        given = family.value, options.preset, optimizer.value
        n_functions = examples.n_labels - (basis.value == "contrast")
        model["n_inducing"] = choices.n_inducing_of(*given, n_functions, examples.n_tokens)
    weight = choices.data_weight_of(options, examples, structure, optimizer.value, model["predictor"])
    if getattr(family.value, "entropy", None) == "jensen":
        model["entropy"] = Choice("jensen", ASKED)
    return Plan(
        **model,
        kernel=kernel,
        posterior=family,
        basis=basis,
        has_weights=isinstance(family.value, Weights),
        has_dense=dense,
        on_bound=on_bound,
        preset=options.preset,
        data_weight=weight,
        spread=choices.spread_of(options),
        **_settings(options, optimizer, structure, scales),
    )


def _model(options: Options, examples: Examples | ShardedExamples) -> dict[str, Any]:
    """The structure and what follows from it, as fields of a plan. A transition sd of 0 leaves transitions
    out."""
    structure, sd = choices.structure_of(options, examples), float(options.prior.transition_sd)
    spec, predictor = structure.value.spec, None  # the chain itself answers
    if isinstance(options.structure, Custom) or type(structure.value) not in (Chain, Declared, Segments):
        predictor = predictor_of(options, structure.value)
    if isinstance(predictor, ByValues):
        predictor.probe(examples.n_labels)
    if sd == 0 and spec.next is not None and not spec.next.is_constant:
        problem = f"0 leaves transitions out, and {spec} gives them features"
        raise InputError("transition_sd", problem, "use a transition_sd above 0, or chain(order=0)")
    spec = spec if spec.likelihood == "exact" else Spec(spec.templates)
    graph, on_disk = getattr(examples, "split", None), isinstance(examples, ShardedExamples)
    split = FeatureSplit(examples.encoder, spec) if graph is None else graph
    if not split.node.blocks:
        problem = f"{spec} gives all features to transitions and leaves none for single tokens"
        raise InputError(
            "structure", problem, "use shared=True, or add features that transitions do not use"
        )
    return {
        "structure": structure,
        "spec": spec,
        "split": split,
        "transition_sd": 0.0 if len(spec.templates) == 1 else sd,
        "predictor": predictor,
        "program": None if graph is None else program_of(spec, examples),  # type: ignore[arg-type]
        "answers": answers_by(structure.value, predictor, examples),
        "word_parts": words_of(options, examples.encoder, on_disk) if split.node.templates else None,
    }


def all_at_once(plan: Plan, options: Options) -> Plan:
    """The same plan for a fit that several processes share or have begun: without minibatches unless those
    were asked for."""
    if options.optimizer is not None:
        return plan
    structure = plan.structure.value
    optimizer = choices.optimizer_of(options, structure, plan.posterior.value, plan.on_bound)
    reason = plan.learn_scales.reason
    return replace(plan, **_settings(options, optimizer, structure, reason))


def features_per_token(examples: Examples) -> float:
    """Mean number of features of a token: one of each template, and those of the sparse block."""
    encoder = examples.encoder
    rows = np.concatenate([r[:, len(encoder.pad_row) :: 2].ravel() for r in examples.rows if len(r)])
    return max(1.0, len(encoder.templates) + float((rows >= 0).sum()) / examples.n_tokens)


def going_on(options: Options, examples: Examples, old: Posterior) -> Plan:
    """The plan of a fit that learns from more data, with a posterior of weights as its prior."""
    if not old.node.takes_minibatches:
        remedy = "use categorical or sparse features and the default fit, or fit all data with warm_start"
        raise InputError("partial_fit", "the model has dense features, or inducing inputs", remedy)
    model = _model(options, examples)
    structure = model["structure"].value
    shift = old.node.has_own_functions or structure.ignores_shift
    if not structure.has_local_curvature or not shift:
        lacks = "offers no curvature" if shift else "may depend on a direction that was left out"
        raise InputError("partial_fit", f"{choices.shown(structure)} {lacks}", "fit all data at once")
    before = "as before"
    firm = features_per_token(examples)
    onward = Minibatch(goes_on=True, hold=firm, learning_rounds=LATER_LEARNING_ROUNDS)
    onward = onward.paced(examples.n_tokens, options.torch_device)
    reason = "the earlier data are known through their posterior alone"
    optimizer: Choice[Optimizer] = Choice(onward, reason)
    return Plan(
        **model,
        kernel=Choice("relevance", before),
        posterior=Choice(Weights(), before),
        basis=Choice("label" if old.node.has_own_functions else "contrast", before),
        has_weights=True,
        has_dense=False,
        on_bound=True,
        **_settings(options, optimizer, structure, "as they were learned on the first data"),
    )


def _settings(
    options: Options, optimizer: Choice[Optimizer], structure: Structure, scales: str
) -> dict[str, Any]:
    """The optimiser and what follows from it, and the device, as fields of a plan. scales : why those
    scales are learned."""
    first = getattr(optimizer.value, "first", optimizer.value)
    precision = Choice("float64", "Cholesky factors and sums need it")
    if isinstance(optimizer.value, Minibatch) and optimizer.value.single:
        why = optimizer.reason if optimizer.reason == choices.VERY_MANY_LABELS else "there is much data"
        precision = Choice("float32 visits, float64 sums", why)
    where = {"auto": "the GPU where there is one", Options.device: choices.DEFAULT}
    return {
        "optimizer": optimizer,
        "gradient": gradient_of(first, structure),
        "learn_scales": Choice(getattr(first, "learn_scales", False), scales),
        "precision": precision,
        "device": Choice(options.torch_device, where.get(options.device, ASKED)),
    }


def as_before(plan: Plan, options: Options, info: Mapping[str, Any]) -> Plan:
    """The plan with the data weight, the spread, the tails and the threshold of an earlier fit, unless
    others are asked for. info : the log of that fit; where it lacks the first two, as in earlier versions,
    they were 1."""
    found: dict[str, Any] = {}
    for name in ("data_weight", "spread"):
        asked, before = getattr(options.prior, name), info.get("plan", {}).get(name, {}).get("value", 1.0)
        found[name] = (
            Choice(before, choices.AS_BEFORE) if isinstance(asked, str) else Choice(float(asked), ASKED)
        )
    if plan.tails is None and isinstance(options.prior.data_weight, str):
        found["tails"] = info.get("plan", {}).get("tails", {}).get("value")
    if plan.threshold is not None and info.get("threshold") is not None:
        found["threshold"] = Choice(info["threshold"], choices.AS_BEFORE)
    return replace(plan, **found)


def check_together(together: Processes, plan: Plan) -> None:
    """InputError unless several processes can share the fit: one of weights, second-order or batch by
    batch."""
    optimizer = plan.optimizer.value
    alone = plan.has_dense or not plan.has_weights
    if together.size > 1 and (alone or not isinstance(optimizer, SecondOrder | Minibatch)):
        problem = f"the {optimizer.name} fit of this posterior is for one process"
        remedy = "use categorical or sparse features with the default fit, or start it without torchrun"
        raise InputError("torchrun", problem, remedy)


def _for_shards(options: Options) -> Options:
    """The options, with those that shards decide filled in: one weight per feature, and one site per batch,
    so that the fit needs one batch of the data at a time."""
    if isinstance(options.family, Inducing | Mixture):
        problem = "inducing inputs are chosen from data in memory"
        raise InputError("posterior", problem, "use 'auto' or 'weights' on shards")
    asked = options.optimizer
    if asked is not None and not isinstance(asked, Minibatch):
        problem = f"{asked.name!r} needs all data in memory"
        raise InputError("inference", problem, "use 'auto' or 'minibatch' on shards")
    kernels = options.kernel.values() if isinstance(options.kernel, Mapping) else [options.kernel]
    if not all(isinstance(kernel, str) and kernel in ("auto", "relevance") for kernel in kernels):
        problem = "shards are fitted with one weight per feature, which this kernel does not have"
        raise InputError("kernel", problem, "use 'auto' or 'relevance', or fit data that is in memory")
    return replace(options, posterior=options.family or Weights(), inference=asked or "minibatch")
