"""Probabilities of spans where labels are not a Markov chain: higher orders, skip links, segments.

A span is an event about labels and neighbouring labels. If every score that disagrees with the span is set
to -inf, the sum over labellings runs over those that have the span: p = Z(span) / Z."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from structgp.answers.potentials import Potentials
from structgp.structures import Segments
from structgp.structures.program import by_position

AT_ONCE = 1 << 23
"""Most numbers in tables of possible segments that are held at once; if there are more, a few draws are
processed at a time."""


def sums_exactly(at: Potentials) -> bool:
    """True if the structure has exact values of log Z for these examples, sequences with transitions."""
    structure: Any = at.structure
    if not hasattr(structure, "log_partition") or structure.spec.next is None:
        return False
    return not hasattr(structure, "is_exact") or bool(at.ask("is_exact"))


def span_by_sums(
    at: Potentials, inside: Tensor, parts: Tensor, start: int, stop: int, bounded: bool
) -> Tensor:
    """(S,) probability of the span under each draw, in the only sequence. inside : (V,) True for labels
    that it may have. parts : (V, V) True if a span ends or begins between two labels. Cost: two sums over
    labellings."""
    spec = at.structure.spec
    k = [t.name for t in spec.templates].index(spec.next.name) if spec.next is not None else 1
    f, g = at.scores[0].clone(), at.scores[k]
    g = (by_position(g, at.mask) if g.dim() == 3 else g).clone()
    f[:, :, start:stop, ~inside] = -torch.inf
    g[:, :, start : stop - 1, parts] = -torch.inf
    if bounded and start > 0:
        g[:, :, start - 1, ~parts] = -torch.inf
    if bounded and stop < int(at.mask.sum()):
        g[:, :, stop - 1, ~parts] = -torch.inf
    scores = [f, *at.scores[1:]]
    scores[k] = g
    told = replace(at, scores=tuple(scores)).ask("log_partition")
    return (told - at.ask("log_partition"))[:, 0].exp().clamp(max=1)


def likely_segments(
    at: Potentials, parts: Tensor, least: float
) -> list[dict[tuple[int, int, int], float]] | None:
    """For each sequence, the probability of every span (start, stop, type) of up to L tokens whose
    probability is at least ``least``; L is the longest length with a score of its own. None for structures
    without segments, or if spans are read off the labels in another way. Cost: that of the marginals."""
    structure = at.structure
    if not isinstance(structure, Segments) or not torch.equal(structure.scheme.parts, parts):
        return None
    longest = at.scores[2].shape[-1] - 1
    size = at.mask.numel() * longest * max(1, len(structure.scheme.inside))
    total: Any = 0
    for some in at.some_draws(max(1, AT_ONCE // max(1, size))):
        total = total + some.average(some.ask("spans"))  # (B, T, L, K)
    found: list[dict[tuple[int, int, int], float]] = [{} for _ in range(len(at.mask))]
    for b, t, age, kind in (total >= least).nonzero().tolist():
        found[b][t, t + age + 1, kind] = float(total[b, t, age, kind])
    return found
