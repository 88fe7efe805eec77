"""Active learning: which sequences of a pool to label next.

What labels would tell of the functions is a sequence's own ('bald'); a batch should not ask the same
question twice. How alike two questions are is seen in the draws: where draws disagree about the labels of
one sequence just as they disagree about those of the other,

    G_n = sum over tokens t and labels v of phi phi^T,
    phi_s(t, v) = (p_s(t, v) - E p(t, v)) / sqrt(E p(t, v)),

S x S over draws, point the same way. 'batch' takes the most informative sequence again and again, each
discounted by its likeness to those it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structgp.api.estimator import StructuredGPClassifier
from structgp.api.questions import as_list
from structgp.data.forms import length
from structgp.errors import InputError

N_BEST = 10
CANDIDATES = 20
FEWEST_CANDIDATES = 200
"""Candidates of the batch strategy for each sequence it picks, the most informative ones, and at least."""

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
    strategy : 'least-confidence' (the best labelling is improbable), 'margin' (it is hardly more
        probable than the second), 'token-entropy' (summed over tokens), 'n-best-entropy' (of the ten
        best labellings), 'bald' (the model's part of the tokens' doubt: what labels would tell of the
        functions), 'batch' (the same of the n sequences together, which avoids near-duplicates), or
        'random'.
    cost : 'sequence', each costs the same to label; 'token', a sequence costs its length, and what
        counts is the gain for each token.
    random_state : seed of 'random'.
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
    there = [i for i, x in enumerate(X) if length(x, f"pool[{i}]")]
    likely = sorted(there, key=lambda i: -alone[i])[: max(CANDIDATES * n, FEWEST_CANDIDATES)]
    draws = model._ready().draw_marginals([X[i] for i in likely], model.average)
    questions = torch.empty(0)
    for i, p in draws:
        question = _question(p)
        if not len(questions):
            questions = question.new_empty((len(likely), len(question)))
        questions[i] = question
    order = _greedy(torch.from_numpy(alone[likely]), questions, n)
    return [likely[k] for k in order]


def _question(p: Tensor) -> Tensor:
    """(S S,) G of one sequence, of length 1, from its probabilities (S, T, V)."""
    mean = p.mean(0)
    phi = ((p - mean) / mean.clamp(min=1e-12).sqrt()).flatten(1).float()
    whole = (phi @ phi.T).flatten()
    return whole / whole.norm().clamp(min=1e-12)


def _greedy(gain: Tensor, questions: Tensor, n: int) -> list[int]:
    """n of C sequences, by gain (C,) times how little their questions (C, Q) are like those before. What
    two sequences of the pool have in common on average counts as nothing. Cost O(C Q (n + C))."""
    usual = float((questions @ questions.T).median()) if len(questions) > 1 else 0.0
    alike = torch.zeros_like(gain)
    chosen: list[int] = []
    for _ in range(min(n, len(gain))):
        value = gain * (1 - alike)
        value[chosen] = -torch.inf
        best = int(value.argmax())
        chosen.append(best)
        likeness = (questions @ questions[best] - usual) / max(1e-12, 1 - usual)
        alike = torch.maximum(alike, likeness.clamp(0, 1).to(alike))
    return chosen
