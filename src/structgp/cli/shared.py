"""Functions that several commands need: loading a model with its reader, places in errors, output."""

from __future__ import annotations

import io
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar

import click
import numpy as np

from structgp.api.fitted import Fitted, read_as
from structgp.cli.group import show_warning, silence_stdout
from structgp.data.atomic import atomic_write
from structgp.data.formats.document_reader import DocumentReader
from structgp.data.formats.file_formats import format_by_name
from structgp.data.sources import Coverage, FileSequence, Labelled, Reader, from_json
from structgp.errors import InputError, StructgpWarning

M = TypeVar("M", bound=Fitted)
_EXAMPLE = re.compile(r"(?P<what>X|y|known|sequence)[\[ ](?P<number>\d+)\]?(?P<rest>.*)")


def load_with_reader(
    kind: type[M],
    path: str,
    vectors_path: str | None = None,
    device: str = "cpu",
    documents: str | None = None,
    snap: bool = False,
    files: Sequence[str] = (),
) -> tuple[M, Reader]:
    """A model, on ``device``, and the reader of its files.

    kind : class of the model; ``Fitted`` if it is only to be asked, which saves the import of scikit-learn.
    vectors_path : path of its word vectors. documents : format of the files; None for the format that their
    names suggest, or else that of the training file. snap : whether spans that cut a token are extended to
    hold all of it."""
    estimator = read_as(kind, path, None)
    estimator.device = device
    reader = from_json(estimator.model_.extra, path, vectors_path)
    if isinstance(reader, DocumentReader):
        if documents is None:
            told = {format_by_name(file, reader.documents) for file in files}
            if len(told) == 1 and told != {reader.documents}:
                (documents,) = told
                said = f"read as {documents}, by its name; --format says otherwise"
                click.echo(f"{files[0]}: {said}", err=True)
        return estimator, reader.of_format(documents, snap)
    if documents is not None or snap:
        problem = f"{path} was trained on {reader.format}, not on documents"
        option = "--snap" if snap else "--format"
        raise InputError(option, problem, "leave it out, or train on documents with --format")
    return estimator, reader


def sequences(
    reader: Reader, files: Sequence[Any], encoding: str, quiet: bool = False
) -> Iterator[FileSequence]:
    """The sequences of all files, each a path or a stream; InputError if a file has none. After each file,
    a line says how many of its tokens have word vectors, if the reader has any, unless ``quiet``."""
    for file in files:
        name = file if isinstance(file, str) else "<stdin>"
        empty, covered = True, Coverage()
        for sequence in reader.sequences(file, encoding=encoding, name=name):
            empty = False
            if (here := reader.coverage(sequence)) is not None:
                covered += here
            yield sequence
        if empty and isinstance(file, str):
            raise InputError(name, "no tokens", "give a file with at least one")
        if covered.n_tokens and not quiet:
            click.echo(f"{name}: {covered}", err=True)


@contextmanager
def in_files(places: Sequence[tuple[str, int]], has_token_lines: bool = False) -> Iterator[None]:
    """Makes errors and warnings about an example in memory name its place in a file instead: ``X[3][5]``
    becomes node 5 of the fourth of ``places`` (name, line), or the line five below it if every token has
    its own line."""

    def shown(message: Warning | str, *more: Any, **named: Any) -> None:
        place, mark, rest = str(message).partition(": ")
        found = _place_in_file(place, places, has_token_lines) if mark else None
        before(message if found is None else StructgpWarning(f"{found}: {rest}"), *more, **named)

    with warnings.catch_warnings():
        before, warnings.showwarning = warnings.showwarning, shown
        try:
            yield
        except InputError as error:
            place = _place_in_file(error.place, places, has_token_lines)
            if place is None:
                raise
            raise InputError(place, error.problem, error.remedy) from error


def _place_in_file(place: str, places: Sequence[tuple[str, int]], has_token_lines: bool) -> str | None:
    """The place in a file of an example in memory, or of a part of it; None if ``place`` names neither."""
    found = _EXAMPLE.fullmatch(place)
    if found is None or int(found["number"]) >= len(places):
        return None
    name, line = places[int(found["number"])]
    token = re.fullmatch(r"\[(\d+)\](.*)", found["rest"])
    if has_token_lines and token is not None:
        return f"{name}:{line + int(token[1])}{token[2]}"
    if not has_token_lines and found["what"] in ("y", "known"):
        return f"{name}:{line}.labels{found['rest']}"
    if found["what"] == "X" and token is not None:
        return f"{name}:{line}, node {token[1]}{token[2]}"
    return f"{name}:{line}{found['rest']}"


def places_of(data: Labelled) -> list[tuple[str, int]]:
    """The file name and line of each example."""
    return [(data.name, line) for line in data.lines]


def flat(labels: Any) -> list[str | None]:
    """All labels of an example as a flat list; with layers, in the form LAYER=LABEL, as in the model."""
    if isinstance(labels, Mapping):
        parts = [(layer, flat(of)) for layer, of in labels.items()]
        return [None if v is None else f"{layer}={v}" for layer, of in parts for v in of]
    if isinstance(labels, np.ndarray):
        return [str(v) for v in labels.ravel().tolist()]
    rows = [row if isinstance(row, list) else [row] for row in labels]
    return [label for row in rows for label in row]


def n_tokens(y: Sequence[Any]) -> int:
    """Number of tokens that have these labels; with layers, a token has several labels."""
    return sum(len(flat(labels)) // (len(labels) if isinstance(labels, Mapping) else 1) for labels in y)


def check_two_labels(y: Sequence[Any], name: str) -> None:
    found = {label for labels in y for label in flat(labels)} - {None}
    if len(found) < 2:
        same = f"the same label, {found.pop()!r}" if found else "no label"
        remedy = "check that the label is the last column, and give examples of a second label"
        raise InputError(name, f"every token has {same}", remedy)


def all_labels(data: Labelled, missing: str | None) -> list[Any]:
    """The labels of a file; InputError if any token has none."""
    n = sum(flat(labels).count(None) for labels in data.y)
    if n:
        problem = f"{n} tokens have no label ({'null' if missing is None else repr(missing)})"
        raise InputError(data.name, problem, "label them, or leave their sequences out")
    return data.y


def warn_of_unseen(estimator: Fitted, y: list[Any], place: str, consequence: str) -> None:
    """Warns of labels that did not occur in training."""
    known = set(estimator.classes_)
    unseen = [str(label) for labels in y for label in flat(labels) if label not in known]
    if unseen:
        names = ", ".join(sorted(set(unseen)))
        what = f"{len(unseen)} tokens have labels that training never saw ({names})"
        show_warning(f"{place} {what}; {consequence}")


@contextmanager
def output_stream(path: str | None, encoding: str) -> Iterator[TextIO]:
    """The file at ``path``, written completely or not at all, or standard output."""
    opened = atomic_write(path, "w", encoding=encoding) if path else _standard_output(encoding)
    try:
        with opened as stream:
            yield stream
    except UnicodeEncodeError as error:
        lost = error.object[error.start : error.end]
        problem = f"{lost!r} cannot be written in {encoding}"
        remedy = "convert the data to utf-8, which has all characters"
        raise InputError(path or "<stdout>", problem, remedy) from None


@contextmanager
def _standard_output(encoding: str) -> Iterator[TextIO]:
    stream = io.TextIOWrapper(sys.stdout.buffer, encoding=encoding, newline="\n")
    try:
        yield stream
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        silence_stdout()
        problem = f"cannot be written ({error.strerror or error})"
        raise InputError("<stdout>", problem, "choose another place with -o") from error
    finally:
        # Detaching leaves standard output open.
        stream.detach()
