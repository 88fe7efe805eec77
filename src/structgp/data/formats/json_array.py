"""The items of a JSON list in a file, one by one: memory is that of the largest item."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator
from typing import Any

from structgp.data.opening import cannot_read, check_encoding
from structgp.data.sources.lines import BOM, Source, iter_lines
from structgp.errors import InputError

_SPACE = " \t\r\n"
_CHUNK = 1 << 16


def json_items(source: Source, name: str, encoding: str) -> Iterator[tuple[Any, int]]:
    """Each item of the list that a file holds, and the line on which it starts. JSON lines, which have one
    item per line and no list around them, are read too."""
    text = _Text(_chunks(source, encoding, name), name)
    first = text.skip_space()
    if first == "[":
        yield from _listed(text, name)
        return
    while text.skip_space():
        yield text.item()


def _listed(text: _Text, name: str) -> Iterator[tuple[Any, int]]:
    text.take()
    if text.skip_space() == "]":
        text.take()
    else:
        while True:
            yield text.item()
            mark = text.skip_space()
            if mark not in (",", "]"):
                problem = f"{mark!r} where ',' or ']' is needed" if mark else "the list does not end"
                raise InputError(text.place, problem, "check that the file is whole")
            text.take()
            if mark == "]":
                break
            text.skip_space()
    if text.skip_space():
        raise InputError(text.place, "text after the end of the list", "remove it")


def _chunks(source: Source, encoding: str, name: str) -> Iterator[str]:
    """The text in pieces. A list may be one long line, which must not be held as a whole."""
    check_encoding(encoding, name)
    if isinstance(source, str | os.PathLike):
        try:
            stream = open(source, "rb")  # noqa: SIM115
        except OSError as error:
            raise cannot_read(name, error) from error
        with stream:
            yield from _decoded(stream, encoding, name)
    elif hasattr(source, "read") and isinstance(source.read(0), bytes):
        yield from _decoded(source, encoding, name)
    else:
        yield from (line + "\n" for line in iter_lines(source, encoding=encoding, name=name))


def _decoded(stream: Any, encoding: str, name: str) -> Iterator[str]:
    decoder, n_lines, first = codecs.getincrementaldecoder(encoding)(), 1, True
    while True:
        try:
            chunk = stream.read(_CHUNK)
            text = decoder.decode(chunk, final=not chunk)
        except OSError as error:
            raise cannot_read(name, error) from error
        except UnicodeError as error:
            reason = getattr(error, "reason", None) or str(error)
            problem = f"not {encoding} text after line {n_lines} ({reason})"
            raise InputError(name, problem, "state the file's encoding with encoding=") from error
        yield text.removeprefix(BOM) if first and text else text
        n_lines, first = n_lines + text.count("\n"), first and not text
        if not chunk:
            return


class _Text:
    """The pieces as one text, of which only the part that is being parsed is held."""

    def __init__(self, pieces: Iterator[str], name: str) -> None:
        self._pieces, self._name = pieces, name
        self._held, self._at, self._line = "", 0, 1
        self._decoder = json.JSONDecoder()

    @property
    def place(self) -> str:
        return f"{self._name}:{self._line}"

    def skip_space(self) -> str:
        """The next character that is not white space; '' at the end."""
        while True:
            while self._at < len(self._held) and self._held[self._at] in _SPACE:
                self._line += self._held[self._at] == "\n"
                self._at += 1
            if self._at < len(self._held):
                return self._held[self._at]
            if not self._more(1):
                return ""

    def take(self) -> None:
        self._at += 1

    def item(self) -> tuple[Any, int]:
        """The value that starts here, and its line. Until the value is complete, ever more pieces are read
        at a time, so that the cost stays linear."""
        self.skip_space()
        line, wanted = self._line, 1
        while True:
            try:
                value, end = self._decoder.raw_decode(self._held, self._at)
            except RecursionError:
                raise InputError(self.place, "nested too deeply", "check the file") from None
            except json.JSONDecodeError as error:
                at = error.pos - self._at + 1
                if self._more(wanted):
                    wanted *= 2
                    continue
                problem = f"not JSON ({error.msg} at character {at} of the item)"
                raise InputError(f"{self._name}:{line}", problem, "check that the file is whole") from None
            except ValueError:  # a number of thousands of digits
                problem = "a number is too long to be read"
                raise InputError(f"{self._name}:{line}", problem, "check the file") from None
            self._line += self._held.count("\n", self._at, end)
            self._at = end
            return value, line

    def _more(self, n_pieces: int) -> bool:
        """Reads ``n_pieces`` more pieces; False if none were left."""
        found = [piece for _, piece in zip(range(n_pieces), self._pieces, strict=False)]
        self._held = self._held[self._at :] + "".join(found)
        self._at = 0
        return bool(found)
