"""Active learning: which sequences of a pool to label next.

'bald' scores each sequence by how much its labels would tell about the functions. A batch should not ask
the same thing twice, so 'batch' also compares sequences with each other, by how posterior draws disagree
about their labels. Where the draws disagree about two sequences in the same way, the S x S matrices over
draws

    G_n = sum over tokens t and labels v of phi phi^T,
    phi_s(t, v) = (p_s(t, v) - E p(t, v)) / sqrt(E p(t, v)),

of the two point in the same direction. 'batch' repeatedly takes the most informative sequence, where each
candidate is discounted by its similarity to the sequences already taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from scipy.special import entr
from torch import Tensor

from structgp.answers.ask import Asked
from structgp.answers.potentials import spread_out
from structgp.api.diverse import most_diverse
from structgp.api.estimator import StructuredGPClassifier
from structgp.data.examples import as_list
from structgp.data.graphs import length_of
from structgp.errors import InputError

N_BEST = 10
CANDIDATES = 20
FEWEST_CANDIDATES = 200
"""'batch' considers the most informative sequences only: CANDIDATES for each sequence to pick, and at least
FEWEST_CANDIDATES."""

SIMILARITY_DRAWS = 128
"""Most draws that the similarity of two sequences is computed from: memory grows with their square."""

Scores = Callable[[Asked], np.ndarray]


def select(
    model: StructuredGPClassifier | None,
    pool: Iterable[Any],
    n: int,
    strategy: str = "batch",
    *,
    cost: str = "sequence",
    random_state: int = 0,
) -> list[int]:
    """Indices in ``pool`` of the n sequences to label next, most useful first.

    Parameters
    ----------
    model : a fitted model; None before there are any labels, with the strategies 'diverse' and 'random'.
    strategy : 'least-confidence' (the best labelling is improbable), 'margin' (it is hardly more probable
        than the second), 'token-entropy' (summed over tokens), 'n-best-entropy' (of the ten best
        labellings), 'bald' (the epistemic part of the tokens' uncertainty: how much labels would tell about
        the functions), 'batch' (the same for the n sequences together, which avoids near-duplicates),
        'diverse' (sequences whose tokens are frequent in the pool and do not occur in those already
        chosen), or 'random'.
    cost : 'sequence' if every sequence costs the same to label; 'token' if the cost is the length of the
        sequence: sequences are then ranked by their gain per token.
    random_state : seed of 'random'."""
    if not isinstance(n, int | np.integer) or n < 1:
        raise InputError("n", f"must be a number of sequences, got {n!r}", "use 1 or more")
    if cost not in ("sequence", "token"):
        raise InputError("cost", f"{cost!r} is not known", "use 'sequence' or 'token'")
    if model is None or strategy == "diverse":
        return _without_model(as_list(pool), n, strategy, cost == "token", random_state)
    asked = model.ask(pool)
    lengths = np.array([len(rows) for rows in asked.rows])
    there = np.flatnonzero(lengths)
    n = min(int(n), len(there))
    if strategy == "random":
        return np.random.default_rng(random_state).permutation(there)[:n].tolist()
    price = lengths if cost == "token" else np.ones(len(lengths))
    if strategy == "batch":
        return _batch(asked, n, price)
    if strategy not in STRATEGIES:
        known = ", ".join(map(repr, (*STRATEGIES, "batch", "diverse", "random")))
        raise InputError("strategy", f"{strategy!r} is not known", f"use one of {known}")
    gain = STRATEGIES[strategy](asked)[there] / price[there]
    return there[np.argsort(-gain, kind="stable")[:n]].tolist()


def _without_model(pool: list[Any], n: int, strategy: str, by_token: bool, seed: int) -> list[int]:
    """``select`` with the strategies that need no model."""
    if strategy == "diverse":
        return most_diverse(pool, n, by_token)
    if strategy != "random":
        raise InputError("strategy", f"{strategy!r} needs a model", "use 'diverse' or 'random'")
    there = [i for i, x in enumerate(pool) if length_of(x)]
    return np.random.default_rng(seed).permutation(there)[:n].tolist()


def _best(asked: Asked, n: int) -> list[list[float]]:
    """Probabilities of the n best labellings of each sequence."""
    return [[math.exp(value) for _, value in found] for found in asked.n_best(n)]


def _margin(asked: Asked) -> np.ndarray:
    return np.array([1 - (p[0] - p[1]) for p in ([*found, 0.0] for found in _best(asked, 2))])


def _bald(asked: Asked) -> np.ndarray:
    return np.array([float((p[:, 0] - p[:, 1]).sum()) for p in asked.token_uncertainty()])


STRATEGIES: dict[str, Scores] = {
    "least-confidence": lambda asked: np.array([1 - p[0] for p in _best(asked, 1)]),
    "margin": _margin,
    "token-entropy": lambda asked: np.array([float(u[:, 0].sum()) for u in asked.token_uncertainty()]),
    "n-best-entropy": lambda asked: np.array(
        [entr(np.array(p) / sum(p)).sum() for p in _best(asked, N_BEST)]
    ),
    "bald": _bald,
}


def _batch(asked: Asked, n: int, price: np.ndarray) -> list[int]:
    alone = _bald(asked) / np.maximum(price, 1)
    there = [i for i, rows in enumerate(asked.rows) if len(rows)]
    likely = sorted(there, key=lambda i: -alone[i])[: max(CANDIDATES * n, FEWEST_CANDIDATES)]
    S = max(1, asked.question.n_draws + asked.question.n_draws % 2)  # draws come with their mirror images
    some = spread_out(S, SIMILARITY_DRAWS)
    questions = torch.zeros((len(likely), len(some) ** 2))
    for i, p in asked.some(likely).draw_marginals():
        if len(p) == S:  # a very long sequence has fewer draws: it counts as similar to no other
            questions[i] = _question(p[some])
    return [likely[k] for k in _greedy(torch.from_numpy(alone[likely]), questions, n)]


def _question(p: Tensor) -> Tensor:
    """(S S,) matrix G of one sequence, flattened, scaled to length 1. p : (S, T, V) probabilities."""
    mean = p.mean(0)
    phi = ((p - mean) / mean.clamp(min=1e-12).sqrt()).flatten(1).float()
    whole = (phi @ phi.T).flatten()
    return whole / whole.norm().clamp(min=1e-12)


def _greedy(gain: Tensor, questions: Tensor, n: int) -> list[int]:
    """Indices of n of C sequences, chosen greedily by gain * (1 - similarity to those chosen so far).

    gain : (C,). questions : (C, Q), from ``_question``. The median similarity of two sequences of the pool
    counts as 0. Cost O(C Q (n + C))."""
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
