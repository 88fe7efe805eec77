"""The paper's stochastic schedule: one batch a step, SAGA or plain SGD.

SAGA keeps the last gradient g_i of each batch and moves along

    N (new g_i - old g_i) + sum of all old g_n - gradient of the KL terms,

which has the full gradient as its expectation, and a variance that vanishes as the stored gradients
settle. The sum is cached. A gradient is stored where it has its fewest numbers, in mean and covariance
of the batch's own latent values (``Sensitivity``): in the inducing values it is A^T g and A^T G A with
an A that does not change, V M^2 numbers for what T V + V T^2 say. SGD is the same without the store.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from structgp.errors import InputError, LikelihoodError
from structgp.inference.bound import Sensitivity
from structgp.inference.plateau import Plateau
from structgp.inference.problem import Problem, StepInfo
from structgp.inference.scales import (
    LearnScales,
    fit_pairwise_sd,
    moves_amplitude,
    refuse_kernel,
)
from structgp.paper.mixture import separate

MOST_FALLS = 20

Block: TypeAlias = Literal["unary", "pairwise"]


@dataclass(frozen=True)
class Gradient:
    """Of the expected log-likelihood: value (K,), in each component; m (K, R, M); covariance
    (K, R, M, M), or (K, R, M) of the variances; pair_mean, pair_covariance; amplitude ()."""

    value: Tensor
    m: Tensor
    covariance: Tensor
    pair_mean: Tensor
    pair_covariance: Tensor
    amplitude: Tensor

    def plus(self, other: Gradient, times: float = 1.0) -> Gradient:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Gradient(*(a + times * b for a, b in pairs))


@dataclass(frozen=True)
class Stored:
    """A batch's gradient as it is kept, with the mixture's weights and the amplitude as they were
    multiplied in: what is taken out of the sum later is what was put in."""

    value: Tensor
    at: Sensitivity
    amplitude: Tensor

    @staticmethod
    def of(problem: Problem, value: Tensor, at: Sensitivity, amplitude: Tensor) -> Stored:
        q = problem.posterior
        weights, scale = q.weights[:, None, None, None], (0.5 * q.log_amplitude).exp()
        mean, covariance = at.mean * weights * scale, at.covariance * weights[..., None] * scale**2
        at = Sensitivity(mean, covariance, at.pair_mean, at.pair_covariance)
        return Stored(value, at, amplitude)

    @property
    def n_bytes(self) -> int:
        tensors = (self.value, self.amplitude, *vars(self.at).values())
        return sum(t.numel() * t.element_size() for t in tensors)


@dataclass
class StochasticState:
    """stored : of each batch. total : the sum of what is stored, in the posterior's parameters. best :
    the parameters at the last look that found the bound risen. falls : how often it fell."""

    generator: torch.Generator
    plateau: Plateau
    began: float = field(metadata={"clock": True})
    mean_step: float
    covariance_step: float
    pair_mean_step: float
    pair_covariance_step: float
    best: dict[str, Tensor] = field(default_factory=dict)
    stored: dict[int, Stored] = field(default_factory=dict)
    total: Gradient | None = None
    iteration: int = 0
    stalls: int = 0
    falls: int = 0

    @property
    def memory_bytes(self) -> int:
        return sum(s.n_bytes for s in self.stored.values())


@dataclass(frozen=True)
class Stochastic:
    """SAGA, or SGD without memory, in blocks or all at once; the defaults are the paper's.

    Parameters
    ----------
    remembers : SAGA if True, SGD if False.
    mean_step, covariance_step : step sizes on the gradient of the whole bound, of means and of
        covariance factors, in whitened coordinates; 'auto' takes a third of the inverse of a bound on
        the curvature, of inducing values and of pairwise scores each its own, for SAGA's guarantee,
        and a tenth of that for the factors.
    unary_steps, pairwise_steps : how many steps each block moves, in turn; None moves both at once.
    tolerance : stop when the mean bound over a round (all blocks once, or ten passes) has risen by
        less, in nats per sequence, twice. If it has clearly fallen, the best parameters are taken up
        again, with steps half as long.
    max_seconds, max_steps : stop here at the latest.
    learn_scales : False (the paper's), 'transitions' or True (the amplitude too).
    gradient, n_draws : name of the gradient estimator, and the draws that it takes; 'auto' and None for
        what suits the likelihood. ``structgp.plan`` reads both.
    """

    remembers: bool = True
    mean_step: float | Literal["auto"] = 1e-4
    covariance_step: float | Literal["auto"] = 1e-5
    unary_steps: int | None = 3000
    pairwise_steps: int | None = 1000
    tolerance: float = 0.02
    max_seconds: float = 5.5 * 3600
    max_steps: int = 1_000_000
    learn_scales: LearnScales = False
    name: str = "saga"
    gradient: str = "auto"
    n_draws: int | None = None

    one_sequence_a_batch = True

    def start(self, problem: Problem, generator: torch.Generator) -> StochasticState:
        refuse_kernel(self.learn_scales, self.name)
        if problem.posterior.form == "low-rank":
            raise InputError(
                "covariance",
                f"{self.name!r} sums gradients in the covariance itself, which 'low-rank' never holds",
                "use inference='second-order' or 'adam', or covariance='full' or 'diagonal'",
            )
        separate(problem, generator)
        plateau = Plateau(self._round(problem), self.tolerance * problem.n_sequences)
        fast, slow = self.mean_step, self.covariance_step
        unary = 1 / (3 * curvature_bound(problem)) if "auto" in (fast, slow) else 0.0
        pairs = 1 / (3 * pair_curvature_bound(problem))
        return StochasticState(
            generator,
            plateau,
            time.monotonic(),
            mean_step=unary if fast == "auto" else fast,
            covariance_step=0.1 * unary if slow == "auto" else slow,
            pair_mean_step=pairs if fast == "auto" else fast,
            pair_covariance_step=0.1 * pairs if slow == "auto" else slow,
            best=problem.posterior.snapshot(),
        )

    def _round(self, problem: Problem) -> int:
        if self.unary_steps is None or self.pairwise_steps is None:
            return 10 * len(problem.batches)
        return self.unary_steps + self.pairwise_steps

    def step(self, problem: Problem, state: StochasticState) -> tuple[StochasticState, StepInfo]:
        """One batch. Cost O(B T V M^2 + V M^2) and the estimator's; K^2 V M^3 more if K > 1."""
        n = len(problem.batches)
        # A first pass in order fills the store; after that batches come at random.
        fills = self.remembers and len(state.stored) < n
        i = len(state.stored) if fills else int(torch.randint(n, (), generator=state.generator))
        try:
            direction, elbo, evaluations = self.direction(problem, state, i)
        except (torch.linalg.LinAlgError, LikelihoodError) as error:
            # So far off that no covariance is left, or no probability where there was one.
            if isinstance(error, LikelihoodError) and state.plateau.best == -math.inf:
                raise
            self._step_back(problem, state)
            state.iteration += 1
            return state, self._info(state, state.plateau.best, 0)
        if not fills:
            self._move(problem, state, direction)
        elif len(state.stored) == n:
            # The bound where it starts, which no look may find it below; till now it was of a part.
            state.plateau.best = max(state.plateau.best, elbo)
            state.plateau.recent = []
        state.plateau.add(elbo)
        mean = state.plateau.mean
        state.iteration += 1
        if state.plateau.is_full:
            self._look(problem, state)
        return state, self._info(state, mean, evaluations)

    def _look(self, problem: Problem, state: StochasticState) -> None:
        if self.learn_scales:
            fit_pairwise_sd(problem.posterior)
        plateau = state.plateau
        # The mean of a window may be high and its end, where the parameters are, low.
        n = len(problem.batches)
        ends = (plateau.recent, plateau.recent[-n:])
        fell = any(_is_below(plateau.best, values, plateau.tolerance) for values in ends)
        if fell or _turned(plateau, n):
            self._step_back(problem, state)
        elif plateau.look():
            state.stalls += 1
        else:
            state.best = problem.posterior.snapshot()

    def _step_back(self, problem: Problem, state: StochasticState) -> None:
        """To the best parameters, with steps half as long and nothing stored."""
        problem.posterior.load_state_dict(state.best)
        for name in ("mean_step", "covariance_step", "pair_mean_step", "pair_covariance_step"):
            setattr(state, name, 0.5 * getattr(state, name))
        state.stored, state.total, state.plateau.recent = {}, None, []
        state.falls += 1

    def _info(self, state: StochasticState, mean: float, evaluations: int) -> StepInfo:
        late = time.monotonic() - state.began > self.max_seconds
        converged = state.stalls >= 2
        late = late or state.iteration >= self.max_steps or state.falls >= MOST_FALLS
        finished = converged or late
        return StepInfo(state.iteration - 1, mean, evaluations, finished, converged)

    def direction(
        self, problem: Problem, state: StochasticState, i: int
    ) -> tuple[Gradient, float, int]:
        """The estimate of the gradient of the expected log-likelihood from batch i, the bound as far as
        it is known, and the likelihoods computed. Puts batch i into the store."""
        n = len(problem.batches)
        with torch.no_grad():
            latent = problem.latents(i)
            found = problem.estimate(i, latent, state.generator)
            at = latent.sensitivity(found.moments)
            slope = 0.5 * (at.mean * latent.mean).sum((-1, -2))  # (K, B)
            slope = slope + (at.covariance * latent.covariance).sum((-1, -2, -3))
            value = found.moments.value.reshape(slope.shape).sum(1)
            new = Stored.of(problem, value, at, problem.posterior.weights @ slope.sum(1))
            new_gradient = project(problem, i, new)
            kl = problem.posterior.kl_inducing(problem.entropy) + problem.posterior.kl_pairwise()
            weights = problem.posterior.weights
            if not self.remembers:
                whole = new_gradient.plus(new_gradient, n - 1)
                return whole, float(weights @ whole.value - kl), found.evaluations
            old = state.stored.get(i)
            change = new_gradient
            if old is not None:
                change = new_gradient.plus(project(problem, i, old), -1.0)
            state.stored[i] = new
            before = state.total
            state.total = change if before is None else before.plus(change)
            whole = change if before is None else before.plus(change, n)
            elbo = float(weights @ state.total.value * (n / len(state.stored)) - kl)
            return whole, elbo, found.evaluations

    def _move(self, problem: Problem, state: StochasticState, ell: Gradient) -> None:
        q = problem.posterior
        block = self._block(state.iteration)
        kl = q.kl_inducing(problem.entropy) + q.kl_pairwise()
        spread = q.pair_factor if q.pairs_are_full else q.pair_log_sd
        wanted = [q.m, q.factor, q.weight_logits, q.pair_mean, spread]
        kl_m, kl_factor, kl_logits, kl_pair, kl_spread = torch.autograd.grad(
            kl, wanted, allow_unused=True
        )
        with torch.no_grad():
            fast, slow = state.mean_step, state.covariance_step
            if block != "pairwise":
                weights = q.weights
                centred = ell.value - weights @ ell.value
                q.m.add_(fast * (ell.m - kl_m))
                grad = _through_factor(ell.covariance, q.factor, q.is_diagonal)
                q.factor.add_(slow * (grad - kl_factor))
                if q.n_components > 1:
                    q.weight_logits.add_(fast * (weights * centred - kl_logits))
                if moves_amplitude(self.learn_scales):
                    q.log_amplitude.add_(fast * ell.amplitude)
            fast, slow = state.pair_mean_step, state.pair_covariance_step
            if block != "unary" and q.has_pairs:
                q.pair_mean.add_(fast * (ell.pair_mean - kl_pair))
                if q.pairs_are_full:
                    grad = _through_factor(ell.pair_covariance, q.pair_factor, False)
                else:
                    grad = 2 * ell.pair_covariance * (2 * q.pair_log_sd).exp()
                spread.add_(slow * (grad - kl_spread))

    def _block(self, iteration: int) -> Block | None:
        if self.unary_steps is None or self.pairwise_steps is None:
            return None
        within = iteration % (self.unary_steps + self.pairwise_steps)
        return "unary" if within < self.unary_steps else "pairwise"


def project(problem: Problem, i: int, stored: Stored) -> Gradient:
    """What is stored of batch i, as a gradient in the posterior's parameters: A^T g and A^T G A
    (supplement, 'Inducing variables'). Cost O(K V B T M (M + T))."""
    q, at = problem.posterior, stored.at
    projection = problem.conditional(i).projection  # (B, T, M)
    B, T, M = projection.shape
    K, R = q.m.shape[:2]
    flat = projection.reshape(B * T, M)
    m = at.mean.reshape(K, B * T, R).mT @ flat
    bent = at.covariance @ projection[:, None]  # (K, B, R, T, M)
    bent = bent.permute(0, 2, 1, 3, 4).reshape(K, R, B * T, M)
    covariance = (bent * flat).sum(-2) if q.is_diagonal else flat.T @ bent
    return Gradient(stored.value, m, covariance, at.pair_mean, at.pair_covariance, stored.amplitude)


def curvature_bound(problem: Problem) -> float:
    """Largest curvature of the bound in a whitened mean if each position bends by at most 1/4, as
    a softmax does: 1 + 1/4 of the largest eigenvalue of sum_n A_n^T A_n, by power iteration."""
    q = problem.posterior
    scale = float(q.log_amplitude.detach().exp() * q.basis.square().sum(0).max())
    v = q.m.new_ones(q.n_inducing)
    size = 0.0
    for _ in range(20):
        v = v / v.norm().clamp(min=1e-300)
        moved = torch.zeros_like(v)
        for i in range(len(problem.batches)):
            projection = problem.conditional(i).projection
            flat, counts = projection.flatten(0, 1), problem.weight(i)[:, None]
            moved += flat.T @ (counts * (projection @ v)).flatten()
        size, v = float(moved.norm()), moved
    return 1 + 0.25 * scale * size


def pair_curvature_bound(problem: Problem) -> float:
    """The same in a pairwise score, if it bends by at most 1/4 each time one label follows another:
    1 / sd^2 + 1/4 of the number of times."""
    q = problem.posterior
    prior = float(q.pairwise_sd.detach()) ** -2 if q.has_pairs else 1.0
    steps = sum(
        float(problem.weight(i) @ (batch.mask.sum(-1) - 1).clamp(min=0).to(q.m))
        for i, batch in enumerate(problem.batches)
    )
    return prior + 0.25 * steps


def _is_below(level: float, values: list[float], tolerance: float) -> bool:
    """Whether the mean of noisy values is so clearly; a mean that is no number always is."""
    noise = statistics.pstdev(values) / len(values) ** 0.5
    return not statistics.mean(values) > level - 4 * max(noise, tolerance)


def _turned(plateau: Plateau, n: int) -> bool:
    """Whether a bound that had risen has clearly lost half of that again in its last pass of n batches, as
    it does where steps are too long for their noise."""
    values = plateau.recent
    passes = [statistics.mean(values[k : k + n]) for k in range(0, len(values) - n + 1, n)]
    peak = max(passes, default=-math.inf)
    lost = peak - statistics.mean(values[-n:]) > 0.5 * (peak - plateau.best)
    return lost and _is_below(peak, values[-n:], plateau.tolerance)


def _through_factor(covariance: Tensor, factor: Tensor, diagonal: bool) -> Tensor:
    """From the gradient in S = L L^T to that in L."""
    if diagonal:
        return 2 * covariance * factor
    return (2 * covariance @ factor.tril()).tril()
