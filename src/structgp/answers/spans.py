"""Probabilities of spans, exact under each draw.

Whether one span ends and the next begins depends on two neighbouring labels, as conlleval reads them
(``metrics.chunks``). Under one draw the labelling of a chain is a Markov chain, so the probability of a
span is a product of its transition matrices, restricted to the labels that agree with the span. Other
structures list labellings with their probabilities, and the probabilities of those that have the span are
added up.

    'covers' : tokens start to stop all belong to one span, which may be longer;
    'bounds' : a span of any label begins at start and ends before stop;
    'exact'  : the same, with the label that is asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from structgp.answers.exact_spans import likely_segments, span_by_sums, sums_exactly
from structgp.answers.labellings import weighted_labellings
from structgp.answers.potentials import Potentials
from structgp.data.schemes import Allowed
from structgp.errors import InputError
from structgp.evaluation import metrics
from structgp.structures import Chain
from structgp.structures.program import draws_at_once

Spanned = tuple[int, int, int, float]
Found = list[list[Spanned]]
SENSES = ("covers", "bounds", "exact")

MOST_STEPS = 1 << 26
"""Largest number of transition probabilities of an example, over all draws: half a gigabyte. The likely
spans of an example that has more come from fewer draws."""


@dataclass(frozen=True)
class Boundaries:
    """kinds : types of spans. inside : (K, V), True if a label belongs to a span of that type. parts :
    (V, V), True if a span ends or begins between one label and the next."""

    kinds: list[str]
    inside: Tensor
    parts: Tensor

    @staticmethod
    def of(classes: Sequence[str]) -> Boundaries:
        alone = [metrics.chunks([label]) for label in classes]  # one span, or none
        kinds = sorted({kind for spans in alone for *_, kind in spans})
        inside = [[(0, 1, kind) in spans for spans in alone] for kind in kinds]
        parts = [[(0, 2) not in [s[:2] for s in metrics.chunks([i, j])] for j in classes] for i in classes]
        whether = torch.tensor(inside, dtype=torch.bool).view(len(kinds), len(classes))
        return Boundaries(kinds, whether, torch.tensor(parts))

    def kind_of(self, label: str | None, sense: str, start: int, stop: int, n_tokens: int) -> int | None:
        """The index of the label asked for, None for any label; InputError if the question is not valid."""
        if sense not in SENSES:
            names = ", ".join(map(repr, SENSES))
            raise InputError("sense", f"{sense!r} is not known", f"use one of {names}")
        if (sense == "exact" and label is None) or (sense == "bounds" and label is not None):
            problem = "'exact' needs a label" if label is None else "'bounds' is for any label"
            raise InputError("label", problem, "use sense='bounds' without a label, 'exact' with one")
        if label is not None and label not in self.kinds:
            kinds = ", ".join(map(repr, self.kinds))
            raise InputError("label", f"{label!r} is not a type of span", f"use one of {kinds}")
        if not 0 <= start < stop <= n_tokens:
            problem = f"{start} to {stop} is not a span of {n_tokens} tokens"
            raise InputError("start, stop", problem, "count from 0; stop is one past the last token")
        return None if label is None else self.kinds.index(label)


class TokenRatios:
    """Ratios of the label probabilities of tokens to those under the draws that spans come from. p, q :
    (T, V) label probabilities as users see them, which need not come from draws, and those under the draws.

    A span's probability under the draws, times the smallest ratio of its tokens, never exceeds the
    probability of a label that the span needs, so that the two answers agree."""

    def __init__(self, p: np.ndarray, q: np.ndarray, boundaries: Boundaries, rules: Allowed | None) -> None:
        inside, parts = boundaries.inside.numpy(), boundaries.parts.numpy()
        follows, starts = (np.True_, np.True_) if rules is None else (rules.follows, rules.starts)
        first = inside & (starts | (follows & parts).any(0))
        later = np.array([row & (row[:, None] & follows & ~parts).any(0) for row in inside], bool)
        self._first, self._later, self._any = (
            _ratio(p @ labels.T, q @ labels.T) for labels in (first, later.reshape(inside.shape), inside)
        )

    def smallest(self, start: int, stop: int, kind: int, bounded: bool = True) -> float:
        """The smallest ratio among the tokens of a span of one type, which begins at ``start`` if
        ``bounded``."""
        if not bounded:
            return float(self._any[start:stop, kind].min())
        return min([float(self._first[start, kind]), *self._later[start + 1 : stop, kind].tolist()])

    def probability(
        self, at: Potentials, boundaries: Boundaries, start: int, stop: int, sense: str, kind: int
    ) -> float:
        """The probability of a span of one type; for 'covers', never less than that of exactly this
        span."""

        def times(sense: str, ratio: float) -> float:
            p = span_probability(at, boundaries, start, stop, sense, kind)
            return ratio * float(at.average(p[:, None])[0])

        exact = times("exact", self.smallest(start, stop, kind))
        if sense != "covers":
            return exact
        return max(exact, times("covers", self.smallest(start, stop, kind, bounded=False)))

    def agreeing(self, spans: Sequence[Spanned], least: float) -> list[Spanned]:
        """The spans whose probabilities, times their smallest ratios, are at least ``least``, most probable
        first."""
        found = [(start, stop, k, p * self.smallest(start, stop, k)) for start, stop, k, p in spans]
        return sorted((span for span in found if span[3] >= least), key=lambda span: -span[3])


def _ratio(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.divide(p, q, out=np.ones_like(p), where=q > 1e-300)


def span_probability(
    at: Potentials, boundaries: Boundaries, start: int, stop: int, sense: str, kind: int | None
) -> Tensor:
    """(S,) probability, under each draw, that a sequence has the span from token ``start`` to before
    ``stop``. at : the potentials of that sequence alone. kind : index of the type; None for any. Cost
    O(S L V^2) for a span of L tokens, beside the walk."""
    bounded = sense != "covers"
    if not at.structure.has_walk and not sums_exactly(at):
        ((labels, p),) = at.ask("labellings")
        return p @ _has_span(labels, boundaries, start, stop, bounded, kind).to(p)
    labels = boundaries.inside.any(0) if kind is None else boundaries.inside[kind]
    # A few draws at a time: there is a transition matrix for each token of each draw.
    parts = at.some_draws(draws_at_once(at.f))
    return torch.cat([_of_labels(some, labels, boundaries.parts, start, stop, bounded) for some in parts])


def _of_labels(
    at: Potentials, labels: Tensor, parts: Tensor, start: int, stop: int, bounded: bool
) -> Tensor:
    """(S,) the same for a span of some of the labels, (V,)."""
    if sums_exactly(at):
        return span_by_sums(at, labels, parts, start, stop, bounded)
    node, step = at.ask("walk")
    here = _enter(node[:, 0], step[:, 0], parts, start, bounded) * labels.to(node)
    for t in range(start, stop - 1):
        here = torch.einsum("si,sij->sj", here, step[:, 0, t] * (~parts).to(here))
    if not bounded or stop == node.shape[2]:
        return here.sum(-1)
    return torch.einsum("si,sij->s", here, step[:, 0, stop - 1] * parts.to(here))


def _has_span(
    labels: Tensor, boundaries: Boundaries, start: int, stop: int, bounded: bool, kind: int | None
) -> Tensor:
    """(C,) True for the labellings (C, T) that have the span, in the sense of ``span_probability``."""
    inside = boundaries.inside.any(0) if kind is None else boundaries.inside[kind]
    breaks = boundaries.parts[labels[:, :-1], labels[:, 1:]]  # (C, T-1), between t and t + 1
    found = inside[labels[:, start]] & ~breaks[:, start : stop - 1].any(1)
    if bounded and start > 0:
        found &= breaks[:, start - 1]
    if bounded and stop < labels.shape[1]:
        found &= breaks[:, stop - 1]
    return found


def _enter(node: Tensor, step: Tensor, parts: Tensor, t: int, bounded: bool) -> Tensor:
    """(S, V) probability of each label at t; if ``bounded``, with a boundary before it."""
    if t == 0 or not bounded:
        return node[:, t]
    return torch.einsum("si,sij->sj", node[:, t - 1], step[:, t - 1] * parts.to(node))


def likely_spans(at: Potentials, boundaries: Boundaries, least: float) -> Found:
    """For each sequence, every span (start, stop, type) whose averaged probability is at least ``least``,
    with that probability, most probable first. Cost of compiled loops O(S T V^2) per sequence."""
    found = None
    if boundaries.kinds and type(at.structure) is Chain:
        given = at.f, at.g, at.mask, at.share, boundaries.inside, boundaries.parts
        found = at.structure.likely_spans(*given, least)
    if not at.structure.has_walk:
        found = [_added_up(*each, boundaries, least) for each in weighted_labellings(at)]
    short = likely_segments(at, boundaries.parts, least) if found is None else None
    found = spans_by_walk(at, boundaries, least) if found is None else found
    return found if short is None else _with_segments(at, found, short)


def _with_segments(at: Potentials, found: Found, short: list[dict[tuple[int, int, int], float]]) -> Found:
    """Spans longer than any segment with a score of its own, with probabilities from the Markov chain, and
    all others, with the probabilities of segments."""
    longest, both = at.scores[2].shape[-1] - 1, []
    for spans, exact in zip(found, short, strict=True):
        long = [span for span in spans if span[1] - span[0] > longest]
        both.append(sorted([*long, *((*span, p) for span, p in exact.items())], key=lambda span: -span[3]))
    return both


def _added_up(
    labels: Tensor, p: Tensor, boundaries: Boundaries, least: float
) -> list[tuple[int, int, int, float]]:
    """Spans of labellings (C, T) whose probabilities, summed from those of the labellings, p (C,), are at
    least ``least``."""
    if not boundaries.kinds or not labels.shape[1]:
        return []
    edge = torch.ones((len(labels), 1), dtype=torch.bool)
    breaks = torch.cat([edge, boundaries.parts[labels[:, :-1], labels[:, 1:]], edge], 1)  # (C, T + 1)
    is_inside, kinds = boundaries.inside.any(0), boundaries.inside.int().argmax(0)
    total: dict[tuple[int, int, int], float] = defaultdict(float)
    for row, cuts, share in zip(labels.tolist(), breaks.tolist(), p.tolist(), strict=True):
        places = [t for t, cut in enumerate(cuts) if cut]
        for start, stop in pairwise(places) if share > 0 else ():
            if bool(is_inside[row[start]]):
                total[start, stop, int(kinds[row[start]])] += share
    found = [(*span, share) for span, share in total.items() if share >= least]
    return sorted(found, key=lambda span: (-span[3], span[:3]))


def spans_by_walk(at: Potentials, boundaries: Boundaries, least: float) -> Found:
    """``likely_spans`` for any structure, from its Markov chain."""
    found, V = [], len(boundaries.parts)
    for b, n in enumerate(at.mask.sum(-1).tolist()):
        most = max(2, MOST_STEPS // max(1, n * V * V))
        found.append(_likely_spans(at.one(b, n).fewer(most), boundaries, least))
    return found


def _likely_spans(
    at: Potentials, boundaries: Boundaries, least: float
) -> list[tuple[int, int, int, float]]:
    """The likely spans of the only sequence. Cost O(S T L K V^2) for spans up to L tokens and K types; a
    span that is not covered with probability ``least`` is not extended."""
    node, step = at.ask("walk")
    joined, parts = (~boundaries.parts).to(node), boundaries.parts.to(node)
    share, T = at.share[:, 0], node.shape[2]
    found: list[tuple[int, int, int, float]] = []
    for start in range(T if boundaries.kinds else 0):
        first = _enter(node[:, 0], step[:, 0], boundaries.parts, start, True)
        here = first[:, None] * boundaries.inside.to(node)  # (S, K, V), each type by itself
        for stop in range(start + 1, T + 1):
            ends = here if stop == T else here @ (step[:, 0, stop - 1] * parts)
            p = share @ ends.sum(-1)  # (K,)
            likely = (p >= least).nonzero()[:, 0].tolist()
            found += [(start, stop, k, float(p[k])) for k in likely]
            if stop == T or float((share @ here.sum(-1)).max()) < least:
                break
            here = here @ (step[:, 0, stop - 1] * joined)
    return sorted(found, key=lambda span: -span[3])
