"""Composite likelihoods of a sequence: cheap stand-ins for a likelihood that is expensive or opaque.

For each width w, the sum over all windows of w positions of

    log p(the labels in the window | the labels beside it),

which needs no recursion over the sequence: all windows advance together, in w steps. Width 1 is the
pseudo-likelihood. Together with the piecewise pseudo-likelihood, these sums resemble most likelihoods that
read f and g as scores of labels and of transitions; a regression shows how much each of them explains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from structgp.structures.pseudo_likelihood import Piecewise

WIDTHS = (1, 2, 3)


def parts(f: Tensor, g: Tensor, y: Tensor, mask: Tensor, widths: Sequence[int] = ()) -> Tensor:
    """(S, B, 1 + len(widths)): the piecewise pseudo-likelihood, and the sum over windows for each width.

    f (S, B, T, V), g (S, V, V) or (S, B, T-1, V, V), y and mask (B, T), as in ``Structure.log_prob``.
    Differentiable. Cost O(S B T V^2 w) for width w.
    """
    found = [Piecewise().log_prob(f, g, y, mask)]
    return torch.stack(found + [windows(f, g, y, mask, width) for width in widths], -1)


def windows(f: Tensor, g: Tensor, y: Tensor, mask: Tensor, width: int) -> Tensor:
    """(S, B) sum over windows of log p(labels inside | labels beside). A sequence no longer than the window
    is one window: the chain's own log-likelihood."""
    T, V = f.shape[2:]
    # A stand-in may take any label where one is missing.
    y = torch.where(mask, y, 0).clamp(min=0)
    f = torch.where(mask[..., None], f, 0)
    if g.dim() > 3:
        g = torch.where(mask[:, 1:, None, None], g, 0)
    lengths = mask.sum(-1)  # (B,)
    width = min(width, T)
    start = torch.arange(T - width + 1, device=f.device)
    inside = start[None] + width <= lengths[:, None]
    counts = inside | ((start == 0)[None] & (lengths > 0)[:, None])  # (B, n) windows that exist
    n = len(start)

    # Products with one-hot rows: indexing g by labels is far slower backwards.
    hot = torch.nn.functional.one_hot(y, V).to(f)  # (B, T, V)
    after = hot[:, 1:] * mask[:, 1:, None]
    # (S, B, T, V) g[y_t-1, :], 0 at the first position, and g[:, y_t+1], 0 at the last
    entering = torch.nn.functional.pad(_products(hot[:, :-1], g), (0, 0, 1, 0))
    leaving = torch.nn.functional.pad(_products(after, g.mT), (0, 0, 0, 1))

    scores = (f + entering)[:, :, :n]  # log-weights of the label at the window's last position
    for k in range(1, width):
        moved = _moved(scores, g if g.dim() == 3 else g[:, :, k - 1 : k - 1 + n])
        moved = moved + f[:, :, k : k + n]
        scores = torch.where(mask[:, k : k + n, None], moved, scores)
    scores = scores + torch.where(inside[..., None], leaving[:, :, width - 1 :], 0)
    log_z = torch.logsumexp(scores, -1)

    # The numerator: sums of the scores of y over the window and over its two borders.
    own = (f * hot).sum(-1)  # (S, B, T); 0 at padding, where f is
    before = (entering * hot).sum(-1) * mask  # g[y_t-1, y_t]
    place = torch.arange(T, device=f.device)
    covered = (place >= start[:, None]) & (place < start[:, None] + width)  # (n, T)
    borders = (place >= start[:, None]) & (place <= start[:, None] + width)
    top_score = own @ covered.to(f).T + before @ borders.to(f).T
    return torch.where(counts, top_score - log_z, 0).sum(-1)


def _moved(scores: Tensor, g: Tensor) -> Tensor:
    """(S, B, n, V) log-weights after a transition by g (S, V, V) or (S, B, n, V, V)."""
    top = g.amax((-1, -2), keepdim=True)
    peak = scores.amax(-1, keepdim=True).detach()
    weight, step = torch.exp(scores - peak), torch.exp(g - top)
    if g.dim() == 3:
        moved, top = (weight.flatten(1, 2) @ step).view_as(scores), top[:, None]
    else:
        moved, top = (weight[..., None, :] @ step).squeeze(-2), top.squeeze(-1)
    # Too small a number may underflow; a stand-in only has to be smooth and finite.
    return (moved + 1e-30).log() + peak + top


def _products(hot: Tensor, g: Tensor) -> Tensor:
    """(S, B, T-1, V): row y_t of g (S, V, V) or (S, B, T-1, V, V) for one-hot rows (B, T-1, V)."""
    if g.dim() > 3:
        return (hot[..., None, :] @ g).squeeze(-2)
    B, T, V = hot.shape
    return (hot.reshape(1, B * T, V) @ g).reshape(len(g), B, T, V)


PARTS: dict[str, Callable[..., Tensor]] = {"piecewise": parts, "composite": partial(parts, widths=WIDTHS)}
"""Stand-ins, by the names that gradient estimators use for them."""
