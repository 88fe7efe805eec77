"""Column files, as CoNLL's shared tasks and CRF++ use them.

One token a line, its columns separated by spaces and tabs, a blank line between sequences, the
label (where there is one) in the last column::

    He      PRP  B-NP
    reckons VBZ  B-VP

    Yes     UH   O

Only space and tab separate columns and only ``\\n`` or ``\\r\\n`` ends a line: other Unicode white
space (the ideographic space U+3000, U+0085, U+2028) is text, and occurs as a token in real data.
"""

from __future__ import annotations

import codecs
import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from structgp.data.atomic import atomic_write
from structgp.errors import InputError

Source = str | os.PathLike[str] | BinaryIO | Iterable[str]

_CELL = re.compile(r"[^ \t]+")
_CHUNK = 1 << 16
_BOM = "\ufeff"
_CANNOT_OPEN = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "name a file in it",
    errno.EACCES: "ask for the right to read it",
    errno.EPERM: "ask for the right to read it",
}


@dataclass(frozen=True)
class ColumnSequence:
    """The rows of one sequence, each with the same number of cells, and where it stands.

    ``line`` is the number of its first row in the file, counted from 1.
    """

    rows: tuple[tuple[str, ...], ...]
    line: int


@dataclass(frozen=True)
class ColumnFile:
    """All sequences of a file; every row has ``n_columns`` cells."""

    name: str
    sequences: list[ColumnSequence]

    @property
    def n_columns(self) -> int:
        """Number of columns, the label's included; 0 when there are no sequences."""
        return len(self.sequences[0].rows[0]) if self.sequences else 0

    def split_labels(self) -> tuple[list[list[tuple[str, ...]]], list[list[str]]]:
        """Features and labels: per sequence, each row without its last cell, and the last cells."""
        if self.n_columns == 1:
            raise InputError(
                f"{self.name}:{self.sequences[0].line}",
                "1 column where a feature and a label are needed",
                "add the label as the last column",
            )
        features = [[row[:-1] for row in sequence.rows] for sequence in self.sequences]
        labels = [[row[-1] for row in sequence.rows] for sequence in self.sequences]
        return features, labels


def iter_columns(
    source: Source, *, encoding: str = "utf-8", name: str | None = None
) -> Iterator[ColumnSequence]:
    """Read sequences one by one.

    Each is handed over as soon as the blank line after it has been read, so that a pipe can be
    tagged while it is being written. Memory is that of one sequence and one block of 64 KiB; a
    million rows take a few seconds. Nothing is opened before the first sequence is asked for.

    Parameters
    ----------
    source : a path, a binary stream such as ``sys.stdin.buffer``, or lines of text (a text stream
        or any iterable of str, with or without line ends). Python's text streams have line-end
        rules of their own; the path or the binary stream is the exact way.
    encoding : of a path or a binary stream; a byte-order mark at the start is skipped.
    name : what errors call the source; by default the path or the stream's own name.

    Raises
    ------
    InputError
        At ``name:line``, for a row whose number of columns is not that of the first row and for
        bytes that are not in ``encoding``; at ``name``, for a file that cannot be read and for an
        encoding that does not exist. Sequences before the fault have been handed over by then.
    """
    name = name_of(source) if name is None else name
    rows: list[tuple[str, ...]] = []
    first_line = 0  # of the sequence being read
    width, width_line = 0, 0  # of the first row of the file
    for number, line in enumerate(iter_lines(source, encoding=encoding, name=name), start=1):
        row = tuple(_CELL.findall(line))
        if not row:
            if rows:
                yield ColumnSequence(tuple(rows), first_line)
                rows = []
            continue
        if not width:
            width, width_line = len(row), number
        if len(row) != width:
            raise _wrong_width(f"{name}:{number}", len(row), width, f"line {width_line}")
        if not rows:
            first_line = number
        rows.append(row)
    if rows:
        yield ColumnSequence(tuple(rows), first_line)


def read_columns(source: Source, *, encoding: str = "utf-8", name: str | None = None) -> ColumnFile:
    """Read a whole column file; arguments and errors are those of :func:`iter_columns`.

    A file without a single row is an :class:`InputError` too.
    """
    name = name_of(source) if name is None else name
    sequences = list(iter_columns(source, encoding=encoding, name=name))
    if not sequences:
        raise InputError(
            name, "no rows", "give one token a line and a blank line between sequences"
        )
    return ColumnFile(name, sequences)


def format_sequence(rows: Iterable[Sequence[str]]) -> str:
    """Rows as text: cells joined by tabs, ``\\n`` after each row, no blank line at the end."""
    return "".join("\t".join(row) + "\n" for row in rows)


def write_columns(
    path: str | os.PathLike[str],
    sequences: Iterable[ColumnSequence | Iterable[Sequence[str]]],
    *,
    encoding: str = "utf-8",
) -> None:
    """Write sequences, a blank line after each, so that :func:`read_columns` gives them back.

    The file appears whole or not at all (:func:`structgp.data.atomic.atomic_write`); ``sequences``
    may be a generator, of which one sequence is held at a time.

    Raises
    ------
    InputError
        At the sequence and row (counted from 1) for whatever would not read back as it was: a cell
        that is empty or holds a space, tab or line end, a row of another width than the first, an
        empty sequence or row, text that the encoding cannot hold, a byte-order mark at the start.
        At ``path`` when it cannot be written.
    """
    path_name = os.fspath(path)
    check_encoding(encoding, path_name)
    width = 0
    with atomic_write(path, "w", encoding=encoding) as out:
        for number, sequence in enumerate(sequences, start=1):
            rows = sequence.rows if isinstance(sequence, ColumnSequence) else list(sequence)
            if not rows:
                raise InputError(
                    f"{path_name}: sequence {number}", "no rows", "leave the sequence out"
                )
            width = width or len(rows[0])
            for index, row in enumerate(rows, start=1):
                place = f"{path_name}: sequence {number}, row {index}"
                _check_row(row, place, width)
                if number == index == 1 and row[0].startswith(_BOM):
                    raise InputError(
                        place,
                        "a byte-order mark in front of the first cell would not read back",
                        "remove it",
                    )
            text = format_sequence(rows)
            if not _survives(text, encoding):
                raise _not_encodable(rows, f"{path_name}: sequence {number}", encoding)
            out.write(text + "\n")


def iter_lines(
    source: Source, *, encoding: str = "utf-8", name: str | None = None
) -> Iterator[str]:
    """Lines of a source without their ends and without a byte-order mark, read as they come.

    Arguments and errors are those of :func:`iter_columns`.
    """
    name = name_of(source) if name is None else name
    mark = _BOM
    for line in _raw_lines(source, encoding, name):
        yield line.removeprefix(mark).removesuffix("\r")
        mark = ""


def _raw_lines(source: Source, encoding: str, name: str) -> Iterator[str]:
    if isinstance(source, (str, os.PathLike)):
        check_encoding(encoding, name)
        try:
            stream = open(source, "rb")  # noqa: SIM115
        except OSError as error:
            raise cannot_read(name, error) from error
        with stream:
            yield from _decoded_lines(stream, encoding, name)
    elif hasattr(source, "read") and isinstance(source.read(0), bytes):
        check_encoding(encoding, name)
        yield from _decoded_lines(source, encoding, name)
    else:
        yield from _text_lines(source, name)


def _decoded_lines(stream: Any, encoding: str, name: str) -> Iterator[str]:
    """Lines of a binary stream, split after decoding: a newline byte may be half a character."""
    decoder = codecs.getincrementaldecoder(encoding)()
    # read1 returns what a pipe holds now; read would wait for a full block.
    read = getattr(stream, "read1", stream.read)
    number, rest, failure = 1, "", None
    while True:
        try:
            chunk = read(_CHUNK)
        except OSError as error:
            raise cannot_read(name, error) from error
        state = decoder.getstate()
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeError as error:
            decoder.setstate(state)
            text, failure = _decodable_part(decoder, chunk), error
        *lines, rest = (rest + text).split("\n")
        yield from lines
        number += len(lines)
        if failure is not None:
            raise _not_decodable(f"{name}:{number}", encoding, failure) from failure
        if not chunk:
            break
    if rest:
        yield rest


def _decodable_part(decoder: codecs.IncrementalDecoder, chunk: bytes) -> str:
    """The text before the first fault in ``chunk``, found byte by byte to place it on its line."""
    good = []
    try:
        for index in range(len(chunk)):
            good.append(decoder.decode(chunk[index : index + 1]))  # noqa: PERF401
    except UnicodeError:
        pass
    return "".join(good)


def _text_lines(source: Any, name: str) -> Iterator[str]:
    lines = iter(source)
    number = 1
    while True:
        try:
            line = next(lines)
        except StopIteration:
            return
        except UnicodeError as error:
            # A text stream decodes ahead of the line it hands out: only the file is certain.
            used = getattr(source, "encoding", None) or "decodable"
            raise _not_decodable(name, used, error) from error
        except OSError as error:
            raise cannot_read(name, error) from error
        if not isinstance(line, str):
            raise InputError(
                f"{name}:{number}",
                f"a line of type {type(line).__name__} where str is needed",
                "decode the lines, or pass the binary stream itself",
            )
        parts = line.removesuffix("\n").split("\n")
        yield from parts
        number += len(parts)


def name_of(source: Source) -> str:
    """What errors call a source that was given no name."""
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source)
    name = getattr(source, "name", None)
    if isinstance(name, str):
        return name
    return "<stream>" if hasattr(source, "read") else "<lines>"


def check_encoding(encoding: str, place: str) -> None:
    """Raise an :class:`InputError` at ``place`` where Python has no such encoding of text."""
    try:
        "".encode(encoding)  # refuses what is a codec but not of text, such as hex
    except (LookupError, ValueError) as error:
        raise InputError(
            place,
            f"unknown encoding {encoding!r}",
            "name one that Python knows, such as utf-8, euc-jp or latin-1, with --encoding",
        ) from error


def _check_row(row: Sequence[str], place: str, width: int) -> None:
    if len(row) == 0:
        raise InputError(place, "no cells", "leave the row out")
    if len(row) != width:
        raise _wrong_width(place, len(row), width, "the first row")
    for number, cell in enumerate(row, start=1):
        if not cell:
            raise InputError(place, f"cell {number} is empty", "put a placeholder such as _ there")
        if any(mark in cell for mark in " \t\n\r"):
            raise InputError(
                place,
                f"cell {number} ({cell!r}) holds a space, tab or line end",
                "put another character such as _ in its place",
            )


def _wrong_width(place: str, found: int, expected: int, whose: str) -> InputError:
    extra = abs(found - expected)
    columns = "column" if extra == 1 else "columns"
    return InputError(
        place,
        f"{found} column{'s' if found != 1 else ''} where {whose} has {expected}",
        f"add the missing {columns} or remove the line"
        if found < expected
        else f"remove the extra {columns} or the line",
    )


def _survives(text: str, encoding: str) -> bool:
    """Whether text can be encoded and comes back equal (Shift-JIS turns a yen sign into ``\\``)."""
    try:
        return text.encode(encoding).decode(encoding) == text
    except UnicodeError:
        return False


def _not_encodable(rows: Sequence[Sequence[str]], place: str, encoding: str) -> InputError:
    # Each cell may survive alone where all together do not: an escape character in ISO-2022-JP.
    what = "text"
    for number, row in enumerate(rows, start=1):
        lost = [cell for cell in row if not _survives(cell, encoding)]
        if lost:
            place, what = f"{place}, row {number}", f"cell {lost[0]!r}"
            break
    return InputError(place, f"{what} cannot be written in {encoding}", "replace it or use utf-8")


def _not_decodable(place: str, encoding: str, error: UnicodeError) -> InputError:
    reason = getattr(error, "reason", None) or str(error)
    return InputError(
        place, f"not {encoding} text ({reason})", "state the file's encoding with --encoding"
    )


def cannot_read(place: str, error: OSError) -> InputError:
    """What to say where the system would not open or read a file."""
    reason = error.strerror or str(error)
    remedy = _CANNOT_OPEN.get(error.errno or 0, "check the file and the disk")
    return InputError(place, f"cannot be read ({reason})", remedy)
