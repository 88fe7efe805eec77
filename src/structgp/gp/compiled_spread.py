"""Draws of linear functions around their mean, token by token; compiled by numba.

Letters as in ``gp.block``; A features of a token, n draws without their mirror images.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

_compiled = njit(cache=True, nogil=True, error_model="numpy")
_KEY, _FIRST, _SECOND = (
    np.int64(-7046029254386353131), np.int64(-4658895280553007687), np.int64(-7723592293110705685)
)  # fmt: skip


@_compiled
def _row(name: Any, key: Any, last: int) -> Any:
    """As of ``weight_rows._row``, of one feature. last : the number of the last row."""
    z = name + key * _KEY
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _FIRST
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _SECOND
    return (z ^ ((z >> 31) & ((1 << 33) - 1))) & last


@_compiled
def spread_tokens(
    place: Any, value: Any, name: Any, unseen: Any, deviation: Any, table: Any, keys: Any, first: int,
    last: int, out: Any,
) -> None:  # fmt: skip
    """out (2 n, B, T, R) <- draws of h around its mean, of examples first..last. place, value, name, unseen
    : (B, T, A), as of ``ActiveFeatures``; deviation : (M, R) of each weight; table : (rows, R n) standard
    normal numbers; keys : (B,)."""
    _, T, A = place.shape
    n, R = len(out) // 2, out.shape[3]
    total = np.empty(R * n, out.dtype)
    for b in range(first, last):
        for t in range(T):
            total[:] = 0
            for a in range(A):
                x = value[b, t, a]
                if x == 0:
                    continue
                noise, at = table[_row(name[b, t, a], keys[b], len(table) - 1)], place[b, t, a]
                open = np.sqrt(unseen[b, t, a])
                for r in range(R):
                    own = x * (deviation[at, r] if at >= 0 else open)
                    for s in range(r * n, r * n + n):
                        total[s] += own * noise[s]
            for r in range(R):
                for s in range(n):
                    out[s, b, t, r] = total[r * n + s]
                    out[n + s, b, t, r] = -total[r * n + s]
