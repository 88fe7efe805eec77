"""Shared by compiled loops over a chain: memory for rows of lanes, and a step from one token to the next.

The lanes fill 64 bytes: eight numbers in double precision, sixteen in single (``graph.lanes``)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from structgp.structures.graph.lanes import dot, four_dots

FOUR = 4
_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})


@_compiled
def aligned(n: int, like: Any) -> Any:
    """An array of n numbers that begins where a cache line does, with room behind them for the last block
    of four rows. like : an array of the wanted type of numbers."""
    lanes = 64 // like.itemsize
    whole = np.zeros(n + (FOUR + 1) * lanes, like.dtype)
    first = (-(whole.ctypes.data // like.itemsize)) % lanes
    return whole[first:]


@_compiled
def step(table: Any, along: int, across: int, V: int, told: Any, out: Any, o: int) -> None:
    """out[o + L j] <- the sum over i of told[L i] table[along i + across j], of L lanes."""
    row, lanes = 0, 64 // out.itemsize
    while row + FOUR <= V:
        four_dots(out, o + lanes * row, V, told, table, across * row, along, across)
        row += FOUR
    while row < V:
        dot(out, o + lanes * row, V, told, table, across * row, along)
        row += 1
