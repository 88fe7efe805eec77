"""Training files with labels of several annotators: the last columns, or "annotations" in JSON lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from structgp.data import sources
from structgp.data.annotations import Annotations
from structgp.data.sources.columns import ColumnFile, ColumnSequence
from structgp.errors import InputError

EVERYBODY = "all"
"""Stands for all annotators that the JSON lines name."""


def split_columns(
    file: ColumnFile, names: Sequence[str], missing: str | None
) -> tuple[ColumnFile, Annotations]:
    """Splits a column file whose last columns are the labels of these annotators into a file with one label
    column and the annotations. missing : the text in place of a label that an annotator did not give."""
    k, width = len(names), file.n_columns
    if width <= k:
        problem = f"{width} columns, but tokens and the labels of {k} annotators are needed"
        place = f"{file.name}:{file.sequences[0].line}"
        raise InputError(place, problem, "name one annotator for each of the last columns")
    plain, given = [], []
    for sequence in file.sequences:
        rows = tuple((*row[:-k], row[-1]) for row in sequence.rows)
        plain.append(ColumnSequence(rows, sequence.line))
        said: dict[str, Any] = {}
        for column, name in enumerate(names, start=width - k):
            labels = [None if row[column] == missing else row[column] for row in sequence.rows]
            if any(label is not None for label in labels):
                said[name] = labels
        given.append(said)
    return ColumnFile(file.name, plain), Annotations(given)


def read_json(
    reader: sources.Reader, path: str, names: Sequence[str], encoding: str
) -> tuple[list[Any], Annotations, list[tuple[str, int]]]:
    """The examples in JSON lines, the labels from these annotators, and the place (file, line) of each."""
    X, given, places = [], [], []
    for found in reader.sequences(path, encoding=encoding):
        place, said = f"{found.name}:{found.line}", found.given.get("annotations") or {}  # type: ignore[attr-defined]
        if not isinstance(said, Mapping):
            problem = f"expected an object from annotator to labels, got {said!r}"
            raise InputError(f"{place}.annotations", problem, 'write {"ann": [...], "bob": [...]}')
        X.append(found.tokens)
        kept = said if list(names) == [EVERYBODY] else {name: said.get(name) for name in names}
        given.append(kept)
        places.append((found.name, found.line))
    found_names = Annotations(given).names
    strange = [name for name in names if name not in (*found_names, EVERYBODY)]
    if strange or not found_names:
        problem = f"no line has annotations of {', '.join(strange) or 'anybody'}"
        raise InputError(path, problem, 'write "annotations": {"ann": [...], ...}, and name who is there')
    return X, Annotations(given), places
