"""Small readers of the input formats, written from the descriptions of the formats alone. They must read
the same as the real readers from every file that these accept, and do not check for errors."""

from __future__ import annotations

import json
import re
from typing import Any

Sequences = list[list[tuple[Any, Any]]]
"""For each sequence and token, its features and its label."""


def lines_of(content: bytes) -> list[str]:
    text = content.decode("utf-8")
    lines = text.removeprefix("\ufeff").split("\n")
    return [line[:-1] if line.endswith("\r") else line for line in lines]


def _in_sequences(lines: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip(" \t") == "":
            found.append([])
        else:
            found[-1].append(line)
    return [part for part in found if part]


def columns(content: bytes) -> Sequences:
    """All columns but the last as features, the last as label."""
    found = []
    for part in _in_sequences(lines_of(content)):
        rows = [[cell for cell in re.split("[ \t]", line) if cell] for line in part]
        found.append([(tuple(row[:-1]), row[-1]) for row in rows])
    return found


def attributes(content: bytes) -> Sequences:
    """CRFsuite's files. The values of an attribute that occurs twice are added up."""
    found = []
    for part in _in_sequences(lines_of(content)):
        tokens = []
        for line in part:
            label, *fields = line.split("\t")
            token: dict[str, float] = {}
            for field in filter(None, fields):
                name, value = _name_and_value(field)
                token[name] = token.get(name, 0.0) + value
            tokens.append((token, _name_and_value(label)[0]))
        found.append(tokens)
    return found


def _name_and_value(field: str) -> tuple[str, float]:
    name, at = "", 0
    while at < len(field):
        if field[at] == "\\" and field[at + 1 : at + 2] in (":", "\\"):
            name, at = name + field[at + 1], at + 2
        elif field[at] == ":":
            return name, float(field[at + 1 :]) if field[at + 1 :] else 1.0
        else:
            name, at = name + field[at], at + 1
    return name, 1.0


def json_lines(content: bytes) -> Sequences:
    found = []
    for line in lines_of(content):
        if line.strip():
            example = json.loads(line)
            found.append(list(zip(example["tokens"], example["labels"], strict=True)))
    return found


ORACLES = {"columns": columns, "crfsuite": attributes, "jsonl": json_lines}
