"""What a fit starts from, read off the estimator's parameters and the examples: the likelihood, and a
posterior at
its prior, or the one of the fit before."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from structgp.answers.model import Model, as_rules
from structgp.data.examples import Examples
from structgp.data.shards import ShardedExamples
from structgp.data.vocabulary import column_places
from structgp.errors import InputError, StructgpWarning
from structgp.gp import Inducing, Mixture, Posterior, Relaxation, Table, Weights, contrasts
from structgp.plan.covariance_choice import choose_form
from structgp.plan.grow_posterior import carried_over
from structgp.plan.pilot import Pilot, run_pilot
from structgp.plan.posterior_family import (
    choose_space,
    learns_on_bound,
    needs_functions,
    setting,
    with_differences,
)
from structgp.plan.prior import choose_kernel, flat_tokens, pick_inducing
from structgp.structures import BlackBox, Chain, Differences, Structure, as_structure

N_INDUCING = 1000
ENOUGH = 0.02
"""Share of the prior variance that inducing inputs may leave open, under a kernel that is known."""

BATCH_TOKENS = {"functions": 1_000, "weights": 4_000}
"""Tokens of a batch, about, by space."""


@dataclass(frozen=True)
class Start:
    """What a fit starts from. residual : share of the prior variance that inducing inputs leave open.
    form_reason : why the covariances have the form that they have."""

    posterior: Posterior
    on_bound: bool
    relaxation: Relaxation | None = None
    pilot: Pilot | None = None
    residual: float = 0.0
    form_reason: str = "as before"


def likelihood_of(given: Any, examples: Examples | ShardedExamples) -> Structure:
    """The likelihood, under the constraints if it is the chain."""
    structure = as_structure(given.likelihood, given.n_jobs)
    for name, chosen in (("likelihood", structure), ("predict_with", given.predict_with)):
        if type(chosen) is Chain and chosen.rules is not None:
            raise InputError(name, "a chain with rules", "declare them as constraints")
    if isinstance(structure, BlackBox):
        structure.probe(examples.n_labels)
    if examples.some_missing and not structure.handles_missing:
        raise InputError(
            "y",
            f"labels are missing, and {name_of(structure)} does not say what to do with them",
            "set its attribute handles_missing if it knows -1 for a missing label, or use 'chain'",
        )
    if type(structure) is Chain:
        structure = Chain(as_rules(examples.constraints))
    return with_differences(
        given, structure, examples.encoder.blocks, examples.typical_length, examples.n_labels
    )


def start_of(
    given: Any,
    examples: Examples,
    structure: Structure,
    generator: torch.Generator,
    before: Model | None,
) -> Start:
    """The posterior that the fit starts from, and how it came about."""
    encoder = examples.encoder
    on_bound = learns_on_bound(given, structure, encoder.blocks)
    if before is not None:
        if before.posterior.node.name == "weights":
            return Start(carried_over(before, examples), on_bound)
        return Start(copy.deepcopy(before.posterior).requires_grad_(True), on_bound)
    tokens = flat_tokens(encoder, examples.rows)
    kernel, relaxation = choose_kernel(
        copy.deepcopy(given.kernel),
        encoder.blocks,
        tokens,
        examples.y,
        amplitude=given.amplitude,
        learn=setting(given, "learn_kernel", True),
        on_bound=on_bound,
        generator=generator,
    )
    basis = label_basis(given, structure, examples)
    space = choose_space(given, kernel, on_bound)
    pairwise_sd = float(given.pairwise_sd)
    pilot = None
    if on_bound and space == "functions":
        pilot = run_pilot(
            kernel,
            encoder,
            examples.rows,
            examples.y,
            structure,
            n_labels=examples.n_labels,
            basis=basis,
            pairwise_sd=pairwise_sd,
            batch_tokens=BATCH_TOKENS[space],
            generator=generator,
            weights=examples.weights,
        )
    if pilot is not None:
        basis, pairwise_sd = pilot.basis, pilot.pairwise_sd
    V = examples.n_labels
    table = Table((V, V), pairwise_sd, given.pairwise_covariance == "full")
    if space == "weights":
        weights = Posterior({"node": Weights(kernel, (V,), basis), "next": table})
        return Start(weights, on_bound, relaxation, pilot, form_reason="weights have no other")
    most = setting(given, "n_inducing", N_INDUCING)
    enough = ENOUGH if given.n_inducing is None and pilot is not None else 0.0
    chosen = pick_inducing(kernel, tokens, most, seed=given.random_state, enough=enough)
    n_functions = examples.n_labels if basis is None else basis.shape[1]
    form = choose_form(given, structure, n_functions, len(chosen.rows), len(tokens))
    options = {"covariance": form.name, "rank": form.rank, "basis": basis}
    node: Any = Inducing(kernel, chosen.rows, (V,), **options)
    if given.n_components > 1:
        K = given.n_components
        node = Mixture(kernel, chosen.rows, (V,), n_components=K, **options)
    posterior = Posterior({"node": node, "next": table})
    return Start(posterior, on_bound, relaxation, pilot, chosen.residual, form.reason)


def can_go_on(given: Any, before: Model, examples: Examples, structure: Structure) -> bool:
    """Whether the old posterior can be the start; where it cannot, a warning says so."""
    old, table = before.posterior.node, before.posterior["next"]
    possible = old.has_own_functions or structure.ignores_shift
    possible = possible and table.is_silent == (float(given.pairwise_sd) == 0)
    if old.name == "weights":
        on_bound = learns_on_bound(given, structure, examples.encoder.blocks)
        possible = possible and on_bound and needs_functions(given) is None
    else:
        # Inducing inputs are rows of the old encoder.
        moved = column_places(before.encoder, examples.encoder)
        n_tokens = sum(map(len, examples.rows))
        form = choose_form(given, structure, old.n_functions, old.n_values, n_tokens)
        possible = (
            possible
            and given.space != "weights"
            and old.n_scores == examples.n_labels
            and old.n_components == given.n_components
            and (old.form, old.rank) == (form.name, form.rank)
            and table.is_full == (given.pairwise_covariance == "full")
            and (moved is None or bool((moved == np.arange(len(moved))).all()))
        )
    if not possible:
        warnings.warn(
            "warm_start: the fit before had other labels, other columns or another kind of posterior; "
            "this one starts anew",
            StructgpWarning,
            stacklevel=4,
        )
    return possible


def label_basis(
    given: Any, structure: Structure, examples: Examples | ShardedExamples
) -> torch.Tensor | None:
    """The contrasts of the labels, or None for the labels themselves."""
    chosen = setting(given, "basis", "contrast" if structure.ignores_shift else "label")
    if chosen == "label":
        return None
    if not structure.ignores_shift:
        raise InputError(
            "basis",
            f"'contrast' leaves out a direction that {name_of(structure)} may depend on",
            "use 'auto' or 'label', or a structure whose ignores_shift is True",
        )
    return contrasts(torch.from_numpy(examples.label_counts))


def name_of(structure: Structure) -> str:
    return repr(structure.inner) if isinstance(structure, Differences) else type(structure).__name__
