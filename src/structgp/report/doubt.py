"""How unsure the model is of each token: what the text is shaded by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from structgp.api.estimator import StructuredGPClassifier

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
    doubts = estimator.predict_doubt(X)
    # Eight labels level with each other are as doubtful as it gets in practice, however many there are.
    full = math.log(min(8, max(2, len(estimator.classes_))))
    return [
        Doubt("total", "doubt", "entropy of a token's label probabilities", doubts.total, full),
        Doubt(
            "model", "doubt of the model", "the part that more labels would take away", doubts.model,
            full / 2,
        ),
    ]  # fmt: skip
