"""doccano's JSON lines: ``{"text", "label": [[start, stop, name], ...]}``, as it imports and exports them.

``labels`` and doccano's ``entities`` (objects with ``start_offset``, ``end_offset`` and ``label``) are read
too. A line without any of these is not labelled; an empty list says that there is nothing to label in it.
If a line has ``probabilities``, one per label, the labels are a model's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from structgp.data.documents import Document, tokenize
from structgp.data.formats import format_parts as parts
from structgp.data.formats.format_parts import UNKNOWN, Placed, Reading
from structgp.data.sources.lines import Source
from structgp.errors import InputError

_LABELS = ("label", "labels", "entities")
_OWN = ("text", "tokens", "probabilities", "score", UNKNOWN, *_LABELS)


def read_doccano(source: Source, name: str, how: Reading) -> Iterator[Placed]:
    for given, line in parts.json_lines(source, name, how):
        yield Placed(_document(given, f"{name}:{line}", how), line)


def _document(given: dict[str, Any], place: str, how: Reading) -> Document:
    text = parts.text_of(given, "text", place)
    meta = {key: value for key, value in given.items() if key not in _OWN}
    offsets = parts.offsets_of(given.get("tokens"), text, f"{place}.tokens")
    document = parts.placed_document(text, offsets, place, id=parts.identity(meta), meta=meta)
    key = next((key for key in _LABELS if given.get(key) is not None), None)
    if key is None:
        return document
    found = parts.list_of(given[key], f"{place}.{key}")
    spans = [_span(span, f"{place}.{key}[{n}]") for n, span in enumerate(found)]
    shares = given.get("probabilities")
    if shares is None:
        return parts.labelled(document, [(*s, None) for s in spans], place, how, given.get(UNKNOWN))
    if len(parts.list_of(shares, f"{place}.probabilities")) != len(spans):
        problem = f"{len(shares)} probabilities for {len(spans)} labels"
        raise InputError(place, problem, "give one per label")
    both = [(*span, p) for span, p in zip(spans, shares, strict=True)]
    return parts.labelled(document, both, place, how, predicted=True, score=given.get("score"))


def _span(given: Any, place: str) -> tuple[int, int, str]:
    if isinstance(given, dict):
        given = [given.get(key) for key in ("start_offset", "end_offset", "label")]
    if not isinstance(given, list) or len(given) != 3:
        problem = f"expected [start, stop, name], got {given!r}"
        raise InputError(place, problem, "write two numbers and a string")
    start, stop = (parts.whole(value, place) for value in given[:2])
    return start, stop, parts.name_of_label(given[2], place)


def write_doccano(documents: Iterable[Document], how: Reading) -> Iterator[str]:
    for document in documents:
        line = parts.with_identity(document) | {"text": document.text}
        if document.tokens != tokenize(document.text):
            line["tokens"] = [list(token) for token in document.tokens]
        if document.labels is not None or document.prediction is not None:
            spans = parts.shown_spans(document)
            line["label"] = [[span.start, span.stop, span.label] for span in spans]
            if unknown := parts.unknown_tokens(document):
                line[UNKNOWN] = unknown
            if document.prediction is not None:
                line["probabilities"] = [parts.rounded(span.probability or 0.0) for span in spans]
                if document.prediction.score is not None:
                    line["score"] = parts.rounded(document.prediction.score)
        yield parts.as_line(line)
