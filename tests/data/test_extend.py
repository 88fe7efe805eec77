"""An encoder that goes on learning: old ids stay, or it is known where they went."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from structgp.data.encode import FeatureEncoder
from structgp.data.vocabulary import column_places
from structgp.errors import InputError


def sparse(*rows: dict[int, float]) -> Any:
    made = np.zeros((len(rows), 10))
    for t, row in enumerate(rows):
        for column, value in row.items():
            made[t, column] = value
    return scipy.sparse.csr_matrix(made)


FORMS: dict[str, tuple[list[Any], list[Any]]] = {
    "columns": ([[["a", "x"], ["b", "y"]]], [[["c", "x"]], [["a", "z"], ["d", "y"]]]),
    "bag": ([[["a"], ["b", "c"]]], [[["d", "a"], ["e"]]]),
    "dicts": ([[{"w": "a"}, {"w": "b", "v": "x"}]], [[{"w": "c"}, {"v": "z"}]]),
    "mixed": ([[{"w": "a", "n": 2.0}]], [[{"w": "b", "n": 1.0, "m": 3.0}], [{"new": "key"}]]),
    "sparse": ([sparse({2: 1.0}, {5: 2.0})], [sparse({5: 1.0, 1: 1.0}), sparse({9: 3.0})]),
    "dense": ([np.ones((2, 3))], [np.zeros((1, 3))]),
}
each_form = pytest.mark.parametrize("form", FORMS)


def known(encoder: FeatureEncoder, rows: np.ndarray) -> bool:
    """Whether every id in the rows is one that the encoder has learned."""
    P = len(encoder.templates)
    sizes = np.array([len(values) for values in encoder.values])
    if not (rows[:, :P] < sizes).all():
        return False
    n = len(encoder.columns or encoder.attributes)
    return not encoder.has_sparse or bool((rows[:, P::2] < n).all())


@each_form
def test_new_features_are_known_and_old_ones_as_before(form: str) -> None:
    old, new = FORMS[form]
    encoder = FeatureEncoder().fit(old)
    before = copy.deepcopy(encoder)
    after = encoder.extended(new)
    assert encoder == before, "the old encoder is the old model's"
    assert all(known(after, rows) for rows in after.transform([*old, *new]))
    if form != "dense":
        assert not all(known(before, rows) for rows in before.transform(new))
    moved = column_places(encoder, after)
    for was, now in zip(encoder.transform(old), after.transform(old), strict=True):
        if moved is None:
            np.testing.assert_array_equal(was, now)
        else:
            ids = was[:, 0::2].astype(int)
            np.testing.assert_array_equal(np.where(ids < 0, -1, moved[ids]), now[:, 0::2])
            np.testing.assert_array_equal(was[:, 1::2], now[:, 1::2])


@each_form
def test_what_is_known_already_changes_nothing(form: str) -> None:
    old, new = FORMS[form]
    encoder = FeatureEncoder().fit([*old, *new])
    assert encoder.extended(old) == encoder
    assert encoder.extended([]) == encoder
    moved = column_places(encoder, encoder.extended(old))
    assert (moved is None) == (form != "sparse")
    if moved is not None:
        assert moved.tolist() == list(range(len(encoder.columns)))


def test_templates_stay_the_ones_that_there_were() -> None:
    old, new = FORMS["mixed"]
    after = FeatureEncoder().fit(old).extended(new)
    assert after.templates == ["w"]
    assert after.attributes == {"n": 0, "m": 1, "new:key": 2}
    plain = FeatureEncoder().fit([[{"w": "a"}]]).extended([[{"w": "b", "other": "x"}]])
    assert (plain.templates, plain.values, plain.has_sparse) == (["w"], [{"a": 0, "b": 1}], False)


@pytest.mark.parametrize(
    ("form", "other", "says"),
    [
        ("columns", "dicts", r"^X\[0\]: tokens are dicts, but training had strings"),
        ("sparse", "dense", r"^X\[0\]: tokens are dense, but training had sparse"),
        ("dicts", "bag", r"^X\[0\]: tokens are strings, but training had dicts"),
    ],
)
def test_another_form_is_told(form: str, other: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        FeatureEncoder().fit(FORMS[form][0]).extended(FORMS[other][1])


def test_another_width_is_told() -> None:
    encoder = FeatureEncoder().fit(FORMS["sparse"][0])
    with pytest.raises(InputError, match=r"^X\[1\]: 4 columns, but training had 10"):
        encoder.extended([sparse({1: 1.0}), scipy.sparse.csr_matrix(np.ones((1, 4)))])


columns = st.sets(st.integers(0, 9), min_size=1)


@settings(max_examples=50, deadline=None)
@given(columns, columns)
def test_columns_move_to_where_they_are_sorted(first: set[int], second: set[int]) -> None:
    old = FeatureEncoder().fit([sparse(dict.fromkeys(first, 1.0))])
    new = old.extended([sparse(dict.fromkeys(second, 1.0))])
    assert new.columns == sorted(first | second)
    moved = column_places(old, new)
    assert moved is not None
    assert [new.columns[i] for i in moved] == old.columns


def test_columns_of_which_none_was_seen() -> None:
    old = FeatureEncoder().fit([scipy.sparse.csr_matrix((2, 10))])
    new = old.extended([sparse({3: 1.0})])
    assert new.columns == [3]
    assert column_places(old, new) is None
