"""Readers: files in, tokens and labels out, in the form that a classifier is fitted with.

A reader knows all that has to be remembered about the training file: the template, the scale of numbers,
where the word vectors are, what stands for a missing label. A model keeps what ``to_json`` returns."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from structgp.data.sources.attributes import format_attributes, iter_attributes
from structgp.data.sources.columns import ColumnFile, format_sequence, iter_columns
from structgp.data.sources.lines import Source, digest_of_file, name_of, read_all
from structgp.data.sources.numeric import NumericColumns
from structgp.data.sources.templates import Template
from structgp.data.sources.vectors import ColumnVectors
from structgp.errors import InputError


@dataclass(frozen=True)
class Labelled:
    """A labelled file, ready to fit or score. X : the tokens of each sequence; y : their labels, None
    where a label is missing."""

    name: str
    X: list[Any]
    y: list[list[str | None]]


@dataclass(frozen=True)
class FileSequence:
    """One sequence of a file.

    cells : its columns as written, the label included (CRFsuite's files: no cells); tokens : its features;
    words : the text to show for each token; labels : as written, None if the file has no labels;
    name, line : where it starts."""

    cells: Sequence[Sequence[str]]
    tokens: list[Any]
    words: list[str]
    labels: list[str] | None
    name: str
    line: int


class Reader(ABC):
    """Reads files of one format.

    missing : the text in the place of a missing label, None if there is none. transition_columns : names of
    the features that transitions depend on and nodes do not. has_transitions : whether the training file
    asks for scores of transitions. has_dense : whether tokens hold dense vectors. template_lines : dict,
    name of a feature -> the template's line that makes it."""

    format: ClassVar[str]
    missing: str | None
    transition_columns: tuple[str, ...] = ()
    has_transitions: bool = True
    has_dense: bool = False
    template_lines: dict[str, str] = {}  # noqa: RUF012

    @abstractmethod
    def sequences(
        self, source: Source | ColumnFile, *, encoding: str = "utf-8", name: str | None = None
    ) -> Iterator[FileSequence]:
        """The sequences of a file, one by one, with or without labels. Arguments are those of
        :func:`structgp.data.sources.iter_columns`."""

    @abstractmethod
    def with_labels(self, sequence: FileSequence, labels: Sequence[str]) -> str:
        """The lines of a sequence with these labels instead of its own."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """All that :func:`from_json` needs."""

    def labelled(
        self, source: Source | ColumnFile, encoding: str, name: str
    ) -> Iterator[tuple[list[Any], list[str | None]]]:
        """Tokens and labels (None if missing) of each sequence; InputError for a file without labels."""
        for found in self.sequences(source, encoding=encoding, name=name):
            if found.labels is None:
                raise InputError(f"{name}:{found.line}", "no label column", "add the label as last column")
            yield found.tokens, [None if y == self.missing else y for y in found.labels]

    def read(
        self, source: Source | ColumnFile, *, encoding: str = "utf-8", name: str | None = None
    ) -> Labelled:
        """Read a whole labelled file."""
        name = name_of(source) if name is None else name
        X, y = zip(*read_all(self.labelled(source, encoding, name), name), strict=True)
        return Labelled(name, list(X), list(y))

    def stream(self, path: str | os.PathLike[str], encoding: str = "utf-8") -> Stream:
        """A labelled file as :func:`structgp.data.shards.write` takes it, never held whole."""
        return Stream(self, os.fspath(path), encoding)


@dataclass(frozen=True)
class Stream:
    """Tokens and labels of a labelled file, sequence by sequence; it is opened anew for each pass."""

    reader: Reader
    path: str
    encoding: str

    def __iter__(self) -> Iterator[tuple[list[Any], list[str | None]]]:
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
        self, source: Source | ColumnFile, *, encoding: str = "utf-8", name: str | None = None
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
    """Reads CRFsuite's files: a label and attributes on each line. Tokens are dicts from name to value."""

    missing: str | None = None

    format: ClassVar[str] = "crfsuite"

    def sequences(
        self, source: Any, *, encoding: str = "utf-8", name: str | None = None
    ) -> Iterator[FileSequence]:
        name = name_of(source) if name is None else name
        for found in iter_attributes(source, encoding=encoding, name=name):
            cells: list[tuple[str, ...]] = [()] * len(found.tokens)
            words = [next(iter(token), "") for token in found.tokens]
            yield FileSequence(cells, found.tokens, words, found.labels, name, found.line)

    def with_labels(self, sequence: FileSequence, labels: Sequence[str]) -> str:
        return format_attributes(labels, sequence.tokens)

    def to_json(self) -> dict[str, Any]:
        return {"format": self.format, "missing": self.missing}
