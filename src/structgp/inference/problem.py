"""What every optimiser takes and returns, and how the scales of the prior are updated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NoReturn, Protocol, TypeAlias

import torch
from torch import Generator, Tensor, nn

from structgp.data.batch import Batch
from structgp.errors import InputError, LikelihoodError
from structgp.gp import Entropy, Posterior, Seen
from structgp.inference.bound import Bound, lower_bound
from structgp.inference.distributed import ALONE, Processes
from structgp.inference.estimators import Estimate, Estimator, Noise, Pathwise, Target
from structgp.inference.latents import Latents, Sites
from structgp.structures import PARTS, BlackBox, Structure, refuse

LearnScales: TypeAlias = bool | Literal["transitions", "all", "auto"]
"""What moves during a fit: nothing (False), the scale of tables of transitions, the amplitude of nodes too
(True), or the kernel's own parameters as well ('all'). 'auto' is resolved in ``structgp.plan``."""

CACHE_BYTES = 1 << 30
"""Size up to which the conditionals of all batches are kept; above it, they are computed when needed."""

MANY_DRAWS = 1000
"""Number of draws from which values of our own structures are computed in single precision: their rounding
is far below the noise of the draws."""

LARGEST_LATENT = 1e9
"""Score above which the optimiser has lost its way."""

MEMORY_RATE = 0.3
"""Part of the way that the running quadratic of a batch moves to each new estimate."""


@dataclass
class Slopes:
    """Derivatives of the expected log-likelihood in the functions of one block, one entry per batch. mean :
    (B, T, R) first derivatives. bend : minus the second derivatives, (B, R, T, T) or (B, T, R). Both are
    empty for blocks that learn their scales without them."""

    mean: list[Tensor] = field(default_factory=list)
    bend: list[Tensor] = field(default_factory=list)


@dataclass
class Problem:
    """All the training data, against which a posterior is fitted.

    estimator : for the expected log-likelihood and its gradients. entropy : bound on the entropy of a
    mixture. memory : the running quadratic of each batch, for estimators that use it. Everything is on the
    posterior's device. together : the processes that share the fit; ``batches`` are those of this process,
    or, if ``sees_all``, those of all processes, each of which visits its own (``own``). n_sequences :
    number of examples of all processes. n_counted : sum of their weights. starts : (n + 1) number of
    examples before each batch, and in all. weights : for each batch, (B,) how often each example counts."""

    posterior: Posterior
    structure: Structure
    batches: Sequence[Batch]
    estimator: Estimator = field(default_factory=Pathwise)
    entropy: Entropy = "bhattacharyya"
    memory: dict[int, Sites] = field(default_factory=dict)
    together: Processes = ALONE
    sees_all: bool = False
    n_sequences: int = field(init=False)
    n_counted: float = field(init=False)
    starts: list[int] = field(init=False)
    weights: list[Tensor] = field(init=False)
    prior_factors: list[Tensor] = field(init=False)
    _kept: dict[int, list[Any]] = field(init=False, default_factory=dict)
    _has_room: bool = field(init=False)

    def __post_init__(self) -> None:
        like, counts, numbers = self.posterior.node.m, getattr(self.batches, "counts", None), 0
        if counts is not None:  # data on disk are not read for this: all examples count once
            self.weights = [like.new_ones(()).expand(n) for n in counts]
        else:
            given = [(len(batch.index), batch.weight) for batch in self.batches]
            self.weights = [like.new_ones(n) if w is None else w.to(like) for n, w in given]
            for batch in self.batches:
                for block, rows, mask in zip(self.posterior.blocks, batch.rows, batch.masks, strict=True):
                    numbers += block.conditional_size(mask, 0 if rows is None else rows.shape[-1])
        self._has_room = counts is None and numbers * 8 <= CACHE_BYTES
        self.starts = [0, *accumulate(len(w) for w in self.weights)]
        sums = like.new_tensor([float(self.starts[-1]), float(self.sizes.sum())])
        if self.together.size > 1 and not self.sees_all:
            (sums,) = self.together.sum(sums)
        self.n_sequences, self.n_counted = int(sums[0]), float(sums[1])
        self.refresh()

    def refresh(self) -> None:
        """To be called after a kernel has moved. Forgets the conditionals, which then have to be computed
        anew; those of weights are kept, and only get the new prior."""
        with torch.no_grad():
            self.prior_factors = [block.prior_factor() for block in self.posterior.blocks]
        kept = self._kept if all(block.takes_minibatches for block in self.posterior.blocks) else {}
        self._kept = {
            i: [c.under(sd) for c, sd in zip(found, self.prior_factors, strict=True)]
            for i, found in kept.items()
        }

    def conditional(self, i: int, *, move_kernel: bool = False) -> list[Any]:
        """p(h | values) of every block on batch i, under the kernels as they were at the last refresh; or
        if ``move_kernel`` under the kernels as they are now, differentiable in their parameters. Kept where
        there is room for those of all batches; the last one is kept in any case."""
        factors = self.prior_factors
        if move_kernel:
            factors = [block.prior_factor() for block in self.posterior.blocks]
        elif i in self._kept:
            return self._kept[i]
        elif not self._has_room:
            self._kept.clear()  # the old one goes before there is a new one
        parts = zip(
            self.posterior.blocks, self.batches[i].rows, self.batches[i].masks, factors, strict=True
        )
        with torch.set_grad_enabled(move_kernel):
            found = [block.conditional(rows, mask, factor) for block, rows, mask, factor in parts]
        if not move_kernel:
            self._kept[i] = found
        return found

    def numbers(self, i: int) -> Tensor:
        """(B,) numbers of the examples of batch i, counted through all batches."""
        number = self.batches[i].number
        if number is None:
            return torch.arange(*self.starts[i : i + 2], device=self.posterior.node.m.device)
        return number

    @cached_property
    def mean_searches(self) -> list[Any]:
        """The search for the mean of each block."""
        blocks = self.posterior.blocks
        if not self._has_room or self.together.size > 1 or not len(self.batches):
            return [block.mean_search(None) for block in blocks]
        found = [self.conditional(i) for i in range(len(self.batches))]
        return [block.mean_search([here[k] for here in found]) for k, block in enumerate(blocks)]

    @property
    def own(self) -> range:
        """The batches that this process computes."""
        return self.together.range(len(self.batches)) if self.sees_all else range(len(self.batches))

    @cached_property
    def sizes(self) -> Tensor:
        """(n,) how many examples each batch counts as."""
        return self.posterior.node.m.new_tensor([float(weight.sum()) for weight in self.weights])

    def of_block(self, k: int) -> list[tuple[Any, Tensor, Tensor]]:
        """For every batch, the conditional of block k, the mask of its tuples, and the examples'
        weights."""
        parts = enumerate(zip(self.batches, self.weights, strict=True))
        return [(self.conditional(i)[k], batch.masks[k], weight) for i, (batch, weight) in parts]

    def log_prob(self, i: int, scores: Sequence[Tensor]) -> Tensor:
        """(S, K B) log p of batch i at the scores of every template, those of K components one after
        another; checked to be finite, and multiplied by how often each example counts."""
        batch, weight = self.batches[i], self.weights[i]
        y, mask, K = batch.y, batch.layout, scores[0].shape[1] // len(weight)
        if K > 1:
            y, mask, weight = y.repeat(K, 1), mask.repeat(K, 1), weight.repeat(K)
        log_prob: Callable[..., Tensor] = self.structure.log_prob
        try:
            found = log_prob(*scores, y, mask)
            if found.shape != scores[0].shape[:2]:
                _refuse_shape("log_prob", found, tuple(scores[0].shape[:2]))
            if not bool(found.detach().isfinite().all()):
                refuse(found)
        except LikelihoodError as error:
            self._fail(i, error)
        return found * weight

    def slopes(self, i: int, scores: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The log-likelihood of batch i, averaged over draws and summed over examples, and its derivatives
        in the functions of each block, (B, T, R), or (P,) if shared, summed over draws."""
        leaves = [s.requires_grad_() for s in scores]
        with torch.enable_grad():
            total = self.log_prob(i, leaves).mean(0).sum()
            found = torch.autograd.grad(total, leaves, allow_unused=True)
        parts = zip(self.posterior.blocks, leaves, found, strict=True)
        grads = ((block, torch.zeros_like(s) if grad is None else grad) for block, s, grad in parts)
        return total.detach(), [block.pull_back(grad.sum(0)) for block, grad in grads]

    def bends(self, i: int, scores: Sequence[Tensor], joint: bool = False) -> list[Tensor]:
        """Minus the second derivatives of log p of batch i in the functions of each block, averaged over
        draws and multiplied by how often each example counts. joint : whether to include those between
        different nodes of an example."""
        batch, node, structure = self.batches[i], self.posterior.node, self.structure
        if structure.many_templates:
            return self._graph_bends(i, scores, joint)
        curvature: Callable[..., Any] = structure.curvature if joint else structure.local_curvature
        extra = () if node.has_own_functions else (node.basis.to(scores[0]),)
        try:
            found = curvature(*scores, batch.y, batch.mask, *extra)
        except LikelihoodError as error:
            self._fail(i, error)
        B, T, R, table = *batch.y.shape[:2], node.n_functions, tuple(scores[1].shape[1:])
        shapes = (B, R, T, T) if joint else (B, T, R), table if len(table) > 2 else (B, *table)
        for name, bend, shape in zip(("node", "next"), (found.node, found.next), shapes, strict=True):
            if bend.shape != shape:  # or it might be broadcast without an error
                _refuse_shape(f"curvature of {name}", bend, shape)
        weight = self.weights[i].to(found.node)
        return [weight.view(-1, *[1] * (bend.dim() - 1)) * bend for bend in (found.node, found.next)]

    def _graph_bends(self, i: int, scores: Sequence[Tensor], joint: bool) -> list[Tensor]:
        """``bends`` for a structure of any templates."""
        batch, blocks = self.batches[i], self.posterior.blocks
        bends: Callable[..., list[Tensor]] = self.structure.bends  # type: ignore[attr-defined]
        bases = [None if block.has_own_functions else block.basis for block in blocks]
        wanted = [joint and block.joint_curvature for block in blocks]
        found = bends(scores, batch.y, batch.layout, bases, wanted)
        weight = self.weights[i].to(found[0])
        return [weight.view(-1, *[1] * (bend.dim() - 1)) * bend for bend in found]

    def _fail(self, i: int, error: LikelihoodError) -> NoReturn:
        """Raises an error of the likelihood on batch i, naming the training sequence in which it
        happened."""
        if error.sequence is None:
            raise error
        batch = self.batches[i]
        b = error.sequence % len(batch)
        n, length = int(batch.index[b]), int(batch.mask[b].sum())
        place = f"{error.place}, training sequence {n + 1} ({length} tokens)"
        raise LikelihoodError(place, error.problem, error.remedy, n) from error

    def latents(self, i: int, *, move_kernel: bool = False) -> Latents:
        """q of the functions on batch i; differentiable in the kernel's parameters too if
        ``move_kernel``."""
        here = self.conditional(i, move_kernel=move_kernel)
        return Latents.of(self.posterior, here, self.batches[i].masks)

    def target(self, i: int, latent: Latents) -> Target:
        """log p of batch i as a function of standard normal numbers, components one after another.
        Stand-ins are computed in single precision: their rounding is far below the noise of the draws."""
        batch, q, estimator = self.batches[i], self.posterior, self.estimator
        functions: Callable[..., Tensor] | None = PARTS.get(estimator.parts or "")

        def log_prob(noise: Noise) -> Tensor:
            scores = latent.place(noise)
            if not all(bool((x.detach().abs() < LARGEST_LATENT).all()) for x in scores):
                problem = "latent values are out of all bounds: the steps of the optimiser are too long"
                raise torch.linalg.LinAlgError(problem)
            return self.log_prob(i, scores).to(scores[0])

        def parts(noise: Noise) -> Tensor:
            assert functions is not None
            scores, K = latent.place([eps.float() for eps in noise]), q.n_components
            values = functions(*scores, batch.y.repeat(K, 1), batch.mask.repeat(K, 1))
            return (values * self.weights[i].repeat(K).to(values)[:, None]).to(noise[0])

        ours = not isinstance(self.structure, BlackBox)
        single = ours and not estimator.needs_gradient and estimator.n_draws >= MANY_DRAWS
        mixing, kind = q.mixing.detach(), torch.float32 if single else torch.float64
        given = None if functions is None else parts
        return Target(log_prob, latent.groups, mixing.repeat_interleave(len(batch)), given, kind)

    def estimate(
        self,
        i: int,
        latent: Latents,
        generator: Generator,
        memory: Sites | None = None,
        estimator: Estimator | None = None,
    ) -> Estimate:
        """E[log p] of batch i with slope and bend, in the posterior's precision. ``memory`` : the quadratic
        that is known already; by default the running quadratic of earlier estimates. ``estimator`` : the
        problem's estimator with another number of draws."""
        estimator = estimator or self.estimator
        uses, like = estimator.uses_memory, self.posterior.node.m
        known = (self.memory.get(i) if memory is None else memory) if uses else None
        about = None if known is None else latent.moments(known.sensitivity(latent))
        found = estimator(self.target(i, latent), generator, about)
        moments, variance = (m.map(lambda a: a.to(like)) for m in (found.moments, found.variance))
        if uses and memory is None:
            new = Sites.of(latent, latent.sensitivity(moments))
            self.memory[i] = new if known is None else known.towards(new, MEMORY_RATE)
        return Estimate(moments, variance, found.evaluations)

    def bound(self, i: int, generator: Generator, *, move_kernel: bool = False) -> Bound:
        """The bound estimated from batch i alone, differentiable in the posterior.

        Unbiased if all batches come equally often, however many examples each has: the batch stands for
        all, so its expectation is multiplied by the number of batches."""
        latent = self.latents(i, move_kernel=move_kernel)
        found, q = self.estimate(i, latent, generator), self.posterior
        expected = len(self.batches) * latent.expand(found.moments, q.mixing)  # eq:ellhat
        return Bound(lower_bound(expected, q, self.entropy), expected, found)

    def fresh_bound(self, n_draws: int, generator: Generator) -> float:
        """The bound on draws that nothing was fitted to: unbiased, so in expectation at most the
        optimum."""
        q, half = self.posterior, max(1, n_draws // 2)
        total = q.node.m.new_zeros(())
        with torch.no_grad():
            if q.n_components > 1:
                for i in self.own:
                    target = self.target(i, self.latents(i))
                    shapes = [group.shape(half) for group in target.groups]
                    noise = [torch.randn(s, generator=generator, dtype=q.node.m.dtype) for s in shapes]
                    mirrored = tuple(torch.cat([eps, -eps]).to(q.node.m) for eps in noise)
                    total += target.log_prob(mirrored).mean(0) @ target.weight
            else:
                noise_of = self.fixed_noise(half, generator)
                for i in self.own:
                    numbers = self.numbers(i)
                    parts = zip(q.blocks, self.conditional(i), noise_of, strict=True)
                    drawn = [(b, b.drawn_functions(here, eps, i, numbers)) for b, here, eps in parts]
                    scores = [block.scores(block.scale * functions) for block, functions in drawn]
                    total += self.log_prob(i, scores).mean(0).sum()
            if self.together.size > 1:
                (total,) = self.together.sum(total)
            return float(lower_bound(total, q, self.entropy))

    def fixed_noise(self, half: int, generator: Generator) -> list[Any]:
        """Random numbers of 2 x half draws, mirrored, one entry per block."""
        blocks = self.posterior.blocks
        masks: list[Any] = [()] * len(blocks)
        if not all(
            block.takes_minibatches for block in blocks
        ):  # those need no masks, which may be on disk
            masks = list(zip(*(batch.masks for batch in self.batches), strict=True))
        parts = zip(blocks, masks, strict=True)
        return [block.fixed_noise(half, list(of_block), generator) for block, of_block in parts]

    def learn_prior(self, learn: LearnScales, slopes: Sequence[Slopes] | None = None) -> list[Tensor]:
        """One step for the scales of every block's prior, at the current posterior, which should be close
        to the best one under these scales. Returns the factor by which the variance of each function has
        grown, (R,) per block."""
        grown = []
        with torch.no_grad():
            for k, block in enumerate(self.posterior.blocks):
                seen = self.seen(k, slopes[k]) if slopes and slopes[k].mean else []
                if block.shared:  # a table's amplitude moves after every round
                    grown.append(block.m.new_ones(block.n_functions))
                elif learn == "all":
                    grown.append(block.learn_scales(seen, self.prior_factors[k]))
                else:
                    grown.append(block.learn_amplitude(seen))
            self.refresh()
            self.memory.clear()
        return grown

    def seen(self, k: int, slopes: Slopes) -> list[Seen]:
        """What a round found about block k, batch by batch."""
        parts: Any = enumerate(zip(self.batches, slopes.mean, slopes.bend, strict=True))
        return [Seen(self.conditional(i)[k], b.rows[k], b.masks[k], *at) for i, (b, *at) in parts]


def _refuse_shape(what: str, found: Tensor, shape: tuple[int, ...]) -> NoReturn:
    problem = f"{what} has shape {tuple(found.shape)} where {shape} was expected"
    raise LikelihoodError("likelihood", problem, "see structgp.structures.Structure for the shapes")


def open_low_rank(problem: Problem) -> None:
    """Narrows some directions of low-rank posteriors a little, so that gradients see them."""
    for k, block in enumerate(problem.posterior.blocks):
        block.open_directions(problem.of_block(k))


def hyper_parameters(q: Posterior, learn: LearnScales) -> list[nn.Parameter]:
    """The parameters that ``learn`` stands for; those of kernels are made to take gradients."""
    chosen = []
    for block in q.blocks:
        moves = bool(learn) if block.shared else learn in (True, "all")
        if moves and not block.is_silent:
            chosen.append(block.log_amplitude)
        if learn == "all":
            chosen += block.kernel_parameters()
    return chosen


def refuse_kernel(learn: LearnScales, name: str) -> None:
    if learn == "all":
        problem = f"{name!r} inference cannot move the kernel, which 'all' asks for"
        remedy = "use inference='adam' or 'paper-batch', or another learn_scales"
        raise InputError("learn_scales", problem, remedy)


@dataclass(frozen=True)
class StepInfo:
    """What one step did. ``elbo`` is the bound on the draws the step used (stochastic optimisers: its mean
    over recent steps); ``evaluations`` counts examples times draws whose likelihood was computed;
    ``finished`` ends the loop, and ``converged`` says whether the bound had settled or a limit was hit;
    ``n_draws`` is the number of draws that stood for the posterior throughout the step, 0 if there were no
    such draws."""

    iteration: int
    elbo: float
    evaluations: int
    finished: bool = False
    converged: bool = False
    n_draws: int = 0


class Optimizer(Protocol):
    """Steps that return state and diagnostics; the parameters themselves live in the posterior."""

    @property
    def name(self) -> str: ...

    def start(self, problem: Problem, generator: Generator) -> Any: ...

    def step(self, problem: Problem, state: Any) -> tuple[Any, StepInfo]: ...
