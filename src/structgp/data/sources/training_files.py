"""From a training file or a saved model to a reader: what to read, and how."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from structgp.data.sources.columns import ColumnFile, iter_columns
from structgp.data.sources.lines import Source, name_of, read_all
from structgp.data.sources.numeric import NumericColumns
from structgp.data.sources.readers import AttributeReader, ColumnReader, Reader
from structgp.data.sources.templates import Template, columns_that_exist
from structgp.data.sources.vectors import ColumnVectors, WordVectors
from structgp.errors import InputError

Path = str | os.PathLike[str]


def learn(
    train: Source | ColumnFile,
    *,
    template: Path | Template | None = None,
    format: str = "columns",
    dialect: str | None = None,
    numeric: Sequence[int] = (),
    vectors: Path | None = None,
    vector_column: int | None = None,
    missing: str | None = None,
    transitions: bool = True,
    encoding: str = "utf-8",
) -> Reader:
    """The reader for a training file, and for all files like it.

    Of ``train`` the first sequence is read, with ``numeric`` or ``vectors`` all of them, one by one.

    Parameters
    ----------
    train : the labelled file, as :func:`iter_columns` takes it, or what :func:`read_columns` has read.
    template : of column files, a template or the path of one.
    format : 'columns', or 'crfsuite' for labels and attributes, which need no template.
    dialect : of the template's file, 'crf++' (default) or 'wapiti'.
    numeric : columns of numbers, counted from 0; they are standardised.
    vectors : path of word vectors (:class:`WordVectors`) for the words in one column.
    vector_column : that column, counted from 0; 0 by default.
    missing : the text in the label column of a token without a label.
    transitions : whether tokens also hold the features of the template's bigrams, as last columns
        (``reader.transition_columns`` names them).
    encoding : of all files.

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
    ``model.save(path, reader.to_json())`` keeps the reader for :func:`from_json`."""
    given = {"template": template, "dialect": dialect, "numeric": numeric, "vectors": vectors}
    _check_arguments(format, **given, vector_column=vector_column)
    if format == "crfsuite":
        return AttributeReader(missing)
    if not isinstance(template, Template):
        assert template is not None
        template = Template.read(template, encoding=encoding, dialect=dialect or "crf++")
    name = name_of(train)
    n_columns = _feature_columns(train, template, encoding, name)
    numbers, words = None, None
    if numeric:
        for column in numeric:
            _check_column(column, "numeric", n_columns, name)
        numbers = NumericColumns.learn(numeric, iter_columns(train, encoding=encoding), name)
    if vectors is not None:
        column = vector_column or 0
        _check_column(column, "vector_column", n_columns, name)
        in_column = [row[column] for s in iter_columns(train, encoding=encoding) for row in s.rows]
        words = ColumnVectors.learn(WordVectors(vectors, encoding=encoding), column, in_column)
    return ColumnReader(template, n_columns, numbers, words, missing, transitions)


def _check_arguments(format: str, **given: Any) -> None:
    """InputError for arguments that do not go together."""
    if format not in ("columns", "crfsuite"):
        raise InputError("format", f"{format!r} is not known", "use 'columns' or 'crfsuite'")
    if format == "columns" and given["template"] is None:
        raise InputError("template", "missing", "give one, or format='crfsuite' for attributes")
    if given.pop("vector_column") is not None and given["vectors"] is None:
        raise InputError("vector_column", "no word vectors", "give them with vectors=")
    for name, value in given.items():
        if format == "crfsuite" and value:
            problem = "is for column files; CRFsuite's files have attributes"
            raise InputError(name, problem, "leave it out, and write numbers as name:value")


def _feature_columns(train: Source | ColumnFile, template: Template, encoding: str, name: str) -> int:
    """The number of columns without the label, after checking that the template finds its own."""
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


# -- from a model ----------------------------------------------------------------------------------


def from_json(state: Mapping[str, Any], model: str = "model", vectors: Path | None = None) -> Reader:
    """The reader whose ``to_json`` is among the entries of ``state``, such as a model's ``extra``.

    model : what errors call the model; vectors : where its word vectors are now, by default where they
    were in training.

    Example
    -------
    >>> from structgp.data import sources
    >>> template = sources.Template.parse("U:%x[0,0]")
    >>> reader = sources.learn(["two QTY", "eggs NAME"], template=template)
    >>> sources.from_json(reader.to_json()).read(["figs NAME"]).X
    [[('figs',)]]
    """
    if vectors is not None and "vectors" not in state:
        raise InputError("vectors", f"{model} was trained without word vectors", "leave it out")
    if state.get("format") == "crfsuite":
        return AttributeReader(state.get("missing"))
    if "template" not in state:
        problem = "a model without a feature template, saved from Python"
        raise InputError(model, problem, "use it from Python, or train one with 'structgp train'")
    numbers = NumericColumns.from_json(state["numeric"]) if "numeric" in state else None
    words = None
    if "vectors" in state:
        path = None if vectors is None else os.fspath(vectors)
        words = ColumnVectors.from_json(state["vectors"], model, path)
    # Models from before there were dialects have CRF++'s, those from before transitions had features none.
    dialect, transitions = state.get("dialect", "crf++"), state.get("transitions", False)
    template = Template.parse(state["template"], f"{model} (template)", dialect)
    return ColumnReader(template, state["n_columns"], numbers, words, state.get("missing"), transitions)
