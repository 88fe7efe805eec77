"""Training data that an estimator remembers, so that ``partial_fit`` can refit it together with new data.

A posterior of independent weights is a poor summary of a few sequences: it has the variance of each weight,
but not the correlations between weights, so that a handful of new sequences undoes what earlier ones
taught. As long as there is little data, it is better to keep the data themselves, and a refit takes
seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from structgp.data.examples import Examples
from structgp.data.graphs import length_of

MOST_TOKENS = 20_000
"""Largest number of tokens that are remembered; fitting them takes some ten seconds. Beyond that, a new
part of the data is either large itself or changes little."""

FEW_TOKENS = 3_000
"""Up to this many tokens, the data weight is chosen anew with every new part of the data, which takes 1 to
4 seconds. On some hundred tokens the choice is rough: with 60, 90 and 110 lines of
``experiments.going_on``, weights of 53.9, 7.1 and 19.5 were chosen. Keeping one of these cost up to 7 % of
the NLL."""

GROWTH = 1.5
"""Beyond FEW_TOKENS, the data weight is chosen anew when the data have grown by more than this factor."""


@dataclass(frozen=True)
class Memory:
    """The data that a model was fitted to. X, y, weights : all of it, as it was given. weighed : number of
    tokens when the data weight was last chosen."""

    X: list[Any]
    y: list[Any]
    weights: np.ndarray | None
    weighed: int

    @classmethod
    def of(cls, X: Sequence[Any], y: Sequence[Any], examples: Examples) -> Memory | None:
        """The sequences of X and y that the fit uses; None if there are too many tokens to remember.
        examples : the same data, encoded."""
        if examples.n_tokens > MOST_TOKENS:
            return None
        used = [i for i, rows in enumerate(examples.rows) if len(rows)]
        weights = None if examples.weights is None else examples.weights[used]
        return cls([X[i] for i in used], [y[i] for i in used], weights, examples.n_tokens)

    @property
    def n_tokens(self) -> int:
        return sum(map(length_of, self.X))

    def is_to_be_weighed(self, n_tokens: int) -> bool:
        """True if the data weight should be chosen anew. n_tokens : number of tokens with the new part."""
        return n_tokens <= FEW_TOKENS or n_tokens > GROWTH * self.weighed

    def after(self, earlier: Memory | None) -> Memory | None:
        """The earlier data followed by this; None if not all of it can be remembered."""
        if earlier is None or earlier.n_tokens + self.n_tokens > MOST_TOKENS:
            return None
        weights = None
        if self.weights is not None or earlier.weights is not None:
            each = (earlier, self)
            weights = np.concatenate([np.ones(len(m.X)) if m.weights is None else m.weights for m in each])
        return Memory([*earlier.X, *self.X], [*earlier.y, *self.y], weights, earlier.weighed)
