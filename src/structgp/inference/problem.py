"""What every optimiser is given and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from structgp.data.batch import Batch
from structgp.errors import LikelihoodError
from structgp.gp import Entropy, Posterior
from structgp.inference.bound import Bound, evidence_lower_bound, lower_bound
from structgp.inference.distributed import ALONE, Together
from structgp.inference.estimators import Estimate, Estimator, Noise, Pathwise, Target
from structgp.inference.latents import Latents
from structgp.inference.sites import Sites
from structgp.structures import PARTS, BlackBox, Structure, all_finite

CACHE_BYTES = 1 << 30
"""Up to here the conditionals of every batch are kept; beyond it they are computed again when needed."""

MANY_DRAWS = 1000
"""From so many on, values of our own structures are computed in single precision: their rounding is far
below the noise of the draws."""

LARGEST_LATENT = 1e9
"""Beyond it no likelihood is asked: the optimiser has lost its way."""

MEMORY_RATE = 0.3
"""How far the running quadratic of a batch moves to each new estimate."""


class Conditionals:
    """p(h | values) of every block on each batch, kept where there is room; of batches that are read from
    disk, the last one alone. ``refresh`` when the kernel has moved."""

    def __init__(self, posterior: Posterior, batches: Sequence[Batch]) -> None:
        self.posterior, self.batches = posterior, batches
        self.refresh()

    def refresh(self) -> None:
        with torch.no_grad():
            self.prior_factors = [block.prior_factor() for block in self.posterior.blocks]
            """One per block, under the kernel as it was at the last refresh."""
            self._kept = [self._compute(b) for b in self.batches] if self._room else None
            self._last: tuple[int, list[Any]] | None = None

    @property
    def _room(self) -> bool:
        if getattr(self.batches, "on_disk", False):
            return False
        numbers = 0
        for batch in self.batches:
            for block, rows, mask in zip(
                self.posterior.blocks, batch.rows, batch.masks, strict=True
            ):
                numbers += block.conditional_size(mask, 0 if rows is None else rows.shape[-1])
        return numbers * 8 <= CACHE_BYTES

    def _compute(self, batch: Batch) -> list[Any]:
        with torch.no_grad():
            return conditionals(self.posterior, batch, self.prior_factors)

    def __call__(self, i: int) -> list[Any]:
        """The conditionals of batch i, one per block."""
        if self._kept is not None:
            return self._kept[i]
        if self._last is None or self._last[0] != i:
            self._last = None  # the old one goes before there is a new one
            self._last = i, self._compute(self.batches[i])
        return self._last[1]


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
    posterior's. together : with which other processes; batches are the share of this one, and n_sequences
    counts those of all.
    """

    posterior: Posterior
    structure: Structure
    batches: Sequence[Batch]
    estimator: Estimator = field(default_factory=Pathwise)
    entropy: Entropy = "bhattacharyya"
    memory: dict[int, Sites] = field(default_factory=dict)
    together: Together = ALONE
    conditional: Conditionals = field(init=False)

    def __post_init__(self) -> None:
        self.conditional = Conditionals(self.posterior, self.batches)

    # -- the data ---------------------------------------------------------------------------------

    def numbers(self, i: int) -> Tensor:
        """(B,) the examples of batch i, numbered through all batches."""
        number = self.batches[i].number
        if number is not None:
            return number
        before, after = self._bounds[i : i + 2].tolist()
        return torch.arange(before, after, device=self.device)

    @cached_property
    def _bounds(self) -> Tensor:
        """(n + 1,) how many examples there are before each batch, and in all."""
        counts = getattr(self.batches, "counts", None)  # data on disk knows without being read
        counts = [len(batch) for batch in self.batches] if counts is None else counts
        return torch.tensor([0, *counts]).cumsum(0)

    @cached_property
    def sizes(self) -> Tensor:
        """(n,) how many examples each batch counts as."""
        if getattr(self.batches, "on_disk", False):
            return self._bounds.diff().to(self.posterior.like)
        totals = [float(self.weight(i).sum()) for i in range(len(self.batches))]
        return self.posterior.like.new_tensor(totals)

    def weight(self, i: int) -> Tensor:
        """(B,) how often each example of batch i counts."""
        batch = self.batches[i]
        ones = self.posterior.like.new_ones(len(batch))
        return ones if batch.weight is None else batch.weight.to(ones)

    @cached_property
    def n_sequences(self) -> int:
        (total,) = self.together.sum(self._bounds[-1].to(self.posterior.like))
        return int(total)

    @property
    def device(self) -> torch.device:
        return self.posterior.device

    def of_block(self, k: int) -> list[tuple[Any, Tensor, Tensor]]:
        """For every batch, the conditional of block k, the mask of its tuples, and the examples'
        weights."""
        return [
            (self.conditional(i)[k], batch.masks[k], self.weight(i))
            for i, batch in enumerate(self.batches)
        ]

    # -- the likelihood ---------------------------------------------------------------------------

    def log_prob(self, i: int, scores: Sequence[Tensor]) -> Tensor:
        """(S, B) log p of batch i at the scores of every template, checked to be finite; each as often as
        the example counts."""
        batch = self.batches[i]
        likelihood: Callable[..., Tensor] = self.structure.log_prob
        with self.locating(i):
            values = likelihood(*scores, batch.y, batch.mask)
            return all_finite(values) * self.weight(i)

    @contextmanager
    def locating(self, i: int) -> Iterator[None]:
        """Errors of the likelihood on batch i name the sequence of the data they happened on."""
        try:
            yield
        except LikelihoodError as error:
            raise self._located(error, self.batches[i]) from error

    def _located(self, error: LikelihoodError, batch: Batch) -> LikelihoodError:
        if error.sequence is None:
            return error
        b = error.sequence % len(batch)
        n, length = int(batch.index[b]), int(batch.mask[b].sum())
        place = f"{error.place}, training sequence {n + 1} ({length} tokens)"
        return LikelihoodError(place, error.problem, error.remedy, n)

    # -- the expected log-likelihood -------------------------------------------------------------

    def latents(self, i: int, *, move_kernel: bool = False) -> Latents:
        """q of the functions on batch i; differentiable in the kernel's parameters too if
        ``move_kernel``."""
        batch, q = self.batches[i], self.posterior
        here = conditionals(q, batch) if move_kernel else self.conditional(i)
        return Latents.of(q, here, batch.masks)

    def target(self, i: int, latent: Latents) -> Target:
        """log p of batch i as a function of standard normal numbers, components one after another."""
        batch, q = self.batches[i], self.posterior
        K, B = q.n_components, len(batch)
        y, mask = batch.y.repeat(K, 1), batch.mask.repeat(K, 1)
        counts = self.weight(i).repeat(K)
        likelihood: Callable[..., Tensor] = self.structure.log_prob
        functions: Callable[..., Tensor] | None = PARTS.get(self.estimator.parts or "")

        def log_prob(noise: Noise) -> Tensor:
            scores = latent.place(noise)
            if not all(bool(x.detach().abs().max() < LARGEST_LATENT) for x in scores):
                raise torch.linalg.LinAlgError(
                    "latent values are out of all bounds: the steps of the optimiser are too long"
                )
            with self.locating(i):
                values = likelihood(*scores, y, mask)
                return all_finite(values) * counts.to(values)

        def parts(noise: Noise) -> Tensor:
            assert functions is not None
            scores = latent.place(noise)
            return functions(*scores, y, mask) * counts.to(scores[0])[:, None]

        return Target(
            log_prob,
            latent.groups,
            q.mixing.detach().repeat_interleave(B),
            None if functions is None else parts,
            self._dtype,
        )

    @property
    def _dtype(self) -> torch.dtype:
        estimator, ours = self.estimator, not isinstance(self.structure, BlackBox)
        single = ours and not estimator.needs_gradient and estimator.n_draws >= MANY_DRAWS
        return torch.float32 if single else torch.float64

    def estimate(
        self, i: int, latent: Latents, generator: torch.Generator, memory: Sites | None = None
    ) -> Estimate:
        """E[log p] of batch i with slope and bend. ``memory`` : what is known of it already; by default the
        running quadratic of earlier estimates."""
        target = self.target(i, latent)
        uses = self.estimator.uses_memory
        known = (self.memory.get(i) if memory is None else memory) if uses else None
        about = None if known is None else latent.moments(known.sensitivity(latent))
        found = self._in_precision(self.estimator(target, generator, about))
        if uses and memory is None:
            new = Sites.of(latent, latent.sensitivity(found.moments))
            self.memory[i] = new if known is None else known.towards(new, MEMORY_RATE)
        return found

    def _in_precision(self, found: Estimate) -> Estimate:
        """The estimate in the precision of the posterior."""
        home = self.posterior.like
        moments, variance = (m.map(lambda a: a.to(home)) for m in (found.moments, found.variance))
        return Estimate(moments, variance, found.spread.to(home), found.evaluations)

    def bound(self, i: int, generator: torch.Generator, *, move_kernel: bool = False) -> Bound:
        """The bound estimated from batch i alone, differentiable in the posterior.

        Unbiased over batches that come equally often, however many examples each has: a batch stands for as
        many times itself as there are batches.
        """
        latent = self.latents(i, move_kernel=move_kernel)
        found = self.estimate(i, latent, generator)
        return evidence_lower_bound(
            self.posterior, latent, found, scale=len(self.batches), entropy=self.entropy
        )

    def fresh_bound(self, n_draws: int, generator: torch.Generator) -> float:
        """The bound on draws that nothing was fitted to: unbiased, so in expectation at most the
        optimum."""
        q, half = self.posterior, max(1, n_draws // 2)
        total = q.like.new_zeros(())
        with torch.no_grad():
            if q.n_components > 1:
                for i in range(len(self.batches)):
                    target = self.target(i, self.latents(i))
                    noise = [
                        torch.randn(g.shape(half), generator=generator, dtype=q.like.dtype).to(
                            q.like
                        )
                        for g in target.groups
                    ]
                    mirrored = tuple(torch.cat([eps, -eps]) for eps in noise)
                    total += target.log_prob(mirrored).mean(0) @ target.weight
            else:
                noise_of = self.fixed_noise(half, generator)
                for i in range(len(self.batches)):
                    total += self.log_prob(i, self.drawn_scores(i, noise_of)).mean(0).sum()
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
        numbers, found = self.numbers(i), []
        for block, conditional, eps in zip(
            self.posterior.blocks, self.conditional(i), noise, strict=True
        ):
            h = block.drawn_functions(conditional, eps, i, numbers)
            found.append(block.scores(block.scale * h))
        return found


def open_low_rank(problem: Problem) -> None:
    """Narrows some directions of low-rank posteriors a little, so that gradients see them."""
    for k, block in enumerate(problem.posterior.blocks):
        block.open_directions(problem.of_block(k))


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
