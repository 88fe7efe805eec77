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
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, count, islice, pairwise, repeat
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from structgp.data.arrays import (
    LARGEST,
    as_csr,
    as_dense,
    as_vector,
    check_finite,
    is_array,
    not_usable,
    stacked,
)
from structgp.data.batch import UNUSED, Batch
from structgp.data.token_forms import form_of
from structgp.data.vocabulary import MOST_PLACES, RowLayout, Vocabulary
from structgp.errors import InputError

Rows = TypeVar("Rows", bound=Any)

AT_ONCE = 16
"""Number of sequences that are encoded together: enough to share the work, few enough that their strings
stay in a cache. The fastest of 1, 4, 16, 64 and 512 for ``benchmarks/encoding.py``."""

_EMPTY = np.empty((0, 0))


class FeatureEncoder(Vocabulary):
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
        """A view of the rows with only these categorical templates, in this order."""
        return EncoderView(self, self.columns_named(names), whole=False)

    def without(self, names: Sequence[str]) -> EncoderView:
        """A view of the rows without these categorical templates and their parts; dense and sparse blocks
        stay."""
        dropped = set(self.columns_named(names))
        if self.parts is not None and self.parts.word in dropped:
            dropped |= set(range(len(self.given), len(self.templates)))
        return EncoderView(self, [p for p in range(len(self.templates)) if p not in dropped], whole=True)

    def select(self, rows: Rows) -> Rows:
        """The rows as they are; an :class:`EncoderView` selects columns here."""
        return rows

    def with_parts(self, rows: np.ndarray) -> np.ndarray:
        """(T, W + K) rows with the parts of words, from rows that were encoded before ``add_parts`` and
        hold known values only."""
        if self.parts is None:
            return rows
        n, ids = len(self.given), rows[:, self.parts.word].astype(np.int64)
        parts = np.where(ids[:, None] >= 0, self.parts.table[ids], -1)
        return np.concatenate([rows[:, :n], parts, rows[:, n:]], 1)

    def transform(self, X: Iterable[Any], *, apart: bool = True) -> list[np.ndarray]:
        """One (T, W) float64 matrix per sequence. Time linear in the number of feature values. apart :
        whether values that training never saw are told apart, which is a third of the work on new text; the
        mean and the variance of a token's scores do not depend on it."""
        places, found = ((f"X[{n}]", x) for n, x in enumerate(X)), []
        while some := list(islice(places, AT_ONCE)):
            found += self._encode_all(some, apart)
        return found

    def encode(self, x: Any, place: str = "x") -> np.ndarray:
        """(T, W) rows of one sequence; ``place`` names it in errors."""
        return self._encode_all([(place, x)])[0]

    def _encode_all(self, given: Sequence[tuple[str, Any]], apart: bool = True) -> list[np.ndarray]:
        """Rows of sequences, each given with its place."""
        if self.form == "sparse":
            return self._encode_sparse(given)
        plain = self._plain_rows([x for _, x in given], apart)
        if plain is not None:
            return plain
        columns: list[Sequence[Sequence[Any]]] = []
        blocks: list[list[np.ndarray]] = []
        for place, x in given:
            empty = not form_of(x, place, self.form)
            columns.append([()] * len(self.given) if empty else self._columns(x, place))
            blocks.append([] if empty else self._dense_and_sparse(x, place, apart))
        if self.templates:
            together = [list(chain(*own)) for own in zip(*columns, strict=True)]
            found = self._template_ids(together, [len(own[0]) for own in columns], apart)
            if self.form == "dicts" and any((ids < 0).any() for ids in found):
                self.check_values(columns, [place for place, _ in given])
                self.check_keys([token for _, x in given for token in x])
            blocks = [[ids, *own] for ids, own in zip(found, blocks, strict=True)]
        return [np.concatenate(own, 1) if len(own) > 1 else own[0] if own else _EMPTY for own in blocks]

    def _plain_rows(self, X: Sequence[Any], apart: bool) -> list[np.ndarray] | None:
        """The rows of lists of dicts that all have a string under the key of every template and no other
        keys, so that nothing needs to be checked; None for anything else."""
        n = len(self.given)
        if self.form != "dicts" or n < 2 or len(self.blocks) > 1 or set(map(type, X)) != {list}:
            return None
        tokens = list(chain(*X))
        if set(map(type, tokens)) != {dict} or set(map(len, tokens)) != {n}:
            return None
        try:
            together = list(zip(*map(itemgetter(*self.given), tokens), strict=True))
        except KeyError:
            return None
        rows = self._template_ids(together, list(map(len, X)), apart)
        return None if any((ids < 0).any() for ids in rows) else rows

    def _columns(self, x: Any, place: str) -> Sequence[Sequence[Any]]:
        return self.template_columns(x, place) if self.templates else ()

    def _template_ids(
        self, together: Sequence[Sequence[Any]], lengths: Sequence[int], apart: bool
    ) -> list[np.ndarray]:
        """(T, P) ids of each sequence, from the values of all sequences under each template. All values of
        one template are looked up together, while its vocabulary is in the cache."""
        ends, P = list(accumulate(lengths, initial=0)), len(together)
        rows = np.empty((ends[-1], len(self.templates)))
        for p, (values, known) in enumerate(zip(together, self.values, strict=False)):
            rows[:, p] = _ids_of(values, known, ends, apart)
        if self.parts is not None:
            word, find = self.parts.word, partial(_ids_of, apart=apart)
            rows[:, P:] = self.parts.ids(rows[:, word].astype(np.int64), together[word], ends, find)
        return [rows[start:stop] for start, stop in pairwise(ends)]

    def _dense_and_sparse(self, x: Any, place: str, apart: bool) -> list[np.ndarray]:
        """The blocks of a row after the block of templates."""
        if self.form == "dense":
            rows = as_dense(x, place)
            self._check_width(rows.shape[1], place)
            check_finite(rows, place, lambda d: f"column {d}")
            return [rows]
        parts = [self._encode_vectors(x, place, *vector) for vector in self.vectors.items()]
        if self.has_sparse:
            found = self.sparse_features(x, place)
            names = list(chain.from_iterable(found))
            values = list(chain.from_iterable(map(dict.values, found)))
            ids = _ids_of(names, self.attributes, [0, len(names)], apart)
            parts.append(entries(np.array(list(map(len, found))), ids, values))
        return parts

    def _encode_sparse(self, given: Sequence[tuple[str, Any]]) -> list[np.ndarray]:
        """Rows of the matrices of sequences, each as wide as its fullest row needs."""
        there = {n: as_csr(x) for n, (place, x) in enumerate(given) if form_of(x, place, self.form)}
        for n, matrix in there.items():
            self._check_width(matrix.shape[1], given[n][0])
            if matrix.dtype.kind not in "biuf":
                what = f"a sparse matrix of numbers of type {matrix.dtype}"
                raise InputError(given[n][0], what, "pass real numbers")
        if not there:
            return [_EMPTY for _ in given]
        whole = stacked(list(there.values()))
        if not np.abs(whole.data).max(initial=0) <= np.float64(LARGEST):  # which is beyond float32
            for n, matrix in there.items():
                _check_sparse(matrix, given[n][0])
        counts = np.diff(whole.indptr)
        rows = entries(counts, self._column_ids(whole.indices), whole.data)
        found, start = [_EMPTY] * len(given), 0
        for n, matrix in there.items():
            end = start + matrix.shape[0]
            found[n] = rows[start:end, : 2 * max(1, int(counts[start:end].max()))]
            start = end
        return found

    def _column_ids(self, columns: np.ndarray) -> np.ndarray:
        """The id of each column: its place among the columns seen in training, or, for any other column, an
        id of its own after those."""
        known = self.column_array
        if not len(known):
            return columns.astype(np.int64)
        if self.width <= MOST_PLACES:
            place = self.column_places[columns]
            if place.min(initial=0) >= 0:
                return place
            return np.where(place >= 0, place, len(known) + columns)
        place = np.searchsorted(known, columns)
        seen = known[np.minimum(place, len(known) - 1)] == columns
        return np.where(seen, place, len(known) + columns)

    def _encode_vectors(self, x: Sequence[Any], place: str, name: str, width: int) -> np.ndarray:
        """(T, width) the vectors of all tokens under one key.

        A missing vector is an error rather than read as zeros: most often its key is mistyped, and to a
        kernel zeros are a point like any other."""
        rows = np.empty((len(x), width))
        for t, token in enumerate(x):
            value = token.get(name)
            if is_array(value):
                value = as_vector(value, name, f"{place}[{t}]")
                found = len(value)
                problem = f"vector {name!r} has {found} numbers, but the first in training had {width}"
            elif value is None:
                found, problem = 0, f"vector {name!r} is missing"
            else:
                kind = type(value).__name__
                found, problem = 0, f"feature {name!r} is a {kind}, but training had a vector"
            if found != width:
                remedy = f"pass {width} numbers with every token, zeros where nothing is known"
                raise InputError(f"{place}[{t}]", problem, remedy)
            rows[t] = value
        check_finite(rows, place, lambda d: f"{name}[{d}]")
        return rows

    def _check_width(self, width: int, place: str) -> None:
        if width != self.width:
            problem = f"{width} columns, but training had {self.width}"
            raise InputError(place, problem, "pass the same features")


class EncoderView(RowLayout):
    """Some columns of an encoder's rows: what one template of a structure sees of a token.

    kept : places of the categorical templates that stay; whole : whether dense and sparse blocks stay. The
    other attributes are those of an encoder with only these columns; nothing is copied."""

    def __init__(self, encoder: FeatureEncoder, kept: Sequence[int], *, whole: bool) -> None:
        self.encoder, self.kept, self.whole = encoder, list(kept), whole
        self.templates = [encoder.templates[p] for p in kept]
        self.values = [encoder.values[p] for p in kept]
        self.attributes = encoder.attributes if whole else {}
        self.columns = encoder.columns if whole else []
        self.has_sparse = whole and encoder.has_sparse
        self.n_sparse = encoder.n_sparse if whole else 0
        self.dense_width = encoder.dense_width if whole else 0
        self.lay_out()

    def select(self, rows: Rows) -> Rows:
        """Rows (..., W) of the encoder, an array or a tensor -> the columns (..., W') that stay."""
        rest = range(len(self.encoder.templates), rows.shape[-1]) if self.whole else ()
        return rows[..., [*self.kept, *rest]]


class FeatureSplit:
    """What each template of a structure sees of a row: ``node``, and ``next`` for transitions into the
    token, None if transitions have no features.

    spec : of the structure, with ``spec.node.without``, and ``spec.next``, which is None or has
    ``features``."""

    def __init__(self, encoder: FeatureEncoder, spec: Any) -> None:
        hidden, transition = spec.node.without, spec.next
        self.node = encoder.without(hidden) if hidden else encoder
        self.is_whole = not hidden and not (transition and transition.features)
        self.next = encoder.only(transition.features) if transition and transition.features else None

    def __call__(self, batch: Batch) -> Batch:
        """Splits the columns of a batch of whole rows among the templates."""
        if self.is_whole:
            return batch
        edges = None if self.next is None else self.next.select(batch.x[:, 1:])
        return replace(batch, x=self.node.select(batch.x), edges=edges)


def entries(counts: np.ndarray, ids: ArrayLike, values: ArrayLike) -> np.ndarray:
    """(n, 2A) the sparse block of n tokens, in which ids and values alternate. ids, values : of all tokens,
    in order; counts : (n,) how many entries each token has."""
    n, A = len(counts), max(1, int(counts.max(initial=0)))
    rows = np.tile(UNUSED, (n * A, 1))
    place: Any = slice(None)
    if (counts < A).any():  # after a token's last entry, the rest of its row is skipped
        begin = np.cumsum(counts) - counts
        place = np.repeat(A * np.arange(n) - begin, counts) + np.arange(int(counts.sum()))
    rows[place, 0], rows[place, 1] = ids, values
    return rows.reshape(n, 2 * A)


def _check_sparse(matrix: Any, place: str) -> None:
    """InputError for a value of a scipy-sparse matrix that cannot be squared."""
    matrix = stacked([matrix])
    bad = ~(np.abs(matrix.data) <= np.float64(LARGEST))
    if bad.any():
        first = int(np.argmax(bad))
        t = int(np.searchsorted(matrix.indptr, first, side="right")) - 1
        raise not_usable(f"column {matrix.indices[first]}", matrix.data[first], f"{place}[{t}]")


def _ids_of(
    values: Sequence[Any], known: Mapping[str, int], ends: Sequence[int], apart: bool = True
) -> np.ndarray:
    """The id of each value; -1 for a value that is not a string. Ids of unknown values begin after the
    known ones, anew in each sequence: the first unknown value of a sequence gets the first such id, and so
    on; a value that is repeated gets the same id again. ends : where sequences begin and end among the
    values. If ``apart`` is False, all unknown values get the first such id."""
    unknown = len(known)
    try:
        ids = np.fromiter(map(known.get, values, repeat(unknown)), np.int64, len(values))
    except (TypeError, ValueError):  # a value without a hash
        return _ids_of([v if isinstance(v, str) else None for v in values], known, ends, apart)
    if not apart:
        if set(map(type, values)) != {str}:
            ids[[not isinstance(v, str) for v in values]] = -1
        return ids
    at = np.flatnonzero(ids == unknown)
    if not len(at):
        return ids
    missing, found = list(map(values.__getitem__, at.tolist())), list[int]()
    for start, stop in pairwise(np.searchsorted(at, ends).tolist()):
        if start < stop:
            found += map(dict[Any, int]().setdefault, missing[start:stop], count(unknown))
    ids[at] = found
    if set(map(type, missing)) != {str}:
        ids[at[[not isinstance(v, str) for v in missing]]] = -1
    return ids
