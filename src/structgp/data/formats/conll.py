"""CoNLL columns as documents: a word in the first column, its label in the last, a blank line between
sentences.

The text of a document is its words with spaces between them. Other columns are kept. If a model has
labelled a document, the column before the label has the label's probability."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

from structgp.data.documents import Document
from structgp.data.formats.format_parts import DIGITS, Placed, Reading
from structgp.data.sources.columns import ColumnSequence, check_row, format_sequence, iter_columns
from structgp.data.sources.lines import Source
from structgp.errors import InputError, StructgpWarning


def read_conll(source: Source, name: str, how: Reading) -> Iterator[Placed]:
    """The documents of a file; if it has only one column, that is words, and nothing is labelled."""
    for found in _sequences(source, name, how):
        rows = found.rows
        labels = None
        if len(rows[0]) > 1:
            labels = [None if row[-1] == how.missing else row[-1] for row in rows]
        between = [row[1:-1] for row in rows]
        meta = {"columns": between} if any(between) else {}
        document = Document.from_words([row[0] for row in rows], labels, meta=meta)
        yield Placed(document, found.line)


def _sequences(source: Source, name: str, how: Reading) -> Iterator[ColumnSequence]:
    try:
        yield from iter_columns(source, encoding=how.encoding, name=name)
    except InputError as error:
        if "columns where" not in error.problem:
            raise
        remedy = f"{error.remedy}; if it is plain text, say that its format is 'text'"
        raise InputError(error.place, error.problem, remedy) from error


def write_conll(documents: Iterable[Document], how: Reading) -> Iterator[str]:
    empty, width = 0, 0
    for number, document in enumerate(documents):
        if not document.tokens:
            empty += 1
            continue
        rows = _rows(document, how)
        width = width or len(rows[0])
        for t, row in enumerate(rows):
            check_row(row, f"document {document.id or number}, token {t}", width)
        yield format_sequence(rows) + "\n"
    if empty:
        warnings.warn(f"{empty} documents without tokens are left out", StructgpWarning, stacklevel=2)


def _rows(document: Document, how: Reading) -> list[tuple[str, ...]]:
    """The rows of a document. Without labels, they hold the words, and the other columns of its file."""
    between = document.meta.get("columns") or [()] * len(document.tokens)
    predicted = document.prediction
    labels = document.labels if predicted is None else predicted.labels
    if labels is not None and None in labels and how.missing is None:
        remedy = "say with missing= what stands for a label that is not known"
        raise InputError(f"document {document.id}", "some labels are not known", remedy)
    rows = []
    for t, word in enumerate(document.words):
        row = (word, *between[t])
        if predicted is not None and predicted.probabilities:
            row += (f"{predicted.probabilities[t]:.{DIGITS}f}",)
        rows.append(row if labels is None else (*row, labels[t] or str(how.missing)))
    return rows
