"""What every optimiser is given and what it gives back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from structgp.data.batch import Batch
from structgp.errors import LikelihoodError
from structgp.gp import (
    Conditional,
    Entropy,
    Posterior,
    WeightConditional,
    WeightPosterior,
    noise_table,
)
from structgp.inference.bound import Bound, Latents, evidence_lower_bound, latents
from structgp.inference.distributed import ALONE, Together
from structgp.inference.estimators import Estimate, Estimator, Pathwise, Target
from structgp.inference.sites import Sites
from structgp.structures import PARTS, BlackBox, Structure, all_finite

CACHE_BYTES = 1 << 30
"""Up to here p(f | u) of every batch is kept; beyond it is computed again when needed."""

MANY_DRAWS = 1000
"""From so many on, values of our own structures are computed in single precision: their rounding is
far below the noise of the draws."""

LARGEST_LATENT = 1e9
"""Beyond it no likelihood is asked: the optimiser has lost its way."""

MEMORY_RATE = 0.3
"""How far the running quadratic of a batch moves to each new estimate."""


class Conditionals:
    """p(f | u) of each batch, kept where there is room. ``refresh`` when the kernel has moved. Of batches
    that are read from disk, the last one alone is."""

    def __init__(self, posterior: Posterior, batches: Sequence[Batch]) -> None:
        self.posterior, self.batches = posterior, batches
        self.refresh()

    def refresh(self) -> None:
        q = self.posterior
        with torch.no_grad():
            self._prior_factor = q.prior_factor()
            self._kept = [self._compute(b) for b in self.batches] if self._room else None
            self._last: tuple[int, Conditional] | None = None

    @property
    def _room(self) -> bool:
        if getattr(self.batches, "on_disk", False):
            return False
        q = self.posterior
        numbers = sum(q.conditional_size(b.mask, b.x.shape[-1]) for b in self.batches)
        return numbers * 8 <= CACHE_BYTES

    def _compute(self, batch: Batch) -> Conditional:
        with torch.no_grad():
            return self.posterior.conditional(batch.x, batch.mask, self._prior_factor)

    @property
    def prior_factor(self) -> Tensor:
        """(M, M) L_zz under the kernel as it was at the last refresh."""
        return self._prior_factor

    def __call__(self, i: int) -> Conditional:
        if self._kept is not None:
            return self._kept[i]
        if self._last is None or self._last[0] != i:
            self._last = None  # the old one goes before there is a new one
            self._last = i, self._compute(self.batches[i])
        return self._last[1]


@dataclass
class Problem:
    """All the training data, against which a posterior is fitted.

    estimator : of the expected log-likelihood and its gradients. entropy : of a mixture, see
    ``Posterior.kl_inducing``. memory : the running quadratic of each batch, for estimators that use it.
    All of it is on one device, the posterior's. together : with which other processes; batches are the
    share of this one, and n_sequences counts those of all.
    """

    posterior: Posterior
    structure: Structure
    batches: Sequence[Batch]
    estimator: Estimator = field(default_factory=Pathwise)
    entropy: Entropy = "auto"
    memory: dict[int, Sites] = field(default_factory=dict)
    together: Together = ALONE
    conditional: Conditionals = field(init=False)

    def __post_init__(self) -> None:
        self.conditional = Conditionals(self.posterior, self.batches)

    def weights(self, i: int) -> WeightConditional:
        """``conditional(i)`` where the posterior is of weights."""
        here: Any = self.conditional(i)
        assert isinstance(here, WeightConditional)
        return here

    def numbers(self, i: int) -> Tensor:
        """(B,) the sequences of batch i, numbered through all batches."""
        number = self.batches[i].number
        if number is not None:
            return number
        before, after = self._bounds[i : i + 2].tolist()
        return torch.arange(before, after, device=self.device)

    @cached_property
    def _bounds(self) -> Tensor:
        """(n + 1,) how many sequences there are before each batch, and in all."""
        counts = getattr(self.batches, "counts", None)  # data on disk knows without being read
        counts = [len(batch) for batch in self.batches] if counts is None else counts
        return torch.tensor([0, *counts]).cumsum(0)

    @cached_property
    def sizes(self) -> Tensor:
        """(n,) how many sequences each batch counts as."""
        if getattr(self.batches, "on_disk", False):
            return self._bounds.diff().to(self.posterior.m)
        totals = [float(self.weight(i).sum()) for i in range(len(self.batches))]
        return self.posterior.m.new_tensor(totals)

    def weight(self, i: int) -> Tensor:
        """(B,) how often each sequence of batch i counts."""
        batch = self.batches[i]
        ones = self.posterior.m.new_ones(len(batch))
        return ones if batch.weight is None else batch.weight.to(ones)

    @cached_property
    def n_sequences(self) -> int:
        (total,) = self.together.sum(self._bounds[-1].to(self.posterior.m))
        return int(total)

    @property
    def device(self) -> torch.device:
        return self.posterior.m.device

    def latents(self, i: int, *, move_kernel: bool = False) -> Latents:
        """q(f) on batch i; differentiable in the kernel's parameters too if ``move_kernel``."""
        batch, q = self.batches[i], self.posterior
        here = q.conditional(batch.x, batch.mask) if move_kernel else self.conditional(i)
        return latents(q, here, batch.mask)

    def target(self, i: int, latent: Latents) -> Target:
        """log p of batch i as a function of standard normal numbers, components one after another."""
        batch, q = self.batches[i], self.posterior
        K, B = q.n_components, len(batch)
        y, mask = batch.y.repeat(K, 1), batch.mask.repeat(K, 1)
        counts = self.weight(i).repeat(K)

        def log_prob(unary: Tensor, pairwise: Tensor) -> Tensor:
            f, g = latent.place(unary, pairwise)
            if not all(bool(x.detach().abs().max() < LARGEST_LATENT) for x in (f, g)):
                raise torch.linalg.LinAlgError(
                    "latent values are out of all bounds: the steps of the optimiser are too long"
                )
            with self.locating(i):
                return all_finite(self.structure.log_prob(f, g, y, mask)) * counts.to(f)

        functions = PARTS.get(self.estimator.parts or "")

        def parts(unary: Tensor, pairwise: Tensor) -> Tensor:
            assert functions is not None
            f, g = latent.place(unary, pairwise)
            return functions(f, g, y, mask) * counts.to(f)[:, None]

        return Target(
            log_prob,
            mask,
            q.weights.detach().repeat_interleave(B),
            q.n_labels,
            q.pairs_are_full,
            None if functions is None else parts,
            self._dtype,
            q.n_functions,
        )

    @property
    def _dtype(self) -> torch.dtype:
        estimator, ours = self.estimator, not isinstance(self.structure, BlackBox)
        single = ours and not estimator.needs_gradient and estimator.n_draws >= MANY_DRAWS
        return torch.float32 if single else torch.float64

    def estimate(
        self, i: int, latent: Latents, generator: torch.Generator, memory: Sites | None = None
    ) -> Estimate:
        """E[log p] of batch i with slope and bend. ``memory`` : what is known of it already; by default
        the running quadratic of earlier estimates."""
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
        home = self.posterior.m
        return replace(
            found,
            moments=found.moments.map(lambda a: a.to(home)),
            variance=found.variance.map(lambda a: a.to(home)),
            spread=found.spread.to(home),
        )

    def bound(self, i: int, generator: torch.Generator, *, move_kernel: bool = False) -> Bound:
        """The bound estimated from batch i alone, differentiable in the posterior.

        Unbiased over batches that come equally often, however many sequences each has: a batch
        stands for as many times itself as there are batches.
        """
        latent = self.latents(i, move_kernel=move_kernel)
        found = self.estimate(i, latent, generator)
        return evidence_lower_bound(
            self.posterior, latent, found, scale=len(self.batches), entropy=self.entropy
        )

    def fresh_bound(self, n_draws: int, generator: torch.Generator) -> float:
        """The bound on draws that nothing was fitted to: unbiased, so in expectation at most the
        optimum."""
        q, total, half = self.posterior, 0.0, max(1, n_draws // 2)
        V, dtype = q.n_labels, q.m.dtype
        if isinstance(q, WeightPosterior) and q.n_components == 1:
            return self._fresh_weights_bound(q, half, generator)
        with torch.no_grad():
            for i in range(len(self.batches)):
                target = self.target(i, self.latents(i))
                shape = half, *target.mask.shape, q.n_functions
                unary = torch.randn(shape, generator=generator, dtype=dtype).to(self.device)
                pairs = torch.randn(half, V, V, generator=generator, dtype=dtype).to(self.device)
                mirrored = torch.cat([unary, -unary]), torch.cat([pairs, -pairs])
                total += float(target.log_prob(*mirrored).mean(0) @ target.weight)
            return total - float(q.kl_inducing(self.entropy)) - float(q.kl_pairwise())

    def _fresh_weights_bound(
        self, q: WeightPosterior, half: int, generator: torch.Generator
    ) -> float:
        """The same, with draws of weights in the place of joint ones of latent values."""
        V, total = q.n_labels, q.m.new_zeros(())
        with torch.no_grad():
            table = noise_table(q.n_functions, half, generator).to(self.device)
            pairs = torch.randn(half, V, V, generator=generator, dtype=q.m.dtype).to(q.m)
            g = q.pairwise().place(torch.cat([pairs, -pairs]))
            for i in range(len(self.batches)):
                index, own = self.weights(i).compact
                here = q.amplified(own)
                m, sd = q.m[0][:, index], q.factor[0][:, index].abs()
                h = here.times(m) + here.spread(sd, table, self.numbers(i))
                with self.locating(i):
                    total += self.log_prob(i, h @ q.basis.T, g).mean(0).sum()
            (total,) = self.together.sum(total)
            return float(total - q.kl_inducing(self.entropy) - q.kl_pairwise())

    def log_prob(self, i: int, f: Tensor, g: Tensor) -> Tensor:
        """(S, B) log p of batch i at f (S, B, T, V) and g (S, V, V), checked to be finite; each as often as
        the sequence counts."""
        batch = self.batches[i]
        return all_finite(self.structure.log_prob(f, g, batch.y, batch.mask)) * self.weight(i)

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


@dataclass(frozen=True)
class StepInfo:
    """What one step did. ``elbo`` is the bound on the draws the step used (stochastic optimisers: its
    mean over recent steps); ``evaluations`` counts sequences times draws whose likelihood was computed;
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
