"""spaCy's DocBin: documents with entities. Needs spaCy (``pip install "structgp[spacy]"``).

Tokens are spaCy's, without those that are white space. If spaCy does not know whether a token is part of an
entity, the token has no label. Probabilities of predicted entities are in the extension attribute
``probability`` of spans. A DocBin is one compressed block, which spaCy reads and writes as a whole."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from structgp.data.atomic import atomic_write
from structgp.data.documents import Document, TextSpan, spans_to_labels, tokenize
from structgp.data.formats import format_parts as parts
from structgp.data.formats.format_parts import Placed, Reading
from structgp.data.opening import cannot_read
from structgp.errors import InputError

LARGEST, GROWTH = 100 << 20, 30
"""A file may unpack to this many bytes plus this many times its own size: documents shrink less than
that."""
IDENTITY = "structgp_id"
"""Key of a document's name in spaCy's user data."""


def spacy_package() -> Any:
    """The package spacy, or an InputError that says how to get it."""
    try:
        import spacy
    except ImportError as error:
        raise InputError("spacy", "is not installed", 'run: pip install "structgp[spacy]"') from error
    return spacy


def read_docbin(source: Any, name: str, how: Reading) -> Iterator[Placed]:
    spacy = spacy_package()
    from spacy.tokens import DocBin

    if not isinstance(source, str | os.PathLike):
        raise InputError(name, "a DocBin is read from a file", "name the file")
    try:
        with open(source, "rb") as file:
            content = _checked(file.read(), name)
        docs = DocBin().from_bytes(content).get_docs(spacy.blank("xx").vocab)
        for number, doc in enumerate(docs, start=1):
            yield Placed(from_doc(doc, how.scheme, f"{name}[{number - 1}]"), number)
    except OSError as error:
        raise cannot_read(name, error) from error
    except Exception as error:  # spaCy may raise anything for a damaged file
        if isinstance(error, InputError):
            raise
        problem = f"not a DocBin ({type(error).__name__}: {error})"
        raise InputError(name, problem, "write it with DocBin.to_disk") from error


def _checked(content: bytes, name: str) -> bytes:
    """The content of a file; InputError if it unpacks to far more: 1,000 bytes may stand for a million."""
    unpacking, size, most = zlib.decompressobj(), 0, LARGEST + GROWTH * len(content)
    rest = content
    while rest and size <= most:
        size += len(unpacking.decompress(rest, 1 << 20))
        rest = unpacking.unconsumed_tail
    if size > most:
        problem = f"unpacks to more than {most >> 20} MB"
        raise InputError(name, problem, "write the documents to several files")
    return content


def from_doc(doc: Any, scheme: str = "BIO", place: str = "doc") -> Document:
    """A spaCy Doc as a document, with its entities as labels; without labels if spaCy does not know its
    entities."""
    kept = [token for token in doc if tokenize(token.text)]
    numbers = {token.i: t for t, token in enumerate(kept)}
    offsets = tuple((token.idx, token.idx + len(token.text)) for token in kept)
    labels: list[str | None] | None = None
    if doc.has_annotation("ENT_IOB"):
        spans = []
        for entity in doc.ents:
            inside = [numbers[token.i] for token in entity if token.i in numbers]
            if inside:
                spans.append((inside[0], inside[-1] + 1, entity.label_))
        labels = [*spans_to_labels(spans, len(kept), scheme, place)]
        labels = [y if token.ent_iob else None for y, token in zip(labels, kept, strict=True)]
        labels = labels if not kept or any(labels) else None
    found = doc.user_data.get(IDENTITY)
    identity = found if isinstance(found, str) else None
    return Document(doc.text, offsets, None if labels is None else tuple(labels), identity)


def to_doc(document: Document, vocab: Any) -> Any:
    """A document as a spaCy Doc with the same text. Its entities are the predicted spans if there is a
    prediction, else the labelled spans."""
    spacy_package()
    from spacy.tokens import Doc, Span

    doc = Doc(vocab, *_words_and_spaces(document))
    if document.id is not None:
        doc.user_data[IDENTITY] = document.id
    if document.labels is None and document.prediction is None:
        return doc
    spans = parts.shown_spans(document)
    if not all(span.label for span in spans):
        raise InputError(document.name, "a span without a type", "name it: spaCy has none without")
    _check_ends(document, spans)
    entities = [doc.char_span(span.start, span.stop, label=span.label) for span in spans]
    unknown = [doc.char_span(start, stop) for start, stop in parts.unknown_tokens(document)]
    doc.set_ents(entities, missing=unknown, default="outside")
    if document.prediction is not None and not Span.has_extension("probability"):
        Span.set_extension("probability", default=None)
    for entity, span in zip(entities, spans, strict=True):
        if span.probability is not None:
            entity._.probability = span.probability
    return doc


def _check_ends(document: Document, spans: Sequence[TextSpan]) -> None:
    """InputError if a span begins or ends with a token that shows nothing: ``from_doc`` leaves such a token
    out, and the span would be shorter, or gone, when it is read again."""
    starts, stops = {span.start for span in spans}, {span.stop for span in spans}
    for start, stop in document.tokens:
        if (start in starts or stop in stops) and not tokenize(document.text[start:stop]):
            shown = repr(document.text[start:stop])
            problem = f"a span begins or ends with {shown}, which shows nothing"
            raise InputError(document.name, problem, "label it O, or remove it")


def _words_and_spaces(document: Document) -> tuple[list[str], list[bool]]:
    """spaCy's tokens, which hold all of a text but single spaces after them, and whether a space follows
    each."""
    words: list[str] = []
    spaces: list[bool] = []
    end = 0
    for start, stop in (*document.tokens, (len(document.text), len(document.text))):
        gap = document.text[end:start]
        if gap and words:
            spaces[-1] = gap[0] == " "
            gap = gap[spaces[-1] :]
        for word in filter(None, (gap, document.text[start:stop])):
            words.append(word)
            spaces.append(False)
        end = stop
    return words, spaces


def write_docbin(documents: Iterable[Document], path: str | os.PathLike[str], how: Reading) -> None:
    spacy = spacy_package()
    from spacy.tokens import DocBin

    vocab, found = spacy.blank("xx").vocab, DocBin(store_user_data=True)
    try:
        for document in documents:
            found.add(to_doc(document, vocab))
    except UnicodeEncodeError as error:
        problem = f"half of a character (\\u{ord(error.object[error.start]):x})"
        raise InputError(os.fspath(path), problem, "remove it from the documents") from None
    with atomic_write(path, "wb") as file:
        file.write(found.to_bytes())
