"""How tokens of each form (dicts, strings, arrays) are read, and the id of every feature value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from itertools import chain, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from structgp.data.arrays import ARRAYS, as_csr, as_dense, as_vector
from structgp.data.flat_features import flatten
from structgp.data.token_forms import check_strings, form_of, not_empty
from structgp.data.word_parts import PARTS, WordParts
from structgp.errors import InputError, warn_caller

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_TEMPLATES = 64
"""Largest number of string-valued keys that features='auto' reads as templates; more are read as a bag."""

MOST_PLACES = 1 << 26
"""Largest number of columns of scipy-sparse matrices for which a table holds the id of each, at 4 bytes per
column: 256 MB at most. In wider matrices, as hashing makes them, a column is searched for among those
seen."""

AT_ONCE = 64
"""Number of sequences whose values are collected together."""

ALIKE = 0.75
"""Similarity, by ``difflib``, from which one key may be a slip for another. Not chosen on data."""

_TEXTS = {str, type(None)}
"""Types that the values of a template have."""


@dataclass(frozen=True)
class Block:
    """Columns ``start`` to ``stop`` of a row (None: to its end), all of one ``kind``."""

    kind: str
    start: int
    stop: int | None
    names: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        """The block's kind, with the values that tokens have there, for messages."""
        values = {"categorical": "strings", "sparse": "numbers and flags", "dense": "arrays"}
        return f"{self.kind} features ({values[self.kind]})"


class RowLayout:
    """What a row consists of: categorical templates, ``dense_width`` columns, and possibly a sparse block.

    blocks : the blocks of a row, in order; pad_row : the row at padded positions, without its sparse
    block."""

    templates: list[str]
    dense_width: int
    has_sparse: bool

    def lay_out(self) -> None:
        """Set ``blocks`` and ``pad_row``."""
        P, dense = len(self.templates), self.dense_width
        self.pad_row = np.repeat([-1.0, 0.0], [P, dense])
        self.blocks = [Block("categorical", 0, P, tuple(self.templates))] if P else []
        if dense:
            self.blocks.append(Block("dense", P, P + dense))
        if self.has_sparse:
            self.blocks.append(Block("sparse", P + dense, None))


@dataclass
class Vocabulary(RowLayout):
    """Learned from training sequences by ``fit``.

    features : how a token that is a list of strings is read: 'columns' (place j is template j, every token
    has equally many), 'bag' (a set of attributes), or 'auto' (columns if every training token has equally
    many strings and none is a set, else bag). With dicts, 'columns' makes every key with string values a
    template, however many there are. After ``fit`` there are also

    form : 'strings', 'dicts', 'sparse' or 'dense'.
    templates : names of the categorical columns: first those that tokens have, then parts of words.
    values : one dict per template, value -> id.
    vectors : dict, key of a vector in feature dicts -> its number of elements.
    attributes : dict, name of a sparse feature -> id.
    has_sparse : whether rows end in a sparse block.
    width : number of columns of dense or scipy-sparse matrices.
    columns : the columns of scipy-sparse matrices that were seen, sorted; the place of one is its id.
    dense_width : number of dense columns of a row.
    parts : the parts of words, if ``add_parts`` has made features of them; None otherwise."""

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
    parts: WordParts | None = None

    @property
    def given(self) -> list[str]:
        """The templates that tokens have themselves, without parts of words."""
        return self.templates[: len(self.templates) - (len(self.parts.kinds) if self.parts else 0)]

    def add_parts(self, word: int, kinds: Sequence[int]) -> None:
        """Makes parts of the values of template ``word`` templates of their own, after the others. A part
        whose name is already that of a template is left out: the user has made it."""
        kinds = [k for k in kinds if f"{PARTS[k]} of {self.templates[word]}" not in self.templates]
        if not kinds:
            return
        self.parts = WordParts(word, tuple(kinds))
        self.parts.learn(self.values[word])
        self.templates = [*self.templates, *(f"{PARTS[k]} of {self.templates[word]}" for k in kinds)]
        self.values = [*self.values, *self.parts.values]
        self.lay_out()

    @property
    def n_sparse(self) -> int:
        """Number of sparse features that are known."""
        return len(self.columns) or len(self.attributes)

    @cached_property
    def column_array(self) -> np.ndarray:
        return np.array(self.columns, dtype=np.int64)

    @cached_property
    def column_places(self) -> np.ndarray:
        """(width,) the id of each column of a scipy-sparse matrix, -1 for those that were not seen."""
        places = np.full(self.width, -1, dtype=np.int32)
        places[self.column_array] = np.arange(len(self.column_array), dtype=np.int32)
        return places

    def fit(self, X: Iterable[Any]) -> Self:
        """Learn form and values from X, which is iterated over more than once. Memory holds at most
        ``AT_ONCE`` sequences at a time, and what is learned."""
        if self.features not in ("auto", "columns", "bag"):
            problem = f"{self.features!r} is not known"
            raise InputError("features", problem, "use 'auto', 'columns' or 'bag'")
        place, first = next(not_empty(X), ("", None))
        if first is None:
            raise InputError("X", "no tokens", "pass at least one sequence with one token")
        self.form = form_of(first, place)
        if self.form == "dense":
            self.width = self.dense_width = as_dense(first, place).shape[1]
        elif self.form == "sparse":
            self.width, self.has_sparse = int(first.shape[1]), True
            self.learn_more(X)
        elif self.form == "strings":
            self._learn_strings(X)
        else:
            self._learn_dicts(X)
        self.lay_out()
        if not self.blocks:
            raise InputError("X", "no token has any feature", "pass at least one feature")
        return self

    def learn_more(self, X: Iterable[Any]) -> None:
        """Add the values of X after the known ones; templates stay."""
        self.__dict__.pop("attribute_keys", None)
        if self.form == "sparse":
            self._learn_columns(X)
        elif self.form != "dense":
            for place, x in not_empty(X, self.form):
                for known, column in zip(self.values, self.template_columns(x, place), strict=False):
                    for value in column:
                        if isinstance(value, str):
                            known.setdefault(value, len(known))
                for found in self.sparse_features(x, place) if self.has_sparse else ():
                    for name in found:
                        self.attributes.setdefault(name, len(self.attributes))
        if self.parts is not None:
            self.parts.learn(self.values[self.parts.word])

    def _learn_columns(self, X: Iterable[Any]) -> None:
        seen = np.zeros(self.width, dtype=bool)
        seen[self.column_array] = True
        for _, x in not_empty(X, "sparse"):
            if x.shape[1] == self.width:  # another width is reported when x is encoded
                rows = as_csr(x)
                seen[rows.indices[: rows.indptr[-1]]] = True
        self.column_array = np.flatnonzero(seen)
        self.columns = self.column_array.tolist()
        self.__dict__.pop("column_places", None)

    def _learn_strings(self, X: Iterable[Any]) -> None:
        """Decide between columns and bags; the values of columns are collected on the way."""
        widths: set[int] = set()
        values: list[dict[str, int]] = []
        ordered, regular = True, self.features != "bag"
        for place, x in not_empty(X, "strings"):
            columns = columns_of(x)
            if columns is None:
                check_strings(x, place)
                widths.update(map(len, x))
                ordered = ordered and not any(isinstance(token, set | frozenset) for token in x)
            else:
                widths.add(len(columns))
            regular = regular and columns is not None and len(widths) == 1
            if regular and columns is not None:
                values = values or [{} for _ in columns]
                for known, column in zip(values, columns, strict=True):
                    known.update(dict.fromkeys(column, 0))
        self.has_sparse = not reads_columns(self.features, widths, ordered)
        if not self.has_sparse:
            self.templates = [str(p) for p in range(widths.pop())]
            # Ids in the order in which values were seen.
            self.values = [{v: i for i, v in enumerate(known)} for known in values]
        if self.has_sparse or not regular:
            self.values = [{} for _ in self.templates]
            self.learn_more(X)
            self.has_sparse = bool(self.attributes)

    def _learn_dicts(self, X: Iterable[Any]) -> None:
        strings: dict[str, dict[str, int]] = {}
        places = not_empty(X, "dicts")
        while some := list(islice(places, AT_ONCE)):
            if not _learn_plain([x for _, x in some], strings):
                self._learn_tokens(some, strings)
        for known in strings.values():
            for i, value in enumerate(known):  # ids in the order in which values were seen
                known[value] = i
        self.dense_width = sum(self.vectors.values())
        # A key with both strings and vectors is a mistake, which is reported when it is encoded.
        self.templates = [key for key in strings if key not in self.vectors]
        if len(self.templates) > MAX_TEMPLATES and self.features != "columns":
            # Too many: they are all read as sparse features.
            self.templates, self.attributes, self.has_sparse = [], {}, True
            self.learn_more(X)
        self.values = [strings[key] for key in self.templates]
        self.has_sparse = bool(self.attributes)

    def _learn_tokens(self, given: Sequence[tuple[str, Any]], strings: dict[str, dict[str, int]]) -> None:
        """Learn from sequences of dicts, each given with its place: the values of string features, by key,
        in the order in which they are seen; attributes; and vectors."""
        for place, x in given:
            for t, token in enumerate(x):
                for key, value in token.items():
                    if isinstance(value, str):
                        strings.setdefault(key, {}).setdefault(value, 0)
                    elif not isinstance(value, ARRAYS):
                        for name in flatten(((key, value),), f"{place}[{t}]"):
                            self.attributes.setdefault(name, len(self.attributes))
                    elif key not in self.vectors:
                        self.vectors[key] = len(as_vector(value, key, f"{place}[{t}]"))

    def template_columns(self, x: Any, place: str) -> Sequence[Sequence[Any]]:
        """The values of all tokens under each template; InputError for a token with other columns."""
        given = self.given
        if self.form == "dicts":
            return _by_key(x, given)
        columns = columns_of(x) if given else []
        if columns is not None and len(columns) == len(given):
            return columns
        check_strings(x, place)
        for t, token in enumerate(x):
            if isinstance(token, set | frozenset):
                remedy = "pass a list, or use features='bag'"
                raise InputError(f"{place}[{t}]", "a set has no columns", remedy)
            if len(token) != len(given):
                problem = f"{len(token)} strings, but training had {len(given)}"
                remedy = "give every token equally many, or use features='bag'"
                raise InputError(f"{place}[{t}]", problem, remedy)
        return list(zip(*x, strict=True))

    def sparse_features(self, x: Any, place: str) -> list[dict[str, float]]:
        """The sparse features of each token: the strings of a bag, or all items of a dict but vectors and
        the strings of templates."""
        if self.form == "dicts":
            found, vectors, templates = [], self.vectors, set(self.given)
            for t, token in enumerate(x):
                loose = [
                    (key, value)
                    for key, value in token.items()
                    if not (key in templates and isinstance(value, str)) and key not in vectors
                ]
                found.append(flatten(loose, f"{place}[{t}]") if loose else {})
            return found
        check_strings(x, place)
        return [dict.fromkeys(token, 1.0) for token in x]

    @cached_property
    def attribute_keys(self) -> set[str]:
        """Keys that had values other than strings in training."""
        return {name for attribute in self.attributes for name in (attribute, *_starts(attribute))}

    def check_values(self, columns: Sequence[Sequence[Sequence[Any]]], places: Sequence[str]) -> None:
        """InputError for a value that is not text, None or a flag, under a key that had only text in
        training: the value would be ignored. columns : for each sequence, the values under each
        template."""
        for own, place in zip(columns, places, strict=True):
            for name, values in zip(self.given, own, strict=True):
                if set(map(type, values)) <= _TEXTS or name in self.attribute_keys:
                    continue
                odd = [not isinstance(v, str | bool | np.bool_ | None) for v in values]
                if any(odd):
                    kind = type(values[odd.index(True)]).__name__
                    problem = f"feature {name!r} is a {kind}, but training had text"
                    raise InputError(f"{place}[{odd.index(True)}]", problem, "pass a string or None")

    def check_keys(self, tokens: Sequence[Mapping[str, Any]]) -> None:
        """Warns of a new feature of all tokens that is almost named like one of training that none has."""
        there = set(chain.from_iterable(tokens))
        absent = [key for key in self.given if key not in there]
        strange = set(tokens[0]).intersection(*tokens) - {*self.given, *self.vectors} if absent else set()
        alike = {key.lower(): key for key in strange - self.attribute_keys}
        for key in absent if alike else ():
            for near in get_close_matches(key.lower(), alike, 1, ALIKE):
                message = f"no token has the feature {key!r}, but all have {alike[near]!r}, which is new"
                warn_caller(f"X: {message}; check its name")

    def to_json(self) -> dict[str, Any]:
        """All that ``from_json`` needs; ids are not written, since they are positions in the lists."""
        plain = ("features", "form", "has_sparse", "width", "columns")
        given = self.given
        return {name: getattr(self, name) for name in plain} | {
            "templates": given,
            "values": [list(known) for known in self.values[: len(given)]],
            "parts": None if self.parts is None else [self.parts.word, *self.parts.kinds],
            "vectors": [[name, width] for name, width in self.vectors.items()],
            "attributes": list(self.attributes),
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        vectors = dict(state["vectors"])
        parts = state.get("parts")
        given = dict(state) | {
            "parts": None,
            "values": [{v: i for i, v in enumerate(known)} for known in state["values"]],
            "attributes": {v: i for i, v in enumerate(state["attributes"])},
            "vectors": vectors,
            "dense_width": state["width"] if state["form"] == "dense" else sum(vectors.values()),
        }
        vocabulary = cls(**given)
        vocabulary.lay_out()
        if parts:
            vocabulary.add_parts(parts[0], parts[1:])
        return vocabulary


def _starts(attribute: str) -> list[str]:
    """Everything in an attribute's name that may be its key: each part that ends before a colon."""
    return [attribute[:i] for i, character in enumerate(attribute) if character == ":"]


def reads_columns(features: str, widths: set[int], ordered: bool) -> bool:
    """True if tokens with these numbers of strings are read as columns, not as bags; ordered : whether no
    token is a set."""
    if features == "columns" and (len(widths) > 1 or widths == {0}):
        problem = f"tokens have {', '.join(map(str, sorted(widths)))} strings"
        raise InputError("X", problem, "give every token equally many, or use features='bag'")
    as_columns = features == "columns" or (features == "auto" and len(widths) == 1 and ordered)
    return as_columns and widths != {0}


def column_places(old: Vocabulary, new: Vocabulary) -> np.ndarray | None:
    """The new ids of the known columns of a scipy-sparse matrix; None if ids have not changed."""
    if old.form != "sparse" or not old.columns:
        return None
    return np.searchsorted(new.columns, old.columns)


def columns_of(x: Any) -> list[tuple[str, ...]] | None:
    """The columns of a sequence of tuples or lists of equally many strings; None for anything else."""
    if not set(map(type, x)) <= {tuple, list} or len(set(map(len, x))) != 1:
        return None
    columns = list(zip(*x, strict=True))
    return columns if all(set(map(type, c)) == {str} for c in columns) else None


def _learn_plain(X: Sequence[Any], strings: dict[str, dict[str, int]]) -> bool:
    """Does the work of ``_learn_tokens``, several times as fast, for lists of dicts that all have strings
    under the same keys and nothing else. For anything else it learns nothing and returns False."""
    tokens = list(chain(*X)) if set(map(type, X)) == {list} else []
    if set(map(type, tokens)) != {dict} or set(map(len, tokens)) != {len(tokens[0])} or not tokens[0]:
        return False
    try:
        columns = [list(map(itemgetter(key), tokens)) for key in tokens[0]]
    except KeyError:
        return False
    if any(set(map(type, column)) != {str} for column in columns):
        return False
    for key, column in zip(tokens[0], columns, strict=True):
        strings.setdefault(key, {}).update(dict.fromkeys(column, 0))
    return True


def _by_key(x: Iterable[Any], keys: Sequence[str]) -> Sequence[Sequence[Any]]:
    """The values of all tokens under each key, None where a token has none."""
    if len(keys) < 2:
        return [[token.get(key) for token in x] for key in keys]
    every = itemgetter(*keys)

    def values(token: Any) -> tuple[Any, ...]:
        try:
            if type(token) is dict:  # other mappings may add an entry for a missing key
                return every(token)
        except KeyError:
            pass
        return tuple(map(token.get, keys))

    return list(zip(*map(values, x), strict=True))
