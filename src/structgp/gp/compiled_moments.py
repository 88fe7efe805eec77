"""Numba loops for the means, variances and draws of linear functions at tokens, straight from their rows.

Letters as in ``gp.block``; N tokens, P templates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

_compiled = njit(
    cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz", "nnan"}
)


@_compiled
def _add(weights: Any, x: Any, R: int, out: Any) -> None:
    """Adds means (R,) times x and variances (R,) times x^2 to out (2 R,)."""
    square = x * x
    for r in range(R):
        out[r] += x * weights[r]
        out[R + r] += square * weights[R + r]


@_compiled
def add_templates(
    rows: Any, sizes: Any, starts: Any, seldom: Any, unseen: Any, table: Any, out: Any
) -> None:
    """Adds the contributions of the templates of a ``RelevanceKernel`` to out (N, 2 R). rows : (N, P) ids,
    negative where there is no value. sizes, starts : (P,) number of known values of each template, and
    position of the first in the table (M, 2 R) of means and variances. seldom : (D,) True for values that
    are seldom, empty if that is not a feature. unseen : (P,) variances of features never seen."""
    R = table.shape[1] // 2
    one, D = table.dtype.type(1), len(seldom)
    for i in range(len(rows)):
        for p in range(len(sizes)):
            place = int(rows[i, p])
            if place < 0:
                continue
            if place < sizes[p]:
                place += starts[p]
                _add(table[place], one, R, out[i])
                if D and seldom[place]:
                    _add(table[D + p], one, R, out[i])
                continue
            for r in range(R, 2 * R):
                out[i, r] += unseen[p]
            if D:
                _add(table[D + p], one, R, out[i])


@_compiled
def add_entries(rows: Any, size: int, unseen: Any, table: Any, out: Any) -> None:
    """The same for sparse features: rows (N, 2 A) of ids and values in turn; an id is negative where there
    is no feature."""
    R = table.shape[1] // 2
    for i in range(len(rows)):
        for a in range(0, rows.shape[1], 2):
            place, x = int(rows[i, a]), table.dtype.type(rows[i, a + 1])
            if 0 <= place < size:
                _add(table[place], x, R, out[i])
            elif place >= 0:
                for r in range(R, 2 * R):
                    out[i, r] += unseen * x * x


@_compiled
def add_draws(place: Any, value: Any, unseen: Any, row: Any, deviation: Any, table: Any, out: Any) -> None:
    """Adds draws of the functions at tokens, around their means, to out (N, R, n). place, value, unseen,
    row : (N, A) for each feature of a token, the index of its weight (negative if never seen), its value,
    its prior variance if it was never seen, and its row in the table (rows, R, n) of standard normal
    numbers. deviation : (M, R) standard deviations of the weights."""
    for i in range(len(place)):
        for a in range(place.shape[1]):
            x, noise = value[i, a], table[row[i, a]]
            if x == 0:
                continue
            new = x * np.sqrt(unseen[i, a])
            for r in range(noise.shape[0]):
                own = new if place[i, a] < 0 else x * deviation[place[i, a], r]
                for k in range(noise.shape[1]):
                    out[i, r, k] += own * noise[r, k]
