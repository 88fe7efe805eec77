"""How unsure the model is of each token: what the text is shaded by."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from structgp.answers.ask import Asked

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


def token_doubts(asked: Asked) -> list[Doubt]:
    """Every kind of doubt there is about the tokens of X, the one to begin with first. The page has a
    selector where there are several."""
    both = asked.token_uncertainty()
    total, model = [u[:, 0] for u in both], [u[:, 0] - u[:, 1] for u in both]
    # Eight labels level with each other are as doubtful as it gets in practice, however many there are.
    full = math.log(min(8, max(2, len(asked.model.labels.classes))))
    return [
        Doubt("total", "doubt", "entropy of a token's label probabilities", total, full),
        Doubt(
            "model", "doubt of the model", "the part that more labels would take away", model,
            full / 2,
        ),
    ]  # fmt: skip
