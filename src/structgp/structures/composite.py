"""Composite likelihoods of a sequence: cheap stand-ins for a likelihood that is expensive or opaque.

For each width w, the sum over all windows of w positions of

    log p(the labels in the window | the labels beside it),

which needs no recursion over the sequence: all windows advance together, w steps in all. Width 1 is
the pseudo-likelihood. Together with the piecewise pseudo-likelihood they resemble most likelihoods that
read f and g as scores of labels and of pairs; how much of it each explains is for regression to say.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from structgp.structures.piecewise import Piecewise

WIDTHS = (1, 2, 3)


def piecewise_parts(f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """(S, B, 1): the piecewise pseudo-likelihood alone."""
    return Piecewise().log_prob(f, g, y, mask)[..., None]


def composite_parts(f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """(S, B, 1 + len(WIDTHS)): the piecewise pseudo-likelihood and the windows of each width.

    f (S, B, T, V), g (S, V, V), y and mask (B, T), as ``Structure.log_prob`` has them. Differentiable.
    Cost O(S B T V^2) a width.
    """
    parts = [Piecewise().log_prob(f, g, y, mask)]
    parts += [windows(f, g, y, mask, width) for width in WIDTHS]
    return torch.stack(parts, -1)


def windows(f: Tensor, g: Tensor, y: Tensor, mask: Tensor, width: int) -> Tensor:
    """(S, B) sum over windows of log p(labels inside | labels beside). A sequence no longer than the
    window is one window: the chain's own log-likelihood."""
    S, B, T, V = f.shape
    # A stand-in may take any label where one is missing.
    y = torch.where(mask, y, 0).clamp(min=0)
    f = torch.where(mask[..., None], f, 0)
    lengths = mask.sum(-1)  # (B,)
    width = min(width, T)
    start = torch.arange(T - width + 1, device=f.device)
    inside = start[None] + width <= lengths[:, None]
    counts = inside | ((start == 0)[None] & (lengths > 0)[:, None])  # (B, n) windows that exist
    n = len(start)

    # Products with one-hot rows: indexing g by labels is far slower backwards.
    hot = torch.nn.functional.one_hot(y, V).to(f)  # (B, T, V)
    before = torch.zeros_like(hot)
    before[:, 1:] = hot[:, :-1]
    after = torch.zeros_like(hot)
    after[:, :-1] = hot[:, 1:] * mask[:, 1:, None]
    entering = _products(before, g)  # (S, B, T, V) g[y_t-1, :], 0 at the first position
    leaving = _products(after, g.mT)  # g[:, y_t+1], 0 at the last

    top = g.amax((-1, -2))[:, None, None, None]
    step = torch.exp(g - top[:, 0])
    scores = (f + entering)[:, :, :n]  # log-weights of the label at the window's last position
    for k in range(1, width):
        peak = scores.amax(-1, keepdim=True).detach()
        moved = torch.exp(scores - peak).reshape(S, B * n, V) @ step
        # Too small a number may underflow; a stand-in only has to be smooth and finite.
        moved = (moved + 1e-30).log().reshape(S, B, n, V) + peak + top
        moved = moved + f[:, :, k : k + n]
        scores = torch.where(mask[:, k : k + n, None], moved, scores)
    scores = scores + torch.where(inside[..., None], leaving[:, :, width - 1 :], 0)
    log_z = torch.logsumexp(scores, -1)

    # The numerator: sums of the scores of y over the window and over its two borders.
    unary = (f * hot).sum(-1)  # (S, B, T); 0 at padding, where f is
    pair = (entering * hot).sum(-1) * mask  # g[y_t-1, y_t]
    place = torch.arange(T, device=f.device)
    covered = (place >= start[:, None]) & (place < start[:, None] + width)  # (n, T)
    borders = (place >= start[:, None]) & (place <= start[:, None] + width)
    top_score = unary @ covered.to(f).T + pair @ borders.to(f).T
    return torch.where(counts, top_score - log_z, 0).sum(-1)


def _products(hot: Tensor, g: Tensor) -> Tensor:
    """(S, B, T, V): row y_t of g for one-hot rows (B, T, V)."""
    B, T, V = hot.shape
    return (hot.reshape(1, B * T, V) @ g).reshape(len(g), B, T, V)


PARTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "piecewise": piecewise_parts,
    "composite": composite_parts,
}
"""Stand-ins by the name that an estimator asks for them by."""
