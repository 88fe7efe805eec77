"""What training tokens look like: the form they come in, and an id for each of their features' values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from structgp.data.forms import (
    as_csr,
    as_dense,
    bag,
    check_mapping,
    check_strings,
    flatten,
    form_of,
    length,
    vector_length,
)
from structgp.errors import InputError

MAX_TEMPLATES = 64
"""With more string-valued keys than this, features='auto' reads them as a bag, not as templates."""


@dataclass
class Vocabulary:
    """Learned from training sequences by ``learn``.

    Parameters
    ----------
    features : how a token that is a list of strings is read: 'columns' (place j is template j,
        every token has equally many), 'bag' (a set of attributes), or 'auto' (columns if every
        training token has equally many strings and none is a set, else bag). With dicts, 'columns'
        makes every key with string values a template, however many there are.

    Attributes (after ``learn``)
    ----------
    form : 'strings', 'dicts', 'sparse' or 'dense'.
    templates : names of the categorical columns.
    values : one dict per template, value -> id.
    vectors : dict, key of a vector in feature dicts -> its number of elements.
    attributes : dict, name of a sparse feature -> id.
    has_sparse : whether rows end in a sparse block.
    width : number of columns of dense or scipy-sparse matrices.
    columns : the columns of scipy-sparse matrices that were seen, sorted; the place of one is its id.
    """

    features: str = "auto"
    form: str = ""
    templates: list[str] = field(default_factory=list)
    values: list[dict[str, int]] = field(default_factory=list)
    vectors: dict[str, int] = field(default_factory=dict)
    attributes: dict[str, int] = field(default_factory=dict)
    has_sparse: bool = False
    width: int = 0
    columns: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._set_columns(np.array(self.columns, dtype=np.int64))

    def _set_columns(self, columns: np.ndarray) -> None:
        self.columns, self._column_array = columns.tolist(), columns

    @property
    def n_sparse(self) -> int:
        """How many sparse features are known."""
        return len(self.columns) or len(self.attributes)

    # -- learning ------------------------------------------------------------------------------

    def learn(self, X: Iterable[Any]) -> None:
        """Learn form and values from X, which is gone through more than once. Memory is that of one
        sequence and of what is learned."""
        if self.features not in ("auto", "columns", "bag"):
            raise InputError(
                "features", f"{self.features!r} is not known", "use 'auto', 'columns' or 'bag'"
            )
        start = next(not_empty(X), None)
        if start is None:
            raise InputError("X", "no tokens", "pass at least one sequence with one token")
        first, place = start[1], f"X[{start[0]}]"
        self.form = form_of(first, place)
        if self.form == "dense":
            self.width = as_dense(first, place).shape[1]
        elif self.form == "sparse":
            self.width, self.has_sparse = int(first.shape[1]), True
            self._learn_columns(X)
        elif self.form == "strings":
            self._learn_strings(X)
        else:
            self._learn_dicts(X)

    def learn_more(self, X: Iterable[Any]) -> None:
        """Add the values of X, whose form is known to fit, behind the known ones; templates stay."""
        if self.form == "sparse":
            self._learn_columns(X)
        elif self.form != "dense":
            self._learn_values(X)
            if self.has_sparse:
                self._learn_attributes(X)

    def _learn_columns(self, X: Iterable[Any]) -> None:
        seen = np.zeros(self.width, dtype=bool)
        seen[self._column_array] = True
        for n, x in not_empty(X):
            # Sequences of another form or width are reported when they are encoded.
            if form_of(x, f"X[{n}]") == "sparse" and x.shape[1] == self.width:
                seen[as_csr(x).indices] = True
        self._set_columns(np.flatnonzero(seen))

    def _learn_strings(self, X: Iterable[Any]) -> None:
        """Collect values by column for as long as tokens may be columns."""
        widths, ordered, stray = set(), True, None
        values: list[dict[str, int]] = []
        for n, x in not_empty(X):
            columns = columns_of(x)
            if columns is not None and self.features != "bag" and ordered:
                widths.add(len(columns))
                if len(widths) == 1:
                    values = values or [{} for _ in columns]
                    for known, column in zip(values, columns, strict=True):
                        known.update(dict.fromkeys(column, 0))
                    continue
            for t, token in enumerate(x):
                check_strings(token, f"X[{n}][{t}]")
                widths.add(len(token))
                ordered = ordered and not isinstance(token, set | frozenset)
                if self.features == "bag" or not ordered or len(widths) > 1:
                    values = []
                elif not all(isinstance(value, str) for value in token):
                    stray = stray or (token, f"X[{n}][{t}]")
                else:
                    values = values or [{} for _ in token]
                    for known, value in zip(values, token, strict=True):
                        known[value] = 0
        if resolve_reading(self.features, widths, ordered) == "bag":
            self._learn_attributes(X)
            return
        self.templates = [str(p) for p in range(widths.pop())]
        # Ids in the order in which values were seen.
        self.values = [{value: i for i, value in enumerate(known)} for known in values]
        if stray is not None:
            self.check_columns(*stray)
        if not ordered:
            for n, x in not_empty(X):
                for t, token in enumerate(x):
                    self.check_columns(token, f"X[{n}][{t}]")

    def _learn_dicts(self, X: Iterable[Any]) -> None:
        keys: dict[str, None] = {}
        for n, x in not_empty(X):
            for t, token in enumerate(x):
                check_mapping(token, place := f"X[{n}][{t}]")
                keys.update({k: None for k, v in token.items() if isinstance(v, str)})
                for key, value in token.items():
                    if isinstance(value, np.ndarray) and key not in self.vectors:
                        self.vectors[key] = vector_length(value, key, place)
        # A key with both strings and vectors is a mistake, which is reported when it is encoded.
        self.templates = resolve_templates(self.features, [k for k in keys if k not in self.vectors])
        self.values = [{} for _ in self.templates]
        if self.templates:
            self._learn_values(X)
        self._learn_attributes(X)

    def _learn_values(self, X: Iterable[Any]) -> None:
        for _, x in not_empty(X):
            for token in x:
                values = token if self.form == "strings" else map(token.get, self.templates)
                for known, value in zip(self.values, values, strict=False):
                    if isinstance(value, str):
                        known.setdefault(value, len(known))

    def _learn_attributes(self, X: Iterable[Any]) -> None:
        attributes_of = self.attributes_of
        for n, x in not_empty(X):
            for t, token in enumerate(x):
                for name in attributes_of(token, f"X[{n}][{t}]"):
                    self.attributes.setdefault(name, len(self.attributes))
        self.has_sparse = bool(self.attributes)

    @property
    def attributes_of(self) -> Callable[[Any, str], dict[str, float]]:
        """The function from a token and its place to its sparse features."""
        return bag if self.form == "strings" else self._loose_attributes

    def _loose_attributes(self, token: Mapping[str, Any], place: str) -> dict[str, float]:
        """The sparse features of a dict: numbers, flags, lists, dicts; not templates and vectors."""
        templates = set(self.templates)
        rest = {
            k: v
            for k, v in token.items()
            if k not in self.vectors and not (k in templates and isinstance(v, str))
        }
        return flatten(rest, place)

    def check_columns(self, token: Any, place: str) -> None:
        """InputError for a token that is not a list with one string per template."""
        check_strings(token, place)
        if isinstance(token, set | frozenset):
            raise InputError(place, "a set has no columns", "pass a list, or use features='bag'")
        if not all(isinstance(v, str) for v in token):
            raise InputError(place, f"{token!r} is not a list of strings", "use one form throughout")
        if len(token) != len(self.templates):
            raise InputError(
                place,
                f"{len(token)} strings, but training had {len(self.templates)}",
                "give every token equally many, or use features='bag'",
            )

    # -- saving --------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """All that ``from_json`` needs; ids are positions in the lists."""
        return {
            "features": self.features,
            "form": self.form,
            "templates": self.templates,
            "values": [list(known) for known in self.values],
            "vectors": [[name, width] for name, width in self.vectors.items()],
            "attributes": list(self.attributes),
            "has_sparse": self.has_sparse,
            "width": self.width,
            "columns": self.columns,
        }


def resolve_reading(features: str, widths: set[int], ordered: bool) -> str:
    """'columns' or 'bag', for tokens with these numbers of strings; ordered : none of them is a set."""
    if features == "columns" and (len(widths) > 1 or widths == {0}):
        raise InputError(
            "X",
            f"tokens have {', '.join(map(str, sorted(widths)))} strings",
            "give every token equally many, or use features='bag'",
        )
    as_columns = features == "columns" or (features == "auto" and len(widths) == 1 and ordered)
    return "columns" if as_columns and widths != {0} else "bag"


def resolve_templates(features: str, keys: list[str]) -> list[str]:
    """The string-valued keys of feature dicts that are templates: all or, if they are too many, none."""
    return keys if len(keys) <= MAX_TEMPLATES or features == "columns" else []


def column_places(old: Vocabulary, new: Vocabulary) -> np.ndarray | None:
    """The new ids of the known columns of a scipy-sparse matrix; None where ids have not changed."""
    if old.form != "sparse" or not old.columns:
        return None
    return np.searchsorted(new.columns, old.columns)


def columns_of(x: Any) -> list[tuple[str, ...]] | None:
    """The columns of a sequence of tuples or lists of equally many strings; None for anything else."""
    if not set(map(type, x)) <= {tuple, list} or len(set(map(len, x))) != 1:
        return None
    columns = list(zip(*x, strict=True))
    return columns if all(set(map(type, c)) == {str} for c in columns) else None


def not_empty(X: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """The sequences with tokens, and their numbers."""
    for n, x in enumerate(X):
        if length(x, f"X[{n}]"):
            yield n, x
