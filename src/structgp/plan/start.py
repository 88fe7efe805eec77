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
from structgp.data.encode import FeatureEncoder
from structgp.data.examples import Examples
from structgp.data.extend import column_places
from structgp.data.shards import ShardedExamples
from structgp.errors import StructgpWarning
from structgp.gp import Posterior, Relaxation, WeightPosterior, contrasts
from structgp.gp.kernels.grow import grown
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
    basis = None
    if plan.basis.value == "contrast":
        basis = contrasts(torch.from_numpy(examples.label_counts))
    given: dict[str, Any] = {
        "pairwise_sd": float(options.prior.transition_sd),
        "pairwise_covariance": plan.posterior.value.transition_covariance,
        "basis": basis,
    }
    if isinstance(examples, ShardedExamples):
        kernel = sharded_kernel(plan.kernel.value, examples, options.prior.amplitude)
        return Start(WeightPosterior(kernel, examples.n_labels, **given), plan)
    tokens = flat_tokens(examples.encoder, examples.rows)
    kernel, relaxation = choose_kernel(
        copy.deepcopy(plan.kernel.value),
        examples.encoder.blocks,
        tokens,
        examples.y,
        amplitude=options.prior.amplitude,
        learn=learns_kernel(options),
        on_bound=plan.on_bound,
        generator=generator,
    )
    if plan.has_weights:
        return Start(WeightPosterior(kernel, examples.n_labels, **given), plan, relaxation)
    pilot = None
    if plan.on_bound:
        pilot = run_pilot(
            kernel,
            examples,
            plan.structure.value,
            basis=basis,
            transition_sd=given["pairwise_sd"],
            generator=generator,
        )
    if pilot is not None:
        given |= {"basis": pilot.basis, "pairwise_sd": pilot.transition_sd}
    most = plan.n_inducing.value
    open_number = getattr(plan.posterior.value, "n_inducing", None) is None
    enough = ENOUGH if open_number and pilot is not None else 0.0
    assert most is not None
    chosen = pick_inducing(kernel, tokens, most, seed=options.random_state, enough=enough)
    n_functions = examples.n_labels if basis is None else basis.shape[1]
    plan = plan.with_covariance(n_functions, len(chosen.rows), len(tokens))
    posterior = Posterior(
        kernel,
        chosen.rows,
        examples.n_labels,
        covariance=plan.covariance.value,  # type: ignore[arg-type]
        rank=plan.rank,
        n_components=plan.n_components,
        **given,
    )
    return Start(posterior, plan, relaxation, pilot, chosen.residual)


# -- from an earlier fit ---------------------------------------------------------------------------


def can_go_on(plan: Plan, before: Model, examples: Examples, prior: Prior) -> bool:
    """Whether the fit can start from the earlier posterior; warns where it cannot."""
    old = before.posterior
    possible = old.has_label_basis or plan.structure.value.ignores_shift
    possible = possible and old.has_pairs == (float(prior.transition_sd) > 0)
    if isinstance(old, WeightPosterior) or plan.has_weights:
        possible = possible and plan.has_weights and isinstance(old, WeightPosterior)
    else:
        # Inducing inputs are rows of the old encoder.
        moved = column_places(before.encoder, examples.encoder)
        form, rank = plan.covariance_for(old.n_functions, old.n_inducing, examples.n_tokens)
        full = plan.posterior.value.transition_covariance == "full"
        possible = (
            possible
            and old.n_labels == examples.n_labels
            and old.n_components == plan.n_components
            and (old.form, old.rank) == (form.value, rank)
            and old.pairs_are_full == full
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
    if isinstance(old, WeightPosterior):
        return Start(carried_over(before, examples), plan)
    plan = plan.with_covariance(old.n_functions, old.n_inducing, examples.n_tokens)
    return Start(copy.deepcopy(old).requires_grad_(True), plan)


def carried_over(model: Model, examples: Examples) -> WeightPosterior:
    """The model's posterior of weights, extended to the features and labels of the examples, whose encoder
    extends the model's and whose labels begin with the model's."""
    old = model.posterior
    assert isinstance(old, WeightPosterior)
    moved = column_places(model.encoder, examples.encoder)
    kernel, place = grown(
        old.kernel,
        _sizes(examples.encoder),
        flat_tokens(examples.encoder, examples.rows),
        None if moved is None else torch.from_numpy(moved),
    )
    sd = float(old.pairwise_sd.detach())
    new = WeightPosterior(
        kernel, examples.n_labels, pairwise_sd=sd, basis=_extended_basis(old, examples.n_labels)
    )
    R, V = old.n_functions, old.n_labels
    with torch.no_grad():
        new.log_amplitude.copy_(old.log_amplitude)
        new.m[:, :R, place] = old.m
        new.factor[:, :R, place] = old.factor
        new.pair_mean[:V, :V] = old.pair_mean
        new.pair_log_sd[:V, :V] = old.pair_log_sd
    return new


def _sizes(encoder: FeatureEncoder) -> list[list[int]]:
    """Number of values of each template of each block."""
    sizes = []
    if encoder.templates:
        sizes.append([max(1, len(values)) for values in encoder.values])
    if encoder.has_sparse:
        sizes.append([max(1, len(encoder.columns or encoder.attributes))])
    return sizes


def _extended_basis(old: Posterior, n_labels: int) -> Tensor:
    """(V', R') with one function for each new label, as large as those of the old labels; the old functions
    leave new labels alone."""
    V, R = old.basis.shape
    more = n_labels - V
    basis = old.basis.new_zeros((n_labels, R + more))
    basis[:V, :R] = old.basis
    size = old.basis.square().sum(1).mean().sqrt()
    basis[V:, R:] = size * torch.eye(more, dtype=basis.dtype)
    return basis
