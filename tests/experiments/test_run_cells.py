"""One cell of each command for real, on a few made-up sequences."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
from experiments.compared import Setting
from experiments.data import Fold
from scipy.sparse import csr_array

from experiments import large, optimum, resample


@pytest.fixture
def fold(monkeypatch) -> Fold:
    """Label 1 where feature 0 is on; a feature of noise beside it."""
    rng = np.random.default_rng(0)
    X = [csr_array((rng.random((4, 2)) < 0.5).astype(float)) for _ in range(12)]
    y = [[str(int(on)) for on in x.toarray()[:, 0]] for x in X]
    made = Fold(X[:8], y[:8], X[8:], y[8:])
    for module in (large, optimum):
        monkeypatch.setattr(module, "load_fold", lambda task, data, k: made)
    monkeypatch.setattr(resample, "load", lambda task, data, k: made)
    return made


@dataclass(frozen=True)
class Case:
    module: object
    cell: object
    probabilities: bool = True


CASES = {
    "large, ours": Case(large, large.Cell("ours", 1, None, Setting(False, 1.0, 0))),
    "large, crf": Case(large, large.Cell("crf, 1", 1, None, Setting(False, 1.0, 0))),
    "optimum, chain": Case(optimum, optimum.Cell("chain", 3.0, "basenp", 1, None)),
    "optimum, piecewise": Case(optimum, optimum.Cell("piecewise", 1.0, "basenp", 1, None)),
    "resample, optimum": Case(resample, resample.Cell("gp-var, optimum", "basenp", 1, None)),
    "resample, svm": Case(resample, resample.Cell("svm", "basenp", 1, None), probabilities=False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_says_what_it_is_of_and_what_was_found(name: str, fold: Fold) -> None:
    case = CASES[name]
    row = json.loads(json.dumps(case.module.run_cell(case.cell)))
    assert row["error"] == 0.0  # one feature tells the label
    assert (row["nll"] is not None and 0 < row["nll"] < math.log(2)) == case.probabilities
    assert not row["hit_limit"]
    assert {"seed", "seconds", "versions"} <= set(row)
    assert all(row[key] == getattr(case.cell, key) for key in case.module.KEY)
