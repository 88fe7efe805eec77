"""What tokens look like: the forms that they come in, how each form is read, and an id for each value of
their features."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse

from structgp.errors import InputError

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_TEMPLATES = 64
"""With more string-valued keys than this, features='auto' reads them as a bag, not as templates."""

LARGEST = 1e100
"""Larger dense values cannot be squared in floating point, as kernels do."""


@dataclass
class Vocabulary:
    """Learned from training sequences by ``fit``.

    Parameters
    ----------
    features : how a token that is a list of strings is read: 'columns' (place j is template j, every token
        has equally many), 'bag' (a set of attributes), or 'auto' (columns if every training token has
        equally many strings and none is a set, else bag). With dicts, 'columns' makes every key with string
        values a template, however many there are.

    Attributes (after ``fit``)
    ----------
    form : 'strings', 'dicts', 'sparse' or 'dense'.
    templates : names of the categorical columns.
    values : one dict per template, value -> id.
    vectors : dict, key of a vector in feature dicts -> its number of elements.
    attributes : dict, name of a sparse feature -> id.
    has_sparse : whether rows end in a sparse block.
    width : number of columns of dense or scipy-sparse matrices.
    columns : the columns of scipy-sparse matrices that were seen, sorted; the place of one is its id.
    dense_width : number of dense columns of a row."""

    features: str = "auto"
    form: str = ""
    templates: list[str] = field(default_factory=list)
    values: list[dict[str, int]] = field(default_factory=list)
    vectors: dict[str, int] = field(default_factory=dict)
    attributes: dict[str, int] = field(default_factory=dict)
    has_sparse: bool = False
    width: int = 0
    columns: list[int] = field(default_factory=list)
    dense_width: int = 0

    @property
    def n_sparse(self) -> int:
        """How many sparse features are known."""
        return len(self.columns) or len(self.attributes)

    @cached_property
    def column_array(self) -> np.ndarray:
        return np.array(self.columns, dtype=np.int64)

    # -- learning ------------------------------------------------------------------------------

    def fit(self, X: Iterable[Any]) -> Self:
        """Learn form and values from X, which is gone through more than once. Memory is that of one
        sequence and of what is learned."""
        if self.features not in ("auto", "columns", "bag"):
            problem = f"{self.features!r} is not known"
            raise InputError("features", problem, "use 'auto', 'columns' or 'bag'")
        n, first = next(not_empty(X), (0, None))
        if first is None:
            raise InputError("X", "no tokens", "pass at least one sequence with one token")
        self.form = form_of(first, f"X[{n}]")
        if self.form == "dense":
            self.width = self.dense_width = as_dense(first, f"X[{n}]").shape[1]
        elif self.form == "sparse":
            self.width, self.has_sparse = int(first.shape[1]), True
            self._learn_columns(X)
        elif self.form == "strings":
            self._learn_strings(X)
        else:
            self._learn_dicts(X)
        if not (self.templates or self.dense_width or self.has_sparse):
            raise InputError("X", "no token has any feature", "pass at least one feature")
        return self

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
        seen[self.column_array] = True
        for n, x in not_empty(X):
            # Sequences of another form or width are reported when they are encoded.
            if form_of(x, f"X[{n}]") == "sparse" and x.shape[1] == self.width:
                seen[as_csr(x).indices] = True
        self.column_array = np.flatnonzero(seen)
        self.columns = self.column_array.tolist()

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
        if not reads_columns(self.features, widths, ordered):
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
        self.dense_width = sum(self.vectors.values())
        # A key with both strings and vectors is a mistake, which is reported when it is encoded.
        names = [k for k in keys if k not in self.vectors]
        # All of them are templates or, if they are too many, none.
        self.templates = names if len(names) <= MAX_TEMPLATES or self.features == "columns" else []
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
        for n, x in not_empty(X):
            for t, token in enumerate(x):
                for name in self.attributes_of(token, f"X[{n}][{t}]"):
                    self.attributes.setdefault(name, len(self.attributes))
        self.has_sparse = bool(self.attributes)

    def attributes_of(self, token: Any, place: str) -> dict[str, float]:
        """The sparse features of a token: strings of a bag; numbers, flags, lists and dicts in a dict."""
        if self.form != "strings":
            vectors, templates = self.vectors, set(self.templates)
            loose = (
                (k, v)
                for k, v in token.items()
                if k not in vectors and not (k in templates and isinstance(v, str))
            )
            return flatten(loose, place)
        check_strings(token, place)
        stray = next((name for name in token if not isinstance(name, str)), None)
        if stray is not None:
            raise InputError(place, f"{stray!r} is not a string", "use strings throughout")
        return dict.fromkeys(token, 1.0)

    def check_columns(self, token: Any, place: str) -> None:
        """InputError for a token that is not a list with one string per template."""
        check_strings(token, place)
        if isinstance(token, set | frozenset):
            raise InputError(place, "a set has no columns", "pass a list, or use features='bag'")
        if not all(isinstance(v, str) for v in token):
            raise InputError(place, f"{token!r} is not a list of strings", "use one form throughout")
        if len(token) != len(self.templates):
            problem = f"{len(token)} strings, but training had {len(self.templates)}"
            raise InputError(place, problem, "give every token equally many, or use features='bag'")

    # -- saving --------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """All that ``from_json`` needs; ids are positions in the lists."""
        plain = ("features", "form", "templates", "has_sparse", "width", "columns")
        return {name: getattr(self, name) for name in plain} | {
            "values": [list(known) for known in self.values],
            "vectors": [[name, width] for name, width in self.vectors.items()],
            "attributes": list(self.attributes),
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        # Files written before there were vectors have none.
        vectors = dict(state.get("vectors", []))
        given = dict(state) | {
            "values": [{v: i for i, v in enumerate(known)} for known in state["values"]],
            "attributes": {v: i for i, v in enumerate(state["attributes"])},
            "vectors": vectors,
            "dense_width": state["width"] if state["form"] == "dense" else sum(vectors.values()),
        }
        return cls(**given)


def reads_columns(features: str, widths: set[int], ordered: bool) -> bool:
    """Whether tokens with these numbers of strings are columns, not bags; ordered : none of them is a
    set."""
    if features == "columns" and (len(widths) > 1 or widths == {0}):
        problem = f"tokens have {', '.join(map(str, sorted(widths)))} strings"
        raise InputError("X", problem, "give every token equally many, or use features='bag'")
    as_columns = features == "columns" or (features == "auto" and len(widths) == 1 and ordered)
    return as_columns and widths != {0}


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


# -- forms -----------------------------------------------------------------------------------------


def length(x: Any, place: str) -> int:
    if not (hasattr(x, "shape") and len(x.shape)) and not hasattr(x, "__len__"):
        raise _not_a_sequence(x, place)
    return int(x.shape[0]) if hasattr(x, "shape") else len(x)


def _not_a_sequence(x: Any, place: str) -> InputError:
    return InputError(
        place,
        f"expected a sequence of tokens, got a {type(x).__name__}",
        "pass a list of feature dicts, a list of lists of strings, or a 2-D array",
    )


def form_of(x: Any, place: str) -> str:
    """'dicts', 'strings', 'dense' or 'sparse': the form of a sequence that is not empty."""
    if scipy.sparse.issparse(x):
        if x.ndim != 2:
            raise InputError(place, f"{x.ndim} dimensions", "pass a 2-D array, one row per token")
        return "sparse"
    if isinstance(x, np.ndarray) and x.dtype.kind in "fiub":
        return "dense"
    if isinstance(x, str) or not isinstance(x, Sequence | np.ndarray):
        raise _not_a_sequence(x, place)
    token = x[0]
    if isinstance(token, Mapping):
        return "dicts"
    if isinstance(token, Sequence | np.ndarray | set | frozenset) and not isinstance(token, str):
        kind = next((type(v) for v in token), str)
        return "strings" if issubclass(kind, str) else "dense"
    problem = f"expected the features of a token, got a {type(token).__name__}"
    raise InputError(
        f"{place}[0]", problem, "make each token a dict, a list of strings, or a row of numbers"
    )


def as_csr(x: Any) -> Any:
    matrix = scipy.sparse.csr_matrix(x)
    if not matrix.has_canonical_format:
        matrix = matrix.copy()  # it may share its arrays with x, which is not ours to change
        matrix.sum_duplicates()
    return matrix


def as_dense(x: Any, place: str) -> np.ndarray:
    try:
        rows = np.asarray(x, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(place, f"not a matrix of numbers ({error})", "pass a 2-D array") from None
    if rows.ndim != 2:
        raise InputError(place, f"{rows.ndim} dimensions", "pass a 2-D array, one row per token")
    return rows


def check_finite(rows: np.ndarray, place: str, name: Callable[[int], str]) -> None:
    """InputError for a value of rows (T, D) that cannot be squared; ``name(d)`` is the name of column d."""
    bad, too_large = ~np.isfinite(rows), np.abs(rows) > LARGEST
    for wrong, addition, remedy in (
        (bad, "", "replace NaN and infinite values"),
        (too_large, ", too large", "rescale the feature"),
    ):
        if wrong.any():
            t, d = map(int, np.argwhere(wrong)[0])
            raise InputError(f"{place}[{t}]", f"{name(d)} is {rows[t, d]}{addition}", remedy)


def vector_length(value: np.ndarray, name: str, place: str) -> int:
    """The length of the array under ``name``, which must be a vector that is not empty."""
    if value.dtype.kind not in "fiub" or value.ndim != 1 or not len(value):
        problem = f"feature {name!r} is an array of {value.dtype} and shape {value.shape}"
        raise InputError(place, problem, "pass a 1-D array of numbers")
    return len(value)


def as_vector(token: Mapping[str, Any], name: str, width: int, place: str) -> np.ndarray:
    """(width,) the vector of a feature dict under ``name``.

    A missing vector is an error and not read as zeros: most often its key is mistyped, and to a kernel
    zeros are a place like any other."""
    value = token.get(name)
    if isinstance(value, np.ndarray) and vector_length(value, name, place) == width:
        return value
    problem = f"feature {name!r} is a {type(value).__name__}, but training had a vector"
    if value is None:
        problem = f"vector {name!r} is missing"
    elif isinstance(value, np.ndarray):
        problem = f"vector {name!r} has {len(value)} numbers, but the first in training had {width}"
    raise InputError(place, problem, f"pass {width} numbers with every token, zeros where nothing is known")


def check_mapping(token: Any, place: str) -> None:
    if not isinstance(token, Mapping):
        problem = f"expected a feature dict, got a {type(token).__name__}"
        raise InputError(place, problem, "use one form throughout")
    stray = next((key for key in token if not isinstance(key, str)), None)
    if stray is not None:
        raise InputError(place, f"feature name {stray!r} is not a string", "convert it with str()")


def check_strings(token: Any, place: str) -> None:
    if isinstance(token, str) or not isinstance(token, Sequence | np.ndarray | set | frozenset):
        raise InputError(place, f"{token!r} is not a list of strings", "use one form throughout")


def flatten(items: Iterable[tuple[str, Any]], place: str, prefix: str = "") -> dict[str, float]:
    """Features -> {name: value}, with strings, flags, lists and dicts read as python-crfsuite does."""
    found: dict[str, float] = {}
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(value, str):
            found[f"{name}:{value}"] = 1.0
        elif isinstance(value, Mapping):
            found.update(flatten(value.items(), place, f"{name}:"))
        elif isinstance(value, bool | np.bool_ | int | float | np.integer | np.floating):
            if not math.isfinite(value):
                raise InputError(place, f"feature {name!r} is {value}", "replace NaN and infinite values")
            if value != 0:
                found[name] = float(value)
        elif isinstance(value, list | tuple | set | frozenset):
            found.update({f"{name}:{v}": 1.0 for v in value})
        elif value is not None:
            problem = f"feature {name!r} is a {type(value).__name__}"
            raise InputError(place, problem, "use strings, numbers, flags, lists of strings or dicts")
    return found
