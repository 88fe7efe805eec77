"""Reads files as they are, without templates, before there is a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from structgp.data.sources.attributes import format_attributes, iter_attributes
from structgp.data.sources.columns import format_sequence, iter_columns
from structgp.data.sources.json_lines import format_json, iter_json
from structgp.data.sources.lines import FileSequence
from structgp.data.sources.readers import Input, Reader
from structgp.errors import InputError

FORMATS = ("columns", "crfsuite", "jsonl")


class PlainReader(Reader):
    """Reads sequences of a format as they are: tokens are the cells of their lines, or their attributes."""

    missing = None

    def __init__(self, format: str = "columns") -> None:
        if format not in FORMATS:
            raise InputError("format", f"{format!r} is not known", f"use one of {', '.join(FORMATS)}")
        self.format = format  # type: ignore[misc]

    def sequences(
        self, source: Input, *, encoding: str = "utf-8", name: str | None = None
    ) -> Iterator[FileSequence]:
        given: Any = {"encoding": encoding, "name": name}
        if self.format == "jsonl":
            yield from iter_json(source, None, **given)  # type: ignore[arg-type]
        elif self.format == "crfsuite":
            yield from iter_attributes(source, **given)  # type: ignore[arg-type]
        else:
            for found in iter_columns(source, **given):
                words, tokens = [row[0] for row in found.rows], [list(row) for row in found.rows]
                yield FileSequence(found.rows, tokens, words, None, name or str(source), found.line)

    def with_labels(self, sequence: Any, labels: Sequence[str]) -> str:
        """The sequence with these labels after its columns. JSON lines, which need no labels, are returned
        without any."""
        if self.format == "jsonl":
            return format_json({key: v for key, v in sequence.given.items() if key != "labels"})
        if self.format == "crfsuite":
            return format_attributes(labels, sequence.tokens)
        return format_sequence([(*row, y) for row, y in zip(sequence.cells, labels, strict=True)])

    def to_json(self) -> dict[str, Any]:
        return {"format": self.format}
