"""The labels that an annotator may give: types of spans, in the BIO scheme, or one tag per token."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from structgp.errors import InputError

OUTSIDE = "O"
Labels = list[str | None]


@dataclass(frozen=True)
class TagSet:
    """The labels that may be given. types : types of spans, or the tags themselves. spans : True if labels
    are spans in the BIO scheme; if False, every token has one of the types as its label."""

    types: tuple[str, ...]
    spans: bool

    @staticmethod
    def of(types: Iterable[str], spans: bool, place: str) -> TagSet:
        """Checks these types, and makes a tag set of them; errors name ``place``."""
        found = tuple(types)
        if len(found) < (1 if spans else 2):
            few = "one type of span" if spans else "two labels"
            raise InputError(place, f"at least {few} is needed", f"name it: {place} QTY,UNIT,NAME")
        for name in found:
            if not name or name != name.strip() or any(c.isspace() for c in name):
                problem = f"{name!r} is empty or has white space in it"
                raise InputError(place, problem, "use names without spaces, between commas")
        if spans and OUTSIDE in found:
            raise InputError(place, f"{OUTSIDE!r} stands for tokens outside all spans", "leave it out")
        if len(set(found)) < len(found):
            twice = next(name for name in found if found.count(name) > 1)
            raise InputError(place, f"{twice!r} twice", "name every label once")
        return TagSet(found, spans)

    @staticmethod
    def from_labels(labels: Iterable[str | None], place: str) -> TagSet:
        """The tag set of a file's labels: types of spans if all labels are B-, I- or O."""
        found = sorted({label for label in labels if label is not None})
        inside = [label for label in found if label != OUTSIDE]
        if inside and all(label[:2] in ("B-", "I-") and label[2:] for label in inside):
            return TagSet.of(dict.fromkeys(label[2:] for label in inside), True, place)
        return TagSet.of(found, False, place)

    @property
    def tags(self) -> tuple[str, ...]:
        """Every label that a token can have."""
        if not self.spans:
            return self.types
        return (OUTSIDE, *(f"{b}-{name}" for name in self.types for b in "BI"))

    def checked(self, labels: Any, n_tokens: int, place: str = "labels") -> Labels:
        """Checks the labels of a sequence, where None means 'don't know', and returns them. Raises
        InputError if they are not valid."""
        if not isinstance(labels, list) or len(labels) != n_tokens:
            given = f"{len(labels)} labels" if isinstance(labels, list) else f"a {type(labels).__name__}"
            raise InputError(place, f"{given} for {n_tokens} tokens", "give one per token, or null")
        known = set(self.tags)
        for t, label in enumerate(labels):
            if label is not None and (not isinstance(label, str) or label not in known):
                begun = [f"B-{label}"] if self.spans and label in self.types else []
                near = begun or difflib.get_close_matches(str(label), self.tags, 1)
                remedy = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(self.tags)}"
                raise InputError(f"{place}[{t}]", f"{label!r} is not a label of this pool", remedy)
        if self.spans:
            self._check_inside(labels, place)
        return labels

    @staticmethod
    def _check_inside(labels: Sequence[str | None], place: str) -> None:
        """Checks that a span begins with B before it continues with I, unless the token before is
        unknown."""
        before: str | None = OUTSIDE
        for t, label in enumerate(labels):
            if label is not None and label.startswith("I-") and before is not None:
                begun = before[2:] == label[2:] and before != OUTSIDE
                if not begun:
                    remedy = f"write {'B' + label[1:]!r} where the span begins"
                    raise InputError(f"{place}[{t}]", f"{label!r} after {before!r}", remedy)
            before = label

    def to_json(self) -> dict[str, Any]:
        return {"types": list(self.types), "spans": self.spans}

    @staticmethod
    def from_json(state: dict[str, Any]) -> TagSet:
        return TagSet(tuple(state["types"]), bool(state["spans"]))
