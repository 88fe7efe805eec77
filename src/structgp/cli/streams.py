"""Training files that are never held whole: read as a stream, and encoded into shards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from structgp.cli.inputs import AttributeInput, ColumnInput, Input, check_paths
from structgp.data import shards
from structgp.data.attributes import iter_attributes
from structgp.data.columns import cannot_read, iter_columns
from structgp.data.templates import Template
from structgp.errors import InputError

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Stream:
    """A labelled file. missing : what stands in the place of a label that is not known."""

    path: str
    encoding: str
    source: Input
    missing: str | None

    def __iter__(self) -> Iterator[tuple[list[Any], list[str | None]]]:
        """Tokens and labels, sequence by sequence; begins anew each time."""
        for tokens, labels in self._pairs():
            yield tokens, [None if label == self.missing else label for label in labels]

    def _pairs(self) -> Iterator[tuple[list[Any], list[str]]]:
        if isinstance(self.source, AttributeInput):
            for found in iter_attributes(self.path, encoding=self.encoding):
                yield found.tokens, found.labels
            return
        for sequence in iter_columns(self.path, encoding=self.encoding):
            rows, labels = [row[:-1] for row in sequence.rows], [row[-1] for row in sequence.rows]
            yield self.source.tokens(rows, self.path, sequence.line), labels

    @property
    def digest(self) -> str:
        """Of the file, and of what reads it."""
        digest = hashlib.sha256(
            repr((self.source.to_extra(), self.encoding, self.missing)).encode()
        )
        try:
            with open(self.path, "rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
        except OSError as error:
            raise cannot_read(self.path, error) from error
        return digest.hexdigest()


def open_stream(
    paths: Sequence[str],
    encoding: str,
    missing: str | None,
    *,
    format_name: str,
    dialect: str | None,
    numeric: Sequence[int],
    vectors_path: str | None,
    vector_column: int | None,
) -> Stream:
    """What the arguments and options of ``train`` ask for; of the file, the first sequence is read."""
    check_paths(paths, format_name, dialect, numeric, vectors_path, vector_column)
    for option, given in (("--numeric", numeric), ("--vectors", vectors_path)):
        if given:
            raise InputError(
                option, "is of dense features, which shards cannot hold", "leave out --shards"
            )
    if format_name == "crfsuite":
        return Stream(paths[0], encoding, AttributeInput(), missing)
    template, path = (
        Template.read(paths[0], encoding=encoding, dialect=dialect or "crf++"),
        paths[1],
    )
    first = next(iter_columns(path, encoding=encoding), None)
    if first is None:
        raise InputError(
            path, "no rows", "give one token a line and a blank line between sequences"
        )
    n_columns = len(first.rows[0]) - 1
    if n_columns < 1:
        raise InputError(
            f"{path}:{first.line}",
            "one column where tokens and labels are needed",
            "add the label as last column",
        )
    template.check_columns(n_columns, path)
    return Stream(path, encoding, ColumnInput(template, n_columns), missing)


def shards_of(stream: Stream, folder: str) -> shards.Shards:
    """The shards of a file in a folder: those that are there, if they are of this file and were written to
    the end, else new ones."""
    digest = stream.digest
    if (Path(folder) / "manifest.json").exists():
        found = shards.read(folder)
        if found.about["source"] != digest:
            raise InputError(
                folder,
                f"holds shards of something else than {stream.path} as it is read now",
                "name another folder, or remove this one",
            )
        click.echo(f"{folder}: written before", err=True)
        return found
    click.echo(f"encoding {stream.path} into {folder}", err=True)
    return shards.write(stream, folder, features="columns", source=digest, name=stream.path)
