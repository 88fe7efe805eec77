"""Answers of the commands tag and next about documents, in the format of the documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from structgp.api.annotate import annotate
from structgp.api.fitted import Fitted
from structgp.cli.shared import in_files, output_stream
from structgp.data.documents import Document
from structgp.data.formats.document_reader import DocumentReader, DocumentSequence
from structgp.data.formats.file_formats import named
from structgp.errors import InputError

ANSWERED_AS = {"text": "prodigy"}
"""The format of answers about documents whose own cannot hold any."""


@dataclass(frozen=True)
class DocumentTagger:
    """Documents -> documents with predictions. force : whether labels in the file are kept; defer : of the
    option."""

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


def check_options(n_best: int | None, level: int, coverage: float | None, reader: DocumentReader) -> None:
    """InputError for options of tag whose answers documents cannot hold."""
    given = {"-n": n_best, "-v 2": level == 2, "--coverage": coverage is not None}
    for option, value in given.items():
        if value:
            problem = f"{reader.documents} has no place for it"
            raise InputError(option, problem, "convert the documents to conll, and train on columns")


def write_documents(
    documents: Iterable[Document],
    reader: DocumentReader,
    to: str | None,
    output: str | None,
    encoding: str,
    at_once: bool = False,
) -> None:
    """Write documents in the format ``to``, by default that of the reader. at_once : whether each is to be
    seen as soon as it is known."""
    name = to or ANSWERED_AS.get(reader.documents, reader.documents)
    how, write, save = replace(reader.how, encoding=encoding), named(name).text, named(name).save
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
