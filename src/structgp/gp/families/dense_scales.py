"""The scales and the shape of a kernel on dense columns, learned on the bound.

A round of second-order inference replaces the log-likelihood by a quadratic in the functions, with the
slope and curvature of each tuple. Under this quadratic, the best posterior and its bound are known for
every kernel:

    log N = sum_j 1/2 b_j^T P_j^-1 b_j - 1/2 log |P_j|,   P_j = I + Phi^T H_j Phi,   b_j = Phi^T l_j,

so hyper-parameters can go all the way to their optimum under the quadratic before the next round finds a
new one. The posterior follows them, which is far faster than steps with the posterior held fixed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # its parts are imported when they are used
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from structgp.gp.block import LARGEST_FACTOR, Seen, ratio
from structgp.gp.kernels.block_sum import covariance
from structgp.gp.kernels.dense import DenseKernel
from structgp.gp.linalg import cholesky, each_times, inverse_from_lower, upper_factor_of_inverse
from structgp.threads import share_matrices

PRIOR_COUNT = 2.0
"""Strength, counted in parameters, of the prior that the scale of the kernel is right as it is: a scale
that the data do not determine stays put. Not chosen on data."""

SINGLE_WORK = 3e8
"""Number of multiplications (some 20 ms) from which sums of many products are computed in single precision
on the CPU. This rounds the spread of the posterior, and the point from which the search for its mean
starts."""

LEAST_CURVATURE = 1e-3
"""Smallest share of the prior precision that a token must add in the direction of its own features to be
counted. Not chosen on data."""

REFINEMENTS = 3
"""Number of solves in single precision, each for the residual of the one before, which adds some four
digits."""

PANEL = 256
"""Number of rows of a gram matrix that are computed at a time, up to the diagonal."""

SWEEPS = 6
"""Most closed-form steps of the scale per quadratic; they stop earlier if it moves by less than 1 %."""

SHAPE_STEPS = 8
"""Most evaluations of the evidence per quadratic."""

FIRST_MOVE, LEAST_SLOPE = 0.25, 0.05
"""Move of the parameters in the first trial of a search for the shape: by a quarter or so, where L-BFGS,
which knows nothing yet, would move them by a factor e. And the slope, in nats per such move, at which a
search ends. Neither was chosen on data."""

FARTHEST_STEP = math.log(LARGEST_FACTOR)
"""Largest move of a logarithmic parameter under one quadratic, which says little about kernels far away."""

PRIOR_SD = 3.0
"""Prior standard deviation of logarithmic parameters of the shape around where they start: e^3 either way.
Weak, but enough to keep a length-scale that the data do not determine from running away. Not chosen on
data."""


@dataclass(frozen=True)
class Quadratic:
    """The log-likelihood as sum_tj l_tj h_tj - H_tj h_tj^2 / 2 in the dense part of the functions,
    expressed in its features. bend, linear : (N, R) H and l, for functions scaled by the amplitude and the
    axes. rows : (N, D), used where the shape is learned. values : (N, F) and left : (N,), those of
    ``DenseFeatures``."""

    rows: Tensor
    values: Tensor
    left: Tensor
    bend: Tensor
    linear: Tensor

    @staticmethod
    def of(block: Any, seen: Sequence[Seen], axes: Tensor) -> Quadratic:
        """axes : (R,), by how much the variances of the functions are about to grow."""
        found = []
        for s in seen:
            mask, here = s.mask, s.conditional
            values, bend = here.values[mask], s.bend[mask]
            mean = block.scale * values @ block.m[:, here.n_loose :].T
            linear = bend * mean + s.slope[mask]
            rows = s.rows[..., block.columns][mask] if block.learns_shape else values[:, :0]
            found.append((rows, values, here.left[mask], bend, linear))
        rows, values, left, bend, linear = (torch.cat(parts) for parts in zip(*found, strict=True))
        size = block.scale.square() * axes
        return Quadratic(rows, values, left, bend * size, linear * size.sqrt())


def kind_for(values: Tensor, work: int) -> torch.dtype:
    """The precision for sums over ``values`` that take ``work`` multiplications (``SINGLE_WORK``)."""
    return torch.float32 if values.device.type == "cpu" and work > SINGLE_WORK else values.dtype


def gram_of(values: Tensor, bend: Tensor, sizes: Tensor) -> Tensor:
    """(R, F, F) lower triangles of sum_t phi_t H_tj phi_t^T, from features (N, F) and curvature (N, R), for
    functions whose variances are ``sizes`` (R,) times as large as those of the features. Cost O(R N F^2);
    computed and returned in single precision where the work is large (``SINGLE_WORK``). With many labels,
    many tokens say next to nothing about a function, and are left out (``LEAST_CURVATURE``)."""
    kind = kind_for(values, values.numel() * values.shape[1] * bend.shape[1])
    if values.device.type != "cpu":  # a GPU is fast at this, but not at looking for such tokens
        return torch.stack([values.T @ (h[:, None] * values) for h in bend.T])
    counts = bend * values.square().sum(1)[:, None] * sizes > LEAST_CURVATURE
    values, bend, F = values.to(kind), bend.to(kind), values.shape[1]
    found = values.new_zeros(bend.shape[1], F, F)
    for total, h, here in zip(found, bend.T, counts.T, strict=True):
        some = values[here]
        weighted = h[here, None] * some
        for first in range(0, F, PANEL):
            last = first + PANEL
            torch.mm(weighted[:, first:last].T, some[:, :last], out=total[first:last, :last])
    return found


def spread_of(gram: Tensor, grown: Tensor) -> Tensor:
    """(R, F, F) upper triangular roots of the covariances (I + grown gram)^-1; only the lower triangles of
    ``gram`` are read. Cost O(R F^3); computed and returned in single precision where the work is large
    (``SINGLE_WORK``)."""
    precision = float(grown) * gram.to(kind_for(gram, gram.numel() * gram.shape[-1]))
    precision.diagonal(dim1=-1, dim2=-2).add_(1)
    return upper_factor_of_inverse(precision)


def learn_size(
    kernel: DenseKernel, seen: Quadratic, sweeps: int = SWEEPS, gram: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Moves the scale of the whole kernel, whose shape stays, towards where the bound is largest under the
    quadratic. gram : (R, F, F) the result of ``gram_of``, if that is known. Returns the posterior there:
    means (R, F) and roots (R, F, F). Cost O(R N F^2), and O(R F^3) per sweep."""
    R, F = seen.bend.shape[1], seen.values.shape[1]
    if gram is None:
        gram = gram_of(seen.values, seen.bend, seen.bend.new_ones(R))
    pull = seen.linear.T @ seen.values  # (R, F)
    lost = (seen.bend * seen.left[:, None]).sum()
    grown = pull.new_ones(())
    for sweep in range(sweeps + 1):
        root = spread_of(gram, grown)
        m = each_times(root, each_times(root.mT, (grown.sqrt() * pull).to(root))).to(pull)
        determined = R * F - root.square().sum().to(pull) + grown * lost
        step = ratio(m.square().sum(), determined, PRIOR_COUNT)
        after = (grown * step).clamp(1 / LARGEST_FACTOR, LARGEST_FACTOR)
        if sweep == sweeps or 0.99 < float(after / grown) < 1.01:
            break
        grown = after
    kernel.log_scale.add_(grown.log())
    return m, root


def _solved(lower: Tensor, root: Tensor, prior: Tensor, linear: Tensor) -> Tensor:
    """(R, N) (I + H K)^-1 l. lower : (R, N, N) factor of I + H^1/2 K H^1/2; root : (R, N) H^1/2. Both may
    be in single precision: the residual of each solve is then computed in the precision of the prior, and
    solved for again. Without that, rounding moved the evidence by several nats, and searches for its
    maximum ended where they began."""
    found, wide = torch.zeros_like(linear), root.to(linear)
    for _ in range(REFINEMENTS):
        rest = linear - found - wide.square() * (found @ prior)
        right = (wide * (rest @ prior)).to(root)[..., None]
        found = found + rest - wide * torch.cholesky_solve(right, lower)[..., 0].to(linear)
    return found


def _of_functions(prior: Tensor, root: Tensor, linear: Tensor) -> tuple[Tensor, Tensor]:
    """The contribution to the evidence of functions with curvature root^2 and slope ``linear``, (R, N)
    each, and its gradient in the prior (N, N)."""
    inner = root[:, :, None] * prior.to(root) * root[:, None]
    inner.diagonal(dim1=-1, dim2=-2).add_(1)
    lower = cholesky(inner)
    narrow = inverse_from_lower(lower).mul_(root[:, :, None]).mul_(root[:, None])  # (K + H^-1)^-1
    dual = _solved(lower, root, prior, linear)
    value = 0.5 * (linear * (dual @ prior)).sum() - lower.diagonal(dim1=-1, dim2=-2).log().sum()
    return value, 0.5 * (dual.T @ dual - narrow.sum(0))


def evidence(kernel: DenseKernel, seen: Quadratic) -> Tensor:
    """The bound at the best posterior under the quadratic, for the whole Gaussian process, up to a
    constant. Its first derivatives in the kernel's parameters are right, but not the second. Cost O(R N^3),
    in single precision where the work is large (``SINGLE_WORK``)."""
    prior = covariance(kernel, seen.rows, seen.rows)
    with torch.no_grad():
        root, linear = seen.bend.clamp(min=0).sqrt().T, seen.linear.T  # (R, N)
        root = root.to(kind_for(prior, root.numel() * len(prior) ** 2))
        held = prior.detach()

        def work(first: int, last: int) -> tuple[Tensor, Tensor]:
            return _of_functions(held, root[first:last], linear[first:last])

        cost = root.numel() * len(held) ** 2
        values, slopes = zip(*share_matrices(work, len(root), cost, root.device), strict=True)
        value, slope = sum(values), sum(slopes)
    # The value, and a linear function of the prior with the right slope.
    return value + (slope * (prior - prior.detach())).sum()


def learn_shape(block: Any, seen: Quadratic) -> Quadratic:
    """Moves all parameters of the block's dense kernel to where the evidence under the quadratic is
    largest; returns the quadratic expressed in the kernel's new features."""
    kernel: DenseKernel = block.parts[1]
    parameters = kernel.free_parameters()
    with torch.enable_grad():
        for p in parameters:
            p.requires_grad_(True)
        start = parameters_to_vector(parameters).detach().cpu().numpy().copy()

        def negative(steps: np.ndarray) -> tuple[float, np.ndarray]:
            x = start + FIRST_MOVE * steps
            vector_to_parameters(torch.from_numpy(x).to(seen.rows), parameters)
            value = -evidence(kernel, seen)
            grads = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
            away = (x - start) / PRIOR_SD
            slope = torch.cat([g.flatten() for g in grads]).cpu().numpy()
            slope = FIRST_MOVE * (slope + away / PRIOR_SD)
            return float(value.detach()) + 0.5 * float(away @ away), slope

        near = [(-FARTHEST_STEP / FIRST_MOVE, FARTHEST_STEP / FIRST_MOVE)] * len(start)
        options = {"maxfun": SHAPE_STEPS, "ftol": 0.0, "gtol": LEAST_SLOPE}
        found = scipy.optimize.minimize(
            negative, np.zeros_like(start), jac=True, method="L-BFGS-B", bounds=near, options=options
        )
        best = start + FIRST_MOVE * found.x
        vector_to_parameters(torch.from_numpy(best).to(seen.rows), parameters)
    kernel.requires_grad_(False)
    with torch.no_grad():
        kernel.evenness.clamp_(0, 1)  # outside, it has no gradient that would bring it back
        features = kernel.features(seen.rows, kernel.prior_factor())
    return Quadratic(seen.rows, features.values, features.left, seen.bend, seen.linear)
