"""Reads spans from labels in any tagging scheme, and writes spans as labels in a chosen one.

A span is (first token, one past the last token, type)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from structgp.errors import InputError

TokenSpan = tuple[int, int, str]

SCHEMES = ("BIO", "IOBES", "BILOU", "IO")
"""Tagging schemes that spans can be written in."""

_CHUNK_TAGS, _OUTSIDE_TAGS, _BILOU = frozenset("BIES[]"), frozenset("O."), {"L": "E", "U": "S"}
_ALWAYS_STARTS, _ALWAYS_ENDS = frozenset("BS[]"), frozenset("ES[]")
# Tags of a span's first, inner and last token, and of a span of one token.
_WRITTEN = {"BIO": "BIIB", "IOBES": "BIES", "BILOU": "BILU", "IO": "IIII"}
_NAMES = {"IOB2": "BIO", "BIOES": "IOBES"}


def _parse(label: str) -> tuple[str, str]:
    """Label -> (tag, type); the tag is one of B I E S [ ], or O for a token outside all chunks."""
    tag, _, kind = label.partition("-")
    if tag in _OUTSIDE_TAGS:
        return "O", ""
    if tag in _CHUNK_TAGS:
        return tag, kind
    if tag in _BILOU and kind:
        return _BILOU[tag], kind
    return "S", label


def chunks(labels: Sequence[str]) -> list[TokenSpan]:
    """The chunks of one sequence as (first token, one past the last token, type), in order.

    A token that is not outside starts a chunk if it is the first, if the token before it is outside, of
    another type, or tagged E, S, [ or ]; or if it is itself tagged B, S, [ or ]. A chunk ends before the
    next chunk or the next token outside."""
    found: list[TokenSpan] = []
    start, before, before_kind = 0, "O", ""
    for t, (tag, kind) in enumerate([*map(_parse, labels), ("O", "")]):
        tags_part = "O" in (tag, before) or tag in _ALWAYS_STARTS or before in _ALWAYS_ENDS
        if tags_part or kind != before_kind:
            if before != "O":
                found.append((start, t, before_kind))
            start = t
        before, before_kind = tag, kind
    return found


def labels_to_spans(labels: Sequence[str | None]) -> list[TokenSpan]:
    """The spans that labels stand for, in order, whatever the scheme. A token whose label is not known
    (None) counts as outside, since its span cannot be told.

    Example
    -------
    >>> labels_to_spans(["B-PER", "I-PER", "O", "S-LOC", None])
    [(0, 2, 'PER'), (3, 4, 'LOC')]
    """
    return chunks(["O" if label is None else label for label in labels])


def spans_to_labels(
    spans: Iterable[TokenSpan], n_tokens: int, scheme: str = "BIO", place: str = "spans"
) -> list[str]:
    """One label per token for spans that do not overlap, 'O' outside of them.

    scheme : 'BIO' (also 'IOB2'), 'IOBES' (also 'BIOES'), 'BILOU' or 'IO'. In IO, adjacent spans of one
    type are read back as one. place : what errors call the spans.

    Example
    -------
    >>> spans_to_labels([(0, 2, "PER"), (3, 4, "LOC")], 4)
    ['B-PER', 'I-PER', 'O', 'B-LOC']
    """
    tags = _WRITTEN[known_scheme(scheme)]
    labels = ["O"] * n_tokens
    end, before = 0, ""
    for start, stop, kind in sorted(spans):
        if not 0 <= start < stop <= n_tokens:
            problem = f"the span {kind!r} from token {start} to {stop} does not fit into {n_tokens} tokens"
            raise InputError(place, problem, "count tokens from 0, and give one past the last one")
        if start < end:
            problem = f"the spans {before!r} and {kind!r} overlap at token {start}"
            raise InputError(place, problem, "keep one of them: a token has one label")
        inner = [tags[0], *tags[1] * (stop - start - 2), tags[2]] if stop - start > 1 else [tags[3]]
        labels[start:stop] = [f"{tag}-{kind}" if kind else tag for tag in inner]
        end, before = stop, kind
    return labels


def known_scheme(scheme: str) -> str:
    """The scheme's usual name, one of ``SCHEMES``."""
    name = _NAMES.get(str(scheme).upper(), str(scheme).upper())
    if name not in SCHEMES:
        raise InputError("scheme", f"{scheme!r} is not a scheme", f"use one of {', '.join(SCHEMES)}")
    return name
