"""Checks whether new data make a model worse, if it knows earlier data through its posterior alone."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from structgp.answers.ask import Asked, Model, Question
from structgp.data.examples import Examples
from structgp.errors import StructgpWarning
from structgp.plan.grow_posterior import start_from
from structgp.plan.held_out import ANSWER_DRAWS, sums_of
from structgp.plan.options import Options
from structgp.plan.resolve import Plan
from structgp.plan.run import Fit
from structgp.plan.trials import Predictions

FEWEST_SEQUENCES = 10
"""Number of sequences below which a part is not checked: it tells too little."""

MOST_TOKENS = 20_000
"""Number of tokens above which a part is not checked: a large part outweighs what is lost by a poor memory
of earlier data."""


def warn_of_part(options: Options, plan: Plan, before: Model, examples: Examples) -> None:
    """Warns where a part makes predictions clearly worse, as far as its own sequences tell."""
    found = what_a_part_does(options, plan, before, examples)
    if found is not None and found[1].is_clearly_worse(found[0]):
        losses = f"NLL {found[0].loss:.2f} before, {found[1].loss:.2f} after"
        message = f"partial_fit: one half of the new data makes predictions of the other worse ({losses}): "
        message += "earlier data are known through their posterior alone; fit all data together if you can"
        warnings.warn(message, StructgpWarning, stacklevel=3)


def what_a_part_does(
    options: Options, plan: Plan, before: Model, examples: Examples
) -> tuple[Predictions, Predictions] | None:
    """Predictions for the part's own sequences before and after the model has learned from others of them:
    each half is predicted before and after a fit to the other half. None for parts that are too small or
    too large to tell. Cost: that of a fit of the part."""
    there = np.array([i for i, rows in enumerate(examples.rows) if len(rows)])
    if len(there) < FEWEST_SEQUENCES or examples.n_tokens > MOST_TOKENS:
        return None
    order = np.random.default_rng(int(options.random_state)).permutation(there)
    sums: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    for n in range(2):
        left_out, rest = examples.part(order[n::2].tolist()), examples.part(order[1 - n :: 2].tolist())
        start = start_from(plan, before, rest)
        fit = Fit(options, rest, start, torch.Generator().manual_seed(n), seen_before=before)
        known = np.arange(rest.n_labels) < len(before.labels.classes)
        sums[0].append(_judge(fit.model_now(), left_out, known))
        fit.train(start.plan, on_fresh_draws=False)
        sums[1].append(_judge(fit.model_now(), left_out, known))
    was, now = (Predictions(*np.concatenate(found).T) for found in sums)
    return (was, now) if was.tokens.sum() > 0 else None


def _judge(model: Model, left_out: Examples, known: np.ndarray) -> np.ndarray:
    """(N, 6) the sums of ``Predictions``. known : (V,) which labels count: those that the model knew."""
    question = Question(ANSWER_DRAWS, None)
    found = Asked(model, question, left_out.rows, left_out.links).marginals()
    parts = zip(found, left_out.y, strict=True)
    return np.array([sums_of(p, y, (y >= 0) & known[np.maximum(y, 0)]) for p, y in parts])
