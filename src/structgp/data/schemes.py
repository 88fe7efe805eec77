"""Which labels may follow which: declared by a tagging scheme, or for single pairs of labels.

A declaration is 'BIO' (also 'IOB2'), 'IOBES' (also 'BIOES', 'BILOU') or 'IO', which forbids nothing; or a
dict with the key 'forbidden', or 'allowed', and pairs of labels. In a pair, None before a label stands for
the start of a sequence, and None after a label for its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from structgp.errors import InputError

_SCHEMES = {"BIO": "BIO", "IOB2": "BIO", "IOBES": "IOBES", "BIOES": "IOBES", "BILOU": "IOBES", "IO": "IO"}
_TAGS = {"B": "B", "I": "I", "E": "E", "L": "E", "S": "S", "U": "S"}
_OPEN, _GOES_ON = frozenset("BI"), frozenset("IE")


@dataclass(frozen=True)
class Allowed:
    """The labels that may follow each other. follows : (V, V), true where the column's label may follow the
    row's; starts, ends : (V,), true for labels that a sequence may start or end with; more : by template of
    a declared structure, true for the labels that its tuples may have."""

    follows: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    more: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def follows_freely(self) -> bool:
        """True if nothing is forbidden about neighbours in a sequence, its start and its end."""
        return bool(self.follows.all() and self.starts.all() and self.ends.all())

    def to_json(self) -> dict[str, Any]:
        found = {name: getattr(self, name).astype(int).tolist() for name in ("follows", "starts", "ends")}
        more = {name: table.astype(int).tolist() for name, table in self.more.items()}
        return found | ({"more": more} if more else {})

    @staticmethod
    def from_json(state: Mapping[str, Any] | None) -> Allowed | None:
        if state is None:
            return None
        follows, starts, ends = (np.array(state[n], dtype=bool) for n in ("follows", "starts", "ends"))
        more = {name: np.array(table, dtype=bool) for name, table in state.get("more", {}).items()}
        return Allowed(follows, starts, ends, more)

    def breaks(self, labels: Sequence[int]) -> int | None:
        """The first position whose label is forbidden after the label before it, or at the start or the end
        of the sequence; None if there is none. Missing labels (negative) are skipped."""
        for t, label in enumerate(labels):
            if label < 0:
                continue
            before = labels[t - 1] if t else None
            if before is None and not self.starts[label]:
                return t
            if before is not None and before >= 0 and not self.follows[before, label]:
                return t
            if t == len(labels) - 1 and not self.ends[label]:
                return t
        return None

    def obeyed(self, labels: np.ndarray) -> bool:
        """True if these label indices, negative where a label is missing, can be part of an allowed
        labelling."""
        if (labels < 0).any():
            possible = np.ones((len(labels), len(self.starts)), bool)
            possible[labels >= 0] = np.eye(len(self.starts), dtype=bool)[labels[labels >= 0]]
            return self.has_labelling(possible)
        ends = not len(labels) or (self.starts[labels[0]] and self.ends[labels[-1]])
        return bool(ends and self.follows[labels[:-1], labels[1:]].all())

    def has_labelling(self, possible: np.ndarray) -> bool:
        """True if some labelling that uses only the ``possible`` (T, V) labels is allowed."""
        if not len(possible):
            return True
        here = self.starts & possible[0]
        for row in possible[1:]:
            here = (here @ self.follows) & row
        return bool((here & self.ends).any())


def allowed(declared: Any, classes: Sequence[str], place: str = "constraints") -> Allowed:
    """The rules that a declaration makes for the labels ``classes``, in their order."""
    if isinstance(declared, str):
        return _of_scheme(declared, classes, place)
    if isinstance(declared, Mapping) and len(declared) == 1:
        (kind, pairs), *_ = declared.items()
        if kind in ("forbidden", "allowed"):
            return _of_pairs(kind, _checked(pairs, classes, place), classes)
    remedy = "use the name of a scheme, {'forbidden': [(label, next), ...]}, {'allowed': [...]}, or a dict "
    remedy += "from template to tuples in the place of a list"
    raise InputError(place, f"{declared!r} is not a declaration", remedy)


def scheme_of(classes: Sequence[str]) -> str | None:
    """The tagging scheme that the labels are written in: 'BIO', 'IOBES', 'BILOU' or 'IO'; None if they show
    none. All labels but O must have a tag, either all with a type (B-X) or all without (B), and the tags
    must show where spans begin and go on, or where they end: a single label I-X among labels such as IN and
    NN does not show a scheme. Nor do B and I without O, as used to cut text into words: all that BIO would
    forbid there is to start within a word."""
    tags, typed = set(), set()
    for tag, dash, kind in (label.partition("-") for label in classes if label != "O"):
        if tag not in _TAGS or bool(dash) != bool(kind):
            return None
        tags.add(tag)
        typed.add(bool(dash))
    if len(typed) != 1:
        return None
    if tags == {"I"} and "O" in classes:
        return "IO"
    if tags == {"B", "I"} and (typed == {True} or "O" in classes):
        return "BIO"
    if tags == {"B"} and typed == {True} and "O" in classes:
        return "BIO"
    signs = {"IOBES": ({"B", "E"}, set("BIES")), "BILOU": ({"B", "L"}, set("BILU"))}
    return next((name for name, (some, every) in signs.items() if some <= tags <= every), None)


def obeyed_scheme(classes: Sequence[str], y: Iterable[np.ndarray]) -> str | None:
    """The scheme that the labels are written in, if every labelling in y obeys it; otherwise None."""
    name = scheme_of(classes)
    rules = None if name is None else allowed(name, classes)
    return name if rules is not None and all(map(rules.obeyed, y)) else None


def _of_scheme(name: str, classes: Sequence[str], place: str) -> Allowed:
    scheme = _SCHEMES.get(name.upper())
    if scheme is None:
        remedy = f"use one of {', '.join(_SCHEMES)}, or leave it out"
        raise InputError(place, f"{name!r} is not a scheme", remedy)
    parsed = [_parse(label) for label in classes]
    used = {tag for tag, _ in parsed} - {"O"}
    if not used or used & {"BIO": {"E", "S"}, "IO": {"B", "E", "S"}}.get(scheme, set()):
        problem = f"the labels {', '.join(classes)} do not belong to the scheme {name}"
        raise InputError(place, problem, "check the labels, or leave the scheme out")
    V = len(classes)
    follows, starts, ends = np.ones((V, V), bool), np.ones(V, bool), np.ones(V, bool)
    for j, (tag, kind) in enumerate(parsed if scheme != "IO" else ()):
        goes_on = tag in _GOES_ON
        starts[j] = not goes_on
        ends[j] = scheme == "BIO" or tag not in _OPEN
        for i, (before, kind_before) in enumerate(parsed):
            same = before in _OPEN and kind_before == kind
            open_before = scheme == "IOBES" and before in _OPEN
            follows[i, j] = same if goes_on else not open_before
    return Allowed(follows, starts, ends)


def _parse(label: str) -> tuple[str, str]:
    """Splits a label into tag and type; a label without a tag counts as outside (O)."""
    tag, dash, kind = label.partition("-")
    return (_TAGS[tag], kind) if tag in _TAGS and (dash or label == tag) else ("O", "")


Pairs = list[tuple[int | None, int | None]]


def _checked(pairs: Any, classes: Sequence[str], place: str) -> Pairs:
    index = {label: i for i, label in enumerate(classes)}
    found: Pairs = []
    if not isinstance(pairs, list | tuple):
        raise InputError(place, f"{pairs!r} is not a list of pairs", "pass [(label, next label), ...]")
    for pair in pairs:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise InputError(place, f"{pair!r} is not a pair of labels", "pass (label, next label)")
        for label in pair:
            if label is not None and not (isinstance(label, str) and label in index):
                remedy = f"use {', '.join(classes)}; None stands for the start or the end"
                raise InputError(place, f"{label!r} is not a label in the training data", remedy)
        if pair[0] is None and pair[1] is None:
            raise InputError(place, "(None, None) has no label", "name a label in each pair")
        before, after = (None if label is None else index[label] for label in pair)
        found.append((before, after))
    return found


def _of_pairs(kind: str, pairs: Pairs, classes: Sequence[str]) -> Allowed:
    V, value = len(classes), kind == "allowed"
    follows = np.full((V, V), not value)
    # If no start is listed, every label may be one; the same holds for ends.
    starts = np.full(V, not (value and any(before is None for before, _ in pairs)))
    ends = np.full(V, not (value and any(after is None for _, after in pairs)))
    for before, after in pairs:
        if before is None:
            starts[after] = value
        elif after is None:
            ends[before] = value
        else:
            follows[before, after] = value
    return Allowed(follows, starts, ends)
