"""A document: a text, its tokens by their place in it, and what is known or predicted about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from structgp.data.documents.align import token_spans
from structgp.data.documents.tokenizer import Offsets, tokenize
from structgp.data.span_labels import labels_to_spans, spans_to_labels
from structgp.errors import InputError


class TextSpan(NamedTuple):
    """A labelled span: the characters of a text from ``start`` to before ``stop``. probability : the
    span's, if it is predicted."""

    start: int
    stop: int
    label: str
    probability: float | None = None


@dataclass(frozen=True)
class Prediction:
    """A model's answer. labels : one per token. probabilities : one per label, () if a file does not give
    them. spans : the spans that the labels stand for, with their probabilities. score : the share of tokens
    whose label is expected to be right."""

    labels: tuple[str | None, ...]
    probabilities: tuple[float, ...] = ()
    spans: tuple[TextSpan, ...] = ()
    score: float | None = None


@dataclass(frozen=True)
class Document:
    """One text, labelled as one sequence.

    text : as it was read, unchanged.
    tokens : (start, stop) of each token in characters of the text, in order; they do not overlap.
    labels : one per token, None where it is not known; None if nothing is labelled.
    id : the document's name, None if it has none.
    meta : what else its file says about it, kept so that it can be written again.
    prediction : a model's answer for it.

    Example
    -------
    >>> document = Document.from_text("Ann Lee left Rome.", [(0, 7, "PER"), (13, 17, "LOC")])
    >>> document.words
    ('Ann', 'Lee', 'left', 'Rome', '.')
    >>> document.labels
    ('B-PER', 'I-PER', 'O', 'B-LOC', 'O')
    >>> document.spans[1]
    TextSpan(start=13, stop=17, label='LOC', probability=None)
    """

    text: str
    tokens: Offsets
    labels: tuple[str | None, ...] | None = None
    id: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict, hash=False)
    prediction: Prediction | None = None

    def __post_init__(self) -> None:
        tokens = tuple((int(start), int(stop)) for start, stop in self.tokens)
        object.__setattr__(self, "tokens", tokens)
        if self.labels is not None:
            object.__setattr__(self, "labels", tuple(self.labels))
        end = 0
        for t, (start, stop) in enumerate(tokens):
            if not end <= start < stop <= len(self.text):
                problem = f"characters {start} to {stop} overlap a token before, or are not in the text of "
                problem += f"{len(self.text)}"
                raise InputError(
                    f"{self.name}.tokens[{t}]", problem, "give tokens in order, as (start, stop)"
                )
            end = stop
        predicted = None if self.prediction is None else self.prediction.labels
        for what, labels in (("labels", self.labels), ("prediction", predicted)):
            if labels is not None and len(labels) != len(tokens):
                problem = f"{len(labels)} labels for {len(tokens)} tokens"
                raise InputError(f"{self.name}.{what}", problem, "give one per token, None if not known")

    @property
    def name(self) -> str:
        """The name by which errors call the document."""
        return "document" if self.id is None else f"document {self.id}"

    @property
    def words(self) -> tuple[str, ...]:
        """The text of each token."""
        return tuple(self.text[start:stop] for start, stop in self.tokens)

    @property
    def spans(self) -> tuple[TextSpan, ...]:
        """The labelled spans, in characters: those that the labels stand for in their tagging scheme."""
        return self.spans_of(() if self.labels is None else self.labels)

    def spans_of(self, labels: Sequence[str | None]) -> tuple[TextSpan, ...]:
        """The spans that these labels of the document's tokens stand for."""
        return tuple(self.text_span(*span) for span in labels_to_spans(labels))

    def text_span(self, first: int, past: int, label: str, probability: float | None = None) -> TextSpan:
        """The span of the characters of the tokens from ``first`` to before ``past``."""
        return TextSpan(self.tokens[first][0], self.tokens[past - 1][1], label, probability)

    @staticmethod
    def from_text(
        text: str,
        spans: Iterable[Sequence[Any]] | None = None,
        *,
        tokens: Iterable[tuple[int, int]] | None = None,
        scheme: str = "BIO",
        snap: bool = False,
        id: str | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Document:
        """A document from a text and its labelled spans.

        spans : (start, stop, label) in characters; None if nothing is labelled, () if the text has none.
        tokens : offsets of the tokens; :func:`tokenize` finds them if they are not given.
        scheme : tagging scheme of the labels, see :func:`structgp.data.documents.spans_to_labels`.
        snap : whether a span that cuts a token grows to hold all of it; otherwise that is an InputError."""
        found = Document(text, tokenize(text) if tokens is None else tuple(tokens), None, id, meta or {})
        return found if spans is None else found.with_spans(spans, scheme=scheme, snap=snap)

    @staticmethod
    def from_words(
        words: Sequence[str],
        labels: Sequence[str | None] | None = None,
        *,
        id: str | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Document:
        """A document from words that have no text: the text is the words with a space between them."""
        offsets, start = [], 0
        for t, word in enumerate(words):
            if not word:
                raise InputError(f"words[{t}]", "empty", "leave it out, or write a placeholder such as _")
            offsets.append((start, start + len(word)))
            start += len(word) + 1
        given = None if labels is None else tuple(labels)
        return Document(" ".join(words), tuple(offsets), given, id, meta or {})

    def with_spans(
        self, spans: Iterable[Sequence[Any]], *, scheme: str = "BIO", snap: bool = False
    ) -> Document:
        """The same document with these spans (start, stop, label), in characters, as its labels."""
        found = token_spans(self.text, self.tokens, spans, self.name, snap)
        return replace(self, labels=tuple(spans_to_labels(found, len(self.tokens), scheme, self.name)))

    def with_labels(self, labels: Sequence[str | None] | None) -> Document:
        """The same document with these labels for its tokens."""
        return replace(self, labels=None if labels is None else tuple(labels))
