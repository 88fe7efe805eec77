"""Active learning: which sequences of a pool to label next.

The last strategy picks a batch as a whole. To second order, the information that the labels of a token t
hold of the functions is that of a linear-Gaussian measurement, whose size in draw s is

    phi_s(t, v) = (p_s(t, v) - E p(t, v)) / sqrt(E p(t, v)),

and a batch A holds 1/2 log det(I + sum_A phi phi^T / S), S x S over draws. A near-duplicate measures what
has been measured already, and adds little. The gain of a sequence only falls as others are picked (it is
submodular), so that the greedy choice need look again only at those that might still be best (Minoux,
1978).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structgp.answers import as_list
from structgp.errors import InputError
from structgp.estimator import StructuredGPClassifier

N_BEST = 10
CANDIDATES = 20
"""Candidates of the batch strategy for each sequence it picks: the ones with most information."""

NOISE = 1.0

Scores = Callable[[StructuredGPClassifier, list[Any]], np.ndarray]


def select(
    model: StructuredGPClassifier,
    pool: Iterable[Any],
    n: int,
    strategy: str = "batch",
    *,
    cost: str = "sequence",
    random_state: int = 0,
) -> list[int]:
    """The places in ``pool`` of the n sequences to label next, most useful first.

    Parameters
    ----------
    strategy : 'least-confidence' (the best labelling is improbable), 'margin' (it is hardly more probable
    than
        the second), 'token-entropy' (summed over tokens), 'n-best-entropy' (of the ten best labellings),
        'bald' (the model's part of the tokens' doubt: what labels would tell of the functions), 'batch'
        (the same of the n sequences together, which avoids near-duplicates), or 'random'.
    cost : 'sequence', each costs the same to label; 'token', a sequence costs its length, and what counts
    is
        the gain for each token.
    """
    X = as_list(pool)
    if not isinstance(n, int | np.integer) or n < 1:
        raise InputError("n", f"{n!r} is no number of sequences", "use 1 or more")
    if cost not in ("sequence", "token"):
        raise InputError("cost", f"{cost!r} is not known", "use 'sequence' or 'token'")
    lengths = np.array([len(rows) for rows in model._ready().encoder.transform(X)])
    there = np.flatnonzero(lengths)
    n = min(int(n), len(there))
    if strategy == "random":
        return np.random.default_rng(random_state).permutation(there)[:n].tolist()
    price = lengths if cost == "token" else np.ones(len(X))
    if strategy == "batch":
        return _batch(model, X, n, price)
    if strategy not in STRATEGIES:
        known = ", ".join(map(repr, (*STRATEGIES, "batch", "random")))
        raise InputError("strategy", f"{strategy!r} is not known", f"use one of {known}")
    gain = STRATEGIES[strategy](model, X)[there] / price[there]
    return there[np.argsort(-gain, kind="stable")[:n]].tolist()


def _least_confidence(model: StructuredGPClassifier, X: list[Any]) -> np.ndarray:
    return np.array([1 - found[0].probability for found in model.predict_n_best(X, 1)])


def _margin(model: StructuredGPClassifier, X: list[Any]) -> np.ndarray:
    best = [[y.probability for y in found] + [0.0] for found in model.predict_n_best(X, 2)]
    return np.array([1 - (p[0] - p[1]) for p in best])


def _n_best_entropy(model: StructuredGPClassifier, X: list[Any]) -> np.ndarray:
    scores = []
    for found in model.predict_n_best(X, N_BEST):
        p = np.array([y.probability for y in found])
        p = p / p.sum()
        scores.append(-sum(q * math.log(q) for q in p if q > 0))
    return np.array(scores)


def _token_entropy(model: StructuredGPClassifier, X: list[Any]) -> np.ndarray:
    return np.array([float(total.sum()) for total in model.predict_doubt(X).total])


def _bald(model: StructuredGPClassifier, X: list[Any]) -> np.ndarray:
    return np.array([float(part.sum()) for part in model.predict_doubt(X).model])


STRATEGIES: dict[str, Scores] = {
    "least-confidence": _least_confidence,
    "margin": _margin,
    "token-entropy": _token_entropy,
    "n-best-entropy": _n_best_entropy,
    "bald": _bald,
}


def _batch(model: StructuredGPClassifier, X: list[Any], n: int, price: np.ndarray) -> list[int]:
    alone = _bald(model, X) / np.maximum(price, 1)
    alone[[i for i, x in enumerate(X) if not len(x)]] = -np.inf
    likely = np.argsort(-alone, kind="stable")[: max(CANDIDATES * n, 200)]
    likely = np.sort(likely[np.isfinite(alone[likely])])
    asked = [X[i] for i in likely]
    features = {
        int(likely[i]): _measurements(p)
        for i, p in model._ready().draw_marginals(asked, model.average)
    }
    return _greedy(features, n, price)


def _measurements(p: Tensor) -> Tensor:
    """(S, at most S) phi of one sequence, up to a rotation, from its probabilities (S, T, V)."""
    mean = p.mean(0)
    phi = ((p - mean) / mean.clamp(min=1e-12).sqrt()).flatten(1) / math.sqrt(NOISE * len(p))
    if phi.shape[1] <= len(p):
        return phi.float()
    values, vectors = torch.linalg.eigh(phi @ phi.T)
    return (vectors * values.clamp(min=0).sqrt()).float()


def _greedy(features: dict[int, Tensor], n: int, price: Sequence[float] | np.ndarray) -> list[int]:
    S = len(next(iter(features.values())))
    factor = torch.eye(S)  # Cholesky factor of I + sum of phi phi^T over what is picked

    def gain(i: int) -> float:
        seen = torch.linalg.solve_triangular(factor, features[i], upper=False)
        inner = seen.T @ seen if seen.shape[1] <= S else seen @ seen.T
        eye = torch.eye(len(inner))
        return 0.5 * float(torch.linalg.slogdet(eye + inner)[1]) / max(1.0, float(price[i]))

    heap = [(-gain(i), i, 0) for i in features]
    heapq.heapify(heap)
    chosen: list[int] = []
    while heap and len(chosen) < n:
        _, i, when = heapq.heappop(heap)
        if when < len(chosen):
            heapq.heappush(heap, (-gain(i), i, len(chosen)))
            continue
        chosen.append(i)
        whole = factor @ factor.T + features[i] @ features[i].T
        factor = torch.linalg.cholesky(whole)
    return chosen
