"""The schedule of elimination for a batch, as arrays: which numbers are added up in which table.

The table of a clique has one row for each labelling of its separator, the last label moving fastest, and in
each row one entry for each label of the eliminated variable. Its parts, which are added up in it, are the
scores of that variable, the scores of every tuple that has it and no variable eliminated before it, and
messages of earlier cliques. The sums of its rows are its message, which goes to the clique of the variable
of its separator that is eliminated first. If an example falls into pieces, all but one of them send their
total, a message of one row, to the last one.

The scores of an example are one vector of L numbers: nodes (N, V), then for each template its tuples
(E, *sizes), or its one shared table. Entry (row, label) of part p is number ``base[p] + row_map[row] +
label * stride[p]`` of that vector, or of the messages of the batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from structgp.data.layout import GraphLayout
from structgp.errors import InputError
from structgp.structures.graph.elimination_order import MOST_ENTRIES, find_order, label_counts
from structgp.structures.graph.elimination_parts import Cliques, Found, Parts

BYTES_KEPT = 1 << 30
"""Largest size of the schedules, with their index tensors, that are kept for calls with the same layout."""

_schedules: OrderedDict[tuple[Any, ...], Schedule] = OrderedDict()


@dataclass(frozen=True, eq=False)
class Schedule:
    """M cliques, by example and level. example, level, n_rows, n_labels : (M,) of each clique.
    message : (M + 1,) where the message of each begins. part : (M + 1,) where its parts begin.
    first_clique : (B + 1,) by example. length : L. A segment is a set of scores with a maximum of its own:
    a node, a tuple or a shared table. segment : (n, 2) where each begins among the L numbers, and its
    length; first_segment : (B + 1,) by example. groups : (M, 3) for each clique, rows that differ only in
    the label of one variable on which a single part depends: that part, the number of these rows, and how
    far apart they are; -1, 0, 0 if all variables are in several parts. on_device : ``Steps`` by device."""

    example: np.ndarray
    level: np.ndarray
    n_rows: np.ndarray
    n_labels: np.ndarray
    message: np.ndarray
    part: np.ndarray
    parts: Parts
    row_maps: np.ndarray
    groups: np.ndarray
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
    """``shared`` : for each template, True if one table serves all tuples. Recent schedules are kept."""
    key = (layout.key, n_labels, tuple(shared))
    if key in _schedules:
        _schedules.move_to_end(key)
        return _schedules[key]
    _schedules[key] = found = _schedule(layout, n_labels, shared)
    while len(_schedules) > 1 and sum(x.n_bytes for x in _schedules.values()) > BYTES_KEPT:
        _schedules.popitem(last=False)
    return found


def _schedule(layout: GraphLayout, n_labels: int, shared: Sequence[bool]) -> Schedule:
    B, N = layout.mask.shape
    counts = label_counts(layout, n_labels)
    low = np.zeros(B * N, np.int64)
    if layout.span is not None:
        low = layout.span[..., 0].cpu().numpy().reshape(-1)
    order = find_order(layout, counts)
    if np.isinf(order.entries).any():
        raise InputError(
            f"example {int(np.isinf(order.entries).argmax())}",
            f"exact summation needs tables of more than {MOST_ENTRIES} entries",
            "use an approximate program, or fewer links",
        )
    cliques = Cliques(order, counts, low, N)
    found = Found(cliques)
    found.add_nodes(N, n_labels)
    for k in range(len(layout.tuples)):
        found.add_tuples(layout, k, shared[k])
    found.add_messages()
    parts, row_maps, groups = found.parts()
    where, segment, moved = found.sorted_segments()
    source = parts.source.copy()
    source[~parts.is_message] = moved[source[~parts.is_message]]
    shape = cliques.shape
    return Schedule(
        example=cliques.example,
        level=cliques.level,
        n_rows=shape[:, :-1].prod(1),
        n_labels=shape[:, -1],
        message=cliques.message,
        part=np.searchsorted(parts.clique, np.arange(cliques.M + 1)),
        parts=replace(parts, source=source),
        row_maps=row_maps,
        groups=groups,
        first_clique=np.searchsorted(cliques.example, np.arange(B + 1)),
        segment=segment,
        first_segment=np.searchsorted(where, np.arange(B + 1)),
        length=found.length,
    )
