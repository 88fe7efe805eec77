"""Feature templates of CRF++ and Wapiti: which cells around a token make its features.

A template is a text file. Blank lines and lines that start with ``#`` are skipped. A line that starts
with ``U`` gives each token one feature. A line that starts with ``B`` scores transitions, from each label
to the next: a plain ``B`` gives every transition a score, and with macros that score depends on the
feature of the token that the transition leads to::

    U00:%x[-1,0]            the previous token
    U01:%x[0,0]/%x[0,1]     this token and its second column
    B                       transitions
    B01:%x[0,0]             transitions into this token

``%x[row,column]`` stands for a cell: ``row`` counts from the current token, ``column`` from 0.
Rows before the sequence read ``_B-1``, ``_B-2``, ... (the nearest is ``_B-1``), rows after it
``_B+1``, ``_B+2``, .... CRF++ knows four in each direction; here there is no limit.

Wapiti's dialect has more commands (:mod:`structgp.data.sources.wapiti`), comments at the end of a line,
and lines that start with ``u``, ``b`` or ``*`` (both) in either case."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from structgp.data.sources import wapiti
from structgp.data.sources.lines import iter_lines
from structgp.data.sources.wapiti import Command
from structgp.errors import InputError

_MACRO = re.compile(r"%x\[([+-]?[0-9]{1,9}),([0-9]{1,9})\]")
# From a stray % to the bracket that seems to close it, for the error to quote.
_STRAY = re.compile(r"%[^%\]]{0,30}\]?")


@dataclass(frozen=True)
class TemplateLine:
    """One line that makes a feature.

    source : the line as written. line : its number in the file, from 1. prefix : the literal text that
    comes before the feature, up to the first ``:`` or the first macro; ``U00:``. pattern : what follows,
    with ``%s`` for each macro; ``%s/%s``. macros : its macros, in order."""

    source: str
    line: int
    prefix: str
    pattern: str
    macros: tuple[Command, ...]


@dataclass(frozen=True)
class Template:
    """A parsed template.

    name : what errors call it. text : its source; parsing it in the same dialect gives the same template.
    unigrams : the lines that make features of tokens, in order, at least one; ``U``, in Wapiti's dialect
    ``u`` and ``*``. bigrams : the lines with macros that make features of transitions; ``B``, in Wapiti's
    dialect ``b`` and ``*``. A ``*`` line is both. has_bigram : whether a line without macros asks for
    transitions that do not depend on the input. dialect : 'crf++' or 'wapiti'."""

    name: str
    text: str
    unigrams: tuple[TemplateLine, ...]
    bigrams: tuple[TemplateLine, ...]
    has_bigram: bool
    dialect: str = "crf++"

    @classmethod
    def parse(cls, text: str, name: str = "template", dialect: str = "crf++") -> Template:
        """Parse a template's text; an :class:`InputError` names ``name:line``.

        Example
        -------
        >>> template = Template.parse("U00:%x[0,0]\\nB01:%x[-1,0]\\n")
        >>> template.expand([("two", "CD"), ("eggs", "NNS")])
        [('two', '_B-1'), ('eggs', 'two')]
        >>> template.transition_columns, template.has_bigram
        (('1',), False)
        """
        rules = _DIALECTS.get(dialect)
        if rules is None:
            known = " or ".join(map(repr, _DIALECTS))
            raise InputError("dialect", f"{dialect!r} is not known", f"use {known}")
        unigrams, bigrams, has_bigram = [], [], False
        for number, whole in enumerate(iter_lines([text], name=name), start=1):
            line = rules.strip(whole)
            if not line:
                continue
            place, kind = f"{name}:{number}", line[0]
            if kind not in rules.letters:
                raise InputError(place, f"the line starts with {kind!r}", f"start it with {rules.starts}")
            literals, macros = rules.split(line, place)
            head, colon, tail = literals[0].partition(":")
            pattern = "%s".join([tail, *literals[1:]])
            made = TemplateLine(line, number, head + colon, pattern, tuple(macros))
            if kind not in "Bb":
                unigrams.append(made)
            if kind in "Bb*":
                bigrams += [made] if macros else []
                has_bigram = has_bigram or not macros
        if not unigrams:
            raise InputError(name, f"no {rules.needed} line", f"add at least one, such as {rules.example}")
        return cls(name, text, tuple(unigrams), tuple(bigrams), has_bigram, dialect)

    @classmethod
    def read(
        cls, path: str | os.PathLike[str], *, encoding: str = "utf-8", dialect: str = "crf++"
    ) -> Template:
        """Read a template file; ``text`` then has ``\\n`` line ends and no byte-order mark."""
        lines = iter_lines(path, encoding=encoding)
        return cls.parse("".join(line + "\n" for line in lines), os.fspath(path), dialect)

    @property
    def transition_columns(self) -> tuple[str, ...]:
        """The names, as an encoder gives them, of the columns of ``expand`` that the bigrams make."""
        n = len(self.unigrams)
        return tuple(str(p) for p in range(n, n + len(self.bigrams)))

    def check_columns(self, n_columns: int, data_name: str) -> None:
        """Raise an :class:`InputError` where a macro names a column that the data does not have.

        ``n_columns`` counts the columns of ``data_name`` without the label."""
        for line in (*self.unigrams, *self.bigrams):
            for macro in line.macros:
                if macro.column >= n_columns:
                    there = columns_that_exist(n_columns, data_name)
                    problem = f"{macro} names column {macro.column}, but {there}"
                    remedy = "correct the column or add it to the data"
                    raise InputError(f"{self.name}:{line.line}", problem, remedy)

    def expand(self, rows: Sequence[Sequence[str]], transitions: bool = True) -> list[tuple[str, ...]]:
        """Features of each token of one sequence: one string per unigram, then (unless ``transitions`` is
        False) one per bigram, for the transition into the token.

        The string is the line without its prefix, with cells for macros: ``the/cat`` for
        ``U05:%x[-1,0]/%x[0,0]``. Lines are told apart by their position in the tuple. Time and
        memory are O(tokens x macros): about a second for 200,000 tokens and 20 lines."""
        macros, lines, n_columns = self._work
        if rows and (width := min(map(len, rows))) < n_columns:
            self.check_columns(width, "the rows given")
        columns = list(zip(*rows, strict=False))
        cells = [macro.cells(columns, len(rows)) for macro in macros]
        features: list[Sequence[str]] = []
        for pattern, places in lines if transitions else lines[: len(self.unigrams)]:
            if pattern == "%s":
                features.append(cells[places[0]])
            elif places:
                features.append([pattern % v for v in zip(*(cells[k] for k in places), strict=True)])
            else:
                features.append([pattern] * len(rows))
        return list(zip(*features, strict=True))

    @cached_property
    def _work(self) -> tuple[list[Command], list[tuple[str, list[int]]], int]:
        """What ``expand`` needs for every sequence: the distinct commands of all lines; for each line, its
        pattern and the places of its commands among the distinct ones; and the number of columns that the
        commands need."""
        lines = self.unigrams + self.bigrams
        place = {macro: k for k, macro in enumerate(dict.fromkeys(m for x in lines for m in x.macros))}
        each = [(line.pattern, [place[macro] for macro in line.macros]) for line in lines]
        return list(place), each, max((macro.column + 1 for macro in place), default=0)

    def crfsuite_attributes(self, rows: Sequence[Sequence[str]]) -> list[list[str]]:
        """Features of each token as strings that name their line, ``U00:the``, for a linear CRF.

        As in CRF++, two lines with the same prefix share the features on which they agree
        (``U:%x[-1,0]`` and ``U:%x[1,0]`` make a bag of neighbours). The template kernel does not
        share: each line is a template with a scale of its own."""
        prefixes = [unigram.prefix for unigram in self.unigrams]
        return [
            [prefix + value for prefix, value in zip(prefixes, values, strict=True)]
            for values in self.expand(rows, transitions=False)
        ]


def _macro(found: re.Match[str], place: str) -> Command:
    row, column = int(found[1]), int(found[2])
    return Command(f"%x[{row},{column}]", row, column, outside="_B", far=math.inf)


class _Dialect(NamedTuple):
    """How lines are read. strip : drops comments and skipped lines; command, read : find a command (or
    macro) and parse it; noun, remedy : what errors call it and how it is written; letters : the letters
    that a line may start with."""

    strip: Callable[[str], str]
    command: re.Pattern[str]
    read: Callable[[re.Match[str], str], Command]
    noun: str
    remedy: str
    letters: str
    starts: str
    needed: str
    example: str

    def split(self, line: str, place: str) -> tuple[list[str], list[Command]]:
        """The n + 1 pieces of text around the n commands of a line, and the commands."""
        literals, commands, end = [], [], 0
        for found in self.command.finditer(line):
            literals.append(line[end : found.start()])
            commands.append(self.read(found, place))
            end = found.end()
        literals.append(line[end:])
        for literal in literals:
            if stray := _STRAY.search(literal):
                raise InputError(place, f"{stray.group()!r} is not a {self.noun}", self.remedy)
        return literals, commands


_DIALECTS = {
    "crf++": _Dialect(
        lambda line: "" if line.startswith("#") or not line.strip(" \t") else line,
        _MACRO,
        _macro,
        "macro",
        "write %x[row,column] without spaces, the row such as -1, 0 or 1, the column 0 or more",
        "UB",
        "U (a feature), B (transitions) or # (a comment)",
        "U",
        "U00:%x[0,0]",
    ),
    "wapiti": _Dialect(
        wapiti.strip_comment,
        wapiti.COMMAND,
        wapiti.read_command,
        "command",
        wapiti.REMEDY,
        "uUbB*",
        "u (a feature), b (transitions), * (both) or # (a comment)",
        "u or *",
        "u:%x[0,0]",
    ),
}


def columns_that_exist(n_columns: int, data_name: str) -> str:
    """For errors: ``columns 0 to 2 exist in train.col (the label is not one of them)``."""
    which = f"columns 0 to {n_columns - 1} exist" if n_columns > 1 else "only column 0 exists"
    which = which if n_columns else "no columns exist"
    return f"{which} in {data_name} (the label is not one of them)"
