"""Shared by several formats: options, JSON with places in errors, spans, and tokens whose label is not
known."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from structgp.data.atomic import atomic_write
from structgp.data.documents import Document, Prediction, TextSpan, spans_to_labels, token_spans, tokenize
from structgp.data.sources.lines import Source, iter_lines
from structgp.data.span_labels import known_scheme
from structgp.errors import InputError

DIGITS = 6
_HALF = re.compile("[\ud800-\udfff]")
UNKNOWN = "unlabelled"
"""Key for something that these formats have no word for: (start, stop) of tokens whose label is not
known."""


@dataclass(frozen=True)
class Reading:
    """How files are read and written. encoding : of the text. scheme : tagging scheme of labels made from
    spans. snap : whether a span that cuts a token grows to hold all of it. field : where the labels are in
    CoNLL-U: 'upos', 'xpos', 'deprel', 'feats:NAME' or 'misc:NAME'. missing : in CoNLL columns, the text
    that stands for a label that is not known; None if there is none."""

    encoding: str = "utf-8"
    scheme: str = "BIO"
    snap: bool = False
    field: str = "upos"
    missing: str | None = "?"

    def __post_init__(self) -> None:
        object.__setattr__(self, "scheme", known_scheme(self.scheme))


class Placed(NamedTuple):
    """A document, and the number of the line on which it starts, counted from 1."""

    document: Document
    line: int


def json_lines(source: Source, name: str, how: Reading) -> Iterator[tuple[dict[str, Any], int]]:
    """The objects of a file that has one per line, each with the number of its line; blank lines are
    skipped."""
    for number, line in enumerate(iter_lines(source, encoding=how.encoding, name=name), start=1):
        if line.strip(" \t"):
            yield parsed(line, f"{name}:{number}"), number


def parsed(text: str, place: str) -> dict[str, Any]:
    """The object that a text holds."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        at = f" at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise InputError(place, f"not JSON ({reason}{at})", "write one object per line") from None
    return an_object(found, place)


def an_object(found: Any, place: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise InputError(place, f"expected an object, got {_what(found)}", 'write {"text": "...", ...}')
    return found


def text_of(given: Mapping[str, Any], key: str, place: str) -> str:
    if key not in given:
        known = ", ".join(map(str, given)) or "none"
        raise InputError(place, f"no {key!r} among its keys ({known})", f'add "{key}": "..."')
    if not isinstance(given[key], str):
        problem = f"expected a string, got {_what(given[key])}"
        raise InputError(f"{place}.{key}", problem, "put it in quotes")
    return _whole_characters(given[key], f"{place}.{key}")


def _whole_characters(text: str, place: str) -> str:
    """The text, if it can be written again: JSON may hold halves of characters, which no encoding has."""
    half = _HALF.search(text)
    if half is not None:
        problem = f"half of a character (\\u{ord(half[0]):x}) at {half.start()}"
        raise InputError(place, problem, "remove it; a text was cut within a pair of UTF-16 units")
    return text


def list_of(given: Any, place: str) -> list[Any]:
    if not isinstance(given, list):
        raise InputError(place, f"expected a list, got {_what(given)}", "write [...]")
    return given


def whole(given: Any, place: str) -> int:
    """An offset, checked to be a whole number."""
    if type(given) is not int:
        raise InputError(place, f"expected a whole number, got {given!r}", "count characters from 0")
    return given


def share(given: Any, place: str) -> float | None:
    """A probability, checked; None if there is none."""
    if given is not None and (type(given) not in (int, float) or not 0 <= given <= 1):
        raise InputError(place, f"expected a probability, got {given!r}", "write a number from 0 to 1")
    return given


def name_of_label(given: Any, place: str) -> str:
    if not isinstance(given, str):
        raise InputError(place, f"expected the label as a string, got {given!r}", "put it in quotes")
    return _whole_characters(given, place)


def identity(meta: dict[str, Any]) -> str | None:
    """The document's name: its 'id' as text. The id is removed from ``meta`` if the name is written as the
    same id."""
    found = meta.get("id")
    if isinstance(found, str):
        del meta["id"]
    return None if found is None else str(found)


def with_identity(document: Document) -> dict[str, Any]:
    """What a file says about a document besides its text and labels, including its name."""
    return ({} if document.id is None else {"id": document.id}) | dict(document.meta)


def _what(value: Any) -> str:
    names = {"dict": "an object", "list": "a list", "str": "a string", "NoneType": "null"}
    names |= {"bool": "true or false", "int": "a number", "float": "a number"}
    return names.get(type(value).__name__, type(value).__name__)


def offsets_of(given: Any, text: str, place: str) -> tuple[tuple[int, int], ...]:
    """The tokens that a file gives, or, if it gives none (None), those that the tokenizer finds."""
    if given is None:
        return tokenize(text)
    found = []
    for t, place_of in enumerate(list_of(given, place)):
        at = f"{place}[{t}]"
        if not isinstance(place_of, list) or len(place_of) != 2:
            raise InputError(at, f"expected [start, stop], got {place_of!r}", "write two whole numbers")
        found.append((whole(place_of[0], at), whole(place_of[1], at)))
    return tuple(found)


def placed_document(text: str, tokens: Any, place: str, **more: Any) -> Document:
    """A document whose errors name its place in the file."""
    try:
        return Document(text, tokens, **more)
    except InputError as error:
        where = error.place.partition(".")[2]
        raise InputError(f"{place}.{where}" if where else place, error.problem, error.remedy) from error


def labelled(
    document: Document,
    spans: Sequence[Sequence[Any]],
    place: str,
    how: Reading,
    unknown: Any = None,
    predicted: bool = False,
    score: float | None = None,
) -> Document:
    """The document with labels from spans (start, stop, label, probability), and None for the tokens in
    ``unknown``; or, if the spans are ``predicted``, the document with a prediction."""
    found = token_spans(document.text, document.tokens, spans, place, how.snap)
    labels: list[str | None] = [*spans_to_labels(found, len(document.tokens), how.scheme, place)]
    if predicted:
        given = [document.text_span(*of, share(p, place)) for of, (*_, p) in zip(found, spans, strict=True)]
        score = share(score, f"{place}.score")
        return replace(document, prediction=Prediction(tuple(labels), (), tuple(sorted(given)), score))
    if unknown is not None:
        for at in map(list, offsets_of(unknown, document.text, f"{place}.{UNKNOWN}")):
            for t, token in enumerate(document.tokens):
                labels[t] = None if list(token) == at else labels[t]
    return replace(document, labels=tuple(labels))


def shown_spans(document: Document) -> tuple[TextSpan, ...]:
    """The spans to write: predicted ones where there is a prediction, else the labelled ones."""
    return document.spans if document.prediction is None else document.prediction.spans


def unknown_tokens(document: Document) -> list[list[int]]:
    """(start, stop) of tokens whose label is not known, in a document with labels."""
    labels = document.prediction.labels if document.prediction else document.labels
    both = zip(document.tokens, labels or (), strict=False)
    return [list(token) for token, label in both if label is None]


def rounded(probability: float) -> float:
    return round(float(probability), DIGITS)


def write_text_file(path: str | os.PathLike[str], pieces: Iterable[str], how: Reading) -> None:
    """Writes pieces of text to a file, which appears whole or not at all."""
    with atomic_write(path, "w", encoding=how.encoding) as out:
        try:
            out.writelines(pieces)
        except UnicodeEncodeError as error:
            lost = error.object[error.start : error.end]
            problem = f"{lost!r} cannot be written in {how.encoding}"
            remedy = "use utf-8, which has all characters but halves of pairs (surrogates)"
            raise InputError(os.fspath(path), problem, remedy) from None


def as_line(given: Mapping[str, Any]) -> str:
    return json.dumps(given, ensure_ascii=False) + "\n"
