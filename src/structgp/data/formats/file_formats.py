"""Formats by name: documents are read from files, and written to files, in any of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from structgp.data.documents import Document
from structgp.data.formats import format_parts as parts
from structgp.data.formats.brat import read_brat, write_brat
from structgp.data.formats.conll import read_conll, write_conll
from structgp.data.formats.conllu import read_conllu, write_conllu
from structgp.data.formats.docbin import read_docbin, write_docbin
from structgp.data.formats.doccano import read_doccano, write_doccano
from structgp.data.formats.format_parts import Placed, Reading
from structgp.data.formats.label_studio import read_label_studio, write_label_studio
from structgp.data.formats.plain_text import read_text, write_text
from structgp.data.formats.prodigy import read_prodigy, write_prodigy
from structgp.data.sources.lines import Source, check_encoding, name_of
from structgp.errors import InputError

Path = str | os.PathLike[str]


@dataclass(frozen=True)
class Format:
    """A format of files. read : (source, name, how) -> documents with their lines. text : (documents, how)
    -> pieces of the file, one after the other; None if the format is not text, in which case save :
    (documents, path, how) writes the file. suffixes : of file names."""

    name: str
    read: Callable[[Any, str, Reading], Iterator[Placed]]
    text: Callable[[Iterable[Document], Reading], Iterator[str]] | None
    suffixes: tuple[str, ...] = ()
    save: Callable[[Iterable[Document], Path, Reading], None] | None = None


FORMATS = {
    found.name: found
    for found in (
        Format("conll", read_conll, write_conll, (".conll", ".col")),
        Format("conllu", read_conllu, write_conllu, (".conllu",)),
        Format("prodigy", read_prodigy, write_prodigy, (".jsonl",)),
        Format("doccano", read_doccano, write_doccano),
        Format("label-studio", read_label_studio, write_label_studio, (".json",)),
        Format("brat", read_brat, None, (".ann",), write_brat),
        Format("spacy", read_docbin, None, (".spacy",), write_docbin),
        Format("text", read_text, write_text, (".txt",)),
    )
}


_ALIKE = ({"conll", "text"}, {"conllu", "text"}, {"prodigy", "doccano", "label-studio"})
"""Sets of formats whose files may have the same names."""


def named(name: str) -> Format:
    """The format with this name."""
    if name not in FORMATS:
        raise InputError("format", f"{name!r} is not known", f"use one of {', '.join(FORMATS)}")
    return FORMATS[name]


def format_of(path: Any, option: str = "format") -> str:
    """The format that a file name's suffix stands for; doccano's lines cannot be told from Prodigy's."""
    end = os.path.splitext(os.fspath(path))[1].lower() if isinstance(path, str | os.PathLike) else ""
    for found in FORMATS.values():
        if end in found.suffixes:
            return found.name
    problem = f"the name {name_of(path)} does not tell the format"
    raise InputError(option, problem, f"say which: {', '.join(FORMATS)}")


def format_by_name(path: str, usual: str) -> str:
    """The format that a file name's suffix stands for; ``usual`` if the suffix is not known, or if files of
    the usual format may have it too: columns are often in .txt, and all JSON is in .json or .jsonl."""
    with suppress(InputError):
        found = format_of(path)
        alike = any({found, usual} <= names for names in _ALIKE)
        if not alike and (found, usual) != ("conll", "conllu"):  # CoNLL-U is often in .conll
            return found
    return usual


def read(source: Source, format: str | None = None, **how: Any) -> Iterator[Document]:
    """The documents of a file, one by one: memory is that of one document.

    Parameters
    ----------
    source : a path, a binary stream, or lines of text; for brat the path of a folder.
    format : 'conll', 'conllu', 'prodigy', 'doccano', 'label-studio', 'brat', 'spacy' or 'text'; None to
        tell by the suffix of the file's name.
    encoding : the file's, 'utf-8' by default.
    scheme : tagging scheme of labels made from spans: 'BIO' by default, 'IOBES', 'BILOU' or 'IO'.
    snap : whether a span that cuts a token grows to hold it; by default that is an error.
    field : where labels are in CoNLL-U: 'upos' by default, 'xpos', 'deprel', 'feats:NAME' or 'misc:NAME'.
    missing : in CoNLL columns, the text that stands for a label that is not known, '?' by default.

    An InputError names the file with the line, or the number of the task in Label Studio's list.

    Example
    -------
    >>> lines = ['{"text": "Ann left", "label": [[0, 3, "PER"]]}']
    >>> [(document.words, document.labels) for document in read(lines, format="doccano")]
    [(('Ann', 'left'), ('B-PER', 'O'))]
    """
    found = named(format_of(source) if format is None else format)
    return (document for document, _ in found.read(source, name_of(source), _reading(how)))


def write(documents: Iterable[Document], path: Path, format: str | None = None, **how: Any) -> None:
    """Write documents, which may come from a generator; one is held in memory at a time, except for
    'spacy'.

    The file appears whole or not at all; for brat, ``path`` is a folder. format, encoding, field and
    missing are those of :func:`read`. If a document has a prediction, the prediction is written, with its
    probabilities. Formats with spans are written without the labels' tagging scheme; 'text' is written
    without labels."""
    found, reading = named(format_of(path) if format is None else format), _reading(how)
    check_encoding(reading.encoding, os.fspath(path))
    if found.save is not None:
        found.save(documents, path, reading)
        return
    assert found.text is not None
    parts.write_text_file(path, found.text(documents, reading), reading)


def _reading(how: dict[str, Any]) -> Reading:
    try:
        return replace(Reading(), **how)
    except TypeError:
        names = ", ".join(vars(Reading()))
        wrong = ", ".join(sorted(set(how) - set(vars(Reading()))))
        raise InputError(wrong, "is not known", f"use format, {names}") from None
