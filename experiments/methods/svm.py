"""The structured SVM for a linear chain, which maximises a margin instead of a likelihood.

    min_w  |w|^2 / 2  +  C sum_n max_y [ L(y_n, y) - <w, phi(x_n, y_n) - phi(x_n, y)> ]

with L the number of wrong labels (Hamming) and phi the features of a linear CRF: one weight for each pair
of feature and label, and of label and label. Its dual is solved by block-coordinate Frank-Wolfe
(Lacoste-Julien, Jaggi, Schmidt and Pletscher 2013): a step takes one sequence, finds the labelling that
violates its margin most, and moves the sequence's share of w towards it by the optimal step size. The
duality gap is known exactly and tells when to stop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from experiments.methods.design import LinearFeatures, Tokens, checked_labels, read_out
from experiments.methods.frank_wolfe import FrankWolfe, best_labelling
from structgp import metrics
from structgp.data.labels import check_all_labelled
from structgp.errors import InputError

C_GRID = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class StructuredSVM:
    """Structured SVM behind the estimator's interface, without probabilities.

    X and y are as in :class:`structgp.StructuredGPClassifier`.

    Parameters
    ----------
    C : weight of the margins, or several: then the one with the fewest wrong tokens in cross-validation is
        used. Ties go to the smallest, which gives the simplest model. With a single training sequence,
        nothing can be held out, and the middle one is used.
    n_folds : folds of that cross-validation (fewer if there are fewer sequences), split at random by
        sequence.
    tolerance : stop when the duality gap is below this share of C times the number of tokens, which
        is the objective at w = 0.
    max_passes : largest number of passes over the data.
    features : how a token given as a list of strings is read: 'auto', 'columns' or 'bag'.
    random_state : seed of the folds and of the order of steps.

    Attributes (after ``fit``)
    ----------
    classes_ : labels seen in training, sorted.
    C_ : the C used.
    cv_scores_ : C -> token error over all held-out tokens; empty if there was no choice to make.
    weights_, transitions_ : (D, V) and (V, V), the weighted average of the iterates.
    training_log_ : 'passes', 'objective', 'gap' (relative, as ``tolerance``) and 'stopped', 'converged'
        or 'limit', of the last fit.
    """

    classes_: np.ndarray
    C_: float
    cv_scores_: dict[float, float]
    weights_: np.ndarray
    transitions_: np.ndarray
    training_log_: dict[str, Any]

    def __init__(
        self,
        C: float | Sequence[float] = C_GRID,
        *,
        n_folds: int = 5,
        tolerance: float = 0.002,
        max_passes: int = 200,
        features: str = "auto",
        random_state: int = 0,
    ) -> None:
        self.C = C
        self.n_folds = n_folds
        self.tolerance = tolerance
        self.max_passes = max_passes
        self.features = features
        self.random_state = random_state

    def fit(self, X: Iterable[Any], y: Iterable[Sequence[str]]) -> StructuredSVM:
        """Chooses C by cross-validation, then trains on all data."""
        grid = self._checked_grid()
        X = read_out(X)
        paths, self._labels = checked_labels(X, y)
        self._features = LinearFeatures(self.features).fit(X)
        tokens = self._features.transform(X)
        encoded = self._labels.transform(paths)
        filled = [n for n, length in enumerate(tokens.lengths) if length]
        self.C_, self.cv_scores_ = self._choose(tokens, encoded, filled, grid)
        solver = self._solve(tokens, encoded, filled, [self.C_])
        self.classes_ = np.array(self._labels.classes)
        weights, transitions = solver.average()
        self.weights_, self.transitions_ = weights[:, 0], transitions[0]
        self.training_log_ = {
            "passes": solver.passes,
            "objective": float(solver.objective[0]),
            "gap": float(solver.relative_gap[0]),
            "stopped": "converged" if solver.relative_gap[0] <= self.tolerance else "limit",
        }
        return self

    def predict(self, X: Iterable[Any]) -> list[list[str]]:
        """The labelling with the highest score, for each sequence (Viterbi)."""
        if not hasattr(self, "weights_"):
            raise InputError("StructuredSVM", "not fitted yet", "call fit(X, y) first")
        tokens = self._features.transform(read_out(X))
        scores = tokens.features @ self.weights_
        return [
            self._labels.names(best_labelling(part[None], self.transitions_[None])[0])
            for part in tokens.split(scores)
        ]

    def predict_marginals(self, X: Iterable[Any]) -> list[list[dict[str, float]]]:
        """Raises InputError, since the model has no probabilities."""
        raise InputError(
            "StructuredSVM", "it has no probabilities", "use predict, or a method that has them"
        )

    def score(self, X: Iterable[Any], y: Iterable[Sequence[str]]) -> float:
        """Token accuracy."""
        X = read_out(X)
        return 1.0 - metrics.token_error(check_all_labelled(X, list(y)), self.predict(X))

    def _checked_grid(self) -> list[float]:
        grid = sorted({float(C) for C in np.atleast_1d(np.asarray(self.C, dtype=np.float64))})
        if not grid or not all(0 < C < np.inf for C in grid):
            raise InputError("C", f"{self.C!r} is not usable", "give numbers above 0")
        if self.n_folds < 2:
            raise InputError("n_folds", f"{self.n_folds} is too few", "give at least 2")
        if not self.tolerance > 0:
            raise InputError("tolerance", f"{self.tolerance!r} is not above 0", "give such as 0.002")
        if self.max_passes < 1:
            raise InputError("max_passes", f"{self.max_passes} is too few", "give at least 1")
        return grid

    def _solve(
        self, tokens: Tokens, y: Sequence[np.ndarray], index: Sequence[int], grid: Sequence[float]
    ) -> FrankWolfe:
        solver = FrankWolfe(
            tokens, y, index, np.array(grid), len(self._labels.classes), seed=self.random_state
        )
        solver.run(self.tolerance, self.max_passes)
        return solver

    def _choose(
        self, tokens: Tokens, y: Sequence[np.ndarray], filled: Sequence[int], grid: list[float]
    ) -> tuple[float, dict[float, float]]:
        """The C with the lowest token error over held-out folds, and the error of each C. All values of C
        are trained at once: a step costs little more for many than for one."""
        if len(grid) == 1 or len(filled) == 1:
            return grid[len(grid) // 2], {}
        order = np.random.default_rng(self.random_state).permutation(filled)
        wrong = np.zeros(len(grid), dtype=int)
        starts = tokens.starts
        for held_out in np.array_split(order, min(self.n_folds, len(filled))):
            rest = np.setdiff1d(order, held_out).tolist()
            weights, transitions = self._solve(tokens, y, rest, grid).average()
            flat = weights.reshape(len(weights), -1)
            for n in held_out:
                scores = tokens.features[starts[n] : starts[n + 1]] @ flat
                scores = scores.reshape(-1, *weights.shape[1:]).transpose(1, 0, 2)
                wrong += (best_labelling(scores, transitions) != y[n]).sum(1)
        scores_of = dict(zip(grid, (wrong / sum(tokens.lengths)).tolist(), strict=True))
        least = min(scores_of.values())
        return min(C for C in grid if scores_of[C] == least), scores_of
