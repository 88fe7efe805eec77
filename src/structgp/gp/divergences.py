"""Divergences and entropies of the bound (``klun``, ``klbin``, ``eq:entropy``).

A mixture has K components, each independent over V labels, in the whitened coordinates where the prior
is N(0, I): log_weights (K,), mean (K, V, M), and a covariance in one of the forms of ``gp.spreads``: a
lower triangular factor (K, V, M, M), standard deviations (K, V, M), or low-rank. The entropy of a mixture
has no closed form. Both bounds here are lower bounds on it, so that the bound on the evidence remains a
lower bound."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from structgp.gp.block import Entropy
from structgp.gp.linalg import cholesky
from structgp.gp.spreads import LowRank, Spread, half_log_dets, traces


def kl_whitened(mean: Tensor, factor: Spread) -> Tensor:
    """sum_j KL(N(m_j, S_j) || N(0, I)).

    Whitened inducing values v = L_zz^-1 u have a standard normal prior, so this is KL(q(u) || p(u)).

    mean : (..., M); factor : (..., M, M) lower triangular, cost O(V M^2), (..., M) standard
    deviations, cost O(V M), or low-rank, cost O(V M r^2).
    """
    second = mean.square().sum() + traces(mean, factor).sum()
    return 0.5 * (second - mean.numel()) - half_log_dets(mean, factor).sum()


def divergence(log_weights: Tensor, mean: Tensor, factor: Spread, entropy: Entropy) -> Tensor:
    """KL(q || N(0, I)) of a mixture, or an upper bound on it: the cross-entropy minus a lower bound on the
    entropy.

    entropy : 'bhattacharyya', exact at K = 1, else cost O(K^2 V M^3) (low-rank: O(K^2 V M r^2));
    'jensen', the paper's (``eq:entropy``), looser."""
    if entropy == "bhattacharyya" and len(mean) == 1:
        return kl_whitened(mean, factor)
    bound = entropy_jensen if entropy == "jensen" else entropy_bhattacharyya
    return cross_entropy(log_weights, mean, factor) - bound(log_weights, mean, factor)


def cross_entropy(log_weights: Tensor, mean: Tensor, factor: Spread) -> Tensor:
    """-E_q[log N(v; 0, I)] of a mixture, exact (``crossterm``, with its sign turned).

    Cost O(K V M^2), or O(K V M) with standard deviations.
    """
    K = len(mean)
    square = mean.reshape(K, -1).square().sum(-1) + traces(mean, factor).reshape(K, -1).sum(-1)
    constant = mean[0].numel() * math.log(2 * math.pi)
    return 0.5 * (log_weights.exp() * (constant + square)).sum()


def entropy_gaussian(mean: Tensor, factor: Spread) -> Tensor:
    """(K,) entropies of the components, exact. Of the mean, only the shape is used."""
    K = len(mean)
    log_det = half_log_dets(mean, factor).reshape(K, -1).sum(-1)
    return 0.5 * mean[0].numel() * (1 + math.log(2 * math.pi)) + log_det


def entropy_jensen(log_weights: Tensor, mean: Tensor, factor: Spread) -> Tensor:
    """The paper's lower bound on the entropy of a mixture (``eq:entropy``, ``entermhat``):

        -sum_k pi_k log sum_l pi_l N(m_k; m_l, S_k + S_l).

    Loose even at K = 1, by (1 - log 2) / 2 = 0.153 nats per dimension. Cost O(K^2 V M^3).
    """
    distance, log_det = _between(mean, factor)
    log_overlap = -0.5 * (mean[0].numel() * math.log(4 * math.pi) + log_det + 0.5 * distance)
    return -(log_weights.exp() * torch.logsumexp(log_weights + log_overlap, -1)).sum()


def entropy_bhattacharyya(log_weights: Tensor, mean: Tensor, factor: Spread) -> Tensor:
    """Lower bound on the entropy of a mixture (Kolchinsky and Tracey 2017):

        sum_k pi_k H_k - sum_k pi_k log sum_l pi_l exp(-BD_kl),

    with the Bhattacharyya distance BD_kl of two components, a sum over labels. Exact at K = 1, where
    components are equal, and where they are far apart; never below sum_k pi_k H_k. With very few
    dimensions, ``entropy_jensen`` may still be the tighter bound. Cost O(K^2 V M^3).
    """
    distance, log_det = _between(mean, factor)
    own = log_det.diagonal()
    bhattacharyya = 0.125 * distance + 0.5 * (log_det - 0.5 * (own[:, None] + own))
    mixing = torch.logsumexp(log_weights - bhattacharyya, -1)
    return (log_weights.exp() * (entropy_gaussian(mean, factor) - mixing)).sum()


def _between(mean: Tensor, factor: Spread) -> tuple[Tensor, Tensor]:
    """(K, K) (m_k - m_l)^T C^-1 (m_k - m_l) and log det C with C = (S_k + S_l) / 2, both summed over
    labels."""
    if not isinstance(factor, LowRank) and factor.dim() == mean.dim():
        variance = 0.5 * (factor.square()[:, None] + factor.square())
        apart = (mean[:, None] - mean).square() / variance
        return apart.sum((-1, -2)), variance.log().sum((-1, -2))
    K, own = len(mean), 2 * half_log_dets(mean, factor).sum(-1)
    distance = [[mean.new_zeros(())] * K for _ in range(K)]
    log_det = [[own[k]] * K for k in range(K)]
    of_two: Any = _of_two_low_rank if isinstance(factor, LowRank) else _of_two_full
    for k in range(K):
        for l in range(k):
            apart, both = of_two(mean[k] - mean[l], factor, k, l, own[k])
            distance[k][l] = distance[l][k] = apart
            log_det[k][l] = log_det[l][k] = both
    return _stacked(distance), _stacked(log_det)


def _of_two_full(apart: Tensor, factor: Tensor, k: int, l: int, own: Tensor) -> tuple[Tensor, Tensor]:
    """The same for two components whose means differ by ``apart`` (V, M). own : log det S_k."""
    # In the coordinates that make S_k the identity, C has no eigenvalue below 1/2 and needs no jitter;
    # where both components are the same it is the identity.
    M = apart.shape[-1]
    moved = torch.cat([factor[l], apart[..., None]], -1)
    moved = torch.linalg.solve_triangular(factor[k], moved, upper=False)
    root, apart = moved.split([M, 1], -1)
    lower = _lower(0.5 * (torch.eye(M).to(apart) + root @ root.mT))
    apart = torch.linalg.solve_triangular(lower, apart, upper=False)
    return apart.square().sum(), own + 2 * half_log_dets(apart[..., 0], lower).sum()


def _of_two_low_rank(apart: Tensor, spread: LowRank, k: int, l: int, _: Tensor) -> tuple[Tensor, Tensor]:
    """The same where both covariances are a diagonal minus a low-rank matrix, so that their average is one
    too: C = E - Z Z^T with E = (s_k^2 + s_l^2) / 2 and Z = (Y_k, Y_l) / sqrt 2. Cost O(V M r^2)."""
    diagonal = 0.5 * (spread.sd[k].square() + spread.sd[l].square())
    Z = 0.5**0.5 * torch.cat([spread.narrowing[k], spread.narrowing[l]], -1)
    Z = Z / diagonal.sqrt()[..., None]
    inner = _lower(torch.eye(Z.shape[-1]).to(Z) - Z.mT @ Z)
    apart = apart / diagonal.sqrt()
    along = torch.linalg.solve_triangular(inner, Z.mT @ apart[..., None], upper=False)
    log_det = diagonal.log().sum() + 2 * half_log_dets(apart, inner).sum()
    return apart.square().sum() + along.square().sum(), log_det


def _lower(matrix: Tensor) -> Tensor:
    """The Cholesky factor, without jitter where it exists."""
    lower, failed = torch.linalg.cholesky_ex(matrix)
    return cholesky(matrix) if bool((failed > 0).any()) else lower


def _stacked(rows: list[list[Tensor]]) -> Tensor:
    return torch.stack([torch.stack(row) for row in rows])
