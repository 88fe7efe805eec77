"""Python objects -> numbers: a sequence becomes a (T, W) matrix of rows, labels become integers.

Every row holds up to three blocks side by side, so that a kernel finds its block by position and no feature
vocabulary is ever spread out into a dense matrix. The sparse block comes last because its width may
differ from sequence to sequence:

=============  =============================================================================
categorical    P columns, the value id of each template (missing: -1)
dense          D columns, as they are; of dicts, the vectors under each key side by side
sparse         pairs (feature id, value), as many as the fullest row has (unused pairs: -1, 0)
=============  =============================================================================

A value that training never saw gets an id of its own, above all known ones and unique within its
sequence: two tokens of a new sentence that share an unknown word still agree in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from structgp.data.forms import (
    as_csr,
    as_dense,
    as_vector,
    bag,
    check_finite,
    check_mapping,
    check_strings,
    flatten,
    form_of,
    length,
    vector_length,
)
from structgp.errors import InputError

MAX_TEMPLATES = 64
"""String-valued dict keys beyond this many are a bag of features rather than templates, unless columns are
asked for."""


@dataclass(frozen=True)
class Block:
    """Columns ``start`` to ``stop`` of a row (None: to its end), which hold one ``kind``."""

    kind: str
    start: int
    stop: int | None
    names: tuple[str, ...] = ()


@dataclass
class FeatureEncoder:
    """Learns from training sequences what their tokens look like; then encodes any sequence.

    Parameters
    ----------
    features : how a token that is a list of strings is read: 'columns' (place j is template j,
        every token has equally many), 'bag' (a set of attributes), or 'auto' (columns where every
        training token has equally many strings and none is a set, else bag). Of dicts, 'columns'
        makes every key with strings a template, however many there are.

    Attributes (after ``fit``)
    ----------
    form : 'strings', 'dicts', 'sparse' or 'dense'.
    templates : names of the categorical columns.
    values : one dict a template, value -> id.
    vectors : dict, key of the vectors in feature dicts -> how many numbers they have.
    attributes : dict, name of a sparse feature -> id.
    has_sparse : whether rows end in a sparse block.
    width : number of columns of dense or scipy-sparse matrices.
    columns : those of scipy-sparse matrices that were seen, sorted; the place of one is its id.
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

    # -- fitting -------------------------------------------------------------------------------

    def fit(self, X: Iterable[Any]) -> FeatureEncoder:
        """Learns form and vocabularies from X (see :class:`structgp.StructuredGPClassifier`), which is gone
        through more than once. Memory is that of one sequence and what is learned."""
        if self.features not in ("auto", "columns", "bag"):
            raise InputError(
                "features", f"{self.features!r} is not known", "use 'auto', 'columns' or 'bag'"
            )
        begin = next(_not_empty(X), None)
        if begin is None:
            raise InputError("X", "no token in it", "pass at least one sequence with one token")
        first, place = begin[1], f"X[{begin[0]}]"
        self.form = form_of(first, place)
        if self.form == "dense":
            self.width = as_dense(first, place).shape[1]
        elif self.form == "sparse":
            self.width = int(first.shape[1])
            self.has_sparse = True
            seen = np.zeros(self.width, dtype=bool)
            for n, x in _not_empty(X):
                # What is something else is told where it is encoded.
                if form_of(x, f"X[{n}]") == "sparse" and x.shape[1] == self.width:
                    seen[as_csr(x).indices] = True
            self.columns = np.flatnonzero(seen).tolist()
        elif self.form == "strings":
            self._fit_strings(X)
        else:
            self._fit_dicts(X)
        if not self.blocks:
            raise InputError("X", "no token has any feature", "pass at least one feature")
        return self

    def _fit_strings(self, X: Iterable[Any]) -> None:
        """Columns are learned on the way to knowing whether they are columns."""
        widths, ordered, stray = set(), True, None
        values: list[dict[str, int]] = []
        for n, x in _not_empty(X):
            columns = _columns(x)
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
        as_columns = self.features == "columns" or (
            self.features == "auto" and len(widths) == 1 and ordered
        )
        if as_columns and len(widths) == 1 and widths != {0}:
            self.templates = [str(p) for p in range(widths.pop())]
            # Numbers in the order in which values were met.
            self.values = [{value: i for i, value in enumerate(known)} for known in values]
            if stray is not None:
                self._check_columns(*stray)
            if not ordered:
                self._refuse_sets(X)
        elif as_columns and self.features == "columns":
            raise InputError(
                "X",
                f"tokens have {', '.join(map(str, sorted(widths)))} strings",
                "give every token equally many, or use features='bag'",
            )
        else:
            self._learn_attributes(X, bag)

    def _refuse_sets(self, X: Iterable[Any]) -> None:
        for n, x in _not_empty(X):
            for t, token in enumerate(x):
                self._check_columns(token, f"X[{n}][{t}]")

    def _fit_dicts(self, X: Iterable[Any]) -> None:
        keys: dict[str, None] = {}
        for n, x in _not_empty(X):
            for t, token in enumerate(x):
                check_mapping(token, place := f"X[{n}][{t}]")
                keys.update({k: None for k, v in token.items() if isinstance(v, str)})
                for key, value in token.items():
                    if isinstance(value, np.ndarray) and key not in self.vectors:
                        self.vectors[key] = vector_length(value, key, place)
        # A key with strings and vectors is a mistake, which is told where it is encoded.
        names = [key for key in keys if key not in self.vectors]
        if names and (len(names) <= MAX_TEMPLATES or self.features == "columns"):
            self.templates = names
            self.values = [{} for _ in self.templates]
            for _, x in _not_empty(X):
                for token in x:
                    for key, known in zip(self.templates, self.values, strict=True):
                        value = token.get(key)
                        if isinstance(value, str):
                            known.setdefault(value, len(known))
        self._learn_attributes(X, self._loose_attributes)

    def learn_attributes(self, X: Iterable[Any]) -> None:
        """Adds the sparse features of X, tokens of the form and the templates that are known."""
        self._learn_attributes(X, bag if self.form == "strings" else self._loose_attributes)

    def _learn_attributes(
        self, X: Iterable[Any], attributes_of: Callable[[Any, str], dict[str, float]]
    ) -> None:
        for n, x in _not_empty(X):
            for t, token in enumerate(x):
                for name in attributes_of(token, f"X[{n}][{t}]"):
                    self.attributes.setdefault(name, len(self.attributes))
        self.has_sparse = bool(self.attributes)

    def _loose_attributes(self, token: Mapping[str, Any], place: str) -> dict[str, float]:
        """What of a feature dict is no template and no vector: numbers, flags, lists, nested dicts."""
        templates = set(self.templates)
        rest = {
            k: v
            for k, v in token.items()
            if k not in self.vectors and not (k in templates and isinstance(v, str))
        }
        return flatten(rest, place)

    # -- the layout of a row -------------------------------------------------------------------

    @property
    def blocks(self) -> list[Block]:
        """The blocks of a row, in order."""
        blocks, P, D = [], len(self.templates), self._dense_width
        if P:
            blocks.append(Block("categorical", 0, P, tuple(self.templates)))
        if D:
            blocks.append(Block("dense", P, P + D))
        if self.has_sparse:
            blocks.append(Block("sparse", P + D, None))
        return blocks

    @property
    def _dense_width(self) -> int:
        return self.width if self.form == "dense" else sum(self.vectors.values())

    def pad_row(self, width: int) -> np.ndarray:
        """(width,) the row that stands at padded positions: no value anywhere."""
        P, D = len(self.templates), self._dense_width
        unused = np.tile([-1.0, 0.0], (width - P - D) // 2)
        return np.concatenate([np.full(P, -1.0), np.zeros(D), unused])

    # -- encoding ------------------------------------------------------------------------------

    def transform(self, X: Iterable[Any]) -> list[np.ndarray]:
        """One (T, W) float64 matrix a sequence. Time linear in the number of feature values."""
        return [self.encode(x, f"X[{n}]") for n, x in enumerate(X)]

    def encode(self, x: Any, place: str = "x") -> np.ndarray:
        """(T, W) rows of one sequence; ``place`` names it in errors."""
        if not length(x, place):
            return np.empty((0, len(self.templates)))
        form = form_of(x, place)
        if form != self.form:
            raise InputError(
                place,
                f"tokens are {form} where training had {self.form}",
                "use one form throughout",
            )
        if form == "dense":
            return self._encode_dense(x, place)
        if form == "sparse":
            return self._encode_sparse(x, place)
        parts = []
        if self.templates:
            parts.append(self._encode_templates(x, place))
        parts += [self._encode_vectors(x, place, *vector) for vector in self.vectors.items()]
        if self.has_sparse:
            attributes_of = bag if form == "strings" else self._loose_attributes
            parts.append(self._encode_attributes(x, place, attributes_of))
        return np.concatenate(parts, 1)

    def _encode_dense(self, x: Any, place: str) -> np.ndarray:
        rows = as_dense(x, place)
        self._check_width(rows.shape[1], place)
        check_finite(rows, place, lambda d: f"column {d}")
        return rows

    def _encode_sparse(self, x: Any, place: str) -> np.ndarray:
        matrix = as_csr(x)
        self._check_width(matrix.shape[1], place)
        bad = ~np.isfinite(matrix.data)
        if bad.any():
            first = int(np.argmax(bad))
            t = int(np.searchsorted(matrix.indptr, first, side="right")) - 1
            raise InputError(
                f"{place}[{t}]",
                f"column {matrix.indices[first]} is {matrix.data[first]}",
                "replace NaN and infinite values",
            )
        counts = np.diff(matrix.indptr)
        row = np.repeat(np.arange(matrix.shape[0]), counts)
        return _pairs(matrix.shape[0], row, self._column_ids(matrix.indices), matrix.data)

    def _column_ids(self, columns: np.ndarray) -> np.ndarray:
        """The place of each among those seen; behind them, one for every other column."""
        known = np.asarray(self.columns)
        if not len(known):
            return columns.astype(np.int64)
        place = np.searchsorted(known, columns)
        seen = known[np.minimum(place, len(known) - 1)] == columns
        return np.where(seen, place, len(known) + columns)

    def _encode_templates(self, x: Sequence[Any], place: str) -> np.ndarray:
        rows = np.full((len(x), len(self.templates)), -1.0)
        unseen: list[dict[str, int]] = [{} for _ in self.templates]
        columns = _columns(x) if self.form == "strings" else None
        if columns is not None and len(columns) == len(self.templates):
            for p, (column, known) in enumerate(zip(columns, self.values, strict=True)):
                found = [known.get(value, -1) for value in column]
                for t in (t for t, number in enumerate(found) if number < 0):
                    found[t] = _id_of(column[t], known, unseen[p])
                rows[:, p] = found
            return rows
        for t, token in enumerate(x):
            if self.form == "strings":
                self._check_columns(token, f"{place}[{t}]")
                items = token
            else:
                check_mapping(token, f"{place}[{t}]")
                items = [token.get(key) for key in self.templates]
            for p, value in enumerate(items):
                if isinstance(value, str):
                    rows[t, p] = _id_of(value, self.values[p], unseen[p])
        return rows

    def _encode_vectors(self, x: Sequence[Any], place: str, name: str, width: int) -> np.ndarray:
        """(T, width) the vectors of all tokens under one key."""
        rows = np.empty((len(x), width))
        for t, token in enumerate(x):
            check_mapping(token, f"{place}[{t}]")
            rows[t] = as_vector(token, name, width, f"{place}[{t}]")
        check_finite(rows, place, lambda d: f"{name}[{d}]")
        return rows

    def _encode_attributes(
        self,
        x: Sequence[Any],
        place: str,
        attributes_of: Callable[[Any, str], dict[str, float]],
    ) -> np.ndarray:
        unseen: dict[str, int] = {}
        row, ids, values = [], [], []
        for t, token in enumerate(x):
            for name, value in attributes_of(token, f"{place}[{t}]").items():
                row.append(t)
                ids.append(_id_of(name, self.attributes, unseen))
                values.append(value)
        return _pairs(len(x), np.array(row, dtype=int), np.array(ids), np.array(values))

    def _check_width(self, width: int, place: str) -> None:
        if width != self.width:
            raise InputError(
                place, f"{width} columns where training had {self.width}", "pass the same features"
            )

    def _check_columns(self, token: Any, place: str) -> None:
        check_strings(token, place)
        if isinstance(token, set | frozenset):
            raise InputError(place, "a set has no columns", "pass a list, or use features='bag'")
        if not all(isinstance(v, str) for v in token):
            raise InputError(
                place, f"{token!r} is not a list of strings", "use one form throughout"
            )
        if len(token) != len(self.templates):
            raise InputError(
                place,
                f"{len(token)} strings where training had {len(self.templates)}",
                "give every token equally many, or use features='bag'",
            )

    # -- saving --------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Everything ``from_json`` needs; ids are positions in the lists."""
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

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> FeatureEncoder:
        return cls(
            features=state["features"],
            form=state["form"],
            templates=list(state["templates"]),
            values=[{v: i for i, v in enumerate(known)} for known in state["values"]],
            # Files written before there were vectors have none.
            vectors=dict(state.get("vectors", [])),
            attributes={v: i for i, v in enumerate(state["attributes"])},
            has_sparse=state["has_sparse"],
            width=state["width"],
            columns=list(state["columns"]),
        )


def _columns(x: Any) -> list[tuple[str, ...]] | None:
    """The columns of a sequence of tuples or lists of equally many strings; None for anything else."""
    if not set(map(type, x)) <= {tuple, list} or len(set(map(len, x))) != 1:
        return None
    columns = list(zip(*x, strict=True))
    return columns if all(set(map(type, c)) == {str} for c in columns) else None


def _not_empty(X: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Sequences with tokens, and their numbers."""
    for n, x in enumerate(X):
        if length(x, f"X[{n}]"):
            yield n, x


def _pairs(n: int, row: np.ndarray, ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(n, 2A) interleaved ids and values; ``row`` is sorted and says where each pair belongs."""
    counts = np.bincount(row, minlength=n)
    slot = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = np.tile([-1.0, 0.0], (n, max(1, int(counts.max(initial=0)))))
    rows[row, 2 * slot] = ids
    rows[row, 2 * slot + 1] = values
    return rows


def _id_of(value: str, known: Mapping[str, int], unseen: dict[str, int]) -> int:
    found = known.get(value)
    if found is None:
        found = unseen.setdefault(value, len(known) + len(unseen))
    return found
