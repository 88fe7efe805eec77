"""Which program sums over the labellings of each example."""

from __future__ import annotations

from structgp.data.layout import GraphLayout
from structgp.structures.graph.program import Enumeration, GraphProgram

MOST_ENTRIES = 1 << 16


def choose_program(
    layout: GraphLayout, program: str = "auto", most_entries: int | None = None
) -> GraphProgram:
    return Enumeration(layout)
