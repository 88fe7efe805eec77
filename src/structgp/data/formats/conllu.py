"""CoNLL-U: ten columns, comments, multiword ranges and empty nodes, all of which are kept.

A document is a sentence, and its tokens are the syntactic words: the lines with a whole number as ID.
Ranges (1-2) and empty nodes (1.1) are written again where they were. The text is built from the words and
from what MISC says about the space after them: SpaceAfter=No, or SpacesAfter= with its escapes. Labels are
in the column that ``field`` names, '_' where they are not known. Where a model has labelled a word, MISC
has its probability as Prob=."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence

from structgp.data.documents import Document
from structgp.data.formats.format_parts import DIGITS, Placed, Reading
from structgp.data.sources.lines import Source, iter_sequences
from structgp.errors import InputError, StructgpWarning

COLUMNS = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
_FIELDS = {"upos": 3, "xpos": 4, "deprel": 7}
_NAMED = {"feats": 5, "misc": 9}
_ESCAPES = {"\\": "\\\\", " ": "\\s", "\t": "\\t", "\n": "\\n", "\r": "\\r", "|": "\\p"}
_UNESCAPED = {escape[1]: character for character, escape in _ESCAPES.items()}

Row = tuple[str, ...]


def place_of_field(field: str) -> tuple[int, str]:
    """The column that ``field`` names, and the key within it, '' for the whole column."""
    column, _, name = field.partition(":")
    if field in _FIELDS:
        return _FIELDS[field], ""
    if column in _NAMED and name and not set(name) & set("=|\t "):
        return _NAMED[column], name
    remedy = "use upos, xpos, deprel, feats:NAME or misc:NAME, such as misc:NER"
    raise InputError("field", f"{field!r} is not known", remedy)


def read_conllu(source: Source, name: str, how: Reading) -> Iterator[Placed]:
    column, key = place_of_field(how.field)

    def parse(line: str, number: int) -> Row:
        if line.startswith("#"):
            return (line,)
        row = tuple(line.split("\t"))
        if len(row) != len(COLUMNS):
            problem = f"{len(row)} columns where CoNLL-U has 10, separated by tabs"
            raise InputError(f"{name}:{number}", problem, "correct the line; empty columns have _")
        if not row[0].replace("-", ".", 1).replace(".", "", 1).isdigit():
            remedy = "number words from 1; ranges are 1-2, empty nodes 1.1"
            raise InputError(f"{name}:{number}", f"the ID is {row[0]!r}", remedy)
        return row

    for lines, number in iter_sequences(source, parse, how.encoding, name):
        words = [line for line in lines if line[0].isdigit()]
        expected = [str(n) for n in range(1, len(words) + 1)]
        if [row[0] for row in words] != expected:
            wrong, due = next((row, n) for row, n in zip(words, expected, strict=True) if row[0] != n)
            place = f"{name}:{number + next(n for n, row in enumerate(lines) if row is wrong)}"
            problem = f"the ID is {wrong[0]} where {due} comes next"
            raise InputError(place, problem, "number words from 1, without gaps")
        text, offsets = _text_of(words)
        labels = tuple(_named(row[column], key) if key else _known(row[column]) for row in words)
        ids = [line[0].partition("=")[2].strip() for line in lines if line[0].startswith("# sent_id =")]
        known = labels if any(label is not None for label in labels) else None
        meta = {"conllu": tuple(lines)}
        yield Placed(Document(text, offsets, known, ids[0] if ids else None, meta), number)


def _known(cell: str) -> str | None:
    return None if cell == "_" else cell


def _named(cell: str, key: str) -> str | None:
    """The value of ``key`` in a column of key=value, None if it is not there."""
    return next((part[len(key) + 1 :] for part in cell.split("|") if part.startswith(f"{key}=")), None)


def _text_of(words: Sequence[Row]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The text, and the offsets of each word in it."""
    pieces, offsets, end = [], [], 0
    for t, row in enumerate(words):
        before = _unescaped(_named(row[9], "SpacesBefore") or "") if t == 0 else ""
        after = _named(row[9], "SpacesAfter")
        if after is None:
            after = "" if _named(row[9], "SpaceAfter") == "No" or t == len(words) - 1 else " "
        offsets.append((end + len(before), end + len(before) + len(row[1])))
        pieces += [before, row[1], _unescaped(after)]
        end += sum(map(len, pieces[-3:]))
    return "".join(pieces), tuple(offsets)


def _unescaped(text: str) -> str:
    found, rest = [], iter(text)
    for character in rest:
        mark = next(rest, "") if character == "\\" else ""
        found.append(_UNESCAPED.get(mark, character + mark) if mark else character)
    return "".join(found)


def _escaped(text: str) -> str:
    return "".join(_ESCAPES.get(character, character) for character in text)


def write_conllu(documents: Iterable[Document], how: Reading) -> Iterator[str]:
    column, key = place_of_field(how.field)
    empty = 0
    for number, document in enumerate(documents):
        if not document.tokens:
            empty += 1
            continue
        lines = document.meta.get("conllu") or _lines(document, f"document {document.id or number}")
        predicted = document.prediction
        labels = document.labels if predicted is None else predicted.labels
        shares = predicted.probabilities if predicted is not None else ()
        words = iter(range(len(document.tokens)))
        for line in lines:
            row = list(line)
            if line[0].isdigit():
                t = next(words)
                label = "_" if labels is None else labels[t] or "_"
                row[column] = _with(row[column], key, label) if key else label
                if shares:
                    row[9] = _with(row[9], "Prob", f"{shares[t]:.{DIGITS}f}")
            yield "\t".join(row) + "\n"
        yield "\n"
    if empty:
        warnings.warn(f"{empty} documents without tokens are left out", StructgpWarning, stacklevel=2)


def _with(cell: str, key: str, value: str) -> str:
    """A column of key=value in which ``key`` has this value; the value '_' removes it."""
    parts = [] if cell == "_" else cell.split("|")
    kept = [f"{key}={value}" if part.startswith(f"{key}=") else part for part in parts]
    kept += [] if any(part.startswith(f"{key}=") for part in parts) else [f"{key}={value}"]
    return "|".join(part for part in kept if part != f"{key}=_") or "_"


def _lines(document: Document, place: str) -> list[Row]:
    """The lines of a document that did not come from CoNLL-U."""
    text, tokens = document.text, document.tokens
    lines: list[Row] = []
    if document.id is not None:
        lines.append((f"# sent_id = {document.id}",))
    if "\n" not in text and "\r" not in text:
        lines.append((f"# text = {text}",))
    ends = [*(start for start, _ in tokens[1:]), len(text)]
    for t, ((start, stop), end) in enumerate(zip(tokens, ends, strict=True)):
        word, after = text[start:stop], text[stop:end]
        if set(word) & set("\t\n\r"):
            problem = f"{word!r} has a tab or line end"
            raise InputError(f"{place}, token {t}", problem, "leave the token out")
        misc = [f"SpacesBefore={_escaped(text[:start])}"] if t == 0 and start else []
        last = t == len(tokens) - 1
        if after != ("" if last else " "):
            misc.append("SpaceAfter=No" if not after else f"SpacesAfter={_escaped(after)}")
        lines.append((str(t + 1), word, *"_______", "|".join(misc) or "_"))
    return lines
