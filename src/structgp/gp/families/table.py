"""A table of scores that do not depend on features: one Gaussian number per joint label.

A priori the P scores are independent, N(0, amplitude); whitened, g = sqrt(amplitude) v with v ~ N(0, I)
and q(v) = N(m, S). It is the block of a template whose only feature is the constant 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from structgp.gp.block import Block, Entropy, Seen, kl_diagonal
from structgp.gp.divergences import kl_whitened
from structgp.gp.linalg import factor_of_inverse

PRIOR_SCORES = 4.0
"""Scores of size 1 that the prior of the amplitude is worth: it keeps the scale in place where there are
few scores. Not chosen on data."""

LEAST_PRECISION = 0.25
"""Under a likelihood that is not concave a posterior may be wider than its prior, but at most by
1 / sqrt(this)."""


class OneRow:
    """The matrix 1, in the place of a batch's features."""

    def times(self, values: Tensor) -> Tensor:
        return values

    transposed_times = squares_times = times

    @property
    def single(self) -> OneRow:
        return self


@dataclass(frozen=True)
class Constant:
    """The conditional of a table: the values are the functions."""

    scale: Tensor
    rows = OneRow()

    @property
    def prior_sd(self) -> Tensor:
        """(1,)."""
        return self.scale.reshape(1)

    def times(self, values: Tensor) -> Tensor:
        return self.scale * values

    def transposed_times(self, functions: Tensor) -> Tensor:
        return self.scale * functions


class Table(Block):
    """labels : (V, V) for transitions. sd : prior standard deviation of a score; 0 silences the block.
    full : whether the posterior has a full covariance (P, P), cost O(P^3), or variances alone.

    Parameters ``m`` (P,) and ``factor``, (P,) standard deviations or (P, P) lower triangular, whitened.
    """

    name = "table"
    shared = True

    def __init__(self, labels: Sequence[int], sd: float = 1.0, full: bool = False) -> None:
        super().__init__(labels, amplitude=float(sd) ** 2)
        P, dtype = self.n_scores, torch.float64
        self.m = nn.Parameter(torch.zeros(P, dtype=dtype))
        prior = torch.eye(P, dtype=dtype) if full else torch.ones(P, dtype=dtype)
        self.factor = nn.Parameter(prior)

    @property
    def n_values(self) -> int:
        return 1

    @property
    def is_full(self) -> bool:
        return self.factor.dim() == 2

    @property
    def takes_curvature(self) -> bool:
        return not self.is_full

    @property
    def spread(self) -> Tensor:
        return self.factor.tril() if self.is_full else self.factor

    @property
    def prior_sd(self) -> float:
        """Prior standard deviation of a score."""
        return float(self.scale.detach())

    @property
    def mean_scores(self) -> Tensor:
        """(*labels)."""
        return (self.scale * self.m).view(self.labels)

    @property
    def score_sds(self) -> Tensor:
        """(*labels) posterior standard deviation of each score."""
        root = self.spread.norm(dim=-1) if self.is_full else self.factor.abs()
        return (self.scale * root).view(self.labels)

    def constant_scores(self) -> tuple[Tensor, Tensor]:
        return self.mean_scores.detach(), self.score_sds.detach()

    def scores_at(self, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """(N, *labels) posterior mean and standard deviation of the scores of tuples with these
        features."""
        n = 1 if rows is None else len(rows)
        mean, sd = self.constant_scores()
        return mean.expand(n, *self.labels), sd.expand(n, *self.labels)

    def options(self) -> dict[str, Any]:
        return {"full": self.is_full}

    # -- what the posterior says of a batch --------------------------------------------------------

    def prior_factor(self) -> Tensor:
        return self.m.new_ones(())

    def conditional(self, rows: Tensor | None, mask: Tensor, factor: Tensor) -> Constant:
        return Constant(factor)

    def conditional_size(self, mask: Tensor, width: int) -> int:
        return 0

    def amplified(self, conditional: Constant) -> Constant:
        return Constant(self.scale)

    def gaussian(self, conditional: Constant) -> tuple[Tensor, Tensor]:
        """Mean (P,) and covariance (P, P), or variances (P,), of the scores."""
        root = self.scale * self.spread
        return self.scale * self.m, root @ root.mT if self.is_full else root.square()

    def kl(self, entropy: Entropy = "bhattacharyya") -> Tensor:
        """KL(q || p), exact (``klbin``; the paper prints V terms where there are V^2)."""
        return kl_whitened(self.m, self.spread) if self.is_full else kl_diagonal(self.m, self.factor)

    def effective_parameters(self) -> Tensor:
        return self.n_scores - self.spread.square().sum()

    def root_times(self, v: Tensor) -> Tensor:
        """(..., P) C v with C C^T = S."""
        return v @ self.spread.mT if self.is_full else self.spread * v

    def root_transposed_times(self, v: Tensor) -> Tensor:
        return v @ self.spread if self.is_full else self.spread * v

    def spread_parameters(self) -> list[nn.Parameter]:
        return [] if self.is_silent else [self.factor]

    def round_factor(self) -> None:
        with torch.no_grad():
            self.factor.copy_(self.spread.float())

    # -- draws -------------------------------------------------------------------------------------

    def fixed_noise(self, half: int, masks: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        """(2 half, P) standard normal numbers, the second half mirrors the first."""
        noise = torch.randn(half, self.n_scores, generator=generator, dtype=self.m.dtype).to(self.m)
        return torch.cat([noise, -noise])

    def offsets(self, conditional: Constant, noise: Tensor, i: int, numbers: Tensor) -> Tensor:
        """(S, P) what each draw adds to the mean, without the amplitude."""
        return self.root_times(noise)

    def draws(self, n: int, seed: int, generator: torch.Generator) -> TableDraws:
        """n draws, rounded up to mirrored ones."""
        shape = (n + 1) // 2, self.n_scores
        noise = torch.randn(shape, generator=generator, dtype=self.m.dtype).to(self.m)
        spread = self.root_times(noise)
        return TableDraws(self.scale * torch.cat([self.m + spread, self.m - spread]))

    def mean_draw(self) -> TableDraws:
        return TableDraws((self.scale * self.m)[None])

    # -- closed forms ------------------------------------------------------------------------------

    def curvature_sum(self) -> TableCurvature:
        return TableCurvature(self, torch.zeros_like(self.m))

    def solve_sites(
        self, conditionals: Sequence[Constant], linear: Sequence[Tensor], bends: Sequence[Tensor]
    ) -> bool:
        """The exact posterior for quadratics r^T g - g^T Lambda g / 2 with linear terms r (P,) and
        precisions Lambda (P,) or (P, P), one per batch; False, and nothing moved, if there is none."""
        if self.is_silent:
            return True
        prior = torch.eye(self.n_scores).to(self.m) if self.is_full else 1.0
        precision = prior + self.scale.square() * torch.stack(list(bends)).sum(0)
        total = self.scale * torch.stack(list(linear)).sum(0)
        if not self.is_full:
            if bool((precision <= LEAST_PRECISION).any()):
                return False
            self.m.copy_(total / precision)
            self.factor.copy_(precision.rsqrt())
            return True
        precision = 0.5 * (precision + precision.T)
        if int(torch.linalg.cholesky_ex(precision - LEAST_PRECISION * prior)[1]) > 0:
            return False
        lower = torch.linalg.cholesky(precision)
        self.m.copy_(torch.cholesky_solve(total[:, None], lower)[:, 0])
        self.factor.copy_(factor_of_inverse(precision))
        return True

    # -- sites of minibatches, in the scores themselves, as one weight per score (``inference.miniba

    @property
    def takes_minibatches(self) -> bool:
        return not self.is_full

    def prior_sds(self) -> Tensor:
        return self.scale.detach().clamp(min=1e-150).reshape(1)

    def compact(self, conditional: Constant) -> tuple[Tensor, Constant]:
        return torch.zeros(1, dtype=torch.int64, device=self.m.device), Constant(self.prior_sds())

    def knowledge(self) -> tuple[Tensor, Tensor]:
        """Precision and linear term (1, P) of what q says beyond its prior."""
        if self.is_silent:
            return torch.zeros_like(self.m)[None], torch.zeros_like(self.m)[None]
        s = self.factor.square()
        precision = (s.reciprocal() - 1).clamp(min=0) / self.scale.square()
        return precision[None].detach(), (self.m / (s * self.scale))[None].detach()

    def place(self, precision: Tensor, linear: Tensor, prior_sd: Tensor, index: Tensor) -> None:
        if self.is_silent:
            return
        total = 1 + self.scale.square() * precision[0].clamp(min=0)
        self.m.copy_(self.scale * linear[0] / total)
        self.factor.copy_(total.rsqrt())

    def visit_noise(self, half: int, generator: torch.Generator) -> Tensor:
        return self.m.new_empty(0, half)

    def visit_offsets(
        self, here: Constant, sd: Tensor, noise: Tensor, keys: Tensor, seed: int, single: bool
    ) -> Tensor:
        """(S, P), from numbers that only the seed decides."""
        generator = torch.Generator().manual_seed(seed)
        shape = noise.shape[-1], self.n_scores
        eps = torch.randn(shape, generator=generator, dtype=self.m.dtype).to(self.m)
        found = sd[0] * torch.cat([eps, -eps])
        return found.float() if single else found

    def fit_amplitude(self) -> None:
        """Moves the prior's scale towards where the bound is largest, the scores' posterior held. That is
        known in closed form: it is the root of the scores' mean second moment. Over-relaxed by as much as
        the posterior is still the prior: to that extent it follows the scale, and plain fixed-point
        iteration would creep."""
        if self.is_silent:
            return
        with torch.no_grad():
            prior = self.scale.square()
            square = self.spread.square()
            variance = prior * (square.sum(-1) if self.is_full else square)
            second = (prior * self.m.square() + variance).sum() + PRIOR_SCORES
            best = second / (self.n_scores + PRIOR_SCORES)
            untouched = (variance / prior).mean().clamp(max=1)
            growth = (1 + untouched) * (best / prior).log()
            self.log_amplitude.add_(growth)
            shrink = (-0.5 * growth).exp()
            self.m.mul_(shrink)
            self.factor.mul_(shrink)

    def learn_scales(self, seen: Sequence[Seen] = (), prior_factor: Tensor | None = None) -> Tensor:
        """The amplitude is learned after every round, by ``fit_amplitude``."""
        return self.m.new_ones(self.n_functions)

    def learn_amplitude(self, seen: Sequence[Seen] = ()) -> Tensor:
        return self.learn_scales()

    def curvature_bound(self, batches: Sequence[tuple[Constant, Tensor, Tensor]]) -> float:
        """Largest curvature of the bound in a whitened score, if it bends by at most 1/4 each time its
        tuple occurs. batches : conditional, mask (B, T) of the tuples, weight (B,) of the examples."""
        tuples = sum(float(weight @ mask.sum(-1).to(weight)) for _, mask, weight in batches)
        return 1 + 0.25 * float(self.scale.detach().square()) * tuples

    def project(self, conditional: Constant, slope: Tensor, bend: Tensor) -> tuple[Tensor, Tensor]:
        """A gradient in mean and covariance of the scores, as one in ``m`` and in S, without the
        amplitude."""
        return slope, bend


@dataclass(frozen=True)
class TableDraws:
    """functions : (S, P)."""

    functions: Tensor

    def at(self, block: Table, rows: Tensor | None, mask: Tensor) -> Tensor:
        return block.scores(self.functions)


@dataclass
class TableCurvature:
    """precision : (P,), what the data say of each score."""

    block: Table
    precision: Tensor

    def add(self, conditional: Constant, bend: Tensor) -> None:
        """bend : (B, *labels), of each score summed over an example's tuples."""
        self.precision += bend.sum(0).flatten()

    def tensors(self) -> list[Tensor]:
        return [self.precision]

    def finish(self) -> None:
        block = self.block
        block.factor.copy_((1 + block.scale.square() * self.precision).rsqrt())
