"""The sum over labellings and their spans under any semiring, position by position.

A message has one entry per label and age of the span that the label is in: with e[t, v] the sum over
labellings of positions up to t whose last span ends at t, with label v,

    a[t, v, 1]     = f[t, v] + sum_i e[t-1, i] g[i, v]                  with a boundary between i and v
    a[t, v, l + 1] = f[t, v] + sum_i a[t-1, i, l] g[i, v]               without one
    e[t, v]        = sum_l a[t, v, l] w[t, type of v, l]

where sums and products are those of the semiring, w is the score of a span that ends at t, and ages beyond
L share one entry. Cost O(S B T V (V + M L)), if a label can continue the span of M labels: 1 or 2 in usual
schemes.

Letters: S draws, B sequences, T positions (padded), V labels, K types of spans, L the longest span that has
a score of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from structgp.structures.segments.span_scheme import SpanScheme
from structgp.structures.semirings import Semiring


def recursion(
    f: Tensor, g: Tensor, w: Tensor, mask: Tensor, scheme: SpanScheme, semiring: Semiring
) -> Tensor:
    """(S, B) elements of the semiring. f : (S, B, T, V); g : (S, V, V) or (S, B, T-1, V, V); w : (S, K,
    L+1), or (S, B, T, K, L+1) by the position where the span ends. Values at padding are ignored."""
    S, B, T, V = f.shape
    scheme = scheme.to(f.device)
    f = f.masked_fill(~mask[..., None], 0)
    if g.dim() > 3:
        g = g.masked_fill(~mask[:, 1:, None, None], 0)
    if w.dim() > 3:
        w = w.masked_fill(~mask[..., None, None], 0)
    L = w.shape[-1] - 1
    order, real = scheme.before
    parted = g.masked_fill(~scheme.parts, -torch.inf)
    # (..., V, M) scores of the transitions to each label that go on with a span
    joined = g[..., order, torch.arange(V, device=f.device)[:, None]].masked_fill(~real, -torch.inf)
    # One more type, for labels outside of spans: their spans, of one token, score 0.
    w = torch.cat([w, w.new_zeros((*w.shape[:-2], 1, L + 1))], -2)[..., scheme.kinds, :]

    alone = f.new_full((V,), -torch.inf)
    alone[0] = 0  # an empty sequence has one labelling
    ended = semiring.lift(alone.expand(S, B, V))
    message = ended  # there is none before the first position
    for t in range(T):
        if t == 0:
            start = semiring.lift(f[:, :, 0])
            rest = start.new_full((*start.shape, L), -torch.inf)
            message = torch.cat([start[..., None], rest], -1)
        else:
            table, step = (x[:, None] if g.dim() == 3 else x[:, :, t - 1] for x in (parted, joined))
            start = semiring.sum(ended[..., :, None] + table, -2)[..., None]
            older = semiring.sum(message[..., order, :] + step[..., None], -2)  # (..., V, L+1)
            oldest = semiring.sum(older[..., L - 1 :], -1)[..., None]
            message = torch.cat([start, older[..., : L - 1], oldest], -1) + f[:, :, t, :, None]
        here = semiring.sum(message + (w[:, None] if w.dim() == 3 else w[:, :, t]), -1)
        ended = torch.where(mask[:, t, None], here, ended)
    return semiring.sum(ended, -1)
