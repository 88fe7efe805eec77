"""The embedded corpus of recipe ingredients, for learning and for trying things out.

Its files lie in the folder ``recipes`` (``train.conll``, ``test.conll``, a CRF++ ``template`` and the
labelling guide ``GUIDE.md``). ``tokenize`` and ``columns`` turn any new line into the columns that the
template reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby

from structgp.data.sources.columns import read_columns
from structgp.data.sources.templates import Template

Rows = list[tuple[str, ...]]

_VULGAR = "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_NUMBER = rf"(?:\d+(?:[/\u2044]\d+|[.,]\d+)*|[{_VULGAR}])"
_LETTERS = rf"[^\W\d_{_VULGAR}]+"
_TOKEN = re.compile(
    rf"{_NUMBER}(?:[-\u2013]{_NUMBER})*(?:-{_LETTERS})*"  # 2, 1/2, 1.5, ½, 2-3, 14-ounce, 2-3-inch
    rf"|{_LETTERS}(?:['\u2019-]{_LETTERS})*"  # flour, all-purpose, baker's
    r"|\S"  # any other character stands alone
)


@dataclass(frozen=True)
class Recipes:
    """The embedded corpus: ``X[i][t]`` is token t's raw columns without its label ``y[i][t]``.

    ``template.expand(X[i])`` gives the features of sequence i."""

    template: Template
    X_train: list[Rows]
    y_train: list[list[str]]
    X_test: list[Rows]
    y_test: list[list[str]]


def recipes() -> Recipes:
    """The embedded corpus."""
    folder = resources.files("structgp.data") / "recipes"

    def read(name: str) -> tuple[list[Rows], list[list[str]]]:
        with resources.as_file(folder / name) as path:
            return read_columns(path, encoding="utf-8", name=f"recipes/{name}").split_labels()

    X_train, y_train = read("train.conll")
    X_test, y_test = read("test.conll")
    template = Template.parse((folder / "template").read_text(encoding="utf-8"), "recipes/template")
    return Recipes(template, X_train, y_train, X_test, y_test)


def tokenize(line: str) -> list[str]:
    """Split an ingredient line into words, numbers and single punctuation marks.

    Fractions ("1/2"), ranges ("2-3") and hyphenated words ("all-purpose", "14-ounce") are one
    token; a number is split from a unit or a fraction sign glued to it ("250g", "1½")."""
    return _TOKEN.findall(line)


def _shape(token: str) -> str:
    """Collapse runs of digits to "d", of capitals to "X", of other letters to "x", ½ to "frac"."""

    def kind(char: str) -> str:
        if char in _VULGAR:
            return "frac"
        if char.isdigit():
            return "d"
        if char.isalpha():
            return "X" if char.isupper() else "x"
        return char

    return "".join(key for key, _ in groupby(token, key=kind))


def columns(tokens: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the five feature columns of each token of one line (no label).

    They are the token, the lower-cased token, its shape, its last three characters lower-cased,
    and "in" from an opening bracket to its closing one (both included), else "out"."""
    rows: list[tuple[str, ...]] = []
    depth = 0
    for token in tokens:
        depth += token in ("(", "[")
        lower = token.lower()
        rows.append((token, lower, _shape(token), lower[-3:], "in" if depth else "out"))
        depth = max(0, depth - (token in (")", "]")))
    return rows
