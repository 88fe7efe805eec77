"""Recipe-ingredient lines: the tokenizer and the feature columns of the embedded corpus.

The corpus itself lies beside this module in ``recipes/`` (``train.conll``, ``test.conll``, a
CRF++ ``template`` and the labelling guide ``GUIDE.md``); these two functions turn any new line
into the columns that the template reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

__all__ = ["columns", "tokenize"]

_VULGAR = "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_NUMBER = rf"(?:\d+(?:[/\u2044]\d+|[.,]\d+)*|[{_VULGAR}])"
_LETTERS = rf"[^\W\d_{_VULGAR}]+"
_TOKEN = re.compile(
    rf"{_NUMBER}(?:[-\u2013]{_NUMBER})*(?:-{_LETTERS})*"  # 2, 1/2, 1.5, ½, 2-3, 14-ounce, 2-3-inch
    rf"|{_LETTERS}(?:['\u2019-]{_LETTERS})*"  # flour, all-purpose, baker's
    r"|\S"  # any other character stands alone
)


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
