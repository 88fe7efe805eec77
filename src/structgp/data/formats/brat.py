"""brat's standoff: a folder with a text ``NAME.txt`` and its annotations ``NAME.ann`` for each document.

Entities (lines that begin with T) are read and written; relations, events and attributes are skipped. A
text without a file of annotations is not labelled. The probability of a predicted entity is written as a
note on it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from structgp.data.documents import Document, tokenize
from structgp.data.formats import format_parts as parts
from structgp.data.formats.format_parts import Placed, Reading
from structgp.data.opening import cannot_read
from structgp.data.sources.lines import iter_lines
from structgp.errors import InputError

_NUMBER = "[0-9]{1,15}"
_ENTITY = re.compile(rf"(T\S+)\t(\S+) ({_NUMBER} {_NUMBER}(?:;{_NUMBER} {_NUMBER})*)(?:\t.*)?")
_NOTE = re.compile(r"#\S+\tAnnotatorNotes (T\S+)\tprobability (\S+)")
_NAME = re.compile(r"[\w.-]+")


def read_brat(source: Any, name: str, how: Reading) -> Iterator[Placed]:
    """The documents of a folder in the order of their names, or the document whose text is the file
    ``source``."""
    path = Path(source)
    texts = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not texts:
        raise InputError(name, "no files NAME.txt in the folder", "name the folder of texts")
    for text in texts:
        yield Placed(_document(text, how), 1)


def _document(path: Path, how: Reading) -> Document:
    try:
        text = path.read_bytes().decode(how.encoding)
    except OSError as error:
        raise cannot_read(str(path), error) from error
    except UnicodeError as error:
        remedy = "state the encoding with encoding="
        raise InputError(str(path), f"not {how.encoding} text", remedy) from error
    document = Document(text, tokenize(text), id=path.stem)
    beside = path.with_suffix(".ann")
    if not beside.exists():
        return document
    entities: dict[str, tuple[int, int, str, int]] = {}
    shares: dict[str, float] = {}
    for number, line in enumerate(iter_lines(beside, encoding=how.encoding), start=1):
        place = f"{beside}:{number}"
        if line.startswith("T"):
            key, span = _entity(line, text, place)
            entities[key] = (*span, number)
        elif note := _NOTE.fullmatch(line):
            shares[note[1]] = _probability(note[2], place)
    for start, stop, label, number in entities.values():  # one by one, so that an error names the line
        parts.labelled(document, [(start, stop, label, None)], f"{beside}:{number}", how)
    spans = [(start, stop, label, shares.get(key)) for key, (start, stop, label, _) in entities.items()]
    predicted = bool(spans) and all(p is not None for *_, p in spans)
    return parts.labelled(document, spans, str(beside), how, predicted=predicted)


def _probability(text: str, place: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(place, f"the probability is {text!r}", "write a number from 0 to 1") from None


def _entity(line: str, text: str, place: str) -> tuple[str, tuple[int, int, str]]:
    found = _ENTITY.fullmatch(line)
    if found is None:
        raise InputError(place, f"{line[:60]!r} is not an entity", "write T1<tab>TYPE START STOP<tab>TEXT")
    first, *gaps, last = map(int, re.split("[ ;]", found[3]))
    # brat splits an entity where a line ends.
    for stop, start in zip(gaps[::2], gaps[1::2], strict=True):
        if text[stop:start].strip():
            problem = f"the entity has a gap from {stop} to {start}"
            raise InputError(place, problem, "make it one stretch of text, or leave it out")
    return found[1], (first, last, found[2])


def write_brat(documents: Iterable[Document], path: str | os.PathLike[str], how: Reading) -> None:
    """Writes each document to the folder ``path``, which is created if necessary: its text and, if it has
    labels or a prediction, its annotations. The files are named by the document's id, or by its number."""
    folder, used = Path(path), set()
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        remedy = "name a folder, new or old"
        raise InputError(str(path), f"cannot be made ({error.strerror})", remedy) from error
    for number, document in enumerate(documents, start=1):
        name = f"{number:06d}" if document.id is None else document.id
        if not _NAME.fullmatch(name) or name in used:
            problem = f"the id {name!r} {'is there twice' if name in used else 'cannot be a file name'}"
            remedy = "give documents ids of letters, digits, - and _"
            raise InputError(f"document {number}", problem, remedy)
        used.add(name)
        parts.write_text_file(folder / f"{name}.txt", [document.text], how)
        if document.labels is not None or document.prediction is not None:
            parts.write_text_file(folder / f"{name}.ann", _annotations(document, f"document {name}"), how)


def _annotations(document: Document, place: str) -> Iterator[str]:
    for n, span in enumerate(parts.shown_spans(document), start=1):
        if not span.label or set(span.label) & set(" \t\r\n"):
            problem = f"the type {span.label!r} is empty or has white space"
            raise InputError(place, problem, "rename it, for example with _")
        shown = " ".join(document.text[span.start : span.stop].split())
        yield f"T{n}\t{span.label} {span.start} {span.stop}\t{shown}\n"
        if span.probability is not None:
            yield f"#{n}\tAnnotatorNotes T{n}\tprobability {parts.rounded(span.probability)}\n"
