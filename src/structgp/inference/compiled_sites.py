"""Arithmetic of a visit to a batch on the weights that occur in it, in one pass over them each time;
compiled by numba.

Torch operations would go over the same arrays, which are too large for any cache, some 30 times. Letters as
in ``minibatch``: F weights of the batch, R functions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

ROWS_AT_ONCE = 1_024
"""Number of weights in a unit of work. Divergences are summed unit by unit, so that the result does not
depend on the number of threads."""

MOST = 1e280
"""Largest product of precisions whose logarithm stands for the sum of their logarithms."""

_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})


@_compiled
def _sum_of_logs(x: Any) -> float:
    """Sum of the logarithms of positive numbers (R,): one logarithm of their product, unless that is out of
    range."""
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
    """Takes the site of a batch out, for the weights of units first..last. Sets variance, mean (F, R),
    under the prior and all sites but this one; sd (F, R), under the prior and all sites; and divergence
    (units,), that of the latter Gaussian from the prior, up to a constant. precision, linear : (M, R) sums
    over all sites. index : (F,) numbers of the weights. prior : (F,) prior precisions. site_precision,
    site_linear : (F, R) of this site."""
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
    """Puts a new site in place of the old one, for the same weights. new_precision : (F, R), raised to at
    least 0 in place. say : (F, R) what the rows of the batch say; it is overwritten with the site's linear
    term, which is such that the mean is that under the other sites, moved by variance times say. Sets
    precision and linear (M, R), with the new site, and divergence (units,), as ``take_out`` does."""
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
