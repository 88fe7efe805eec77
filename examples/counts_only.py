"""Learning from counts: nobody marked a word, each line only says how many tokens of each label it has.

    python examples/counts_only.py [--seed N] [--quick]

A chain scores labellings, and the probability of the counts of a line is the sum over all labellings
that have them,

    p(counts | f, g) = sum over y with these counts of chain(y | f, g),

by dynamic programming over positions, the last label and how many tokens of each label went by. It is
not the likelihood of any CRF: no order is given, and labels of single tokens are never seen. The data
still comes as one label a token, which the likelihood reads as a bag: the order is thrown away before
the fit (labels are sorted), so that nothing can leak.

The function is written in torch, and autograd differentiates it: the engine finds that out by itself
and takes pathwise gradients.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from structgp import StructgpError, StructuredGPClassifier, metrics
from structgp.data.corpora import recipes

Labels = list[list[str]]

VERY_SMALL = -1e4
"""Stands for log 0: autograd has no use for infinities."""


def log_prob_of_counts(f: Tensor, g: Tensor, y: Tensor) -> Tensor:
    """log p(counts of y | f, g): f (S, T, V), g (S, V, V), y (T,) -> (S,).

    A state is the last label and how many tokens of each label went by, prod_v (n_v + 1) of them at
    most. Cost O(S T V^2 prod_v (n_v + 1)): for few labels and short lines.
    """
    S, T, V = f.shape
    counts = torch.bincount(y, minlength=V).tolist()
    shape = [n + 1 for n in counts]
    size = math.prod(shape)
    stride = [math.prod(shape[v + 1 :]) for v in range(V)]
    state = torch.arange(size)
    # From the counts c, a token of label v leads to c with one more v, if there are that many.
    room = torch.stack([(state // stride[v]) % shape[v] > 0 for v in range(V)])  # (V, size)
    before = torch.stack([(state - stride[v]).clamp(min=0) for v in range(V)])  # (V, size)
    f = f - f.logsumexp(-1, keepdim=True)  # a constant of each position cancels
    counted = torch.full((S, V, size), VERY_SMALL, dtype=f.dtype)
    counted[:, torch.arange(V), torch.tensor(stride) % size] = f[:, 0]
    counted = torch.where(room, counted, VERY_SMALL)
    free = f[:, 0]
    for t in range(1, T):
        moved = torch.logsumexp(counted[:, :, None, :] + g[..., None], 1)  # (S, V, size)
        shifted = moved.gather(-1, before.expand(S, -1, -1)) + f[:, t, :, None]
        counted = torch.where(room, shifted, VERY_SMALL)
        free = torch.logsumexp(free[:, :, None] + g, 1) + f[:, t]
    return counted[..., -1].logsumexp(-1) - free.logsumexp(-1)


def log_counts(y: Sequence[int]) -> float:
    """log of the number of labellings with these counts: what turns p(counts) into a p(y)."""
    return math.lgamma(len(y) + 1) - sum(math.lgamma(n + 1) for n in Counter(y).values())
