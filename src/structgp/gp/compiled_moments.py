"""Mean and variance of linear functions at tokens, straight from their rows, and draws of them; compiled by
numba.

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
    """out (2 R,) += means (R,) times x, and variances (R,) times its square."""
    square = x * x
    for r in range(R):
        out[r] += x * weights[r]
        out[R + r] += square * weights[R + r]


@_compiled
def add_templates(
    rows: Any, sizes: Any, starts: Any, seldom: Any, unseen: Any, table: Any, out: Any
) -> None:
    """out (N, 2 R) += what the templates of a ``RelevanceKernel`` say. rows : (N, P) ids, negative where
    there is no value; sizes, starts : (P,) how many values are known, and where the first is in the table
    (M, 2 R) of means and variances; seldom : (D,) which values are, empty where that is no feature;
    unseen : (P,) variances of features never seen."""
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
    """The same of sparse features: rows (N, 2 A) with ids, negative where there is none, and values in
    turn."""
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
    """out (N, R, n) += draws of the functions at tokens around their means. place, value, unseen, row : (N,
    A) of each feature of a token its weight, negative for one never seen, its value, its prior variance
    where it was never seen, and its row in the table (rows, R, n) of standard normal numbers; deviation :
    (M, R) of the weights."""
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
