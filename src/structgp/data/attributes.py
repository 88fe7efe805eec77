"""CRFsuite's own files: the label of a token, then its attributes.

One token a line, fields separated by tabs, a blank line between sequences. An attribute may have a value
after a colon, else it is 1; in names, ``\\:`` is a colon and ``\\\\`` a backslash::

    B-NP    w=He    pos=PRP
    B-VP    w=reckons    pos=VBZ    length:7

    O       w=12\\:30
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from structgp.data.columns import Source, iter_lines, name_of
from structgp.data.numbers import parse_number
from structgp.errors import InputError


@dataclass(frozen=True)
class AttributeSequence:
    """The tokens of one sequence.

    ``labels`` and ``tokens`` have an entry each for every token; a token is a dict from attribute to
    value, as :meth:`structgp.StructuredGPClassifier.fit` takes it. ``line`` is the number of the first
    token's line in the file, counted from 1.
    """

    labels: list[str]
    tokens: list[dict[str, float]]
    line: int


@dataclass(frozen=True)
class AttributeFile:
    """All sequences of a file."""

    name: str
    sequences: list[AttributeSequence]

    @property
    def X(self) -> list[list[dict[str, float]]]:
        """The tokens of each sequence."""
        return [sequence.tokens for sequence in self.sequences]

    @property
    def y(self) -> list[list[str]]:
        """The labels of each sequence."""
        return [sequence.labels for sequence in self.sequences]


def iter_attributes(
    source: Source, *, encoding: str = "utf-8", name: str | None = None
) -> Iterator[AttributeSequence]:
    """Read sequences one by one, each as soon as the blank line after it has been read.

    Arguments are those of :func:`structgp.data.columns.iter_columns`. Values of an attribute that a
    token has twice are added up, as CRFsuite does. Every line has a label: one of a file that is yet to
    be labelled may say anything.

    Raises
    ------
    InputError
        At ``name:line``, for a line without a label, a value that is no number, a colon too many, a
        declaration such as ``@weight``, and bytes that are not in ``encoding``; at ``name``, for a
        file that cannot be read.
    """
    name = name_of(source) if name is None else name
    labels: list[str] = []
    tokens: list[dict[str, float]] = []
    first_line = 0
    for number, line in enumerate(iter_lines(source, encoding=encoding, name=name), start=1):
        if not line.strip(" \t"):
            if tokens:
                yield AttributeSequence(labels, tokens, first_line)
                labels, tokens = [], []
            continue
        if not tokens:
            first_line = number
        label, token = _parse(line, f"{name}:{number}")
        labels.append(label)
        tokens.append(token)
    if tokens:
        yield AttributeSequence(labels, tokens, first_line)


def read_attributes(
    source: Source, *, encoding: str = "utf-8", name: str | None = None
) -> AttributeFile:
    """Read a whole file; arguments and errors are those of :func:`iter_attributes`.

    ``file = read_attributes("train.crfsuite")`` gives ``file.X`` and ``file.y`` to fit. A file without a
    single token is an :class:`InputError` too.
    """
    name = name_of(source) if name is None else name
    sequences = list(iter_attributes(source, encoding=encoding, name=name))
    if not sequences:
        raise InputError(
            name, "no tokens", "give one token a line and a blank line between sequences"
        )
    return AttributeFile(name, sequences)


def format_attributes(labels: Sequence[str], tokens: Sequence[Mapping[str, float]]) -> str:
    """The lines of one sequence, which ``iter_attributes`` reads as these labels and tokens."""
    lines = []
    for label, token in zip(labels, tokens, strict=True):
        fields = [
            _escaped(name) if value == 1.0 else f"{_escaped(name)}:{value!r}"
            for name, value in token.items()
        ]
        lines.append("\t".join([_escaped(label), *fields]) + "\n")
    return "".join(lines)


def _escaped(name: str) -> str:
    return name.replace("\\", "\\\\").replace(":", "\\:")


def _parse(line: str, place: str) -> tuple[str, dict[str, float]]:
    first, *fields = line.split("\t")
    label, *value = _split_at_colons(first)
    if first.startswith("@"):
        raise InputError(
            place,
            f"the declaration {first!r}, which is not known here",
            "remove it; weights of sequences are given in Python, as sample_weight",
        )
    if not label or value:
        raise InputError(
            place,
            f"{first!r} where a label belongs",
            "begin the line with a label, a colon in it written \\:, and a tab after it",
        )
    token: dict[str, float] = {}
    for field in filter(None, fields):
        attribute, *value = _split_at_colons(field)
        if not attribute or len(value) > 1:
            raise InputError(
                place,
                f"the attribute {field!r} has a colon too many",
                "write name or name:value, and \\: for a colon in the name",
            )
        number = parse_number(value[0], place, f"the value of {field!r}") if any(value) else 1.0
        token[attribute] = token.get(attribute, 0.0) + number
    return label, token


def _split_at_colons(field: str) -> list[str]:
    """The parts between the colons that no backslash stands before, each with its escapes undone."""
    if "\\" not in field:
        return field.split(":")
    parts, at = [""], 0
    while at < len(field):
        if field[at] == "\\" and field[at + 1 : at + 2] in (":", "\\"):
            at += 1
            parts[-1] += field[at]
        elif field[at] == ":":
            parts.append("")
        else:
            parts[-1] += field[at]
        at += 1
    return parts
