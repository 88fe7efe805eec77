"""Second moments of Markov chains (``second_moments``), compiled by numba.

One start t of one chain at a time, with all its numbers in the nearest cache, and only as far as y_t still
tells anything about later labels: short chains do not wait for long ones, nor chains that forget soon for
one that does not. Letters as in ``second_moments``."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from structgp.structures.base import Curvature
from structgp.threads import share

DISTANCES = 8
"""About how many positions a chain remembers, used to judge whether a second thread pays off."""

_reordered = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})


def curvature_of(
    node: Tensor, step: Tensor, mask: Tensor, basis: Tensor | None, negligible: float
) -> Curvature:
    """Like ``chain_curvature``. Cost O(S B T d V^2 (V + R)) where chains forget within d positions."""
    S, B, T, V = node.shape
    given = node.contiguous().numpy(), step.contiguous().numpy(), mask.sum(-1).numpy()
    along = np.eye(V) if basis is None else basis.double().contiguous().numpy()
    nodes, counts = np.zeros((B, along.shape[1], T, T)), np.zeros((B, V, V))
    work = partial(_moments, *given, along, basis is None, negligible, nodes, counts)
    share(work, B, S * B * T * DISTANCES * V * V * (V + along.shape[1]))
    return Curvature(torch.from_numpy(nodes).to(node), torch.from_numpy(counts).to(node))


@_reordered
def _advance(step: Any, here: Any, there: Any) -> None:
    """there (V, W) = step (V, V) transposed times here (V, W); labels that cannot follow cost nothing."""
    there.fill(0)
    for i in range(len(here)):
        for k in range(len(there)):
            p = step[i, k]
            if p != 0:
                for j in range(here.shape[1]):
                    there[k, j] += p * here[i, j]


@_reordered
def _moments(
    node: Any, step: Any, lengths: Any, basis: Any, of_labels: bool, negligible: float, nodes: Any,
    counts: Any, first: int, last: int,
) -> None:  # fmt: skip
    """For chains first..last: nodes (B, R, T, T) and counts (B, V, V) <- means over draws.

    ``here[i, j]`` is the change that y_t = j makes to the probability of y_t+d = i, C[t, t + d](j, i) minus
    the marginal; the columns from V on are its sums over j, weighted by p(y_t = j) times each direction."""
    S, _, _, V = node.shape
    R, W = basis.shape[1], V if of_labels else V + basis.shape[1]
    here, there, found = np.empty((V, W)), np.empty((V, W)), np.empty((V, V))
    for b in range(first, last):
        n = lengths[b]
        for s in range(S):
            for t in range(n):
                mu = node[s, b, t]
                for i in range(V):
                    for j in range(V):
                        here[i, j] = (1.0 if i == j else 0.0) - mu[i]
                    for r in range(W - V):
                        total = 0.0
                        for j in range(V):
                            total += here[i, j] * mu[j] * basis[j, r]
                        here[i, V + r] = total
                found.fill(0)
                for d in range(n - t):
                    if d > 0:
                        _advance(step[s, b, t + d - 1], here, there)
                        here, there = there, here
                    for r in range(R):
                        total = 0.0
                        if of_labels:
                            total = mu[r] * here[r, r]
                        else:
                            for i in range(V):
                                total += basis[i, r] * here[i, V + r]
                        nodes[b, r, t, t + d] += total / S
                    largest = 0.0
                    for i in range(V):
                        for j in range(V):
                            largest = max(largest, mu[j] * abs(here[i, j]))
                    if largest < negligible:
                        break
                    if t > 0 and t + d < n - 1:
                        following = step[s, b, t + d]
                        for i in range(V):
                            for j in range(V):
                                found[i, j] += here[i, j] * following[i, j]
                if t > 0:
                    before = step[s, b, t - 1]
                    for i in range(V):
                        for j in range(V):
                            # p(y_t-1 = i, y_t = j), and how many more i -> j follow
                            both = node[s, b, t - 1, i] * before[i, j]
                            counts[b, i, j] += both * (1 - both + 2 * found[i, j]) / S
        for r in range(R):
            for t in range(n):
                for u in range(t):
                    nodes[b, r, t, u] = nodes[b, r, u, t]
