from __future__ import annotations

import numpy as np
import pytest
from experiments.methods.design import LinearFeatures, checked_labels
from scipy.sparse import csr_array

from structgp.errors import InputError


def test_templates_have_a_column_for_each_value_and_none_for_unseen_ones():
    X = [[("a", "x"), ("b", "x")], [], [("a", "y")]]
    tokens = LinearFeatures().fit(X).transform([*X, [("c", "y")]])
    expected = [[1, 0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 0, 1]]
    np.testing.assert_array_equal(tokens.features.toarray(), expected)
    assert tokens.lengths == [2, 0, 1, 1]
    assert tokens.starts == [0, 2, 2, 3, 4]


def test_dicts_put_templates_before_numbers():
    X = [[{"word": "a", "size": 2.0}, {"word": "b", "flag": True}]]
    features = LinearFeatures().fit(X)
    np.testing.assert_array_equal(features.transform(X).features.toarray(), [[1, 0, 2, 0], [0, 1, 0, 1]])
    new = features.transform([[{"word": "c", "other": 3.0}]]).features
    assert new.shape == (1, 4)
    assert new.nnz == 0


def test_matrices_stay_as_they_are_without_columns_that_are_empty():
    dense = np.array([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]])
    as_dense = LinearFeatures().fit([dense]).transform([dense]).features
    np.testing.assert_array_equal(as_dense.toarray(), dense)
    sparse = LinearFeatures().fit([csr_array(dense)])
    found = sparse.transform([csr_array(dense), csr_array([[1.0, 0.0, 5.0]])]).features
    np.testing.assert_array_equal(found.toarray(), [[0, 2], [1, 0], [1, 0]])


def test_a_bag_of_attributes():
    X = [[["a", "b"], ["b"]]]
    found = LinearFeatures().fit(X).transform([[["b", "new", "a"]]]).features
    np.testing.assert_array_equal(found.toarray(), [[1, 1]])


def test_nothing_but_empty_sequences():
    tokens = LinearFeatures().fit([[("a",)]]).transform([[], []])
    assert tokens.features.shape == (0, 1)
    assert tokens.lengths == [0, 0]


def test_labels_must_be_two():
    with pytest.raises(InputError, match="y: every token has the label 'A'"):
        checked_labels([[("a",)]], [["A"]])
    with pytest.raises(InputError, match="y: no labels"):
        checked_labels([[]], [[]])


def test_rivals_want_every_label() -> None:
    with pytest.raises(InputError, match=r"^y\[0\]\[1\]: the token has no label"):
        checked_labels([[["a"], ["b"]]], [["X", None]])
