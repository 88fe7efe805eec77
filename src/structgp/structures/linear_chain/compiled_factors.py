"""What draws add to the mean scores of a chain, laid out for ``compiled_draws``; compiled by numba.

One pass over the scores subtracts the highest of each position and records the sums that are needed;
exponentials follow while the numbers are in the nearest cache. Letters as in ``compiled_draws``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from structgp.structures.graph.lane_code import LANES
from structgp.structures.linear_chain.lane_exp import LOWEST, exp_in_place

L = LANES
WIDEST = -LOWEST["float64"]
"""Largest difference between scores of a position for which all exponentials are above 0."""

_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})


@_compiled
def width_of(f: Any, lengths: Any) -> float:
    """Largest difference between scores of one position of f (S, B, T, V), without those of -inf; inf where
    a position has no other scores."""
    S, B, _, V = f.shape
    found = 0.0
    for s in range(S):
        for b in range(B):
            for t in range(lengths[b]):
                high, low = -np.inf, np.inf
                for v in range(V):
                    x = f[s, b, t, v]
                    high = max(high, x)
                    low = min(low, x if x > -np.inf else np.inf)
                found = max(found, high - low if high > -np.inf else np.inf)
    return found


@_compiled
def fill_factors(
    f: Any, packs: Any, lengths: Any, known: Any, is_log: bool, factor: Any, highest: Any, told: Any,
    first: int, last: int,
) -> None:  # fmt: skip
    """For packs first..last: factor (packs, K, T V L) <- exponentials of f (S, B, T, V) minus the highest
    of their position, or if ``is_log`` the differences themselves; highest (B,) <- the highest scores,
    summed over positions and averaged over draws; told (B,) <- the same of the scores of known labels
    (B, T), unless negative. Padding is neither read nor written."""
    S, _, _, V = f.shape
    G, K = packs.shape[1], factor.shape[1]
    own = L // G
    for p in range(first, last):
        n = lengths[packs[p, 0]]
        for g in range(G):
            b = packs[p, g] if packs[p, g] >= 0 else packs[p, 0]
            highest[b], told[b] = 0.0, 0.0
            for s in range(S):
                out, lane = factor[p, s // own], g * own + s % own
                for t in range(n):
                    here, high = f[s, b, t], f[s, b, t, 0]
                    for v in range(1, V):
                        high = max(high, here[v])
                    for v in range(V):
                        out[(t * V + v) * L + lane] = here[v] - high
                    highest[b] += high / S
                    if known[b, t] >= 0:
                        told[b] += here[known[b, t]] / S
        for k in range(K):
            if not is_log:
                exp_in_place(factor[p, k, : n * V * L])
