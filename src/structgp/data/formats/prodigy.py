"""Prodigy's JSON lines: ``{"text", "tokens", "spans", "answer"}``.

A line whose answer is 'accept', or which has spans and no answer, is labelled. 'reject' and 'ignore' say
that the labels are not known: such a line is read without labels, and written again as it was. Spans with
a ``probability`` and no answer are a model's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from structgp.data.documents import Document
from structgp.data.formats import format_parts as parts
from structgp.data.formats.format_parts import UNKNOWN, Placed, Reading
from structgp.data.sources.lines import Source
from structgp.errors import InputError

ANSWERS = ("accept", "reject", "ignore")
_OWN = ("text", "tokens", "spans", UNKNOWN)


def read_prodigy(source: Source, name: str, how: Reading) -> Iterator[Placed]:
    for given, line in parts.json_lines(source, name, how):
        yield Placed(_document(given, f"{name}:{line}", how), line)


def _document(given: dict[str, Any], place: str, how: Reading) -> Document:
    text, answer = parts.text_of(given, "text", place), given.get("answer")
    if answer is not None and answer not in ANSWERS:
        raise InputError(f"{place}.answer", f"{answer!r} is not known", f"use one of {', '.join(ANSWERS)}")
    meta = {key: value for key, value in given.items() if key not in _OWN}
    offsets = _offsets(given.get("tokens"), text, place)
    refused = answer in ("reject", "ignore")
    if refused and "spans" in given:
        meta["spans"] = given["spans"]
    found = parts.list_of(given.get("spans", []), f"{place}.spans")
    spans = [_span(span, f"{place}.spans[{n}]") for n, span in enumerate(found)]
    # If a model found no span, its score shows that it was asked.
    predicted = answer is None and all(p is not None for *_, p in spans) and bool(spans or "score" in given)
    score = meta.pop("score", None) if predicted else None
    document = parts.placed_document(text, offsets, place, id=parts.identity(meta), meta=meta)
    if refused or (answer is None and "spans" not in given):
        return document
    if answer == "accept":
        del meta["answer"]
    return parts.labelled(document, spans, place, how, given.get(UNKNOWN), predicted, score)


def _offsets(given: Any, text: str, place: str) -> tuple[tuple[int, int], ...]:
    if given is None:
        return parts.offsets_of(None, text, place)
    found = []
    for t, token in enumerate(parts.list_of(given, f"{place}.tokens")):
        at = f"{place}.tokens[{t}]"
        token = parts.an_object(token, at)
        start, stop = (parts.whole(token.get(key), f"{at}.{key}") for key in ("start", "end"))
        if "text" in token and text[start:stop] != token["text"]:
            problem = f"{token['text']!r}, but the text from {start} to {stop} is {text[start:stop]!r}"
            raise InputError(at, problem, "correct the offsets, which count characters from 0")
        found.append((start, stop))
    return tuple(found)


def _span(given: Any, place: str) -> tuple[int, int, str, float | None]:
    span = parts.an_object(given, place)
    start, stop = (parts.whole(span.get(key), f"{place}.{key}") for key in ("start", "end"))
    return start, stop, parts.name_of_label(span.get("label"), f"{place}.label"), span.get("probability")


def write_prodigy(documents: Iterable[Document], how: Reading) -> Iterator[str]:
    for document in documents:
        yield parts.as_line(_line(document))


def _line(document: Document) -> dict[str, Any]:
    text, given = document.text, parts.with_identity(document)
    first, last = (given.pop(key, None) for key in ("spans", "answer"))
    line: dict[str, Any] = {"text": text, "tokens": _tokens(document)}
    if document.prediction is None and document.labels is None:
        line |= {} if first is None else {"spans": first}
        return line | given | ({} if last is None else {"answer": last})
    line["spans"] = [_written(document, span) for span in parts.shown_spans(document)]
    if unknown := parts.unknown_tokens(document):
        line[UNKNOWN] = unknown
    line |= given
    if document.prediction is None:
        return line | {"answer": "accept"}
    score = document.prediction.score
    return line if score is None else line | {"score": parts.rounded(score)}


def _tokens(document: Document) -> list[Mapping[str, Any]]:
    ends = [*(start for start, _ in document.tokens[1:]), len(document.text)]
    return [
        {"text": document.text[a:b], "start": a, "end": b, "id": t, "ws": document.text[b:end] != ""}
        for t, ((a, b), end) in enumerate(zip(document.tokens, ends, strict=False))
    ]


def _written(document: Document, span: Any) -> dict[str, Any]:
    first = next(t for t, (start, _) in enumerate(document.tokens) if start == span.start)
    last = next(t for t, (_, stop) in enumerate(document.tokens) if stop == span.stop)
    found = {"start": span.start, "end": span.stop, "label": span.label}
    found |= {"token_start": first, "token_end": last}
    return found if span.probability is None else found | {"probability": parts.rounded(span.probability)}
