"""Column files, as CoNLL's shared tasks and CRF++ use them.

One token per line, its columns separated by spaces and tabs, a blank line between sequences, the
label (where there is one) in the last column::

    He      PRP  B-NP
    reckons VBZ  B-VP

    Yes     UH   O
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from structgp.data.atomic import atomic_write
from structgp.data.sources.lines import BOM, Source, check_encoding, iter_sequences, name_of, read_all
from structgp.errors import InputError

# Only space and tab separate columns: other white space is text.
_CELL = re.compile(r"[^ \t]+")


@dataclass(frozen=True)
class ColumnSequence:
    """The rows of one sequence, each with the same number of cells; line : the number of the first one in
    the file, counted from 1."""

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
            place = f"{self.name}:{self.sequences[0].line}"
            problem = "1 column where a feature and a label are needed"
            raise InputError(place, problem, "add the label as the last column")
        features = [[row[:-1] for row in sequence.rows] for sequence in self.sequences]
        labels = [[row[-1] for row in sequence.rows] for sequence in self.sequences]
        return features, labels


def iter_columns(
    source: Source | ColumnFile, *, encoding: str = "utf-8", name: str | None = None
) -> Iterator[ColumnSequence]:
    """Read sequences one by one.

    Each is handed over as soon as the blank line after it has been read, so that a pipe can be tagged while
    it is being written. Memory is that of one sequence and one block of 64 KiB; a million rows take a few
    seconds. Nothing is opened before the first sequence is asked for.

    Parameters
    ----------
    source : a path, a binary stream such as ``sys.stdin.buffer``, or lines of text (a text stream or any
        iterable of str, with or without line ends). Python's text streams have line-end rules of their own;
        the path or the binary stream is the exact way. A file that :func:`read_columns` has read is used as
        it is.
    encoding : of a path or a binary stream; a byte-order mark at the start is skipped.
    name : what errors call the source; by default the path or the stream's own name.

    An InputError names ``name:line`` for a row whose number of columns is not that of the first row and for
    bytes that are not in ``encoding``, and ``name`` for a file that cannot be read and for an encoding that
    does not exist. Sequences before the error have been handed over by then.

    Example
    -------
    >>> [sequence.rows for sequence in iter_columns(["two CD QTY", "eggs NNS NAME"])]
    [(('two', 'CD', 'QTY'), ('eggs', 'NNS', 'NAME'))]
    """
    if isinstance(source, ColumnFile):
        yield from source.sequences
        return
    place = name_of(source) if name is None else name
    first: list[int] = []  # width and line of the first row

    def parse(line: str, number: int) -> tuple[str, ...]:
        row = tuple(_CELL.findall(line))
        if not first:
            first.extend((len(row), number))
        if len(row) != first[0]:
            raise _wrong_width(f"{place}:{number}", len(row), first[0], f"line {first[1]}")
        return row

    for rows, line in iter_sequences(source, parse, encoding, place):
        yield ColumnSequence(tuple(rows), line)


def read_columns(source: Source, *, encoding: str = "utf-8", name: str | None = None) -> ColumnFile:
    """Read a whole column file; arguments and errors are those of :func:`iter_columns`.

    A file without a single row is an :class:`InputError` too.

    Example
    -------
    >>> file = read_columns(["two CD QTY", "eggs NNS NAME"])
    >>> file.split_labels()
    ([[('two', 'CD'), ('eggs', 'NNS')]], [['QTY', 'NAME']])
    """
    name = name_of(source) if name is None else name
    return ColumnFile(name, read_all(iter_columns(source, encoding=encoding, name=name), name))


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

    An InputError names the sequence and row (counted from 1) for whatever would not read back as it was: a
    cell that is empty or contains a space, tab or line end, a row of another width than the first, an empty
    sequence or row, text that the encoding cannot hold, a byte-order mark at the start; it names ``path``
    when that cannot be written."""
    path_name = os.fspath(path)
    check_encoding(encoding, path_name)
    width = 0
    with atomic_write(path, "w", encoding=encoding) as out:
        for number, sequence in enumerate(sequences, start=1):
            rows = sequence.rows if isinstance(sequence, ColumnSequence) else list(sequence)
            if not rows:
                raise InputError(f"{path_name}: sequence {number}", "no rows", "leave the sequence out")
            width = width or len(rows[0])
            for index, row in enumerate(rows, start=1):
                place = f"{path_name}: sequence {number}, row {index}"
                check_row(row, place, width)
                if number == index == 1 and row[0].startswith(BOM):
                    problem = "a byte-order mark in front of the first cell would not read back"
                    raise InputError(place, problem, "remove it")
            text = format_sequence(rows)
            if not _survives(text, encoding):
                raise _not_encodable(rows, f"{path_name}: sequence {number}", encoding)
            out.write(text + "\n")


def check_row(row: Sequence[str], place: str, width: int) -> None:
    if len(row) == 0:
        raise InputError(place, "no cells", "leave the row out")
    if len(row) != width:
        raise _wrong_width(place, len(row), width, "the first row")
    for number, cell in enumerate(row, start=1):
        if not cell:
            raise InputError(place, f"cell {number} is empty", "put a placeholder such as _ there")
        if any(mark in cell for mark in " \t\n\r"):
            problem = f"cell {number} ({cell!r}) contains a space, tab or line end"
            raise InputError(place, problem, "use another character such as _ instead")


def _wrong_width(place: str, found: int, expected: int, whose: str) -> InputError:
    columns = "column" if abs(found - expected) == 1 else "columns"
    problem = f"{found} column{'s' if found != 1 else ''} where {whose} has {expected}"
    remedy = f"remove the extra {columns} or the line"
    if found < expected:
        remedy = f"add the missing {columns} or remove the line"
    return InputError(place, problem, remedy)


def _survives(text: str, encoding: str) -> bool:
    """True if text can be encoded and comes back equal (Shift-JIS turns a yen sign into ``\\``)."""
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
