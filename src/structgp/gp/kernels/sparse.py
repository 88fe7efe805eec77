"""Kernels on sparse rows: linear (cosine) and RBF, without ever making a dense N x D matrix.

A sparse row of at most A active features is stored as A pairs (feature id, value), side by side;
unused pairs are (-1, 0), so a row may be made wider at will. See :func:`pack`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from torch import Tensor

_ROWS_AT_ONCE = 512


def pack(ids: Tensor, values: Tensor) -> Tensor:
    """(N, A) ids and (N, A) values -> (N, 2A) packed rows."""
    return torch.stack([ids.to(values.dtype), values], -1).flatten(-2)


def unpack(x: Tensor) -> tuple[Tensor, Tensor]:
    """(..., 2A) packed rows -> (..., A) ids and (..., A) values."""
    return x[..., 0::2], x[..., 1::2]


def inner_product(x1: Tensor, x2: Tensor) -> Tensor:
    """(..., N, M) inner products of packed sparse rows.

    For two matrices, sparse-dense products with some rows of x2 at a time: O(N A M) time and, besides
    the result, the memory of those rows spread out over the features that occur in them. Batches
    (the T x T blocks of sequences) are taken one by one, both sides spread out over the features of the
    sequence.
    """
    if x1.dim() == 2 and x2.dim() == 2:
        return torch.cat([_matrix_product(x1, rows) for rows in x2.split(_ROWS_AT_ONCE)], 1)
    shape = np.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])  # torch's version imports sympy
    left, right = (x.expand(*shape, *x.shape[-2:]).flatten(0, -3) for x in (x1, x2))
    blocks = [_small_product(a, b) for a, b in zip(left, right, strict=True)]
    return torch.stack(blocks).reshape(*shape, x1.shape[-2], x2.shape[-2])


def _small_product(x1: Tensor, x2: Tensor) -> Tensor:
    """(N, M) inner products, through dense (N, F) and (M, F) matrices of the F features that occur."""
    ids = [unpack(x)[0].contiguous() for x in (x1, x2)]
    features = torch.unique(torch.cat([i.flatten() for i in ids]))
    left, right = (_spread_out(i, unpack(x)[1], features) for i, x in zip(ids, (x1, x2), strict=True))
    return left @ right.T


def _spread_out(ids: Tensor, values: Tensor, features: Tensor) -> Tensor:
    """(N, F) dense matrix from (N, A) ids, all of which are among the (F,) sorted features."""
    row = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
    place = row, torch.searchsorted(features, ids)
    dense = values.new_zeros((len(ids), len(features)))
    return dense.index_put(place, torch.where(ids >= 0, values, 0), accumulate=True)


def _matrix_product(x1: Tensor, x2: Tensor) -> Tensor:
    ids1, values1 = unpack(x1)
    ids2, values2 = unpack(x2)
    features = torch.unique(ids2)
    features = features[features >= 0]
    if features.numel() == 0:
        return x1.new_zeros((x1.shape[0], x2.shape[0]))
    left = _as_sparse(ids1, values1, features)
    right = _as_sparse(ids2, values2, features).to_dense()
    return torch.sparse.mm(left, right.T)


def _as_sparse(ids: Tensor, values: Tensor, features: Tensor) -> Tensor:
    column = torch.searchsorted(features, ids.contiguous()).clamp(max=features.numel() - 1)
    known = features[column] == ids
    row = torch.arange(ids.shape[0], device=ids.device)[:, None].expand_as(ids)
    index = torch.stack([row[known], column[known]])
    size = (ids.shape[0], features.numel())
    return torch.sparse_coo_tensor(index, values[known], size, check_invariants=False)


class SparseLinearKernel(Kernel):
    """k = <x, z> / (|x| |z|): the linear kernel, normalised so that k(x, x) = 1.

    A row without active features has k(x, .) = 0: the model knows nothing about it. With
    ``normalize=False`` it is the plain inner product, the kernel of a linear CRF.
    """

    has_lengthscale = False

    def __init__(self, normalize: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.normalize = normalize

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **_: Any
    ) -> Tensor:
        if last_dim_is_batch:
            raise NotImplementedError("SparseLinearKernel has no last_dim_is_batch form")
        if self.normalize:
            x1, x2 = _unit(x1), _unit(x2)
        return row_products(x1, x2) if diag else inner_product(x1, x2)


class SparseRBFKernel(Kernel):
    """k = exp(-|x - z|^2 / (2 l^2)) on sparse rows, with GPyTorch's ``lengthscale``."""

    has_lengthscale = True

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **_: Any
    ) -> Tensor:
        if last_dim_is_batch:
            raise NotImplementedError("SparseRBFKernel has no last_dim_is_batch form")
        norm1, norm2 = _square_norm(x1), _square_norm(x2)
        if diag:
            square = norm1 + norm2 - 2 * row_products(x1, x2)
            length = self.lengthscale.squeeze(-1)
        else:
            square = norm1[..., :, None] + norm2[..., None, :] - 2 * inner_product(x1, x2)
            length = self.lengthscale
        return torch.exp(-0.5 * square.clamp(min=0) / length.square())


def _square_norm(x: Tensor) -> Tensor:
    return unpack(x)[1].square().sum(-1)


def _unit(x: Tensor) -> Tensor:
    ids, values = unpack(x)
    norm = values.square().sum(-1, keepdim=True).sqrt()
    return pack(ids, values / torch.where(norm > 0, norm, 1))


def row_products(x1: Tensor, x2: Tensor) -> Tensor:
    """(..., N) inner products of corresponding packed rows. Cost O(N A^2)."""
    (ids1, values1), (ids2, values2) = unpack(x1), unpack(x2)
    same = (ids1[..., :, None] == ids2[..., None, :]) & (ids1[..., :, None] >= 0)
    return (same * values1[..., :, None] * values2[..., None, :]).sum((-1, -2))
