"""Parameters and examples -> one Plan: what is fitted and how, each choice with its reason.

Every 'auto' is resolved here. The form of the covariances and the number of inducing inputs follow when
the inducing inputs have been picked (``Plan.with_covariance``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from gpytorch.kernels import Kernel

from structgp.data.encode import FeatureSplit
from structgp.data.examples import Examples
from structgp.data.shards import ShardedExamples
from structgp.errors import InputError
from structgp.gp import Posterior
from structgp.gp.kernels.build import KernelChoice
from structgp.inference import LearnScales, Minibatch, Optimizer, SecondOrder
from structgp.inference.distributed import ALONE, Processes
from structgp.inference.estimators import Estimator
from structgp.paper import PRESETS, Preset
from structgp.plan.choices import (
    ASKED,
    Choice,
    asked_optimizer,
    covariance_of,
    details_of,
    family_of,
    first_stage,
    gradient_of,
    kernel_of,
    learns_on_bound,
    name_of,
    optimizer_of,
    predictor_of,
    spec_of,
    structure_of,
)
from structgp.plan.optimizers import NAMED
from structgp.plan.options import Family, Inducing, Mixture, Options, Weights, device_of
from structgp.structures import Spec, Structure

LATER_LEARNING_ROUNDS = 1
"""How often the kernel moves in a ``partial_fit`` after the first."""


@dataclass(frozen=True)
class Plan:
    """What is fitted and how.

    structure : with constraints, and with differences for slopes where it has only values. spec : the
    templates that have potentials. predictor : a structure of the user's own that answers, None for the
    declared one. kernel : names or kernels by kind of feature. posterior : the family, with 'auto' left
    only where the inducing inputs decide. covariance : 'full', 'low-rank', 'diagonal', of ``rank``
    directions. precision : of the fit. on_bound : whether the fit itself learns what each feature is
    worth."""

    structure: Choice[Structure]
    kernel: Choice[KernelChoice]
    posterior: Choice[Family]
    basis: Choice[str]
    n_inducing: Choice[int | None]
    covariance: Choice[str]
    rank: int
    entropy: Choice[str]
    optimizer: Choice[Optimizer]
    gradient: Choice[Estimator]
    learn_scales: Choice[LearnScales]
    precision: Choice[str]
    device: Choice[str]
    spec: Spec
    predictor: Structure | None
    on_bound: bool
    preset: Preset | None

    @property
    def has_weights(self) -> bool:
        return isinstance(self.posterior.value, Weights)

    @property
    def n_components(self) -> int:
        return int(getattr(self.posterior.value, "n_components", 1))

    def covariance_for(self, n_functions: int, n_inducing: int, n_tokens: int) -> tuple[Choice[str], int]:
        """Form and rank of the covariances for this number of inducing inputs."""
        family, optimizer = self.posterior.value, self.optimizer.value
        sizes = n_functions, n_inducing, n_tokens
        return covariance_of(family, optimizer, self.preset, *sizes)

    def with_covariance(self, n_functions: int, n_inducing: int, n_tokens: int) -> Plan:
        """The plan with the form of the covariances settled for this number of inducing inputs."""
        if self.has_weights:
            return self
        form, rank = self.covariance_for(n_functions, n_inducing, n_tokens)
        picked = replace(self.n_inducing, value=n_inducing)
        return replace(self, covariance=form, rank=rank, n_inducing=picked)

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Each choice with its reason, as plain values."""
        found = {
            f.name: {"value": _plain(choice.value), "reason": choice.reason}
            for f in fields(self)
            if isinstance(choice := getattr(self, f.name), Choice)
        }
        if self.rank:
            found["covariance"]["rank"] = self.rank
        return found


def plan_lines(plan: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line per choice of ``Plan.to_json``: name, value, reason."""
    width = max(map(len, plan), default=0)
    return [f"{k.replace('_', ' '):<{width}}  {c['value']} ({c['reason']})" for k, c in plan.items()]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, Kernel):
        return type(value).__name__
    if isinstance(value, Structure):
        return name_of(value)
    if isinstance(value, Family):
        return type(value).__name__.lower()
    if value is None or isinstance(value, str | int | float):
        return value
    named = getattr(value, "name", None)
    return named if isinstance(named, str) else repr(value)


# -- the whole -------------------------------------------------------------------------------------


def resolve(options: Options, examples: Examples | ShardedExamples, together: Processes = ALONE) -> Plan:
    """The plan for these parameters and examples; InputError where they do not go together."""
    structure = structure_of(options, examples)
    predictor, spec = (predictor_of(options, structure.value), spec_of(structure.value, options.prior))
    split = FeatureSplit(examples.encoder, spec)
    if isinstance(examples, ShardedExamples):
        options, on_disk = _for_shards(options), True
    else:
        on_disk = False
    blocks = split.node.blocks
    preset = PRESETS.get(options.inference) if isinstance(options.inference, str) else None
    on_bound = learns_on_bound(options, structure.value, blocks)
    kernel = kernel_of(options.kernel, blocks, on_bound)
    family = family_of(options, kernel.value, on_bound, preset)
    n_tokens = examples.n_tokens
    if not on_disk and (together.size > 1 or not examples.in_many_parts):  # type: ignore[union-attr]
        n_tokens = 0
    optimizer = optimizer_of(options.inference, structure.value, family.value, on_bound, n_tokens)
    if on_disk and options.inference is NAMED["minibatch"]:
        optimizer = replace(optimizer, reason="the data is on disk, and this way needs a batch at a time")
    if isinstance(optimizer.value, Minibatch):
        optimizer = replace(optimizer, value=optimizer.value.paced(examples.n_tokens))
    scales = "the fit learns the kernel" if on_bound else "the fit does not learn the kernel"
    if getattr(asked_optimizer(options.inference), "learn_scales", "auto") != "auto":
        scales = "as in the paper" if preset else "given"
    basis, n_inducing, entropy = details_of(family.value, structure.value, preset)
    return Plan(
        structure=structure,
        kernel=kernel,
        posterior=family,
        basis=basis,
        n_inducing=n_inducing,
        covariance=Choice("diagonal", "weights have no correlations"),
        rank=0,
        entropy=entropy,
        optimizer=optimizer,
        gradient=gradient_of(optimizer.value, structure.value),
        spec=spec,
        predictor=predictor,
        on_bound=on_bound,
        preset=preset,
        **_settings(options, optimizer.value, scales),
    )


def all_at_once(plan: Plan, options: Options) -> Plan:
    """The same plan for a fit that several processes share or have begun: without minibatches unless
    those were asked for."""
    if options.inference != "auto":
        return plan
    optimizer = optimizer_of("auto", plan.structure.value, plan.posterior.value, plan.on_bound)
    settings = _settings(options, optimizer.value, plan.learn_scales.reason)
    return replace(plan, optimizer=optimizer, **settings)


def going_on(options: Options, examples: Examples, old: Posterior) -> Plan:
    """The plan of a fit that learns from more data, with a posterior of weights as its prior."""
    if not old.node.takes_minibatches:
        raise InputError(
            "partial_fit",
            "the model has inducing inputs, not weights",
            "use categorical or sparse features and the default fit, or fit all data with warm_start",
        )
    structure = structure_of(options, examples).value
    shift = old.node.has_own_functions or structure.ignores_shift
    if not structure.has_local_curvature or not shift:
        lacks = "offers no curvature" if shift else "may depend on a direction that was left out"
        raise InputError("partial_fit", f"{name_of(structure)} {lacks}", "fit all data at once")
    before = "as before"
    onward = Minibatch(goes_on=True, learning_rounds=LATER_LEARNING_ROUNDS)
    onward = onward.paced(examples.n_tokens)
    return Plan(
        structure=Choice(structure, ASKED),
        kernel=Choice("relevance", before),
        posterior=Choice(Weights(), before),
        basis=Choice("label" if old.node.has_own_functions else "contrast", before),
        n_inducing=Choice(None, "weights need none"),
        covariance=Choice("diagonal", "weights have no correlations"),
        rank=0,
        entropy=Choice("bhattacharyya", "exact for one component"),
        optimizer=Choice(onward, "the earlier data are known through their posterior alone"),
        gradient=gradient_of(onward, structure),
        spec=spec_of(structure, options.prior),
        predictor=predictor_of(options, structure),
        on_bound=True,
        preset=None,
        **_settings(options, onward, "the kernel moves once more"),
    )


def _settings(options: Options, optimizer: Optimizer, reason: str) -> dict[str, Any]:
    """What moves with the bound, the precision and the device, as fields of a plan."""
    scales: LearnScales = getattr(first_stage(optimizer), "learn_scales", False)
    single = isinstance(optimizer, Minibatch) and optimizer.single
    precision = Choice("float64", "Cholesky factors and sums need it")
    if single:
        precision = Choice("float32 visits, float64 sums", "there is much data")
    where = "the GPU where there is one" if options.device == "auto" else ASKED
    return {
        "learn_scales": Choice(scales, reason),
        "precision": precision,
        "device": Choice(device_of(options.device), where),
    }


def check_alone(together: Processes) -> None:
    """Data on disk is for one process."""
    if together.size > 1:
        raise InputError(
            "torchrun", "data on disk is for one process", "pass the data itself, or start one process"
        )


def check_together(together: Processes, plan: Plan) -> None:
    """Several processes can fit weights in closed form, from data in memory."""
    optimizer = plan.optimizer.value
    if together.size > 1 and not (isinstance(optimizer, SecondOrder) and plan.has_weights):
        raise InputError(
            "torchrun",
            f"the {optimizer.name} fit of this posterior is for one process",
            "use categorical or sparse features with the default fit, or start it without torchrun",
        )


# -- data on disk ----------------------------------------------------------------------------------


def _for_shards(options: Options) -> Options:
    """The options with what shards decide filled in: one weight per feature, and one site per batch, so
    that the fit needs one batch of the data at a time."""
    if isinstance(options.family, Inducing | Mixture):
        raise InputError(
            "posterior",
            "inducing inputs are chosen from data in memory",
            "use 'auto' or 'weights' on shards",
        )
    asked = asked_optimizer(options.inference)
    if asked is not None and not isinstance(asked, Minibatch):
        raise InputError(
            "inference", f"{asked.name!r} needs all data in memory", "use 'auto' or 'minibatch' on shards"
        )
    kernels = options.kernel.values() if isinstance(options.kernel, Mapping) else [options.kernel]
    if not all(isinstance(kernel, str) and kernel in ("auto", "relevance") for kernel in kernels):
        raise InputError(
            "kernel",
            "shards are fitted with one weight per feature, which this kernel does not have",
            "use 'auto' or 'relevance', or fit data that is in memory",
        )
    inference = NAMED["minibatch"] if options.inference == "auto" else options.inference
    return replace(options, posterior=options.family or Weights(), inference=inference)
