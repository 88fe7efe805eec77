"""Which hyper-parameters move with the bound, and how they are moved between rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from structgp.errors import InputError
from structgp.gp import Posterior, Seen
from structgp.inference.problem import Problem

LearnScales: TypeAlias = bool | Literal["transitions", "all", "auto"]
"""What moves during a fit: nothing, the scale of tables of transitions, (True) the amplitude of nodes too,
or all of these and the kernel's own parameters. 'auto' is resolved in ``structgp.plan``."""

AMPLITUDE_PRIOR_SD = 1.5
"""Prior standard deviation of the log-amplitude around where it starts: a factor of 4.5 or so."""


@dataclass
class Slopes:
    """Derivatives of the expected log-likelihood in the functions of one block, one entry per batch: mean
    (B, T, R), bend (B, R, T, T) minus the second ones. Empty for blocks that learn their scales from
    less."""

    mean: list[Tensor] = field(default_factory=list)
    bend: list[Tensor] = field(default_factory=list)


def moves_amplitude(learn: LearnScales) -> bool:
    return learn != "transitions" and bool(learn)


def moves_kernel(learn: LearnScales) -> bool:
    return learn == "all"


def hyper_parameters(q: Posterior, learn: LearnScales) -> list[nn.Parameter]:
    """Those that ``learn`` stands for; the kernels' are made to take gradients."""
    chosen = []
    for block in q.blocks:
        moves = bool(learn) if block.shared else moves_amplitude(learn)
        if moves and not block.is_silent:
            chosen.append(block.log_amplitude)
        if moves_kernel(learn):
            chosen += block.kernel_parameters()
    return chosen


def refuse_kernel(learn: LearnScales, name: str) -> None:
    if moves_kernel(learn):
        raise InputError(
            "learn_scales",
            f"'all' is more than {name!r} inference can move",
            "use inference='adam' or 'paper-batch', or another learn_scales",
        )


def fit_tables(q: Posterior) -> None:
    """Moves the scale of every table towards where the bound is largest."""
    for block in q.blocks:
        block.fit_amplitude()


def learn_prior(
    problem: Problem, learn: LearnScales, slopes: Sequence[Slopes] | None = None
) -> list[Tensor]:
    """One step for the scales of every block's prior, at the posterior as it is, which is to be about the
    best under them. Returns by how much the variance of each function has grown, (R,) per block."""
    grown = []
    with torch.no_grad():
        for k, block in enumerate(problem.posterior.blocks):
            seen = [] if slopes is None else _seen(problem, k, slopes[k])
            if moves_kernel(learn):
                grown.append(block.learn_scales(seen, problem.prior_factors[k]))
            else:
                grown.append(block.learn_amplitude(seen))
        problem.refresh()
        problem.memory.clear()
    return grown


def _seen(problem: Problem, k: int, slopes: Slopes) -> list[Seen]:
    return [
        Seen(problem.conditional(i)[k], batch.rows[k], batch.masks[k], mean, bend)  # type: ignore[arg-type]
        for i, (batch, mean, bend) in enumerate(
            zip(problem.batches, slopes.mean, slopes.bend, strict=False)
        )
    ]
