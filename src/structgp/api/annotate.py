"""Documents with a model's answers: labels, spans, and how probable each of them is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from structgp.answers.ask import Asked
from structgp.api.fitted import Fitted
from structgp.data.documents import Document, Prediction, labels_to_spans, token_features
from structgp.errors import InputError

LEAST = 1e-3
"""Spans of at least this probability are found all at once; less probable ones are looked up one by one."""

Known = Sequence[Sequence[str | None] | None]


def annotate(
    tagger: Fitted,
    documents: Iterable[Document],
    X: Sequence[Any] | None = None,
    *,
    known: Known | None = None,
    defer: float | None = None,
) -> list[Document]:
    """Copies of the documents with their ``prediction``: the labels with their probabilities, and the spans
    that these labels encode, each with its probability.

    Parameters
    ----------
    tagger : a fitted :class:`structgp.StructuredGPClassifier` for sequences.
    X : features of each document's tokens, as in training; None for the features of
        :func:`structgp.data.documents.token_features`.
    known : labels that are known: for each document None, or a list with None for each unlabelled token.
    defer : see ``predict``; a deferred label is None.

    Example
    -------
    >>> from structgp import Prior, StructuredGPClassifier
    >>> given = [("two eggs", [(0, 3, "QTY")]), ("3 figs", [(0, 1, "QTY")])]
    >>> documents = [Document.from_text(text, spans) for text, spans in given]
    >>> X = [token_features(document.words) for document in documents]
    >>> tagger = StructuredGPClassifier(prior=Prior(data_weight=1))
    >>> tagger = tagger.fit(X, [document.labels for document in documents])
    >>> (found,) = annotate(tagger, [Document.from_text("two figs")])
    >>> found.prediction.labels
    ('B-QTY', 'O')
    >>> [(span.start, span.stop, span.label) for span in found.prediction.spans]
    [(0, 3, 'QTY')]
    """
    given = list(documents)
    X = _default_features(tagger, given) if X is None else X
    _check_numbers(len(given), X=X, known=known)
    asked = tagger.ask(X)
    spec = asked.model.spec
    if spec.form != "sequence" or spec.layers:
        problem = f"the model's structure is {spec}, and documents are sequences with one label per token"
        raise InputError("tagger", problem, "use predict")
    kept: list[list[str | None]] | None = None
    if known is not None:
        both = zip(given, known, strict=True)
        kept = [[None] * len(d.tokens) if labels is None else list(labels) for d, labels in both]
    labels = tagger.labels_of(asked, kept)
    shown: list[Any] = labels if defer is None else tagger.deferred(asked, labels, defer, kept)
    marginals, shares = tagger.marginals_of(asked, kept), _likely(asked, kept)
    found = []
    for i, document in enumerate(given):
        p = tuple(min(1.0, at[label]) for at, label in zip(marginals[i], labels[i], strict=True))
        spans = [
            document.text_span(*span, _share(asked, i, span, shares, kept))
            for span in labels_to_spans(shown[i])
        ]
        score = sum(p) / len(p) if p else None
        found.append(replace(document, prediction=Prediction(tuple(shown[i]), p, tuple(spans), score)))
    return found


def _default_features(tagger: Fitted, documents: Sequence[Document]) -> list[Any]:
    if any(block.kind == "dense" for block in tagger.model_.encoder.blocks):
        problem = "the model was trained with vectors, which the default features do not have"
        raise InputError("X", problem, "pass the features as X: annotate(tagger, documents, X)")
    return [token_features(document.words) for document in documents]


def _check_numbers(n: int, **given: Sequence[Any] | None) -> None:
    """Raises InputError if an argument does not have one entry for each of the n documents."""
    for name, entries in given.items():
        if entries is not None and len(entries) != n:
            problem = f"{len(entries)} entries for {n} documents"
            raise InputError(name, problem, "give one for each document, in the same order")


def _likely(asked: Asked, known: Any) -> list[dict[tuple[int, int, str], float]] | None:
    """Probabilities of each sequence's spans that reach LEAST; None if the structure has no spans."""
    if not asked.model.structure.has_spans:
        return None
    found = asked.spans(LEAST, known)
    return [{(start, stop, kind): p for start, stop, kind, p in spans} for spans in found]


def _share(asked: Asked, i: int, span: tuple[int, int, str], shares: Any, known: Any) -> float | None:
    if shares is None:
        return None
    if span in shares[i]:
        return float(shares[i][span])
    return asked.some([i]).span(*span, "exact", None if known is None else [known[i]])[0]
