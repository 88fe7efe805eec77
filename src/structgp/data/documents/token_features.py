"""Features of words, for users who bring no template.

They were chosen by cross-validation within training halves alone (``experiments/default_features.py``),
where they are compared with templates that people wrote for those data."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

_LONGEST = 3
"""Length of the longest prefix and suffix, in characters."""
_EDGE = "\x02"
"""Stands before the first and after the last token; it is a control character, so no token equals it."""


def token_features(words: Sequence[str]) -> list[dict[str, str]]:
    """One dict of features per word, as a classifier takes them.

    Features of the word: itself, lower case, shape, prefixes and suffixes of up to three characters.
    Features of its neighbours: lower case of two words on either side, shape and suffix of the nearest
    ones. Every dict has the same keys.

    Example
    -------
    >>> first, second = token_features(["Ann", "left"])
    >>> first["lower"], first["shape"], first["lower+1"], second["suffix3"]
    ('ann', 'Xx', 'left', 'eft')
    """
    lower = [_EDGE, _EDGE, *map(_lower, words), _EDGE, _EDGE]
    shapes = [_EDGE, _EDGE, *map(shape, words), _EDGE, _EDGE]
    found = []
    for t, word in enumerate(words, start=2):
        l, s = lower[t - 2 : t + 3], shapes[t - 2 : t + 3]
        token = {"word": word, "lower": l[2], "shape": s[2]}
        for n in range(1, _LONGEST + 1):
            token[f"prefix{n}"], token[f"suffix{n}"] = l[2][:n], l[2][-n:]
        for place, i in (("-2", 0), ("-1", 1), ("+1", 3), ("+2", 4)):
            token[f"lower{place}"] = l[i]
        for place, i in (("-1", 1), ("+1", 3)):
            token[f"shape{place}"], token[f"suffix{place}"] = s[i], l[i][-_LONGEST:]
        found.append(token)
    return found


def _lower(word: str) -> str:
    """The word in lower case, with letters and accents combined where there is one character for both."""
    return unicodedata.normalize("NFC", word).lower()


@lru_cache(maxsize=100_000)
def shape(word: str) -> str:
    """What a word looks like: runs of capitals become X, of other letters x, of digits d; accents are left
    out, and other characters stay.

    Example
    -------
    >>> shape("McDonald's"), shape("2.50")
    ("XxXx'x", 'd.d')
    """
    return "".join(kind for kind, _ in groupby(filter(None, map(_kind, word))))


@lru_cache(maxsize=10_000)
def _kind(character: str) -> str:
    if character.isdigit():
        return "d"
    if character.isalpha():
        return "X" if character.isupper() or character.istitle() else "x"
    return "" if unicodedata.category(character)[0] in "MC" else character
