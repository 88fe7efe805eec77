"""Scales of a prior on the bound, in closed form.

For a kernel k = sum_c w_c k_c and the posterior that is best under it, the derivative of the bound is

    d ELBO / d log w_c = (E_c - gamma_c) / 2,

E_c : what the fitted function spends in component c, its squared norm there over w_c; gamma_c : the
number of parameters that the data determine in it. At the optimum they are equal, so that

    w_c <- w_c E_c / gamma_c                                       (MacKay, 1992)

climbs to it without a step size. One component may be a whole template, one feature, or one of the
functions that the labels are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

AXIS_PRIOR_COUNT = 2.0
"""Parameters' worth of prior that the amplitude of one function is right as it is."""

LARGEST_FACTOR = 4.0
"""By which one step may change a scale."""


@dataclass(frozen=True)
class Seen:
    """What a round of second-order inference found on one batch: the conditional, the rows (B, T, W) and
    mask (B, T) behind it, and derivatives of the expected log-likelihood in the functions, slope (B, T,
    R) and bend (B, R, T, T), minus the second ones."""

    conditional: Any
    rows: Tensor
    mask: Tensor
    slope: Tensor
    bend: Tensor


def ratio(energy: Tensor, determined: Tensor, prior: float) -> Tensor:
    """E / gamma, both with ``prior`` parameters' worth of 'as it is' added, within reason."""
    found = (energy + prior) / (determined.clamp(min=0) + prior)
    return found.clamp(1 / LARGEST_FACTOR, LARGEST_FACTOR)
