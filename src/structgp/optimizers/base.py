"""What every optimiser is given and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from structgp.data.batch import Batch
from structgp.gp import Conditional, Noise, Posterior
from structgp.objective import Bound, evidence_lower_bound
from structgp.structures import Structure


@dataclass(frozen=True)
class Problem:
    """All the training data, against which a posterior is fitted.

    ``conditional(i)`` is p(f | u) on batch i; ``n_sequences`` counts all sequences.
    """

    posterior: Posterior
    structure: Structure
    batches: Sequence[Batch]
    conditional: Callable[[int], Conditional]

    @property
    def n_sequences(self) -> int:
        return sum(len(batch) for batch in self.batches)

    def bound(self, i: int, n_draws: int, generator: torch.Generator) -> Bound:
        """The bound estimated from batch i alone, differentiable in the posterior.

        Unbiased over batches that come equally often, however many sequences each has: a batch
        stands for as many times itself as there are batches.
        """
        batch, q = self.batches[i], self.posterior
        B, T = batch.mask.shape
        noise = Noise.draw(
            n_draws, B, T, q.n_labels, q.n_inducing, generator=generator, dtype=q.m.dtype
        )
        return evidence_lower_bound(
            q,
            self.structure.log_prob,
            self.conditional(i),
            batch.y,
            batch.mask,
            noise,
            scale=len(self.batches),
        )

    def fresh_bound(self, n_draws: int, generator: torch.Generator) -> float:
        """The bound on draws that nothing was fitted to: unbiased, so in expectation at most the
        optimum."""
        with torch.no_grad():
            bounds = [self.bound(i, n_draws, generator) for i in range(len(self.batches))]
        return sum(float(b.elbo) for b in bounds) / len(bounds)


@dataclass(frozen=True)
class StepInfo:
    """What one step did. ``elbo`` is the bound on the draws the step used (Adam: its mean over recent
    steps); ``evaluations`` counts
    sequences times draws whose likelihood was computed; ``finished`` ends the loop, and
    ``converged`` says whether that was by agreement or by hitting a limit."""

    iteration: int
    elbo: float
    evaluations: int
    finished: bool = False
    converged: bool = False


class Optimizer(Protocol):
    """Steps that return state and diagnostics; the parameters themselves live in the posterior."""

    name: str

    def start(self, problem: Problem, generator: torch.Generator) -> Any: ...

    def step(self, problem: Problem, state: Any) -> tuple[Any, StepInfo]: ...
