"""The evidence lower bound, in one place for every optimiser.

It is (``eq:elbo-sparse``)

    ELBO = E_q[ sum_n log p(y_n | scores of every template) ] - sum_b KL(q_b || p_b),

one block b of potentials per template. Optimisers differ in how they estimate the first term and in which
parameters they move; the terms are put together here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from structgp.gp import Entropy, Posterior
from structgp.inference.estimators import Estimate


@dataclass(frozen=True)
class Bound:
    """elbo : expected_log_prob less the divergence; both (), differentiable in the posterior. estimate :
    the estimate behind expected_log_prob."""

    elbo: Tensor
    expected_log_prob: Tensor
    estimate: Estimate


def lower_bound(
    expected: Tensor,
    posterior: Posterior,
    entropy: Entropy = "bhattacharyya",
    divergence: Tensor | None = None,
) -> Tensor:
    """() the bound from the expected log-likelihood of all data. ``divergence`` : that of the posterior
    from the prior, if it has been computed already."""
    return expected - (posterior.divergence(entropy) if divergence is None else divergence)


@dataclass
class Plateau:
    """Tells when a noisy bound has stopped rising, from the means of successive windows of values.

    window : number of values between two looks. tolerance : by how much a mean must exceed the best one
    before it."""

    window: int
    tolerance: float
    recent: list[float] = field(default_factory=list)
    best: float = -float("inf")
    mean: float = float("nan")

    def add(self, value: float) -> None:
        self.recent.append(value)
        self.mean = sum(self.recent) / len(self.recent)

    @property
    def is_full(self) -> bool:
        return len(self.recent) >= self.window

    def look(self) -> bool:
        """True if the bound has stalled since the last look; starts the next window."""
        stalled = self.mean - self.best < self.tolerance
        self.best = max(self.best, self.mean)
        self.recent = []
        return stalled
