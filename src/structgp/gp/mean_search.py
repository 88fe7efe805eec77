"""Coordinates in which optimisers look for the mean of a posterior: those in which its covariance is round.

``MeanSearch`` is for any family, ``SpreadSearch`` for values at inducing inputs. ``GroupedSearch`` is for
weights: the data cannot tell apart features that have the same values in all rows, as is the case for most
features that occur only once. The likelihood depends on the weights of such a group only through their sum,
weighted by the prior standard deviations, so the best means are in fixed proportions. A search over one
number per group finds the same means, with a fraction of the numbers. ``MixedSearch`` is for such weights
beside those of dense features.

Letters as in ``gp.block``; G groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from structgp.gp.linalg import each_times
from structgp.gp.spreads import Spread, root_times, root_transposed_times
from structgp.gp.weight_rows import SparseRows, WeightConditional


class MeanSearch:
    """Searches over x, where m = m_0 + C x: m_0 is the mean that the block had at ``begin``, and C C^T its
    covariance.

    gradient : that of the expected log-likelihood, in the values in which ``functions`` are linear, summed
    over the batches added since the last move."""

    gradient: Tensor

    def __init__(self, block: Any) -> None:
        self.block = block

    def begin(self, prior_factor: Tensor) -> int:
        """Starts from the current posterior. prior_factor : that of the current prior. Returns how many
        numbers x has."""
        self._began, self._scale = self.block.m.clone(), self.block.scale
        return self._began.numel()

    def move(self, x: Tensor) -> Tensor:
        """Moves to x. Returns the mean's part of the divergence."""
        m = self.block.m
        m.copy_(self._began + self.block.root_times(x.view_as(m)))
        self.gradient = torch.zeros_like(m)
        return 0.5 * m.square().sum()

    def functions(self, i: int, conditional: Any) -> Tensor:
        """The mean functions (B, T, R) on batch i, (P,) if shared, including the amplitude."""
        return self._scale * conditional.times(self.block.m)

    def add(self, i: int, conditional: Any, slope: Tensor) -> None:
        """Adds the derivatives of the expected log-likelihood in the functions of batch i, ``slope``."""
        self.gradient += self._scale * conditional.transposed_times(slope)

    def slope(self) -> Tensor:
        """Gradient in x of the divergence minus the expected log-likelihood."""
        return self.block.root_transposed_times(self.block.m - self.gradient).reshape(-1)

    def settle(self) -> None:
        """Gives the block the mean at which the search is now."""


class SpreadSearch(MeanSearch):
    """For values at inducing inputs: their covariances, which are fixed during a search, are built once."""

    _spread: Spread

    def begin(self, prior_factor: Tensor) -> int:
        self._spread = self.block.spread
        return super().begin(prior_factor)

    def move(self, x: Tensor) -> Tensor:
        m = self.block.m
        m.copy_(self._began + root_times(self._spread, x.view_as(m)))
        self.gradient = torch.zeros_like(m)
        return 0.5 * m.square().sum()

    def slope(self) -> Tensor:
        return root_transposed_times(self._spread, self.block.m - self.gradient).reshape(-1)

    def settle(self) -> None:
        del self._spread


class GroupedSearch(MeanSearch):
    """For ``Weights`` on the CPU. conditionals : one per batch. The rows of all batches form one matrix X
    (N, G), with one column per group."""

    def __init__(self, block: Any, conditionals: Sequence[WeightConditional]) -> None:
        super().__init__(block)
        self._shapes = [c.features.value.shape[:2] for c in conditionals]
        self._sizes = [B * T for B, T in self._shapes]
        self._group, self._rows = grouped([c.rows.matrix for c in conditionals])

    def begin(self, prior_factor: Tensor) -> int:
        group, block = self._group, self.block
        shape, self._scale = (self._rows.shape[1], block.n_functions), block.scale
        variance = prior_factor.square().clamp(min=1e-300)
        whole = variance.new_zeros(shape[0]).index_add(0, group, variance)
        self._share = prior_factor / whole[group]  # (M,) share of each member in its group, whitened
        self._root = whole.sqrt()[:, None]
        # The precisions that the data add to the members sum up to what they add to the group's weight.
        determined = (block.factor.T.square().reciprocal() - 1).clamp(min=0)
        self._sd = (1 + variance.new_zeros(shape).index_add(0, group, determined)).rsqrt()
        weight = variance.new_zeros(shape).index_add(0, group, (prior_factor * block.m).T)
        self._began = weight / self._root
        return self._began.numel()

    def move(self, x: Tensor) -> Tensor:
        self._m = torch.addcmul(self._began, self._sd, x.view_as(self._sd))
        self._functions = self._rows.times(self._root * self._m).mul_(self._scale).split(self._sizes)
        self._slopes: list[Tensor] = [torch.empty(0)] * len(self._sizes)
        return 0.5 * self._m.square().sum()

    def functions(self, i: int, conditional: Any) -> Tensor:
        return self._functions[i].unflatten(0, self._shapes[i])

    def add(self, i: int, conditional: Any, slope: Tensor) -> None:
        self._slopes[i] = slope.flatten(0, 1)

    def slope(self) -> Tensor:
        flat = self._slopes[0] if len(self._slopes) == 1 else torch.cat(self._slopes)
        grad = self._rows.transposed_times(flat)
        return torch.addcmul(self._m, grad, self._root, value=-float(self._scale)).mul_(self._sd).view(-1)

    def settle(self) -> None:
        self.block.m.copy_((self._share[:, None] * (self._root * self._m)[self._group]).T)


class LooseWeights:
    """The independent weights of a block that has dense weights too, in the form that ``GroupedSearch``
    expects of a block."""

    def __init__(self, block: Any) -> None:
        self.m, self.factor = block.m[:, : block.n_loose], block.factor
        self.n_functions, self.scale = block.n_functions, block.scale


class MixedSearch(MeanSearch):
    """For ``DenseWeights`` beside independent weights, on the CPU: x holds the independent weights in
    groups, then the dense ones as in ``MeanSearch``. conditionals : one per batch. gradient : in the dense
    weights only."""

    def __init__(self, block: Any, conditionals: Sequence[Any]) -> None:
        super().__init__(block)
        self._loose = GroupedSearch(LooseWeights(block), [c.loose for c in conditionals])

    def begin(self, prior_factor: Any) -> int:
        self._loose.block = LooseWeights(self.block)
        self._n_grouped = self._loose.begin(prior_factor[0])
        self._began, self._scale = self.block.m[:, self.block.n_loose :].clone(), self.block.scale
        return self._n_grouped + self._began.numel()

    def move(self, x: Tensor) -> Tensor:
        loose = self._loose.move(x[: self._n_grouped])
        self._m = self._began + each_times(self.block.root, x[self._n_grouped :].view_as(self._began))
        self.gradient = torch.zeros_like(self._m)
        return loose + 0.5 * self._m.square().sum()

    def functions(self, i: int, conditional: Any) -> Tensor:
        dense = self._scale * (conditional.values @ self._m.T)
        return dense.add_(self._loose.functions(i, conditional.loose))

    def add(self, i: int, conditional: Any, slope: Tensor) -> None:
        self._loose.add(i, conditional.loose, slope)
        self.gradient += self._scale * (slope.flatten(0, 1).T @ conditional.values.flatten(0, 1))

    def slope(self) -> Tensor:
        dense = each_times(self.block.root.mT, self._m - self.gradient)
        return torch.cat([self._loose.slope(), dense.reshape(-1)])

    def settle(self) -> None:
        self._loose.settle()
        self.block.m[:, self.block.n_loose :] = self._m


def grouped(matrices: Sequence[Any]) -> tuple[Tensor, SparseRows]:
    """(M,) the group of each column, and the rows of all matrices with only the first column of each group.
    Columns are compared by their products with two random vectors: equal columns have the same products to
    the last bit."""
    x = scipy.sparse.vstack(matrices, format="csr") if len(matrices) > 1 else matrices[0]
    random = np.random.default_rng(0).standard_normal((x.shape[0], 2))
    told = x.T.tocsr() @ random
    _, first, group = np.unique(told[:, 0] + 1j * told[:, 1], return_index=True, return_inverse=True)
    return torch.from_numpy(group), SparseRows(x.tocsc()[:, first].tocsr(), torch.device("cpu"))
