"""Kullback-Leibler terms of the bound (``klun``, ``klbin``)."""

from __future__ import annotations

from torch import Tensor


def kl_whitened(mean: Tensor, factor: Tensor) -> Tensor:
    """sum_j KL(N(m_j, L_j L_j^T) || N(0, I)).

    Whitened inducing values v = L_zz^-1 u have a standard normal prior, so this is KL(q(u) || p(u)).

    mean : (V, M); factor : (V, M, M) lower triangular. Cost O(V M^2).
    """
    log_det = factor.diagonal(dim1=-1, dim2=-2).abs().log().sum()
    return 0.5 * (mean.square().sum() + factor.square().sum() - mean.numel()) - log_det


def kl_diagonal(mean: Tensor, sd: Tensor, prior_sd: Tensor) -> Tensor:
    """KL(N(mean, sd^2) || N(0, prior_sd^2)), all of one shape, summed.

    For the pairwise scores the number of terms is V^2 (the paper's ``klbin`` prints V).
    """
    ratio = (sd / prior_sd).square()
    return 0.5 * ((mean / prior_sd).square() + ratio - 1 - ratio.log()).sum()
