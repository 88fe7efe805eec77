"""Second-order variational inference for concave structures.

On a fixed set of draws the bound is a smooth function of the posterior, and alternating two
moves climbs to its optimum in a handful of rounds:

1. means: with the covariances held, each draw is the mean plus a fixed offset, so the bound is concave
   in the means, like a CRF's penalised likelihood. L-BFGS, in the coordinates that the current
   posterior covariance makes round.
2. covariances: at the optimum, S_j^-1 = I + sum_n A_n^T E[-d^2 log p / df_nj^2] A_n (set the gradient
   of the bound to zero and use Price's theorem). The structure gives that curvature in closed form.
   A diagonal S_j has its optimum at the inverse of that matrix's DIAGONAL: only those entries of
   the gradient are there to be zero. (The diagonal of the inverse would be larger.)

It starts from the means that fit best with no noise at all. In every round the amplitude of the
kernel can move with the means (every draw is proportional to its square root), and the pairwise scale
to its optimum in closed form: both are learned on the bound, at no extra cost.

For a posterior of one component with a diagonal q(g).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from structgp.errors import InputError
from structgp.gp import Posterior, SequenceGaussian
from structgp.gp.linalg import cholesky, factor_of_inverse
from structgp.optimizers.base import Problem, StepInfo
from structgp.optimizers.scales import (
    AMPLITUDE_PRIOR_SD,
    LearnScales,
    fit_pairwise_sd,
    moves_amplitude,
    refuse_kernel,
)
from structgp.structures import Structure

AMPLITUDE_STEP = 0.1
"""Scale of the log-amplitude in L-BFGS: its curvature is some hundreds, the means' is 1."""


@dataclass(frozen=True)
class SecondOrderState:
    """noise : (S, B, T, V) a batch; pair_noise : (S, V, V); elbo : bound of the last round;
    evaluations : likelihoods computed since then."""

    noise: list[Tensor]
    pair_noise: Tensor
    iteration: int = 0
    elbo: float = -np.inf
    evaluations: int = 0


@dataclass(frozen=True)
class SecondOrder:
    """Alternating means and covariances.

    Parameters
    ----------
    n_draws : S, draws that stand for the posterior; antithetic, so even.
    tolerance : stop when a round changes the bound by less, in nats per sequence.
    max_rounds : stop here at the latest.
    learn_scales : False, 'pairwise' (the pairwise scale moves), or True (the amplitude too).
    """

    n_draws: int = 16
    tolerance: float = 0.02
    max_rounds: int = 20
    learn_scales: LearnScales = "pairwise"
    name = "second-order"

    def start(self, problem: Problem, generator: torch.Generator) -> SecondOrderState:
        refuse_kernel(self.learn_scales, self.name)
        _check(problem.posterior, problem.structure)
        q, half = problem.posterior, max(1, self.n_draws // 2)

        def mirrored(*shape: int) -> Tensor:
            noise = torch.randn(half, *shape, generator=generator, dtype=q.m.dtype)
            return torch.cat([noise, -noise])

        V = q.n_labels
        noise = [mirrored(*batch.mask.shape, V) for batch in problem.batches]
        with torch.no_grad():
            zeros = q.m.new_zeros
            none = [zeros(1, *batch.mask.shape, V) for batch in problem.batches]
            _, evaluations = _fit_means(problem, none, zeros(1, V, V), steps=15, tolerance=1e-4)
            _fit_covariances(problem, none, zeros(1, V, V))
        return SecondOrderState(noise, mirrored(V, V), evaluations=evaluations)

    def step(self, problem: Problem, state: SecondOrderState) -> tuple[SecondOrderState, StepInfo]:
        """One round. Cost: O(V (N M^2 + M^3)) for the covariances, O(V N M T) for diagonal ones, and for
        each of some 10 to 30 L-BFGS steps O(N M V) plus S likelihoods of every sequence."""
        with torch.no_grad():
            offsets, pair_offset = _offsets(problem, state)
            elbo, evaluations = _fit_means(
                problem,
                offsets,
                pair_offset,
                steps=50,
                tolerance=min(1e-5, 5e-4 * self.tolerance),
                learn_amplitude=moves_amplitude(self.learn_scales),
            )
            _fit_covariances(problem, offsets, pair_offset)
            if self.learn_scales:
                fit_pairwise_sd(problem.posterior)
        change = abs(elbo - state.elbo) / problem.n_sequences
        converged = change < self.tolerance
        finished = converged or state.iteration + 1 >= self.max_rounds
        info = StepInfo(state.iteration, elbo, state.evaluations + evaluations, finished, converged)
        return replace(state, iteration=state.iteration + 1, elbo=elbo, evaluations=0), info


def _check(q: Posterior, structure: Structure) -> None:
    """The closed forms are those of one Gaussian, with independent pairwise scores, and of a
    structure that knows its curvature."""
    if not structure.has_curvature:
        raise InputError(
            "inference",
            f"'second-order' needs the curvature, and {type(structure).__name__} offers none",
            "use 'natural'",
        )
    for name, given in {
        f"a posterior of {q.n_components} components": q.n_components > 1,
        "a full covariance of the pairwise scores": q.pairs_are_full,
    }.items():
        if given:
            raise InputError("inference", f"'second-order' cannot fit {name}", "use 'adam'")


def _offsets(problem: Problem, state: SecondOrderState) -> tuple[list[Tensor], Tensor]:
    """What each draw adds to the mean: f as (S, B, T, V) a batch, g as (S, V, V).

    f is left without the amplitude, which moves while the offsets stay.
    """
    q = problem.posterior
    offsets = []
    for i, noise in enumerate(state.noise):
        gaussian = SequenceGaussian(problem.conditional(i), q.m, q.factor)
        factor = cholesky(gaussian.covariance[0])  # (B, V, T, T), JOINT over positions
        offsets.append(torch.einsum("bvtu,sbuv->sbtv", factor, noise))
    return offsets, q.pairwise().factor * state.pair_noise


def _fit_means(
    problem: Problem,
    offsets: list[Tensor],
    pair_offset: Tensor,
    *,
    steps: int,
    tolerance: float,
    learn_amplitude: bool = False,
) -> tuple[float, int]:
    """Maximises the bound over m, pair_mean and, if ``learn_amplitude``, the amplitude, in place.

    At most ``steps`` L-BFGS steps, until one gains less than ``tolerance`` of the value.
    Returns the bound, of the draws the offsets stand for, and the number of likelihoods computed.
    """
    q = problem.posterior
    _, V, M = q.m.shape
    factor = q.factor[0].clone()
    m, pair_mean, log_amplitude = q.m[0].clone(), q.pair_mean.clone(), q.log_amplitude.clone()
    pair_scale = q.pairwise().factor
    calls = 0

    def times(factor: Tensor, v: Tensor) -> Tensor:
        """(V, M)."""
        return factor * v if q.is_diagonal else (factor @ v[..., None]).squeeze(-1)

    def place(flat: np.ndarray) -> None:
        step_m, step_pair, step_log = torch.from_numpy(flat).split([V * M, V * V, 1])
        q.m[0] = m + times(factor, step_m.view(V, M))
        q.pair_mean.copy_(pair_mean + pair_scale * step_pair.view(V, V))
        q.log_amplitude.copy_(log_amplitude + AMPLITUDE_STEP * step_log.squeeze())

    def negative(flat: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal calls
        calls += 1
        place(flat)
        value, grads = _value_and_gradients(problem, offsets, pair_offset)
        grad_m = times(factor if q.is_diagonal else factor.mT, grads[0]).reshape(-1)
        grad_log = AMPLITUDE_STEP * grads[2].reshape(1) * learn_amplitude
        grad = torch.cat([grad_m, (pair_scale * grads[1]).reshape(-1), grad_log])
        return -float(value), -grad.numpy()

    options = {"maxcor": 20, "maxiter": steps, "ftol": tolerance}
    zero = np.zeros(V * M + V * V + 1)
    result = scipy.optimize.minimize(negative, zero, jac=True, method="L-BFGS-B", options=options)
    place(result.x)
    # The means' part of the two divergences is in the value already, and so is the amplitude's prior,
    # which the bound knows nothing of.
    rest = q.kl_inducing(problem.entropy) - 0.5 * q.m.square().sum()
    rest = rest - 0.5 * (q.log_amplitude / AMPLITUDE_PRIOR_SD).square()
    if q.has_pairs:
        rest = rest + q.kl_pairwise() - 0.5 * (q.pair_mean / q.pairwise_sd).square().sum()
    return -float(result.fun) - float(rest), calls * len(pair_offset) * problem.n_sequences


def _value_and_gradients(
    problem: Problem, offsets: list[Tensor], pair_offset: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The bound up to what the covariances add, and its gradients in m[0] (V, M), pair_mean (V, V)
    and log_amplitude ()."""
    q = problem.posterior
    scale = (0.5 * q.log_amplitude).exp()
    value = -0.5 * (q.m.square().sum() + (q.log_amplitude / AMPLITUDE_PRIOR_SD).square())
    grad_m, grad_log = -q.m[0], -q.log_amplitude / AMPLITUDE_PRIOR_SD**2
    grad_pair = torch.zeros_like(q.pair_mean)
    if q.has_pairs:
        value = value - 0.5 * (q.pair_mean / q.pairwise_sd).square().sum()
        grad_pair -= q.pair_mean / q.pairwise_sd.square()
    for i, (batch, offset) in enumerate(zip(problem.batches, offsets, strict=True)):
        projection = problem.conditional(i).projection
        f = (scale * (projection @ q.m[0].T + offset)).requires_grad_()
        g = (q.pairwise().mean + pair_offset).requires_grad_()
        with torch.enable_grad():
            there = problem.on_device(f, g, batch.y, batch.mask)
            total = problem.structure.log_prob(*there).mean(0).sum().cpu()
            found = torch.autograd.grad(total, (f, g), allow_unused=True)
        grad_f, grad_g = (
            torch.zeros_like(x) if grad is None else grad
            for x, grad in zip((f, g), found, strict=True)
        )
        value = value + total.detach()
        grad_m += scale * grad_f.sum(0).flatten(0, 1).T @ projection.flatten(0, 1)
        grad_pair += grad_g.sum(0)
        grad_log = grad_log + 0.5 * (grad_f * f.detach()).sum()
    return value, [grad_m, grad_pair, grad_log]


def _fit_covariances(problem: Problem, offsets: list[Tensor], pair_offset: Tensor) -> None:
    """Sets factor and pair_log_sd to what the curvature at the draws asks for, in place."""
    q = problem.posterior
    _, V, M = q.m.shape
    scale = (0.5 * q.log_amplitude).exp()
    eye = torch.ones(M, dtype=q.m.dtype) if q.is_diagonal else torch.eye(M, dtype=q.m.dtype)
    precision = eye.repeat(V, *[1] * eye.dim())
    pair_precision = q.pairwise_sd.clamp(min=1e-300) ** -2 * torch.ones_like(q.pair_mean)
    g = q.pairwise().mean + pair_offset
    for i, (batch, offset) in enumerate(zip(problem.batches, offsets, strict=True)):
        projection = problem.conditional(i).projection
        f = scale * (projection @ q.m[0].T + offset)
        curvature = problem.structure.curvature(*problem.on_device(f, g, batch.y, batch.mask))
        B, T, _ = projection.shape
        # (B, V T, T) @ (B, T, M), then one product (M, B T) @ (B T, M) a label.
        bent = (scale.square() * curvature.unary.to(f)).reshape(B, V * T, T) @ projection
        if q.is_diagonal:
            precision += (bent.reshape(B, V, T, M) * projection[:, None]).sum((0, 2))
        else:
            bent = bent.reshape(B, V, T, M).transpose(0, 1).reshape(V, B * T, M)
            flat = projection.reshape(B * T, M).T
            for j in range(V):
                precision[j].addmm_(flat, bent[j])
        pair_precision += curvature.pairwise.to(f)
    q.factor[0] = precision.rsqrt() if q.is_diagonal else factor_of_inverse(precision)
    if q.has_pairs:
        q.pair_log_sd.copy_(-0.5 * pair_precision.log())
