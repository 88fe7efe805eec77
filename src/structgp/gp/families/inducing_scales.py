"""Learns the kernel's scales by climbing the bound, for posteriors at inducing inputs (rule: ``gp.block``).

All steps use the gradient of the bound in the kernel matrices, which costs about as much as the covariances
of the posterior.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.kernels import Kernel, ScaleKernel
from torch import Tensor

from structgp.gp.block import AXIS_PRIOR_COUNT, LARGEST_FACTOR, Seen, ratio
from structgp.gp.kernels import covariance
from structgp.gp.kernels.block_sum import BlockSumKernel
from structgp.gp.kernels.relevance import ActiveFeatures, RelevanceKernel, weight_variances
from structgp.gp.spreads import LowRank, Spread, traces

PRIOR_COUNT = 1.0
"""Strength, counted in parameters, of the prior that a scale is right as it is: a scale that the data do
not determine stays put."""

NUMBERS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class KernelGradient:
    """Gradient of the bound in the kernel matrices: cross (B T, M) in k(x, Z) and within (B, T, T) in
    k(x, x) of each batch; inducing (M, M) in k(Z, Z). dual : (M, R) K_zz^-1 u, so that the mean functions
    are k(., Z) dual."""

    cross: list[Tensor]
    within: list[Tensor]
    inducing: Tensor
    dual: Tensor


def learn_scales(block: Any, seen: Sequence[Seen], prior_factor: Tensor) -> Tensor:
    """One step for the scales of the kernel's parts, of their features and of the functions. seen : that of
    the current posterior, which should be about the best under the current kernel. Returns by how much the
    variance of each function has grown, (R,). Cost O(R N M^2 + M^3), and O(N M A) for A active features per
    row."""
    with torch.no_grad():
        gradient = _gradient(block, seen, prior_factor)
        axes = _axes(block, seen)
        parts = _parts(block.kernel)
        for part, start, stop in parts:
            rows = [s.rows[..., start:stop] for s in seen]
            inducing = block.inducing[:, start:stop]
            if isinstance(part, RelevanceKernel):
                _learn_relevance(part, [s.mask for s in seen], rows, inducing, gradient)
            elif isinstance(part, ScaleKernel) and (len(parts) > 1 or block.has_own_functions):
                # A single part's scale would duplicate the amplitudes of the functions, where those move.
                _learn_scale(part, rows, inducing, gradient)
        if block.has_own_functions:
            axes = torch.ones_like(axes)
        block.basis.mul_(axes.sqrt())
        return axes


def _parts(kernel: Kernel) -> list[tuple[Kernel, int, int | None]]:
    if isinstance(kernel, BlockSumKernel):
        return [
            (part, start, stop) for part, (start, stop) in zip(kernel.kernels, kernel.bounds, strict=True)
        ]
    return [(kernel, 0, None)]


def _axes(block: Any, seen: Sequence[Seen]) -> Tensor:
    """(R,) by how much the variance of each function should grow."""
    scale = block.log_amplitude.exp()
    determined = block.n_values - traces(block.m, block.spread)
    for s in seen:
        residual = s.conditional.residual
        left = scale * residual @ residual.mT
        determined = determined + (s.bend * left[:, None]).sum((0, 2, 3))
    return ratio(block.m.square().sum(-1), determined, AXIS_PRIOR_COUNT)


def _gradient(block: Any, seen: Sequence[Seen], L: Tensor) -> KernelGradient:
    """The gradient through A = k(x, Z) L^-T, with m and S held fixed: the bound depends on A through

    sum_r slope_r (A m_r) - 1/2 tr bend_r (K_nn - A A^T + A S_r A^T).
    """
    m, scale = block.m, block.scale
    cross, within, through_factor = [], [], torch.zeros_like(L)
    covariances = _covariances(block.spread)
    for s in seen:
        A, bend = s.conditional.projection, scale.square() * s.bend
        grad = scale * s.slope @ m
        for r, S in enumerate(covariances):
            grad = grad + bend[:, r] @ (A - _times_covariance(A, S))
        flat = grad.flatten(0, 1) * s.mask.flatten()[:, None]
        H = torch.linalg.solve_triangular(L, flat, upper=False, left=False)
        through_factor -= H.T @ A.flatten(0, 1)
        cross.append(H)
        within.append(-0.5 * bend.sum(1))
    # Backpropagate through the Cholesky factor.
    inner = (L.T @ through_factor.tril()).tril()
    inner.diagonal().mul_(0.5)
    half = torch.linalg.solve_triangular(L.T, inner, upper=True)
    inducing = torch.linalg.solve_triangular(L, half, upper=False, left=False)
    dual = torch.linalg.solve_triangular(L.T, m.T, upper=True)
    return KernelGradient(cross, within, 0.5 * (inducing + inducing.T), dual)


def _covariances(spread: Spread) -> list[Spread]:
    """S of each function: (M, M), its diagonal (M,), or low-rank."""
    if isinstance(spread, LowRank):
        return [spread[j] for j in range(len(spread))]
    return list(spread.square()) if spread.dim() == 2 else [lower @ lower.T for lower in spread]


def _times_covariance(A: Tensor, S: Spread) -> Tensor:
    if isinstance(S, LowRank):
        return A * S.sd.square() - (A @ S.narrowing) @ S.narrowing.T
    return A * S if S.dim() == 1 else A @ S


def _learn_scale(
    kernel: ScaleKernel, rows: list[Tensor], inducing: Tensor, gradient: KernelGradient
) -> None:
    """One step for the outermost factor of one part; the parameters inside stay."""
    k_zz = covariance(kernel, inducing, inducing)
    slope = (gradient.inducing * k_zz).sum()
    for x, cross, within in zip(rows, gradient.cross, gradient.within, strict=True):
        slope += (cross * covariance(kernel, x.flatten(0, 1), inducing)).sum()
        slope += (within * covariance(kernel, x, x)).sum()
    energy = (gradient.dual * (k_zz @ gradient.dual)).sum()
    factor = ratio(energy, energy - 2 * slope, PRIOR_COUNT)
    kernel.outputscale = kernel.outputscale.detach() * factor


def _learn_relevance(
    kernel: RelevanceKernel,
    masks: list[Tensor],
    rows: list[Tensor],
    inducing: Tensor,
    gradient: KernelGradient,
) -> None:
    """One step for the scales of groups, the relevances of features and the bias. The prior of a relevance
    is that of a Student-t with nu degrees of freedom, around 1: r <- (nu + r E) / (nu + gamma)."""
    group, weights, dual = kernel.group[:-1], weight_variances(kernel)[:-1], gradient.dual
    D, nu = len(weights), kernel.tails
    at_z, found = kernel.active(inducing), [kernel.active(x) for x in rows]
    slope, seen = torch.zeros_like(weights), torch.zeros_like(weights)
    bias_slope = slope.new_zeros(())
    for left, matrix in zip([*found, at_z], [*gradient.cross, gradient.inducing], strict=True):
        slope += _agreements(left, at_z, matrix, D)
        bias_slope = bias_slope + matrix.sum()
    for left, mask, within in zip(found, masks, gradient.within, strict=True):
        place = left.place[mask]
        seen.index_add_(0, place.clamp(min=0).flatten(), (place >= 0).double().flatten())
        bias_slope = bias_slope + within.sum()
        for b, length in enumerate(mask.sum(-1).tolist()):
            there = left.place[b, :length], left.value[b, :length]
            _add_agreements_within(slope, *there, within[b, :length, :length])
    norm = dual.new_zeros((D, dual.shape[1]))
    _scatter(norm, at_z, dual)
    energy = weights * norm.square().sum(-1)
    determined = (energy - 2 * weights * slope).clamp(min=0)
    by_group = torch.zeros_like(kernel.log_scale[:-1])
    spent = by_group.index_add(0, group, energy)
    used = by_group.index_add(0, group, determined)
    kernel.log_scale[:-1].add_(ratio(spent, used, PRIOR_COUNT).log())
    bias = kernel.log_scale[-1].exp()
    bias_energy = bias * dual.sum(0).square().sum()
    factor = ratio(bias_energy, bias_energy - 2 * bias * bias_slope, PRIOR_COUNT)
    kernel.log_scale[-1].add_(factor.log())
    old = kernel.log_relevance.exp()
    new = (nu + old * energy) / (nu + determined)
    new = torch.minimum(torch.maximum(new, old / LARGEST_FACTOR), old * LARGEST_FACTOR)
    kernel.log_relevance.copy_(torch.where(seen > 0, new, 1).log())


def _scatter(total: Tensor, found: ActiveFeatures, rows: Tensor) -> None:
    """Adds to total[d] the sum, over rows n with feature d, of value times rows[n]; total (D, W)."""
    place, value = found.place.flatten(0, -2), found.value.flatten(0, -2)
    for a in range(place.shape[1]):
        known = place[:, a] >= 0
        total.index_add_(0, place[known, a], value[known, a, None] * rows[known])


def _agreements(left: ActiveFeatures, right: ActiveFeatures, matrix: Tensor, D: int) -> Tensor:
    """(D,) sum_nm matrix[n, m] x_nd z_md for each feature d. left, right : features of N and M rows;
    matrix : (N, M)."""
    found = matrix.new_zeros(D)
    width = max(1, NUMBERS_AT_ONCE // max(D, 1))
    for start in range(0, len(matrix.T), width):
        part = slice(start, start + width)
        total = matrix.new_zeros((D, matrix[:, part].shape[1]))
        _scatter(total, left, matrix[:, part])
        place, value = right.place[part], right.value[part]
        column = torch.arange(len(place), device=place.device)[:, None].expand_as(place)
        known = place >= 0
        picked = total[place[known], column[known]] * value[known]
        found.index_add_(0, place[known], picked)
    return found


def _add_agreements_within(total: Tensor, place: Tensor, value: Tensor, matrix: Tensor) -> None:
    """Adds the same sums for the rows of one sequence against each other, over the features that occur."""
    features, local = torch.unique(place, return_inverse=True)
    rows = torch.arange(len(place), device=place.device)[:, None].expand_as(local)
    spread = matrix.new_zeros((len(place), len(features)))
    spread.index_put_((rows, local), value, accumulate=True)
    picked = ((matrix @ spread) * spread).sum(0)
    known = features >= 0
    total.index_add_(0, features[known], picked[known])
