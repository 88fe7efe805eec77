"""The command convert; it needs no model, and no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click

from structgp.data.documents import Document
from structgp.data.formats import read, write
from structgp.data.formats.file_formats import format_of

_STREAM = "-"


def convert(
    source: str, target: str, from_format: str | None, to_format: str | None, encoding: str, **how: Any
) -> None:
    """The command convert."""
    told = {name: value for name, value in how.items() if value is not None}
    start = from_format or format_of(source, "--from")
    end = to_format or format_of(target, "--to")
    given: Any = sys.stdin.buffer if source == _STREAM else source
    count = 0

    def counted() -> Iterator[Document]:
        nonlocal count
        for document in read(given, start, encoding=encoding, **told):
            count += 1
            yield document

    write(counted(), "/dev/stdout" if target == _STREAM else target, end, encoding=encoding, **told)
    click.echo(f"wrote {count} document{'' if count == 1 else 's'} to {target}", err=True)
