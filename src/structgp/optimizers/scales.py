"""The pairwise scale, learned in closed form."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from structgp.gp import Posterior

LearnScales: TypeAlias = bool | Literal["pairwise"]
"""Which scales move during a fit: none, the pairwise one, or (True) the amplitude too."""

PAIRWISE_PRIOR_SCORES = 4.0


def moves_amplitude(learn: LearnScales) -> bool:
    return learn != "pairwise" and bool(learn)


def fit_pairwise_sd(q: Posterior) -> None:
    """Moves the pairwise scale towards where the bound is largest, which is known in closed form since
    the scale enters KL(q(g) || p(g)) alone: it is the root of the scores' mean second moment, whatever
    covariance q(g) has. A prior worth ``PAIRWISE_PRIOR_SCORES`` scores of size 1 keeps it in place
    where V is small. Over-relaxed by as much as q(g) is still the prior: to that extent it follows
    the scale, and plain fixed-point iteration would creep."""
    if not q.has_pairs:
        return
    with torch.no_grad():
        pairs, prior = q.pairwise(), q.pairwise_sd.square()
        mean, variance = pairs.mean, pairs.variance
        total = (mean.square() + variance).sum() + PAIRWISE_PRIOR_SCORES
        best = total / (mean.numel() + PAIRWISE_PRIOR_SCORES)
        untouched = (variance / prior).mean().clamp(max=1)
        q.log_pairwise_sd.add_(0.5 * (1 + untouched) * (best / prior).log())
