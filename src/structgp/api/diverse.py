"""Chooses sequences to label before there is a model: those that cover the pool's feature values best."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from structgp.data.graphs import Graph
from structgp.errors import InputError


def most_diverse(pool: Sequence[Any], n: int, by_token: bool = False) -> list[int]:
    """Indices of n sequences, chosen greedily: each adds the most that the earlier ones lack.

    A feature value that no chosen sequence has yet counts as often as it occurs in the pool. by_token :
    True if the cost of labelling is per token; what a sequence adds is then divided by the square root of
    its length, since dividing by the length itself would favour sequences of a single word. Cost: about
    O(N log N) steps plus the size of the pool, because what a sequence adds can only decrease."""
    values = [list(_values(x, i)) for i, x in enumerate(pool)]
    often = Counter(value for some in values for value in some)
    sets = [set(some) for some in values]
    prices = [max(1, _length(x)) ** 0.5 if by_token else 1.0 for x in pool]
    covered: set[Hashable] = set()

    def gain(i: int) -> float:
        return sum(often[v] for v in sets[i] - covered) / prices[i]

    queue = [(-gain(i), i) for i, some in enumerate(sets) if some]
    heapq.heapify(queue)
    chosen: list[int] = []
    while queue and len(chosen) < n:
        _, i = heapq.heappop(queue)
        now = -gain(i)
        if queue and now > queue[0][0]:  # by now it adds less than another sequence
            heapq.heappush(queue, (now, i))
            continue
        chosen.append(i)
        covered |= sets[i]
    return chosen


def _length(x: Any) -> int:
    return len(x.nodes) if isinstance(x, Graph) else len(x)


def _values(x: Any, number: int) -> Iterator[Hashable]:
    """All feature values in a sequence, with the names of the features."""
    for token in x.nodes if isinstance(x, Graph) else x:
        if isinstance(token, Mapping):
            yield from ((key, str(v)) for key, v in token.items() if not isinstance(v, np.ndarray))
        elif isinstance(token, list | tuple) and all(isinstance(v, str) for v in token):
            yield from enumerate(token)
        elif isinstance(token, set | frozenset):
            yield from token
        else:
            problem = f"tokens are given as {type(token).__name__}, which have no values to count"
            raise InputError(f"pool[{number}]", problem, "use strategy='random'")
