"""Natural gradients through quadratic sites: second order for any likelihood, from values alone.

The log-likelihood of each batch is held as a quadratic in its latent values (``Sites``). A step estimates
the quadratic that fits log p under the current posterior, moves the held quadratic part of the way towards
it, and sets the posterior to the exact one under all held quadratics:

    S_j^-1 = I + sum_n A_n^T Lambda_nj A_n,    m_j = S_j sum_n A_n^T r_nj.

That is a natural-gradient step in the bound (Khan and Lin, 2017), and the part of the way is its length.
Once the bound rises slowly, each step is a little shorter than the one before, such that the held
quadratics are the mean of all that have been estimated since: no draw is wasted. Where the estimator works
from values alone, the held quadratics are its control variate."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from structgp.errors import InputError
from structgp.inference.bound import Plateau, lower_bound
from structgp.inference.latents import ExampleLatent, Latents, Sensitivity, SharedLatent, Sites
from structgp.inference.problem import LearnScales, Problem, StepInfo, refuse_kernel

UPWARD_SHARES = (0.5, -1.0)
"""Factors on the part of a quadratic that bends up, tried in turn where all of it leaves no posterior. -1
turns it round: a direction that bends up strongly is then one to move little in, as in a saddle-free Newton
step. At 0 it would be one to move far in."""

WORSE = 6.0
"""Standard errors by which the bound must have fallen for a step to be taken back."""

SHORTEST = 1e-3

SLOWLY = 5.0
"""Factor on the tolerance where the estimator works from values alone: averaging begins when the mean bound
of a few steps rises by less. Chosen on the training data of one fold of the segmentation task, between 5
and 25: with 25 the fit ended at a bound of -23.400, with 5 at -23.388."""

FEW_DRAWS = 128
"""Before averaging begins, estimators that work from values alone use half of their draws, but no fewer."""

AMPLITUDE_STEP = 0.3

AMPLITUDE_PRIOR_SD = 1.5
"""Prior standard deviation of the log-amplitude around where it starts: a factor of 4.5 or so."""


@dataclass(frozen=True)
class Look:
    """What one pass over the data found at a posterior: the bound and the variance of its estimate, the
    quadratics that fit there, and the derivative in the log-amplitude. posterior, sites : those at which it
    was made."""

    elbo: float
    variance: float
    targets: list[Sites]
    latents: list[Latents]
    amplitude_slope: float
    evaluations: int
    posterior: dict[str, Tensor]
    sites: list[Sites | None]


@dataclass
class NaturalState:
    """State between steps. sites : for each batch, None before the first step. rate : the part of the way
    that a step goes, times ``trust``, which falls where steps do harm. best : the highest bound seen.
    last : the last look whose bound was not certainly worse. averaged : number of steps since averaging
    began; None before."""

    generator: torch.Generator
    plateau: Plateau
    rate: float
    sites: list[Sites | None]
    trust: float = 1.0
    best: float = -float("inf")
    last: Look | None = field(default=None, metadata={"checkpoint": False})
    iteration: int = 0
    averaged: int | None = None
    amplitude_momentum: list[float] = field(default_factory=lambda: [0.0, 0.0])


@dataclass(frozen=True)
class Natural:
    """Natural gradients, one pass over all batches per step.

    Parameters
    ----------
    rate : rate of the first steps. All labels move at once, each as if the others stood still, which
        overshoots at rates above one half.
    window, tolerance : stop where the mean bound of ``window`` steps is less than ``tolerance`` nats per
        sequence above the best one before, once the steps are short enough.
    reductions : steps are short enough once the first rate has been halved this many times less one.
    max_steps : largest number of steps. The fit also stops, as at this limit, where even the shortest step
        made the bound worse.
    learn_scales : False, 'transitions' or True (the amplitude too).
    gradient, n_draws : name and number of draws of the gradient estimator, which ``structgp.plan``
        chooses."""

    rate: float = 0.5
    window: int = 6
    tolerance: float = 0.02
    reductions: int = 4
    max_steps: int = 150
    learn_scales: LearnScales = "transitions"
    gradient: str = "auto"
    n_draws: int | None = None
    name = "natural"

    @property
    def moves_amplitude(self) -> bool:
        return self.learn_scales in (True, "all")

    def start(self, problem: Problem, generator: torch.Generator) -> NaturalState:
        if not all(block.takes_sites for block in problem.posterior.blocks):
            remedy = "use inference='adam' for a mixture, 'second-order' for weights"
            raise InputError("inference", "'natural' fits one Gaussian of inducing values", remedy)
        refuse_kernel(self.learn_scales, self.name)
        # Averaging would slow down an amplitude that is learned too: that has to settle before averaging
        # begins. And draws with gradients are cheap: such fits can afford to wait for a full plateau.
        early = not self.moves_amplitude and not problem.estimator.needs_gradient
        window, slowly = (max(1, self.window // 2), SLOWLY) if early else (self.window, 1.0)
        plateau = Plateau(window, slowly * self.tolerance * problem.n_counted)
        return NaturalState(generator, plateau, self.rate, [None] * len(problem.batches))

    def step(self, problem: Problem, state: NaturalState) -> tuple[NaturalState, StepInfo]:
        """Cost O(V (N M^2 + M^3)) and the estimator's on every batch."""
        with torch.no_grad():
            look = _look(problem, state)
            last = state.last
            noise = WORSE * (look.variance + (last.variance if last else 0.0)) ** 0.5
            if last is not None and look.elbo < state.best - noise:
                # A step that certainly made the bound worse is taken back. The next look is at the old
                # posterior with fresh draws, and steps from there are shorter. The best bound may have been
                # a lucky estimate, so it is lowered a little each time.
                problem.posterior.load_state_dict(last.posterior)
                state.sites, state.last, elbo = last.sites, None, last.elbo
                state.trust, state.best = 0.5 * state.trust, state.best - noise / 16
            else:
                state.last, elbo = look, look.elbo
                state.best = max(state.best, elbo)
                state.trust = min(1.0, 1.2 * state.trust)
                state.plateau.add(elbo)
                self._move(problem, state, look)
            stuck = state.trust < SHORTEST
        problem.memory.clear()
        state.iteration += 1
        converged = state.last is not None and self._is_settled(problem, state)
        finished = converged or stuck or state.iteration >= self.max_steps
        return state, StepInfo(state.iteration - 1, elbo, look.evaluations, finished, converged)

    def _is_settled(self, problem: Problem, state: NaturalState) -> bool:
        """True if the fit is over; shortens the steps."""
        stalled = state.plateau.is_full and state.plateau.look()
        if state.averaged is None:
            if stalled:
                state.averaged = 0
                state.plateau = Plateau(self.window, self.tolerance * problem.n_counted)
            return False
        state.averaged += 1
        state.rate = 1 / (1 / self.rate + state.averaged)  # the mean of all steps since then
        return stalled and state.rate <= self.rate * 0.5 ** (self.reductions - 1)

    def _move(self, problem: Problem, state: NaturalState, look: Look) -> None:
        """Moves the sites part of the way to those that the look found, sets the posterior to the exact one
        under them, and moves the scales."""
        # The first sites of all come from nothing: quadratics of zero.
        moved = [
            (new.map(torch.zeros_like) if old is None else old).towards(new, state.rate * state.trust)
            for old, new in zip(state.sites, look.targets, strict=True)
        ]
        if not set_posterior(problem, moved):
            # Under a likelihood that is not concave, or with noise, the quadratics may bend up by more than
            # the prior bends down; then there is no posterior.
            split = [_split(site, at) for site, at in zip(moved, look.latents, strict=True)]
            for share in UPWARD_SHARES:
                moved = [down.plus(up, share) for down, up in split]
                if set_posterior(problem, moved):
                    break
        state.sites = list(moved)
        if self.moves_amplitude:
            self._move_amplitude(problem, state, look.amplitude_slope)
        if self.learn_scales:
            problem.posterior.fit_tables()

    def _move_amplitude(self, problem: Problem, state: NaturalState, slope: float) -> None:
        """One step of Adam. It becomes shorter with the rate, but less so: nothing is averaged here."""
        node, (first, second) = problem.posterior.node, state.amplitude_momentum
        slope -= float(node.log_amplitude) / AMPLITUDE_PRIOR_SD**2
        first, second = 0.7 * first + 0.3 * slope, 0.9 * second + 0.1 * slope**2
        state.amplitude_momentum = [first, second]
        n = state.iteration + 1
        direction = first / (1 - 0.7**n) / max(1e-12, second / (1 - 0.9**n)) ** 0.5
        length = (self.rate * state.rate) ** 0.5
        node.log_amplitude.add_(AMPLITUDE_STEP * length * state.trust * direction)


def _look(problem: Problem, state: NaturalState) -> Look:
    q = problem.posterior
    expected = q.node.m.new_zeros(())
    variance, slope, evaluations = 0.0, 0.0, 0
    targets, latents, estimator = [], [], problem.estimator
    if state.averaged is None and not estimator.needs_gradient and estimator.n_draws > FEW_DRAWS:
        estimator = estimator.with_draws(max(FEW_DRAWS, estimator.n_draws // 2))
    for i, known in enumerate(state.sites):
        latent = problem.latents(i)
        found = problem.estimate(i, latent, state.generator, memory=known, estimator=estimator)
        at = latent.sensitivity(found.moments)
        targets.append(Sites.of(latent, at))
        latents.append(latent)
        expected += found.moments.value.sum()
        # Unknown if there was only one replicate: then no fall of the bound is certain.
        variance += float(found.variance.value.nan_to_num(torch.inf).sum())
        evaluations += found.evaluations
        slope += float(amplitude_slope(latent, at).sum())
    elbo = float(lower_bound(expected, q, problem.entropy))
    return Look(elbo, variance, targets, latents, slope, evaluations, q.snapshot(), state.sites)


def amplitude_slope(latent: Latents, at: Sensitivity) -> Tensor:
    """(K, B) derivative in the log-amplitude of nodes: every draw is proportional to the root of the
    amplitude."""
    node = latent.parts[0]
    slope = 0.5 * (at.mean[0] * node.mean).sum((-1, -2))
    return slope + (at.covariance[0] * node.covariance).sum((-1, -2, -3))


def _split(site: Sites, latent: Latents) -> tuple[Sites, Sites]:
    """Splits a quadratic into the part that bends down and the part that bends up. The second one is
    centred at the current posterior, so that leaving it out does not change the gradient in the mean
    there."""
    parts = zip(latent.parts, site.precision, strict=True)
    up = tuple(_upward(part, precision) for part, precision in parts)
    flat = tuple(torch.zeros_like(mean) for mean in latent.means)
    bends_up = Sites.of(latent, Sensitivity(flat, tuple(-0.5 * u for u in up)))
    return site.plus(bends_up, -1.0), bends_up


def _upward(part: ExampleLatent | SharedLatent, precision: Tensor) -> Tensor:
    """The negative part of a precision. For functions on examples, its eigenvalues are those in whitened
    coordinates, where noise is evenly spread."""
    if precision.dim() == 1:
        return precision.clamp(max=0)
    if precision.dim() == 2:
        values, vectors = torch.linalg.eigh(0.5 * (precision + precision.T))
        return (vectors * values.clamp(max=0)) @ vectors.T
    factor = part.factor
    whitened = factor.mT @ precision @ factor
    values, vectors = torch.linalg.eigh(0.5 * (whitened + whitened.mT))
    back = torch.linalg.solve_triangular(factor.mT, vectors, upper=True)  # L^-T U
    return (back * values.clamp(max=0)[..., None, :]) @ back.mT


def set_posterior(problem: Problem, sites: list[Sites]) -> bool:
    """Sets the exact posterior for quadratic ``sites``, in place; returns False, and moves nothing, if
    there is none."""
    q = problem.posterior
    before = q.snapshot()
    here = [problem.conditional(i) for i in range(len(sites))]
    for k, block in enumerate(q.blocks):
        linear, precision = ([s.linear[k] for s in sites], [s.precision[k] for s in sites])
        if not block.shared:
            linear, precision = [r[0] for r in linear], [p[0] for p in precision]
        if not block.solve_sites([c[k] for c in here], linear, precision):
            q.load_state_dict(before)
            return False
    return True
