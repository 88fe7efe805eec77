"""Mean and standard deviation of linear functions at single tokens, under independent weights.

Letters as in ``gp.block``; N tokens.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse
import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from structgp.gp.kernels import active_features


class TokenMoments:
    """means, variances : (M, R) of the weights, by feature. unseen : factor on the prior variance of the
    weight of a feature that was never seen. Both are kept in single precision, side by side: what a feature
    says is then read at once."""

    def __init__(self, kernel: Kernel, means: Tensor, variances: Tensor, unseen: float) -> None:
        self._kernel, self._unseen = kernel, unseen
        self._table = torch.cat([means, variances], 1).float().numpy()

    def at(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(N, R) each, of rows (N, W). Cost O(N A R) for A features of a row."""
        with torch.no_grad():
            found = active_features(self._kernel, torch.from_numpy(rows))
        place, value, R = found.place.numpy(), found.value.numpy(), self._table.shape[1] // 2
        new = (place < 0) & (value != 0)
        open_part = np.where(new, found.unseen.numpy() * value**2, 0).sum(1)
        there = (place >= 0) & (value != 0)
        bounds = np.concatenate([[0], np.cumsum(there.sum(1))])
        entries, columns = value[there].astype(np.float32), place[there]
        shape = len(rows), len(self._table)
        if (entries == 1).all():
            both = scipy.sparse.csr_array((entries, columns, bounds), shape=shape) @ self._table
            mean, variance = both[:, :R], both[:, R:]
        else:
            mean = scipy.sparse.csr_array((entries, columns, bounds), shape=shape) @ self._table[:, :R]
            squares = scipy.sparse.csr_array((entries**2, columns, bounds), shape=shape)
            variance = squares @ self._table[:, R:]
        return mean, np.sqrt(variance + self._unseen * open_part[:, None]).astype(np.float32)
