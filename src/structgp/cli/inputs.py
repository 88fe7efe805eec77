"""What a model reads: column files through a template, or CRFsuite's attributes.

``learn`` makes one of the two from a training file, ``load_with_input`` from what a model holds; both read
labelled files and files to be labelled.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from structgp.api.estimator import StructuredGPClassifier, load
from structgp.data.attributes import format_attributes, iter_attributes, read_attributes
from structgp.data.columns import (
    ColumnFile,
    Source,
    format_sequence,
    iter_columns,
    read_columns,
)
from structgp.data.numbers import NumericColumns, read_numbers
from structgp.data.templates import Template, columns_that_exist
from structgp.data.vectors import WordVectors
from structgp.errors import InputError, StructgpWarning


@dataclass(frozen=True)
class Labelled:
    """A file with labels, ready to fit or score."""

    name: str
    X: list[Any]
    y: list[list[str]]


@dataclass(frozen=True)
class Unlabelled:
    """One sequence to be labelled. cells : what its lines say, with a label if there is one; tokens : its
    features; words : what to show of each; labels : those that the file has, None if it has none; name,
    line : where it begins."""

    cells: Sequence[Sequence[str]]
    tokens: list[Any]
    words: list[str]
    labels: list[str] | None
    name: str
    line: int


class Layout(NamedTuple):
    """How probabilities are written: ``head`` the line of the labelling's, ``mark`` before a label's."""

    head: str
    mark: str


# -- columns ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnVectors:
    """Vectors of the words in one column. scale : a factor that makes known words' vectors of length 1 on
    average over training, so that a vector weighs as much as one number."""

    vectors: WordVectors
    column: int
    scale: float

    @classmethod
    def learn(cls, vectors: WordVectors, column: int, words: Sequence[str]) -> ColumnVectors:
        """From the words of the training tokens."""
        known = [word for word in words if word in vectors]
        if not known:
            raise InputError(
                vectors.name,
                f"none of the words in column {column} of the training file has a vector",
                "name the column of the words with --vector-column, or give other vectors",
            )
        square = float(np.mean([vectors[word] @ vectors[word] for word in known]))
        if len(known) < len(words):
            warnings.warn(
                f"{vectors.name}: {len(known) / len(words):.1%} of the training tokens have a vector, "
                "the others zeros",
                StructgpWarning,
                stacklevel=2,
            )
        return cls(vectors, column, square**-0.5 if square > 0 else 1.0)

    def to_json(self) -> dict[str, Any]:
        return {
            "path": os.path.abspath(self.vectors.name),
            "sha256": self.vectors.digest,
            "encoding": self.vectors.encoding,
            "column": self.column,
            "scale": self.scale,
        }


@dataclass(frozen=True)
class ColumnInput:
    """Column files: a template's features, with numeric columns and word vectors beside them.

    ``n_columns`` counts those of the training file, without the label.
    """

    template: Template
    n_columns: int
    numeric: NumericColumns | None = None
    vectors: ColumnVectors | None = None

    layout = Layout("# {:.6f}", "/")

    @property
    def has_pairs(self) -> bool:
        return self.template.has_bigram

    @property
    def template_sources(self) -> dict[str, str]:
        """The line of each template, by its name in the model."""
        return {str(i): line.source for i, line in enumerate(self.template.unigrams)}

    def to_correct(self, sequence: Unlabelled, labels: Sequence[str]) -> str:
        """The lines of a sequence with these labels in the place of those it has."""
        rows = [row[: self.n_columns] for row in sequence.cells]
        return format_sequence([(*row, y) for row, y in zip(rows, labels, strict=True)])

    def kernel(self, name: str) -> str | dict[str, str]:
        """The kernel called ``name``, which is for the templates alone where there is more."""
        return name if name == "auto" or not self._has_dense else {"categorical": name}

    @property
    def _has_dense(self) -> bool:
        return self.numeric is not None or self.vectors is not None

    def read(self, path: str, encoding: str) -> Labelled:
        data = _read_labelled(path, encoding)
        if data.n_columns <= self.n_columns:
            raise InputError(
                f"{data.name}:{data.sequences[0].line}",
                f"{data.n_columns} columns where the model was trained on {self.n_columns} and a label",
                "give it the same columns as the training file, the label last",
            )
        return self.labelled(data)

    def labelled(self, data: ColumnFile) -> Labelled:
        rows, y = data.split_labels()
        lines = [sequence.line for sequence in data.sequences]
        X = [self.tokens(r, data.name, line) for r, line in zip(rows, lines, strict=True)]
        return Labelled(data.name, X, y)

    def sequences(self, source: Source, encoding: str, name: str) -> Iterator[Unlabelled]:
        """Sequences with or without labels, as they come."""
        for sequence in iter_columns(source, encoding=encoding, name=name):
            width = len(sequence.rows[0])
            if width < self.n_columns:
                raise InputError(
                    f"{name}:{sequence.line}",
                    f"{width} columns where the model was trained on {self.n_columns} and a label",
                    "give it the same columns as the training file; the label may be left out",
                )
            rows, line = sequence.rows, sequence.line
            labels = [row[-1] for row in rows] if width > self.n_columns else None
            words = [row[0] for row in rows]
            yield Unlabelled(rows, self.tokens(rows, name, line), words, labels, name, line)

    def tokens(self, rows: Sequence[Sequence[str]], name: str, line: int) -> list[Any]:
        """Features of the rows of one sequence, which begins at ``name:line``."""
        strings = self.template.expand(rows)
        if not self._has_dense:
            return strings
        tokens: list[dict[str, Any]] = [
            {str(p): value for p, value in enumerate(values)} for values in strings
        ]
        if self.numeric is not None:
            values = self.numeric.scaled(read_numbers(rows, self.numeric.columns, name, line))
            for token, numbers in zip(tokens, values, strict=True):
                token["numeric"] = numbers
        if self.vectors is not None:
            for token, row in zip(tokens, rows, strict=True):
                vector = self.vectors.vectors[row[self.vectors.column]]
                token["vector"] = vector * self.vectors.scale
        return tokens

    def to_extra(self) -> dict[str, Any]:
        """What a model has to hold."""
        extra = {
            "format": "columns",
            "template": self.template.text,
            "dialect": self.template.dialect,
            "n_columns": self.n_columns,
        }
        if self.numeric is not None:
            extra["numeric"] = self.numeric.to_json()
        if self.vectors is not None:
            extra["vectors"] = self.vectors.to_json()
        return extra


def _read_labelled(path: str, encoding: str) -> ColumnFile:
    data = read_columns(path, encoding=encoding)
    if data.n_columns < 2:
        raise InputError(
            f"{data.name}:{data.sequences[0].line}",
            "one column where tokens and labels are needed",
            "add the label as last column",
        )
    return data


# -- CRFsuite's attributes -------------------------------------------------------------------------


class AttributeInput:
    """CRFsuite's files: a label and attributes a line."""

    layout = Layout("@probability\t{:.6f}", ":")
    has_pairs = True

    def to_correct(self, sequence: Unlabelled, labels: Sequence[str]) -> str:
        """The lines of a sequence with these labels in the place of those it has."""
        return format_attributes(labels, sequence.tokens)

    def kernel(self, name: str) -> str:
        return name

    def read(self, path: str, encoding: str) -> Labelled:
        data = read_attributes(path, encoding=encoding)
        return Labelled(data.name, data.X, data.y)

    def sequences(self, source: Source, encoding: str, name: str) -> Iterator[Unlabelled]:
        """Sequences as they come, with the labels that every line has."""
        for sequence in iter_attributes(source, encoding=encoding, name=name):
            tokens = sequence.tokens
            words = [next(iter(token), "") for token in tokens]
            yield Unlabelled(
                [()] * len(tokens), tokens, words, sequence.labels, name, sequence.line
            )

    @property
    def template_sources(self) -> dict[str, str]:
        """There are no templates."""
        return {}

    def to_extra(self) -> dict[str, Any]:
        return {"format": "crfsuite"}


Input: TypeAlias = ColumnInput | AttributeInput


# -- from a training file --------------------------------------------------------------------------


def learn(
    paths: Sequence[str],
    encoding: str,
    *,
    format_name: str,
    dialect: str | None,
    numeric: Sequence[int],
    vectors_path: str | None,
    vector_column: int | None,
) -> tuple[Input, Labelled]:
    """What the arguments and options of ``train`` ask for, and the training file read with it."""
    check_paths(paths, format_name, dialect, numeric, vectors_path, vector_column)
    if format_name == "crfsuite":
        attributes = AttributeInput()
        return attributes, attributes.read(paths[0], encoding)
    template = Template.read(paths[0], encoding=encoding, dialect=dialect or "crf++")
    data = _read_labelled(paths[1], encoding)
    n_columns = data.n_columns - 1
    template.check_columns(n_columns, data.name)
    numbers = _learn_numeric(list(dict.fromkeys(numeric)), data) if numeric else None
    vectors = None
    if vectors_path is not None:
        column = vector_column or 0
        _check_column(column, "--vector-column", data)
        words = [row[column] for sequence in data.sequences for row in sequence.rows]
        vectors = ColumnVectors.learn(WordVectors(vectors_path, encoding=encoding), column, words)
    columns = ColumnInput(template, n_columns, numbers, vectors)
    return columns, columns.labelled(data)


def check_paths(
    paths: Sequence[str],
    format_name: str,
    dialect: str | None,
    numeric: Sequence[int],
    vectors_path: str | None,
    vector_column: int | None,
) -> None:
    """InputError where options do not go with the format, or files are too few or too many."""
    if vector_column is not None and vectors_path is None:
        raise InputError("--vector-column", "no word vectors", "name their file with --vectors")
    if format_name == "crfsuite":
        columns_only = {
            "--dialect": dialect is not None,
            "--numeric": bool(numeric),
            "--vectors": vectors_path is not None,
        }
        for option, given in columns_only.items():
            if given:
                raise InputError(
                    option,
                    "is for column files, and CRFsuite's have attributes",
                    "leave it out, and write numbers as name:value",
                )
        if len(paths) != 1:
            raise InputError(
                "train",
                f"{len(paths)} files where CRFsuite's format has TRAIN alone",
                "leave TEMPLATE out: attributes are features as they are",
            )
        return
    if len(paths) != 2:
        raise InputError(
            "train",
            f"{len(paths)} file{'s' if len(paths) > 1 else ''} where TEMPLATE and TRAIN are needed",
            "give both, or --format crfsuite for a file of attributes",
        )


def _learn_numeric(columns: Sequence[int], data: ColumnFile) -> NumericColumns:
    for column in columns:
        _check_column(column, "--numeric", data)
    values = [read_numbers(s.rows, columns, data.name, s.line) for s in data.sequences]
    return NumericColumns.fit(columns, np.concatenate(values))


def _check_column(column: int, option: str, data: ColumnFile) -> None:
    if column >= data.n_columns - 1:
        raise InputError(
            option,
            f"no column {column}: {columns_that_exist(data.n_columns - 1)} in {data.name} (the label is "
            "not one of them)",
            "count columns from 0",
        )


# -- from a model ----------------------------------------------------------------------------------


def load_with_input(
    path: str, vectors_path: str | None = None, device: str = "cpu"
) -> tuple[StructuredGPClassifier, Input]:
    """A model, and what it reads. vectors_path : where its word vectors are now. device : where it is to
    answer."""
    estimator = load(path)
    estimator.device = device
    extra = estimator.model_.extra
    if vectors_path is not None and "vectors" not in extra:
        raise InputError("--vectors", f"{path} was trained without word vectors", "leave it out")
    if extra.get("format") == "crfsuite":
        return estimator, AttributeInput()
    if "template" not in extra:
        raise InputError(
            path,
            "a model without a feature template, saved from Python",
            "use it from Python, or train one with 'structgp train'",
        )
    with warnings.catch_warnings():
        # What it says of the template was said when the model was trained.
        warnings.simplefilter("ignore", StructgpWarning)
        template = Template.parse(
            extra["template"], f"{path} (template)", extra.get("dialect", "crf++")
        )
    numeric = NumericColumns.from_json(extra["numeric"]) if "numeric" in extra else None
    vectors = _find_vectors(extra["vectors"], path, vectors_path) if "vectors" in extra else None
    return estimator, ColumnInput(template, extra["n_columns"], numeric, vectors)


def _find_vectors(state: dict[str, Any], model: str, given: str | None) -> ColumnVectors:
    """The word vectors that the model was trained with, or an InputError."""
    if given is None and not os.path.exists(state["path"]):
        raise InputError(
            model,
            f"its word vectors are not at {state['path']} any more",
            "say where they are with --vectors",
        )
    vectors = WordVectors(given or state["path"], encoding=state["encoding"])
    if vectors.digest != state["sha256"]:
        raise InputError(
            vectors.name,
            f"not the word vectors that {model} was trained with",
            "name those with --vectors, or train again with these",
        )
    return ColumnVectors(vectors, state["column"], state["scale"])
