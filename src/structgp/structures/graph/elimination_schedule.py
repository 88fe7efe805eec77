"""What elimination does with a batch, as arrays: which numbers are added up in which table.

The table of a clique has a row for each labelling of its separator, the last label moving fastest, and in a
row one entry for each label of the variable that is eliminated. What is added to it, its parts, are the
scores of that variable, those of every tuple that has it and no variable eliminated before it, and messages
of cliques before. The sums of the rows are its message, which goes to the clique that eliminates the first
variable of its separator. Where an example falls into pieces, all but one of them send their total, a
message of one row, to the last.

The scores of an example are one vector of L numbers: nodes (N, V), then for each template its tuples
(E, *sizes), or its one table. Entry (row, label) of part p is number ``base[p] + row_map[row] + label *
stride[p]`` of that vector, or of the messages of the batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from structgp.errors import InputError
from structgp.structures.graph.elimination_order import MOST_ENTRIES, find_order, label_counts, tuples_of
from structgp.structures.graph.layout import GraphLayout

BYTES_KEPT = 1 << 30
"""Schedules, with their index tensors, that are kept for the next call with the same layout."""

_schedules: OrderedDict[tuple[Any, ...], Schedule] = OrderedDict()


@dataclass(frozen=True)
class Parts:
    """What is added up, by clique: the scores of the eliminated variable first, then what else depends on
    none but that variable (``is_own``), then the others. All (P,). clique : whose table. is_message : from
    the messages, not the scores. source : the segment, or the clique whose message it is. row_map : where
    in ``row_maps`` it begins."""

    clique: np.ndarray
    is_message: np.ndarray
    is_own: np.ndarray
    base: np.ndarray
    stride: np.ndarray
    source: np.ndarray
    row_map: np.ndarray


@dataclass(frozen=True, eq=False)
class Schedule:
    """Cliques (M,) by example and level. example, level, n_rows, n_labels : of each. message : (M + 1,)
    where the messages of each begin. part : (M + 1,) where its parts begin. first_clique : (B + 1,) by
    example. length : L. Segments are the scores that have a maximum of their own: a node, a tuple, a shared
    table. segment : (n, 2) where in the L numbers each begins and how long it is; first_segment : (B + 1,).
    on_device : ``Steps`` by device."""

    example: np.ndarray
    level: np.ndarray
    n_rows: np.ndarray
    n_labels: np.ndarray
    message: np.ndarray
    part: np.ndarray
    parts: Parts
    row_maps: np.ndarray
    first_clique: np.ndarray
    segment: np.ndarray
    first_segment: np.ndarray
    length: int
    on_device: dict[Any, Any] = field(default_factory=dict)

    @property
    def n_messages(self) -> int:
        return int(self.message[-1])

    @property
    def n_bytes(self) -> int:
        of_parts = 50 * len(self.parts.base) + 60 * len(self.level) + self.row_maps.nbytes
        return of_parts + sum(x.n_bytes for x in self.on_device.values())

    @cached_property
    def entries(self) -> int:
        """Table entries of the batch."""
        return int((self.n_rows * self.n_labels).sum())


def schedule_of(layout: GraphLayout, n_labels: int, shared: Sequence[bool]) -> Schedule:
    """``shared`` : for each template, whether one table serves all tuples. The last few are kept."""
    key = (layout.key, n_labels, tuple(shared))
    if key in _schedules:
        _schedules.move_to_end(key)
        return _schedules[key]
    _schedules[key] = found = _schedule(layout, n_labels, shared)
    while len(_schedules) > 1 and sum(x.n_bytes for x in _schedules.values()) > BYTES_KEPT:
        _schedules.popitem(last=False)
    return found


def _schedule(layout: GraphLayout, V: int, shared: Sequence[bool]) -> Schedule:
    B, N = layout.mask.shape
    counts = label_counts(layout, V)
    order = find_order(layout, counts)
    if np.isinf(order.entries).any():
        raise InputError(
            f"example {int(np.isinf(order.entries).argmax())}",
            f"exact summation needs tables of more than {MOST_ENTRIES} entries",
            "use an approximate program, or fewer links",
        )
    variable, start, member = order.variable, order.start, order.member
    M, width = len(variable), np.diff(order.start)
    K = int(width.max(initial=1))
    example = variable // max(N, 1)
    rank = np.zeros(B * N, np.int64)
    rank[variable] = np.arange(M)
    low = np.zeros(B * N, np.int64)
    if layout.span is not None:
        low = layout.span[..., 0].cpu().numpy().reshape(-1)

    # Shapes (M, K), with the eliminated variable in the last column and 1 where there is no variable.
    clique = np.repeat(np.arange(M), width)
    column = K - (start[1:][clique] - np.arange(len(member)))
    shape = np.ones((M, K), np.int64)
    shape[clique, column] = counts[member]
    n_rows, own = shape[:, :-1].prod(1), shape[:, -1]
    message = np.concatenate([[0], np.cumsum(n_rows)])
    # The members of a clique come in falling rank: these keys rise.
    keys = clique * M + (M - 1 - rank[member])
    level, parent = _hang_together(order.level, example, rank, start, member)

    found = _Found(K)
    node = np.zeros((M, K), np.int64)
    node[:, -1] = 1
    found.add(np.arange(M), False, (variable % max(N, 1)) * V + low[variable], node, np.arange(M))
    segments = [(example, (variable % max(N, 1)) * V + low[variable], own)]
    begin, n_segments = N * V, M
    for k, t in enumerate(layout.tuples):
        size = int(np.prod(t.sizes))
        at, place, index = tuples_of(layout, k)
        stride = np.array([int(np.prod(t.sizes[j + 1 :])) for j in range(t.arity)], np.int64)
        offset = low[index] - np.array(t.first)
        if ((offset < 0) | (offset + counts[index] > np.array(t.sizes))).any():
            raise InputError(
                t.name, "has variables with labels that its table does not have", "give it larger sizes"
            )
        to = rank[index].min(1)
        strides = np.zeros((len(to), K), np.int64)
        spot = np.searchsorted(keys, to[:, None] * M + (M - 1 - rank[index]))
        strides[np.arange(len(to))[:, None], column[spot]] = stride
        if shared[k]:
            having, segment_at = np.unique(at, return_inverse=True)
            base = np.full(len(to), begin)
            segments.append((having, np.full(len(having), begin), np.full(len(having), size)))
            begin += size
        else:
            base, segment_at = begin + place * size, np.arange(len(to))
            segments.append((at, base, np.full(len(to), size)))
            begin += t.mask.shape[1] * size
        found.add(to, False, base + (offset * stride).sum(1), strides, segment_at + n_segments)
        n_segments += len(segments[-1][0])
    sends = (parent >= 0).nonzero()[0]
    # A message has the axes of its separator: the stride of each is the product of those after it.
    inner = np.ones((M, K), np.int64)
    inner[:, : K - 1] = shape[:, : K - 1][:, ::-1].cumprod(1)[:, ::-1]
    inner = inner[:, 1:]
    strides = np.zeros((M, K), np.int64)
    is_sep = np.arange(len(member)) < start[1:][clique] - 1
    from_, other = clique[is_sep], member[is_sep]
    spot = np.searchsorted(keys, parent[from_] * M + (M - 1 - rank[other]))
    strides[from_, column[spot]] = inner[from_, column[is_sep]]
    found.add(parent[sends], True, message[sends], strides[sends], sends)
    parts, row_maps = found.parts(shape)

    where, segment_start, segment_size = (np.concatenate(x) for x in zip(*segments, strict=True))
    by_example = np.argsort(where, kind="stable")
    new = np.empty(len(where), np.int64)
    new[by_example] = np.arange(len(where))
    parts.source[~parts.is_message] = new[parts.source[~parts.is_message]]
    return Schedule(
        example, level, n_rows, own, message,
        np.searchsorted(parts.clique, np.arange(M + 1)), parts, row_maps,
        np.searchsorted(example, np.arange(B + 1)),
        np.stack([segment_start, segment_size], 1)[by_example],
        np.searchsorted(where[by_example], np.arange(B + 1)), begin,
    )  # fmt: skip


def _hang_together(
    level: np.ndarray, example: np.ndarray, rank: np.ndarray, start: np.ndarray, member: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(M,) levels, and the clique that each sends its message to; -1 for the last of each example, whose
    level is above those of all that send to it."""
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


class _Found:
    """Parts as they are found. strides : (n, K) of each part along the axes of its clique."""

    def __init__(self, K: int) -> None:
        self.columns: list[list[np.ndarray]] = [[] for _ in range(4)]
        self.strides = [np.zeros((0, K), np.int64)]

    def add(
        self,
        clique: np.ndarray,
        is_message: bool,
        base: np.ndarray,
        strides: np.ndarray,
        source: np.ndarray,
    ) -> None:
        for column, x in zip(
            self.columns, (clique, np.full(len(clique), is_message), base, source), strict=True
        ):
            column.append(x)
        self.strides.append(strides)

    def parts(self, shape: np.ndarray) -> tuple[Parts, np.ndarray]:
        """And the row maps, one after the other. shape : (M, K) of the cliques."""
        clique, is_message, base, source = (np.concatenate(x) for x in self.columns)
        strides = np.concatenate(self.strides)
        is_own = (strides[:, :-1] == 0).all(1)
        turn = np.lexsort((~is_own, clique))
        clique, is_message, base, source = clique[turn], is_message[turn], base[turn], source[turn]
        is_own, strides = is_own[turn], strides[turn]
        wide = (~is_own).nonzero()[0]
        kind, examples = _distinct(np.concatenate([shape[clique[wide], :-1], strides[wide, :-1]], 1))
        maps = [_row_map(shape[clique[i], :-1], strides[i, :-1]) for i in wide[examples]]
        begins = np.cumsum([1, *map(len, maps)])
        row_map = np.zeros(len(clique), np.int64)
        row_map[wide] = begins[kind]
        flat = np.concatenate([np.zeros(1, np.int64), *maps])  # first the 0 of all that ``is_own``
        return Parts(clique, is_message, is_own, base, strides[:, -1].copy(), source, row_map), flat


def _row_map(shape: np.ndarray, strides: np.ndarray) -> np.ndarray:
    """Where, from the first on, each row of a table finds its numbers."""
    found = np.zeros(1, np.int64)
    for size, stride in zip(shape.tolist(), strides.tolist(), strict=True):
        if size > 1:
            found = (found[:, None] + stride * np.arange(size)).reshape(-1)
    return found


def _distinct(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers (n,) that are equal where rows of x (n, m) are, from 0, and a row of each."""
    code = np.zeros(len(x), np.int64)
    for column in x.T:
        if len(x) and column.min() < column.max():
            code = np.unique(code * (int(column.max()) + 1) + column, return_inverse=True)[1]
    _, first, code = np.unique(code, return_index=True, return_inverse=True)
    return code, first
