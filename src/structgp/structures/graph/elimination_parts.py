"""The parts that are added up in the tables of elimination, and where their numbers come from.

Letters: B examples, N variables of an example (padded), M cliques, K variables of the largest one, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from structgp.data.layout import GraphLayout
from structgp.errors import InputError
from structgp.structures.graph.elimination_order import Order, tuples_of


@dataclass(frozen=True)
class Parts:
    """P parts, by clique: first the scores of the eliminated variable, then other parts that depend on that
    variable alone (``is_own``), then the rest. All (P,). clique : the clique whose table it is part of.
    is_message : True for messages, False for scores. base, stride : see ``elimination_schedule``.
    source : its segment, or the clique that sends the message. row_map : where its map begins in
    ``row_maps``."""

    clique: np.ndarray
    is_message: np.ndarray
    is_own: np.ndarray
    base: np.ndarray
    stride: np.ndarray
    source: np.ndarray
    row_map: np.ndarray


class Cliques:
    """The tables of an order, for (B N,) variables with ``counts`` labels each, from label ``low`` on.

    shape : (M, K) label counts of the variables of each clique, the eliminated one in the last column, 1
    where there is none. message : (M + 1,) where the message of each clique begins. parent : (M,) the
    clique that its message goes to, -1 for the last of each example. level : (M,) above the levels of all
    cliques that send to it."""

    def __init__(self, order: Order, counts: np.ndarray, low: np.ndarray, n_variables: int) -> None:
        self.variable, self.counts, self.low = order.variable, counts, low
        self.example, self.place = np.divmod(order.variable, max(n_variables, 1))
        self.M, width = len(order.variable), np.diff(order.start)
        self.K = int(width.max(initial=1))
        self.rank = np.zeros(len(counts), np.int64)
        self.rank[order.variable] = np.arange(self.M)
        self.member, self.clique = order.member, np.repeat(np.arange(self.M), width)
        self.column = self.K - (order.start[1:][self.clique] - np.arange(len(self.member)))
        self.shape = np.ones((self.M, self.K), np.int64)
        self.shape[self.clique, self.column] = counts[self.member]
        self.message = np.concatenate([[0], np.cumsum(self.shape[:, :-1].prod(1))])
        # The members of a clique come in falling rank, so these keys rise.
        self.keys = self.clique * self.M + (self.M - 1 - self.rank[self.member])
        self.level, self.parent = _hang_together(
            order.level, self.example, self.rank, order.start, order.member
        )

    def columns(self, clique: np.ndarray, variable: np.ndarray) -> np.ndarray:
        """The columns in the shapes of these cliques that belong to these variables."""
        return self.column[np.searchsorted(self.keys, clique * self.M + (self.M - 1 - self.rank[variable]))]


def _hang_together(
    level: np.ndarray, example: np.ndarray, rank: np.ndarray, start: np.ndarray, member: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(M,) levels, and the clique to which each sends its message, -1 for the last of each example. The
    level of that last one is raised above those of all that send to it."""
    M = len(level)
    parent = np.full(M, -1)
    has_separator = np.diff(start) > 1
    parent[has_separator] = rank[member[start[1:][has_separator] - 2]]
    roots = (~has_separator).nonzero()[0]
    # Cliques come by example and level: the last root of an example is one of those with the highest level.
    last = np.append(example[roots][1:] != example[roots][:-1], True)[: len(roots)]
    others = roots[~last]
    hub = roots[last][np.searchsorted(example[roots[last]], example[others])]
    parent[others] = hub
    level = level.copy()
    np.maximum.at(level, hub, level[others] + 1)
    return level, parent


@dataclass
class Found:
    """Collects parts as they are found. length : how many numbers of an example have a place so far.
    rows : clique, is_message, base, strides (n, K) along the axes of the clique, and source of n parts at a
    time. segments : example, begin and size of each."""

    cliques: Cliques
    length: int = 0
    n_segments: int = 0
    rows: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    segments: list[tuple[np.ndarray, ...]] = field(default_factory=list)

    def add_nodes(self, n_variables: int, n_labels: int) -> None:
        c = self.cliques
        base = c.place * n_labels + c.low[c.variable]
        strides = np.zeros((c.M, c.K), np.int64)
        strides[:, -1] = 1
        self._add(np.arange(c.M), False, base, strides, np.arange(c.M))
        self._segments(c.example, base, c.counts[c.variable])
        self.length = n_variables * n_labels

    def add_tuples(self, layout: GraphLayout, k: int, shared: bool) -> None:
        """The tuples of template k."""
        c, t = self.cliques, layout.tuples[k]
        example, place, index = tuples_of(layout, k)
        stride = np.cumprod([1, *t.sizes[:0:-1]])[::-1]
        offset = c.low[index] - np.array(t.first)
        if ((offset < 0) | (offset + c.counts[index] > np.array(t.sizes))).any():
            raise InputError(
                t.name, "has variables with labels that its table does not have", "give it larger sizes"
            )
        to, size = c.rank[index].min(1), int(np.prod(t.sizes))
        strides = np.zeros((len(to), c.K), np.int64)
        strides[np.arange(len(to))[:, None], c.columns(to[:, None], index)] = stride
        base, segment = self.length + place * size, np.arange(len(to))
        if shared:
            example, segment = np.unique(example, return_inverse=True)
            base = np.full(len(to), self.length)
        self._add(to, False, base + (offset * stride).sum(1), strides, segment + self.n_segments)
        begins = base[: len(example)]  # a shared table begins at the same place for every tuple
        self._segments(example, begins, np.full(len(example), size))
        self.length += size if shared else t.mask.shape[1] * size

    def add_messages(self) -> None:
        c = self.cliques
        # A message has the axes of its separator: the stride of each is the product of the sizes after it.
        after = np.ones((c.M, c.K), np.int64)
        after[:, :-1] = c.shape[:, -2::-1].cumprod(1)[:, ::-1]
        among = c.column < c.K - 1
        clique, member = c.clique[among], c.member[among]
        strides = np.zeros((c.M, c.K), np.int64)
        strides[clique, c.columns(c.parent[clique], member)] = after[clique, c.column[among] + 1]
        sends = (c.parent >= 0).nonzero()[0]
        self._add(c.parent[sends], True, c.message[sends], strides[sends], sends)

    def _add(
        self,
        clique: np.ndarray,
        is_message: bool,
        base: np.ndarray,
        strides: np.ndarray,
        source: np.ndarray,
    ) -> None:
        self.rows.append((clique, np.full(len(clique), is_message), base, strides, source))

    def _segments(self, example: np.ndarray, begin: np.ndarray, size: np.ndarray) -> None:
        self.segments.append((example, begin, size))
        self.n_segments += len(example)

    def sorted_segments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sorted by example: example (n,), begin and size (n, 2); and where each was moved to, (n,)."""
        example, begin, size = (np.concatenate(x) for x in zip(*self.segments, strict=True))
        turn = np.argsort(example, kind="stable")
        return example[turn], np.stack([begin, size], 1)[turn], np.argsort(turn)

    def parts(self) -> tuple[Parts, np.ndarray, np.ndarray]:
        """The parts, their row maps one after the other, and the groups of ``Schedule``."""
        clique, is_message, base, strides, source = (
            np.concatenate(x) for x in zip(*self.rows, strict=True)
        )
        is_own = (strides[:, :-1] == 0).all(1)
        turn = np.lexsort((~is_own, clique))
        clique, is_message, base, source = clique[turn], is_message[turn], base[turn], source[turn]
        is_own, strides = is_own[turn], strides[turn]
        wide = (~is_own).nonzero()[0]
        shape = self.cliques.shape[:, :-1]
        kind, some = _distinct(np.concatenate([shape[clique[wide]], strides[wide, :-1]], 1))
        maps = [_row_map(shape[clique[i]], strides[i, :-1]) for i in wide[some]]
        row_map = np.zeros(len(clique), np.int64)
        row_map[wide] = np.cumsum([1, *map(len, maps)])[kind]
        row_maps = np.concatenate([np.zeros(1, np.int64), *maps])  # the first 0 serves all ``is_own``
        found = Parts(clique, is_message, is_own, base, strides[:, -1].copy(), source, row_map)
        return found, row_maps, _groups(self.cliques.shape, clique, strides)


def _groups(shape: np.ndarray, clique: np.ndarray, strides: np.ndarray) -> np.ndarray:
    """(M, 3) for each clique, about the longest axis of its separator on which a single part depends: that
    part, the number of labels, and the distance between rows; -1, 0, 0 where there is no such axis."""
    M = len(shape)
    found = np.tile([-1, 0, 0], (M, 1))
    depends = strides[:, :-1] != 0
    count = np.zeros((M, depends.shape[1]), np.int64)
    np.add.at(count, clique, depends)
    size = np.where(count == 1, shape[:, :-1], 1)
    some = (size.max(1, initial=1) > 1).nonzero()[0]
    if len(some):
        axis = size[some].argmax(1)
        after = shape[:, -2::-1].cumprod(1)[:, ::-1] // shape[:, :-1]  # rows per label of each axis
        found[some, 1:] = np.stack([shape[some, axis], after[some, axis]], 1)
        of_clique = np.zeros(M, np.int64)
        of_clique[some] = axis
        chosen = (found[clique, 1] > 0) & depends[np.arange(len(clique)), of_clique[clique]]
        found[clique[chosen], 0] = chosen.nonzero()[0]
    return found


def _row_map(shape: np.ndarray, strides: np.ndarray) -> np.ndarray:
    """Where each row of a table finds its numbers, relative to the first row's."""
    found = np.zeros(1, np.int64)
    for size, stride in zip(shape.tolist(), strides.tolist(), strict=True):
        if size > 1:
            found = (found[:, None] + stride * np.arange(size)).reshape(-1)
    return found


def _distinct(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers (n,) from 0 on, equal where rows of x (n, m) are equal, and for each number one such row."""
    code = np.zeros(len(x), np.int64)
    for column in x.T:
        if len(x) and column.min() < column.max():
            code = np.unique(code * (int(column.max()) + 1) + column, return_inverse=True)[1]
    _, first, code = np.unique(code, return_index=True, return_inverse=True)
    return code, first
