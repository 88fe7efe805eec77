"""CRF++ feature templates: which cells around a token make its features.

A template is a text file. Lines that start with ``#`` and blank lines say nothing; a line that
starts with ``U`` makes one feature a token; a line that starts with ``B`` asks for label pairs::

    U00:%x[-1,0]            the previous token
    U01:%x[0,0]/%x[0,1]     this token and its second column
    B

``%x[row,column]`` stands for a cell: ``row`` counts from the token at hand, ``column`` from 0.
Rows before the sequence read ``_B-1``, ``_B-2``, ... (the nearest is ``_B-1``), rows after it
``_B+1``, ``_B+2``, .... CRF++ knows four each way; here the pattern goes on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from structgp.data.columns import iter_lines
from structgp.errors import InputError

_MACRO = re.compile(r"%x\[([+-]?[0-9]{1,9}),([0-9]{1,9})\]")
# From a stray % to the bracket that seems to close it, for the error to quote.
_STRAY = re.compile(r"%[^%\]]{0,20}\]?")


@dataclass(frozen=True)
class TemplateLine:
    """One ``U`` line.

    Attributes
    ----------
    id : the text before the first ``:``, or the whole line without one; ``U00``.
    source : the line as written.
    line : its number in the file, from 1.
    prefix : the literal text that comes before the feature; ``U00:``. It ends with the first ``:``,
        or at the first macro if that comes sooner.
    pattern : what follows the prefix, ``%s`` in the place of each macro; ``%s/%s``.
    macros : (row, column) of each macro in order.
    """

    id: str
    source: str
    line: int
    prefix: str
    pattern: str
    macros: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Template:
    """The lines of a template, ready to expand.

    Attributes
    ----------
    name : what errors call it.
    text : its source; ``Template.parse(template.text, template.name)`` is the same template.
    unigrams : the ``U`` lines in order, at least one.
    has_bigram : whether there is a ``B`` line.
    """

    name: str
    text: str
    unigrams: tuple[TemplateLine, ...]
    has_bigram: bool

    @classmethod
    def parse(cls, text: str, name: str = "template") -> Template:
        """Understand a template's text, or raise an :class:`InputError` at ``name:line``."""
        unigrams = []
        has_bigram = False
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
            parsed = _parse_line(line, number, place)
            if line[0] == "U":
                unigrams.append(parsed)
            elif parsed.macros:
                raise InputError(
                    place,
                    "a B line with a macro, but label-pair scores do not depend on the input here",
                    "write a plain B line, or move the macro to a U line",
                )
            else:
                has_bigram = True
        if not unigrams:
            raise InputError(name, "no U line", "add at least one, such as U00:%x[0,0]")
        return cls(name, text, tuple(unigrams), has_bigram)

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, encoding: str = "utf-8") -> Template:
        """Read a template file; ``text`` then has ``\\n`` line ends and no byte-order mark."""
        lines = iter_lines(path, encoding=encoding)
        return cls.parse("".join(line + "\n" for line in lines), os.fspath(path))

    def check_columns(self, n_columns: int, data_name: str) -> None:
        """Raise an :class:`InputError` where a macro names a column that the data does not have.

        ``n_columns`` counts the columns of ``data_name`` without the label.
        """
        for unigram in self.unigrams:
            for row, column in unigram.macros:
                if column >= n_columns:
                    raise InputError(
                        f"{self.name}:{unigram.line}",
                        f"%x[{row},{column}] names column {column}, but "
                        f"{_columns_that_exist(n_columns)} in {data_name} "
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
        cells = {macro: _cells(rows, *macro) for macro in macros}
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


def _parse_line(source: str, number: int, place: str) -> TemplateLine:
    # split with two groups: literal, row, column, literal, row, column, ..., literal
    pieces = _MACRO.split(source)
    first, *others = pieces[::3]
    for literal in (first, *others):
        if stray := _STRAY.search(literal):
            raise InputError(
                place,
                f"{stray.group()!r} is not a macro",
                "write %x[row,column] without spaces, the row such as -1, 0 or 1, "
                "the column 0 or more",
            )
    macros = tuple(zip(map(int, pieces[1::3]), map(int, pieces[2::3]), strict=True))
    head, colon, tail = first.partition(":")
    return TemplateLine(
        id=source.partition(":")[0],
        source=source,
        line=number,
        prefix=head + colon,
        pattern="%s".join([tail, *others]),
        macros=macros,
    )


def _cells(rows: Sequence[Sequence[str]], row: int, column: int) -> list[str]:
    """What ``%x[row,column]`` reads at each token: positions ``row`` to ``row + len(rows) - 1``."""
    n = len(rows)
    before = [f"_B{position}" for position in range(row, min(0, row + n))]
    within = [cells[column] for cells in rows[max(0, row) : max(0, row + n)]]
    after = [f"_B+{position - n + 1}" for position in range(max(n, row), row + n)]
    return before + within + after


def _columns_that_exist(n_columns: int) -> str:
    if n_columns == 0:
        return "no columns exist"
    return "only column 0 exists" if n_columns == 1 else f"columns 0 to {n_columns - 1} exist"
