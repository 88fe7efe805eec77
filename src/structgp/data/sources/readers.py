"""Readers of files in any of the formats, which give X and y to fit a classifier with.

A reader knows all that has to be remembered about the training file: the template, the scale of numbers,
where the word vectors are, what stands for a missing label. A model keeps what ``to_json`` returns."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

from structgp.data.sources.attributes import format_attributes, iter_attributes, named, unnamed
from structgp.data.sources.columns import ColumnFile, format_sequence, iter_columns
from structgp.data.sources.json_lines import format_json, iter_json
from structgp.data.sources.lines import FileSequence, Labelled, Source, digest_of_file, name_of, read_all
from structgp.data.sources.reader_arguments import DOCUMENTS, check_arguments
from structgp.data.sources.reader_state import check_state
from structgp.data.sources.templates import Template, columns_that_exist
from structgp.data.sources.vectors import ColumnVectors, Coverage, NumericColumns, WordVectors
from structgp.errors import InputError

Path = str | os.PathLike[str]
Input = Source | ColumnFile
Labels = list[str | None]


class Reader(ABC):
    """Reads files of one format.

    missing : the text that stands for a missing label, None if there is none. transition_columns : names of
    the features on which transitions depend and nodes do not. has_transitions : whether the training file
    asks for scores of transitions. has_dense : whether tokens hold dense vectors. vectors : the word
    vectors among them, or None; ``vectors.coverage`` is that of the training file. template_lines : dict,
    name of a feature -> the template's line that makes it. has_token_lines : whether every token has a line
    of its own."""

    format: ClassVar[str]
    has_token_lines: ClassVar[bool] = True
    missing: str | None
    transition_columns: tuple[str, ...] = ()
    has_transitions: bool = True
    has_dense: bool = False
    vectors: ColumnVectors | None = None
    template_lines: dict[str, str] = {}  # noqa: RUF012

    @abstractmethod
    def sequences(
        self, source: Input, *, encoding: str = "utf-8", name: str | None = None
    ) -> Iterator[FileSequence]:
        """The sequences of a file, one by one, with or without labels. Arguments are those of
        :func:`structgp.data.sources.iter_columns`."""

    @abstractmethod
    def with_labels(self, sequence: FileSequence, labels: Sequence[str]) -> str:
        """The lines of a sequence with these labels instead of its own."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """All that :func:`from_json` needs."""

    def coverage(self, sequence: FileSequence) -> Coverage | None:
        """How many tokens of a sequence have a word vector; None if the reader has no word vectors."""
        return None if self.vectors is None else self.vectors.coverage_of(sequence.cells)

    def labels_of(self, found: FileSequence) -> Any:
        """The labels of a sequence, None where one is missing; InputError if it has none."""
        if found.labels is None:
            raise InputError(
                f"{found.name}:{found.line}", "no label column", "add the label as last column"
            )
        return [None if y == self.missing else y for y in found.labels]

    def labelled(self, source: Input, encoding: str, name: str) -> Iterator[tuple[list[Any], Labels]]:
        """Tokens and labels (None if missing) of each sequence; InputError for a file without labels."""
        for found in self.sequences(source, encoding=encoding, name=name):
            yield found.tokens, self.labels_of(found)

    def read(self, source: Input, *, encoding: str = "utf-8", name: str | None = None) -> Labelled:
        """Read a whole labelled file."""
        name = name_of(source) if name is None else name
        found = self.sequences(source, encoding=encoding, name=name)
        parts = read_all(((s.tokens, self.labels_of(s), s.line) for s in found), name)
        X, y, lines = zip(*parts, strict=True)
        return Labelled(name, list(X), list(y), list(lines))

    def stream(self, path: str | os.PathLike[str], encoding: str = "utf-8") -> Stream:
        """A labelled file in the form that :func:`structgp.data.shards.write` takes; it is never held
        whole."""
        return Stream(self, os.fspath(path), encoding)


@dataclass(frozen=True)
class Stream:
    """Tokens and labels of a labelled file, sequence by sequence; it is opened anew for each pass."""

    reader: Reader
    path: str
    encoding: str

    def __iter__(self) -> Iterator[tuple[list[Any], Labels]]:
        return self.reader.labelled(self.path, self.encoding, self.path)

    @property
    def digest(self) -> str:
        """SHA-256 of the file and of what its reader knows."""
        return digest_of_file(self.path, repr((self.reader.to_json(), self.encoding)))


@dataclass(frozen=True)
class ColumnReader(Reader):
    """Reads column files: a template's features, with numeric columns and word vectors beside them.

    Tokens are tuples of strings, one per line of the template; with numbers or vectors they are dicts
    with the same strings under the keys '0', '1', ... and arrays under 'numeric' and 'vector'.

    n_columns : number of columns in training, without the label; transitions : whether tokens also hold
    the features of the template's bigrams, as last columns."""

    template: Template
    n_columns: int
    numeric: NumericColumns | None = None
    vectors: ColumnVectors | None = None
    missing: str | None = None
    transitions: bool = True

    format: ClassVar[str] = "columns"

    def __post_init__(self) -> None:
        template, bigrams = self.template, self.template.bigrams if self.transitions else ()
        vars(self).update(
            transition_columns=template.transition_columns if self.transitions else (),
            has_transitions=template.has_bigram or bool(template.bigrams),
            has_dense=self.numeric is not None or self.vectors is not None,
            template_lines={str(p): line.source for p, line in enumerate((*template.unigrams, *bigrams))},
        )

    def sequences(
        self, source: Input, *, encoding: str = "utf-8", name: str | None = None
    ) -> Iterator[FileSequence]:
        name = name_of(source) if name is None else name
        for found in iter_columns(source, encoding=encoding, name=name):
            rows, line, width = found.rows, found.line, len(found.rows[0])
            if width < self.n_columns:
                columns = f"{width} column{'s' if width > 1 else ''}"
                problem = f"{columns}, but the model was trained on {self.n_columns} and a label"
                remedy = "give the same columns as in training; the label may be left out"
                raise InputError(f"{name}:{line}", problem, remedy)
            labels = [row[-1] for row in rows] if width > self.n_columns else None
            words = [row[0] for row in rows]
            yield FileSequence(rows, self.tokens(rows, name, line), words, labels, name, line)

    def tokens(self, rows: Sequence[Sequence[str]], name: str = "rows", line: int = 1) -> list[Any]:
        """The features of the rows of one sequence, which starts at ``name:line``."""
        strings = self.template.expand(rows, self.transitions)
        if not self.has_dense:
            return strings
        tokens: list[dict[str, Any]] = [{str(p): v for p, v in enumerate(values)} for values in strings]
        for key, part in (("numeric", self.numeric), ("vector", self.vectors)):
            if part is not None:
                for token, values in zip(tokens, part.features(rows, name, line), strict=True):
                    token[key] = values
        return tokens

    def with_labels(self, sequence: FileSequence, labels: Sequence[str]) -> str:
        both = zip(sequence.cells, labels, strict=True)
        return format_sequence([(*row[: self.n_columns], y) for row, y in both])

    def to_json(self) -> dict[str, Any]:
        state = {
            "format": self.format,
            "template": self.template.text,
            "dialect": self.template.dialect,
            "n_columns": self.n_columns,
            "missing": self.missing,
            "transitions": self.transitions,
        }
        for key, part in (("numeric", self.numeric), ("vectors", self.vectors)):
            if part is not None:
                state[key] = part.to_json()
        return state


@dataclass(frozen=True)
class AttributeReader(Reader):
    """Reads CRFsuite's files: a label and attributes on each line. Tokens are dicts from name to value.

    keys : features that a structure names; attributes ``key=value`` of these become strings, ``{key:
    value}``."""

    missing: str | None = None
    keys: tuple[str, ...] = ()

    format: ClassVar[str] = "crfsuite"

    def sequences(
        self, source: Any, *, encoding: str = "utf-8", name: str | None = None
    ) -> Iterator[FileSequence]:
        for found in iter_attributes(source, encoding=encoding, name=name):
            yield replace(found, tokens=[named(t, self.keys) for t in found.tokens]) if self.keys else found

    def with_labels(self, sequence: FileSequence, labels: Sequence[str]) -> str:
        return format_attributes(labels, [unnamed(token) for token in sequence.tokens])

    def to_json(self) -> dict[str, Any]:
        return {"format": self.format, "missing": self.missing, "keys": list(self.keys)}


@dataclass(frozen=True)
class JsonReader(Reader):
    """Reads JSON lines (``json_lines``): sequences, trees, graphs and grids. form : which of these, None to
    tell from the keys of each line."""

    form: str | None = None

    format: ClassVar[str] = "jsonl"
    has_token_lines: ClassVar[bool] = False
    missing: ClassVar[str | None] = None  # type: ignore[misc]

    def sequences(
        self, source: Any, *, encoding: str = "utf-8", name: str | None = None
    ) -> Iterator[FileSequence]:
        return iter_json(source, self.form, encoding=encoding, name=name)

    def labels_of(self, found: FileSequence) -> Any:
        if found.labels is None:
            problem, remedy = "no 'labels'", 'add "labels": [...], null for those that are missing'
            raise InputError(f"{found.name}:{found.line}", problem, remedy)
        return found.labels

    def with_labels(self, sequence: Any, labels: Any) -> str:
        return format_json(sequence.given, labels=labels)

    def to_json(self) -> dict[str, Any]:
        return {"format": self.format, "form": self.form}


def learn(
    train: Input,
    *,
    template: Path | Template | None = None,
    format: str = "columns",
    dialect: str | None = None,
    numeric: Sequence[int] = (),
    vectors: Path | None = None,
    vector_column: int | None = None,
    missing: str | None = None,
    transitions: bool = True,
    keys: Sequence[str] = (),
    form: str | None = None,
    scheme: str | None = None,
    snap: bool = False,
    field: str | None = None,
    encoding: str = "utf-8",
) -> Reader:
    """The reader for a training file, and for all files like it. Only the first sequence of ``train`` is
    read; with ``numeric`` or ``vectors`` all of them are, one by one.

    Parameters
    ----------
    train : the labelled file, as :func:`iter_columns` takes it, or what :func:`read_columns` has read.
    template : for column files, a template or the path of one. Documents may have one too, over the columns
        :data:`structgp.data.formats.document_reader.ROW`; without it, they have default features.
    format : 'columns'; 'crfsuite' for labels and attributes, or 'jsonl' for JSON lines, which need no
        template; a format of documents (:mod:`structgp.data.formats`).
    dialect : the dialect of the template file, 'crf++' (default) or 'wapiti'.
    numeric : columns of numbers, counted from 0; they are standardised.
    vectors, vector_column : path of word vectors (:class:`WordVectors`), and the column of the words (0).
    missing : the text in the label column of a token without a label.
    transitions : whether the last columns of tokens are the features of the template's bigrams.
    keys : for CRFsuite's files, names before '=' in attributes that a structure refers to.
    form : for JSON lines, 'sequence', 'tree', 'graph' or 'grid' (``spec.form``); None to tell by each line.
    scheme, snap, field : for documents, as in :func:`structgp.data.formats.read`.

    Example
    -------
    >>> from structgp.data import sources
    >>> train = sources.read_columns(["two CD QTY", "eggs NNS NAME"])
    >>> template = sources.Template.parse("U:%x[0,0]\\nU:%x[-1,0]\\nB\\n")
    >>> reader = sources.learn(train, template=template)
    >>> data = reader.read(train)
    >>> data.X, data.y
    ([[('two', '_B-1'), ('eggs', 'two')]], [['QTY', 'NAME']])

    ``StructuredGPClassifier(features="columns").fit(data.X, data.y)`` is a model of them, and
    ``model.save(path, reader.to_json())`` keeps the reader, which :func:`from_json` gives back."""
    given = {"template": template, "dialect": dialect, "numeric": numeric, "vectors": vectors, "form": form}
    how = {"scheme": scheme, "snap": snap, "field": field, "missing": missing}
    check_arguments(format, **given, **how, vector_column=vector_column, keys=keys)
    if format in ("crfsuite", "jsonl"):
        return AttributeReader(missing, tuple(keys)) if format == "crfsuite" else JsonReader(form)
    if template is not None and not isinstance(template, Template):
        template = Template.read(template, encoding=encoding, dialect=dialect or "crf++")
    if template is None or format in DOCUMENTS:
        return _of_documents(train, format, template, vectors, how, encoding)
    numbers, words, n_columns = _beside(train, template, numeric, vectors, vector_column or 0, encoding)
    return ColumnReader(template, n_columns, numbers, words, missing, transitions)


def _of_documents(
    train: Any,
    format: str,
    template: Template | None,
    vectors: Path | None,
    how: dict[str, Any],
    encoding: str,
) -> Reader:
    """The reader of documents. The modules of their formats import this one, so they are imported here."""
    from structgp.data.formats.document_reader import DocumentReader
    from structgp.data.formats.format_parts import Reading

    reading = Reading(**{name: value for name, value in how.items() if value is not None})
    words = None
    if vectors is not None:
        plain = DocumentReader(format, reading).sequences(train, encoding=encoding)
        seen = [word for found in plain for word in found.words]
        words = ColumnVectors.learn(WordVectors(vectors, encoding=encoding), 0, seen)
    return DocumentReader(format, reading, template, words)


def _beside(
    train: Input,
    template: Template,
    numeric: Sequence[int],
    vectors: Path | None,
    column: int,
    encoding: str,
) -> tuple[NumericColumns | None, ColumnVectors | None, int]:
    """Numbers and word vectors beside the template's features, and the number of columns."""
    name = name_of(train)
    n_columns = _feature_columns(train, template, encoding, name)
    numbers, words = None, None
    if numeric:
        for number in numeric:
            _check_column(number, "numeric", n_columns, name)
        numbers = NumericColumns.learn(numeric, iter_columns(train, encoding=encoding), name)
    if vectors is not None:
        _check_column(column, "vector_column", n_columns, name)
        in_column = [row[column] for s in iter_columns(train, encoding=encoding) for row in s.rows]
        words = ColumnVectors.learn(WordVectors(vectors, encoding=encoding), column, in_column)
    return numbers, words, n_columns


def _feature_columns(train: Input, template: Template, encoding: str, name: str) -> int:
    """The number of columns without the label, after checking that the columns of the template exist."""
    (first,) = read_all(islice(iter_columns(train, encoding=encoding), 1), name)
    n_columns = len(first.rows[0]) - 1
    if n_columns < 1:
        problem = "only one column, where tokens and labels are needed"
        raise InputError(f"{name}:{first.line}", problem, "add the label as last column")
    template.check_columns(n_columns, name)
    return n_columns


def _check_column(column: int, argument: str, n_columns: int, name: str) -> None:
    if not 0 <= column < n_columns:
        problem = f"no column {column}: {columns_that_exist(n_columns, name)}"
        raise InputError(argument, problem, "count columns from 0")


def from_json(state: Mapping[str, Any], model: str = "model", vectors: Path | None = None) -> Reader:
    """The reader whose ``to_json`` is among the entries of ``state``, such as a model's ``extra``.

    model : its path, or what errors call it; vectors : where its word vectors are now, by default in the
    model's folder or below.

    Example
    -------
    >>> from structgp.data import sources
    >>> template = sources.Template.parse("U:%x[0,0]")
    >>> reader = sources.learn(["two QTY", "eggs NAME"], template=template)
    >>> sources.from_json(reader.to_json()).read(["figs NAME"]).X
    [[('figs',)]]
    """
    check_state(state, model)
    if vectors is not None and "vectors" not in state:
        raise InputError("vectors", f"{model} was trained without word vectors", "leave it out")
    if state.get("format") == "crfsuite":
        return AttributeReader(state.get("missing"), tuple(state.get("keys", ())))
    if state.get("format") == "jsonl":
        return JsonReader(state.get("form"))
    if state.get("format") == "documents":
        from structgp.data.formats.document_reader import DocumentReader

        return DocumentReader.from_json(state, model, None if vectors is None else os.fspath(vectors))
    if "template" not in state:
        problem = "a model without a feature template, saved from Python"
        remedy = "save it with extra=reader.to_json() (docs/features.md#files), or use 'structgp train'"
        raise InputError(model, problem, remedy)
    numbers = NumericColumns.from_json(state["numeric"]) if "numeric" in state else None
    words = None
    if "vectors" in state:
        path = None if vectors is None else os.fspath(vectors)
        words = ColumnVectors.from_json(state["vectors"], model, path)
    # Models saved before there were dialects use CRF++'s; before transitions had features, they have none.
    dialect, transitions = state.get("dialect", "crf++"), state.get("transitions", False)
    template = Template.parse(state["template"], f"{model} (template)", dialect)
    return ColumnReader(template, state["n_columns"], numbers, words, state.get("missing"), transitions)
