"""Probabilities of spans, exact under each draw.

Where one span ends and the next begins is a question about two neighbouring labels, as conlleval reads them
(``metrics.chunks``). Under one draw the labelling is a Markov chain, so the probability of a span is a
product of its transition matrices, restricted to the labels that agree with the span.

    'covers' : tokens start to stop all belong to one span, which may be longer;
    'bounds' : a span of any label begins at start and ends before stop;
    'exact'  : the same, with the label that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from structgp.answers.exact_spans import likely_segments, span_by_sums, sums_exactly
from structgp.answers.potentials import Potentials
from structgp.evaluation import metrics
from structgp.structures import Chain

Found = list[list[tuple[int, int, int, float]]]
SENSES = ("covers", "bounds", "exact")


@dataclass(frozen=True)
class Boundaries:
    """kinds : types of spans. inside : (K, V), whether a label belongs to a span of that type. parts : (V,
    V), whether a span ends or begins between one label and the next."""

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


def span_probability(
    at: Potentials, boundaries: Boundaries, start: int, stop: int, sense: str, kind: int | None
) -> Tensor:
    """(S,) probability, under each draw, that a sequence has the span from token ``start`` to before
    ``stop``. ``at`` : of that sequence alone. ``kind`` : index of the type; None for any. Cost O(S L V^2)
    for a span of L tokens, beside the walk."""
    bounded = sense != "covers"
    if sums_exactly(at):
        labels = boundaries.inside.any(0) if kind is None else boundaries.inside[kind]
        return span_by_sums(at, labels, boundaries.parts, start, stop, bounded)
    node, step = at.ask("walk")
    inside = boundaries.inside.any(0) if kind is None else boundaries.inside[kind]
    here = _enter(node[:, 0], step[:, 0], boundaries, start, bounded) * inside.to(node)
    for t in range(start, stop - 1):
        here = torch.einsum("si,sij->sj", here, step[:, 0, t] * (~boundaries.parts).to(here))
    if not bounded or stop == node.shape[2]:
        return here.sum(-1)
    return torch.einsum("si,sij->s", here, step[:, 0, stop - 1] * boundaries.parts.to(here))


def _enter(node: Tensor, step: Tensor, boundaries: Boundaries, t: int, bounded: bool) -> Tensor:
    """(S, V) probability of each label at t; if ``bounded``, with a boundary before it."""
    if t == 0 or not bounded:
        return node[:, t]
    return torch.einsum("si,sij->sj", node[:, t - 1], step[:, t - 1] * boundaries.parts.to(node))


def likely_spans(at: Potentials, boundaries: Boundaries, least: float) -> Found:
    """Of each sequence, every span (start, stop, type) whose averaged probability is at least ``least``,
    with that probability, most probable first. Cost of compiled loops O(S T V^2) per sequence."""
    found = None
    if boundaries.kinds and type(at.structure) is Chain:
        given = at.f, at.g, at.mask, at.share, boundaries.inside, boundaries.parts
        found = at.structure.likely_spans(*given, least)
    short = likely_segments(at, boundaries.parts, least) if found is None else None
    found = spans_by_walk(at, boundaries, least) if found is None else found
    return found if short is None else _with_segments(at, found, short)


def _with_segments(at: Potentials, found: Found, short: list[dict[tuple[int, int, int], float]]) -> Found:
    """Spans of the Markov chain that are longer than any segment with a score of its own, and the others
    with the probabilities of segments."""
    longest, both = at.scores[2].shape[-1] - 1, []
    for spans, exact in zip(found, short, strict=True):
        long = [span for span in spans if span[1] - span[0] > longest]
        both.append(sorted([*long, *((*span, p) for span, p in exact.items())], key=lambda span: -span[3]))
    return both


def spans_by_walk(at: Potentials, boundaries: Boundaries, least: float) -> Found:
    """The same for any structure, from its Markov chain."""
    lengths = at.mask.sum(-1).tolist()
    return [_likely_spans(at.one(b, n), boundaries, least) for b, n in enumerate(lengths)]


def _likely_spans(
    at: Potentials, boundaries: Boundaries, least: float
) -> list[tuple[int, int, int, float]]:
    """Those of the only sequence. Cost O(S T L K V^2) for spans up to L tokens and K types; a span that is
    not covered with that probability is not extended."""
    node, step = at.ask("walk")
    joined, parts = (~boundaries.parts).to(node), boundaries.parts.to(node)
    share, T = at.share[:, 0], node.shape[2]
    found: list[tuple[int, int, int, float]] = []
    for start in range(T if boundaries.kinds else 0):
        first = _enter(node[:, 0], step[:, 0], boundaries, start, True)
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
