"""What every optimiser is given and what it gives back, and how scales of the prior move with the bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from structgp.data.batch import Batch
from structgp.errors import InputError, LikelihoodError
from structgp.gp import Entropy, Posterior, Seen
from structgp.inference.bound import Bound, evidence_lower_bound, lower_bound
from structgp.inference.distributed import ALONE, Processes
from structgp.inference.estimators import Estimate, Estimator, Noise, Pathwise, Target
from structgp.inference.latents import Latents, Sites
from structgp.structures import PARTS, BlackBox, Structure, all_finite

LearnScales: TypeAlias = bool | Literal["transitions", "all", "auto"]
"""What moves during a fit: nothing (False), the scale of tables of transitions, the amplitude of nodes too
(True), or the kernel's own parameters as well ('all'). 'auto' is resolved in ``structgp.plan``."""

CACHE_BYTES = 1 << 30
"""Up to here the conditionals of every batch are kept; beyond it they are computed again when needed."""

MANY_DRAWS = 1000
"""From so many on, values of our own structures are computed in single precision: their rounding is far
below the noise of the draws."""

LARGEST_LATENT = 1e9
"""Scores beyond it mean that the optimiser has lost its way."""

MEMORY_RATE = 0.3
"""How far the running quadratic of a batch moves to each new estimate."""


@dataclass
class Slopes:
    """Derivatives of the expected log-likelihood in the functions of one block, one entry per batch: mean
    (B, T, R), bend (B, R, T, T) minus the second ones. Empty for blocks that learn their scales from
    less."""

    mean: list[Tensor] = field(default_factory=list)
    bend: list[Tensor] = field(default_factory=list)


def conditionals(
    posterior: Posterior, batch: Batch, prior_factors: Sequence[Tensor] | None = None
) -> list[Any]:
    """p(h | values) of every block on a batch, differentiable in the kernels' parameters."""
    if prior_factors is None:
        prior_factors = [block.prior_factor() for block in posterior.blocks]
    parts = zip(posterior.blocks, batch.rows, batch.masks, prior_factors, strict=True)
    return [block.conditional(rows, mask, factor) for block, rows, mask, factor in parts]


@dataclass
class Problem:
    """All the training data, against which a posterior is fitted.

    estimator : of the expected log-likelihood and its gradients. entropy : of a mixture. memory : the
    running quadratic of each batch, for estimators that use it. All of it is on one device, the
    posterior's. together : with which other processes; batches are the share of this one. n_sequences :
    examples of all processes; starts : (n + 1) examples before each batch, and in all, of this one."""

    posterior: Posterior
    structure: Structure
    batches: Sequence[Batch]
    estimator: Estimator = field(default_factory=Pathwise)
    entropy: Entropy = "bhattacharyya"
    memory: dict[int, Sites] = field(default_factory=dict)
    together: Processes = ALONE
    n_sequences: int = field(init=False)
    starts: list[int] = field(init=False)
    prior_factors: list[Tensor] = field(init=False)
    _kept: list[list[Any]] | None = field(init=False)
    _last: tuple[int, list[Any]] | None = field(init=False)

    def __post_init__(self) -> None:
        counts = getattr(self.batches, "counts", None)  # data on disk knows without being read
        self.starts = [0, *accumulate([len(b) for b in self.batches] if counts is None else counts)]
        self.n_sequences = self.starts[-1]
        if self.together.size > 1:
            self.n_sequences = int(self.together.sum(self.posterior.like.new_tensor(self.n_sequences))[0])
        self.refresh()

    # -- p(h | values) -----------------------------------------------------------------------------

    def refresh(self) -> None:
        """Computes the conditionals of all blocks anew, where there is room for them: whenever a kernel has
        moved. For batches that are read from disk, only the last one is kept."""
        numbers, on_disk = 0, getattr(self.batches, "on_disk", False)
        for batch in () if on_disk else self.batches:
            for block, rows, mask in zip(self.posterior.blocks, batch.rows, batch.masks, strict=True):
                numbers += block.conditional_size(mask, 0 if rows is None else rows.shape[-1])
        with torch.no_grad():
            self.prior_factors = [block.prior_factor() for block in self.posterior.blocks]
            self._last = self._kept = None
            if not on_disk and numbers * 8 <= CACHE_BYTES:
                self._kept = [conditionals(self.posterior, b, self.prior_factors) for b in self.batches]

    def conditional(self, i: int) -> list[Any]:
        """The conditionals of batch i, one per block, under the kernels as they were at the last
        refresh."""
        if self._kept is not None:
            return self._kept[i]
        if self._last is None or self._last[0] != i:
            self._last = None  # the old one goes before there is a new one
            with torch.no_grad():
                self._last = i, conditionals(self.posterior, self.batches[i], self.prior_factors)
        return self._last[1]

    # -- the data ----------------------------------------------------------------------------------

    def numbers(self, i: int) -> Tensor:
        """(B,) the examples of batch i, numbered through all batches."""
        number = self.batches[i].number
        if number is None:
            return torch.arange(*self.starts[i : i + 2], device=self.posterior.like.device)
        return number

    def weight(self, i: int) -> Tensor:
        """(B,) how often each example of batch i counts."""
        batch = self.batches[i]
        ones = self.posterior.like.new_ones(len(batch))
        return ones if batch.weight is None else batch.weight.to(ones)

    @cached_property
    def sizes(self) -> Tensor:
        """(n,) how many examples each batch counts as."""
        on_disk, like = getattr(self.batches, "on_disk", False), self.posterior.like
        if on_disk:
            return torch.tensor(self.starts).diff().to(like)
        return like.new_tensor([float(self.weight(i).sum()) for i in range(len(self.batches))])

    def of_block(self, k: int) -> list[tuple[Any, Tensor, Tensor]]:
        """For every batch, the conditional of block k, the mask of its tuples, and the examples'
        weights."""
        return [(self.conditional(i)[k], b.masks[k], self.weight(i)) for i, b in enumerate(self.batches)]

    # -- the likelihood ----------------------------------------------------------------------------

    def log_prob(self, i: int, scores: Sequence[Tensor]) -> Tensor:
        """(S, K B) log p of batch i at the scores of every template, those of K components one after
        another; checked to be finite, and times how often each example counts."""
        batch, weight = self.batches[i], self.weight(i)
        y, mask, K = batch.y, batch.mask, scores[0].shape[1] // len(batch)
        if K > 1:
            y, mask, weight = y.repeat(K, 1), mask.repeat(K, 1), weight.repeat(K)
        log_prob: Callable[..., Tensor] = self.structure.log_prob
        with self.locating(i):
            return all_finite(log_prob(*scores, y, mask)) * weight

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
        draws and times how often each example counts. joint : whether between the nodes of an example
        too."""
        batch, node, structure = self.batches[i], self.posterior.node, self.structure
        curvature: Callable[..., Any] = structure.curvature if joint else structure.local_curvature
        extra = () if node.has_own_functions else (node.basis.to(scores[0]),)
        with self.locating(i):
            found = curvature(*scores, batch.y, batch.mask, *extra)
        weight = self.weight(i).to(found.node)
        return [weight.view(-1, *[1] * (bend.dim() - 1)) * bend for bend in (found.node, found.next)]

    @contextmanager
    def locating(self, i: int) -> Iterator[None]:
        """Errors of the likelihood on batch i name the sequence of the data they happened on."""
        try:
            yield
        except LikelihoodError as error:
            if error.sequence is None:
                raise
            batch = self.batches[i]
            b = error.sequence % len(batch)
            n, length = int(batch.index[b]), int(batch.mask[b].sum())
            place = f"{error.place}, training sequence {n + 1} ({length} tokens)"
            raise LikelihoodError(place, error.problem, error.remedy, n) from error

    # -- the expected log-likelihood ---------------------------------------------------------------

    def latents(self, i: int, *, move_kernel: bool = False) -> Latents:
        """q of the functions on batch i; differentiable in the kernel's parameters too if
        ``move_kernel``."""
        batch, q = self.batches[i], self.posterior
        return Latents.of(q, conditionals(q, batch) if move_kernel else self.conditional(i), batch.masks)

    def target(self, i: int, latent: Latents) -> Target:
        """log p of batch i as a function of standard normal numbers, components one after another."""
        batch, q, estimator = self.batches[i], self.posterior, self.estimator
        functions: Callable[..., Tensor] | None = PARTS.get(estimator.parts or "")

        def log_prob(noise: Noise) -> Tensor:
            scores = latent.place(noise)
            if not all(bool((x.detach().abs() < LARGEST_LATENT).all()) for x in scores):
                raise torch.linalg.LinAlgError(
                    "latent values are out of all bounds: the steps of the optimiser are too long"
                )
            return self.log_prob(i, scores).to(scores[0])

        def parts(noise: Noise) -> Tensor:
            assert functions is not None
            scores, K = latent.place(noise), q.n_components
            values = functions(*scores, batch.y.repeat(K, 1), batch.mask.repeat(K, 1))
            return values * self.weight(i).repeat(K).to(values)[:, None]

        ours = not isinstance(self.structure, BlackBox)
        single = ours and not estimator.needs_gradient and estimator.n_draws >= MANY_DRAWS
        return Target(
            log_prob,
            latent.groups,
            q.mixing.detach().repeat_interleave(len(batch)),
            None if functions is None else parts,
            torch.float32 if single else torch.float64,
        )

    def estimate(
        self, i: int, latent: Latents, generator: torch.Generator, memory: Sites | None = None
    ) -> Estimate:
        """E[log p] of batch i with slope and bend, in the posterior's precision. ``memory`` : what is known
        of it already; by default the running quadratic of earlier estimates."""
        uses, like = self.estimator.uses_memory, self.posterior.like
        known = (self.memory.get(i) if memory is None else memory) if uses else None
        about = None if known is None else latent.moments(known.sensitivity(latent))
        found = self.estimator(self.target(i, latent), generator, about)
        moments, variance = (m.map(lambda a: a.to(like)) for m in (found.moments, found.variance))
        if uses and memory is None:
            new = Sites.of(latent, latent.sensitivity(moments))
            self.memory[i] = new if known is None else known.towards(new, MEMORY_RATE)
        return Estimate(moments, variance, found.spread.to(like), found.evaluations)

    def bound(self, i: int, generator: torch.Generator, *, move_kernel: bool = False) -> Bound:
        """The bound estimated from batch i alone, differentiable in the posterior.

        Unbiased over batches that come equally often, however many examples each has: a batch stands for as
        many times itself as there are batches."""
        latent = self.latents(i, move_kernel=move_kernel)
        found, n = self.estimate(i, latent, generator), len(self.batches)
        return evidence_lower_bound(self.posterior, latent, found, scale=n, entropy=self.entropy)

    def fresh_bound(self, n_draws: int, generator: torch.Generator) -> float:
        """The bound on draws that nothing was fitted to: unbiased, so in expectation at most the
        optimum."""
        q, half = self.posterior, max(1, n_draws // 2)
        total = q.like.new_zeros(())
        with torch.no_grad():
            if q.n_components > 1:
                for i in range(len(self.batches)):
                    target = self.target(i, self.latents(i))
                    shapes = [group.shape(half) for group in target.groups]
                    noise = [torch.randn(s, generator=generator, dtype=q.like.dtype) for s in shapes]
                    mirrored = tuple(torch.cat([eps, -eps]).to(q.like) for eps in noise)
                    total += target.log_prob(mirrored).mean(0) @ target.weight
            else:
                noise_of = self.fixed_noise(half, generator)
                for i in range(len(self.batches)):
                    total += self.log_prob(i, self.drawn_scores(i, noise_of)).mean(0).sum()
            if self.together.size > 1:
                (total,) = self.together.sum(total)
            return float(lower_bound(total, q, self.entropy))

    def fixed_noise(self, half: int, generator: torch.Generator) -> list[Any]:
        """Random numbers of 2 x half draws, mirrored, one entry per block."""
        return [
            block.fixed_noise(half, [batch.masks[k] for batch in self.batches], generator)
            for k, block in enumerate(self.posterior.blocks)
        ]

    def drawn_scores(self, i: int, noise: Sequence[Any]) -> list[Tensor]:
        """The scores of every template on batch i at the draws that ``fixed_noise`` stands for."""
        parts, numbers = (
            zip(self.posterior.blocks, self.conditional(i), noise, strict=True),
            self.numbers(i),
        )
        return [b.scores(b.scale * b.drawn_functions(here, eps, i, numbers)) for b, here, eps in parts]

    # -- scales of the prior -----------------------------------------------------------------------

    def learn_prior(self, learn: LearnScales, slopes: Sequence[Slopes] | None = None) -> list[Tensor]:
        """One step for the scales of every block's prior, at the posterior as it is, which should be close
        to the best one under them. Returns by how much the variance of each function has grown, (R,) per
        block."""
        grown = []
        with torch.no_grad():
            for k, block in enumerate(self.posterior.blocks):
                seen = self.seen(k, slopes[k]) if slopes and slopes[k].mean else []
                if learn == "all":
                    grown.append(block.learn_scales(seen, self.prior_factors[k]))
                else:
                    grown.append(block.learn_amplitude(seen))
            self.refresh()
            self.memory.clear()
        return grown

    def seen(self, k: int, slopes: Slopes) -> list[Seen]:
        """What a round found of block k, batch by batch."""
        parts: Any = enumerate(zip(self.batches, slopes.mean, slopes.bend, strict=True))
        return [Seen(self.conditional(i)[k], b.rows[k], b.masks[k], *at) for i, (b, *at) in parts]


def open_low_rank(problem: Problem) -> None:
    """Narrows some directions of low-rank posteriors a little, so that gradients see them."""
    for k, block in enumerate(problem.posterior.blocks):
        block.open_directions(problem.of_block(k))


def fit_tables(q: Posterior) -> None:
    """Moves the scale of every table towards where the bound is largest."""
    for block in q.blocks:
        if block.shared:
            block.fit_amplitude()


def hyper_parameters(q: Posterior, learn: LearnScales) -> list[nn.Parameter]:
    """Those that ``learn`` stands for; the kernels' are made to take gradients."""
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
        raise InputError(
            "learn_scales",
            f"{name!r} inference cannot move the kernel, which 'all' asks for",
            "use inference='adam' or 'paper-batch', or another learn_scales",
        )


@dataclass(frozen=True)
class StepInfo:
    """What one step did. ``elbo`` is the bound on the draws the step used (stochastic optimisers: its mean
    over recent steps); ``evaluations`` counts examples times draws whose likelihood was computed;
    ``finished`` ends the loop, and ``converged`` says whether that was by agreement or by hitting a
    limit."""

    iteration: int
    elbo: float
    evaluations: int
    finished: bool = False
    converged: bool = False


class Optimizer(Protocol):
    """Steps that return state and diagnostics; the parameters themselves live in the posterior."""

    @property
    def name(self) -> str: ...

    def start(self, problem: Problem, generator: torch.Generator) -> Any: ...

    def step(self, problem: Problem, state: Any) -> tuple[Any, StepInfo]: ...
