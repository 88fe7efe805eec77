"""Warns of fits that have converged but are of no use: the features say nothing under the kernel, or the
bound holds only for the draws that it was fitted to."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from structgp.data.examples import Examples
from structgp.errors import InputError, StructgpWarning

SOME = 100
"""Number of tokens that are looked at."""

FEW = 20
"""Number of tokens below which there is no warning: so few teach little under any kernel."""

FLAT = 1e-3
"""Standard deviation of scores over tokens, below which they do not depend on features: no probability then
moves by more than a tenth of a percent. Not chosen on data."""

FARTHEST = 10.0
"""Largest number of nats per token by which the bound on fresh draws may be below that on the draws of the
fit. Not chosen on data."""


@contextmanager
def numbers_in_bounds() -> Iterator[None]:
    """Turns the error of a fit whose numbers leave all bounds into one that names a remedy."""
    try:
        yield
    except torch.linalg.LinAlgError as error:
        remedy = "rescale the features, or leave kernel, amplitude and inference at 'auto'"
        raise InputError("fit", f"its numbers are out of bounds ({error})", remedy) from error


def warn_of_useless(posterior: Any, node: Any, examples: Any, history: Any) -> None:
    """Warnings about a fit that has ended. node : the view of the features that nodes have."""
    gap = history.elbo - history.fresh_elbo
    if math.isfinite(gap) and gap > FARTHEST * examples.n_tokens:
        message = (
            f"the bound is {history.elbo:.4g} on the draws of the fit and {history.fresh_elbo:.4g} on "
        )
        message += "fresh ones: the fit has followed its draws, and its answers are not to be relied on; "
        message += "rescale the features, or use a smaller amplitude"
        warnings.warn(message, StructgpWarning, stacklevel=5)
    if isinstance(examples, Examples) and _is_flat(posterior.node, node, examples):
        message = "the fitted scores hardly depend on the features: predictions are little more than label "
        message += "frequencies; check the features and their scale, and the length-scales of the kernel"
        warnings.warn(message, StructgpWarning, stacklevel=5)


def _is_flat(block: Any, node: Any, examples: Examples) -> bool:
    """True if tokens with different features have equal scores."""
    parts, n = [], 0
    for rows in examples.rows:
        if len(rows) and n < SOME:
            parts.append(rows[: SOME - n])  # one long sequence has too many for a joint covariance
            n += len(parts[-1])
    if n < FEW or block.is_silent:
        return False
    if len({rows.shape[1] for rows in parts}) > 1:  # sparse rows, padded when they are batched
        parts = [rows for rows in parts if rows.shape[1] == parts[0].shape[1]]
    rows = node.select(torch.from_numpy(np.concatenate(parts)))
    if len(torch.unique(rows, dim=0)) < 2:
        return False
    mean, _ = block.scores_at(rows.to(block.m.device))
    # The score of one broken value, beside which all others are flat, says nothing of the features.
    far = (mean - mean.median(0).values).abs().amax(1)
    kept = mean[far.argsort()[: -max(1, len(far) // SOME)]]
    return float(kept.std(0).max()) < FLAT
