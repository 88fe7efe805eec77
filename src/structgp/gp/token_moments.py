"""Mean and standard deviation of linear functions at single tokens, under independent weights.

Letters as in ``gp.block``; N tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from structgp.gp.kernels import active_features, weight_parts
from structgp.threads import if_numba


class TokenMoments:
    """means, variances : (M, R) of the weights, by feature. scale : factor on the prior variance of the
    weight of a feature that was never seen. Means and variances are kept in single precision, side by side,
    so that all numbers of a feature are read at once."""

    def __init__(self, kernel: Kernel, means: Tensor, variances: Tensor, scale: float) -> None:
        self._kernel, self._scale, self._parts = kernel, scale, []
        self._table = torch.cat([means, variances], 1).float().numpy()
        with torch.no_grad():
            for part, columns, span in weight_parts(kernel):
                unseen = (scale * part.log_scale[:-1].exp()).float().numpy()
                seldom = part.seldom.numpy() if part.rare else np.empty(0, dtype=bool)
                sizes = np.array(part.sizes)
                about = (sizes, np.cumsum(sizes) - sizes, seldom, unseen)
                self._parts.append((columns, self._table[span], part.sparse, about))

    def at(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Means and standard deviations, (N, R) each, at rows (N, W). Cost O(N A R) for A features per
        row."""
        loops, R = compiled_moments(), self._table.shape[1] // 2
        if loops is None:
            mean, variance = self._in_torch(rows)
        else:
            # Every token has the constant of each part, which is the last of the part's weights.
            found = np.empty((len(rows), 2 * R), np.float32)
            found[:] = sum(table[-1] for _, table, _, _ in self._parts)
            for columns, table, is_sparse, (sizes, starts, seldom, unseen) in self._parts:
                if is_sparse:
                    loops.add_entries(rows[:, columns], sizes[0], unseen[0], table, found)
                else:
                    loops.add_templates(rows[:, columns], sizes, starts, seldom, unseen, table, found)
            mean, variance = found[:, :R], found[:, R:]
        return mean, np.sqrt(variance)

    def _in_torch(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Means and variances, by torch operations."""
        table, R = torch.from_numpy(self._table), self._table.shape[1] // 2
        with torch.no_grad():
            found = active_features(self._kernel, torch.from_numpy(rows))
            known, value = found.place >= 0, found.value.float()[..., None]
            each = torch.where(known[..., None], table[found.place.clamp(min=0)], 0)
            each[..., R:] += (~known * self._scale * found.unseen).float()[..., None]
            mean, variance = (each[..., :R] * value).sum(1), (each[..., R:] * value.square()).sum(1)
        return mean.numpy(), variance.numpy()


compiled_moments = if_numba("structgp.gp.compiled_moments")
