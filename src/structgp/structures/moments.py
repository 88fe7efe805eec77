"""Second moments of a Markov chain over label sequences: the curvature of its log-partition.

With mu the node marginals and C[t, t'] the product of transition matrices from t to t',

    Cov(1[y_t = j], 1[y_t' = j]) = mu_t(j) (C[t, t'](j, j) - mu_t'(j)),

and the variance of how often label i is followed by j comes from the same products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from structgp.structures.base import Curvature


def chain_curvature(node: Tensor, step: Tensor, mask: Tensor) -> Curvature:
    """Curvature from node marginals (S, B, T, V) and transition matrices (S, B, T-1, V, V).

    All pairs (t, t + d) at once for each distance d: O(S B T^2 V^3) time in T batched products,
    O(S B T V^2) memory.
    """
    S, B, T, V = node.shape
    unary = node.new_zeros((B, V, T, T))
    unary.diagonal(dim1=-1, dim2=-2).copy_((node * (1 - node)).mean(0).mT)

    pair = node[:, :, :-1, :, None] * step  # (S, B, T-1, V, V): p(y_t = i, y_t+1 = j)
    expected = pair.sum(2)  # E[number of i -> j] in a sequence
    square = expected.clone()  # its second moment: equal places, then places d apart
    # reach: C[t, t + d]; short: C[t, t + d - 1]
    short = torch.eye(V, dtype=node.dtype, device=node.device).expand(S, B, T, V, V)
    reach = step
    for d in range(1, T):
        returns = reach.diagonal(dim1=-1, dim2=-2)
        both = (node[:, :, :-d] * (returns - node[:, :, d:])).mean(0)
        both = torch.where(mask[:, d:, None], both, 0).mT
        unary.diagonal(offset=d, dim1=-1, dim2=-2).copy_(both)
        unary.diagonal(offset=-d, dim1=-1, dim2=-2).copy_(both)
        if d < T - 1:
            again = pair[:, :, :-d] * short[:, :, 1 : T - d].mT * step[:, :, d:]
            square += 2 * again.sum(2)
            short, reach = reach, reach[:, :, :-1] @ step[:, :, d:]
    return Curvature(unary, (square - expected.square()).sum(1).mean(0))
