"""Matches Wapiti's expressions in time linear in the text: backtracking, as ``re`` does it, can take longer
than anyone waits (``a*a*a*a*b``)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

LONG = 1000
"""Length of a cell, in characters, from which on quadratic time is too long."""


@dataclass(frozen=True)
class Pattern:
    """A parsed expression. items : (a ``re`` expression for one character, how often it occurs: '', '?' or
    '*'). at_start, at_end : whether a match must begin or end where the text does. ``?`` takes its
    character if it can, and ``*`` takes as few as it can, as ``?`` and ``*?`` do in ``re``."""

    items: tuple[tuple[str, str], ...]
    at_start: bool = False
    at_end: bool = False
    _fits: dict[tuple[str, str], bool] = field(default_factory=dict, repr=False, compare=False)

    def find(self, text: str) -> str | None:
        """The first match, None if there is none. Cost O(len(text) len(items))."""
        n, P = len(text), len(self.items)
        after: list[int] = []  # where a match of items i onwards ends if it starts at j + 1; or -1
        best = None
        for j in range(n, -1, -1):
            ends = [-1] * P + [j if j == n or not self.at_end else -1]
            for i in range(P - 1, -1, -1):
                single, often = self.items[i]
                taken = -1
                if j < n and self._matches(single, text[j]):
                    taken = after[i] if often == "*" else after[i + 1]
                if often == "?":
                    ends[i] = taken if taken >= 0 else ends[i + 1]
                elif often == "*":
                    ends[i] = ends[i + 1] if ends[i + 1] >= 0 else taken
                else:
                    ends[i] = taken
            if ends[0] >= 0 and (j == 0 or not self.at_start):
                best = text[j : ends[0]]
            after = ends
        return best

    def _matches(self, single: str, character: str) -> bool:
        found = self._fits.get((single, character))
        if found is None:
            found = self._fits[single, character] = bool(_compiled(single).fullmatch(character))
        return found

    @property
    def source(self) -> str:
        """The pattern as an expression for ``re``."""
        parts = "".join(single + {"*": "*?"}.get(often, often) for single, often in self.items)
        return (r"\A" if self.at_start else "") + parts + (r"\Z" if self.at_end else "")

    def may_backtrack(self, text: str) -> bool:
        """True if ``re`` could take too long to search this text."""
        repeats = sum(bool(often) for _, often in self.items)
        return repeats > 1 or (repeats == 1 and len(text) > LONG)


@lru_cache
def _compiled(single: str) -> re.Pattern[str]:
    return re.compile(single, re.DOTALL)
