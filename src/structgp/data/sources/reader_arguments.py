"""Checks which arguments of ``learn`` go together."""

from __future__ import annotations

from typing import Any

from structgp.data.sources.json_lines import FORMS
from structgp.errors import InputError

DOCUMENTS = ("conll", "conllu", "prodigy", "doccano", "label-studio", "brat", "spacy", "text")
"""Formats of documents, see :mod:`structgp.data.formats`."""
FORMATS = ("columns", "crfsuite", "jsonl", *DOCUMENTS)

_ONLY = {"keys": ("crfsuite",), "form": ("jsonl",), "scheme": DOCUMENTS, "snap": DOCUMENTS}
_ONLY |= {"field": ("conllu",)}
_NAMES = {"crfsuite": "CRFsuite's files have attributes", "jsonl": "JSON lines have features"}
_INSTEAD = {
    "crfsuite": "leave it out, and write numbers as name:value",
    "jsonl": "leave it out, and write numbers and vectors into the tokens",
}


def check_arguments(format: str, **given: Any) -> None:
    """InputError for arguments that do not go together or are not known."""
    if format not in FORMATS:
        raise InputError("format", f"{format!r} is not known", f"use one of {', '.join(FORMATS)}")
    if given["form"] not in (None, *FORMS):
        raise InputError("form", f"{given['form']!r} is not known", f"use one of {', '.join(FORMS)}")
    if format == "columns" and given["template"] is None:
        remedy = "give one, or format='crfsuite' for attributes, 'jsonl' for JSON lines, 'conll' for words"
        raise InputError("template", "missing", remedy)
    if given["vector_column"] is not None and given["vectors"] is None:
        raise InputError("vector_column", "no word vectors", "give them with vectors=")
    if given["vector_column"] is not None and format in DOCUMENTS:
        raise InputError("vector_column", "is for column files; documents have words", "leave it out")
    for name in ("template", "dialect", "numeric", "vectors", "keys", "form", "scheme", "snap", "field"):
        if given[name]:
            _check_one(name, format)
    if given["missing"] is not None and format == "jsonl":
        raise InputError("missing", "is for other files; JSON lines have null", "leave it out")


def _check_one(name: str, format: str) -> None:
    """InputError if files of this format do not take this argument."""
    if name in ("keys", "form") and format not in _ONLY[name]:
        raise InputError(name, f"is for the format {_ONLY[name][0]!r}", "leave it out")
    if name in ("scheme", "snap", "field"):
        if format not in _ONLY[name]:
            raise InputError(name, f"is for {', '.join(_ONLY[name])}", "leave it out")
    elif format in _NAMES and name not in ("keys", "form"):
        raise InputError(name, f"is for column files; {_NAMES[format]}", _INSTEAD[format])
    elif name == "numeric" and format in DOCUMENTS:
        raise InputError(name, "is for column files; documents have words", "leave it out")
