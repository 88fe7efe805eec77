"""Lines of text files, and the sequences between their blank lines.

Only ``\\n`` or ``\\r\\n`` ends a line: other Unicode white space (the ideographic space U+3000, U+0085,
U+2028) is text, and occurs as a token in real data."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, BinaryIO, TypeVar

from structgp.data.opening import cannot_read, check_encoding
from structgp.errors import InputError

Source = str | os.PathLike[str] | BinaryIO | Iterable[str]
T = TypeVar("T")

_CHUNK = 1 << 16
BOM = "\ufeff"


@dataclass(frozen=True)
class FileSequence:
    """One sequence of a file.

    cells : its columns as written, the label included (CRFsuite's files: no cells); tokens : its features;
    words : the text to show for each token; labels : as written, None if the file has no labels;
    name, line : where it starts. Examples of JSON lines may be graphs and grids, with labels to match."""

    cells: Sequence[Sequence[str]]
    tokens: Any
    words: list[str]
    labels: Any
    name: str
    line: int


@dataclass(frozen=True)
class Labelled:
    """A labelled file, ready to fit or score. X : the tokens of each sequence; y : their labels, None
    where a label is missing; lines : where each sequence starts."""

    name: str
    X: list[Any]
    y: list[Any]
    lines: list[int] = field(default_factory=list)


def iter_sequences(
    source: Source, parse: Callable[[str, int], T], encoding: str, name: str
) -> Iterator[tuple[list[T], int]]:
    """Yields what ``parse(line, number)`` makes of the lines of each sequence, and the number of its first
    line.

    A blank line ends a sequence, which is handed over as soon as that line has been read. Memory is that
    of one sequence and one block of 64 KiB. Nothing is opened before the first sequence is asked for."""
    tokens: list[T] = []
    first = 0
    for number, line in enumerate(iter_lines(source, encoding=encoding, name=name), start=1):
        if line.strip(" \t"):
            first = first if tokens else number
            tokens.append(parse(line, number))
        elif tokens:
            yield tokens, first
            tokens = []
    if tokens:
        yield tokens, first


def read_all(sequences: Iterable[T], name: str) -> list[T]:
    """All sequences of a file; an :class:`InputError` if there are none."""
    found = list(sequences)
    if not found:
        raise InputError(name, "no tokens", "give one token per line and a blank line between sequences")
    return found


def iter_lines(source: Source, *, encoding: str = "utf-8", name: str | None = None) -> Iterator[str]:
    """Lines of a source without their ends and without a byte-order mark, read as they come.

    Arguments and errors are those of :func:`structgp.data.sources.iter_columns`."""
    name = name_of(source) if name is None else name
    found = _raw_lines(source, encoding, name)
    first = next(found, None)
    if first is None:
        return
    first = first.removeprefix(BOM)
    if first.rstrip("\r").count("\r") > 1:  # they are the text of a token, or end all lines
        second = next(found, "")
        if not second:
            problem = "lines end in carriage returns alone, as on old Macs"
            raise InputError(f"{name}:1", problem, r"convert them, for example with tr '\r' '\n'")
        found = chain([second], found)
    for line in chain([first], found):
        yield line.removesuffix("\r")


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
    good: list[str] = []
    with contextlib.suppress(UnicodeError):
        good.extend(decoder.decode(chunk[index : index + 1]) for index in range(len(chunk)))
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
            problem = f"a line of type {type(line).__name__} where str is needed"
            remedy = "decode the lines, or pass the binary stream itself"
            raise InputError(f"{name}:{number}", problem, remedy)
        parts = line.removesuffix("\n").split("\n")
        yield from parts
        number += len(parts)


def name_of(source: Any) -> str:
    """The name by which errors call a source that was not given one."""
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source)
    name = getattr(source, "name", None)
    if isinstance(name, str):
        return name
    return "<stream>" if hasattr(source, "read") else "<lines>"


def _not_decodable(place: str, encoding: str, error: UnicodeError) -> InputError:
    reason = getattr(error, "reason", None) or str(error)
    return InputError(place, f"not {encoding} text ({reason})", "state the file's encoding with encoding=")


def digest_of_file(path: str | os.PathLike[str], first: str = "") -> str:
    """SHA-256, in hexadecimal, of a text and the bytes of a file after it."""
    digest = hashlib.sha256(first.encode())
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise cannot_read(os.fspath(path), error) from error
    return digest.hexdigest()
