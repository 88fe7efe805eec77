"""A linear-chain CRF on dense inputs, in torch: the model of python-crfsuite, whose dicts are too slow
here.

    p(y | x)  is proportional to  exp( sum_t (x_t, 1) W[:, y_t]  +  sum_{t>0} G[y_{t-1}, y_t] )

minimises -log p(y | x) + c2 (|W|^2 + |G|^2), as :class:`structgp.evaluation.crf.LinearCRF` does on inputs
with a column of ones. c2 is chosen to give held-out sequences the highest likelihood.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structgp.data.arrays import as_dense
from structgp.inference.lbfgs import minimize
from structgp.structures.linear_chain.chain import Chain

C2_GRID = tuple(10.0 ** (k / 2) for k in range(-4, 7))
PATIENCE = 2
MEMORY, MOST_STEPS, TOLERANCE = 20, 500, 1e-7


class DenseCRF:
    """The CRF on dense inputs. c2 : the regulariser, or several to choose from by ``n_folds``-fold
    cross-validation, which starts from the largest and stops when ``PATIENCE`` in a row are worse than the
    best. After ``fit``: classes_, c2_, cv_scores_ (c2 -> NLL per held-out sequence), weights_ (D + 1, V),
    transitions_ (V, V)."""

    def __init__(
        self, c2: float | Sequence[float] = C2_GRID, n_folds: int = 5, random_state: int = 0
    ) -> None:
        self.c2, self.n_folds, self.random_state = c2, n_folds, random_state

    def fit(self, X: Sequence[Any], y: Sequence[Sequence[str]]) -> DenseCRF:
        self.classes_ = sorted({label for labels in y for label in labels})
        grid = sorted(np.atleast_1d(np.asarray(self.c2, dtype=float)).tolist(), reverse=True)
        self.cv_scores_ = self._validate(X, y, grid) if len(grid) > 1 else {}
        self.c2_ = min(self.cv_scores_, key=self.cv_scores_.__getitem__) if self.cv_scores_ else grid[0]
        data = _Data(X, y, self.classes_)
        self.weights_, self.transitions_ = data.split(data.fitted(self.c2_))
        return self

    def _validate(
        self, X: Sequence[Any], y: Sequence[Sequence[str]], grid: list[float]
    ) -> dict[float, float]:
        order = np.random.default_rng(self.random_state).permutation(len(X))
        folds = [
            [_Data([X[i] for i in part], [y[i] for i in part], self.classes_) for part in (kept, held_out)]
            for held_out in np.array_split(order, self.n_folds)
            for kept in [np.setdiff1d(order, held_out)]
        ]
        starts: list[Tensor | None] = [None] * len(folds)
        scores: dict[float, float] = {}
        for c2 in grid:
            starts = [train.fitted(c2, start) for (train, _), start in zip(folds, starts, strict=True)]
            both = zip(folds, starts, strict=True)
            scores[c2] = -sum(float(test.log_probs(found).sum()) for (_, test), found in both) / len(X)
            if min(list(scores.values())[-PATIENCE:]) > min(scores.values()):
                break
        return scores

    def predict_marginals(self, X: Sequence[Any]) -> list[list[dict[str, float]]]:
        data = _Data(X, [[self.classes_[0]] * len(x) for x in X], self.classes_)
        f, g = data.padded(data.x @ self.weights_)[None], self.transitions_[None]
        found = Chain().marginals(f, g, data.mask)[0]
        return [
            [dict(zip(self.classes_, row, strict=True)) for row in rows[mask].tolist()]
            for rows, mask in zip(found, data.mask, strict=True)
        ]

    def predict(self, X: Sequence[Any]) -> list[list[str]]:
        """The most probable label of each token."""
        return [[max(p, key=p.__getitem__) for p in rows] for rows in self.predict_marginals(X)]


class _Data:
    """Sequences as one matrix x (N, D + 1) whose last column is ones. y, mask : (B, T), padded at the
    end."""

    def __init__(self, X: Sequence[Any], y: Sequence[Sequence[str]], classes: Sequence[str]) -> None:
        number = {label: v for v, label in enumerate(classes)}
        x = np.concatenate([as_dense(rows, f"X[{n}]") for n, rows in enumerate(X)])
        self.x = torch.from_numpy(np.concatenate([x, np.ones((len(x), 1))], 1))
        lengths = torch.tensor([len(rows) for rows in X])
        self.mask = torch.arange(int(lengths.max())) < lengths[:, None]
        self.y = torch.zeros(self.mask.shape, dtype=torch.long)
        self.y[self.mask] = torch.tensor([number[label] for labels in y for label in labels])
        self.n_labels = len(classes)

    def padded(self, rows: Tensor) -> Tensor:
        """(B, T, V) rows (N, V) of all tokens."""
        return rows.new_zeros((*self.mask.shape, rows.shape[1])).masked_scatter(self.mask[..., None], rows)

    def split(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Splits ``table`` into weights (D + 1, V) and transitions (V, V)."""
        return table[: -self.n_labels], table[-self.n_labels :]

    def log_probs(self, table: Tensor) -> Tensor:
        """(B,) log p(y | x)."""
        weights, transitions = self.split(table)
        f = self.padded(self.x @ weights)[None]
        return Chain().log_prob(f, transitions[None], self.y, self.mask)[0]

    def fitted(self, c2: float, start: Tensor | None = None) -> Tensor:
        """The table that minimises -log p + c2 |table|^2, searched for from ``start``.

        L-BFGS works on parameters u with table = L^-T u, where L L^T approximates the curvature of the
        loss: correlated inputs then need no extra steps."""
        V, width = self.n_labels, self.x.shape[1]
        curvature = torch.zeros(width + V, width + V, dtype=torch.float64)
        curvature[:width, :width] = self.x.T @ self.x / (2 * V)
        curvature.diagonal()[width:] = len(self.x) / (2 * V**2)
        factor = torch.linalg.cholesky(curvature + 2 * c2 * torch.eye(width + V, dtype=torch.float64))

        def table_of(u: Tensor) -> Tensor:
            return torch.linalg.solve_triangular(factor.mT, u.reshape(-1, V), upper=True)

        def loss(u: Tensor) -> tuple[float, Tensor]:
            u = u.detach().clone().requires_grad_()
            table = table_of(u)
            value = c2 * (table**2).sum() - self.log_probs(table).sum()
            (gradient,) = torch.autograd.grad(value, u)
            return float(value.detach()), gradient

        at = torch.zeros((width + V) * V, dtype=torch.float64)
        if start is not None:
            at = (factor.mT @ start).reshape(-1)
        found, _ = minimize(loss, at, steps=MOST_STEPS, memory=MEMORY, tolerance=TOLERANCE)
        return table_of(found)
