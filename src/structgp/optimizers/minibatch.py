"""Weights fitted batch by batch, each batch's say kept as a site: old out, new in.

The posterior is the prior times one Gaussian factor a batch, its site: a precision and a linear term for
each weight that occurs in the batch. A visit takes the batch's site out, which leaves a Gaussian that knows
all but this batch; fits the batch under it as its prior, means by L-BFGS on draws, precisions from the
curvature, as ``second_order`` does for all data at once; and puts what has changed back as the new site.
Where no visit changes anything any more, the sum of all slopes is zero: that is the optimum of the whole
bound (partitioned variational inference, Bui et al. 2018).

A visit touches the weights of its batch alone: its cost does not depend on how many batches there are, nor
on how many weights. Memory beside the features themselves: one batch of draws, a few numbers for each
weight, and the sites, 2 R numbers for each weight that a batch has, which may be on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from structgp.errors import InputError
from structgp.gp import WeightPosterior, noise_table
from structgp.optimizers import evidence
from structgp.optimizers.base import Problem, StepInfo
from structgp.optimizers.lbfgs import minimize
from structgp.optimizers.scales import LearnScales, fit_pairwise_sd, moves_kernel
from structgp.optimizers.weight_sites import Site, SitesInMemory, SitesOnDisk

SALT = 1_000_003
"""Between the numbers of a sequence in one pass and in the next, so that each has noise of its own."""

FEW, MANY = (500, 8), (2_000, 4)
"""Tokens of a batch and steps of a visit. Of much data there are batches enough for the others' say to
change before a batch's own is worth knowing well."""

MANY_TOKENS = 50_000


@dataclass
class MinibatchState:
    """precision, linear : (M, R), pair_precision, pair_linear : (V, V), of all sites together; known :
    the same
    of what the posterior knew at the start, which stays. values : (n,) E[log p] of each batch at its last
    visit, nan before the first. scale : (R,) by how much the functions' variances have grown. divergence :
    of the weights, less what was known of them. order : batches still to come in this pass.
    bounds : at the end of each pass since the kernel last moved. known_at_start : log of what ``known``
    makes of the prior's mass, so that the bound is of the new data."""

    generator: torch.Generator
    table: Tensor
    sites: SitesInMemory | SitesOnDisk
    values: Tensor
    scale: Tensor
    precision: Tensor
    linear: Tensor
    pair_precision: Tensor
    pair_linear: Tensor
    known: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    order: list[int] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    passes: int = 0
    learned: int = 0
    iteration: int = 0
    known_at_start: float = 0.0
    divergence: float = 0.0

    def release(self) -> None:
        """A checkpoint has been written, or there is none: what came before will not be asked for."""
        self.sites.release()


@dataclass(frozen=True)
class Minibatch:
    """Sites batch by batch, in weight space.

    Parameters
    ----------
    batch_tokens : tokens of a batch, about; None for what suits the data, see ``paced``.
    n_draws : S of each visit, antithetic, so even.
    steps : of L-BFGS in a visit, at most; None for what suits the data.
    tolerance : the bound has settled when a pass changes it by less, in nats per sequence.
    max_passes : stop here at the latest.
    learn_scales : as 'second-order' has it: False, 'pairwise' or 'all'.
    learning_rounds : with 'all', the kernel moves so often, after every second pass.
    goes_on : what the posterior knows at the start is the say of data seen before, and stays: the old
        posterior is the prior of the new data.
    sites_folder : where sites are kept; None for in memory.
    """

    batch_tokens: int | None = None
    n_draws: int = 16
    steps: int | None = None
    tolerance: float = 0.1
    max_passes: int = 30
    learn_scales: LearnScales = "all"
    learning_rounds: int = 5
    goes_on: bool = False
    sites_folder: str | None = None
    name = "minibatch"

    def paced(self, n_tokens: int) -> Minibatch:
        """The same, with what was left open as it suits so many tokens."""
        pace = MANY if n_tokens >= MANY_TOKENS else FEW
        return replace(self, batch_tokens=self.batch_tokens or pace[0], steps=self.steps or pace[1])

    def start(self, problem: Problem, generator: torch.Generator) -> MinibatchState:
        q = problem.posterior
        _check(problem)
        (_, R, M), V = q.m.shape, q.n_labels
        zeros = q.m.new_zeros
        table = noise_table(R, max(1, self.n_draws // 2), generator).to(q.m.device)
        n = len(problem.batches)
        sites: SitesInMemory | SitesOnDisk = SitesInMemory.of(n)
        if self.sites_folder is not None:
            sites = SitesOnDisk.new(self.sites_folder, n, R, V)
        begun = generator, table, sites, q.m.new_full((n,), torch.nan), q.m.new_ones(R)
        sums = zeros((M, R)), zeros((M, R)), zeros((V, V)), zeros((V, V))
        if not self.goes_on:
            return MinibatchState(*begun, *sums)
        assert isinstance(q, WeightPosterior)
        known = _knowledge(q)
        a, b, c, d = (x.clone() for x in known)
        state = MinibatchState(*begun, a, b, c, d, known)
        with torch.no_grad():
            divergence = float(q.kl_inducing(problem.entropy)) + float(q.kl_pairwise())
            state.known_at_start = _known_value(q, state) - divergence
        return state

    def step(self, problem: Problem, state: MinibatchState) -> tuple[MinibatchState, StepInfo]:
        """One visit. Cost O(steps S B T (V^2 + A R)); O(M R) more at the end of a pass."""
        q = problem.posterior
        assert isinstance(q, WeightPosterior)
        if not state.order:
            shuffled = torch.randperm(len(problem.batches), generator=state.generator)
            state.order = shuffled.tolist()
        i = state.order.pop()
        settled = False
        with torch.no_grad():
            evaluations = self._visit(problem, q, state, i)
            value = _value(problem, state) + _known_pairs(q, state) - state.known_at_start
            elbo = value - state.divergence - float(q.kl_pairwise())
            if not state.order:
                state.passes += 1
                settled = self._end_pass(problem, q, state, elbo)
        state.iteration += 1
        finished = settled or (state.passes >= self.max_passes and not state.order)
        return state, StepInfo(state.iteration - 1, elbo, evaluations, finished, settled)

    def known_value(self, problem: Problem, state: MinibatchState) -> float:
        """What the bound has beside E[log p] and the divergence from the prior: with both, the divergence
        is from the posterior at the start."""
        q = problem.posterior
        assert isinstance(q, WeightPosterior)
        with torch.no_grad():
            return _known_value(q, state) - state.known_at_start

    def _visit(self, problem: Problem, q: WeightPosterior, state: MinibatchState, i: int) -> int:
        """Takes the site of batch i out and puts a new one in. Returns likelihoods computed."""
        batch, V = problem.batches[i], q.n_labels
        index, here = problem.weights(i).compact
        rows, prior_sd = here.rows, here.prior_sd[:, None]
        kept = state.sites[i]
        site = Site.empty(len(index), V, state.scale) if kept is None else kept.at(state.scale)
        mean, sd = q.m[0][:, index], q.factor[0][:, index].abs()  # (R, F)
        # What is known without this batch, and of it without the pairwise scores' say.
        others = (state.precision[index] - site.precision).clamp(min=0)
        without = prior_sd.square().reciprocal() + others
        centre = (state.linear[index] - site.linear) / without
        others = (state.pair_precision - site.pair_precision).clamp(min=0)
        pair_without = q.pairwise_sd.clamp(min=1e-150) ** -2 + others
        pair_centre = (state.pair_linear - site.pair_linear) / pair_without

        half = state.table.shape[-1]
        noise = torch.randn(half, V, V, generator=state.generator, dtype=q.m.dtype).to(q.m)
        pair_offset = q.pairwise().factor * torch.cat([noise, -noise])
        keys = problem.numbers(i) + SALT * (state.passes + 1)
        offset = here.spread(sd, state.table, keys) @ q.basis.T
        start, scale = prior_sd * mean.T, prior_sd * sd.T  # (F, R) of weights themselves
        pair_start, pair_scale = q.pair_mean.clone(), q.pairwise().factor
        calls, shape = 0, batch.mask.shape

        def latent(weights: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
            f = (rows.times(weights) @ q.basis.T).view(*shape, -1)
            return f + offset, pairs + pair_offset

        def unflat(flat: Tensor) -> tuple[Tensor, Tensor]:
            step, pair_step = flat.split([start.numel(), V * V])
            pairs = pair_start + pair_scale * pair_step.view(V, V)
            return start + scale * step.view_as(start), pairs

        def negative(flat: Tensor) -> tuple[float, Tensor]:
            nonlocal calls
            calls += 1
            weights, pairs = unflat(flat)
            f, g = (x.requires_grad_() for x in latent(weights, pairs))
            with problem.locating(i), torch.enable_grad():
                total = problem.log_prob(i, f, g).mean(0).sum()
                grad_f, grad_g = torch.autograd.grad(total, (f, g), allow_unused=True)
            away, pair_away = weights - centre, pairs - pair_centre
            value = float(total.detach()) - 0.5 * float((without * away.square()).sum())
            slope = (grad_f.sum(0) @ q.basis).flatten(0, 1).contiguous()
            gradient = scale * (rows.transposed_times(slope) - without * away)
            pair_gradient = torch.zeros_like(pairs)
            if q.has_pairs:
                value -= 0.5 * float((pair_without * pair_away.square()).sum())
                pair_gradient = -pair_without * pair_away
                pair_gradient += 0 if grad_g is None else grad_g.sum(0)
            both = [gradient.reshape(-1), (pair_scale * pair_gradient).reshape(-1)]
            return -value, -torch.cat(both)

        zero = start.new_zeros(start.numel() + V * V)
        best, _ = minimize(negative, zero, steps=self.steps or FEW[1], memory=10)
        weights, pairs = unflat(best)
        f, g = latent(weights, pairs)
        extra = () if q.has_label_basis else (q.basis,)
        with problem.locating(i):
            curvature = problem.structure.local_curvature(f, g, batch.y, batch.mask, *extra)
            state.values[i] = float(problem.log_prob(i, f, g).mean(0).sum())
        counts = problem.weight(i)[:, None, None]
        bend = (counts * curvature.unary).flatten(0, 1).contiguous()
        precision = rows.squares_times(bend)
        pair_precision = (counts * curvature.pairwise).sum(0).clamp(min=0)
        state.sites[i] = kept = Site(
            precision,
            (without + precision) * weights - without * centre,
            pair_precision,
            (pair_without + pair_precision) * pairs - pair_without * pair_centre,
            state.scale,
        ).rounded()
        new = kept.at(state.scale)
        state.precision[index] += new.precision - site.precision
        state.linear[index] += new.linear - site.linear
        state.pair_precision += new.pair_precision - site.pair_precision
        state.pair_linear += new.pair_linear - site.pair_linear
        if state.iteration == 0:  # the posterior at the start is not of sites
            _place(q, state, problem.conditional.prior_factor)
            state.divergence = _divergence(problem, q, state)
        else:
            state.divergence -= _part_of_divergence(q, state, prior_sd, index)
            _place(q, state, here.prior_sd, index)
            state.divergence += _part_of_divergence(q, state, prior_sd, index)
        return (calls + 1) * 2 * half * len(batch)

    def _end_pass(
        self, problem: Problem, q: WeightPosterior, state: MinibatchState, elbo: float
    ) -> bool:
        """Whether it is over."""
        if self.learn_scales:
            fit_pairwise_sd(q)
        learns = moves_kernel(self.learn_scales) and state.learned < self.learning_rounds
        state.bounds.append(elbo)
        if learns and len(state.bounds) >= 2:
            grown = evidence.learn(problem)
            state.scale = state.scale * grown
            state.precision *= grown
            state.linear *= grown.sqrt()
            if state.known is not None:
                precision, linear, *pairs = state.known
                state.known = precision * grown, linear * grown.sqrt(), pairs[0], pairs[1]
            state.learned, state.bounds = state.learned + 1, []
            _place(q, state, problem.conditional.prior_factor)
        state.divergence = _divergence(problem, q, state)
        state.sites.next_pass()
        if len(state.bounds) < 2:
            return False
        return abs(state.bounds[-1] - state.bounds[-2]) < self.tolerance * problem.n_sequences


def _value(problem: Problem, state: MinibatchState) -> float:
    """E[log p] of all data; in the first pass, batches to come stand as the others do."""
    seen = ~state.values.isnan()
    share = problem.sizes[seen].sum() / problem.sizes.sum()
    return float(state.values[seen].sum() / share)


def _divergence(problem: Problem, q: WeightPosterior, state: MinibatchState) -> float:
    """KL of the weights from their prior, less what was known of them at the start: all of it anew, so
    that the rounding of one pass does not go on into the next. Cost O(M R)."""
    return float(q.kl_inducing(problem.entropy)) - _known_weights(q, state, None)


def _part_of_divergence(
    q: WeightPosterior, state: MinibatchState, prior_sd: Tensor, index: Tensor
) -> float:
    """The part of it that the weights ``index`` (F,) have, up to a constant; prior_sd : (F, 1)."""
    m, s = q.m[0][:, index], q.factor[0][:, index]
    kl = float(0.5 * (m.square() + s.square()).sum() - s.abs().log().sum())
    return kl - _known_weights(q, state, index, prior_sd)


def _knowledge(q: WeightPosterior) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What q says beyond its prior, as a site of all weights and pairs."""
    with torch.no_grad():
        prior_sd, m, s = q.prior_factor()[:, None], q.m[0].T, q.factor[0].T.square()  # (M, R)
        precision = (s.reciprocal() - 1).clamp(min=0) / prior_sd.square()
        linear = m / (s * prior_sd)
        spread = q.pairwise().factor.square()
        prior = q.pairwise_sd.clamp(min=1e-150) ** -2
        if not q.has_pairs:
            return precision, linear, torch.zeros_like(spread), torch.zeros_like(spread)
        return precision, linear, (spread.reciprocal() - prior).clamp(min=0), q.pair_mean / spread


def _known_value(q: WeightPosterior, state: MinibatchState) -> float:
    """E of the log of what was known at the start, up to a constant."""
    return _known_weights(q, state, None) + _known_pairs(q, state)


def _known_weights(
    q: WeightPosterior,
    state: MinibatchState,
    index: Tensor | None,
    prior_sd: Tensor | None = None,
) -> float:
    """What the weights ``index`` have of it; prior_sd : (F, 1). All of them if None."""
    if state.known is None:
        return 0.0
    some = slice(None) if index is None else index
    precision, linear = (x[some] for x in state.known[:2])
    prior_sd = q.prior_factor()[:, None] if prior_sd is None else prior_sd
    mean, sd = prior_sd * q.m[0][:, some].T, prior_sd * q.factor[0][:, some].T
    return float((linear * mean - 0.5 * precision * (mean.square() + sd.square())).sum())


def _known_pairs(q: WeightPosterior, state: MinibatchState) -> float:
    if state.known is None or not q.has_pairs:
        return 0.0
    precision, linear = state.known[2:]
    square = q.pair_mean.square() + q.pairwise().factor.square()
    return float((linear * q.pair_mean - 0.5 * precision * square).sum())


def _place(
    q: WeightPosterior, state: MinibatchState, prior_sd: Tensor, index: Tensor | None = None
) -> None:
    """The posterior that prior and sites make, at the weights ``index``, or at all. prior_sd : (F,)."""
    some, prior_sd = slice(None) if index is None else index, prior_sd[:, None]
    precision = 1 + prior_sd.square() * state.precision[some].clamp(min=0)
    q.m[0, :, some] = (prior_sd * state.linear[some] / precision).T
    q.factor[0, :, some] = precision.rsqrt().T
    if q.has_pairs:
        pairs = q.pairwise_sd**-2 + state.pair_precision.clamp(min=0)
        q.pair_mean.copy_(state.pair_linear / pairs)
        q.pair_log_sd.copy_(-0.5 * pairs.log())


def _check(problem: Problem) -> None:
    q, structure = problem.posterior, problem.structure
    if not isinstance(q, WeightPosterior) or q.pairs_are_full or q.n_components > 1:
        raise InputError(
            "inference",
            "'minibatch' fits weights, with one component and a diagonal covariance of pairwise scores",
            "use kernel='relevance' and space='weights', or inference='saga'",
        )
    if not structure.has_local_curvature:
        raise InputError(
            "inference",
            f"'minibatch' needs the curvature, and {type(structure).__name__} offers none",
            "use 'saga' or 'adam'",
        )
