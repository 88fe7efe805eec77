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
import sys
import time
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from structgp import StructgpError, StructuredGPClassifier, metrics
from structgp.data.corpora import recipes

Labels = list[list[str]]


def log_prob_of_counts(f: Tensor, g: Tensor, y: Tensor) -> Tensor:
    """log p(counts of y | f, g): f (S, T, V), g (S, V, V), y (T,) -> (S,).

    A state is the last label and the counts so far, (n_0 + 1) x ... x (n_V-1 + 1) of them at most.
    Cost O(S T V^2 prod(n_v + 1)): for few labels and short lines.
    """
    S, T, V = f.shape
    counts = torch.bincount(y, minlength=V).tolist()
    shape = [n + 1 for n in counts]
    impossible = f.new_full((S, 1, *shape), -torch.inf)

    def placed(v: int, scores: Tensor) -> Tensor:
        """One more token of label v: its count moves up by one, what exceeds it falls away."""
        kept = scores.narrow(v + 1, 0, counts[v])
        return torch.cat([impossible[:, 0].narrow(v + 1, 0, 1), kept], v + 1)
