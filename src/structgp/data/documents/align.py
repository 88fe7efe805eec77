"""From spans of characters to spans of tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from structgp.data.documents.tokenizer import tokenize
from structgp.data.span_labels import TokenSpan
from structgp.errors import InputError

_SHOWN = 30


def token_spans(
    text: str,
    tokens: Sequence[tuple[int, int]],
    spans: Iterable[Sequence[Any]],
    place: str = "document",
    snap: bool = False,
) -> list[TokenSpan]:
    """Spans (start, stop, label) in characters as spans of tokens, in their order.

    White space around a span is left out. A span that begins or ends inside a token is an InputError that
    names ``place`` and the offsets; with ``snap`` it grows to hold the whole token. A span that begins or
    ends with characters outside all tokens, which happens if a file has tokens of its own, is an InputError
    too."""
    starts, stops = [start for start, _ in tokens], [stop for _, stop in tokens]
    found = []
    for start, stop, label in (tuple(span)[:3] for span in spans):
        if not (_whole(start) and _whole(stop) and 0 <= start < stop <= len(text)):
            problem = f"the span {label!r} from {start!r} to {stop!r} is not in the text, which has "
            problem += f"{len(text)} characters"
            raise InputError(place, problem, "count characters from 0; the stop is one past the last one")
        # Tokens that have a character in common with the span.
        first, past = bisect_right(stops, start), bisect_left(starts, stop)
        if first >= past:
            problem = (
                f"the span {label!r} from {start} to {stop} ({text[start:stop][:_SHOWN]!r}) holds no token"
            )
            raise InputError(place, problem, "remove it")
        for at, end in ((first, starts[first] < start), (past - 1, stops[past - 1] > stop)):
            if end and not snap:
                word = text[starts[at] : stops[at]]
                problem = (
                    f"the span {label!r} from {start} to {stop} ({text[start:stop][:_SHOWN]!r}) cuts the "
                )
                problem += f"token {word[:_SHOWN]!r} from {starts[at]} to {stops[at]}"
                raise InputError(
                    place, problem, "correct the span, give tokens, or let it grow with snap=True"
                )
        _check_covered(text, (start, stop, label), starts[first], stops[past - 1], place)
        found.append((first, past, str(label)))
    return found


def _check_covered(text: str, span: tuple[int, int, Any], first: int, past: int, place: str) -> None:
    """InputError if a span holds visible characters before its first token or after its last: the span of
    its tokens would be shorter. first, past : characters where its tokens begin and end."""
    start, stop, label = span
    for part in (text[start:first], text[past:stop]):
        if tokenize(part):
            problem = f"the span {label!r} from {start} to {stop} ({text[start:stop][:_SHOWN]!r}) holds "
            problem += f"{part.strip()[:_SHOWN]!r}, which is in no token"
            raise InputError(place, problem, "correct the span or the tokens, or leave the tokens out")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
