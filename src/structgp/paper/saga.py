"""The paper's stochastic schedule, SAGA: one batch per step.

SAGA keeps the last gradient g_i of each batch and moves along

    N (new g_i - old g_i) + sum of all old g_n - gradient of the KL terms,

which has the full gradient as its expectation, and a variance that vanishes as the stored gradients settle.
The sum is cached. A gradient is stored where it has its fewest numbers, in mean and covariance of the
batch's own latent values (``Sensitivity``): in the inducing values it is A^T g and A^T G A with an A that
does not change, R M^2 numbers for what T R + R T^2 say."""

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
    """Gradient of the expected log-likelihood. value : (K,), in each component; m and covariance, of each
    block, shaped as its ``m`` and ``factor``, or as stored in mean and covariance of the batch's functions;
    amplitude (), of nodes."""

    value: Tensor
    m: tuple[Tensor, ...]
    covariance: tuple[Tensor, ...]
    amplitude: Tensor


@dataclass
class SagaState:
    """mean_steps, covariance_steps : of each block. stored : of each batch. total : the sum of what is
    stored, in the posterior's parameters. best : the parameters at the last look that found the bound
    risen. falls : how often it fell."""

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
    """SAGA in turns, or all blocks at once; the defaults are the paper's.

    Parameters
    ----------
    mean_step, covariance_step : step sizes on the gradient of the whole bound, of means and of covariance
        factors, in whitened coordinates; None takes a third of the inverse of a bound on the curvature, for
        each block its own, for SAGA's guarantee, and a tenth of that for the factors.
    node_steps, transition_steps : how many steps each of them moves, in turn; None moves both at once.
    tolerance : stop when the mean bound over a round (all turns once, or ten passes) has risen by less, in
        nats per example, twice. If it has clearly fallen, the best parameters are taken up again, with
        steps half as long.
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
        # A first pass in order fills the store; after that batches come at random.
        fills = self.fills(state, n)
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
        mean, state.iteration = state.plateau.mean, state.iteration + 1
        if state.plateau.is_full:
            self._look(problem, state)
        return state, self._info(state, mean, evaluations)

    def _look(self, problem: Problem, state: SagaState) -> None:
        if self.learn_scales:
            problem.posterior.fit_tables()
        plateau, n = state.plateau, len(problem.batches)
        # The mean of a window may be high and its end, where the parameters are, low.
        ends = (plateau.recent, plateau.recent[-n:])
        fell = any(_is_below(plateau.best, values, plateau.tolerance) for values in ends)
        if fell or _turned(plateau, n):
            self._step_back(problem, state)
        elif plateau.look():
            state.stalls += 1
        else:
            state.best = problem.posterior.snapshot()

    def _step_back(self, problem: Problem, state: SagaState) -> None:
        """To the best parameters, with steps half as long and nothing stored."""
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
        """Whether the store still lacks batches, of n."""
        return len(state.stored) < n

    def direction(self, problem: Problem, state: SagaState, i: int) -> tuple[Gradient, float, int]:
        """The estimate of the gradient of the expected log-likelihood from batch i, the bound as far as it
        is known, and the likelihoods computed. Puts batch i into the store."""
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
    """A batch's gradient as it is kept, with the mixture's weights and the amplitudes as they are now
    multiplied in: what is taken out of the sum later is what was put in."""
    q, means, covariances = problem.posterior, [], []
    for block, mean, covariance in zip(q.blocks, at.mean, at.covariance, strict=True):
        if not block.shared:
            mixing = q.mixing[:, None, None, None]
            mean, covariance = mean * mixing, covariance * mixing[..., None]
        means.append(_in_order(mean * block.scale))
        covariances.append(_in_order(covariance * block.scale.square()))
    return Gradient(value, tuple(means), tuple(covariances), amplitude)


def project(problem: Problem, i: int, stored: Gradient) -> Gradient:
    """What is stored of batch i, as a gradient in the posterior's parameters."""
    blocks, here = problem.posterior.blocks, problem.conditional(i)
    parts = zip(blocks, here, stored.m, stored.covariance, strict=True)
    means, covariances = zip(*(block.project(*given) for block, *given in parts), strict=True)
    means, covariances = (tuple(map(_in_order, tensors)) for tensors in (means, covariances))
    return Gradient(stored.value, means, covariances, stored.amplitude)


def _in_order(tensor: Tensor) -> Tensor:
    """In memory as a checkpoint will hold it: on some processors, products round by that."""
    return tensor.clone(memory_format=torch.contiguous_format)


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


def _through_factor(covariance: Tensor, factor: Tensor, m: Tensor) -> Tensor:
    """From the gradient in S = L L^T to that in L, or in standard deviations where those are all there
    is."""
    if factor.shape == m.shape:
        return 2 * covariance * factor
    return (2 * covariance @ factor.tril()).tril()
