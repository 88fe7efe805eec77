"""Which hyper-parameters move with the bound, and the pairwise scale's closed form."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import nn

from structgp.errors import InputError
from structgp.gp import Posterior

LearnScales: TypeAlias = bool | Literal["transitions", "all", "auto"]
"""What moves during a fit: nothing (False), the scale of the transitions, the amplitude too (True), or all
of these and the kernel's own parameters. 'auto' is resolved in ``structgp.plan``."""

AMPLITUDE_PRIOR_SD = 1.5
"""Prior standard deviation of the log-amplitude around where it starts: a factor of 4.5 or so."""

PAIRWISE_PRIOR_SCORES = 4.0


def moves_amplitude(learn: LearnScales) -> bool:
    return learn != "transitions" and bool(learn)


def moves_kernel(learn: LearnScales) -> bool:
    return learn == "all"


def hyper_parameters(q: Posterior, learn: LearnScales) -> list[nn.Parameter]:
    """Those that ``learn`` stands for; the kernel's are made to take gradients."""
    chosen = [q.log_pairwise_sd] if learn and q.has_pairs else []
    if moves_amplitude(learn):
        chosen.append(q.log_amplitude)
    if moves_kernel(learn):
        q.kernel.requires_grad_(True)
        chosen += list(q.kernel.parameters())
    return chosen


def refuse_kernel(learn: LearnScales, name: str) -> None:
    if moves_kernel(learn):
        raise InputError(
            "learn_scales",
            f"'all' is more than {name!r} inference can move",
            "use inference='adam' or 'paper-batch', or another learn_scales",
        )


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
