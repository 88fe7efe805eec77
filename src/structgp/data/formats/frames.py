"""pandas DataFrames as documents and back: a row per document, or a row per token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from structgp.data.documents import Document
from structgp.errors import InputError

PER = ("document", "token")


def from_pandas(
    frame: Any, *, word: str = "word", label: str | None = "label", sentence: str = "sentence"
) -> Iterator[Document]:
    """The documents of a DataFrame.

    With a column ``text``, each row is a document: ``text`` and, if they are there, ``id``, ``tokens`` (a
    list of (start, stop)) and ``labels`` (one per token). Otherwise each row is a token: ``word`` and
    ``label`` name its columns, and consecutive rows with the same value of ``sentence`` are a document.
    Missing labels (None, NaN) are labels that are not known.

    Example
    -------
    >>> import pandas
    >>> words = {"sentence": [1, 1, 2], "word": ["Ann", "left", "Rome"], "label": ["B", "O", None]}
    >>> [(document.words, document.labels) for document in from_pandas(pandas.DataFrame(words))]
    [(('Ann', 'left'), ('B', 'O')), (('Rome',), (None,))]
    """
    columns = [str(column) for column in frame.columns]
    if "text" in columns:
        return _by_document(frame, columns)
    for column in (word, sentence, label):
        if column is not None and column not in columns:
            problem = f"no column {column!r}; it has {', '.join(columns)}"
            raise InputError("frame", problem, "name the columns with word=, label= and sentence=")
    return _by_token(frame, word, label, sentence)


def _by_document(frame: Any, columns: Sequence[str]) -> Iterator[Document]:
    for number, row in enumerate(frame.to_dict("records")):
        tokens, labels, identity = (row.get(key) for key in ("tokens", "labels", "id"))
        found = Document.from_text(
            str(row["text"]),
            tokens=None if _missing(tokens) else [(int(a), int(b)) for a, b in tokens],
            id=None if _missing(identity) else str(identity),
        )
        try:
            yield (
                found
                if _missing(labels)
                else found.with_labels([None if _missing(y) else y for y in labels])
            )
        except InputError as error:
            raise InputError(f"frame.iloc[{number}]", error.problem, error.remedy) from error


def _by_token(frame: Any, word: str, label: str | None, sentence: str) -> Iterator[Document]:
    labels = [None] * len(frame) if label is None else frame[label].tolist()
    rows = zip(frame[sentence].tolist(), frame[word].tolist(), labels, strict=True)
    for identity, group in groupby(rows, key=lambda row: row[0]):
        tokens = list(group)
        given = [None if _missing(y) else str(y) for *_, y in tokens]
        words = [str(text) for _, text, _ in tokens]
        yield Document.from_words(words, None if label is None else given, id=str(identity))


def _missing(value: Any) -> bool:
    """True if a cell is empty: None, NaN or pandas' NA."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float) and value != value


def to_pandas(documents: Iterable[Document], per: str = "document") -> Any:
    """A DataFrame of documents. Needs pandas (``pip install "structgp[pandas]"``).

    per : 'document' for one row per document: id, text, tokens, labels, and spans as (start, stop, label,
    probability); :func:`from_pandas` gives the same documents again. 'token' for one row per token:
    sentence (the id, or the number), word, start, stop, label and, if there is a prediction, ``predicted``
    and its ``probability``."""
    try:
        import pandas
    except ImportError as error:
        raise InputError("pandas", "is not installed", 'run: pip install "structgp[pandas]"') from error
    if per not in PER:
        raise InputError("per", f"{per!r} is not known", f"use one of {', '.join(map(repr, PER))}")
    rows: list[dict[str, Any]] = []
    for number, document in enumerate(documents):
        rows += [_row(document)] if per == "document" else _token_rows(document, number)
    return pandas.DataFrame(rows)


def _row(document: Document) -> dict[str, Any]:
    spans = document.spans if document.prediction is None else document.prediction.spans
    labels = None if document.labels is None else list(document.labels)
    row: dict[str, Any] = {"id": document.id, "text": document.text, "tokens": list(document.tokens)}
    row |= {"labels": labels, "spans": [tuple(span) for span in spans]}
    return row if document.prediction is None else row | {"predicted": list(document.prediction.labels)}


def _token_rows(document: Document, number: int) -> list[dict[str, Any]]:
    found, predicted = [], document.prediction
    for t, (start, stop) in enumerate(document.tokens):
        row: dict[str, Any] = {"sentence": number if document.id is None else document.id}
        row |= {"word": document.text[start:stop], "start": start, "stop": stop}
        row["label"] = None if document.labels is None else document.labels[t]
        if predicted is not None:
            row["predicted"] = predicted.labels[t]
            row["probability"] = predicted.probabilities[t] if predicted.probabilities else None
        found.append(row)
    return found
