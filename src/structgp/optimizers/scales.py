"""The pairwise scale, learned in closed form."""

from __future__ import annotations

from typing import Literal, TypeAlias

from structgp.gp import Posterior

LearnScales: TypeAlias = bool | Literal["pairwise"]
"""Which scales move during a fit: none, the pairwise one, or (True) the amplitude too."""

PAIRWISE_PRIOR_SCORES = 4.0


def moves_amplitude(learn: LearnScales) -> bool:
    return learn != "pairwise" and bool(learn)


def fit_pairwise_sd(q: Posterior) -> None:
    """Moves the pairwise scale towards where the bound is largest, which is known in closed form since
    the scale enters KL(q(g) || p(g)) alone. A prior worth ``PAIRWISE_PRIOR_SCORES`` scores of size 1
    keeps it in place where V is small. Over-relaxed by as much as q(g) is still the prior: to that
    extent it follows the scale, and plain fixed-point iteration would creep."""
    if q.pairwise_sd == 0:
        return
    mean, variance = q.pair_mean.detach(), (2 * q.pair_log_sd.detach()).exp()
    total = (mean.square() + variance).sum() + PAIRWISE_PRIOR_SCORES
    best = (total / (mean.numel() + PAIRWISE_PRIOR_SCORES)).sqrt()
    untouched = (variance / q.pairwise_sd.square()).mean().clamp(max=1)
    q.pairwise_sd.copy_(q.pairwise_sd * (best / q.pairwise_sd) ** (1 + untouched))
