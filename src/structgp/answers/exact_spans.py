"""Probabilities of spans where labels are not a Markov chain: higher orders, skip links, segments.

A span is an event about labels and neighbouring labels. With -inf at what does not agree with it,
the sum over labellings is that over those that have the span: p = Z(span) / Z."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from structgp.answers.potentials import Potentials
from structgp.structures import Segments
from structgp.structures.program import by_position

AT_ONCE = 1 << 23
"""Numbers in tables of possible segments that are held at once: beyond it, some draws at a time."""


def sums_exactly(at: Potentials) -> bool:
    """Whether the structure has log Z of these examples, of sequences that have transitions."""
    structure: Any = at.structure
    if not hasattr(structure, "log_partition") or structure.spec.next is None:
        return False
    return not hasattr(structure, "is_exact") or bool(at.ask("is_exact"))


def span_by_sums(
    at: Potentials, inside: Tensor, parts: Tensor, start: int, stop: int, bounded: bool
) -> Tensor:
    """(S,) probability of the span under each draw, in the only sequence. inside : (V,) labels that it may
    have; parts : (V, V) whether a span ends or begins between two labels. Cost: two sums over
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
    """Of each sequence, the probability of every span (start, stop, type) of up to L tokens that has at
    least this one, L being the longest with a score of its own; None for structures without segments, or
    where spans are read off the labels in another way. Cost of one marginal."""
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
