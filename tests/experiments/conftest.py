from __future__ import annotations

import numpy as np
import pytest
from benchmarks.generate import generate
from experiments.data import TASKS


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder like that of the paper's data, with small tasks of the same names."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "encoded").mkdir()
    for number, task in enumerate(TASKS[:2]):
        made = generate(20, n_labels=3, mean_length=5, n_templates=2, n_values=6, seed=number)
        lengths = [len(x) for x in made.X]
        ids = [6 * j + int(v[1:]) for x in made.X for token in x for j, v in enumerate(token)]
        labels = np.array([int(label[1:]) for y in made.y for label in y])
        orders = [np.random.default_rng(k).permutation(20) for k in range(5)]
        np.savez(
            folder / "encoded" / f"{task}.npz",
            indptr=np.arange(0, len(ids) + 1, 2),
            indices=np.array(ids),
            seq_offsets=np.concatenate([[0], np.cumsum(lengths)]),
            labels=labels,
            labels_raw=labels,
            fold_train=np.array([order[:10] for order in orders]),
            fold_test=np.array([order[10:] for order in orders]),
            n_labels=np.array(3),
        )
    return folder
