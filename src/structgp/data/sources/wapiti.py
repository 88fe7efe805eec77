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

from structgp.data.sources.linear_match import Pattern
from structgp.errors import InputError

COMMAND = re.compile(r'%([xtmXTM])\[(@?) *([+-]?[0-9]{1,9}), *([0-9]{1,9})(?:,"((?:[^"\\]|\\.)*)")?\]')
REMEDY = (
    'write %x[row,column], %t[row,column,"expression"] or %m[row,column,"expression"], the row such as '
    "-1, 0 or 1, the column 0 or more"
)
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
    """One command of a pattern, or a macro of CRF++.

    source : as written. row, column : of the cell; with ``absolute``, row is the number after ``@``. kind :
    ``x``, ``t`` or ``m``. expression : of a test or a match, as written. lower : whether the result is
    turned into lower case. outside : how the text of cells outside the sequence begins, ``_B`` in CRF++.
    far : number of rows outside the sequence from which on all cells have the same text."""

    source: str
    row: int
    column: int
    kind: str = "x"
    expression: str = ""
    absolute: bool = False
    lower: bool = False
    outside: str = "_x"
    far: float = 5

    def __str__(self) -> str:
        return self.source

    def cells(self, columns: Sequence[Sequence[str]], n: int) -> list[str]:
        """What the command gives at each of n tokens, from their columns."""
        if self.absolute and n:
            position = self.row + n if self.row < 0 else self.row - 1
            return self._results(columns, n, position, 1) * n
        return self._results(columns, n, self.row, n)

    def _results(self, columns: Sequence[Sequence[str]], n: int, start: int, number: int) -> list[str]:
        """The command's results at the ``number`` positions from ``start`` on."""
        stop = start + number
        cells = [self._beyond("-", -position) for position in range(start, min(0, stop))]
        if n:
            cells += columns[self.column][max(0, start) : max(0, stop)]
        cells += [self._beyond("+", position - n + 1) for position in range(max(n, start), stop)]
        if self.kind != "x":
            found = [find(self.expression, cell) for cell in cells]
            if self.kind == "t":
                cells = ["false" if part is None else "true" for part in found]
            else:
                cells = [part or "" for part in found]
        return [cell.lower() for cell in cells] if self.lower else cells

    def _beyond(self, sign: str, distance: int) -> str:
        return f"{self.outside}{sign}{'#' if distance >= self.far else distance}"


def strip_comment(line: str) -> str:
    """A line without its comment, which starts with ``#``, and without spaces at its end."""
    return line.partition("#")[0].rstrip(" \t\r\f\v")


def read_command(found: re.Match[str], place: str) -> Command:
    """The command that a match of ``COMMAND`` stands for."""
    letter, absolute, row, column, expression = found.groups()
    kind = letter.lower()
    if (kind == "x") != (expression is None):
        raise InputError(place, f"{found.group()!r} is not a command", REMEDY)
    try:
        translate(expression or "")
    except ValueError as error:
        problem = f"{error} in the expression {expression!r}"
        remedy = "put a backslash in front of a character that stands for itself"
        raise InputError(place, problem, remedy) from None
    lower, text = letter != kind, expression or ""
    return Command(found.group(), int(row), int(column), kind, text, bool(absolute), lower)


def translate(expression: str) -> str:
    """Translate Wapiti's expression into one of Python's ``re``.

    ``.`` is any character; ``\\a \\d \\l \\p \\s \\u \\w`` a letter, a digit, a lower-case letter, a
    punctuation mark, a space, an upper-case letter, a letter or digit, in upper case anything else;
    a backslash makes any other character stand for itself. ``?`` makes one character optional, ``*``
    repeats it as few times as will do. ``^`` at the start and ``$`` at the end are the ends of the cell.

    A ValueError says where ``*`` or ``?`` have nothing to repeat, or nothing follows a backslash."""
    return parse(expression).source


@lru_cache
def parse(expression: str) -> Pattern:
    """The expression as a pattern."""
    items, at, at_end = [], int(expression.startswith("^")), False
    while at < len(expression):
        character = expression[at]
        if character == "$" and at == len(expression) - 1:
            at_end = True
            break
        if character in "*?":
            raise ValueError(f"{character!r} has nothing to repeat")
        if character == "\\":
            at += 1
            if at == len(expression):
                raise ValueError("nothing follows the backslash")
            single = _escaped(expression[at])
        else:
            single = "." if character == "." else re.escape(character)
        at += 1
        often = expression[at : at + 1] if expression[at : at + 1] in ("*", "?") else ""
        at += len(often)
        items.append((single, often))
    return Pattern(tuple(items), expression.startswith("^"), at_end)


def find(expression: str, cell: str) -> str | None:
    """The first part of a cell that an expression matches, None if there is none."""
    pattern = parse(expression)
    if pattern.may_backtrack(cell):
        return pattern.find(cell)
    found = _compiled(expression).search(cell)
    return None if found is None else found.group()


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
