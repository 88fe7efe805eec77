"""Python objects -> numbers: a sequence becomes a (T, W) matrix of rows.

Every row holds up to three blocks side by side, so that a kernel finds its block by position and no feature
vocabulary is ever spread out into a dense matrix. The sparse block comes last because its width may differ
from sequence to sequence:

=============  =============================================================================
categorical    P columns, the value id of each template (missing: -1)
dense          D columns, unchanged; for dicts, the vectors under each key side by side
sparse         entries (feature id, value), as many as the fullest row has (unused: -1, 0)
=============  =============================================================================

A value that training never saw gets an id of its own, above all known ones and unique within its sequence:
two tokens of a new sentence that share an unknown word still agree in it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from structgp.data.batch import Batch
from structgp.data.vocabulary import (
    Vocabulary,
    as_csr,
    as_dense,
    as_vector,
    check_finite,
    check_mapping,
    columns_of,
    form_of,
    length,
)
from structgp.errors import InputError

Rows = TypeVar("Rows", bound=Any)


@dataclass(frozen=True)
class Block:
    """Columns ``start`` to ``stop`` of a row (None: to its end), all of one ``kind``."""

    kind: str
    start: int
    stop: int | None
    names: tuple[str, ...] = ()


class RowLayout:
    """What a row consists of: categorical templates, ``dense_width`` columns, and a sparse block or
    none."""

    templates: list[str]
    dense_width: int
    has_sparse: bool

    @property
    def blocks(self) -> list[Block]:
        """The blocks of a row, in order."""
        blocks, P, dense = [], len(self.templates), self.dense_width
        if P:
            blocks.append(Block("categorical", 0, P, tuple(self.templates)))
        if dense:
            blocks.append(Block("dense", P, P + dense))
        if self.has_sparse:
            blocks.append(Block("sparse", P + dense, None))
        return blocks

    def pad_row(self, width: int) -> np.ndarray:
        """(width,) the row at padded positions: no value anywhere."""
        P, dense = len(self.templates), self.dense_width
        unused = np.tile([-1.0, 0.0], (width - P - dense) // 2)
        return np.concatenate([np.full(P, -1.0), np.zeros(dense), unused])


class FeatureEncoder(RowLayout, Vocabulary):
    """Learns from training sequences what their tokens look like; then encodes any sequence.

    Parameters and attributes are those of :class:`structgp.data.vocabulary.Vocabulary`."""

    def extended(self, X: Iterable[Any]) -> FeatureEncoder:
        """A copy that also knows the values of X. Old ids stay; templates stay the same."""
        encoder = copy.deepcopy(self)
        encoder.transform(X)  # reports what does not fit
        encoder.learn_more(X)
        return encoder

    def columns_named(self, names: Sequence[str]) -> list[int]:
        """The places of these templates among the columns of a row."""
        place = {name: p for p, name in enumerate(self.templates)}
        for name in names:
            if name not in place:
                known = ", ".join(map(repr, self.templates)) or "none"
                problem = "not a feature with string values in the training data"
                raise InputError(f"feature {name!r}", problem, f"use one of those: {known}")
        return [place[name] for name in names]

    def only(self, names: Sequence[str]) -> EncoderView:
        """Rows with these categorical templates alone, in this order."""
        return EncoderView(self, self.columns_named(names), whole=False)

    def without(self, names: Sequence[str]) -> EncoderView:
        """Rows without these categorical templates; dense and sparse blocks stay."""
        dropped = set(self.columns_named(names))
        return EncoderView(self, [p for p in range(len(self.templates)) if p not in dropped], whole=True)

    def select(self, rows: Rows) -> Rows:
        """The rows as they are; those of an :class:`EncoderView` are a selection."""
        return rows

    # -- encoding ------------------------------------------------------------------------------

    def transform(self, X: Iterable[Any]) -> list[np.ndarray]:
        """One (T, W) float64 matrix per sequence. Time linear in the number of feature values."""
        return [self.encode(x, f"X[{n}]") for n, x in enumerate(X)]

    def encode(self, x: Any, place: str = "x") -> np.ndarray:
        """(T, W) rows of one sequence; ``place`` names it in errors."""
        if not length(x, place):
            return np.empty((0, len(self.templates)))
        form = form_of(x, place)
        if form != self.form:
            problem = f"tokens are {form}, but training had {self.form}"
            raise InputError(place, problem, "use one form throughout")
        if form == "dense":
            rows = as_dense(x, place)
            self._check_width(rows.shape[1], place)
            check_finite(rows, place, lambda d: f"column {d}")
            return rows
        if form == "sparse":
            return self._encode_sparse(x, place)
        parts = [self._encode_templates(x, place)] if self.templates else []
        parts += [self._encode_vectors(x, place, *vector) for vector in self.vectors.items()]
        if self.has_sparse:
            parts.append(self._encode_attributes(x, place))
        return np.concatenate(parts, 1)

    def _encode_sparse(self, x: Any, place: str) -> np.ndarray:
        matrix = as_csr(x)
        self._check_width(matrix.shape[1], place)
        bad = ~np.isfinite(matrix.data)
        if bad.any():
            first = int(np.argmax(bad))
            t = int(np.searchsorted(matrix.indptr, first, side="right")) - 1
            problem = f"column {matrix.indices[first]} is {matrix.data[first]}"
            raise InputError(f"{place}[{t}]", problem, "replace NaN and infinite values")
        return entries(np.diff(matrix.indptr), self._column_ids(matrix.indices), matrix.data)

    def _column_ids(self, columns: np.ndarray) -> np.ndarray:
        """The place of each among those seen; behind them, one for every other column."""
        known = self.column_array
        if not len(known):
            return columns.astype(np.int64)
        place = np.searchsorted(known, columns)
        seen = known[np.minimum(place, len(known) - 1)] == columns
        return np.where(seen, place, len(known) + columns)

    def _encode_templates(self, x: Sequence[Any], place: str) -> np.ndarray:
        rows = np.full((len(x), len(self.templates)), -1.0)
        unseen: list[dict[str, int]] = [{} for _ in self.templates]
        columns = columns_of(x) if self.form == "strings" else None
        if columns is not None and len(columns) == len(self.templates):
            for p, (column, known) in enumerate(zip(columns, self.values, strict=True)):
                found = [known.get(value, -1) for value in column]
                for t in (t for t, number in enumerate(found) if number < 0):
                    found[t] = _id_of(column[t], known, unseen[p])
                rows[:, p] = found
            return rows
        for t, token in enumerate(x):
            if self.form == "strings":
                self.check_columns(token, f"{place}[{t}]")
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

    def _encode_attributes(self, x: Sequence[Any], place: str) -> np.ndarray:
        unseen: dict[str, int] = {}
        counts: list[int] = []
        ids: list[int] = []
        values: list[float] = []
        for t, token in enumerate(x):
            found = self.attributes_of(token, f"{place}[{t}]")
            counts.append(len(found))
            ids += [_id_of(name, self.attributes, unseen) for name in found]
            values += found.values()
        return entries(np.array(counts), np.array(ids), np.array(values))

    def _check_width(self, width: int, place: str) -> None:
        if width != self.width:
            problem = f"{width} columns, but training had {self.width}"
            raise InputError(place, problem, "pass the same features")


class EncoderView(RowLayout):
    """Some columns of an encoder's rows: what one template of a structure sees of a token.

    kept : places of the categorical templates that stay; whole : whether dense and sparse blocks stay. The
    other attributes are those of an encoder that has only these columns; nothing is copied."""

    def __init__(self, encoder: FeatureEncoder, kept: Sequence[int], *, whole: bool) -> None:
        self.encoder, self.kept, self.whole = encoder, list(kept), whole
        self.templates = [encoder.templates[p] for p in kept]
        self.values = [encoder.values[p] for p in kept]
        self.attributes = encoder.attributes if whole else {}
        self.columns = encoder.columns if whole else []
        self.has_sparse = whole and encoder.has_sparse
        self.n_sparse = encoder.n_sparse if whole else 0
        self.dense_width = encoder.dense_width if whole else 0

    def select(self, rows: Rows) -> Rows:
        """Rows (..., W) of the encoder, an array or a tensor -> the columns (..., W') that stay."""
        rest = range(len(self.encoder.templates), rows.shape[-1]) if self.whole else ()
        return rows[..., [*self.kept, *rest]]

    def transform(self, X: Iterable[Any]) -> list[np.ndarray]:
        """One (T, W') matrix per sequence."""
        return [self.select(rows) for rows in self.encoder.transform(X)]


class FeatureSplit:
    """What each template of a structure sees of a row: ``node``, and ``next`` for transitions into the
    token, None where those have no features.

    spec : of the structure, with ``spec.node.without`` and ``spec.next``, None or with ``features``.
    """

    def __init__(self, encoder: FeatureEncoder, spec: Any) -> None:
        hidden, transition = spec.node.without, spec.next
        self.node = encoder.without(hidden) if hidden else encoder
        self.next = encoder.only(transition.features) if transition and transition.features else None

    def __call__(self, batch: Batch) -> Batch:
        """The batch of whole rows, with the columns of each template."""
        edges = None if self.next is None else self.next.select(batch.x[:, 1:])
        return replace(batch, x=self.node.select(batch.x), edges=edges)


def entries(counts: np.ndarray, ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(n, 2A) the sparse block of n tokens: ids and values in turn, from those of all tokens in order;
    counts : (n,) how many each token has."""
    rows = np.tile([-1.0, 0.0], (len(counts), max(1, int(counts.max(initial=0)))))
    row = np.repeat(np.arange(len(counts)), counts)
    slot = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows[row, 2 * slot], rows[row, 2 * slot + 1] = ids, values
    return rows


def _id_of(value: str, known: Mapping[str, int], unseen: dict[str, int]) -> int:
    found = known.get(value)
    if found is None:
        found = unseen.setdefault(value, len(known) + len(unseen))
    return found
