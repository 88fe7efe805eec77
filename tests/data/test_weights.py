"""How often a sequence counts."""

from __future__ import annotations

import numpy as np
import pytest

from structgp.data.examples import read_examples
from structgp.errors import InputError

X = [[["two", "x"], ["eggs", "x"]], [["3", "d"], ["figs", "x"]], [["salt", "x"]]]
Y = [["QTY", "NAME"], ["QTY", "NAME"], ["OTHER"]]


def test_a_sequence_of_weight_0_is_not_there() -> None:
    weighed = read_examples(X, Y, weights=[1, 2, 0])
    alone = read_examples(X[:2], Y[:2], weights=[1, 2])
    assert weighed.labels.classes == alone.labels.classes == ["NAME", "QTY"]
    assert weighed.encoder.values == alone.encoder.values
    for a, b in zip(weighed.rows, alone.rows, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(weighed.weights, alone.weights)


def test_places_in_errors_are_those_of_y() -> None:
    rules = {"forbidden": [("QTY", "NAME")]}
    with pytest.raises(InputError, match=r"^y\[1\]\[1\]: label 'NAME' after 'QTY'"):
        read_examples(X, Y, weights=[0, 1, 1], constraints=rules)
