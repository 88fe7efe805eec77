"""The loss of accuracy of answers with fewer draws, and with points for each token instead of draws.

    python -m experiments.answer_draws [--task TASK ...] [--fold 0 1] [--data DIR]

Fits two thirds of the training data of each fold, encoded and raw, and predicts the last third under
several ``n_draws`` and seeds. Prints by how many per cent the NLL per token exceeds that of 1024 draws,
averaged over seeds, and the mean over fits. ``auto`` is the default, which computes marginals from points
for each token. No test data are used.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from experiments.data import TASKS, arguments, load_fold, run_command
from structgp import StructuredGPClassifier, metrics

Losses = dict[int | str, float]
SETTINGS: tuple[int | str, ...] = ("auto", 128, 64, 32, 16, 8, 0)
MANY, SEEDS = 1024, 3


def losses(model: StructuredGPClassifier, X: list[Any], y: list[list[str]]) -> Losses:
    """NLL per token under each setting, averaged over seeds, relative to that of many draws."""

    def mean(n_draws: int | str, seeds: range) -> float:
        made, found = copy.copy(model).set_params(n_draws=n_draws), []
        for seed in seeds:
            made.model_ = replace(model.model_, seed=seed)
            found.append(metrics.token_nll(y, made.predict_marginals(X)))
        return float(np.mean(found))

    base = mean(MANY, range(100, 102))
    return {n: mean(n, range(SEEDS)) / base - 1 for n in SETTINGS}


def fits(tasks: list[str], folds: list[int], data: str | None) -> Iterator[tuple[str, Losses]]:
    for task in tasks:
        for columns in (True, False):
            for fold in folds:
                found = load_fold(task, data, fold, columns=columns)
                n = 2 * len(found.X) // 3
                model = StructuredGPClassifier().fit(found.X[:n], found.y[:n])
                name = f"{task} {'raw' if columns else 'encoded'} {fold}"
                yield name, losses(model, found.X[n:], found.y[n:])


def main() -> None:
    parser = arguments("answer_draws", __doc__, TASKS)
    given = parser.parse_args()
    found = []
    print(f"{'':24}" + "".join(f"{n!s:>9}" for n in SETTINGS))
    for name, by_draws in fits(given.task, given.fold, given.data):
        found.append(list(by_draws.values()))
        print(f"{name:24}" + "".join(f"{100 * x:+9.2f}" for x in found[-1]), flush=True)
    print(f"{'mean':24}" + "".join(f"{100 * x:+9.2f}" for x in np.mean(found, axis=0)))


if __name__ == "__main__":
    run_command(main)
