"""Learning curves: the generated titles, and the weight of the data."""

from __future__ import annotations

import numpy as np
import pytest
from experiments.titles import product_titles

from experiments import few
from structgp import StructuredGPClassifier
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


@pytest.mark.parametrize(
    ("losses", "weight"),
    [
        ({1.0: 0.5, 4.0: 0.6}, 1.0),
        ({1.0: 0.6, 4.0: 0.5}, 4.0),
        ({1.0: 0.6, 4.0: 0.5, 16.0: 0.6}, 4.0),
        ({1.0: 0.55, 4.0: 0.5, 16.0: 0.6}, 4 * 4 ** (-1 / 6)),
    ],
)
def test_the_lowest_of_a_parabola(losses: dict[float, float], weight: float) -> None:
    assert few.lowest(losses) == pytest.approx(weight, rel=1e-9)


@pytest.mark.slow
def test_a_weight_is_a_sample_weight_and_trials_end_where_they_get_worse() -> None:
    X, y = product_titles(4, 5)
    model = few.Weighed((1.0, 2.0)).fit(X[:3], y[:3])
    losses = list(model.losses_.values())
    assert list(model.losses_) == [1.0, 2.0]
    assert model.weight_ == (1.0 if losses[0] < losses[1] else 2.0)
    same = StructuredGPClassifier().fit(X[:3], y[:3], sample_weight=np.full(3, model.weight_))
    assert model.predict_marginals(X[3:]) == same.predict_marginals(X[3:])
