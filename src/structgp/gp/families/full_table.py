"""A table of scores with a full covariance, as the paper uses it for transitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from structgp.gp.block import LEAST_PRECISION, Entropy
from structgp.gp.divergences import kl_whitened
from structgp.gp.families.weights import Table
from structgp.gp.linalg import factor_of_inverse
from structgp.gp.weight_rows import Constant


class FullTable(Table):
    """Parameters ``m`` (P, 1) and ``factor`` (P, P) lower triangular, whitened. Cost O(P^3)."""

    name = "full table"
    takes_curvature = False
    takes_minibatches = False

    def __init__(self, labels: Sequence[int], sd: float = 1.0) -> None:
        super().__init__(labels, sd)
        self.factor = nn.Parameter(torch.eye(self.n_scores, dtype=torch.float64))

    @classmethod
    def size(
        cls, kernel: Any, inducing: Tensor | None, n_functions: int, options: Mapping[str, Any]
    ) -> int:
        return n_functions * (1 + n_functions)

    def conditional(self, rows: Tensor | None, mask: Tensor, factor: Tensor) -> Constant:
        return JointConstant(self)

    @property
    def spread(self) -> Tensor:
        """(P, P) lower triangular factor of the covariance of the scores, whitened."""
        return self.factor.tril()

    def gaussian(self, conditional: Constant) -> tuple[Tensor, Tensor]:
        """Mean (P,) and covariance (P, P) of the scores."""
        root = self.scale * self.spread
        return self.scale * self.m[:, 0], root @ root.mT

    def kl(self, entropy: Entropy = "bhattacharyya") -> Tensor:
        """KL(q || p), exact (``klbin``, where the paper prints V terms although there are V^2)."""
        return kl_whitened(self.m[:, 0], self.spread)

    def effective_parameters(self) -> Tensor:
        return self.n_scores - self.spread.square().sum()

    def constant_scores(self) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            sd = self.scale * self.spread.norm(dim=-1)
            return self.scores(self.scale * self.m[:, 0]), self.scores(sd)

    def solve_sites(
        self, conditionals: Sequence[Constant], linear: Sequence[Tensor], bends: Sequence[Tensor]
    ) -> bool:
        """Like ``Table.solve_sites``, with precisions Lambda (P, P)."""
        prior = torch.eye(self.n_scores).to(self.m)
        precision = prior + self.scale.square() * torch.stack(list(bends)).sum(0)
        precision = 0.5 * (precision + precision.T)
        if int(torch.linalg.cholesky_ex(precision - LEAST_PRECISION * prior)[1]) > 0:
            return False
        total = self.scale * torch.stack(list(linear)).sum(0)
        self.m.copy_(torch.cholesky_solve(total[:, None], torch.linalg.cholesky(precision)))
        self.factor.copy_(factor_of_inverse(precision))
        return True


@dataclass(frozen=True)
class JointConstant(Constant):
    """A table whose scores are correlated."""

    @property
    def compact(self) -> Any:
        return slice(None), self

    def spread(self, sd: Tensor, noise: Tensor, keys: Tensor | None = None) -> Tensor:
        """sd : (P, P) lower triangular."""
        return noise @ sd.tril().mT
