"""The n best labellings of a chain: Viterbi with n entries for each label.

At each position every label keeps its n best ways to get there; the next position picks its own n best
among the V n of them. Ways are told apart by where they came from, so no labelling comes twice.
"""

from __future__ import annotations

import torch
from torch import Tensor


def n_best_viterbi(f: Tensor, g: Tensor, mask: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Labels (S, B, n, T), 0 at padding, and scores (S, B, n), best first, -inf where there are no more.

    f (S, B, T, V), g (S, V, V), -inf allowed in both. Cost O(S B T V^2 n) time, O(S B T V n) memory.
    """
    S, B, T, V = f.shape
    score = f.new_full((S, B, V, n), -torch.inf)
    empty = f.new_full((V,), -torch.inf)
    empty[0] = 0  # a sequence of nothing has one labelling
    score[..., 0] = torch.where(mask[:, :1], f[:, :, 0], empty)
    stay = torch.arange(V * n, device=f.device).view(V, n)
    came_from = []  # (S, B, V, n) entry i * n + k of the position before
    for t in range(1, T):
        ways = score[:, :, :, None] + g[:, None, :, :, None]  # (S, B, from, to, n)
        ways = ways.permute(0, 1, 3, 2, 4).reshape(S, B, V, V * n)
        best, origin = ways.topk(n, -1)
        here = mask[:, t, None, None]
        score = torch.where(here, best + f[:, :, t, :, None], score)
        came_from.append(torch.where(here, origin, stay))
    scores, entry = score.reshape(S, B, V * n).topk(n, -1)
    labels = [entry // n]
    for origin in reversed(came_from):
        entry = origin.reshape(S, B, V * n).gather(-1, entry)
        labels.append(entry // n)
    found = torch.stack(labels[::-1], -1)  # (S, B, n, T)
    return torch.where(mask[:, None], found, 0), scores
