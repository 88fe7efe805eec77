"""Wapiti's commands in a template: cells, tests of cells, and parts of cells.

=======================  =====================================================================
``%x[row,column]``       a cell, as in CRF++
``%t[row,column,"re"]``  ``true`` where the expression is found in the cell, else ``false``
``%m[row,column,"re"]``  the part of the cell that it finds first, nothing if it finds none
=======================  =====================================================================

Upper-case commands (``%X``, ``%T``, ``%M``) give their result in lower case. A row counts from the
current token; with ``@`` in front it counts from the start of the sequence (``@1`` is the first token) or
from its end (``@-1`` is the last). Before the sequence a cell is ``_x-1`` to ``_x-4``, then ``_x-#``;
after it ``_x+1`` to ``_x+4``, then ``_x+#``.

Expressions are Wapiti's, translated to Python's (:func:`translate`). Where text is not ASCII they see
characters, and Unicode's classes of letters and capitals; Wapiti sees bytes."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from structgp.errors import InputError

_COMMAND = re.compile(r'%([xtmXTM])\[(@?) *([+-]?[0-9]{1,9}), *([0-9]{1,9})(?:,"((?:[^"\\]|\\.)*)")?\]')
# From a stray % to the bracket that seems to close it, for the error to quote.
_STRAY = re.compile(r"%[^%\]]{0,30}\]?")
_FAR = 5
"""From this many rows outside the sequence on, all cells are the same."""

_CLASSES: dict[str, Callable[[str], bool]] = {
    "a": str.isalpha,
    "d": str.isdecimal,
    "l": str.islower,
    "p": lambda character: unicodedata.category(character)[0] in "PS",
    "s": str.isspace,
    "u": str.isupper,
    "w": str.isalnum,
}


@dataclass(frozen=True)
class Command:
    """One command of a pattern.

    Attributes
    ----------
    source : as written.
    row, column : of the cell; with ``absolute`` the row counts as after ``@``.
    kind : ``x``, ``t`` or ``m``.
    expression : the expression of a test or a match, as written.
    lower : whether the result is turned into lower case."""

    source: str
    row: int
    column: int
    kind: str = "x"
    expression: str = ""
    absolute: bool = False
    lower: bool = False

    def __str__(self) -> str:
        return self.source

    def cells(self, rows: Sequence[Sequence[str]]) -> list[str]:
        """What the command gives at each token."""
        n = len(rows)
        if self.absolute and n:
            position = self.row + n if self.row < 0 else self.row - 1
            return [self._result(_cell(rows, position, self.column))] * n
        return [self._result(_cell(rows, self.row + t, self.column)) for t in range(n)]

    def _result(self, cell: str) -> str:
        if self.kind != "x":
            found = _compiled(self.expression).search(cell)
            if self.kind == "t":
                cell = "false" if found is None else "true"
            else:
                cell = "" if found is None else found.group()
        return cell.lower() if self.lower else cell


def strip_comment(line: str) -> str:
    """A line without its comment, which starts with ``#``, and without spaces at its end."""
    return line.partition("#")[0].rstrip(" \t\r\f\v")


def split(line: str, place: str) -> tuple[list[str], list[Command]]:
    """The n + 1 pieces of text around the n commands of a line, and the commands."""
    literals, commands, end = [], [], 0
    for found in _COMMAND.finditer(line):
        literals.append(line[end : found.start()])
        commands.append(_command(found, place))
        end = found.end()
    literals.append(line[end:])
    for literal in literals:
        if stray := _STRAY.search(literal):
            raise _not_a_command(stray.group(), place)
    return literals, commands


def _command(found: re.Match[str], place: str) -> Command:
    letter, absolute, row, column, expression = found.groups()
    kind = letter.lower()
    if (kind == "x") != (expression is None):
        raise _not_a_command(found.group(), place)
    try:
        translate(expression or "")
    except ValueError as error:
        raise InputError(
            place,
            f"{error} in the expression {expression!r}",
            "put a backslash in front of a character that stands for itself",
        ) from None
    return Command(
        source=found.group(),
        row=int(row),
        column=int(column),
        kind=kind,
        expression=expression or "",
        absolute=bool(absolute),
        lower=letter != kind,
    )


def _not_a_command(text: str, place: str) -> InputError:
    return InputError(
        place,
        f"{text!r} is not a command",
        'write %x[row,column], %t[row,column,"expression"] or %m[row,column,"expression"], the row such '
        "as -1, 0 or 1, the column 0 or more",
    )


def _cell(rows: Sequence[Sequence[str]], position: int, column: int) -> str:
    outside = -position if position < 0 else position - len(rows) + 1
    if outside <= 0:
        return rows[position][column]
    return f"_x{'-' if position < 0 else '+'}{'#' if outside >= _FAR else outside}"


def translate(expression: str) -> str:
    """Translate Wapiti's expression into one of Python's ``re``.

    ``.`` is any character; ``\\a \\d \\l \\p \\s \\u \\w`` a letter, a digit, a lower-case letter, a
    punctuation mark, a space, an upper-case letter, a letter or digit, in upper case anything else;
    a backslash makes any other character stand for itself. ``?`` makes one character optional, ``*``
    repeats it as few times as will do. ``^`` at the start and ``$`` at the end are the ends of the cell.

    Raises
    ------
    ValueError
        Where ``*`` or ``?`` have nothing to repeat, or nothing follows a backslash."""
    parts, at = [], 0
    if expression.startswith("^"):
        parts, at = [r"\A"], 1
    while at < len(expression):
        character = expression[at]
        if character == "$" and at == len(expression) - 1:
            parts.append(r"\Z")
            break
        if character in "*?":
            raise ValueError(f"{character!r} has nothing to repeat")
        if character == "\\":
            at += 1
            if at == len(expression):
                raise ValueError("nothing follows the backslash")
            parts.append(_escaped(expression[at]))
        else:
            parts.append("." if character == "." else re.escape(character))
        at += 1
        if expression[at : at + 1] in ("*", "?"):
            parts.append("*?" if expression[at] == "*" else "?")
            at += 1
    return "".join(parts)


def _escaped(character: str) -> str:
    if character.lower() not in _CLASSES or not character.isascii():
        return re.escape(character)
    return f"[{'^' if character.isupper() else ''}{_ranges(character.lower())}]"


@lru_cache
def _ranges(letter: str) -> str:
    """All characters of a class, written for a character set of ``re`` (without its brackets)."""
    belongs = _CLASSES[letter]
    ranges, start = [], 0
    for inside, run in groupby(map(belongs, map(chr, range(sys.maxunicode + 1)))):
        stop = start + sum(1 for _ in run)
        if inside:
            ranges.append(f"\\U{start:08x}-\\U{stop - 1:08x}")
        start = stop
    return "".join(ranges)


@lru_cache
def _compiled(expression: str) -> re.Pattern[str]:
    return re.compile(translate(expression), re.DOTALL)
