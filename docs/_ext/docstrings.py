"""The house's docstrings as reStructuredText.

Under 'Parameters' and 'Attributes' an entry is ``name : what it is``, going on in indented lines; it
becomes a field. Under 'Returns' stands a sentence, under 'Raises' a type and an indented sentence. Other
underlined titles become rubrics.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from sphinx.application import Sphinx

_ENTRY = re.compile(r"^([\w*]+(?:, [\w*]+)*) : (.*)$")
_FIELDS = {"Parameters": "param", "Attributes": "ivar"}


def sections(lines: list[str]) -> Iterable[tuple[str | None, list[str]]]:
    """Titles with the lines below them; None before the first."""
    title: str | None = None
    body: list[str] = []
    at = 0
    while at < len(lines):
        below = lines[at + 1] if at + 1 < len(lines) else ""
        if lines[at] and len(below) >= 3 and set(below) == {"-"}:
            yield title, body
            title, body, at = lines[at], [], at + 2
        else:
            body.append(lines[at])
            at += 1
    yield title, body


def entries(field: str, body: list[str]) -> Iterable[str]:
    for line in body:
        if found := _ENTRY.match(line):
            name = re.sub(r"(\*|_\b(?!\w))", r"\\\1", found[1])
            yield f":{field} {name}: {found[2]}"
        elif line.strip():
            yield f"    {line.strip()}"
    yield ""


def rewritten(lines: list[str]) -> list[str]:
    made: list[str] = []
    for title, body in sections(lines):
        if title is None:
            made += body
        elif title in _FIELDS:
            made += ["", *entries(_FIELDS[title], body)]
        elif title == "Returns":
            made += ["", ":returns: " + " ".join(line.strip() for line in body if line.strip()), ""]
        elif title == "Raises":
            kind, *text = (line.strip() for line in body if line.strip())
            made += ["", f":raises {kind}: " + " ".join(text), ""]
        else:
            made += ["", f".. rubric:: {title}", "", *body]
    return made


def process(_: Sphinx, __: str, ___: str, ____: Any, _____: Any, lines: list[str]) -> None:
    lines[:] = rewritten(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
