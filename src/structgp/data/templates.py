"""Feature templates, CRF++'s and Wapiti's: which cells around a token make its features.

A template is a text file. Lines that start with ``#`` and blank lines say nothing; a line that
starts with ``U`` makes one feature a token; a line that starts with ``B`` asks for label pairs::

    U00:%x[-1,0]            the previous token
    U01:%x[0,0]/%x[0,1]     this token and its second column
    B

``%x[row,column]`` stands for a cell: ``row`` counts from the token at hand, ``column`` from 0.
Rows before the sequence read ``_B-1``, ``_B-2``, ... (the nearest is ``_B-1``), rows after it
``_B+1``, ``_B+2``, .... CRF++ knows four each way; here the pattern goes on.

Wapiti's dialect has more commands (:mod:`structgp.data.wapiti`), takes lines that start with ``u``, ``b``
or ``*`` (both) in either case, and comments at the end of a line. Label pairs do not depend on the input
here: of a ``b`` line with commands plain label pairs remain, of a ``*`` line those and its feature.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from structgp.data import wapiti
from structgp.data.columns import iter_lines
from structgp.errors import InputError, StructgpWarning

DIALECTS = ("crf++", "wapiti")

_MACRO = re.compile(r"%x\[([+-]?[0-9]{1,9}),([0-9]{1,9})\]")
# From a stray % to the bracket that seems to close it, for the error to quote.
_STRAY = re.compile(r"%[^%\]]{0,20}\]?")


class Macro(NamedTuple):
    """``%x[row,column]`` of CRF++."""

    row: int
    column: int

    def __str__(self) -> str:
        return f"%x[{self.row},{self.column}]"

    def cells(self, rows: Sequence[Sequence[str]]) -> list[str]:
        """What it reads at each token: positions ``row`` to ``row + len(rows) - 1``."""
        n, row = len(rows), self.row
        before = [f"_B{position}" for position in range(row, min(0, row + n))]
        within = [cells[self.column] for cells in rows[max(0, row) : max(0, row + n)]]
        after = [f"_B+{position - n + 1}" for position in range(max(n, row), row + n)]
        return before + within + after


@dataclass(frozen=True)
class TemplateLine:
    """One line that makes a feature, a ``U`` line.

    Attributes
    ----------
    id : the text before the first ``:``, or the whole line without one; ``U00``.
    source : the line as written.
    line : its number in the file, from 1.
    prefix : the literal text that comes before the feature; ``U00:``. It ends with the first ``:``,
        or at the first macro if that comes sooner.
    pattern : what follows the prefix, ``%s`` in the place of each macro; ``%s/%s``.
    macros : each macro or command in order.
    """

    id: str
    source: str
    line: int
    prefix: str
    pattern: str
    macros: tuple[Macro | wapiti.Command, ...]


@dataclass(frozen=True)
class Template:
    """The lines of a template, ready to expand.

    Attributes
    ----------
    name : what errors call it.
    text : its source; parsed in the same dialect it is the same template.
    unigrams : the ``U`` lines in order, at least one; in Wapiti's dialect ``u`` and ``*`` lines.
    has_bigram : whether there is a ``B`` line; in Wapiti's dialect a ``b`` or ``*`` line.
    dialect : 'crf++' or 'wapiti'.
    """

    name: str
    text: str
    unigrams: tuple[TemplateLine, ...]
    has_bigram: bool
    dialect: str = "crf++"

    @classmethod
    def parse(cls, text: str, name: str = "template", dialect: str = "crf++") -> Template:
        """Understand a template's text, or raise an :class:`InputError` at ``name:line``.

        A :class:`StructgpWarning` says which of Wapiti's lines ask for label pairs that depend on the
        input.
        """
        if dialect not in DIALECTS:
            raise InputError(
                "dialect", f"{dialect!r} is not known", f"use {' or '.join(map(repr, DIALECTS))}"
            )
        parse = _parse_wapiti if dialect == "wapiti" else _parse_crfpp
        unigrams, has_bigram = parse(text, name)
        return cls(name, text, tuple(unigrams), has_bigram, dialect)

    @classmethod
    def read(
        cls, path: str | os.PathLike[str], *, encoding: str = "utf-8", dialect: str = "crf++"
    ) -> Template:
        """Read a template file; ``text`` then has ``\\n`` line ends and no byte-order mark."""
        lines = iter_lines(path, encoding=encoding)
        return cls.parse("".join(line + "\n" for line in lines), os.fspath(path), dialect)

    def check_columns(self, n_columns: int, data_name: str) -> None:
        """Raise an :class:`InputError` where a macro names a column that the data does not have.

        ``n_columns`` counts the columns of ``data_name`` without the label.
        """
        for unigram in self.unigrams:
            for macro in unigram.macros:
                if macro.column >= n_columns:
                    raise InputError(
                        f"{self.name}:{unigram.line}",
                        f"{macro} names column {macro.column}, but "
                        f"{columns_that_exist(n_columns)} in {data_name} "
                        "(the label is not one of them)",
                        "correct the column or add it to the data",
                    )

    def expand(self, rows: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
        """Features of each token of one sequence: a tuple with one string a ``U`` line.

        The string is the line without its prefix, cells in the place of macros: ``the/cat`` for
        ``U05:%x[-1,0]/%x[0,0]``. Lines are told apart by their position in the tuple. Time and
        memory are O(tokens x macros): about a second for 200,000 tokens and 20 lines.
        """
        if rows:
            self.check_columns(min(len(row) for row in rows), "the rows given")
        macros = {macro for unigram in self.unigrams for macro in unigram.macros}
        cells = {macro: macro.cells(rows) for macro in macros}
        features = []
        for unigram in self.unigrams:
            if unigram.macros:
                values = zip(*(cells[macro] for macro in unigram.macros), strict=True)
                features.append([unigram.pattern % value for value in values])
            else:
                features.append([unigram.pattern] * len(rows))
        return list(zip(*features, strict=True))

    def crfsuite_attributes(self, rows: Sequence[Sequence[str]]) -> list[list[str]]:
        """Features of each token as strings that name their line, ``U00:the``, for a linear CRF.

        As in CRF++, two lines with the same prefix share the features on which they agree
        (``U:%x[-1,0]`` and ``U:%x[1,0]`` make a bag of neighbours). The template kernel does not
        share: each line is a template with a weight of its own.
        """
        prefixes = [unigram.prefix for unigram in self.unigrams]
        return [
            [prefix + value for prefix, value in zip(prefixes, values, strict=True)]
            for values in self.expand(rows)
        ]


def _parse_crfpp(text: str, name: str) -> tuple[list[TemplateLine], bool]:
    """The ``U`` lines, and whether there is a ``B`` line."""
    unigrams, has_bigram = [], False
    for number, line in enumerate(iter_lines([text], name=name), start=1):
        if line.startswith("#") or not line.strip(" \t"):
            continue
        place = f"{name}:{number}"
        if line[0] not in "UB":
            raise InputError(
                place,
                f"the line starts with {line[0]!r}",
                "start it with U (a feature), B (label pairs) or # (a comment)",
            )
        literals, macros = _split(line, place)
        if line[0] == "U":
            unigrams.append(_template_line(line, number, literals, macros))
        elif macros:
            raise InputError(
                place,
                "a B line with a macro, but label-pair scores do not depend on the input here",
                "write a plain B line, or move the macro to a U line",
            )
        else:
            has_bigram = True
    if not unigrams:
        raise InputError(name, "no U line", "add at least one, such as U00:%x[0,0]")
    return unigrams, has_bigram


def _parse_wapiti(text: str, name: str) -> tuple[list[TemplateLine], bool]:
    """The ``u`` and ``*`` lines, and whether there is a ``b`` or ``*`` line."""
    unigrams, has_bigram, on_input = [], False, []
    for number, whole in enumerate(iter_lines([text], name=name), start=1):
        line = wapiti.strip_comment(whole)
        if not line:
            continue
        place, kind = f"{name}:{number}", line[0].lower()
        if kind not in "ub*":
            raise InputError(
                place,
                f"the line starts with {line[0]!r}",
                "start it with u (a feature), b (label pairs), * (both) or # (a comment)",
            )
        literals, commands = wapiti.split(line, place)
        if kind != "b":
            unigrams.append(_template_line(line, number, literals, commands))
        if kind != "u":
            has_bigram = True
            on_input += [number] if commands else []
    if not unigrams:
        raise InputError(name, "no u or * line", "add at least one, such as u:%x[0,0]")
    if on_input:
        where = "lines " if len(on_input) > 1 else "line "
        where += ", ".join(map(str, on_input[:3])) + (", ..." if len(on_input) > 3 else "")
        warnings.warn(
            f"{name}: label pairs that depend on the input do not exist here ({where}): plain label pairs "
            "take their place, and the features of * lines stay",
            StructgpWarning,
            stacklevel=3,
        )
    return unigrams, has_bigram


def _split(line: str, place: str) -> tuple[list[str], list[Macro]]:
    """The n + 1 pieces of text around the n macros of a line, and the macros."""
    # split with two groups: literal, row, column, literal, row, column, ..., literal
    pieces = _MACRO.split(line)
    literals = pieces[::3]
    for literal in literals:
        if stray := _STRAY.search(literal):
            raise InputError(
                place,
                f"{stray.group()!r} is not a macro",
                "write %x[row,column] without spaces, the row such as -1, 0 or 1, "
                "the column 0 or more",
            )
    return literals, list(map(Macro, map(int, pieces[1::3]), map(int, pieces[2::3])))


def _template_line(
    source: str, number: int, literals: Sequence[str], macros: Sequence[Macro | wapiti.Command]
) -> TemplateLine:
    head, colon, tail = literals[0].partition(":")
    return TemplateLine(
        id=source.partition(":")[0],
        source=source,
        line=number,
        prefix=head + colon,
        pattern="%s".join([tail, *literals[1:]]),
        macros=tuple(macros),
    )


def columns_that_exist(n_columns: int) -> str:
    """For errors: ``columns 0 to 2 exist``."""
    if n_columns == 0:
        return "no columns exist"
    return "only column 0 exists" if n_columns == 1 else f"columns 0 to {n_columns - 1} exist"
