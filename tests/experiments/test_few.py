"""Learning curves: the generated titles, and the weight of the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from experiments.titles import product_titles

from experiments import few
from structgp.data.schemes import allowed


def test_titles_are_the_same_for_a_seed_and_obey_their_scheme() -> None:
    X, y = product_titles(50, 3)
    assert (X, y) == product_titles(50, 3)
    assert y != product_titles(50, 4)[1]
    classes = sorted({label for labels in y for label in labels})
    assert {"B-BRAND", "I-PRODUCT", "B-SIZE", "B-MODEL", "O"} <= set(classes)
    rules, number = allowed("BIO", classes), {label: i for i, label in enumerate(classes)}
    assert all(rules.breaks([number[label] for label in labels]) is None for labels in y)
    assert [len(x) for x in X] == [len(labels) for labels in y]
    first, last = X[0][0], X[0][-1]
    assert first["BOS"] is True
    assert last["EOS"] is True
    assert first["bias"] == 1.0
    assert isinstance(first["word.istitle()"], bool)


class Always:
    """Says B with a probability of .75 of every token."""

    def fit(self, X: list[Any], y: list[list[str]]) -> Always:
        return self

    def predict_marginals(self, X: list[Any]) -> list[list[dict[str, float]]]:
        return [[{"A": 0.25, "B": 0.75}] * len(x) for x in X]


def test_figures_of_one_training_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few, "METHODS", {"always": Always})
    X, y = [[{}, {}]] * 4, [["A", "B"]] * 3 + [["C", "B"]]
    row = few.compare(X, y, size=3, seed=1)  # with this seed, the one that is left is of the first three
    assert (row["size"], row["seed"]) == (3, 1)
    found = row["always"]
    assert found["nll"] == pytest.approx(-np.log([0.25, 0.75]).mean())
    assert found["error"] == pytest.approx(50.0)
    assert found["gap"] == pytest.approx(0.25)


def test_sizes_that_a_task_does_not_have_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: list[dict[str, Any]] = []
    monkeypatch.setattr(few, "METHODS", {"always": Always})
    monkeypatch.setattr(few, "load", lambda task, data: ([[{}, {}]] * 5, [["A", "B"]] * 4 + [[]]))
    monkeypatch.setattr(few, "keep", lambda name, row: kept.append(row))
    few.main(["--task", "titles", "--size", "3", "4", "--seeds", "0", "--method", "always"])
    assert [row["size"] for row in kept] == [3]
    assert "titles          4     too few sequences" in capsys.readouterr().out
