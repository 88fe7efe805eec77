"""The paper's stochastic schedule, SAGA: one batch per step.

SAGA keeps the last gradient g_i of each batch and moves along

    N (new g_i - old g_i) + sum of all old g_n - gradient of the KL terms,

whose expectation is the full gradient, and whose variance vanishes as the stored gradients settle. The sum
is cached. A gradient is stored in the form with the fewest numbers, as one in mean and covariance of the
batch's own latent values (``Sensitivity``): in the inducing values it would be A^T g and A^T G A with a
constant A, R M^2 numbers in place of T R + R T^2."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from structgp.errors import InputError, LikelihoodError
from structgp.inference.bound import Plateau, lower_bound
from structgp.inference.estimators.moments import Entries
from structgp.inference.latents import Sensitivity
from structgp.inference.natural import amplitude_slope
from structgp.inference.problem import LearnScales, Problem, StepInfo, refuse_kernel
from structgp.paper.mixture_fit import SPREAD

MOST_FALLS = 20


@dataclass(frozen=True)
class Gradient(Entries):
    """Gradient of the expected log-likelihood. value : (K,) the expectation itself under each component. m,
    covariance : for each block, shaped like its ``m`` and ``factor``, or, while stored, like mean and
    covariance of the batch's functions. amplitude : () in that of the nodes."""

    value: Tensor
    m: tuple[Tensor, ...]
    covariance: tuple[Tensor, ...]
    amplitude: Tensor


@dataclass
class SagaState:
    """mean_steps, covariance_steps : step sizes of each block. stored : last gradient of each batch.
    total : sum of the stored gradients, in the posterior's parameters. best : the parameters at the last
    check that found a higher bound. falls : how often the bound fell."""

    generator: torch.Generator
    plateau: Plateau
    began: float = field(metadata={"clock": True})
    mean_steps: list[float]
    covariance_steps: list[float]
    best: dict[str, Tensor] = field(default_factory=dict)
    stored: dict[int, Gradient] = field(default_factory=dict)
    total: Gradient | None = None
    iteration: int = 0
    stalls: int = 0
    falls: int = 0

    @property
    def memory_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for s in self.stored.values() for t in s.entries)


@dataclass(frozen=True)
class Saga:
    """SAGA on nodes and transitions in turn, or on all blocks at once; the defaults are the paper's.

    Parameters
    ----------
    mean_step, covariance_step : step sizes for means and covariance factors along the gradient of the whole
        bound, in whitened coordinates. None takes, for each block, a third of the inverse of a bound on its
        curvature, which SAGA's guarantee needs, and a tenth of that for the factors.
    node_steps, transition_steps : how many steps nodes and transitions move, in turn; None moves both at
        once.
    tolerance : stop when the mean bound over a round (all turns once, or ten passes) has twice risen by
        less than this, in nats per example. If it has clearly fallen, the best parameters are restored,
        with steps half as long.
    max_seconds, max_steps : stop here at the latest.
    learn_scales : False (the paper's), 'transitions' or True (the amplitude too).
    gradient, n_draws : name and draws of the gradient estimator, which ``structgp.plan`` chooses."""

    mean_step: float | None = 1e-4
    covariance_step: float | None = 1e-5
    node_steps: int | None = 3000
    transition_steps: int | None = 1000
    tolerance: float = 0.02
    max_seconds: float = 5.5 * 3600
    max_steps: int = 1_000_000
    learn_scales: LearnScales = False
    gradient: str = "auto"
    n_draws: int | None = None
    name: str = "saga"

    one_sequence_a_batch = True

    def start(self, problem: Problem, generator: torch.Generator) -> SagaState:
        refuse_kernel(self.learn_scales, self.name)
        q = problem.posterior
        if not all(hasattr(block, "project") for block in q.blocks):
            what = f"{self.name!r} stores gradients at inducing inputs, not those of weights"
            raise InputError("inference", what, "use inference='minibatch', or posterior='inducing'")
        if getattr(q.node, "form", None) == "low-rank":
            what = f"{self.name!r} sums gradients in the covariance itself, which 'low-rank' never holds"
            remedy = "use inference='second-order' or 'adam', or covariance='full' or 'diagonal'"
            raise InputError("covariance", what, remedy)
        if problem.posterior.n_components > 1:
            problem.posterior.node.separate(generator, SPREAD)
        turns = sum(self._turns) if self._turns else 10 * len(problem.batches)
        plateau = Plateau(turns, self.tolerance * problem.n_counted)
        fast, slow = ([step or 0.0] * len(q.blocks) for step in (self.mean_step, self.covariance_step))
        if self.mean_step is None or self.covariance_step is None:
            bounds = [block.curvature_bound(problem.of_block(k)) for k, block in enumerate(q.blocks)]
            fast = [1 / (3 * bound) for bound in bounds] if self.mean_step is None else fast
            slow = [0.1 / (3 * bound) for bound in bounds] if self.covariance_step is None else slow
        return SagaState(generator, plateau, time.monotonic(), fast, slow, q.snapshot())

    @property
    def _turns(self) -> tuple[int, int] | None:
        both = self.node_steps, self.transition_steps
        return None if None in both else both  # type: ignore[return-value]

    def step(self, problem: Problem, state: SagaState) -> tuple[SagaState, StepInfo]:
        """One batch. Cost O(B T V M^2 + V M^2) and the estimator's; K^2 V M^3 more if K > 1."""
        n = len(problem.batches)
        # A first pass in order fills the store; after that, batches are drawn at random.
        fills = self.fills(state, n)
        i = len(state.stored) if fills else int(torch.randint(n, (), generator=state.generator))
        try:
            direction, elbo, evaluations = self.direction(problem, state, i)
        except (torch.linalg.LinAlgError, LikelihoodError) as error:
            # So far off that a covariance is not positive definite any more, or that the likelihood fails.
            if isinstance(error, LikelihoodError) and state.plateau.best == -math.inf:
                raise
            self._step_back(problem, state)
            state.iteration += 1
            return state, self._info(state, state.plateau.best, 0)
        if not fills:
            self._move(problem, state, direction)
        elif len(state.stored) == n:
            # The bound at the start, below which no check may find it; till now it covered only a part.
            state.plateau.best = max(state.plateau.best, elbo)
            state.plateau.recent = []
        state.plateau.add(elbo)
        mean, state.iteration = state.plateau.mean, state.iteration + 1
        if state.plateau.is_full:
            self._look(problem, state)
        return state, self._info(state, mean, evaluations)

    def _look(self, problem: Problem, state: SagaState) -> None:
        if self.learn_scales:
            problem.posterior.fit_tables()
        plateau, n = state.plateau, len(problem.batches)
        # The mean of a window may be high while its end, at the current parameters, is low.
        ends = (plateau.recent, plateau.recent[-n:])
        fell = any(_is_below(plateau.best, values, plateau.tolerance) for values in ends)
        if fell or _turned(plateau, n):
            self._step_back(problem, state)
        elif plateau.look():
            state.stalls += 1
        else:
            state.best = problem.posterior.snapshot()

    def _step_back(self, problem: Problem, state: SagaState) -> None:
        """Goes back to the best parameters, with steps half as long and nothing stored."""
        problem.posterior.load_state_dict(state.best)
        for steps in (state.mean_steps, state.covariance_steps):
            steps[:] = [0.5 * step for step in steps]
        state.stored, state.total, state.plateau.recent = {}, None, []
        state.falls += 1

    def _info(self, state: SagaState, mean: float, evaluations: int) -> StepInfo:
        late = time.monotonic() - state.began > self.max_seconds
        late = late or state.iteration >= self.max_steps or state.falls >= MOST_FALLS
        converged = state.stalls >= 2
        return StepInfo(state.iteration - 1, mean, evaluations, converged or late, converged)

    def fills(self, state: SagaState, n: int) -> bool:
        """True if the store still lacks some of the n batches."""
        return len(state.stored) < n

    def direction(self, problem: Problem, state: SagaState, i: int) -> tuple[Gradient, float, int]:
        """The gradient of the expected log-likelihood as estimated from batch i, the bound as far as it is
        known, and the number of likelihoods computed. Stores the gradient of batch i."""
        with torch.no_grad():
            latent, q = problem.latents(i), problem.posterior
            found = problem.estimate(i, latent, state.generator)
            at = latent.sensitivity(found.moments)
            slope = amplitude_slope(latent, at)  # (K, B)
            value = found.moments.value.reshape(slope.shape).sum(1)
            new = stored_gradient(problem, value, at, q.mixing @ slope.sum(1))
            whole, expected = self.combine(problem, state, i, new)
            return whole, float(lower_bound(expected, q, problem.entropy)), found.evaluations

    def combine(self, problem: Problem, state: SagaState, i: int, new: Gradient) -> tuple[Gradient, Tensor]:
        """The direction and the expected log-likelihood of all data, from a new gradient of batch i."""
        n, old, before = len(problem.batches), state.stored.get(i), state.total
        change = project(problem, i, new)
        if old is not None:
            change = change.plus(project(problem, i, old), -1.0)
        state.stored[i] = new
        state.total = change if before is None else before.plus(change)
        whole = change if before is None else before.plus(change, n)
        return whole, problem.posterior.mixing @ state.total.value * (n / len(state.stored))

    def _move(self, problem: Problem, state: SagaState, ell: Gradient) -> None:
        q, turns = problem.posterior, self._turns
        nodes_turn = None if turns is None else state.iteration % sum(turns) < turns[0]
        divergence = q.divergence(problem.entropy)
        for k, block in enumerate(q.blocks):
            if block.is_silent or nodes_turn == (k > 0):
                continue
            logits = getattr(block, "weight_logits", None)
            wanted = [block.m, block.factor] + ([] if logits is None else [logits])
            kl_m, kl_factor, *kl_logits = torch.autograd.grad(divergence, wanted, retain_graph=True)
            fast, slow = state.mean_steps[k], state.covariance_steps[k]
            with torch.no_grad():
                mixing = block.mixing
                block.m.add_(fast * (ell.m[k] - kl_m))
                grad = _through_factor(ell.covariance[k], block.factor, block.m)
                block.factor.add_(slow * (grad - kl_factor))
                if logits is not None:
                    centred = ell.value - mixing @ ell.value
                    logits.add_(fast * (mixing * centred - kl_logits[0]))
                if k == 0 and self.learn_scales in (True, "all"):
                    block.log_amplitude.add_(fast * ell.amplitude)


def stored_gradient(problem: Problem, value: Tensor, at: Sensitivity, amplitude: Tensor) -> Gradient:
    """A batch's gradient as it is stored, multiplied by the current mixture weights and amplitudes, so that
    exactly what was added to the sum is subtracted from it later."""
    q, means, covariances = problem.posterior, [], []
    for block, mean, covariance in zip(q.blocks, at.mean, at.covariance, strict=True):
        if not block.shared:
            mixing = q.mixing[:, None, None, None]
            mean, covariance = mean * mixing, covariance * mixing[..., None]
        means.append(_in_order(mean * block.scale))
        covariances.append(_in_order(covariance * block.scale.square()))
    return Gradient(value, tuple(means), tuple(covariances), amplitude)


def project(problem: Problem, i: int, stored: Gradient) -> Gradient:
    """The stored gradient of batch i as a gradient in the posterior's parameters."""
    blocks, here = problem.posterior.blocks, problem.conditional(i)
    parts = zip(blocks, here, stored.m, stored.covariance, strict=True)
    means, covariances = zip(*(block.project(*given) for block, *given in parts), strict=True)
    means, covariances = (tuple(map(_in_order, tensors)) for tensors in (means, covariances))
    return Gradient(stored.value, means, covariances, stored.amplitude)


def _in_order(tensor: Tensor) -> Tensor:
    """A copy laid out in memory as a checkpoint will hold it: on some processors, the layout affects how
    products are rounded."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _is_below(level: float, values: list[float], tolerance: float) -> bool:
    """True if the mean of noisy values is clearly below ``level``. A mean that is not a number always
    is."""
    noise = statistics.pstdev(values) / len(values) ** 0.5
    return not statistics.mean(values) > level - 4 * max(noise, tolerance)


def _turned(plateau: Plateau, n: int) -> bool:
    """True if the bound has clearly lost half of its rise again in the last pass of n batches, which
    happens when steps are too long for their noise."""
    values = plateau.recent
    passes = [statistics.mean(values[k : k + n]) for k in range(0, len(values) - n + 1, n)]
    peak = max(passes, default=-math.inf)
    lost = peak - statistics.mean(values[-n:]) > 0.5 * (peak - plateau.best)
    return lost and _is_below(peak, values[-n:], plateau.tolerance)


def _through_factor(covariance: Tensor, factor: Tensor, m: Tensor) -> Tensor:
    """Turns a gradient in S = L L^T into one in L, or in the standard deviations if S is diagonal."""
    if factor.shape == m.shape:
        return 2 * covariance * factor
    return (2 * covariance @ factor.tril()).tril()
