"""Second-order variational inference for concave structures.

On a fixed set of draws the bound is a smooth function of the posterior, and alternating two moves climbs to
its optimum in a handful of rounds:

1. means: with the covariances held, each draw is the mean plus a fixed offset, so the bound is concave in
   the means, like a CRF's penalised likelihood. L-BFGS, in the coordinates that the current posterior
   covariance makes round.
2. covariances: at the optimum, S_j^-1 = I + sum_n A_n^T E[-d^2 log p / dh_nj^2] A_n (set the gradient of
   the bound to zero and use Price's theorem). The structure gives that curvature in closed form; each block
   of potentials knows what to make of it.

In the first rounds the scales of the prior move as well, in closed form (``gp.block``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from structgp.errors import InputError
from structgp.gp.mean_search import MeanSearch
from structgp.inference.bound import lower_bound
from structgp.inference.fixed_batch import FixedBatch
from structgp.inference.lbfgs import climb_down, minimize
from structgp.inference.problem import LearnScales, Problem, Slopes, StepInfo

FIRST_STEPS = 10
"""Number of L-BFGS steps of the first fit, at the mean alone, and of rounds in which scales move. With 15,
left-out thirds of the TRAINING data of four tasks, encoded and raw, ten splits each, have the same loss to
within chance, or for raw chunking a slightly higher one. With 8 or fewer, as single fits showed, early
rounds may end so far from their optimum that many more follow."""

FEW_STEPS = 20
"""Number of steps up to which the plain search is used (``lbfgs.climb_down``)."""

MOST_DRAWS = 128
"""Number of draws up to which a fit may take more: as many as answers average over by default."""

OPTIMISM = 0.1
"""Nats per example, counted by its weight, by which the bound on the draws that the means were fitted to
may exceed the bound on fresh ones. The optimum is about half way between the two (``inference.loop``): the
fit is then within .05 of it."""


@dataclass
class SecondOrderState:
    """State between rounds. noise : random numbers of the draws, one entry per block. elbo : bound of the
    last round. change : its change from the round before, in nats per example. evaluations : likelihoods
    computed that no round has reported yet. slopes : those of the last round, from which scales are
    learned; None when that is over. n_draws : S. generator : for further draws."""

    noise: list[Any]
    slopes: list[Slopes] | None = None
    iteration: int = 0
    elbo: float = -math.inf
    evaluations: int = 0
    change: float = math.inf
    n_draws: int = 2
    generator: torch.Generator = field(default_factory=torch.Generator)


@dataclass(frozen=True)
class SecondOrder:
    """Alternating means and covariances.

    Parameters
    ----------
    n_draws : S, the number of draws that stand for the posterior; they are mirrored, so it is even. None
        for 16, or 32 where nodes have one or two functions, and so a likelihood costs little. The number is
        doubled, up to 128, whenever a round changes the bound by more than half of what the round before
        did. It grows as far as needed where the bound on fresh draws is much lower (``OPTIMISM``): means
        that follow few draws too closely go back and forth with the covariances.
    tolerance : stop when a round changes the bound by less than this, in nats per example, counted by its
        weight, and no more than this is to be expected from the rounds to come (``_is_settled``) or from
        the means.
    max_rounds : largest number of rounds.
    learn_scales : False (nothing moves), 'transitions' (the scale of tables), True (one amplitude per block
        too), or 'all' (the scales of the kernel, of its features and of the functions).
    learning_tolerance, learning_rounds : scales are learned until a round changes the bound by less than
        this, in nats per example, or for so many rounds.
    brief : end when the scales no longer move, converged or not; for fits of which little but the scales is
        kept."""

    n_draws: int | None = None
    tolerance: float = 0.02
    max_rounds: int = 20
    learn_scales: LearnScales = "all"
    learning_tolerance: float = 0.2
    learning_rounds: int = 5
    brief: bool = False
    name = "second-order"

    def start(self, problem: Problem, generator: torch.Generator) -> SecondOrderState:
        q, structure, what = problem.posterior, problem.structure, None
        joint = any(block.joint_curvature for block in q.blocks)
        if not (structure.has_curvature if joint else structure.has_local_curvature):
            what = f"'second-order' needs the curvature, and {type(structure).__name__} offers none"
            raise InputError("inference", what, "use 'natural'")
        if q.n_components > 1:
            what = f"a mixture of {q.n_components} components"
        elif not all(block.takes_curvature for block in q.blocks):
            what = "a full covariance of the transition scores"
        elif any(block.joint_curvature for block in q.blocks[1:]):
            what = "transitions at inducing inputs"  # structures give their curvature one by one
        if what is not None:
            raise InputError("inference", f"'second-order' cannot fit {what}", "use 'adam'")
        n_draws = (32 if q.node.n_functions <= 2 else 16) if self.n_draws is None else self.n_draws
        half = max(1, n_draws // 2)
        noise = problem.fixed_noise(half, generator)
        with torch.no_grad():
            at_mean = Draws(problem, None)
            evaluations = _fit_means(at_mean, FIRST_STEPS, tolerance=1e-4).evaluations
            _fit_covariances(at_mean)
        return SecondOrderState(noise, evaluations=evaluations, n_draws=2 * half, generator=generator)

    def step(self, problem: Problem, state: SecondOrderState) -> tuple[SecondOrderState, StepInfo]:
        """One round. Cost at inducing inputs: O(R (N M^2 + M^3)) for the covariances, O(R N M T) for
        diagonal ones, O(R N M (T + r)) for low-rank ones; as much again where scales are learned; in weight
        space O(R N A). And for each of some 10 to 30 L-BFGS steps, S likelihoods of every example."""
        learns = self.learn_scales in (True, "all")
        with torch.no_grad():
            if state.slopes is not None:
                problem.learn_prior(self.learn_scales, state.slopes)
            draws, tolerance = Draws(problem, state.noise), min(1e-5, 5e-4 * self.tolerance)
            means = _fit_means(draws, FIRST_STEPS if learns else 50, tolerance)
            elbo = float(lower_bound(means.expected, problem.posterior, problem.entropy))
            done = state.iteration + 1
            change = abs(elbo - state.elbo) / problem.n_counted
            settled = change < self.learning_tolerance or done >= self.learning_rounds
            was_learning = state.slopes is not None or state.iteration == 0
            goes_on = learns and was_learning and not settled
            slopes, extra = _fit_covariances(draws, wants_slopes=goes_on)
            if self.learn_scales:
                problem.posterior.fit_tables()
        stays = not goes_on and state.slopes is None  # the prior does, in this round and the next
        converged = stays and _is_settled(change, state.change, self.tolerance)
        converged = converged and means.gap < self.tolerance * problem.n_counted
        excess, looked = _excess(problem, state, elbo) if converged and not self.brief else (0.0, 0)
        few = excess > OPTIMISM
        converged = converged and not (few or self.brief)
        finished = converged or done >= self.max_rounds or (few and state.n_draws >= MOST_DRAWS)
        finished = finished or (self.brief and settled)
        evaluations = state.evaluations + means.evaluations + extra + looked
        told = StepInfo(state.iteration, elbo, evaluations, finished, converged, state.n_draws)
        after = replace(state, iteration=done, elbo=elbo, evaluations=0, change=change)
        after.slopes = slopes if goes_on else None
        if few and not finished:
            # The excess is about inversely proportional to the number of draws.
            _take_draws(problem, after, 2 ** math.ceil(math.log2(min(excess / OPTIMISM, MOST_DRAWS))))
        elif stays and not finished and max(self.tolerance, 0.5 * state.change) < change < math.inf:
            _take_draws(problem, after, 2)
        return after, told


def _excess(problem: Problem, state: SecondOrderState, elbo: float) -> tuple[float, int]:
    """How many nats per example the bound on fresh draws is below ``elbo``, which is a lot where means at
    inducing inputs have followed their draws too closely; and the number of likelihoods computed to tell.
    If the excess is above ``OPTIMISM`` and more draws are not allowed, the fit ends without having
    converged. 0 for fits of weights, which take seconds by default."""
    if not any(block.joint_curvature for block in problem.posterior.blocks):
        return 0.0, 0
    generator = torch.Generator()
    generator.set_state(state.generator.get_state())  # as if nothing had been drawn
    n_draws = MOST_DRAWS // 2
    fresh = problem.fresh_bound(n_draws, generator)
    return (elbo - fresh) / problem.n_counted, n_draws * problem.n_sequences


def _take_draws(problem: Problem, state: SecondOrderState, factor: int) -> None:
    """Replaces the draws by ``factor`` times as many new ones, at most ``MOST_DRAWS``, in place. Bounds on
    the old draws are forgotten."""
    if state.n_draws < MOST_DRAWS:
        state.n_draws = min(factor * state.n_draws, MOST_DRAWS)
        state.noise = problem.fixed_noise(state.n_draws // 2, state.generator)
        state.elbo, state.change = -math.inf, math.inf


def _is_settled(change: float, before: float, tolerance: float) -> bool:
    """True if the last round changed the bound by less than the tolerance, and all rounds to come together
    would do so too, if each changed it by the same share of the round before. A tenth of the tolerance is
    enough in any case: below it, that share is mostly chance."""
    share = change / before if before > change else 1.0
    return change < tolerance * min(1.0, max(0.1, 1 / share - 1 if share > 0 else 1.0))


class Draws:
    """The draws that stand for the posterior: its mean, which moves, plus offsets, which stay. noise : as
    from ``Problem.fixed_noise``; None for the mean alone. offsets : for each batch, one entry per block."""

    def __init__(self, problem: Problem, noise: Sequence[Any] | None) -> None:
        self.problem, self.blocks = problem, problem.posterior.blocks
        self.offsets: list[list[Tensor]] = []
        for i in range(len(problem.batches)):
            here = problem.conditional(i)
            if noise is None:
                means = [c.times(block.m) for block, c in zip(self.blocks, here, strict=True)]
                self.offsets.append([torch.zeros_like(mean)[None] for mean in means])
            else:
                parts, numbers = zip(self.blocks, here, noise, strict=True), problem.numbers(i)
                self.offsets.append([block.offsets(c, eps, i, numbers) for block, c, eps in parts])
        self.n_draws = len(self.offsets[0][0])
        self._fixed = []
        for i, offsets in enumerate(self.offsets):
            added = [b.scores(b.scale * offset) for b, offset in zip(self.blocks, offsets, strict=True)]
            self._fixed.append(FixedBatch(problem, i, added))

    def slopes(self, i: int, functions: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """``Problem.slopes`` of batch i at mean functions (B, T, R) of each block, (P,) if shared."""
        found = self._fixed[i].slopes(functions)
        return self.problem.slopes(i, self.scores(i, functions)) if found is None else found

    def bends(self, i: int, functions: Sequence[Tensor], joint: bool) -> list[Tensor]:
        """``Problem.bends`` of batch i at such mean functions."""
        found = None if joint else self._fixed[i].bends(functions)
        return self.problem.bends(i, self.scores(i, functions), joint) if found is None else found

    def functions(self, i: int) -> list[Tensor]:
        """The functions on batch i at the mean of the posterior."""
        parts = zip(self.blocks, self.problem.conditional(i), strict=True)
        return [block.scale * c.times(block.m) for block, c in parts]

    def scores(self, i: int, functions: Sequence[Tensor]) -> list[Tensor]:
        """The scores of every template on batch i at the draws."""
        parts = zip(self.blocks, functions, self.offsets[i], strict=True)
        return [block.scores(h + block.scale * offset) for block, h, offset in parts]

    def value(self, searches: Sequence[MeanSearch]) -> Tensor:
        """The expected log-likelihood at the current means of the searches, which are given its
        derivatives, in place."""
        value = torch.zeros((), dtype=torch.float64)  # values from a GPU's kernels are on the CPU already
        for i in range(len(self.offsets)):
            here = self.problem.conditional(i)
            functions = [s.functions(i, c) for s, c in zip(searches, here, strict=True)]
            total, slopes = self.slopes(i, functions)
            value = value + total
            for search, conditional, slope in zip(searches, here, slopes, strict=True):
                search.add(i, conditional, slope)
        if self.problem.together.size > 1:
            own = [s.gradient for s in searches]
            value, *gradients = self.problem.together.sum(value.to(own[0].device), *own)
            for search, gradient in zip(searches, gradients, strict=True):
                search.gradient = gradient
        return value


@dataclass(frozen=True)
class Means:
    """What a search for the means found. expected : the log-likelihood of the draws. gap : about how many
    nats the bound is below its maximum over the means: half the squared gradient in coordinates where the
    posterior's covariance makes the curvature 1, which is half the squared Newton decrement. evaluations :
    likelihoods computed."""

    expected: Tensor
    gap: float
    evaluations: int


def _fit_means(draws: Draws, steps: int, tolerance: float) -> Means:
    """Maximises the bound over the means of all blocks, in place: at most ``steps`` L-BFGS steps, until one
    gains less than ``tolerance`` of the value."""
    problem, calls, best = draws.problem, 0, (math.inf, math.inf)
    searches = problem.mean_searches
    sizes = [s.begin(factor) for s, factor in zip(searches, problem.prior_factors, strict=True)]

    def place(flat: Tensor) -> float:
        """Moves the means; returns their part of the divergence."""
        parts = zip(searches, flat.split(sizes), strict=True)
        return sum(float(search.move(x)) for search, x in parts)

    def negative(flat: Tensor) -> tuple[float, Tensor]:
        nonlocal calls, best
        calls += 1
        found = place(flat) - float(draws.value(searches))
        slope = torch.cat([search.slope() for search in searches])
        best = min(best, (found, 0.5 * float(slope @ slope)))
        return found, slope

    zero = draws.blocks[0].m.new_zeros(sum(sizes))
    if steps <= FEW_STEPS:
        x, least = climb_down(negative, zero, steps=steps, tolerance=tolerance)
    else:
        x, least = minimize(negative, zero, steps=steps, memory=10, tolerance=tolerance)
    expected = x.new_tensor(place(x) - least)
    for search in searches:
        search.settle()
    return Means(expected, best[1], calls * draws.n_draws * problem.n_sequences)


def _fit_covariances(draws: Draws, wants_slopes: bool = False) -> tuple[list[Slopes], int]:
    """Sets the covariances of every block to the best ones for the curvature at the draws, in place.
    Returns, if ``wants_slopes``, the slopes from which each block learns its scales (else empty ones), and
    the number of likelihoods computed for them."""
    problem, blocks = draws.problem, draws.blocks
    joint = any(block.joint_curvature for block in blocks)
    sums, found = [block.curvature_sum() for block in blocks], [Slopes() for _ in blocks]
    wants_slopes = wants_slopes and any(block.learns_from_slopes for block in blocks)
    for i in range(len(problem.batches)):
        functions, here = draws.functions(i), problem.conditional(i)
        bends = draws.bends(i, functions, joint)
        slopes = draws.slopes(i, functions)[1] if wants_slopes else None
        for k, bend in enumerate(bends):
            sums[k].add(here[k], bend)
            if slopes is not None and blocks[k].learns_from_slopes:
                # In the layout that a checkpoint restores: the last bit of sums depends on the order in
                # memory.
                found[k].mean.append(slopes[k].contiguous())
                found[k].bend.append(bend.contiguous())
    if problem.together.size > 1:
        tensors = [t for s in sums for t in s.tensors()]
        for mine, total in zip(tensors, problem.together.sum(*tensors), strict=True):
            mine.copy_(total)
    for s in sums:
        s.finish()
    return found, draws.n_draws * problem.n_sequences if wants_slopes else 0
