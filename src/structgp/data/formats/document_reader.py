"""The reader of a model that was trained on documents: from a file in any of their formats to features and
labels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from structgp.data.documents import Document, token_features
from structgp.data.documents.token_features import shape
from structgp.data.formats.conllu import place_of_field
from structgp.data.formats.file_formats import named
from structgp.data.formats.format_parts import Reading
from structgp.data.sources.lines import FileSequence, Labelled, name_of, read_all
from structgp.data.sources.readers import Labels, Reader
from structgp.data.sources.templates import Template
from structgp.data.sources.vectors import ColumnVectors
from structgp.errors import InputError, StructgpWarning

ROW = ("word", "lower case", "shape", "first three characters", "last three characters")
"""Columns that a template finds in a document; in CoNLL-U, lemma, UPOS, XPOS and FEATS come after them."""

LABELLED_BY = {
    "conll": ", in the last of two columns or more",
    "doccano": ", under 'label', 'labels' or 'entities'",
    "prodigy": '; spans with a probability are a model\'s, unless "answer" is "accept"',
    "label-studio": ", under 'annotations'",
    "brat": ": a folder of texts with a file NAME.ann beside each",
}
"""What the labels of a format look like, for the error about files that have none."""


@dataclass(frozen=True)
class DocumentSequence(FileSequence):
    """One document of a file, as a sequence."""

    document: Document = field(default_factory=lambda: Document("", ()))


@dataclass(frozen=True)
class DocumentReader(Reader):
    """Reads documents. documents : the format of files, see :data:`structgp.data.formats.FORMATS`. how :
    options of the formats. template : the features' template, over the columns ``ROW``; None for
    :func:`structgp.data.documents.token_features`. vectors : word vectors besides these features.

    Documents without labels are left out of training and scores."""

    documents: str
    how: Reading = field(default_factory=Reading)
    template: Template | None = None
    vectors: ColumnVectors | None = None

    format: ClassVar[str] = "documents"
    has_token_lines: ClassVar[bool] = False

    def __post_init__(self) -> None:
        template = self.template
        place_of_field(self.how.field)
        vars(self).update(missing=self.how.missing, has_dense=self.vectors is not None)
        if template is not None:
            lines = (*template.unigrams, *template.bigrams)
            vars(self).update(
                transition_columns=template.transition_columns,
                has_transitions=template.has_bigram or bool(template.bigrams),
                template_lines={str(p): line.source for p, line in enumerate(lines)},
            )
            template.check_columns(len(self._columns(Document.from_words(["a"]))[0]), "documents")

    def of_format(self, name: str | None, snap: bool = False) -> DocumentReader:
        """The same reader for files of another format; None keeps the format. snap : whether spans that cut
        tokens grow even if they did not in training."""
        how = replace(self.how, snap=self.how.snap or snap)
        return replace(self, documents=self.documents if name is None else named(name).name, how=how)

    def of_missing(self, missing: str) -> DocumentReader:
        """The same reader with another text for labels that are not known; the usual text changes
        nothing."""
        usual = missing == Reading.missing
        return self if usual else replace(self, how=replace(self.how, missing=missing))

    def sequences(
        self, source: Any, *, encoding: str = "utf-8", name: str | None = None
    ) -> Iterator[DocumentSequence]:
        name = name_of(source) if name is None else name
        how = replace(self.how, encoding=encoding)
        for document, line in named(self.documents).read(source, name, how):
            labels = None if document.labels is None else list(document.labels)
            tokens, words = self.tokens(document), list(document.words)
            yield DocumentSequence([(w,) for w in words], tokens, words, labels, name, line, document)

    def tokens(self, document: Document) -> list[Any]:
        """The features of a document's tokens."""
        if self.template is None:
            found: list[Any] = token_features(document.words)
        else:
            found = self.template.expand(self._columns(document)) if document.tokens else []
        if self.vectors is None:
            return found
        if self.template is not None:
            found = [{str(p): value for p, value in enumerate(values)} for values in found]
        rows = [(word,) for word in document.words]
        vectors: Any = self.vectors.features(rows, document.name, 1) if rows else []
        return [token | {"vector": vector} for token, vector in zip(found, vectors, strict=True)]

    def _columns(self, document: Document) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        lines = [line for line in document.meta.get("conllu", ()) if line[0].isdigit()]
        own = place_of_field(self.how.field)[0]
        for t, word in enumerate(document.words):
            lower = word.lower()
            row: tuple[str, ...] = (word, lower, shape(word), lower[:3], lower[-3:])
            if self.documents == "conllu":
                cells = lines[t] if lines else ["_"] * 10
                row += tuple("_" if column == own else cells[column] for column in (2, 3, 4, 5))
            rows.append(row)
        return rows

    def labels_of(self, found: FileSequence) -> Any:
        if found.labels is None:
            raise InputError(f"{found.name}:{found.line}", "not labelled", "label it, or leave it out")
        return found.labels

    def labelled(self, source: Any, encoding: str, name: str) -> Iterator[tuple[list[Any], Labels]]:
        for found in self._with_labels_only(source, encoding, name):
            yield found.tokens, found.labels

    def _with_labels_only(self, source: Any, encoding: str, name: str) -> Iterator[DocumentSequence]:
        without = n = 0
        for found in self.sequences(source, encoding=encoding, name=name):
            n += 1
            if found.labels is None:
                without += 1
            elif found.labels:
                yield found
        if n and without == n:
            remedy = f"give a file with labels{LABELLED_BY.get(self.documents, '')}"
            raise InputError(name, "none of its documents is labelled", remedy)
        if without:
            message = f"{name}: {without} of {n} documents are not labelled; they are left out"
            warnings.warn(message, StructgpWarning, stacklevel=2)

    def read(self, source: Any, *, encoding: str = "utf-8", name: str | None = None) -> Labelled:
        name = name_of(source) if name is None else name
        found = read_all(self._with_labels_only(source, encoding, name), name)
        parts = ([s.tokens for s in found], [s.labels for s in found], [s.line for s in found])
        return Labelled(name, *parts)

    def with_labels(self, sequence: FileSequence, labels: Sequence[str | None]) -> str:
        assert isinstance(sequence, DocumentSequence)
        write = named(self.documents).text
        assert write is not None, "a folder is not one text"
        return "".join(write([sequence.document.with_labels(labels)], self.how))

    def to_json(self) -> dict[str, Any]:
        how = {key: value for key, value in vars(self.how).items() if key != "encoding"}
        state: dict[str, Any] = {"format": self.format, "documents": self.documents, "how": how}
        if self.template is not None:
            state |= {"document_template": self.template.text, "dialect": self.template.dialect}
        return state if self.vectors is None else state | {"vectors": self.vectors.to_json()}

    @staticmethod
    def from_json(state: Any, model: str, vectors: str | None) -> DocumentReader:
        template, words = None, None
        if "document_template" in state:
            template = Template.parse(state["document_template"], f"{model} (template)", state["dialect"])
        if "vectors" in state:
            words = ColumnVectors.from_json(state["vectors"], model, vectors)
        return DocumentReader(state["documents"], Reading(**state["how"]), template, words)
