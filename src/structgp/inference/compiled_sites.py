"""What a visit to a batch does with the weights that occur in it, in one pass over them each time; compiled
by numba.

Torch operations would go over the same arrays, which no cache has room for, some 30 times. Letters as in
``minibatch``: F weights of the batch, R functions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

ROWS_AT_ONCE = 1_024
"""Weights of a unit of work. Divergences are summed unit by unit, so that the result does not depend on the
number of threads."""

MOST = 1e280
"""A product of precisions up to which its logarithm is that of all of them."""

_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})


@_compiled
def _sum_of_logs(x: Any) -> float:
    """Of positive numbers (R,): one logarithm for all of them, where their product is a number."""
    product = 1.0
    for r in range(len(x)):
        product *= x[r]
    if 1 / MOST < product < MOST:
        return math.log(product)
    total = 0.0
    for r in range(len(x)):
        total += math.log(x[r])
    return total


@_compiled
def take_out(
    precision: Any, linear: Any, index: Any, prior: Any, site_precision: Any, site_linear: Any,
    variance: Any, mean: Any, sd: Any, divergence: Any, first: int, last: int,
) -> None:  # fmt: skip
    """Of the weights of units first..last: variance, mean (F, R) <- of what prior and all sites but this
    one say; sd (F, R) <- under all of them; divergence (units,) <- of the latter from the prior, up to a
    constant. precision, linear : (M, R) what all sites say; index : (F,) of the weights; prior : (F,)
    precisions; site_precision, site_linear : (F, R) what this one says."""
    R, none, one = precision.shape[1], site_linear.dtype.type(0), site_linear.dtype.type(1)
    whole, p, b = (
        np.empty(R, site_linear.dtype),
        np.empty(R, site_linear.dtype),
        np.empty(R, site_linear.dtype),
    )
    for unit in range(first, last):
        total = 0.0
        for i in range(unit * ROWS_AT_ONCE, min(len(index), (unit + 1) * ROWS_AT_ONCE)):
            j, least, squares = index[i], prior[i], none
            for r in range(R):  # double precision by itself, so that the rest fills vector instructions
                p[r] = precision[j, r] - site_precision[i, r]
                b[r] = linear[j, r] - site_linear[i, r]
            for r in range(R):
                variance[i, r] = one / ((p[r] if p[r] > none else none) + least)
                mean[i, r] = b[r] * variance[i, r]
                with_site = p[r] + site_precision[i, r]
                whole[r] = (with_site if with_site > none else none) + least
                inverse = one / whole[r]
                away = (b[r] + site_linear[i, r]) * inverse
                squares += away * away + inverse
                sd[i, r] = math.sqrt(inverse)
            total += 0.5 * (least * squares + _sum_of_logs(whole))
        divergence[unit] = total


@_compiled
def put_in(
    precision: Any, linear: Any, index: Any, prior: Any, site_precision: Any, site_linear: Any,
    variance: Any, mean: Any, new_precision: Any, say: Any, divergence: Any, first: int, last: int,
) -> None:  # fmt: skip
    """The other way round, of a new site in the place of the old one: new_precision (F, R), no less than 0,
    and a linear term that takes the place of ``say`` (F, R), what the rows of the batch say: such that the
    mean is that of the others, moved by variance times say. precision and linear (M, R) <- with the new
    site; divergence (units,) <- as above."""
    R, none, one = precision.shape[1], say.dtype.type(0), say.dtype.type(1)
    whole, p, b = np.empty(R, say.dtype), np.empty(R, say.dtype), np.empty(R, say.dtype)
    for unit in range(first, last):
        total = 0.0
        for i in range(unit * ROWS_AT_ONCE, min(len(index), (unit + 1) * ROWS_AT_ONCE)):
            j, least, squares = index[i], prior[i], none
            for r in range(R):
                new = new_precision[i, r]
                new_precision[i, r] = new = new if new > none else none
                say[i, r] = (mean[i, r] + say[i, r] * variance[i, r]) * new + say[i, r]
            for r in range(R):
                others, rest = precision[j, r] - site_precision[i, r], linear[j, r] - site_linear[i, r]
                p[r], b[r] = others, rest
                precision[j, r], linear[j, r] = others + new_precision[i, r], rest + say[i, r]
            for r in range(R):
                with_site = p[r] + new_precision[i, r]
                whole[r] = (with_site if with_site > none else none) + least
                inverse = one / whole[r]
                away = (b[r] + say[i, r]) * inverse
                squares += away * away + inverse
            total += 0.5 * (least * squares + _sum_of_logs(whole))
        divergence[unit] = total
