"""Random splits of the tasks, with raw columns and as many training sequences as in the paper's folds."""

from __future__ import annotations

import numpy as np

from experiments.data import Fold
from experiments.few import load

SIZES = {"basenp": 150, "chunking": 50, "japanesene": 50, "recipes": 200, "titles": 80, "segmentation": 20}
"""Number of training sequences of each task."""

FOUR = ("basenp", "chunking", "japanesene", "recipes")
SEED = 17


def split_of(task: str, data: str | None, number: int, most_test: int | None = None) -> Fold:
    """The split with this number. most_test : largest number of test sequences; None for all that are
    left."""
    X, y = load(task, data)
    there = [i for i, labels in enumerate(y) if labels]
    order = np.random.default_rng([SEED, number]).permutation(there).tolist()
    n = SIZES[task]
    test = order[n:] if most_test is None else order[n : n + most_test]
    return Fold(*([items[i] for i in part] for part in (order[:n], test) for items in (X, y)))
