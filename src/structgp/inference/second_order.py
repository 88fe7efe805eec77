"""Second-order variational inference for concave structures.

On a fixed set of draws the bound is a smooth function of the posterior, and alternating two
moves climbs to its optimum in a handful of rounds:

1. means: with the covariances held, each draw is the mean plus a fixed offset, so the bound is concave
   in the means, like a CRF's penalised likelihood. L-BFGS, in the coordinates that the current
   posterior covariance makes round.
2. covariances: at the optimum, S_j^-1 = I + sum_n A_n^T E[-d^2 log p / df_nj^2] A_n (set the gradient
   of the bound to zero and use Price's theorem). The structure gives that curvature in closed form.
   A diagonal S_j has its optimum at the inverse of that matrix's DIAGONAL: only those entries of
   the gradient are there to be zero. (The diagonal of the inverse would be larger.) A low-rank one is
   found by products with that matrix, which is never formed (``factors``).

It starts from the means that fit best with no noise at all. Between rounds the scales of the kernel
move on the bound (``evidence``), and the pairwise scale to its optimum in closed form. When those have
settled, the last rounds are under the kernel as it then is.

For a posterior of one component with a diagonal q(g).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from structgp.errors import InputError
from structgp.gp import (
    LowRank,
    Posterior,
    SequenceGaussian,
    WeightPosterior,
    noise_table,
    root_times,
    root_transposed_times,
)
from structgp.gp.linalg import cholesky, factor_of_inverse
from structgp.inference import learn_scales as evidence
from structgp.inference.fit_low_rank import fit_low_rank, leading_directions
from structgp.inference.lbfgs import minimize
from structgp.inference.learn_scales import Slopes
from structgp.inference.problem import Problem, StepInfo
from structgp.inference.scales import (
    AMPLITUDE_PRIOR_SD,
    LearnScales,
    fit_pairwise_sd,
    moves_amplitude,
    moves_kernel,
)
from structgp.structures import Structure

AMPLITUDE_STEP = 0.1
"""Scale of the log-amplitude in L-BFGS: its curvature is some hundreds, the means' is 1."""


@dataclass(frozen=True)
class SecondOrderState:
    """noise : (S, B, T, R) a batch, or in weight space one table for all of them; pair_noise : (S, V, V);
    elbo : bound of the last round; evaluations : likelihoods computed since then. slopes : of the last
    round, from which the kernel is learned; None when that is over."""

    noise: list[Tensor]
    pair_noise: Tensor
    slopes: Slopes | None = None
    iteration: int = 0
    elbo: float = -math.inf
    evaluations: int = 0


@dataclass(frozen=True)
class SecondOrder:
    """Alternating means and covariances.

    Parameters
    ----------
    n_draws : S, draws that stand for the posterior; antithetic, so even. None for 16, or 32 with one or two
        functions, where a likelihood costs little.
    tolerance : stop when a round changes the bound by less, in nats per sequence.
    max_rounds : stop here at the latest.
    learn_scales : False, 'transitions' (their scale moves), True (one amplitude too), or 'all' (the
        scales of the kernel, of its features and of the functions).
    learning_tolerance, learning_rounds : the kernel is learned until a round changes the bound by less
        than this, in nats per sequence, or for so many rounds.
    """

    n_draws: int | None = None
    tolerance: float = 0.02
    max_rounds: int = 20
    learn_scales: LearnScales = "all"
    learning_tolerance: float = 0.2
    learning_rounds: int = 5
    name = "second-order"

    def start(self, problem: Problem, generator: torch.Generator) -> SecondOrderState:
        _check(problem.posterior, problem.structure)
        q = problem.posterior
        n_draws = (32 if q.n_functions <= 2 else 16) if self.n_draws is None else self.n_draws
        half = max(1, n_draws // 2)

        def mirrored(*shape: int) -> Tensor:
            noise = torch.randn(half, *shape, generator=generator, dtype=q.m.dtype)
            return torch.cat([noise, -noise]).to(q.m.device)

        V, R = q.basis.shape
        if isinstance(q, WeightPosterior):
            noise = [noise_table(R, half, generator).to(q.m.device)]
        else:
            noise = [mirrored(*batch.mask.shape, R) for batch in problem.batches]
        with torch.no_grad():
            zeros = q.m.new_zeros
            none = [zeros(1, *batch.mask.shape, R) for batch in problem.batches]
            _, evaluations, _ = _fit_means(problem, none, zeros(1, V, V), steps=15, tolerance=1e-4)
            _fit_covariances(problem, none, zeros(1, V, V))
        return SecondOrderState(noise, mirrored(V, V), evaluations=evaluations)

    def step(self, problem: Problem, state: SecondOrderState) -> tuple[SecondOrderState, StepInfo]:
        """One round. Cost: O(R (N M^2 + M^3)) for the covariances, O(R N M T) for diagonal ones, O(R N M
        (T + r)) for low-rank ones; as much again where the kernel is learned; and for each of some 10 to
        30 L-BFGS steps O(N M R) plus S likelihoods of every sequence."""
        learns = moves_kernel(self.learn_scales)
        with torch.no_grad():
            if state.slopes is not None:
                evidence.learn(problem, state.slopes)
            offsets, pair_offset = _offsets(problem, state)
            elbo, evaluations, means = _fit_means(
                problem,
                offsets,
                pair_offset,
                steps=15 if learns else 50,
                tolerance=min(1e-5, 5e-4 * self.tolerance),
                learn_amplitude=moves_amplitude(self.learn_scales) and not learns,
            )
            bends = _fit_covariances(problem, offsets, pair_offset)
            if self.learn_scales:
                fit_pairwise_sd(problem.posterior)
        change = abs(elbo - state.elbo) / problem.n_sequences
        done = state.iteration + 1
        settled = change < self.learning_tolerance or done >= self.learning_rounds
        was_learning = state.slopes is not None or state.iteration == 0
        goes_on = learns and was_learning and not settled
        converged = change < self.tolerance and not goes_on and state.slopes is None
        finished = converged or done >= self.max_rounds
        info = StepInfo(state.iteration, elbo, state.evaluations + evaluations, finished, converged)
        slopes = Slopes(means, bends) if goes_on else None
        return replace(state, slopes=slopes, iteration=done, elbo=elbo, evaluations=0), info


def _check(q: Posterior, structure: Structure) -> None:
    """The closed forms are those of one Gaussian, with independent pairwise scores, and of a
    structure that knows its curvature."""
    in_weights = isinstance(q, WeightPosterior)
    if not (structure.has_local_curvature if in_weights else structure.has_curvature):
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
    """What each draw adds to the mean: of the functions (S, B, T, R) a batch, of g (S, V, V).

    The functions are left without the amplitude, which moves while the offsets stay.
    """
    q = problem.posterior
    pair_offset = q.pairwise().factor * state.pair_noise
    if isinstance(q, WeightPosterior):
        # Sequences are independent given g: with weights of its own in each, what one draw happens to
        # say of a feature is not said by all of them.
        (table,) = state.noise
        return [
            problem.weights(i).spread(q.factor[0].abs(), table, problem.numbers(i))
            for i in range(len(problem.batches))
        ], pair_offset
    offsets = []
    for i, noise in enumerate(state.noise):
        gaussian = SequenceGaussian(problem.conditional(i), q.m, q.spread)
        factor = cholesky(gaussian.covariance[0])  # (B, R, T, T), JOINT over positions
        offsets.append(torch.einsum("bvtu,sbuv->sbtv", factor, noise))
    return offsets, pair_offset


def _fit_means(
    problem: Problem,
    offsets: list[Tensor],
    pair_offset: Tensor,
    *,
    steps: int,
    tolerance: float,
    learn_amplitude: bool = False,
) -> tuple[float, int, list[Tensor]]:
    """Maximises the bound over m, pair_mean and, if ``learn_amplitude``, the amplitude, in place.

    At most ``steps`` L-BFGS steps, until one gains less than ``tolerance`` of the value.
    Returns the bound, of the draws the offsets stand for, the number of likelihoods computed, and the
    derivatives (B, T, R) of the expected log-likelihood in the functions of each batch; none of them in
    weight space.
    """
    q = problem.posterior
    (_, R, M), V = q.m.shape, q.n_labels
    spread = q.spread[0]
    m, pair_mean, log_amplitude = q.m[0].clone(), q.pair_mean.clone(), q.log_amplitude.clone()
    pair_scale = q.pairwise().factor
    calls = 0

    def place(flat: Tensor) -> None:
        step_m, step_pair, step_log = flat.split([R * M, V * V, 1])
        q.m[0] = m + root_times(spread, step_m.view(R, M))
        q.pair_mean.copy_(pair_mean + pair_scale * step_pair.view(V, V))
        q.log_amplitude.copy_(log_amplitude + AMPLITUDE_STEP * step_log.squeeze())

    def negative(flat: Tensor) -> tuple[float, Tensor]:
        nonlocal calls
        calls += 1
        place(flat)
        value, grads, _ = _value_and_gradients(problem, offsets, pair_offset)
        grad_m = root_transposed_times(spread, grads[0]).reshape(-1)
        grad_log = AMPLITUDE_STEP * grads[2].reshape(1) * learn_amplitude
        grad = torch.cat([grad_m, (pair_scale * grads[1]).reshape(-1), grad_log])
        return -float(value), -grad

    zero = m.new_zeros(R * M + V * V + 1)
    found, least = minimize(negative, zero, steps=steps, memory=20, tolerance=tolerance)
    place(found)
    slopes: list[Tensor] = []
    if not isinstance(q, WeightPosterior):  # whose kernel is learned from less
        slopes = _value_and_gradients(problem, offsets, pair_offset)[2]
        calls += 1
    # The means' part of the two divergences is in the value already, and so is the amplitude's prior,
    # which the bound knows nothing of.
    rest = q.kl_inducing(problem.entropy) - 0.5 * q.m.square().sum()
    rest = rest - 0.5 * (q.log_amplitude / AMPLITUDE_PRIOR_SD).square()
    if q.has_pairs:
        rest = rest + q.kl_pairwise() - 0.5 * (q.pair_mean / q.pairwise_sd).square().sum()
    evaluations = calls * len(pair_offset) * problem.n_sequences
    return -least - float(rest), evaluations, slopes


def _value_and_gradients(
    problem: Problem, offsets: list[Tensor], pair_offset: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The bound up to what the covariances add, its gradients in m[0] (R, M), pair_mean (V, V)
    and log_amplitude (), and that of the expected log-likelihood in the functions, (B, T, R) a batch."""
    q, slopes = problem.posterior, []
    scale = (0.5 * q.log_amplitude).exp()
    value, grad_log = q.m.new_zeros(()), q.m.new_zeros(())
    grad_m, grad_pair = torch.zeros_like(q.m[0]), torch.zeros_like(q.pair_mean)
    for i, offset in enumerate(offsets):
        conditional = problem.conditional(i)
        f = (scale * (conditional.times(q.m[0]) + offset) @ q.basis.T).requires_grad_()
        g = (q.pairwise().mean + pair_offset).requires_grad_()
        with problem.locating(i), torch.enable_grad():
            total = problem.log_prob(i, f, g).mean(0).sum()
            found = torch.autograd.grad(total, (f, g), allow_unused=True)
        grad_f, grad_g = (
            torch.zeros_like(x) if grad is None else grad
            for x, grad in zip((f, g), found, strict=True)
        )
        value = value + total.detach()
        grad_h = grad_f.sum(0) @ q.basis  # (B, T, R)
        slopes.append(grad_h)
        grad_m += scale * conditional.transposed_times(grad_h)
        grad_pair += grad_g.sum(0)
        grad_log = grad_log + 0.5 * (grad_f * f.detach()).sum()
    value, grad_m, grad_pair, grad_log = problem.together.sum(value, grad_m, grad_pair, grad_log)
    value = value - 0.5 * (q.m.square().sum() + (q.log_amplitude / AMPLITUDE_PRIOR_SD).square())
    grad_m, grad_log = grad_m - q.m[0], grad_log - q.log_amplitude / AMPLITUDE_PRIOR_SD**2
    if q.has_pairs:
        value = value - 0.5 * (q.pair_mean / q.pairwise_sd).square().sum()
        grad_pair = grad_pair - q.pair_mean / q.pairwise_sd.square()
    return value, [grad_m, grad_pair, grad_log], slopes


def _fit_covariances(problem: Problem, offsets: list[Tensor], pair_offset: Tensor) -> list[Tensor]:
    """Sets factor and pair_log_sd to what the curvature at the draws asks for, in place. Returns that
    of the functions, (B, R, T, T) a batch; nothing in weight space."""
    q = problem.posterior
    if isinstance(q, WeightPosterior):
        _fit_weight_variances(problem, q, offsets, pair_offset)
        return []
    _, R, M = q.m.shape
    scale = (0.5 * q.log_amplitude).exp()
    full = q.form == "full"
    eye = torch.eye(M).to(q.m) if full else torch.ones_like(q.m[0, 0])
    precision = eye.repeat(R, *[1] * eye.dim())
    extra = () if q.has_label_basis else (q.basis,)
    pair_precision = q.pairwise_sd.clamp(min=1e-300) ** -2 * torch.ones_like(q.pair_mean)
    g, bends = q.pairwise().mean + pair_offset, []
    for i, (batch, offset) in enumerate(zip(problem.batches, offsets, strict=True)):
        projection = problem.conditional(i).projection
        f = scale * (projection @ q.m[0].T + offset) @ q.basis.T
        curvature = problem.structure.curvature(f, g, batch.y, batch.mask, *extra)
        weight = problem.weight(i)
        bends.append(weight[:, None, None, None] * curvature.unary)
        flat = projection.flatten(0, 1)
        for j in range(R):
            bent = ((scale.square() * bends[-1][:, j]) @ projection).flatten(0, 1)
            if full:
                precision[j].addmm_(flat.T, bent)
            else:
                precision[j] += (bent * flat).sum(0)
        pair_precision += (weight[:, None, None] * curvature.pairwise).sum(0)
    if q.form == "low-rank":
        _fit_low_rank(problem, bends, precision)
    else:
        q.factor[0] = factor_of_inverse(precision) if full else precision.rsqrt()
    if q.has_pairs:
        q.pair_log_sd.copy_(-0.5 * pair_precision.log())
    return bends


def _fit_low_rank(problem: Problem, bends: list[Tensor], diagonal: Tensor) -> None:
    """Sets factor and directions to about the best for the precision I + sum_n A_n^T bend A_n, whose
    diagonal (R, M) is at hand, from where they are."""
    q = problem.posterior
    scale = q.log_amplitude.exp()

    def times(x: Tensor) -> Tensor:
        """(R, M, r) the precision times x: two matrix products over all functions a batch."""
        R, M, r = x.shape
        total, wide = x.new_zeros((M, R * r)), x.permute(1, 0, 2).reshape(M, R * r)
        for i, bend in enumerate(bends):
            A = problem.conditional(i).projection
            B, T, _ = A.shape
            seen = (A.flatten(0, 1) @ wide).reshape(B, T, R, r).transpose(1, 2)
            bent = (scale * bend @ seen).transpose(1, 2).reshape(B * T, R * r)
            total.addmm_(A.flatten(0, 1).T, bent)
        return x + total.reshape(M, R, r).permute(1, 0, 2)

    before = LowRank(q.factor[0], q.directions[0])
    if not bool(q.directions.any()):
        before = LowRank(
            q.factor[0], leading_directions(problem, q.rank).expand_as(q.directions[0])
        )
    found = fit_low_rank(times, diagonal, before)
    q.factor[0], q.directions[0] = found.sd, found.directions


def _fit_weight_variances(
    problem: Problem, q: WeightPosterior, offsets: list[Tensor], pair_offset: Tensor
) -> None:
    """The same in weight space, from the curvature position by position: where a feature comes twice in a
    sequence, what its positions have in common is left out. Cost O(S N V^2 + N A R)."""
    scale = (0.5 * q.log_amplitude).exp()
    extra = () if q.has_label_basis else (q.basis,)
    precision, pair_precision = torch.zeros_like(q.m[0]), torch.zeros_like(q.pair_mean)
    g = q.pairwise().mean + pair_offset
    for i, (batch, offset) in enumerate(zip(problem.batches, offsets, strict=True)):
        conditional = problem.weights(i)
        f = scale * (conditional.times(q.m[0]) + offset) @ q.basis.T
        with problem.locating(i):
            curvature = problem.structure.local_curvature(f, g, batch.y, batch.mask, *extra)
        weight = problem.weight(i)[:, None, None]
        precision += conditional.squares_times(scale.square() * weight * curvature.unary)
        pair_precision += (weight * curvature.pairwise).sum(0)
    precision, pair_precision = problem.together.sum(precision, pair_precision)
    q.factor[0] = (1 + precision).rsqrt()
    if q.has_pairs:
        prior = q.pairwise_sd.clamp(min=1e-300) ** -2
        q.pair_log_sd.copy_(-0.5 * (prior + pair_precision).log())
