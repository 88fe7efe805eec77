"""The sparse feature matrix of a batch: its products with weights, and draws of weights.

Letters as in ``gp.block``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from structgp.gp.kernels import ActiveFeatures
from structgp.gp.kernels.sparse import inner_product, pack
from structgp.gp.token_moments import compiled_moments

NOISE_ROWS, NOISE_NUMBERS = 1 << 13, 1 << 25
"""Most rows of a table of noise, and most numbers in it (256 MB): it gets fewer rows where it would hold
more. Two features of one tuple share a row, and with it their noise, with a probability of one in the
number of rows."""

WORTH_COMPILING = 20_000
"""Number of multiplications from which compiled loops are used: tiny problems never wait for numba to
start."""


class SparseRows:
    """The sparse matrix X (N, M) of the values of M features in N rows, for products from both sides: by
    SciPy on the host, by torch on the device.

    ``times`` : X weights, (N, R) from (M, R). ``transposed_times`` : X^T values, (M, R) from (N, R).
    ``squares_times`` : like ``transposed_times``, with the entries of X squared."""

    def __init__(self, x: scipy.sparse.csr_array, device: torch.device) -> None:
        self.matrix, self.shape, self._device = x, x.shape, device
        self.times = _multiplier(x, device)

    @cached_property
    def transposed_times(self) -> Callable[[Tensor], Tensor]:
        return _multiplier(self.matrix.T.tocsr(), self._device)

    @cached_property
    def squares_times(self) -> Callable[[Tensor], Tensor]:
        if bool((self.matrix.data == 1).all()):
            return self.transposed_times
        return _multiplier(self.matrix.multiply(self.matrix).T.tocsr(), self._device)

    @cached_property
    def single(self) -> SparseRows:
        """The same in single precision."""
        x = self.matrix  # its index arrays are shared
        entries = x.data.astype(np.float32), x.indices, x.indptr
        return SparseRows(scipy.sparse.csr_array(entries, shape=x.shape, copy=False), self._device)


def _multiplier(x: scipy.sparse.csr_array, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The function that maps B to X B."""
    if device.type == "cpu":
        return lambda b: torch.from_numpy(x @ b.numpy())
    bounds, places, values = (torch.from_numpy(a) for a in (x.indptr, x.indices, x.data))
    with warnings.catch_warnings():
        # torch warns that such tensors are in beta state and not checked: these come from SciPy.
        warnings.simplefilter("ignore", UserWarning)
        there = torch.sparse_csr_tensor(
            bounds, places, values, size=x.shape, device=device, check_invariants=False
        )
    return lambda b: there @ b


@dataclass(frozen=True)
class WeightConditional:
    """The functions h of a batch given the weights: h = X beta, plus the weights of features never seen.

    features : those of (B, T) rows, value 0 at padding. prior_sd : (M,)."""

    features: ActiveFeatures
    prior_sd: Tensor

    @cached_property
    def rows(self) -> SparseRows:
        place, value = self.features.place.flatten(0, 1), self.features.value.flatten(0, 1)
        there = (place >= 0) & (value != 0)
        bounds = np.concatenate([[0], np.cumsum(there.sum(1).cpu().numpy())])
        shape = len(place), len(self.prior_sd)
        kind = np.int32 if max(*shape, bounds[-1]) < 1 << 31 else np.int64  # half the memory and traffic
        entries = value[there].cpu().numpy(), place[there].cpu().numpy().astype(kind), bounds.astype(kind)
        return SparseRows(scipy.sparse.csr_array(entries, shape=shape), value.device)

    @cached_property
    def compact(self) -> tuple[Tensor, WeightConditional]:
        """(F,) sorted indices of the weights that occur in the batch, and the same conditional with only
        these."""
        found, local = torch.unique(self.features.place, return_inverse=True)
        unknown = int((found < 0).sum())  # -1 comes first, where there is any
        index = found[unknown:]
        features = replace(self.features, place=local - unknown)
        return index, replace(self, features=features, prior_sd=self.prior_sd[index])

    def under(self, prior_sd: Tensor) -> WeightConditional:
        """The same after the kernel has moved. Only the prior of unknown features is not updated; training
        data have none."""
        found = replace(self, prior_sd=prior_sd)
        known = vars(self)
        if "rows" in known:
            vars(found)["rows"] = self.rows
        if "compact" in known:
            index, here = self.compact
            vars(found)["compact"] = index, here.under(prior_sd[index])
        return found

    def times(self, m: Tensor) -> Tensor:
        """(B, T, R) A m for whitened weights m (R, M)."""
        flat = self.rows.times((self.prior_sd * m).T.contiguous())
        return flat.unflatten(0, self.features.value.shape[:2])

    def transposed_times(self, values: Tensor) -> Tensor:
        """(R, M) A^T values, from (B, T, R)."""
        return self.prior_sd * self.rows.transposed_times(values.flatten(0, 1)).T

    def squares_times(self, values: Tensor) -> Tensor:
        """(R, M) the same with the entries of A squared: the precision that each weight gets from the
        precisions (B, T, R), or (B, T, *labels), of single tuples."""
        return self.prior_sd.square() * self.rows.squares_times(values.flatten(2).flatten(0, 1)).T

    def spread(self, sd: Tensor, table: Tensor, keys: Tensor | None = None) -> Tensor:
        """(2 n, B, T, R) draws of h around its mean, joint over tuples: a feature has one deviation for
        each draw and function, wherever it occurs. The second n draws mirror the first.

        sd : (R, M) standard deviations of the whitened weights, of either sign. table : (rows, R, n)
        standard normal numbers. keys : (B,) numbers that give each example weights of its own; None for the
        same weights in all of them. Cost O(n B T A R).
        """
        found, row = self.features, _row(self.features.name, keys, len(table))
        deviation = torch.cat([(self.prior_sd * sd.abs()).T, sd.new_zeros((1, len(sd)))])  # (M + 1, R)
        loops = compiled_moments() if row.numel() * table[0].numel() >= WORTH_COMPILING else None
        if loops is not None and table.device.type == "cpu" and not deviation.requires_grad:
            total = deviation.new_zeros((*row.shape[:-1], *table.shape[1:]))
            given = (found.place, found.value, found.unseen.expand_as(found.value), row)
            arrays = (x.flatten(0, 1).contiguous().numpy() for x in given)
            loops.add_draws(*arrays, deviation.numpy(), table.numpy(), total.flatten(0, 1).numpy())
        else:
            total = self._drawn(deviation, table, row)
        half = total.permute(3, 0, 1, 2)
        return torch.cat([half, -half])

    def _drawn(self, deviation: Tensor, table: Tensor, row: Tensor) -> Tensor:
        """(B, T, R, n) the half of ``spread`` that is not mirrored, by torch operations, feature by
        feature. row : (B, T, A) rows of the table."""
        found, total = self.features, None
        for a in range(found.place.shape[-1]):
            place = found.place[..., a]
            own = deviation[place]  # place -1 is the last row, of zeros
            own = own + (place < 0)[..., None] * found.unseen[..., a, None].sqrt()
            own = own * found.value[..., a, None]
            part = own[..., None] * table[row[..., a]]
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def mean(self, m: Tensor) -> Tensor:
        """(B, T, R) mean of h for whitened weights with means m (R, M), differentiable in m. Cost
        O(B T A R)."""
        found = self.features
        place = found.place.clamp(min=0)
        value = found.value * self.prior_sd[place] * (found.place >= 0)
        return (value[..., None] * m[..., place].permute(1, 2, 3, 0)).sum(-2)

    def covariance(self, sd: Tensor) -> Tensor:
        """(B, R, T, T) covariance of h for whitened weights with standard deviations sd (R, M),
        differentiable in sd. Cost O(B R T^2 F) for F features in an example."""
        found = self.features
        place = found.place.clamp(min=0)
        known = self.prior_sd[place] * sd[..., place]  # (R, B, T, A)
        deviation = torch.where(found.place >= 0, known, found.unseen.sqrt())
        packed = [pack(found.name, d) for d in found.value * deviation]
        return torch.stack([inner_product(p, p) for p in packed], 1)


class OneRow:
    """The 1 x 1 matrix (1), in place of the feature matrix of a batch."""

    def times(self, values: Tensor) -> Tensor:
        return values

    transposed_times = squares_times = times

    @property
    def single(self) -> OneRow:
        return self


@dataclass(frozen=True)
class Constant:
    """The counterpart of ``WeightConditional`` for a table, whose scores (P,) are its weights (P, 1)
    themselves, whatever the batch."""

    table: Any
    rows = OneRow()

    @property
    def prior_sd(self) -> Tensor:
        """(1,) prior standard deviation under the table's current amplitude."""
        return self.table.prior_sds()

    @property
    def compact(self) -> tuple[Tensor, Constant]:
        return torch.zeros(1, dtype=torch.int64, device=self.table.m.device), self

    def under(self, prior_sd: Tensor) -> Constant:
        return self

    def times(self, m: Tensor) -> Tensor:
        return m[:, 0]

    def transposed_times(self, values: Tensor) -> Tensor:
        return values[:, None]

    def squares_times(self, values: Tensor) -> Tensor:
        """(P, 1) sums over examples, from precisions (B, *labels) summed over each example's tuples."""
        return values.sum(0).reshape(-1, 1)

    def spread(self, sd: Tensor, noise: Tensor, keys: Tensor | None = None) -> Tensor:
        """(S, P) draws around the mean, from noise (S, P)."""
        return sd[:, 0] * noise


def _row(name: Tensor, keys: Tensor | None, rows: int) -> Tensor:
    """The row of the table of noise for each feature (B, ...), hashed by the finaliser of splitmix64.
    rows : number of rows, a power of 2."""
    z = name if keys is None else name + keys.view(-1, *[1] * (name.dim() - 1)) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (z ^ ((z >> 31) & ((1 << 33) - 1))) & (rows - 1)


def noise_table(n_functions: int, n: int, generator: torch.Generator) -> Tensor:
    """(rows, R, n) standard normal numbers. They are drawn in single precision, which takes a sixth of the
    time."""
    room = max(256, NOISE_NUMBERS // max(1, n_functions * n))
    rows = min(NOISE_ROWS, 1 << (room.bit_length() - 1))
    return torch.randn(rows, n_functions, n, generator=generator, dtype=torch.float32).double()
