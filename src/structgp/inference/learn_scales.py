"""Hyper-parameters on the bound, in closed form: scales of a sum of kernels.

For a kernel k = sum_c w_c k_c and the posterior that is best under it, the derivative of the bound is

    d ELBO / d log w_c = (E_c - gamma_c) / 2,

E_c : what the fitted function spends in component c, its squared norm there over w_c; gamma_c : the number
of parameters that the data determine in it. At the optimum they are equal, so that

    w_c <- w_c E_c / gamma_c                                       (MacKay, 1992)

climbs to it without a step size. One component may be a whole template, one feature, or one of the
functions that the labels are made of. All of it comes from the gradient of the bound in the kernel
matrices, which costs about as much as the covariances of the posterior do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from gpytorch.kernels import Kernel, ScaleKernel
from torch import Tensor

from structgp.gp import LowRank, Spread, WeightPosterior, traces
from structgp.gp.kernels import covariance, weight_parts, weight_variances
from structgp.gp.kernels.block_sum import BlockSumKernel
from structgp.gp.kernels.relevance import RelevanceKernel, degrees_of_freedom
from structgp.inference.problem import Problem

PRIOR_COUNT = 1.0
"""Parameters' worth of prior that a scale is right as it is: what nothing determines stays put."""

WEIGHTS_PRIOR_COUNT = 10.0
"""The same in weight space, where a posterior without correlations is too sure of what it has found."""

AXIS_PRIOR_COUNT = 2.0

LARGEST_FACTOR = 4.0
"""By which one step may change a scale."""

NUMBERS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Slopes:
    """Derivatives of the expected log-likelihood, one entry a batch: mean (B, T, R) in the functions,
    bend (B, R, T, T) minus the second ones."""

    mean: list[Tensor] = field(default_factory=list)
    bend: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class KernelGradient:
    """Of the bound, in the kernel matrices: cross (B T, M) in k(x, Z) and within (B, T, T) in
    k(x, x) of each batch; inducing (M, M) in k(Z, Z). dual : (M, R) K_zz^-1 u, of which the mean
    functions are k(., Z) dual."""

    cross: list[Tensor]
    within: list[Tensor]
    inducing: Tensor
    dual: Tensor


def learn(problem: Problem, at: Slopes | None = None) -> Tensor:
    """One step for all scales: of the kernel's parts, their features and the functions' amplitudes.
    Returns by how much the variance of each function has grown, (R,).

    ``at`` : at the posterior as it is, which is to be about the best under the kernel as it is; in weight
    space it is not needed. Cost O(R N M^2 + M^3), and O(N M A) for A active features a token; in weight
    space O(R M).
    """
    with torch.no_grad():
        if isinstance(problem.posterior, WeightPosterior):
            grown = _learn_weights(problem.posterior)
            problem.conditional.refresh()
            problem.memory.clear()
            return grown
        assert at is not None, "inducing inputs are learned from slopes"
        gradient = _gradient(problem, at)
        axes = _axes(problem, at)
        parts, labels = _parts(problem.posterior.kernel), problem.posterior.has_label_basis
        for part, start, stop in parts:
            rows = [batch.x[..., start:stop] for batch in problem.batches]
            inducing = problem.posterior.inducing[:, start:stop]
            if isinstance(part, RelevanceKernel):
                _learn_relevance(part, problem, rows, inducing, gradient)
            elif isinstance(part, ScaleKernel) and (len(parts) > 1 or labels):
                # Alone it would do what the functions' amplitudes do, where those move.
                _learn_scale(part, rows, inducing, gradient)
        if labels:
            axes = torch.ones_like(axes)
        problem.posterior.basis.mul_(axes.sqrt())
        problem.conditional.refresh()
        problem.memory.clear()
        return axes


def _learn_weights(q: WeightPosterior) -> Tensor:
    """The same where the posterior is of the weights: whitened, E of a weight is m^2 and gamma 1 - s^2.

    Amplitudes of functions, then scales of groups, then relevances, each given the ones before: what one
    has explained is not explained again. The mean weights stay what they are, and what the data says of
    their precision. Cost O(R M).
    """
    before, axes = weight_variances(q.kernel), q.m.new_ones((q.n_functions, 1))
    energy = q.m[0].square()  # (R, M)
    determined = (1 - q.factor[0].square()).clamp(min=0)
    if not q.has_label_basis:
        axes = _ratio(energy.sum(1), determined.sum(1), AXIS_PRIOR_COUNT)[:, None]
        q.basis.mul_(axes.sqrt().T)
        energy = energy / axes
    nu = degrees_of_freedom(q.n_functions)
    for part, _, span in weight_parts(q.kernel):
        spent, used = energy[:, span].sum(0), determined[:, span].sum(0)
        constant = part.group.new_full((1,), len(part.sizes))
        group = torch.cat([part.group, constant])
        by_group = torch.zeros_like(part.log_scale)
        growth = _ratio(
            by_group.index_add(0, group, spent),
            by_group.index_add(0, group, used),
            WEIGHTS_PRIOR_COUNT,
        )
        part.log_scale.add_(growth.log())
        old, left = part.log_relevance.exp(), (spent / growth[group])[:-1]
        new = (nu + old * left) / (nu + used[:-1])
        new = torch.minimum(torch.maximum(new, old / LARGEST_FACTOR), old * LARGEST_FACTOR)
        part.log_relevance.copy_(new.log())
    grown = axes * weight_variances(q.kernel) / before
    q.m[0] /= grown.sqrt()
    q.factor[0] = (1 + grown * (q.factor[0].square().reciprocal() - 1).clamp(min=0)).rsqrt()
    return axes[:, 0]


def _parts(kernel: Kernel) -> list[tuple[Kernel, int, int | None]]:
    if isinstance(kernel, BlockSumKernel):
        return [
            (part, start, stop)
            for part, (start, stop) in zip(kernel.kernels, kernel.bounds, strict=True)
        ]
    return [(kernel, 0, None)]


def _ratio(energy: Tensor, determined: Tensor, prior: float) -> Tensor:
    ratio = (energy + prior) / (determined.clamp(min=0) + prior)
    return ratio.clamp(1 / LARGEST_FACTOR, LARGEST_FACTOR)


def _axes(problem: Problem, at: Slopes) -> Tensor:
    """(R,) by how much the variance of each function should grow."""
    q = problem.posterior
    scale = q.log_amplitude.exp()
    determined = q.n_inducing - traces(q.m[0], q.spread[0])
    for i, bend in enumerate(at.bend):
        residual = problem.conditional(i).residual
        left = scale * residual @ residual.mT
        determined = determined + (bend * left[:, None]).sum((0, 2, 3))
    return _ratio(q.m[0].square().sum(-1), determined, AXIS_PRIOR_COUNT)


def _gradient(problem: Problem, at: Slopes) -> KernelGradient:
    """Through A = k(x, Z) L^-T, with m and S held: the bound depends on A by

    sum_r slope_r (A m_r) - 1/2 tr bend_r (K_nn - A A^T + A S_r A^T).
    """
    q, L = problem.posterior, problem.conditional.prior_factor
    m, scale = q.m[0], (0.5 * q.log_amplitude).exp()
    cross, within, through_factor = [], [], torch.zeros_like(L)
    covariances = _covariances(q.spread[0])
    for i, (slope, bend) in enumerate(zip(at.mean, at.bend, strict=True)):
        A = problem.conditional(i).projection
        bend = scale.square() * bend
        grad = scale * slope @ m
        for r, S in enumerate(covariances):
            grad = grad + bend[:, r] @ (A - _times_covariance(A, S))
        flat, mask = grad.flatten(0, 1), problem.batches[i].mask.flatten()
        flat = flat * mask[:, None]
        H = torch.linalg.solve_triangular(L, flat, upper=False, left=False)
        through_factor -= H.T @ A.flatten(0, 1)
        cross.append(H)
        within.append(-0.5 * bend.sum(1))
    # Back through the Cholesky factor.
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
    """The outermost factor of one part; what is inside stays."""
    k_zz = covariance(kernel, inducing, inducing)
    slope = (gradient.inducing * k_zz).sum()
    for x, cross, within in zip(rows, gradient.cross, gradient.within, strict=True):
        slope += (cross * covariance(kernel, x.flatten(0, 1), inducing)).sum()
        slope += (within * covariance(kernel, x, x)).sum()
    energy = (gradient.dual * (k_zz @ gradient.dual)).sum()
    factor = _ratio(energy, energy - 2 * slope, PRIOR_COUNT)
    kernel.outputscale = kernel.outputscale.detach() * factor


def _learn_relevance(
    kernel: RelevanceKernel,
    problem: Problem,
    rows: list[Tensor],
    inducing: Tensor,
    gradient: KernelGradient,
) -> None:
    """Scales of groups, relevances of features and the bias. A relevance has the prior of a
    Student-t, nu degrees of freedom's worth at 1: r <- (nu + r E) / (nu + gamma)."""
    group, weights, dual = kernel.group, kernel.weights, gradient.dual
    D, nu = len(weights), degrees_of_freedom(dual.shape[1])
    place_z, value_z = kernel.known(inducing)
    places = [kernel.known(x.flatten(0, 1)) for x in rows]
    slope, seen = torch.zeros_like(weights), torch.zeros_like(weights)
    bias_slope = slope.new_zeros(())
    for left, matrix in zip(
        [*places, (place_z, value_z)], [*gradient.cross, gradient.inducing], strict=True
    ):
        slope += _agreements(left, (place_z, value_z), matrix, D)
        bias_slope = bias_slope + matrix.sum()
    for (place, v), batch, within in zip(places, problem.batches, gradient.within, strict=True):
        B, T = batch.mask.shape
        mask = batch.mask.flatten()
        seen.index_add_(
            0, place[mask].clamp(min=0).flatten(), (place[mask] >= 0).double().flatten()
        )
        bias_slope = bias_slope + within.sum()
        shaped = place.reshape(B, T, -1), v.reshape(B, T, -1)
        for b, length in enumerate(batch.mask.sum(-1).tolist()):
            there = shaped[0][b, :length], shaped[1][b, :length]
            _add_agreements_within(slope, *there, within[b, :length, :length])
    norm = dual.new_zeros((D, dual.shape[1]))
    _scatter(norm, place_z, value_z, dual)
    energy = weights * norm.square().sum(-1)
    determined = (energy - 2 * weights * slope).clamp(min=0)
    by_group = torch.zeros_like(kernel.log_scale[:-1])
    spent = by_group.index_add(0, group, energy)
    used = by_group.index_add(0, group, determined)
    kernel.log_scale[:-1].add_(_ratio(spent, used, PRIOR_COUNT).log())
    bias = kernel.log_scale[-1].exp()
    bias_energy = bias * dual.sum(0).square().sum()
    factor = _ratio(bias_energy, bias_energy - 2 * bias * bias_slope, PRIOR_COUNT)
    kernel.log_scale[-1].add_(factor.log())
    old = kernel.log_relevance.exp()
    new = (nu + old * energy) / (nu + determined)
    new = torch.minimum(torch.maximum(new, old / LARGEST_FACTOR), old * LARGEST_FACTOR)
    kernel.log_relevance.copy_(torch.where(seen > 0, new, 1).log())


def _scatter(total: Tensor, place: Tensor, value: Tensor, rows: Tensor) -> None:
    """total[d] += sum over rows n with feature d of value times rows[n]; total (D, W)."""
    for a in range(place.shape[1]):
        known = place[:, a] >= 0
        total.index_add_(0, place[known, a], value[known, a, None] * rows[known])


def _agreements(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], matrix: Tensor, D: int
) -> Tensor:
    """(D,) for each feature d, sum_nm matrix[n, m] x_nd z_md. left, right : places and values of active
    features, (N, A) and (M, A); matrix (N, M)."""
    found = matrix.new_zeros(D)
    width = max(1, NUMBERS_AT_ONCE // max(D, 1))
    for start in range(0, len(matrix.T), width):
        part = slice(start, start + width)
        total = matrix.new_zeros((D, matrix[:, part].shape[1]))
        _scatter(total, *left, matrix[:, part])
        place, value = right[0][part], right[1][part]
        column = torch.arange(len(place), device=place.device)[:, None].expand_as(place)
        known = place >= 0
        picked = total[place[known], column[known]] * value[known]
        found.index_add_(0, place[known], picked)
    return found


def _add_agreements_within(total: Tensor, place: Tensor, value: Tensor, matrix: Tensor) -> None:
    """Adds the same for the rows of one sequence against each other, through the features it has."""
    features, local = torch.unique(place, return_inverse=True)
    rows = torch.arange(len(place), device=place.device)[:, None].expand_as(local)
    spread = matrix.new_zeros((len(place), len(features)))
    spread.index_put_((rows, local), value, accumulate=True)
    picked = ((matrix @ spread) * spread).sum(0)
    known = features >= 0
    total.index_add_(0, features[known], picked[known])
