"""How unsure the model is of each token: what the text is shaded by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from structgp.estimator import StructuredGPClassifier

Doubts = list[NDArray[np.float64]]


@dataclass(frozen=True)
class Doubt:
    """One kind of doubt. ``values`` : (T,) nats for each sequence; ``full`` : where the shading is at its
    darkest; ``title`` and ``meaning`` are for the reader."""

    name: str
    title: str
    meaning: str
    values: Doubts
    full: float


def token_doubts(estimator: StructuredGPClassifier, X: Sequence[Any]) -> list[Doubt]:
    """Every kind of doubt there is about the tokens of X, the one to begin with first. The page has a
    selector where there are several."""
    total = [
        np.array([_entropy(list(p.values())) for p in sequence])
        for sequence in estimator.predict_marginals(X)
    ]
    # Eight labels level with each other are as doubtful as it gets in practice, however many there are.
    full = math.log(min(8, max(2, len(estimator.classes_))))
    meaning = "entropy of a token's label probabilities"
    return [Doubt("total", "doubt", meaning, total, full)]


def _entropy(p: Sequence[float]) -> float:
    return -math.fsum(q * math.log(q) for q in p if q > 0) + 0.0
