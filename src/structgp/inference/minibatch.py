"""Weights fitted batch by batch: each batch has a Gaussian factor of its own, replaced at every visit.

The posterior is the prior times one Gaussian factor per batch, its site: a precision and a linear term for
each weight that occurs in the batch; a score of a table counts as a weight that occurs everywhere. A visit
takes the batch's site out, which leaves a Gaussian that knows all but this batch; fits the batch with that
Gaussian as its prior, means by L-BFGS on draws, precisions from the curvature, as ``second_order`` does for
all data at once; and puts what has changed back as the new site. Where no visit changes anything any more,
the sum of all slopes is zero: that is the optimum of the whole bound (partitioned variational inference,
Bui et al. 2018).

A visit touches the weights of its batch alone: its cost does not depend on how many batches there are, nor
on how many weights. Memory, beside the features themselves: one batch of draws, a few numbers per weight,
and the sites, which may be on disk. A batch's sites take 2 R numbers for each of its weights, and R for
each of its rows.

Several processes visit batches of their own at once, and add up what has changed after each round of visits
(``rounds``)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from structgp.errors import InputError
from structgp.gp import Posterior
from structgp.inference.batch_sites import Site, SitesOnDisk
from structgp.inference.bound import lower_bound
from structgp.inference.dual_lbfgs import Prior, climb
from structgp.inference.fixed_batch import FixedBatch
from structgp.inference.other_sites import CompiledOthers, Others, expected_log
from structgp.inference.problem import LearnScales, Problem, StepInfo
from structgp.inference.rounds import Agreement, Round

SALT = 1_000_003
"""Difference between a sequence's numbers in one pass and in the next, so that each pass has noise of its
own."""

FEW, MANY = (500, 8, 16), (4_000, 4, 2)
"""Tokens per batch, and steps and draws per visit, for little and for much data. With much data there are
so many batches that what the others say changes before it pays to fit one batch closely."""

MANY_TOKENS = 50_000

ON_GPU = 16_000
"""Tokens per batch of much data on a GPU, where a visit to a small batch takes as long as one to a large
batch: its operations are too small for a GPU. With a quarter of the visits, the bound of a fit to 9,000
generated sentences (``benchmarks.conll_sized``) ended 214 nats higher."""

AT_ONCE = 4_096


@dataclass
class MinibatchState:
    """State between visits. sites : for each batch, one per block; None before its first visit. precision,
    linear : (M, R) of each block, summed over all sites and ``known``. known : for each block, the
    precision and linear term that the posterior had at the start, which stay. held : (M, R) of each block,
    by how much the precision in ``known`` is raised during the fit. values : (n,) E[log p] of each batch at
    its last visit, nan before the first. scale : (R,) of each block, by how much the functions' variances
    have grown. divergence : that from the prior, minus the expectation of what was known. moved : whether
    the kernel has moved since the last pass. order : batches still to come in this pass. bounds : the bound
    at the end of each pass since the kernel last moved. known_at_start : log of the integral of the prior
    times ``known``, which is subtracted so that the bound is that of the new data."""

    generator: torch.Generator
    noise: list[Tensor]
    sites: list[list[Site] | None] | SitesOnDisk
    values: Tensor
    scale: list[Tensor]
    precision: list[Tensor]
    linear: list[Tensor]
    known: list[tuple[Tensor, Tensor]] | None = None
    held: list[Tensor] | None = None
    order: list[int] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    passes: int = 0
    learned: int = 0
    iteration: int = 0
    known_at_start: float = 0.0
    divergence: float = 0.0
    moved: bool = False


@dataclass(frozen=True)
class Minibatch:
    """Fits sites batch by batch, in weight space.

    Parameters
    ----------
    batch_tokens : tokens per batch, about; None for what suits the amount of data, see ``paced``.
    n_draws : S, draws per visit; antithetic, and so an even number; None for what suits the data.
    steps : largest number of L-BFGS steps per visit; None for what suits the data.
    tolerance : the bound has settled when a pass changes it by less, in nats per sequence.
    max_passes : largest number of passes over the data.
    learn_scales : as in 'second-order': False, 'transitions' or 'all'.
    learning_rounds : with 'all', the number of times that the kernel moves: after every second pass, or
        with much data after each pass, since with many batches one pass brings the posterior close enough.
    goes_on : whether the posterior at the start has learned from earlier data: it then is the prior of the
        new data.
    hold : with ``goes_on``, factor on the precision of what was known, at the same mean, while the new data
        are fitted. A posterior of independent weights forgets that the weights of features which occur
        together are correlated: if all A features of a token move as one, the old data are up to A times as
        firm as the precisions of the single weights say. The final posterior has the plain precisions.
    sites_folder : folder where sites are kept; None keeps them in memory.
    single : whether a visit computes in single precision, with one draw of each weight for the whole batch;
        None for what suits the data."""

    batch_tokens: int | None = None
    n_draws: int | None = None
    steps: int | None = None
    tolerance: float = 0.1
    max_passes: int = 30
    learn_scales: LearnScales = "all"
    learning_rounds: int = 5
    goes_on: bool = False
    hold: float = 1.0
    sites_folder: str | None = None
    single: bool | None = None
    name = "minibatch"

    def paced(self, n_tokens: int, device: str = "cpu") -> Minibatch:
        """A copy whose open parameters are set to what suits this number of tokens."""
        many = n_tokens >= MANY_TOKENS
        tokens, steps, n_draws = MANY if many else FEW
        tokens = ON_GPU if many and device != "cpu" else tokens
        tokens, steps = self.batch_tokens or tokens, self.steps or steps
        n_draws, single = self.n_draws or n_draws, many if self.single is None else self.single
        return replace(self, batch_tokens=tokens, steps=steps, n_draws=n_draws, single=single)

    def start(self, problem: Problem, generator: torch.Generator) -> MinibatchState:
        q, structure, n = problem.posterior, problem.structure, len(problem.batches)
        if not all(block.takes_minibatches for block in q.blocks):
            what = "'minibatch' fits one Gaussian of weights, with independent transition scores"
            remedy = "use kernel='relevance' and posterior='weights', or inference='saga'"
            raise InputError("inference", what, remedy)
        if not structure.has_local_curvature:
            what = f"'minibatch' needs the curvature, and {type(structure).__name__} offers none"
            raise InputError("inference", what, "use 'saga' or 'adam'")
        half = max(1, (self.n_draws or FEW[2]) // 2)
        noise = [block.visit_noise(half, generator) for block in q.blocks]
        sites: list[list[Site] | None] | SitesOnDisk = [None] * n
        if self.sites_folder is not None:
            functions = [b.n_functions for b in q.blocks]
            sites = SitesOnDisk.new(self.sites_folder, n, functions, problem.together)
        shapes = [(len(block.prior_sds()), block.n_functions) for block in q.blocks]
        values, scale = q.node.m.new_full((n,), torch.nan), [q.node.m.new_ones(R) for _, R in shapes]
        precision, linear = ([q.node.m.new_zeros(shape) for shape in shapes] for _ in range(2))
        state = MinibatchState(generator, noise, sites, values, scale, precision, linear)
        with torch.no_grad():
            if self.goes_on:
                state.known = [block.knowledge() for block in q.blocks]
                if self.hold != 1:
                    _hold(q, state, self.hold)
                state.precision = [precision.clone() for precision, _ in state.known]
                state.linear = [linear.clone() for _, linear in state.known]
            place(q, state)
            state.divergence = _divergence(problem, state)
            state.known_at_start = -state.divergence if self.goes_on else 0.0
        return state

    def step(self, problem: Problem, state: MinibatchState) -> tuple[MinibatchState, StepInfo]:
        """One visit, or with several processes one round of visits. Cost of a visit O(steps S B T (V^2 + A
        R)); O(M R) more at the end of a pass, and of a round."""
        if not state.order:
            state.order = torch.randperm(len(problem.batches), generator=state.generator).tolist()
        settled = False
        with torch.no_grad():
            evaluations = self._round(problem, state)
            seen = ~state.values.isnan()  # in the first pass, batches to come count like the others
            share = problem.sizes[seen].sum() / problem.sizes.sum()
            value = state.values[seen].sum() / share - state.known_at_start
            divergence = value.new_tensor(state.divergence)
            elbo = float(lower_bound(value, problem.posterior, divergence=divergence))
            if not state.order:
                state.passes += 1
                settled = self._end_pass(problem, state, elbo)
        state.iteration += 1
        finished = settled or (state.passes >= self.max_passes and not state.order)
        return state, StepInfo(state.iteration - 1, elbo, evaluations, finished, settled)

    def _round(self, problem: Problem, state: MinibatchState) -> int:
        """The visits of this process until its next exchange with the others. Returns the number of
        likelihoods computed, by all processes."""
        together, evaluations = problem.together, 0
        n, n_blocks = len(problem.batches), len(problem.posterior.blocks)
        next_ = Round.next(state.order, n, n_blocks, state.generator, together)
        several = together.size > 1
        agreement = Agreement([*state.precision, *state.linear], together) if several else None
        for i, seeds in next_.own(together.rank):
            evaluations += self._visit(problem, state, i, seeds)
        visited = set(next_.batches)
        state.order = [i for i in state.order if i not in visited] if several else state.order[:-1]
        if agreement is not None:
            evaluations = agreement.reach(next_, state.values, evaluations, state.sites)
            place(problem.posterior, state)
            # The divergence of the first process, so that all decide alike even where their rounding
            # differs.
            own = _divergence(problem, state) if together.is_first else 0.0
            (first,) = together.sum(state.values.new_tensor([own]))
            state.divergence = float(first)
        return evaluations

    def _visit(self, problem: Problem, state: MinibatchState, i: int, seeds: list[int]) -> int:
        """Takes the sites of batch i out and puts new ones in. Returns the number of likelihoods
        computed."""
        visit = _Visit(problem, state, i, seeds, bool(self.single) and problem.structure.takes_single)
        unsure = visit.is_again and (state.moved or not self.single)
        steps = self.steps or FEW[1]
        duals, functions, value, calls = climb(visit.likelihood, visit.priors, visit.duals, steps, unsure)
        visit.put_back(duals, functions, value)
        if problem.together.size == 1 and not self.single:
            visit.place()
        return (calls + 1) * visit.n_draws * len(problem.batches[i])

    def _end_pass(self, problem: Problem, state: MinibatchState, elbo: float) -> bool:
        """Ends a pass: moves the scales and updates the posterior. Returns True if the fit has settled."""
        if self.single:
            place(problem.posterior, state)
        if self.learn_scales:
            problem.posterior.fit_tables()
        state.bounds.append(elbo)
        learns = self.learn_scales == "all" and state.learned < self.learning_rounds
        state.moved = learns and len(state.bounds) >= (1 if self.single else 2)
        if state.moved:
            grown = problem.learn_prior(self.learn_scales)
            for k, by in enumerate(grown):
                state.scale[k] = state.scale[k] * by
                state.precision[k] *= by
                state.linear[k] *= by.sqrt()
                if state.known is not None:
                    precision, linear = state.known[k]
                    state.known[k] = precision * by, linear * by.sqrt()
                if state.held is not None:
                    state.held[k] = state.held[k] * by
            state.learned, state.bounds = state.learned + 1, []
        place(problem.posterior, state)  # under the scales as they are now
        state.divergence = _divergence(problem, state)
        if isinstance(state.sites, SitesOnDisk):
            state.sites.next_pass()
        settles = self.tolerance * problem.n_counted
        return len(state.bounds) >= 2 and abs(state.bounds[-1] - state.bounds[-2]) < settles


class _Visit:
    """One batch with what all others say as its prior: the weights that occur in it, their Gaussians
    without the batch's own sites, and draws of them."""

    def __init__(
        self, problem: Problem, state: MinibatchState, i: int, seeds: list[int], single: bool
    ) -> None:
        self.problem, self.state, self.i = problem, state, i
        self.blocks, self.batch = problem.posterior.blocks, problem.batches[i]
        self.kind = torch.float32 if single else torch.float64
        found = [conditional.compact for conditional in problem.conditional(i)]
        self.index, self.here = zip(*found, strict=True)
        kept = state.sites[i]
        self.is_again = kept is not None
        self.sites = [self._site(k, kept) for k in range(len(found))]
        self.others = [self._others(k) for k in range(len(found))]
        keys = problem.numbers(i) + SALT * (state.passes + 1)
        self.priors, self.offsets, self.duals, self.divergence = [], [], [], 0.0
        for k, (block, others) in enumerate(zip(self.blocks, self.others, strict=True)):
            here, site = self.here[k], self.sites[k]
            begun = others.begin(site, self._known(k))
            self.priors.append(Prior(here.rows.single if single else here.rows, begun.variance, begun.mean))
            self.divergence += begun.divergence
            draws = begun.sd, state.noise[k], keys, seeds[k], single
            self.offsets.append(block.visit_offsets(here, *draws))
            self.duals.append(site.dual)
        self.n_draws = len(self.offsets[0])
        parts = zip(self.blocks, self.offsets, strict=True)
        self._fixed = FixedBatch(problem, i, [block.scores(offset) for block, offset in parts])

    def _site(self, k: int, kept: list[Site] | None) -> Site:
        scale = self.state.scale[k]
        if kept is not None:
            return kept[k].to(scale.device).at(scale, self.kind)
        n_rows = 1 if self.blocks[k].shared else self.batch.masks[k].numel()
        return Site.empty(len(self.index[k]), n_rows, scale, self.kind)

    def _others(self, k: int) -> Others | CompiledOthers:
        sums = self.state.precision[k], self.state.linear[k]
        given = sums, self.index[k], self.here[k].prior_sd, self.sites[k]
        if self.state.known is None and not self.blocks[k].shared and CompiledOthers.suits(self.sites[k]):
            return CompiledOthers(*given)
        return Others(*given)

    def _known(self, k: int) -> tuple[Tensor, Tensor] | None:
        """What was known at the start about the weights of the batch."""
        if self.state.known is None:
            return None
        precision, linear = self.state.known[k]
        return precision[self.index[k]], linear[self.index[k]]

    def scores(self, functions: list[Tensor]) -> list[Tensor]:
        """The scores of every template at the draws, from mean functions (N, R) of each block."""
        parts = zip(self.blocks, functions, self.offsets, strict=True)
        return [block.scores(h.view(offset.shape[1:]) + offset) for block, h, offset in parts]

    def likelihood(self, functions: list[Tensor]) -> tuple[float, list[Tensor]]:
        parts = zip(functions, self.offsets, strict=True)
        found = self._fixed.slopes([h.view(offset.shape[1:]) for h, offset in parts])
        total, slopes = found or self.problem.slopes(self.i, self.scores(functions))
        return float(total), [s.to(h).reshape(h.shape) for s, h in zip(slopes, functions, strict=True)]

    def put_back(self, duals: list[Tensor], functions: list[Tensor], value: float) -> None:
        """Puts the new sites in place of the old ones. value : E[log p] there."""
        problem, state, i = self.problem, self.state, self.i
        parts = zip(functions, self.offsets, strict=True)
        bends = self._fixed.bends([h.view(offset.shape[1:]) for h, offset in parts])
        bends = problem.bends(i, self.scores(functions)) if bends is None else bends
        state.values[i] = value
        found = [self._new_site(k, bend, duals[k]) for k, bend in enumerate(bends)]
        state.sites[i] = [site for site, _ in found]
        divergence = sum(divergence for _, divergence in found)
        if problem.together.size == 1:
            state.divergence += divergence - self.divergence

    def place(self) -> None:
        """Updates the posterior at the weights of the batch, from the sites."""
        for k, block in enumerate(self.blocks):
            at = self.index[k]
            block.place(self.state.precision[k][at], self.state.linear[k][at], self.here[k].prior_sd, at)

    def _new_site(self, k: int, bend: Tensor, dual: Tensor) -> tuple[Site, float]:
        """Puts in the new site; returns it as it is stored, and the divergence with it."""
        prior, others, scale = self.priors[k], self.others[k], self.state.scale[k]
        if self.blocks[k].shared:
            bend = bend.sum(0).reshape(1, -1)
        precision = prior.rows.squares_times(bend.to(dual).reshape(dual.shape).contiguous())
        say = prior.rows.transposed_times(dual)
        if isinstance(others, CompiledOthers):
            divergence = others.end(precision, say, prior.variance, prior.mean)
            return Site(precision, say, scale, dual), divergence
        linear = torch.addcmul(prior.mean, say, prior.variance).mul_(precision.clamp_(min=0)).add_(say)
        site = Site(precision, linear, scale, dual).rounded()
        return site, others.end(site.at(scale, self.kind), self._known(k))


def _divergence(problem: Problem, state: MinibatchState) -> float:
    """The divergence from the prior, minus the expectation of what was known at the start. All of it is
    computed anew, so that rounding errors of one pass do not go on into the next. Cost O(M R)."""
    return float(problem.posterior.divergence(problem.entropy)) - known_value(problem.posterior, state)


@torch.no_grad()
def known_value(q: Posterior, state: MinibatchState) -> float:
    """The expected log of what was known at the start, up to a constant."""
    total = 0.0
    for block, known in zip(q.blocks, state.known or [], strict=state.known is not None):
        if not block.is_silent:
            prior_sd = block.prior_sds()[:, None]
            mean, sd = prior_sd * block.m.T, prior_sd * block.factor.T
            total += expected_log(*known, mean, mean.square() + sd.square())
    return total


def _hold(q: Posterior, state: MinibatchState, times: float) -> None:
    """Raises the precision of what was known, at the same mean."""
    assert state.known is not None
    state.held = [(times - 1) * precision for precision, _ in state.known]
    for k, block in enumerate(q.blocks):
        precision, linear = state.known[k]
        prior = block.prior_sds().square().reciprocal()[:, None]
        more = precision + state.held[k]
        state.known[k] = more, linear / (prior + precision) * (prior + more)


def settle(q: Posterior, state: Any) -> None:
    """Updates the posterior after a fit that stopped within a pass: with much data, visits do not do so.
    Does nothing for the states of other optimisers."""
    if isinstance(state, MinibatchState) and state.order:
        place(q, state)


@torch.no_grad()
def release(q: Posterior, state: Any) -> None:
    """After a fit: gives the posterior the precision that it has without ``Minibatch.hold``, at the same
    mean. Does nothing for the states of other optimisers."""
    if not isinstance(state, MinibatchState) or state.held is None:
        return
    for k, block in enumerate(q.blocks):
        prior_sd = block.prior_sds()
        prior, held = prior_sd.square().reciprocal()[:, None], state.held[k]
        mean = state.linear[k] / (prior + state.precision[k])
        precision = (state.precision[k] - held).clamp(min=0)
        block.place(precision, mean * (prior + precision), prior_sd, slice(None))


@torch.no_grad()
def place(q: Posterior, state: MinibatchState) -> None:
    """Updates the posterior at all weights from prior and sites, in chunks that fit into a cache."""
    for block, precision, linear in zip(q.blocks, state.precision, state.linear, strict=True):
        prior_sd = block.prior_sds()
        for start in range(0, len(prior_sd), AT_ONCE):
            at = slice(start, start + AT_ONCE)
            block.place(precision[at], linear[at], prior_sd[at], at)
