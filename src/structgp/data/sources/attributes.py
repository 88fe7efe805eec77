"""CRFsuite's own files: the label of a token, then its attributes.

One token per line, fields separated by tabs, a blank line between sequences. An attribute may have a
value after a colon, else it is 1; in names, ``\\:`` is a colon and ``\\\\`` a backslash::

    B-NP    w=He    pos=PRP
    B-VP    w=reckons    pos=VBZ    length:7

    O       w=12\\:30
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from structgp.data.sources.lines import FileSequence, Source, iter_sequences, name_of
from structgp.data.sources.number_text import parse_number
from structgp.errors import InputError

# An escaped colon or backslash, a colon, or text without either.
_PIECE = re.compile(r"\\[:\\]|:|[^:\\]+|\\")


def iter_attributes(
    source: Source, *, encoding: str = "utf-8", name: str | None = None
) -> Iterator[FileSequence]:
    """Read sequences one by one, each as soon as the blank line after it has been read.

    Arguments are those of :func:`structgp.data.sources.iter_columns`. Values of an attribute that a
    token has twice are added up, as CRFsuite does. Every line has a label; in a file that is yet to
    be labelled it may be any text.

    An InputError names ``name:line`` for a line without a label, a value that is not a number, a colon too
    many, a declaration such as ``@weight``, and bytes that are not in ``encoding``, and ``name`` for a file
    that cannot be read.

    Example
    -------
    >>> next(iter_attributes(["QTY\\tw=two", "NAME\\tw=eggs\\tlength:4"])).tokens
    [{'w=two': 1.0}, {'w=eggs': 1.0, 'length': 4.0}]
    """
    place = name_of(source) if name is None else name
    found = iter_sequences(source, lambda line, n: _parse(line, f"{place}:{n}"), encoding, place)
    for pairs, line in found:
        labels, tokens = map(list, zip(*pairs, strict=True))
        words = [next(iter(token), "") for token in tokens]
        yield FileSequence([()] * len(tokens), tokens, words, labels, place, line)


def format_attributes(labels: Sequence[str], tokens: Sequence[Mapping[str, float]]) -> str:
    """The lines of one sequence: :func:`iter_attributes` reads them as these labels and tokens."""
    lines = []
    for label, token in zip(labels, tokens, strict=True):
        fields = [_escaped(name) + ("" if value == 1.0 else f":{value!r}") for name, value in token.items()]
        lines.append("\t".join([_escaped(label), *fields]) + "\n")
    return "".join(lines)


def named(token: Mapping[str, float], keys: Sequence[str]) -> dict[str, Any]:
    """A token with the first attribute ``key=value`` of each key as a string: ``{key: value}``.

    >>> named({"w=two": 1.0, "length": 3.0}, ["w"])
    {'w': 'two', 'length': 3.0}
    """
    found: dict[str, Any] = {}
    for name, number in token.items():
        key, equals, value = name.partition("=")
        if equals and key in keys and key not in token and key not in found and number == 1.0:
            found[key] = value
        else:
            found[name] = number
    return found


def unnamed(token: Mapping[str, Any]) -> dict[str, float]:
    """The attributes from which ``named`` made this token."""
    return {
        f"{k}={v}" if isinstance(v, str) else k: 1.0 if isinstance(v, str) else v for k, v in token.items()
    }


def _escaped(name: str) -> str:
    return name.replace("\\", "\\\\").replace(":", "\\:")


def _parse(line: str, place: str) -> tuple[str, dict[str, float]]:
    first, *fields = line.split("\t")
    label, *value = _split_at_colons(first)
    if first.startswith("@"):
        remedy = "remove it; weights of sequences are given in Python, as sample_weight"
        raise InputError(place, f"the declaration {first!r} is not supported", remedy)
    if not label or value:
        remedy = "start the line with a label and a tab, and write \\: for a colon in the label"
        raise InputError(place, f"{first!r} is not a label", remedy)
    token: dict[str, float] = {}
    for field in filter(None, fields):
        attribute, *value = _split_at_colons(field)
        if not attribute or len(value) > 1:
            remedy = "write name or name:value, and \\: for a colon in the name"
            raise InputError(place, f"the attribute {field!r} has a colon too many", remedy)
        number = parse_number(value[0], place, f"the value of {field!r}") if any(value) else 1.0
        token[attribute] = token.get(attribute, 0.0) + number
    return label, token


def _split_at_colons(field: str) -> list[str]:
    """Split at colons without a backslash in front, and undo the escapes of each part."""
    parts = [""]
    for piece in _PIECE.findall(field):
        if piece == ":":
            parts.append("")
        else:
            parts[-1] += piece[1:] if piece in ("\\:", "\\\\") else piece
    return parts
