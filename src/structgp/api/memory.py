"""Training data that an estimator remembers, so that ``partial_fit`` can refit it with what is new.

A posterior of independent weights is a poor memory of few sequences: it knows how sure each weight is, and
not that several of them are only sure together, so that a handful of new sequences undoes what earlier ones
taught. As long as there is little data, the data themselves are the better memory, and a refit takes
seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from structgp.data.examples import Examples
from structgp.data.graphs import length_of

MOST_TOKENS = 20_000
"""As many are remembered: some ten seconds of a fit. Parts that follow on more data than that are large
themselves, or change little."""

FEW_TOKENS = 3_000
"""Up to so many, it is chosen with every part how often the data count: that takes 1 to 4 seconds. A choice
on some hundred tokens is a rough one: with 60, 90 and 110 lines of ``experiments.going_on``, weights of
53.9, 7.1 and 19.5 were chosen. Keeping one of these cost up to 7 % of the NLL."""

GROWTH = 1.5
"""By this factor the data may grow beyond that before it is chosen anew."""


@dataclass(frozen=True)
class Memory:
    """X, y, weights : all the data that a model was fitted to, as they were given. weighed : tokens when it
    was last chosen how often the data count."""

    X: list[Any]
    y: list[Any]
    weights: np.ndarray | None
    weighed: int

    @classmethod
    def of(cls, X: Sequence[Any], y: Sequence[Any], examples: Examples) -> Memory | None:
        """The sequences of X and y that were used, encoded as examples; None where there are too many to be
        remembered."""
        if examples.n_tokens > MOST_TOKENS:
            return None
        used = [i for i, rows in enumerate(examples.rows) if len(rows)]
        weights = None if examples.weights is None else examples.weights[used]
        return cls([X[i] for i in used], [y[i] for i in used], weights, examples.n_tokens)

    @property
    def n_tokens(self) -> int:
        return sum(map(length_of, self.X))

    def is_to_be_weighed(self, n_tokens: int) -> bool:
        """Whether it should be chosen anew how often the data count. n_tokens : with the new part."""
        return n_tokens <= FEW_TOKENS or n_tokens > GROWTH * self.weighed

    def after(self, earlier: Memory | None) -> Memory | None:
        """Earlier data and this; None where not all of it is remembered."""
        if earlier is None or earlier.n_tokens + self.n_tokens > MOST_TOKENS:
            return None
        weights = None
        if self.weights is not None or earlier.weights is not None:
            each = (earlier, self)
            weights = np.concatenate([np.ones(len(m.X)) if m.weights is None else m.weights for m in each])
        return Memory([*earlier.X, *self.X], [*earlier.y, *self.y], weights, earlier.weighed)
