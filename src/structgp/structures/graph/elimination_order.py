"""The order in which the variables of a batch of factor graphs are eliminated, and its cost.

To eliminate a variable is to sum over its labels in a table that it shares with its neighbours, which then
become neighbours of one another. The variable and its neighbours are its clique; the neighbours alone are
its separator. Variables with at most one neighbour go first, round by round, those of the whole batch at
once: this completes a forest in as many rounds as it is deep. What is left of an example, its core, goes
one variable at a time: first the variable whose neighbours need the fewest new links and, among equals, the
one with the smallest table.

Letters: B examples, N variables of an example (padded), M real variables of the batch. A variable of the
batch is known by its place b N + n.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from structgp.data.layout import GraphLayout
from structgp.errors import InputError

MOST_ENTRIES = 1 << 26
"""Largest number of table entries of an example that is eliminated: half a GiB of doubles if all tables of
one draw were held at once, and about a second of work per draw."""


@dataclass(frozen=True)
class Cost:
    """entries : (B,) table entries of each example, the sum over its cliques of the product of their label
    counts. largest : (B,) table entries of its largest clique. Both are inf for an example past the
    limit."""

    entries: Tensor
    largest: Tensor


@dataclass(frozen=True)
class Order:
    """The cliques of a batch, by example and, within one, by level. variable : (M,) the variable that each
    eliminates. level : (M,) above the levels of the cliques that must come before it. start : (M + 1,),
    member : the variables of clique c are ``member[start[c]:start[c + 1]]``, those eliminated later first,
    so that its own variable is the last. entries, largest : (B,) as in ``Cost``. There are no cliques if
    some example is past the limit."""

    variable: np.ndarray
    level: np.ndarray
    start: np.ndarray
    member: np.ndarray
    entries: np.ndarray
    largest: np.ndarray


def cost(layout: GraphLayout, n_labels: int | None = None, limit: float = MOST_ENTRIES) -> Cost:
    """The cost of elimination, found without building a table. ``n_labels`` : V, needed if ``layout`` has
    neither spans nor tuples. The search for the order of an example stops past ``limit``."""
    found = find_order(layout, label_counts(layout, n_labels), limit)
    return Cost(torch.from_numpy(found.entries), torch.from_numpy(found.largest))


def entries_of(layout: GraphLayout, n_labels: int | None = None, limit: float = MOST_ENTRIES) -> Tensor:
    """(B,) table entries of each example; inf past ``limit``. See ``cost``."""
    return cost(layout, n_labels, limit).entries


def label_counts(layout: GraphLayout, n_labels: int | None = None) -> np.ndarray:
    """(B N,) how many labels each variable of the batch can take."""
    if layout.span is not None:
        low, high = layout.span.cpu().numpy().reshape(-1, 2).T
        return np.ascontiguousarray(high - low)
    if n_labels is None:
        if not layout.tuples:
            raise InputError("n_labels", "the layout has neither spans nor tuples", "pass the label count")
        n_labels = layout.tuples[0].sizes[0]
    return np.full(layout.mask.numel(), n_labels)


def tuples_of(layout: GraphLayout, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The real tuples of template k: their example (n,), their place in it (n,) and their variables of the
    batch (n, a)."""
    t = layout.tuples[k]
    example, place = t.mask.cpu().numpy().nonzero()
    index = t.index.cpu().numpy()[example, place]
    return example, place, index + example[:, None] * layout.mask.shape[1]


def find_order(layout: GraphLayout, counts: np.ndarray, limit: float = MOST_ENTRIES) -> Order:
    """The order for variables with ``counts`` (B N,) labels each. Near-linear time for forests, with no
    Python loop over variables."""
    B, N = layout.mask.shape
    alive = layout.mask.cpu().numpy().reshape(-1).copy()
    links = _links(layout)
    parts = _Parts(counts, B, N)
    level = -1
    for level, (gone, to) in enumerate(_peel(links, alive)):
        parts.add(gone, np.full(len(gone), level), (to >= 0).astype(np.int64), to[to >= 0])
    links = links[alive[links].all(1)]
    left = alive.nonzero()[0]
    compact = np.searchsorted(left, links)  # ends of links, as places in ``left``
    cuts = np.searchsorted(left, np.arange(B + 1) * N)
    ends = np.searchsorted(links[:, 0], np.arange(B + 1) * N)
    for b in np.diff(cuts).nonzero()[0]:
        own = left[cuts[b] : cuts[b + 1]]
        local = np.ascontiguousarray(compact[ends[b] : ends[b + 1]] - cuts[b])
        core = _order_core(local.tobytes(), np.ascontiguousarray(counts[own]).tobytes(), limit)
        if core is None:
            parts.refuse(int(b))
        else:
            variable, depth, sizes, others = core
            parts.add(own[variable], depth + (level + 1), sizes, own[others])
    return parts.order(limit)


class _Parts:
    """Collects variables in the order of elimination, with their separators."""

    def __init__(self, counts: np.ndarray, B: int, N: int) -> None:
        self.counts, self.B, self.N = counts, B, N
        self.variable: list[np.ndarray] = []
        self.level: list[np.ndarray] = []
        self.sizes: list[np.ndarray] = []
        self.others: list[np.ndarray] = []
        self.refused = np.zeros(B, bool)

    def add(self, variable: np.ndarray, level: np.ndarray, sizes: np.ndarray, others: np.ndarray) -> None:
        """``others`` : the separators in turn, ``sizes[i]`` variables for each ``variable[i]``."""
        self.variable.append(variable)
        self.level.append(level)
        self.sizes.append(sizes)
        self.others.append(others)

    def refuse(self, example: int) -> None:
        self.refused[example] = True

    def order(self, limit: float) -> Order:
        none = np.zeros(0, np.int64)
        variable, level, sizes, others = (
            np.concatenate([none, *x]) for x in (self.variable, self.level, self.sizes, self.others)
        )
        M, N = len(variable), max(self.N, 1)
        clique = np.concatenate([np.repeat(np.arange(M), sizes), np.arange(M)])
        member = np.concatenate([others, variable])
        entries = np.ones(M)
        np.multiply.at(entries, clique, self.counts[member].astype(float))
        total = np.bincount(variable // N, entries, self.B).astype(float)
        largest = np.zeros(self.B)
        np.maximum.at(largest, variable // N, entries)
        past = self.refused | (total > limit)
        total[past] = largest[past] = np.inf
        if past.any():
            return Order(none, none, np.zeros(1, np.int64), none, total, largest)
        in_turn = np.lexsort((variable, level, variable // N))
        rank = np.empty(self.B * self.N, np.int64)
        rank[variable[in_turn]] = np.arange(M)
        by_clique = np.lexsort((-rank[member], rank[variable[clique]]))
        start = np.concatenate([[0], np.cumsum((sizes + 1)[in_turn])])
        return Order(variable[in_turn], level[in_turn], start, member[by_clique], total, largest)


def _links(layout: GraphLayout) -> np.ndarray:
    """(n, 2) all pairs of variables of the batch that share a tuple, each once, in rising order."""
    M, found = layout.mask.numel(), [np.zeros(0, np.int64)]
    for k, t in enumerate(layout.tuples):
        index = tuples_of(layout, k)[2]
        for i, j in combinations(range(t.arity), 2):
            low, high = np.minimum(index[:, i], index[:, j]), np.maximum(index[:, i], index[:, j])
            found.append(low * M + high)
    return np.stack(np.divmod(np.unique(np.concatenate(found)), max(M, 1)), -1)


def _peel(links: np.ndarray, alive: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields, round by round, the variables with at most one neighbour, and that neighbour or -1. Takes
    them out of ``alive`` (B N,)."""
    degree = np.bincount(links.reshape(-1), minlength=len(alive))
    # The exclusive or of all neighbours of a variable; if it has only one, that is the neighbour.
    mixed = np.zeros(len(alive), np.int64)
    np.bitwise_xor.at(mixed, links[:, 0], links[:, 1])
    np.bitwise_xor.at(mixed, links[:, 1], links[:, 0])
    front = (alive & (degree <= 1)).nonzero()[0]
    while len(front):
        to = np.where(degree[front] == 1, mixed[front], -1)
        # Of two variables that have only each other, one waits.
        goes = (to < 0) | (degree[to] > 1) | (to > front)
        gone, to = front[goes], to[goes]
        alive[gone] = False
        yield gone, to
        gone, to = gone[to >= 0], to[to >= 0]
        np.subtract.at(degree, to, 1)
        np.bitwise_xor.at(mixed, to, gone)
        front = np.unique(to)
        front = front[degree[front] <= 1]


@lru_cache(maxsize=1 << 14)
def _order_core(links: bytes, counts: bytes, limit: float) -> tuple[np.ndarray, ...] | None:
    """The order of n variables with ``counts`` (n,) labels and ``links`` (m, 2), both int64: in order of
    elimination, the variables, their levels, the sizes of their separators, and all separators in turn.
    None if the tables have more than ``limit`` entries. Kept, as minibatches come back to the same
    examples."""
    label_count: list[int] = np.frombuffer(counts, np.int64).tolist()
    n = len(label_count)
    near: list[set[int]] = [set() for _ in range(n)]
    for u, v in np.frombuffer(links, np.int64).reshape(-1, 2).tolist():
        near[u].add(v)
        near[v].add(u)
    wait = [0] * n  # how many others go before, at least; ties go to the variable that waits least

    def key(v: int) -> tuple[int, int, int, int]:
        mine, size = near[v], label_count[v]
        for u in mine:
            size *= label_count[u]
        fill = sum(len(mine - near[u]) - 1 for u in mine) if len(mine) > 1 else 0
        return fill, size, wait[v], v

    current = [key(v) for v in range(n)]
    heap = current[:]
    heapify(heap)
    order: list[int] = []
    separators: list[list[int]] = []
    total = 0
    while heap:
        top = heappop(heap)
        v = top[3]
        if top is not current[v]:
            continue  # its key has changed since
        total += top[1]
        if total > limit:
            return None
        mine = near[v]
        order.append(v)
        separators.append(list(mine))
        for u in mine:
            near[u] |= mine
            near[u] -= {u, v}
            wait[u] = max(wait[u], wait[v] + 1)
        for u in mine:
            current[u] = key(u)
            heappush(heap, current[u])
    place = {v: i for i, v in enumerate(order)}
    level = [0] * n
    for i, separator in enumerate(separators):
        if separator:
            parent = min(place[u] for u in separator)
            level[parent] = max(level[parent], level[i] + 1)
    others = [u for separator in separators for u in separator]
    sizes = [len(separator) for separator in separators]
    return tuple(np.array(x, np.int64) for x in (order, level, sizes, others))
