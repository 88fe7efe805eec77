"""Slow and obvious versions of what the library computes fast, for tests to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np


def labellings(T: int, V: int) -> np.ndarray:
    """(V^T, T) every labelling of T positions."""
    return np.array(list(product(range(V), repeat=T)), dtype=int).reshape(V**T, T)


@dataclass(frozen=True)
class ChainTable:
    """Every labelling of one chain, its log-score and its probability."""

    labels: np.ndarray  # (V^T, T)
    score: np.ndarray  # (V^T,)
    log_z: float
    prob: np.ndarray  # (V^T,)
    on: np.ndarray  # (V^T, T, V) whether position t has label j
    count: np.ndarray  # (V^T, V, V) how often i is followed by j

    @property
    def nodes(self) -> np.ndarray:
        """(T, V) marginals."""
        return np.tensordot(self.prob, self.on, 1)

    @property
    def pairs(self) -> np.ndarray:
        """(V, V) expected number of each transition."""
        return np.tensordot(self.prob, self.count, 1)

    @property
    def node_covariance(self) -> np.ndarray:
        """(V, T, T) Cov(1[y_t = j], 1[y_t' = j])."""
        away = self.on - self.nodes
        return np.einsum("n,ntj,nsj->jts", self.prob, away, away)

    @property
    def count_variance(self) -> np.ndarray:
        """(V, V) variance of the number of each transition."""
        return np.tensordot(self.prob, (self.count - self.pairs) ** 2, 1)


def chain_table(f: np.ndarray, g: np.ndarray) -> ChainTable:
    """The chain with unary scores f (T, V) and pairwise scores g (V, V), by enumeration.

    In extended precision where the machine has it.
    """
    f, g = np.asarray(f, dtype=np.longdouble), np.asarray(g, dtype=np.longdouble)
    T, V = f.shape
    labels = labellings(T, V)
    score = np.array([_score(f, g, y) for y in labels], dtype=np.longdouble)
    top = score.max()
    log_z = top + np.log(np.exp(score - top).sum())
    on = (labels[:, :, None] == np.arange(V)).astype(float)
    count = np.einsum("nti,ntj->nij", on[:, :-1], on[:, 1:])
    return ChainTable(labels, score, log_z, np.exp(score - log_z), on, count)


def _score(f: np.ndarray, g: np.ndarray, y: np.ndarray) -> np.longdouble:
    total = np.longdouble(0)
    for t, label in enumerate(y):
        total += f[t, label]
        if t > 0:
            total += g[y[t - 1], label]
    return total
