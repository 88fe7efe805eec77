"""The pool: the sequences to label, read from files, and the export of their labels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from structgp.data import formats, sources
from structgp.data.documents import Document
from structgp.data.formats.document_reader import DocumentReader, DocumentSequence
from structgp.data.formats.file_formats import format_of
from structgp.data.sources.lines import FileSequence, read_all
from structgp.errors import InputError
from structgp.service.tag_set import Labels, TagSet

UNKNOWN = "?"
"""Text in the label column for 'don't know'."""


@dataclass(frozen=True)
class Pool:
    """The sequences to label. reader : the reader of the pool's files; it is kept with the model, so that
    ``structgp tag`` can read similar files. sequences : all sequences, with ``tokens`` (features),
    ``words``, and ``labels`` if the file has labels."""

    name: str
    reader: sources.Reader
    sequences: list[FileSequence]

    def __len__(self) -> int:
        return len(self.sequences)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all words: pools with the same words in the same order are the same."""
        found = hashlib.sha256()
        for s in self.sequences:
            found.update(json.dumps(s.words).encode() + b"\n")
        return found.hexdigest()

    @cached_property
    def texts(self) -> list[str]:
        """The words of each sequence in lower case, for searching."""
        return [" ".join(s.words).casefold() for s in self.sequences]

    def place(self, i: int) -> str:
        return f"{self.sequences[i].name}:{self.sequences[i].line}"

    def features(self) -> list[Any]:
        return [s.tokens for s in self.sequences]

    def given(self) -> dict[int, Labels]:
        """The labels in the file, by sequence; sequences without any known label are left out."""
        found = {}
        for i, s in enumerate(self.sequences):
            labels = [] if s.labels is None else self.reader.labels_of(s)
            if any(label is not None for label in labels):
                found[i] = list(labels)
        return found

    def tag_set(self) -> TagSet:
        """The labels that occur in the file."""
        labels = [label for given in self.given().values() for label in given]
        if not labels:
            remedy = "name types of spans with --types QTY,NAME, or tags of tokens with --tags"
            raise InputError(self.name, "no labels in it, and none are named", remedy)
        return TagSet.from_labels(labels, self.name)

    def search(self, text: str, most: int) -> list[int]:
        """Indices of the first ``most`` sequences that contain a text, ignoring case."""
        wanted = " ".join(text.casefold().split())
        found = (i for i, words in enumerate(self.texts) if wanted in words)
        return list(islice(found, most))

    def documents(self, labels: Iterable[tuple[int, Labels]]) -> Iterable[Document]:
        """The sequences with these labels, as documents."""
        for i, given in labels:
            s = self.sequences[i]
            own = s.document if isinstance(s, DocumentSequence) else Document.from_words(s.words)
            yield own.with_labels(given)

    def exported(self, labels: Iterable[tuple[int, Labels]]) -> Iterable[str]:
        """The sequences with these labels as columns or JSON lines; unknown labels are '?' or null."""
        for i, given in labels:
            if self.reader.format == "jsonl":
                yield self.reader.with_labels(self.sequences[i], given)  # type: ignore[arg-type]
            else:
                shown = [UNKNOWN if label is None else label for label in given]
                yield self.reader.with_labels(self.sequences[i], shown) + "\n"


def read_pool(
    paths: Sequence[str],
    *,
    format: str | None = None,
    template: str | None = None,
    labelled: bool = False,
    missing: str | None = None,
    encoding: str = "utf-8",
) -> Pool:
    """The sequences of all files, in order, without those that have no tokens.

    format : 'columns', the default with a template; 'jsonl'; or a format of documents; the default without
    a template is the format that the file's name suggests. template : path of a CRF++ template. labelled :
    whether the last column is a label. missing : the text in place of a missing label, by default
    UNKNOWN."""
    if format is None:
        format = "columns" if template is not None else format_of(paths[0], "--format")
    name, reader = ", ".join(paths), _reader(paths[0], format, template, labelled, missing, encoding)
    found: list[FileSequence] = []
    for path in paths:
        found += read_all(reader.sequences(path, encoding=encoding), path)
    found = [s for s in found if s.words]
    if not found:
        raise InputError(name, "no tokens", "give files with something to label")
    for s in found:
        if not isinstance(s.tokens, list):
            raise InputError(f"{s.name}:{s.line}", "not a sequence", "the page labels sequences alone")
        if isinstance(s.labels, dict):
            raise InputError(f"{s.name}:{s.line}", "several layers of labels", "give one label per token")
    return Pool(name, reader, found)


def _reader(
    path: str, format: str, template: str | None, labelled: bool, missing: str | None, encoding: str
) -> sources.Reader:
    if labelled and format != "columns":
        raise InputError("--labelled", "is for columns; other files say it themselves", "leave it out")
    if format == "jsonl":
        if template is not None:
            raise InputError("--template", "is for columns; JSON lines have features", "leave it out")
        return sources.JsonReader("sequence")
    if format in formats.FORMATS:
        how = formats.Reading(missing=UNKNOWN if missing is None else missing)
        own = None if template is None else sources.Template.read(template, encoding=encoding)
        return DocumentReader(format, how, own)
    if template is None:
        remedy = "give one with --template, or use --format conll, which has features of its own"
        raise InputError("--template", "columns need a template of features", remedy)
    parsed = sources.Template.read(template, encoding=encoding)
    (first,) = read_all(islice(sources.iter_columns(path, encoding=encoding), 1), path)
    width = len(first.rows[0]) - int(labelled)
    if width < 1:
        raise InputError(f"{path}:{first.line}", "only one column", "leave out --labelled")
    parsed.check_columns(width, path)
    return sources.ColumnReader(parsed, width, missing=UNKNOWN if missing is None else missing)
