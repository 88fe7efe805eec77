"""How losses on new data fall as a model is fitted to more, told by fits to parts of the training data.

Cross-validation judges fits to two thirds of the data or somewhat more, whose losses are higher than that
of the fit to all of it will be. Fits to half as much tell by how much: a power law, L(n) = c n^-slope, goes
through both losses, and its value at all tokens is the expected loss of the fit to them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from structgp.plan.trials import Predictions

USUAL_SLOPE, SLOPES_DIFFER = 0.28, 0.1
"""The usual slope, and how far the slopes of tasks may lie from it. Over ten random TRAINING sets of 60
sequences, by left-out sequences of these sets, the mean slopes of four tasks were .25, .29, .24 and .33.
The usual slope is the mean of these. They differ by .04; other tasks may differ more."""

FARTHEST = 2.0
"""Largest factor between numbers of tokens for which the law is used: as far as it was looked at."""


@dataclass(frozen=True)
class Curve:
    """A power law of the loss. slope : relative fall of the loss per relative growth of the data. error :
    its standard error."""

    slope: float
    error: float

    @staticmethod
    def through(few: Predictions, many: Predictions, n_few: float, n_many: float) -> Curve:
        """The slope told by fits to ``n_few`` and ``n_many`` tokens, from their predictions for the same
        sequences, together with the usual slope. The usual curve where fewer than two sequences tell
        anything."""
        N = int(((few.tokens > 0) & (many.tokens > 0)).sum())
        if N < 2 or not (few.loss > 0 and many.loss > 0):
            return USUAL
        away = [(p.nll - p.loss * p.tokens) / (p.loss * p.tokens.sum()) for p in (few, many)]
        factor = math.log(n_many / n_few)
        error = math.sqrt(np.square(away[0] - away[1]).sum() * N / (N - 1)) / factor
        seen = math.log(few.loss / many.loss) / factor
        trust = SLOPES_DIFFER**2 / (SLOPES_DIFFER**2 + error**2)
        slope = USUAL_SLOPE + trust * (seen - USUAL_SLOPE)
        return Curve(slope, math.sqrt(trust) * error)

    def shrinks(self, n_fitted: float, n_all: float) -> float:
        """The factor from the loss of fits to ``n_fitted`` tokens to the loss of the fit to all tokens."""
        return min(n_all / n_fitted, FARTHEST) ** -max(0.0, self.slope)


USUAL = Curve(USUAL_SLOPE, SLOPES_DIFFER)
