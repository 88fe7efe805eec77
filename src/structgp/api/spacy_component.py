"""A spaCy pipeline component that sets entities, each with its probability.

Importing this module registers the factory 'structgp'; if the package is installed, spaCy finds the factory
without the import. Needs spaCy (``pip install "structgp[spacy]"``)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from structgp.answers import model_file
from structgp.answers.ask import Asked
from structgp.api.annotate import annotate
from structgp.api.fitted import Fitted, read_as
from structgp.data.documents import Document, token_features, tokenize
from structgp.data.formats.docbin import from_doc, spacy_package
from structgp.data.formats.document_reader import DocumentReader
from structgp.data.sources import from_json
from structgp.data.span_labels import chunks
from structgp.errors import InputError

spacy_package()
from spacy.language import Language  # noqa: E402
from spacy.tokens import Doc, Span, Token  # noqa: E402

# nlp.pipe(n_process=...) forks. OpenMP's threads stay behind in the parent, and a child that relies on them
# would wait for ever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))

FILE = "model.sgp"
TOKENS = ("spacy", "structgp")
_CHUNK = 64


def _default_features(document: Document) -> list[Any]:
    return token_features(document.words)


class Tagger:
    """Sets ``doc.ents``. For each entity, ``ent._.probability`` is the probability that exactly this span
    with this label is there; ``ent._.uncertainty`` is the entropy of that event in nats, and
    ``ent._.model_uncertainty`` the part of the entropy that more labels would remove.
    ``token._.label_probability`` is the probability of the token's label.

    model : path of a model file that was trained on documents, on the command line or in Python with
    ``token_features``; None for a component that ``from_disk`` will fill. tokens : 'spacy' for the
    pipeline's own tokens, 'structgp' for those of ``structgp.data.documents.tokenize``, which are used in
    training if the training file has no tokens (doccano, Label Studio, brat, text). threshold : entities
    that are less probable are left out."""

    def __init__(self, model: str | None = None, tokens: str = TOKENS[0], threshold: float = 0.0) -> None:
        if tokens not in TOKENS:
            raise InputError(
                "tokens", f"{tokens!r} is not known", f"use one of {', '.join(map(repr, TOKENS))}"
            )
        self.tokens, self.threshold = tokens, float(threshold)
        self._fitted: Fitted | None = None
        self._reader: DocumentReader | None = None
        if model is not None:
            self._load(model)
        for name in ("probability", "uncertainty", "model_uncertainty"):
            if not Span.has_extension(name):
                Span.set_extension(name, default=None)
        if not Token.has_extension("label_probability"):
            Token.set_extension("label_probability", default=None)

    def _load(self, path: str | Path) -> None:
        self._fitted = read_as(Fitted, path, None)
        extra = self._fitted.model_.extra
        self._reader = None
        if "format" in extra:
            reader = from_json(extra, str(path))
            if not isinstance(reader, DocumentReader):
                problem = f"was trained on {reader.format}, not on documents"
                raise InputError(
                    str(path), problem, "train with --format prodigy or another format of documents"
                )
            self._reader = reader

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that entities can have."""
        if self._fitted is None:
            return ()
        return tuple(sorted({kind for label in self._fitted.classes_ for *_, kind in chunks([str(label)])}))

    def __call__(self, doc: Doc) -> Doc:
        return next(iter(self.pipe([doc])))

    def pipe(self, stream: Iterable[Doc], batch_size: int = _CHUNK) -> Iterator[Doc]:
        """The docs with their entities set, processed in batches."""
        docs = iter(stream)
        while chunk := list(islice(docs, batch_size)):
            yield from self._answered(chunk)

    def _answered(self, docs: list[Doc]) -> list[Doc]:
        fitted = self._fitted
        if fitted is None:
            raise InputError(
                "structgp",
                "has no model",
                "give its path: nlp.add_pipe('structgp', config={'model': PATH})",
            )
        documents = [self._document(doc) for doc in docs]
        features = self._reader.tokens if self._reader is not None else _default_features
        X = [features(document) for document in documents]
        for doc, document, x in zip(docs, annotate(fitted, documents, X), X, strict=True):
            self._set(doc, document, fitted.ask([x]))
        return docs

    def _document(self, doc: Doc) -> Document:
        if self.tokens == "structgp":
            return Document(doc.text, tokenize(doc.text))
        return from_doc(doc).with_labels(None)

    def _set(self, doc: Doc, document: Document, asked: Asked) -> None:
        """Sets entities and their attributes from the prediction."""
        predicted = document.prediction
        assert predicted is not None
        starts = {start: t for t, (start, _) in enumerate(document.tokens)}
        stops = {stop: t + 1 for t, (_, stop) in enumerate(document.tokens)}
        for token in doc:
            t = starts.get(token.idx)
            if t is not None:
                token._.label_probability = predicted.probabilities[t]
        entities: list[Span] = []
        for span in predicted.spans:
            # Our tokens may end inside spaCy's: the entity then grows, and later ones that it overlaps are
            # left out.
            entity = doc.char_span(
                span.start, span.stop, label=span.label or "ENT", alignment_mode="expand"
            )
            overlaps = bool(entities) and entity is not None and entity.start < entities[-1].end
            if entity is None or overlaps or (span.probability or 0.0) < self.threshold:
                continue
            entities.append(entity)
            entity._.probability = span.probability
            if span.probability is not None:
                _, of = asked.span(starts[span.start], stops[span.stop], span.label, "exact")
                entity._.uncertainty, entity._.model_uncertainty = float(of.total), float(of.model)
        doc.set_ents(entities, default="outside")

    def to_disk(self, path: str | Path, *, exclude: Iterable[str] = ()) -> None:
        """Writes the model into the folder ``path``."""
        if self._fitted is not None:
            Path(path).mkdir(parents=True, exist_ok=True)
            model_file.save(self._fitted.model_, Path(path) / FILE)

    def from_disk(self, path: str | Path, *, exclude: Iterable[str] = ()) -> Tagger:
        if (Path(path) / FILE).exists():
            self._load(Path(path) / FILE)
        return self


@Language.factory(
    "structgp",
    default_config={"model": None, "tokens": TOKENS[0], "threshold": 0.0},
    assigns=["doc.ents", "token.ent_iob", "token.ent_type", "span._.probability", "span._.uncertainty"],
)
def make(nlp: Language, name: str, model: str | None, tokens: str, threshold: float) -> Tagger:
    """The component; see :class:`Tagger`."""
    return Tagger(model, tokens, threshold)
