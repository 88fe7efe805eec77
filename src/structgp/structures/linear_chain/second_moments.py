"""Second moments of a Markov chain over label sequences: the curvature of its log-partition.

With mu the node marginals and C[t, t'] the product of transition matrices from t to t',

    Cov(1[y_t = j], 1[y_t' = j]) = mu_t(j) (C[t, t'](j, j) - mu_t'(j)).

Along a direction b, the covariance is b^T diag(mu_t) C[t, t'] b - (mu_t b) (mu_t' b). The variance of how
often label i is followed by j comes from the same products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from structgp.structures.base import Curvature
from structgp.structures.linear_chain.messages import WORTH_COMPILING, compiled_loops

NEGLIGIBLE = 1e-7


def chain_curvature(node: Tensor, step: Tensor, mask: Tensor, basis: Tensor | None = None) -> Curvature:
    """Curvature from node marginals (S, B, T, V) and transition matrices (S, B, T-1, V, V), along the
    columns of ``basis`` (V, R), or of each label.

    All positions t and t + d are treated at once for each distance d: O(S B T^2 V^3) time in T batched
    products, O(S B T V^2) memory. Labels that are far apart forget each other, so the loop ends at the
    first distance where nothing is larger than ``NEGLIGIBLE``. On the CPU, where there is enough to do,
    compiled loops (``compiled_curvature``) find that distance separately for every position of every
    sequence.
    """
    enough = node.numel() * node.shape[-1] >= max(1, WORTH_COMPILING)
    if node.device.type == "cpu" and enough and compiled_loops() is not None:
        from structgp.structures.linear_chain.compiled_curvature import curvature_of

        return curvature_of(node, step, mask, basis, NEGLIGIBLE)
    return _in_torch(node, step, mask, basis)


def _in_torch(node: Tensor, step: Tensor, mask: Tensor, basis: Tensor | None) -> Curvature:
    """The same in torch operations, at all positions and draws at once."""
    S, B, T, V = node.shape
    R = V if basis is None else basis.shape[1]
    nodes = node.new_zeros((B, R, T, T))
    along = node if basis is None else node @ basis  # (S, B, T, R) the mean
    second = node if basis is None else node @ basis.square()
    nodes.diagonal(dim1=-1, dim2=-2).copy_((second - along.square()).mean(0).mT)

    both = node[:, :, :-1, :, None] * step  # (S, B, T-1, V, V): p(y_t = i, y_t+1 = j)
    # Variance of the number of i -> j in a sequence: equal places, then places d apart.
    counts = (both - both.square()).sum(2).mean(0)
    # reach: C[t, t + d]; short: C[t, t + d - 1]
    short = torch.eye(V, dtype=node.dtype, device=node.device).expand(S, B, T, V, V)
    reach = step
    for d in range(1, T):
        if basis is None:
            product = node[:, :, :-d] * reach.diagonal(dim1=-1, dim2=-2)
        else:
            product = ((reach @ basis) * (node[:, :, :-d, :, None] * basis)).sum(-2)
        apart = (product - along[:, :, :-d] * along[:, :, d:]).mean(0)
        apart = torch.where(mask[:, d:, None], apart, 0).mT
        largest = float(apart.abs().max()) if apart.numel() else 0.0
        nodes.diagonal(offset=d, dim1=-1, dim2=-2).copy_(apart)
        nodes.diagonal(offset=-d, dim1=-1, dim2=-2).copy_(apart)
        if d < T - 1:
            again = short[:, :, 1 : T - d].mT * step[:, :, d:] - both[:, :, d:]
            again = both[:, :, :-d] * again
            counts = counts + 2 * again.sum(2).mean(0)
            largest = max(largest, float(again.abs().max()))
            short, reach = reach, reach[:, :, :-1] @ step[:, :, d:]
        if largest < NEGLIGIBLE:
            break
    return Curvature(nodes, counts)
