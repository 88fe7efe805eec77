"""Weights fitted batch by batch, each batch's say kept as a site: old out, new in.

The posterior is the prior times one Gaussian factor a batch, its site: a precision and a linear term for
each weight that occurs in the batch. A visit takes the batch's site out, which leaves a Gaussian that knows
all but this batch; fits the batch under it as its prior, means by L-BFGS on draws, precisions from the
curvature, as ``second_order`` does for all data at once; and puts what has changed back as the new site.
Where no visit changes anything any more, the sum of all slopes is zero: that is the optimum of the whole
bound (partitioned variational inference, Bui et al. 2018).

A visit touches the weights of its batch alone: its cost does not depend on how many batches there are, nor
on how many weights. Memory beside the features themselves: one batch of draws, a few numbers for each
weight, and the sites, 2 R numbers for each weight that a batch has and R for each of its places, which may
be on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from structgp.errors import InputError
from structgp.gp import WeightPosterior, noise_table
from structgp.gp.weights import SparseRows
from structgp.inference import learn_scales as evidence
from structgp.inference.dual_lbfgs import Prior, climb
from structgp.inference.local import Local
from structgp.inference.problem import Problem, StepInfo
from structgp.inference.scales import LearnScales, fit_pairwise_sd, moves_kernel
from structgp.inference.weight_sites import Site, SitesInMemory, SitesOnDisk

SALT = 1_000_003
"""Between the numbers of a sequence in one pass and in the next, so that each has noise of its own."""

FEW, MANY = (500, 8, 16), (4_000, 4, 2)
"""Tokens of a batch, steps and draws of a visit. Of much data there are batches enough for the others' say
to change before a batch's own is worth knowing well."""

MANY_TOKENS = 50_000


@dataclass
class MinibatchState:
    """precision, linear : (M, R), pair_precision, pair_linear : (V, V), of all sites together; known : the
    same of what the posterior knew at the start, which stays. values : (n,) E[log p] of each batch at its
    last visit, nan before the first. scale : (R,) by how much the functions' variances have grown.
    divergence : of the weights, less what was known of them. moved : whether the kernel has since the last
    pass. order : batches still to come in this pass. bounds : at the end of each pass since the kernel last
    moved. known_at_start : log of what ``known`` makes of the prior's mass, so that the bound is of the new
    data."""

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
    moved: bool = False

    def release(self) -> None:
        """A checkpoint has been written, or there is none: what came before will not be asked for."""
        self.sites.release()


@dataclass(frozen=True)
class Minibatch:
    """Sites batch by batch, in weight space.

    Parameters
    ----------
    batch_tokens : tokens of a batch, about; None for what suits the data, see ``paced``.
    n_draws : S of each visit, antithetic, so even; None for what suits the data.
    steps : of L-BFGS in a visit, at most; None for what suits the data.
    tolerance : the bound has settled when a pass changes it by less, in nats per sequence.
    max_passes : stop here at the latest.
    learn_scales : as 'second-order' has it: False, 'transitions' or 'all'.
    learning_rounds : with 'all', the kernel moves so often, after every second pass.
    goes_on : what the posterior knows at the start is the say of data seen before, and stays: the old
        posterior is the prior of the new data.
    sites_folder : where sites are kept; None for in memory.
    single : whether a visit computes in single precision, with one draw of a weight for all of its batch;
        None for what suits the data.
    """

    batch_tokens: int | None = None
    n_draws: int | None = None
    steps: int | None = None
    tolerance: float = 0.1
    max_passes: int = 30
    learn_scales: LearnScales = "all"
    learning_rounds: int = 5
    goes_on: bool = False
    sites_folder: str | None = None
    single: bool | None = None
    name = "minibatch"

    def paced(self, n_tokens: int) -> Minibatch:
        """The same, with what was left open as it suits so many tokens."""
        many = n_tokens >= MANY_TOKENS
        batch_tokens, steps, n_draws = MANY if many else FEW
        return replace(
            self,
            batch_tokens=self.batch_tokens or batch_tokens,
            steps=self.steps or steps,
            n_draws=self.n_draws or n_draws,
            single=many if self.single is None else self.single,
        )

    def start(self, problem: Problem, generator: torch.Generator) -> MinibatchState:
        q = problem.posterior
        _check(problem)
        (_, R, M), V = q.m.shape, q.n_labels
        zeros = q.m.new_zeros
        table = noise_table(R, max(1, (self.n_draws or FEW[2]) // 2), generator).to(q.m.device)
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
        kept, n_places = state.sites[i], batch.mask.numel()
        site = (
            Site.empty(len(index), n_places, V, state.scale)
            if kept is None
            else kept.to(q.m.device).at(state.scale)
        )
        before = Local.of(state.precision, state.linear, index, here.prior_sd)
        prior = self._cavity(before, site, here.rows, q, state)
        offsets, pair_offsets = self._offsets(problem, q, state, i, before)
        if self._is_single(problem):
            prior = prior.single
            offsets, pair_offsets = offsets.float(), pair_offsets.float()
        basis = q.basis.to(offsets)
        counts = problem.weight(i)

        def latent(functions: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
            f = (functions @ basis.T).view(*batch.mask.shape, -1)
            return f + offsets, pairs + pair_offsets

        def likelihood(functions: Tensor, pairs: Tensor) -> tuple[float, Tensor, Tensor]:
            f, g = (x.requires_grad_() for x in latent(functions, pairs))
            with problem.locating(i), torch.enable_grad():
                total = problem.log_prob(i, f, g).mean(0).sum()
                grad_f, grad_g = torch.autograd.grad(total, (f, g), allow_unused=True)
            slope = (grad_f.sum(0) @ basis).flatten(0, 1)
            pair_slope = torch.zeros_like(pairs) if grad_g is None else grad_g.sum(0)
            return float(total.detach()), slope, pair_slope

        dual, pair_dual = site.dual.to(offsets), site.pair_dual.to(offsets)
        unsure = kept is not None and (state.moved or not self.single)
        found = climb(likelihood, prior, dual, pair_dual, self.steps or FEW[1], unsure)
        f, g = latent(found.functions, found.pairs)
        extra = () if q.has_label_basis else (basis,)
        with problem.locating(i):
            curvature = problem.structure.local_curvature(f, g, batch.y, batch.mask, *extra)
            state.values[i] = float(problem.log_prob(i, f, g).mean(0).sum())
        bend = (counts.to(f)[:, None, None] * curvature.unary).flatten(0, 1).contiguous()
        precision = prior.rows.squares_times(bend)
        pair_precision = (counts.to(f)[:, None, None] * curvature.pairwise).sum(0).clamp(min=0)
        say = prior.rows.transposed_times(found.a)
        state.sites[i] = kept = Site(
            precision,
            precision * (prior.mean + say / prior.precision) + say,
            pair_precision.double(),
            (pair_precision * found.pairs + found.b).double(),
            state.scale,
            found.a,
            found.b.double(),
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
            known = None if state.known is None else (state.known[0][index], state.known[1][index])
            after = Local.of(state.precision, state.linear, index, here.prior_sd)
            state.divergence += after.divergence(known) - before.divergence(known)
            _place(q, state, here.prior_sd, index)
        return (found.calls + 1) * len(offsets) * len(batch)

    def _cavity(
        self, at: Local, site: Site, rows: SparseRows, q: WeightPosterior, state: MinibatchState
    ) -> Prior:
        """What is known without the batch whose site it is."""
        precision, mean = at.without(site)
        pair_precision = (state.pair_precision - site.pair_precision).clamp(min=0)
        pair_precision = q.pairwise_sd.clamp(min=1e-150) ** -2 + pair_precision
        pair_mean = (state.pair_linear - site.pair_linear) / pair_precision
        return Prior(rows, precision, mean, pair_precision, pair_mean, not q.has_pairs)

    def _is_single(self, problem: Problem) -> bool:
        return bool(self.single) and problem.structure.takes_single

    def _offsets(
        self, problem: Problem, q: WeightPosterior, state: MinibatchState, i: int, at: Local
    ) -> tuple[Tensor, Tensor]:
        """What draws add to the mean: (S, B, T, V) and (S, V, V)."""
        half, V, batch = state.table.shape[-1], q.n_labels, problem.batches[i]
        noise = torch.randn(half, V, V, generator=state.generator, dtype=q.m.dtype).to(q.m)
        pairs = q.pairwise().factor * torch.cat([noise, -noise])
        here = problem.weights(i).compact[1]
        if not self._is_single(problem):
            keys = problem.numbers(i) + SALT * (state.passes + 1)
            sd = (at.sd / here.prior_sd[:, None]).T
            return here.spread(sd, state.table, keys) @ q.basis.T, pairs
        # Of much data, a batch is a small part, and what one draw of a weight says in it is little.
        sd, rows, basis = at.sd.float(), here.rows.single, q.basis.float()
        seed = int(torch.randint(2**31, (), generator=state.generator))
        generator = torch.Generator(sd.device).manual_seed(seed)
        drawn = []
        for _ in range(half):
            eps = torch.empty_like(sd).normal_(generator=generator)
            drawn.append((rows.times(eps.mul_(sd)) @ basis.T).view(*batch.mask.shape, -1))
        drawn += [-x for x in drawn]
        return torch.stack(drawn), pairs

    def _end_pass(
        self, problem: Problem, q: WeightPosterior, state: MinibatchState, elbo: float
    ) -> bool:
        """Whether it is over."""
        if self.learn_scales:
            fit_pairwise_sd(q)
        learns = moves_kernel(self.learn_scales) and state.learned < self.learning_rounds
        state.bounds.append(elbo)
        state.moved = learns and len(state.bounds) >= 2
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
    return float(q.kl_inducing(problem.entropy)) - _known_weights(q, state)


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
    return _known_weights(q, state) + _known_pairs(q, state)


def _known_weights(q: WeightPosterior, state: MinibatchState) -> float:
    """What the weights have of it."""
    if state.known is None:
        return 0.0
    precision, linear = state.known[:2]
    prior_sd = q.prior_factor()[:, None]
    mean, sd = prior_sd * q.m[0].T, prior_sd * q.factor[0].T
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
