"""Plain text: one document per line, blank lines skipped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from structgp.data.documents import Document, tokenize
from structgp.data.formats.format_parts import Placed, Reading
from structgp.data.sources.lines import Source, iter_lines
from structgp.errors import InputError


def read_text(source: Source, name: str, how: Reading) -> Iterator[Placed]:
    for number, line in enumerate(iter_lines(source, encoding=how.encoding, name=name), start=1):
        if line.strip():
            yield Placed(Document(line, tokenize(line)), number)


def write_text(documents: Iterable[Document], how: Reading) -> Iterator[str]:
    """The texts alone: plain text has no labels."""
    for number, document in enumerate(documents):
        if "\n" in document.text or document.text.endswith("\r"):
            place = f"document {document.id or number}"
            raise InputError(place, "its text has several lines", "write another format, such as prodigy")
        yield document.text + "\n"
