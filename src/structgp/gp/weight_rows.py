"""The features of a batch in weight space: products with a sparse matrix, and draws of weights.

Letters as in ``gp.block``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from structgp.gp.kernels import ActiveFeatures
from structgp.gp.kernels.sparse import inner_product, pack

NOISE_ROWS, NOISE_NUMBERS = 1 << 13, 1 << 25
"""Rows of a table of noise, fewer where it would hold more numbers than the second figure (256 MB). Two
features of one tuple share a row, and with it their noise, once in so many cases."""


class SparseRows:
    """X (N, M), what N rows hold of each of M features, to be multiplied with from both sides: by SciPy
    on the host, by torch on the device that its entries came from."""

    def __init__(self, place: Tensor, value: Tensor, n_weights: int) -> None:
        """place, value : (N, A); negative places are left out."""
        there = (place >= 0) & (value != 0)
        counts = there.sum(1).cpu().numpy()
        bounds = np.concatenate([[0], np.cumsum(counts)])
        entries = value[there].cpu().numpy(), place[there].cpu().numpy(), bounds
        self._set(scipy.sparse.csr_array(entries, shape=(len(place), n_weights)), value.device)

    def _set(self, x: scipy.sparse.csr_array, device: torch.device) -> None:
        self._x, self._device, xt = x, device, x.T.tocsr()
        self._by = [_multiplier(a, device) for a in (x, xt, xt.multiply(xt).tocsr())]

    @cached_property
    def single(self) -> SparseRows:
        """The same in single precision."""
        made = SparseRows.__new__(SparseRows)
        made._set(self._x.astype(np.float32), self._device)
        return made

    def times(self, weights: Tensor) -> Tensor:
        """X weights, (N, R) from (M, R)."""
        return self._by[0](weights)

    def transposed_times(self, values: Tensor) -> Tensor:
        """X^T values, (M, R) from (N, R)."""
        return self._by[1](values)

    def squares_times(self, values: Tensor) -> Tensor:
        """The same with the entries of X squared."""
        return self._by[2](values)


def _multiplier(x: scipy.sparse.csr_array, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Of a matrix X, what makes X B from B."""
    if device.type == "cpu":
        return lambda b: torch.from_numpy(x @ b.numpy())
    bounds, places, values = (torch.from_numpy(a) for a in (x.indptr, x.indices, x.data))
    there = torch.sparse_csr_tensor(bounds, places, values, size=x.shape, device=device)
    return lambda b: there @ b


@dataclass(frozen=True)
class WeightConditional:
    """h given the weights, on a batch: h = X beta, plus the weights of features never seen.

    features : of (B, T) rows, value 0 at padding. prior_sd : (M,). factor : on all of h.
    """

    features: ActiveFeatures
    prior_sd: Tensor
    factor: Tensor = field(default_factory=lambda: torch.ones(()))

    def scaled(self, factor: Tensor) -> WeightConditional:
        """The same under a kernel whose amplitude is ``factor`` squared times as large."""
        return replace(self, factor=self.factor * factor)

    @cached_property
    def rows(self) -> SparseRows:
        place, value = self.features.place, self.features.value
        return SparseRows(place.flatten(0, 1), value.flatten(0, 1), len(self.prior_sd))

    @cached_property
    def compact(self) -> tuple[Tensor, WeightConditional]:
        """(F,) the weights that occur in the batch, sorted, and the same of those alone."""
        found, local = torch.unique(self.features.place, return_inverse=True)
        unknown = int((found < 0).sum())  # -1 comes first, where there is any
        index = found[unknown:]
        features = replace(self.features, place=local - unknown)
        return index, replace(self, features=features, prior_sd=self.prior_sd[index])

    def times(self, m: Tensor) -> Tensor:
        """(B, T, R) A m of whitened weights (R, M)."""
        flat = self.rows.times((self.prior_sd * m).T.contiguous())
        return self.factor * flat.unflatten(0, self.features.value.shape[:2])

    def transposed_times(self, values: Tensor) -> Tensor:
        """(R, M) A^T values, of (B, T, R)."""
        return self.factor * self.prior_sd * self.rows.transposed_times(values.flatten(0, 1)).T

    def squares_times(self, values: Tensor) -> Tensor:
        """(R, M) the same with the entries of A squared: what position by position precisions (B, T, R)
        say of each weight."""
        scale = (self.factor * self.prior_sd).square()
        return scale * self.rows.squares_times(values.flatten(0, 1)).T

    def spread(self, sd: Tensor, table: Tensor, keys: Tensor | None = None) -> Tensor:
        """(2 n, B, T, R) draws of h around its mean, joint over tuples: a feature has one deviation for
        each draw and function, wherever it occurs. The second n mirror the first.

        sd : (R, M) of the whitened weights. table : (rows, R, n) standard normal numbers. keys :
        (B,) numbers that give each example weights of its own; None for the same in all of them.
        Cost O(n B T A R).
        """
        found, total = self.features, None
        deviation = torch.cat([(self.prior_sd * sd).T, sd.new_zeros((1, len(sd)))])  # (M + 1, R)
        for a in range(found.place.shape[-1]):
            place = found.place[..., a]
            own = deviation[place]  # place -1 is the last row, of zeros
            own = own + (place < 0)[..., None] * found.unseen[..., a, None].sqrt()
            own = own * found.value[..., a, None]
            part = own[..., None] * table[_row(found.name[..., a], keys, len(table))]
            total = part if total is None else total.add_(part)
        assert total is not None
        half = self.factor * total.permute(3, 0, 1, 2)
        return torch.cat([half, -half])

    def mean(self, m: Tensor) -> Tensor:
        """(B, T, R) of whitened weights m (R, M), differentiable in them. Cost O(B T A R)."""
        found = self.features
        place = found.place.clamp(min=0)
        value = self.factor * found.value * self.prior_sd[place] * (found.place >= 0)
        return (value[..., None] * m[..., place].permute(1, 2, 3, 0)).sum(-2)

    def covariance(self, sd: Tensor) -> Tensor:
        """(B, R, T, T) of whitened weights with standard deviations sd (R, M), differentiable in them.
        Cost O(B R T^2 F) for F features in an example."""
        found = self.features
        place = found.place.clamp(min=0)
        known = self.prior_sd[place] * sd[..., place]  # (R, B, T, A)
        deviation = torch.where(found.place >= 0, known, found.unseen.sqrt())
        deviation = self.factor * found.value * deviation
        packed = [pack(found.name.to(d.dtype), d) for d in deviation]
        return torch.stack([inner_product(p, p) for p in packed], 1)


def _row(name: Tensor, keys: Tensor | None, rows: int) -> Tensor:
    """(B, T) which row of the table of noise belongs to a feature: the finaliser of splitmix64. ``rows``
    is a power of 2."""
    z = name if keys is None else name + keys[:, None] * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (z ^ ((z >> 31) & ((1 << 33) - 1))) & (rows - 1)


def noise_table(n_functions: int, n: int, generator: torch.Generator) -> Tensor:
    """(rows, R, n) standard normal numbers."""
    room = max(256, NOISE_NUMBERS // max(1, n_functions * n))
    rows = min(NOISE_ROWS, 1 << (room.bit_length() - 1))
    return torch.randn(rows, n_functions, n, generator=generator, dtype=torch.float64)
