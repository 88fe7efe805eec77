"""Labels that look like slips: seen once, or one letter from another that is far more frequent."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from structgp.errors import StructgpWarning

SLIPS, TIMES = 3, 10
"""A slip occurs at most this often, and the label that was meant at least this many times as often as the
slip."""

SHORTEST = 3
"""Fewest letters of a name for it to be compared: too many shorter names are one letter apart on
purpose."""

ENOUGH_TOKENS = 200
"""Number of labelled tokens from which on labels whose name occurs once are worth a warning."""

MOSTLY_ONCE = 0.5
"""Share of the tokens from which on labels that occur once are not slips but all there is to learn from."""

MOST_NAMED = 5
"""Largest number of labels that a warning names."""


def warn_of_odd_labels(
    examples: Any, before: Mapping[str, float] | None = None, stacklevel: int = 3
) -> None:
    """Gives one warning for all labels that look like slips, or one that next to nothing can be learned.
    examples : have classes, how often each occurs, and ``given`` if the labels are those of several
    annotators. before : how often labels occurred in earlier data."""
    numbers, given = examples.label_counts, getattr(examples, "given", None)
    if given is not None:
        numbers = np.bincount(given.label, minlength=len(numbers))
    counts = dict(zip(examples.labels.classes, numbers.tolist(), strict=True))
    for label, count in (before or {}).items():
        counts[label] = counts.get(label, 0) + count
    slips = meant_by(counts)
    told = [f"{slip!r} ({_times(counts[slip])}) is close to {meant!r}" for slip, meant in slips.items()]
    told = _some(told)
    once = [repr(label) for label in single(counts) if label not in slips]
    n_tokens = sum(counts.values())
    if n_tokens >= ENOUGH_TOKENS and len(once) >= MOSTLY_ONCE * n_tokens:
        share = len(once) / n_tokens
        message = f"labels: {len(once):,} of {len(counts):,} occur once, on {share:.0%} of the "
        message += "tokens: one token teaches next to nothing of its label, and predictions of these will "
        message += "hardly be better than chance; use fewer, broader labels, or label more"
        warnings.warn(message, StructgpWarning, stacklevel=stacklevel)
        return
    if once and n_tokens >= ENOUGH_TOKENS:
        told.append(f"{', '.join(_some(once))} {'occurs' if len(once) == 1 else 'occur'} once")
    if counts.get("?") and not counts.keys() & {".", ","}:  # which are labels of punctuation, as it may be
        told.append(f"'?' ({_times(counts['?'])}) is taken for a label, not for None (--missing '?')")
    if told:
        message = f"labels: {'; '.join(told)}; check them for slips"
        warnings.warn(message, StructgpWarning, stacklevel=stacklevel)


def _times(count: float) -> str:
    return "once" if count == 1 else f"{count:g} times"


def _some(told: list[str]) -> list[str]:
    more = len(told) - MOST_NAMED
    return [*told[:MOST_NAMED], f"{more} more"] if more > 0 else told


def single(counts: Mapping[str, float]) -> list[str]:
    """The labels whose name occurs once in total, whatever the prefix."""
    names = Counter[str]()
    for label, count in counts.items():
        names[_parts(label)[1]] += count  # type: ignore[assignment]
    return [label for label, count in counts.items() if count == names[_parts(label)[1]] == 1]


def meant_by(counts: Mapping[str, float]) -> dict[str, str]:
    """For each label that looks like a slip, the label that was meant. Cost O(V^2)."""
    found = {}
    frequent = sorted(counts, key=lambda label: -counts[label])
    for slip in (label for label in counts if 0 < counts[label] <= SLIPS):
        for meant in frequent:
            if counts[meant] < TIMES * counts[slip]:
                break
            if _is_close(slip, meant):
                found[slip] = meant
                break
    return found


def _is_close(one: str, other: str) -> bool:
    """True if two labels with the same prefix of a tagging scheme have names that differ by one letter
    (replaced, added or missing), by two neighbouring letters exchanged, or only in capitals."""
    (prefix, a), (other_prefix, b) = _parts(one), _parts(other)
    if prefix != other_prefix or min(len(a), len(b)) < SHORTEST or a == b:
        return False
    if a.lower() == b.lower():
        return True
    start = 0
    while start < min(len(a), len(b)) and a[start] == b[start]:
        start += 1
    end = 0
    while end < min(len(a), len(b)) - start and a[-1 - end] == b[-1 - end]:
        end += 1
    x, y = a[start : len(a) - end], b[start : len(b) - end]
    exchanged = len(x) == 2 and x == y[::-1]
    return (max(len(x), len(y)) == 1 or exchanged) and (x + y).isalpha()


def _parts(label: str) -> tuple[str, str]:
    """A label's prefix, such as B-, and the name after it; the prefix is '' if there is none."""
    return (label[:2], label[2:]) if label[1:2] == "-" else ("", label)
