"""The semi-Markov chain: structured softmax over labellings whose spans have scores as well.

p(y) = exp(sum_t f[t, y_t] + sum_t g[y_t-1, y_t] + sum over spans (h[type, length] + segment[first, length,
type])) / Z, with ``first`` the position where a span begins.

Letters: S draws, B sequences, T positions (padded), V labels, K types of spans, L the longest span that has
a score of its own; entry l of lengths is length l + 1, and entry L of h is for all longer spans.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from structgp.structures.program import Program, Scores, variance
from structgp.structures.segments.ages import recursion
from structgp.structures.segments.span_messages import expectations, log_partition
from structgp.structures.segments.span_scheme import SpanScheme
from structgp.structures.semirings import LOG, Semiring


@dataclass(frozen=True)
class SegmentsProgram(Program):
    """``scores`` is (f, g, h) or (f, g, h, segment): f (S, B, T, V); g (S, V, V) or (S, B, T-1, V, V); h
    (S, K, L+1); segment (S, B, T, L, K) of each possible span of up to L tokens, by its first position,
    length and type. Every answer costs O(S B T V (V + L)) in usual schemes, times n for the n best."""

    scheme: SpanScheme = field(kw_only=True)

    def restrict(self, scores: Scores) -> Scores:
        if self.rules is None:
            return scores
        return *self.rules.restrict(scores[:2], self.layout.mask), *scores[2:]

    def log_total(self, scores: Scores, semiring: Semiring) -> Tensor:
        f, g, w = by_end(scores)
        if semiring is LOG:
            return log_partition(f, g, w, self.layout.mask, self.scheme)
        return recursion(f, g, w, self.layout.mask, self.scheme, semiring)

    def score(self, scores: Scores, y: Tensor) -> Tensor:
        f, g, h, *rest = scores
        S, mask, L = len(f), self.layout.mask, h.shape[-1] - 1
        told = super().score((f, g), y)
        ends, kind, first = self.scheme.to(y.device).spans(y, mask)
        age = torch.arange(y.shape[1], device=y.device) - first  # length - 1
        place = torch.where(ends, kind * (L + 1) + age.clamp(max=L), 0)
        if h.numel():
            found = h.flatten(1).gather(1, place.reshape(1, -1).expand(S, -1)).view(S, *place.shape)
            told = told + torch.where(ends, found, 0).sum(-1)
        if rest and h.numel():
            short = ends & (age < L)
            flat = rest[0].flatten(2)  # (S, B, T L K)
            place = torch.where(short, (first * L + age) * h.shape[1] + kind, 0)
            told = told + torch.where(short, flat.gather(-1, place.expand(S, -1, -1)), 0).sum(-1)
        return told

    def slopes(self, scores: Scores) -> tuple[Tensor, ...]:
        """Probabilities of labels (S, B, T, V) and of transitions (S, B, T-1, V, V), and expected
        numbers of spans of each type and length (S, B, K, L+1); with segment scores also ``spans``."""
        found = expectations(*by_end(scores), self.layout.mask, self.scheme, by_end=len(scores) > 3)
        told = found.node, found.next, found.length
        return told if len(scores) < 4 else (*told, by_start(found.ends))

    def node_marginals(self, scores: Scores) -> Tensor:
        given = by_end(self.restrict(scores))
        return expectations(*given, self.layout.mask, self.scheme, False, False).node

    def spans(self, scores: Scores) -> Tensor:
        """(S, B, T, L, K) probability that a span of each length, up to L, and type begins at a
        position."""
        given = by_end(self.restrict(scores))
        return by_start(expectations(*given, self.layout.mask, self.scheme, False).ends)

    def walk(self, scores: Scores) -> NoReturn:
        raise NotImplementedError("labels of a semi-Markov chain are not a Markov chain: ask for spans")

    def variances(self, scores: Scores, basis: Tensor | None = None) -> tuple[Tensor, ...]:  # type: ignore[override]
        """As for any program, and those of spans by type and length, (B, K, L+1): p (1 - p) at each
        position, summed over positions. With segment scores also those of each possible span,
        (B, T, L, K)."""
        apart, has_segments = scores[1].dim() > 3, len(scores) > 3
        found = expectations(*by_end(scores), self.layout.mask, self.scheme, apart, has_segments, True)
        bend = found.next.mean(0)
        told = variance(found.node, basis).mean(0), bend if apart else bend[:, 0], found.length.mean(0)
        return told if not has_segments else (*told, by_start(found.ends).mean(0))

    def _one_labelling(self, scores: Scores, semiring: Semiring) -> Tensor:
        f, *rest = (x.detach() for x in self.restrict(scores))
        with torch.enable_grad():
            total = self.log_total((f.requires_grad_(), *rest), semiring).sum()
        (hot,) = torch.autograd.grad(total, f)
        return torch.where(self.layout.mask, hot.argmax(-1), 0)

    def _entropy(self, scores: Scores) -> Tensor:
        # Taking off a constant per token or transition changes nothing, and leaves more digits.
        f, g, h, *rest = scores
        scores = _below_zero(f, (-1,)), _below_zero(g, (-1, -2)), h, *rest
        total = self.log_total(scores, LOG)
        for x, p in zip(scores, self.slopes(scores), strict=True):
            x = x.view(len(x), *(1,) * (p.dim() - x.dim()), *x.shape[1:])
            total = total - torch.where(p > 0, x * p, 0).flatten(2).sum(-1)
        return total.clamp(min=0)


def by_end(scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
    """f, g, and the scores of spans as ``recursion`` takes them: h (S, K, L+1) without segment scores, else
    the sum of h and segment scores, by the position where the span ends, (S, B, T, K, L+1)."""
    f, g, h, *rest = scores
    if not rest:
        return f, g, h
    by_age = rest[0].permute(0, 1, 4, 3, 2)  # (S, B, K, L, T)
    L, T = by_age.shape[-2:]
    # Row a moves a positions on: rows of T + L entries are read as if they were one shorter.
    rows = torch.nn.functional.pad(by_age, (0, L)).flatten(-2)[..., : L * (T + L - 1)]
    moved = rows.unflatten(-1, (L, T + L - 1))[..., :T].permute(0, 1, 4, 2, 3)
    longer = moved.new_zeros((*moved.shape[:-1], 1))
    return f, g, h[:, None, None] + torch.cat([moved, longer], -1)


def by_start(ends: Tensor) -> Tensor:
    """Spans by first position, (S, B, T, L, K), from spans by last position, (S, B, T, K, L+1)."""
    T, L = ends.shape[2], ends.shape[-1] - 1
    ages = [torch.nn.functional.pad(ends[:, :, a:, :, a], (0, 0, 0, min(a, T))) for a in range(L)]
    return torch.stack(ages, -2)


def _below_zero(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """x minus its largest entry over ``dims``; unchanged where all are -inf."""
    top = x.amax(dims, keepdim=True)
    return x - top.masked_fill(top == -torch.inf, 0)
