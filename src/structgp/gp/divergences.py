"""Divergences and entropies of the bound (``klun``, ``klbin``, ``eq:entropy``).

Mixtures are of K components, each independent over V labels, in the whitened coordinates where the
prior is N(0, I): log_weights (K,), mean (K, V, M), and a factor that is either lower triangular,
(K, V, M, M), or the standard deviations, (K, V, M). Which of the two is read off its shape; entries
on the diagonal may have either sign. The entropy of a mixture has no closed form; both bounds here
are below it, so that a bound on the evidence stays one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structgp.gp.linalg import cholesky


def kl_whitened(mean: Tensor, factor: Tensor) -> Tensor:
    """sum_j KL(N(m_j, L_j L_j^T) || N(0, I)).

    Whitened inducing values v = L_zz^-1 u have a standard normal prior, so this is KL(q(u) || p(u)).

    mean : (..., M); factor : (..., M, M) lower triangular, cost O(V M^2), or (..., M) standard
    deviations, cost O(V M).
    """
    log_det = _diagonal(mean, factor).abs().log().sum()
    return 0.5 * (mean.square().sum() + factor.square().sum() - mean.numel()) - log_det


def kl_diagonal(mean: Tensor, sd: Tensor, prior_sd: Tensor) -> Tensor:
    """KL(N(mean, sd^2) || N(0, prior_sd^2)), all of one shape, summed.

    For the pairwise scores the number of terms is V^2 (the paper's ``klbin`` prints V).
    """
    ratio = (sd / prior_sd).square()
    return 0.5 * ((mean / prior_sd).square() + ratio - 1 - ratio.log()).sum()


def kl_full(mean: Tensor, factor: Tensor, prior_sd: Tensor) -> Tensor:
    """KL(N(mean, L L^T) || N(0, prior_sd^2 I)) (``klbin``).

    mean : (V, V), read row by row; factor : (V^2, V^2) lower triangular; prior_sd : (). Cost O(V^4).
    """
    return kl_whitened(mean.reshape(-1) / prior_sd, factor / prior_sd)


def cross_entropy(log_weights: Tensor, mean: Tensor, factor: Tensor) -> Tensor:
    """-E_q[log N(v; 0, I)] of a mixture, exact (``crossterm``, with its sign turned).

    Cost O(K V M^2), or O(K V M) with standard deviations.
    """
    K = len(mean)
    square = mean.reshape(K, -1).square().sum(-1) + factor.reshape(K, -1).square().sum(-1)
    constant = mean[0].numel() * math.log(2 * math.pi)
    return 0.5 * (log_weights.exp() * (constant + square)).sum()


def entropy_gaussian(mean: Tensor, factor: Tensor) -> Tensor:
    """(K,) entropies of the components, exact. The mean says how many dimensions there are."""
    K = len(mean)
    log_det = _diagonal(mean, factor).abs().log().reshape(K, -1).sum(-1)
    return 0.5 * mean[0].numel() * (1 + math.log(2 * math.pi)) + log_det


def entropy_jensen(log_weights: Tensor, mean: Tensor, factor: Tensor) -> Tensor:
    """The paper's lower bound on the entropy of a mixture (``eq:entropy``, ``entermhat``):

        -sum_k pi_k log sum_l pi_l N(m_k; m_l, S_k + S_l).

    Loose even at K = 1, by (1 - log 2) / 2 = 0.153 nats a dimension. Cost O(K^2 V M^3).
    """
    distance, log_det = _between(mean, factor)
    log_overlap = -0.5 * (mean[0].numel() * math.log(4 * math.pi) + log_det + 0.5 * distance)
    return -(log_weights.exp() * torch.logsumexp(log_weights + log_overlap, -1)).sum()


def entropy_bhattacharyya(log_weights: Tensor, mean: Tensor, factor: Tensor) -> Tensor:
    """Lower bound on the entropy of a mixture (Kolchinsky and Tracey 2017):

        sum_k pi_k H_k - sum_k pi_k log sum_l pi_l exp(-BD_kl),

    with the Bhattacharyya distance BD_kl of two components, a sum over labels. Exact at K = 1, where
    components are equal, and where they are far apart; never below sum_k pi_k H_k. Where dimensions
    are very few, ``entropy_jensen`` may still be above it. Cost O(K^2 V M^3).
    """
    distance, log_det = _between(mean, factor)
    own = log_det.diagonal()
    bhattacharyya = 0.125 * distance + 0.5 * (log_det - 0.5 * (own[:, None] + own))
    mixing = torch.logsumexp(log_weights - bhattacharyya, -1)
    return (log_weights.exp() * (entropy_gaussian(mean, factor) - mixing)).sum()


def _between(mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """(K, K) (m_k - m_l)^T C^-1 (m_k - m_l) and log det C with C = (S_k + S_l) / 2, both summed over
    labels."""
    if factor.dim() == mean.dim():
        variance = 0.5 * (factor.square()[:, None] + factor.square())
        apart = (mean[:, None] - mean).square() / variance
        return apart.sum((-1, -2)), variance.log().sum((-1, -2))
    K, M = len(mean), mean.shape[-1]
    own = 2 * _diagonal(mean, factor).abs().log().sum((-1, -2))
    distance = [[mean.new_zeros(())] * K for _ in range(K)]
    log_det = [[own[k]] * K for k in range(K)]
    eye = torch.eye(M, dtype=mean.dtype, device=mean.device)
    for k in range(K):
        for l in range(k):
            # In the coordinates that make S_k the identity, C has no eigenvalue below 1/2 and needs
            # no jitter; where both components are the same it is the identity.
            apart = torch.cat([factor[l], (mean[k] - mean[l])[..., None]], -1)
            apart = torch.linalg.solve_triangular(factor[k], apart, upper=False)
            root, apart = apart.split([M, 1], -1)
            middle = 0.5 * (eye + root @ root.mT)
            lower, failed = torch.linalg.cholesky_ex(middle)
            lower = cholesky(middle) if bool((failed > 0).any()) else lower
            apart = torch.linalg.solve_triangular(lower, apart, upper=False)
            distance[k][l] = distance[l][k] = apart.square().sum()
            log_det[k][l] = log_det[l][k] = own[k] + 2 * _diagonal(apart[..., 0], lower).log().sum()
    return _stacked(distance), _stacked(log_det)


def _diagonal(mean: Tensor, factor: Tensor) -> Tensor:
    return factor if factor.dim() == mean.dim() else factor.diagonal(dim1=-1, dim2=-2)


def _stacked(rows: list[list[Tensor]]) -> Tensor:
    return torch.stack([torch.stack(row) for row in rows])
