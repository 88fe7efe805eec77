"""Find out from training data which of a token's features is its word, and whether the word's parts are
useful.

Words are an open class: at least half of the feature's values were seen once, and most are longer than one
character. The feature is neither made by joining other features, nor always a piece of another one. Words
before and after the token are such features too, but at the beginnings or ends of sequences they always
have the same value, or none. If several features are left, as with and without capitals, the word is the
one that tells most about the labels.

Words that were seen once stand for those that are yet to come. Parts are useful if one of them tells
something about the labels of such words that the two best other features do not: a part of speech, for
instance, may have told it already."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from structgp.data.word_parts import PARTS, parts_of

OPEN = 0.5
"""Smallest share of values seen once for an open class. Not chosen on data: among the words of a few
hundred sentences, two thirds to four fifths are seen once."""

MOST_TOKENS, MOST_SCORES = 10_000, 2_000_000
"""Largest number of tokens that are looked at (the first ones), and largest product of tokens and labels;
some twenty arrays of that size are made (16 MB each)."""

SHARE = 0.7
"""Share of what a feature tells by itself that counts when it is combined with others, since they overlap.
Not chosen on data."""

LEAST = 0.01
"""Nats per word seen once that the best part must add at least. On TRAINING halves of four tasks it adds
.09 on recipes, .07 on the words of basenp and .09 to .12 on those of chunking; with parts of speech beside
the words, where parts of words do not help, .00 on basenp, chunking and japanesene."""

SAMPLE = 200
"""Number of tokens, or of values of a template, whose strings are looked at."""


def find_word(
    values: Sequence[Sequence[str]],
    rows: Sequence[np.ndarray],
    y: Sequence[np.ndarray],
    word: int | None = None,
) -> tuple[int, tuple[int, ...]] | None:
    """The template of the words, and the parts to add, as places in ``PARTS``; None if there are no words
    or no parts to add. A part that says nothing, or the same as another template, is left out.

    values : one list per template, its values by id; rows : one (T, W) array per sequence, value ids first;
    y : the labels of each sequence, negative where they are missing; word : the template of the words, if
    the user has named it. Cost: linear in at most ``MOST_TOKENS`` tokens."""
    ids, labels, edges = _tokens(rows, y, len(values))
    asked = word is not None
    if not asked and len(labels):
        word = _word(values, ids, labels, edges)
    if word is None:
        return None
    parts = _part_ids(values[word], ids[:, word])
    others = [np.zeros(len(ids), np.int64), *np.delete(ids, word, 1).T]
    kinds = [k for k, part in enumerate(parts) if not any(_say_the_same(part, own) for own in others)]
    if not asked and not _are_new([parts[kind] for kind in kinds], ids, word, labels):
        return None
    return (word, tuple(kinds)) if kinds else None


def _are_new(parts: Sequence[np.ndarray], ids: np.ndarray, word: int, labels: np.ndarray) -> bool:
    """True if some part tells more about the labels of words seen once than the two best features do."""
    here, common = ids[:, word], np.bincount(labels) / len(labels)
    often = np.bincount(here[here >= 0], minlength=1)
    once = np.flatnonzero((here >= 0) & (often[np.maximum(here, 0)] == 1))
    if not len(once):
        return False
    wanted = np.arange(len(once)), labels[once]

    def told(evidence: np.ndarray) -> np.ndarray:
        """(n,) log-probability of the labels of words seen once."""
        scores = np.log(common) + SHARE * evidence
        found: np.ndarray = scores[wanted] - np.logaddexp.reduce(scores, 1)
        return found

    given = [evidence_of(own, labels, common, once) for own in ids.T]
    best = max(given, key=lambda one: told(one).sum())
    both = best + max(given, key=lambda one: told(best + one).sum())
    more = [told(both + evidence_of(part, labels, common, once)) - told(both) for part in parts]
    return any(gain.mean() > LEAST for gain in more)


def _word(
    values: Sequence[Sequence[str]], ids: np.ndarray, labels: np.ndarray, edges: np.ndarray
) -> int | None:
    texts = _texts(values, ids)
    openly = [p for p in range(len(values)) if _is_open(ids[:, p], values[p])]
    single = [p for p in openly if not _is_joined(p, texts)]
    whole = [p for p in single if not any(_is_piece(texts[p], texts[q]) for q in single if q != p)]
    common, every = np.bincount(labels) / len(labels), np.arange(len(labels))

    def worth(p: int) -> tuple[bool, float]:
        first_and_last = (len(np.unique(edges[at, :, p])) for at in (0, 1))
        evidence = evidence_of(ids[:, p], labels, common, every)
        return min(first_and_last) > 1, float(evidence[every, labels].sum())

    return max(whole, key=worth, default=None)


def evidence_of(ids: np.ndarray, labels: np.ndarray, common: np.ndarray, where: np.ndarray) -> np.ndarray:
    """(n, V) the evidence of a feature about the labels of the n tokens ``where``, in nats beyond the label
    frequencies ``common`` (V,): the other tokens with the same value predict the label, and label
    frequencies count as one more token."""
    _, place = np.unique(ids, return_inverse=True)
    counts = np.zeros((place.max() + 1, len(common)))
    np.add.at(counts, (place, labels), 1.0)
    others = counts[place[where]]
    others[np.arange(len(where)), labels[where]] -= 1
    found: np.ndarray = np.log((others + common) / (others.sum(1, keepdims=True) + 1) / common)
    return found


def _tokens(
    rows: Sequence[np.ndarray], y: Sequence[np.ndarray], n_templates: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(N, P) value ids and (N,) labels of the tokens that have a label, and (2, n, P) value ids of the
    first and the last token of each sequence. Where tokens have labels in several layers, those of the
    first layer are used."""
    some, n = [(np.empty((0, n_templates)), np.empty(0, np.int64))], 0
    n_labels = 1 + max((int(labels.max()) for labels in y if len(labels)), default=0)
    most = min(MOST_TOKENS, MOST_SCORES // max(1, n_labels))
    for row, labels in zip(rows, y, strict=True):
        if n < most and len(row):
            some.append((row[:, :n_templates], labels[: len(row)]))
            n += len(row)
    ids, labels = (np.concatenate(of) for of in zip(*some, strict=True))
    edges = np.array([[own[at] for own, _ in some[1:]] for at in (0, -1)])
    # Renumbered, since some labels may occur at no token.
    _, numbered = np.unique(labels[labels >= 0], return_inverse=True)
    return ids[labels >= 0].astype(np.int64), numbered, edges


def _is_open(ids: np.ndarray, values: Sequence[str]) -> bool:
    once = np.bincount(ids[ids >= 0], minlength=1)
    some = values[:: 1 + len(values) // SAMPLE]
    longer = sum(len(value) > 1 for value in some)
    return 2 * longer > len(some) and bool((once == 1).sum() >= OPEN * (once > 0).sum())


def _texts(values: Sequence[Sequence[str]], ids: np.ndarray) -> list[list[str | None]]:
    """For each template, its values at some tokens from all over the data; None where a token has no
    value."""
    some = ids[np.linspace(0, len(ids) - 1, min(SAMPLE, len(ids))).astype(int)]
    return [
        [known[i] if i >= 0 else None for i in own.tolist()]
        for known, own in zip(values, some.T, strict=True)
    ]


def _is_joined(p: int, texts: Sequence[Sequence[str | None]]) -> bool:
    """True if all values begin, or all end, with the values of one other template, and the same character,
    which is not a letter or digit, stands next to them."""
    return any(_mark(texts[p], own, at) for q, own in enumerate(texts) if q != p for at in (0, -1))


def _mark(texts: Sequence[str | None], inside: Sequence[str | None], at: int) -> str:
    """The character next to the values ``inside``, which stand at the beginning (``at`` 0) or the end (-1)
    of all texts; '' if they do not, or if the characters differ."""
    found = ""
    for text, own in zip(texts, inside, strict=True):
        if text is None or own is None:
            continue
        rest = text[len(own) :] if at == 0 else text[: len(text) - len(own)]
        there = text.startswith(own) if at == 0 else text.endswith(own)
        if not there or not rest or rest[at].isalnum() or (found and rest[at] != found):
            return ""
        found = rest[at]
    return found


def _is_piece(texts: Sequence[str | None], of: Sequence[str | None]) -> bool:
    """True if every text is contained in that of another template, ignoring capitals, and some are
    shorter."""
    both = [(a.lower(), b.lower()) for a, b in zip(texts, of, strict=True) if a and b]
    return bool(both) and all(a in b for a, b in both) and any(a != b for a, b in both)


def _part_ids(words: Sequence[str], ids: np.ndarray) -> list[np.ndarray]:
    """(N,) numbers for each part of the words with these ids, which tell the part's values apart; -1 where
    there is no word."""
    parts = [parts_of(word) for word in words]
    found = []
    for kind in range(len(PARTS)):
        known: dict[str, int] = {}
        table = np.array([known.setdefault(own[kind], len(known)) for own in parts])
        found.append(np.where(ids >= 0, table[ids], -1))
    return found


def _say_the_same(a: np.ndarray, b: np.ndarray) -> bool:
    """True if two features tell the same tokens apart; False if there are no tokens."""
    if not len(a):
        return False
    n_a, n_b = len(np.unique(a)), len(np.unique(b))
    return n_a == n_b == len(np.unique(a * (b.max() + 2) + b))
