"""Hugging Face datasets: rows with the columns ``tokens`` and ``ner_tags``, as documents and back.

Reading takes anything with such rows, and needs no package; writing needs ``datasets``
(``pip install "structgp[datasets]"``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from structgp.data.documents import Document
from structgp.errors import InputError

IGNORED = -100
"""Number that stands for a label that is not known, as in transformers."""


def from_dataset(
    dataset: Any,
    *,
    tokens: str = "tokens",
    labels: str | None = "ner_tags",
    names: Sequence[str] | None = None,
) -> Iterator[Document]:
    """The documents of a dataset, one per row.

    Parameters
    ----------
    dataset : a ``datasets.Dataset``, or anything whose items are mappings.
    tokens, labels : names of the columns; None for a dataset without labels.
    names : the names of labels that are numbers; by default those of the dataset's ClassLabel. -100 stands
        for a label that is not known.

    Example
    -------
    >>> rows = [{"tokens": ["Ann", "left"], "ner_tags": [1, 0]}]
    >>> [document.labels for document in from_dataset(rows, names=["O", "B-PER"])]
    [('B-PER', 'O')]
    """
    known = _class_names(dataset, labels) if names is None else list(names)
    for number, row in enumerate(dataset):
        place = f"dataset[{number}]"
        for column in (tokens, labels):
            if column is not None and not (isinstance(row, Mapping) and column in row):
                has = (
                    f"it has {', '.join(map(str, row))}"
                    if isinstance(row, Mapping)
                    else "it is not a mapping"
                )
                raise InputError(
                    place, f"no column {column!r}; {has}", "name the columns with tokens= and labels="
                )
        given = None
        if labels is not None:
            given = [_name(y, known, f"{place}[{labels!r}][{t}]") for t, y in enumerate(row[labels])]
        identity = row.get("id")
        words = [str(word) for word in row[tokens]]
        if given is not None and len(given) != len(words):
            raise InputError(place, f"{len(given)} labels for {len(words)} tokens", "give one per token")
        yield Document.from_words(words, given, id=None if identity is None else str(identity))


def _class_names(dataset: Any, labels: str | None) -> list[str] | None:
    """Names of the labels, from the dataset's features."""
    features = getattr(dataset, "features", None) or {}
    column = features.get(labels) if labels is not None else None
    inner = getattr(column, "feature", None) or (column[0] if isinstance(column, list) else column)
    return getattr(inner, "names", None)


def _name(label: Any, names: Sequence[str] | None, place: str) -> str | None:
    if label is None or isinstance(label, str):
        return label
    number = int(label)
    if number == IGNORED:
        return None
    if names is None:
        raise InputError(place, f"the label is the number {number}", "give the labels' names with names=")
    if not 0 <= number < len(names):
        raise InputError(place, f"label {number} of {len(names)}", f"use 0 to {len(names) - 1}, or -100")
    return names[number]


def to_dataset(documents: Iterable[Document], *, tokens: str = "tokens", labels: str = "ner_tags") -> Any:
    """A ``datasets.Dataset`` with a row per document: id, tokens, and labels as numbers of a ClassLabel,
    -100 where one is not known. If a document has a prediction, the predicted labels are used. All
    documents are held in memory. The text between the words is not kept."""
    try:
        import datasets
    except ImportError as error:
        raise InputError("datasets", "is not installed", 'run: pip install "structgp[datasets]"') from error
    found = list(documents)
    given = [
        document.labels if d is None else d.labels for document in found for d in [document.prediction]
    ]
    names = sorted(
        {y for of in given if of is not None for y in of if y is not None}, key=lambda y: (y != "O", y)
    )
    numbers = {name: n for n, name in enumerate(names)}
    rows = {
        "id": [document.id for document in found],
        tokens: [list(document.words) for document in found],
        labels: [
            [IGNORED if y is None else numbers[y] for y in of or [None] * len(document.tokens)]
            for document, of in zip(found, given, strict=True)
        ],
    }
    text, label = (
        datasets.Value("string"),
        datasets.ClassLabel(names=names) if names else datasets.Value("int64"),
    )
    columns = {"id": text, tokens: datasets.Sequence(text), labels: datasets.Sequence(label)}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(columns))
