"""Labels from several annotators: what each of them said about each sequence, as users pass it and as
numbers.

An annotator may be a person, a rule or another model; all that is known about them is what they said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from structgp.errors import InputError

Flat = Callable[[int, Any], "list[str | None]"]
"""Takes an example's number and its labels in the example's shape; checks them, and returns the labels of
all variables."""


class Annotations:
    """Labels of several annotators, to be passed to ``fit`` in the place of y.

    given : for each sequence a dict from the name of an annotator to the labels that they gave, in the same
    shape as y; None, or no entry, if an annotator has not seen the sequence, and None for a single label if
    they did not give it. sequential : whether what an annotator says about a token may also depend on what
    they said about the token before, as when errors come in runs.

    >>> Annotations([{"ann": ["B", "I"], "bob": ["B", None]}, {"bob": ["O"]}]).names
    ['ann', 'bob']"""

    def __init__(self, given: Iterable[Mapping[str, Any] | None], *, sequential: bool = False) -> None:
        self.given: list[dict[str, Any]] = []
        for n, labels in enumerate(given):
            if labels is not None and not isinstance(labels, Mapping):
                problem = f"expected a dict from annotator to labels, got a {type(labels).__name__}"
                raise InputError(f"annotations[{n}]", problem, "pass {annotator: labels} for each sequence")
            self.given.append({str(a): y for a, y in (labels or {}).items() if y is not None})
        self.sequential = bool(sequential)
        self.names = sorted({name for labels in self.given for name in labels})

    @classmethod
    def of(cls, by_annotator: Mapping[str, Iterable[Any]], **options: Any) -> Annotations:
        """Annotations from the labels of each annotator: a list with one entry per sequence, None where
        they gave none."""
        columns = {name: list(y) for name, y in by_annotator.items()}
        lengths = {len(y) for y in columns.values()}
        if len(lengths) > 1:
            problem = f"annotators have {', '.join(map(str, sorted(lengths)))} sequences"
            raise InputError("annotations", problem, "pass None for a sequence that one has not seen")
        n = max(lengths, default=0)
        return cls([{name: y[i] for name, y in columns.items()} for i in range(n)], **options)

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, index: slice) -> Annotations:
        return Annotations(self.given[index], sequential=self.sequential)

    def some(self, index: Sequence[int]) -> Annotations:
        """The annotations of the sequences ``index``, in this order."""
        return Annotations([self.given[i] for i in index], sequential=self.sequential)

    def __repr__(self) -> str:
        return f"Annotations({len(self)} sequences, {len(self.names)} annotators)"

    def flat(self, flatten: Flat) -> list[dict[str, list[str | None]]]:
        """For each sequence, the labels of its variables in order, by annotator."""
        found: list[dict[str, list[str | None]]] = []
        for n, labels in enumerate(self.given):
            try:
                name, here = "", dict[str, list[str | None]]()
                for name, y in labels.items():
                    here[name] = flatten(n, y)
            except InputError as error:
                place = f"annotations[{n}][{name!r}]{error.place[error.place.find(']') + 1 :]}"
                raise InputError(place, error.problem, error.remedy) from error
            found.append(here)
        return found


def majority(
    flat: Sequence[Mapping[str, Sequence[str | None]]], lengths: Sequence[int]
) -> list[list[str | None]]:
    """The label that most annotators gave each token, with ties broken in favour of the label that is more
    frequent overall; None where nobody gave one."""
    total = Counter(label for labels in flat for y in labels.values() for label in y if label is not None)
    rank = {label: (n, label) for label, n in total.items()}
    found = []
    for labels, length in zip(flat, lengths, strict=True):
        votes: list[Counter[str]] = [Counter() for _ in range(length)]
        for y in labels.values():
            for vote, label in zip(votes, y, strict=True):
                if label is not None:
                    vote[label] += 1
        found.append([max(v, key=lambda c: (v[c], rank[c])) if v else None for v in votes])
    return found


@dataclass(frozen=True)
class Given:
    """What annotators said, as numbers: one entry per label that was given, the entries of a sequence
    together.

    names : of the annotators. sequence, token, annotator, label : (E,) each; token is the position among
    the variables of the example. before : (E,) the label that the annotator gave the token before, n_labels
    if none; n_contexts : 1 if ``before`` is ignored, else the number of labels plus 1. starts : (N + 1,)
    number of entries before each sequence, then of all entries."""

    names: list[str]
    n_labels: int
    sequence: np.ndarray
    token: np.ndarray
    annotator: np.ndarray
    label: np.ndarray
    before: np.ndarray
    starts: np.ndarray
    sequential: bool = False

    @classmethod
    def read(
        cls,
        flat: Sequence[Mapping[str, Sequence[str | None]]],
        names: Sequence[str],
        classes: Sequence[str],
        sequential: bool,
    ) -> Given:
        """From the labels of the variables of each sequence, by annotator."""
        label_of, annotator_of = ({v: i for i, v in enumerate(some)} for some in (classes, names))
        V, counts = len(classes), list[int]()
        columns: list[tuple[int, ...]] = []
        for n, labels in enumerate(flat):
            here = len(columns)
            for name, y in labels.items():
                last = V
                for t, label in enumerate(y):
                    now = V if label is None else label_of[label]
                    if label is not None:
                        columns.append((n, t, annotator_of[name], now, last))
                    last = now
            counts.append(len(columns) - here)
        table: Any = np.array(columns, dtype=np.int64).reshape(-1, 5).T
        starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        sequence, token, annotator, label, before = np.ascontiguousarray(table)
        return cls(list(names), V, sequence, token, annotator, label, before, starts, sequential)

    @property
    def n_annotators(self) -> int:
        return len(self.names)

    @property
    def n_contexts(self) -> int:
        return self.n_labels + 1 if self.sequential else 1

    @property
    def context(self) -> np.ndarray:
        """(E,) the context in which each label was given; 0 if there is only one context."""
        return self.before if self.sequential else np.zeros_like(self.before)

    def labellings(self) -> Iterator[np.ndarray]:
        """Yields (T,) the labels that one annotator gave one sequence, -1 where they gave none, for all
        annotators and sequences, in no particular order."""
        for start, stop in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            length = int(self.token[start:stop].max(initial=-1)) + 1
            for a in np.unique(self.annotator[start:stop]).tolist():
                here = start + np.flatnonzero(self.annotator[start:stop] == a)
                found = np.full(length, -1, dtype=np.int64)
                found[self.token[here]] = self.label[here]
                yield found

    def part(self, index: Sequence[int]) -> Given:
        """The entries of the sequences ``index``, which are numbered anew."""
        ranges = [np.arange(self.starts[i], self.starts[i + 1]) for i in index]
        counts = np.array([len(r) for r in ranges], dtype=np.int64)
        some = np.concatenate([np.empty(0, np.int64), *ranges])
        picked = {name: getattr(self, name)[some] for name in ("token", "annotator", "label", "before")}
        sequence = np.repeat(np.arange(len(counts)), counts)
        return replace(self, sequence=sequence, starts=np.concatenate([[0], counts.cumsum()]), **picked)
