"""One batch at draws that are a mean plus fixed scores, for optimisers that move the mean alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from structgp.inference.problem import Problem

MOST_IN_VAIN = 2
"""Failures in a row after which compiled sums are no longer tried: labels that rules forbid stay forbidden,
and a search evaluates a batch dozens of times. Not chosen on data."""


class FixedBatch:
    """added : what each draw adds to the mean scores of every template, on batch i."""

    _in_vain = 0

    def __init__(self, problem: Problem, i: int, added: Sequence[Tensor]) -> None:
        self._blocks, batch = problem.posterior.blocks, problem.batches[i]
        self._weight, self._draws = problem.weights[i], None
        # Compiled loops take double precision; a GPU's kernels take both.
        self._kind = torch.float64 if added[0].device.type == "cpu" else added[0].dtype
        if not problem.structure.many_templates:
            given = [x.to(self._kind) for x in added]
            self._draws = problem.structure.fixed_draws(*given, batch.y, batch.mask, self._weight)

    def slopes(self, functions: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]] | None:
        """Like ``Problem.slopes``, at mean functions (B, T, R) of each block, (P,) if shared; None where
        the structure has no such compiled sums, or they fail at these scores."""
        if self._draws is None:
            return None
        found = self._draws.value_and_slopes(*self._scores(functions))
        self._in_vain = 0 if found is not None else self._in_vain + 1
        if found is None:
            self._draws = None if self._in_vain >= MOST_IN_VAIN else self._draws
            return None
        value, *slopes = found
        return torch.tensor(value, dtype=torch.float64), [
            block.pull_back(slope) for block, slope in zip(self._blocks, slopes, strict=True)
        ]

    def bends(self, functions: Sequence[Tensor]) -> list[Tensor] | None:
        """Like ``Problem.bends``, for each tuple by itself; None in the same cases as ``slopes``."""
        if self._draws is None:
            return None
        node = self._blocks[0]
        basis = None if node.has_own_functions else node.basis.to(self._kind)
        found = self._draws.variances(*self._scores(functions), basis)
        if found is None:
            return None
        return [self._weight.to(found[0]).view(-1, *[1] * (bend.dim() - 1)) * bend for bend in found]

    def _scores(self, functions: Sequence[Tensor]) -> list[Tensor]:
        """The mean scores of every template."""
        return [block.scores(h.to(self._kind)) for block, h in zip(self._blocks, functions, strict=True)]
