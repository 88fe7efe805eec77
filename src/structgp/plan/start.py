"""The posterior that a fit starts from: at its prior, or that of an earlier fit.

An earlier posterior of weights grows with the data: what was known of old features and labels stays as it
is, new ones begin at their prior.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structgp.answers.model import Model
from structgp.data.encode import EncoderView, FeatureEncoder, FeatureSplit
from structgp.data.examples import Examples
from structgp.data.shards import ShardedExamples
from structgp.data.vocabulary import column_places
from structgp.errors import InputError, StructgpWarning
from structgp.gp import Inducing, Mixture, Posterior, Relaxation, Table, Weights, contrasts
from structgp.gp.kernels.build import build_kernel
from structgp.gp.kernels.relevance import grown
from structgp.plan.choices import learns_kernel
from structgp.plan.options import Options, Prior
from structgp.plan.pilot import Pilot, run_pilot
from structgp.plan.prior import choose_kernel, flat_tokens, pick_inducing, sharded_kernel
from structgp.plan.resolve import Plan

ENOUGH = 0.02
"""Share of the prior variance that inducing inputs may leave open, under a kernel that is known."""


@dataclass(frozen=True)
class Start:
    """posterior : where the fit begins. plan : with the form of the covariances settled. residual : share
    of the prior variance that inducing inputs leave open."""

    posterior: Posterior
    plan: Plan
    relaxation: Relaxation | None = None
    pilot: Pilot | None = None
    residual: float = 0.0


def start_of(
    options: Options,
    plan: Plan,
    examples: Examples | ShardedExamples,
    generator: torch.Generator,
    before: Model | None = None,
) -> Start:
    """The posterior that the fit starts from, and how it came about."""
    if before is not None:
        assert isinstance(examples, Examples)
        return _from_before(plan, before, examples)
    V, split = examples.n_labels, FeatureSplit(examples.encoder, plan.spec)
    given = options.prior.amplitude
    amplitude = None if isinstance(given, str) else float(given)
    basis = None
    if plan.basis.value == "contrast":
        basis = contrasts(torch.from_numpy(examples.label_counts))
    if isinstance(examples, ShardedExamples):
        if split.next is not None:
            raise InputError("structure", "transitions with features need data in memory", "pass X and y")
        kernel = sharded_kernel(plan.kernel.value, examples, amplitude)
        return Start(_posterior(Weights(kernel, (V,), basis), options, plan), plan)
    tokens = flat_tokens(split.node, [split.node.select(rows) for rows in examples.rows])
    kernel, relaxation = choose_kernel(
        copy.deepcopy(plan.kernel.value),
        split.node.blocks,
        tokens,
        examples.y,
        amplitude=amplitude,
        learn=learns_kernel(options),
        on_bound=plan.on_bound,
        generator=generator,
    )
    edges = None if split.next is None else _edge_tokens(split.next, examples)
    if plan.has_weights:
        node: Any = Weights(kernel, (V,), basis)
        return Start(_posterior(node, options, plan, split, edges), plan, relaxation)
    pilot = None
    if plan.on_bound and split.next is None:
        pilot = run_pilot(
            kernel,
            examples,
            split,
            plan.structure.value,
            basis=basis,
            transition_sd=_transition_sd(options, plan),
            generator=generator,
        )
    most = plan.n_inducing.value
    open_number = getattr(plan.posterior.value, "n_inducing", None) is None
    enough = ENOUGH if open_number and pilot is not None else 0.0
    assert most is not None
    chosen = pick_inducing(kernel, tokens, most, seed=options.random_state, enough=enough)
    n_functions = V if basis is None else basis.shape[1]
    plan = plan.with_covariance(n_functions, len(chosen.rows), len(tokens))
    basis = basis if pilot is None else pilot.basis
    form: dict[str, Any] = {"covariance": plan.covariance.value, "rank": plan.rank, "basis": basis}
    node = Inducing(kernel, chosen.rows, (V,), **form)
    if plan.n_components > 1:
        node = Mixture(kernel, chosen.rows, (V,), n_components=plan.n_components, **form)
    sd = None if pilot is None else pilot.transition_sd
    posterior = _posterior(node, options, plan, split, edges, sd)
    return Start(posterior, plan, relaxation, pilot, chosen.residual)


def _transition_sd(options: Options, plan: Plan) -> float:
    return 0.0 if plan.spec.next is None else float(options.prior.transition_sd)


def _posterior(
    node: Any,
    options: Options,
    plan: Plan,
    split: FeatureSplit | None = None,
    edges: Tensor | None = None,
    sd: float | None = None,
) -> Posterior:
    """Nodes, and transitions: a table of scores, or with features (N, W) in ``edges`` one weight per
    feature. sd : prior standard deviation of a transition score, None for that of the options."""
    V = node.n_scores
    sd = _transition_sd(options, plan) if sd is None else sd
    if split is None or split.next is None or edges is None:
        full = plan.posterior.value.transition_covariance == "full"
        return Posterior({"node": node, "next": Table((V, V), sd, full)})
    kernel = build_kernel("relevance", split.next.blocks, edges, sd**2).requires_grad_(False)
    return Posterior({"node": node, "next": Weights(kernel, (V, V))})


def _edge_tokens(view: EncoderView, examples: Examples) -> Tensor:
    """(N, W) features of all transitions."""
    rows = [view.select(rows[1:]) for rows in examples.rows if len(rows) > 1]
    if not rows:
        raise InputError(
            "structure",
            "transitions have features, and no sequence has two tokens",
            "use chain() without features, or pass longer sequences",
        )
    return flat_tokens(view, rows)


# -- from an earlier fit ---------------------------------------------------------------------------


def can_go_on(plan: Plan, before: Model, examples: Examples, prior: Prior) -> bool:
    """Whether the fit can start from the earlier posterior; warns where it cannot."""
    old, transitions = before.posterior.node, before.posterior["next"]
    possible = old.has_own_functions or plan.structure.value.ignores_shift
    possible = possible and plan.spec == before.spec
    possible = possible and transitions.is_silent == (float(prior.transition_sd) == 0)
    if old.takes_minibatches or plan.has_weights:
        possible = possible and plan.has_weights and old.takes_minibatches
    else:
        # Inducing inputs are rows of the old encoder.
        moved = column_places(before.encoder, examples.encoder)
        form, rank = plan.covariance_for(old.n_functions, old.n_values, examples.n_tokens)
        full = plan.posterior.value.transition_covariance == "full"
        possible = (
            possible
            and old.n_scores == examples.n_labels
            and old.n_components == plan.n_components
            and (old.form, old.rank) == (form.value, rank)
            and transitions.takes_curvature != full
            and (moved is None or bool((moved == np.arange(len(moved))).all()))
        )
    if not possible:
        warnings.warn(
            "warm_start: the earlier fit had other labels, other columns or another kind of posterior; "
            "this one starts from the prior",
            StructgpWarning,
            stacklevel=3,
        )
    return possible


def _from_before(plan: Plan, before: Model, examples: Examples) -> Start:
    old = before.posterior
    if old.node.takes_minibatches:
        return Start(carried_over(before, examples), plan)
    plan = plan.with_covariance(old.node.n_functions, old.node.n_values, examples.n_tokens)
    return Start(copy.deepcopy(old).requires_grad_(True), plan)


def carried_over(model: Model, examples: Examples) -> Posterior:
    """The model's posterior of weights, extended to the features and labels of the examples, whose
    encoder extends the model's and whose labels begin with the model's."""
    old, transitions = model.posterior.node, model.posterior["next"]
    split, V, N = FeatureSplit(examples.encoder, model.spec), old.n_scores, examples.n_labels
    tokens = flat_tokens(split.node, [split.node.select(rows) for rows in examples.rows])
    places = column_places(model.encoder, examples.encoder)
    moved = None if places is None else torch.from_numpy(places)
    kernel, place = grown(old.kernel, _sizes(split.node), tokens, moved)
    node = Weights(kernel, (N,), _extended_basis(old.basis, N))
    _copy_weights(old, node, torch.arange(old.n_functions), place)
    # The transition from label i to j is function i V + j.
    index = torch.arange(V)
    functions = (index[:, None] * N + index).flatten()
    if split.next is None:
        table = Table((N, N), transitions.prior_sd)
        with torch.no_grad():
            table.m[functions] = transitions.m
            table.factor[functions] = transitions.factor
        return Posterior({"node": node, "next": table})
    edges = _edge_tokens(split.next, examples)
    kernel, place = grown(transitions.kernel, _sizes(split.next), edges, None)
    wide = Weights(kernel, (N, N))
    _copy_weights(transitions, wide, functions, place)
    return Posterior({"node": node, "next": wide})


def _copy_weights(old: Weights, new: Weights, functions: Tensor, place: Tensor) -> None:
    """What ``old`` knows, at these functions and places among the weights of ``new``."""
    with torch.no_grad():
        new.log_amplitude.copy_(old.log_amplitude)
        new.m[functions[:, None], place] = old.m
        new.factor[functions[:, None], place] = old.factor


def _sizes(view: EncoderView | FeatureEncoder) -> list[list[int]]:
    """Number of values of each template of each block."""
    sizes = []
    if view.templates:
        sizes.append([max(1, len(values)) for values in view.values])
    if view.has_sparse:
        sizes.append([max(1, view.n_sparse)])
    return sizes


def _extended_basis(old: Tensor, n_labels: int) -> Tensor:
    """(V', R') with one function for each new label, as large as those of the old labels; the old
    functions leave new labels alone. old : (V, R)."""
    V, R = old.shape
    basis = old.new_zeros((n_labels, R + n_labels - V))
    basis[:V, :R] = old
    size = old.square().sum(1).mean().sqrt()
    basis[V:, R:] = size * torch.eye(n_labels - V, dtype=basis.dtype)
    return basis
