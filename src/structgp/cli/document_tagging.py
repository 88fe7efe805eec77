"""Writes the answers of the commands tag and next about documents, in the documents' own format."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from structgp.api.annotate import annotate
from structgp.api.fitted import Fitted
from structgp.cli.shared import in_files, output_stream
from structgp.data.documents import Document
from structgp.data.formats.document_reader import DocumentReader, DocumentSequence
from structgp.data.formats.file_formats import named
from structgp.data.schemes import scheme_of
from structgp.data.sources import FileSequence, Reader
from structgp.errors import InputError, StructgpWarning

ANSWERED_AS = {"text": "prodigy"}
"""Maps a format that cannot hold answers to the format in which they are written instead."""


@dataclass(frozen=True)
class DocumentTagger:
    """Turns documents into documents with predictions. force : whether labels in the file are kept. defer :
    value of the option --defer."""

    estimator: Fitted
    force: bool = False
    defer: float | None = None

    def answer(self, chunk: Sequence[DocumentSequence]) -> list[Document]:
        known = [self._known(s) for s in chunk] if self.force else None
        with in_files([(s.name, s.line) for s in chunk]):
            X = [s.tokens for s in chunk]
            return annotate(self.estimator, [s.document for s in chunk], X, known=known, defer=self.defer)

    def _known(self, sequence: DocumentSequence) -> list[str | None] | None:
        labels = sequence.document.labels
        wrong = set(labels or ()) - {None, *self.estimator.classes_}
        if wrong:
            problem = f"{min(map(str, wrong))!r} is not a label of the model"
            raise InputError(
                f"{sequence.name}:{sequence.line}", problem, "leave --force out, or correct it"
            )
        return None if labels is None else list(labels)


def with_first_checked(
    found: Iterable[FileSequence], reader: Reader, classes: Sequence[str]
) -> Iterator[FileSequence]:
    """The same sequences. Warns if the file has columns, is read as documents, and the last column of its
    first sequence, which is taken for labels, has none of the model's labels: it may hold words or other
    tags."""
    is_columns = isinstance(reader, DocumentReader) and reader.documents == "conll"
    for n, one in enumerate(found):
        labels = set(one.labels or ()) - {None} if n == 0 and is_columns else set()
        if labels and not labels & set(classes):
            word = repr(min(map(str, labels)))
            message = f"{one.name}:{one.line}: {word} in the last column is not one of the "
            message += "model's labels; it is taken for one and replaced. Plain text needs --format text"
            warnings.warn(message, StructgpWarning, stacklevel=2)
        yield one


def check_options(
    n_best: int | None, level: int, coverage: float | None, reader: DocumentReader, to: str | None
) -> str:
    """The format that tag writes, by default that of the reader. Raises InputError for options whose
    answers documents cannot hold."""
    written = to or ANSWERED_AS.get(reader.documents, reader.documents)
    options = ("-n", "predict_n_best", n_best), ("-v 2", "predict_marginals", level == 2)
    for option, method, value in (*options, ("--coverage", "predict_sets", coverage is not None)):
        if value:
            remedy = f"use {method} in Python, or train on columns with a template"
            raise InputError(option, f"{written} has no place for it", remedy)
    return written


def field_of(estimator: Fitted, reader: DocumentReader, to: str, asked: str | None) -> str:
    """The CoNLL-U field that labels are written to. Spans from other documents do not replace the parts of
    speech."""
    if asked is not None and to != "conllu":
        raise InputError("--field", f"is for conllu, not for {to}", "leave it out, or add --to conllu")
    has_field = "conllu" in (reader.documents, estimator.model_.extra["documents"])
    usual = reader.how.field if has_field or not scheme_of(estimator.classes_.tolist()) else "misc:NER"
    return asked or usual


def write_documents(
    documents: Iterable[Document],
    reader: DocumentReader,
    to: str | None,
    output: str | None,
    encoding: str,
    at_once: bool = False,
    field: str | None = None,
) -> None:
    """Writes documents in the format ``to``, by default that of the reader. at_once : whether each document
    is written out as soon as it is answered. field : the field of CoNLL-U for the labels, by default as in
    training."""
    name = to or ANSWERED_AS.get(reader.documents, reader.documents)
    how = replace(reader.how, encoding=encoding, field=field or reader.how.field)
    write, save = named(name).text, named(name).save
    if save is not None:
        if output is None:
            problem = f"{name} is not text for standard output"
            raise InputError("-o", problem, "name a file, or for brat a folder")
        save(documents, output, how)
        return
    assert write is not None
    with output_stream(output, encoding) as out:
        for piece in write(documents, how):
            out.write(piece)
            if at_once:
                out.flush()
