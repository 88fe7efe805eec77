"""An earlier posterior, extended to new features and labels, as the start of a fit.

A posterior of weights of sparse features grows with the data: what was known of old features and labels
stays as it is, new ones begin at their prior. Other posteriors can only go on with the same features and
labels."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structgp.answers.ask import Model
from structgp.data.batch import flat_tokens
from structgp.data.encode import EncoderView, FeatureEncoder, FeatureSplit
from structgp.data.examples import Examples
from structgp.data.vocabulary import column_places
from structgp.gp import Posterior, Table, Weights
from structgp.gp.kernels.relevance import grown
from structgp.plan.choices import AS_BEFORE, Choice, shown
from structgp.plan.resolve import Plan
from structgp.plan.start import Start, edge_tokens


def can_go_on(plan: Plan, before: Model, examples: Examples) -> bool:
    """True if the earlier posterior is of the kind that the plan asks for."""
    if examples.split is not None or not before.spec.is_chain:
        return False
    old, transitions = before.posterior.node, before.posterior["next"]
    shift = old.has_own_functions or plan.structure.value.ignores_shift
    silent = transitions.is_silent == (plan.transition_sd == 0)
    if not shift or not silent or plan.spec != before.spec or old.has_weights != plan.has_weights:
        return False
    if old.takes_minibatches:
        return not plan.has_dense
    # Inducing inputs are rows of the old encoder.
    moved = column_places(before.encoder, examples.encoder)
    stayed = moved is None or bool((moved == np.arange(len(moved))).all())
    if old.n_scores != examples.n_labels or not stayed:
        return False
    if plan.has_weights:
        same = plan.has_dense and before.info["plan"]["kernel"]["value"] == shown(plan.kernel.value)
        return same and _sizes(before.encoder) == _sizes(examples.encoder)
    settled = plan.with_covariance(old.n_functions, old.n_values, examples.n_tokens)
    return (
        old.n_components == plan.n_components
        and (old.form, old.rank) == (settled.covariance.value, settled.rank)
        and transitions.takes_curvature != (plan.posterior.value.transition_covariance == "full")
    )


def start_from(plan: Plan, before: Model, examples: Examples) -> Start:
    """The earlier posterior, if it ``can_go_on``, as the start of a fit."""
    old = before.posterior
    if old.node.takes_minibatches:
        return Start(carried_over(before, examples), plan)
    plan = plan.with_covariance(old.node.n_functions, old.node.n_values, examples.n_tokens)
    if plan.has_weights:
        plan = replace(plan, n_inducing=Choice(old.node.n_inducing, AS_BEFORE))
    posterior = copy.deepcopy(old).requires_grad_(True)
    posterior.node.kernel.requires_grad_(False)
    return Start(posterior, plan)


def carried_over(model: Model, examples: Examples) -> Posterior:
    """The model's posterior of weights, extended to the features and labels of the examples, whose encoder
    extends the model's and whose labels begin with the model's."""
    old, transitions = model.posterior.node, model.posterior["next"]
    split, V, N = FeatureSplit(examples.encoder, model.spec), old.n_scores, examples.n_labels
    places = column_places(model.encoder, examples.encoder)
    moved = None if places is None else torch.from_numpy(places)
    tokens = flat_tokens([split.node.select(rows) for rows in examples.rows])
    kernel, place = grown(old.kernel, _sizes(split.node), tokens, moved)
    node = Weights(kernel, (N,), _extended_basis(old.basis, N))
    _copy(old, node, (torch.arange(old.n_functions)[:, None], place))
    # The transition from label i to j is function i V + j.
    index = torch.arange(V)
    functions = (index[:, None] * N + index).flatten()
    wide: Table | Weights
    if model.spec.next is None:  # nothing reads its scores
        wide = copy.deepcopy(transitions)
    elif split.next is None:
        wide = Table((N, N), transitions.prior_sd)
        _copy(transitions, wide, functions)
    else:
        tokens = edge_tokens(split.next, examples)
        kernel, place = grown(transitions.kernel, _sizes(split.next), tokens, None)
        wide = Weights(kernel, (N, N))
        _copy(transitions, wide, (functions[:, None], place))
    return Posterior({"node": node, "next": wide})


def _copy(old: Table | Weights, new: Table | Weights, at: Any) -> None:
    """Copies what ``old`` knows to these places of ``new``."""
    with torch.no_grad():
        new.log_amplitude.copy_(old.log_amplitude)
        new.m[at] = old.m
        new.factor[at] = old.factor


def _sizes(view: EncoderView | FeatureEncoder) -> list[list[int]]:
    """Number of values of each template of each block."""
    sizes = [[max(1, len(values)) for values in view.values]] if view.templates else []
    return [*sizes, [max(1, view.n_sparse)]] if view.has_sparse else sizes


def _extended_basis(old: Tensor, n_labels: int) -> Tensor:
    """(V', R') with one function for each new label, as large as those of the old labels; the old functions
    do not affect new labels. old : (V, R)."""
    V, R = old.shape
    basis = old.new_zeros((n_labels, R + n_labels - V))
    basis[:V, :R] = old
    size = old.square().sum(1).mean().sqrt()
    basis[V:, R:] = size * torch.eye(n_labels - V, dtype=basis.dtype)
    return basis
