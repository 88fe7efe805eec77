"""Every form of input becomes the rows it should, and every mistake is named with its place."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from structgp.data import encode, vocabulary
from structgp.data.arrays import stacked
from structgp.data.batch import MISSING
from structgp.data.encode import FeatureEncoder
from structgp.data.labels import UNSEEN, LabelEncoder, check_labels
from structgp.data.vocabulary import Block
from structgp.errors import InputError, StructgpWarning

INFINITE = "replace NaN and infinite values"
DENSE_TENSOR = "pass a dense tensor of floats, integers or flags"
USE_A_SEQUENCE = "pass a list of feature dicts, a list of lists of strings, or a 2-D array or tensor"


def rows_of(X: Any, features: str = "auto") -> list[list[list[float]]]:
    encoder = FeatureEncoder(features=features).fit(X)
    encoded = encoder.transform(X)
    assert all(rows.dtype == np.float64 for rows in encoded)
    return [rows.tolist() for rows in encoded]


def error_of(X: Any, *, fitted_on: Any = None, features: str = "auto") -> str:
    """What is said of X, by an encoder fitted on it or on something else."""
    with pytest.raises(InputError) as caught:
        FeatureEncoder(features=features).fit(X if fitted_on is None else fitted_on).transform(X)
    message = str(caught.value)
    assert "\n" not in message
    return message


# -- dicts -----------------------------------------------------------------------------------------


def test_dicts_of_strings_are_templates() -> None:
    X = [[{"word": "a", "tag": "X"}, {"tag": "Y", "word": "b"}], [{"word": "a"}, {"tag": "X"}]]
    encoder = FeatureEncoder().fit(X)
    assert encoder.form == "dicts"
    assert encoder.templates == ["word", "tag"]
    assert encoder.blocks == [Block("categorical", 0, 2, ("word", "tag"))]
    assert [r.tolist() for r in encoder.transform(X)] == [[[0, 0], [1, 1]], [[0, -1], [-1, 0]]]


def test_dicts_of_everything_else_are_attributes() -> None:
    X = [
        [
            {"number": 2.5, "flag": True, "off": False, "nothing": None, "zero": 0},
            {"list": ["p", "q", "p"], "nested": {"deep": {"er": 3}, "text": "t"}},
            {"number": np.float32(0.5), "count": np.int64(2), "bool": np.bool_(True)},
        ]
    ]
    encoder = FeatureEncoder().fit(X)
    assert encoder.attributes == {
        "number": 0,
        "flag": 1,
        "list:p": 2,
        "list:q": 3,
        "nested:deep:er": 4,
        "nested:text:t": 5,
        "count": 6,
        "bool": 7,
    }
    assert encoder.blocks == [Block("sparse", 0, None)]
    assert encoder.transform(X)[0].tolist() == [
        [0, 2.5, 1, 1, -1, 0, -1, 0],
        [2, 1, 3, 1, 4, 3, 5, 1],
        [0, 0.5, 6, 2, 7, 1, -1, 0],
    ]


def test_dicts_of_both() -> None:
    X = [[{"w": "a", "size": 2}, {"w": "b"}], [{"w": 3}]]
    encoder = FeatureEncoder().fit(X)
    assert encoder.blocks == [Block("categorical", 0, 1, ("w",)), Block("sparse", 1, None)]
    # A template that is a number somewhere is an attribute there.
    assert [r.tolist() for r in encoder.transform(X)] == [[[0, 0, 2], [1, -1, 0]], [[-1, 1, 3]]]


def test_many_string_keys_are_a_bag() -> None:
    limit = vocabulary.MAX_TEMPLATES
    few = FeatureEncoder().fit([[{f"k{i}": "v" for i in range(limit)}]])
    assert [b.kind for b in few.blocks] == ["categorical"]
    many = FeatureEncoder().fit([[{f"k{i}": "v" for i in range(limit + 1)}]])
    assert [b.kind for b in many.blocks] == ["sparse"]
    assert list(many.attributes) == [f"k{i}:v" for i in range(limit + 1)]


# -- lists of strings ------------------------------------------------------------------------------


def test_lists_of_equally_many_strings_are_columns() -> None:
    X = [[["a", "x"], ["b", "x"]], [("b", "y")]]
    expected = [[[0, 0], [1, 0]], [[1, 1]]]
    assert rows_of(X) == rows_of(X, "columns") == expected
    assert rows_of([np.array(x) for x in X]) == expected
    assert rows_of([np.array(x, dtype=object) for x in X]) == expected
    assert FeatureEncoder().fit(X).blocks == [Block("categorical", 0, 2, ("0", "1"))]


def test_lists_of_different_lengths_are_a_bag() -> None:
    X = [[["a", "x"], ["b"]], [[], ["x", "x", "c", "b"]]]
    assert rows_of(X) == [[[0, 1, 1, 1], [2, 1, -1, 0]], [[-1, 0, -1, 0, -1, 0], [1, 1, 3, 1, 2, 1]]]
    assert FeatureEncoder().fit(X).blocks == [Block("sparse", 0, None)]


def test_a_bag_can_be_asked_for() -> None:
    assert rows_of([[["a", "x"], ["x", "b"]]], "bag") == [[[0, 1, 1, 1], [1, 1, 2, 1]]]


def test_sets_are_a_bag_whatever_their_size() -> None:
    X = [[{"a"}, {"b"}], [frozenset({"a"})]]
    assert FeatureEncoder().fit(X).blocks == [Block("sparse", 0, None)]
    assert rows_of(X) == [[[0, 1], [1, 1]], [[0, 1]]]
    assert error_of(X, features="columns") == (
        "X[0][0]: a set has no columns; pass a list, or use features='bag'"
    )


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x",
    [
        np.array([[1.0, 2.0], [3.0, -4.0]]),
        np.array([[1, 2], [3, -4]], dtype=np.int32),
        np.array([[1, 2], [3, -4]], dtype=np.float32),
        np.array([[1, 2], [3, -4]], dtype=object),
        [[1.0, 2.0], [3.0, -4.0]],
        [(1, 2), (3, -4)],
        [np.array([1.0, 2.0]), np.array([3.0, -4.0])],
        torch.tensor([[1.0, 2.0], [3.0, -4.0]]),
        torch.tensor([[1.0, 3.0], [2.0, -4.0]], dtype=torch.float16).T,
        torch.tensor([[1, 2], [3, -4]], dtype=torch.bfloat16),
        torch.tensor([[1, 2], [3, -4]], dtype=torch.int8),
        torch.tensor([[1.0, 2.0], [3.0, -4.0]], requires_grad=True) * 1,
        [torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, -4.0])],
    ],
)
def test_matrices_of_numbers(x: Any) -> None:
    encoder = FeatureEncoder().fit([x])
    assert encoder.form == "dense"
    assert encoder.blocks == [Block("dense", 0, 2)]
    assert rows_of([x]) == [[[1, 2], [3, -4]]]


@pytest.mark.parametrize(
    "form", ["csr_matrix", "csr_array", "coo_matrix", "coo_array", "csc_matrix", "lil_array"]
)
@pytest.mark.parametrize("dtype", [float, np.float32, int])
def test_scipy_sparse(form: str, dtype: type) -> None:
    x = getattr(scipy.sparse, form)(np.array([[0, 2, 0], [0, 0, 0], [3, 0, -1]], dtype=dtype))
    encoder = FeatureEncoder().fit([x])
    assert (encoder.form, encoder.width) == ("sparse", 3)
    assert encoder.blocks == [Block("sparse", 0, None)]
    assert encoder.transform([x])[0].tolist() == [[1, 2, -1, 0], [-1, 0, -1, 0], [0, 3, 2, -1]]


def test_duplicates_are_summed_and_the_input_left_alone() -> None:
    def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.array([1.0, 2.0, 5.0]), np.array([1, 1, 0]), np.array([0, 3])

    x = scipy.sparse.csr_matrix(arrays(), shape=(1, 3))
    assert rows_of([x]) == [[[0, 5, 1, 3]]]
    for stored, original in zip((x.data, x.indices, x.indptr), arrays(), strict=True):
        np.testing.assert_array_equal(stored, original)
    place = (np.array([0, 0]), np.array([1, 1]))
    x = scipy.sparse.coo_array((np.array([1.0, 2.0]), place), shape=(2, 3))
    assert rows_of([x]) == [[[0, 3], [-1, 0]]]  # of three columns, one was seen


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.sampled_from([0.0, 0.0, 1.5, -2.0]), min_size=4, max_size=4), min_size=1))
def test_sparse_rows_hold_what_the_matrix_holds(dense: list[list[float]]) -> None:
    encoder = FeatureEncoder().fit([x := scipy.sparse.csr_array(np.array(dense))])
    (rows,) = encoder.transform([x])
    spread = np.zeros((len(dense), 4))
    for t, row in enumerate(rows):
        for feature, value in zip(row[0::2], row[1::2], strict=True):
            if feature >= 0:
                spread[t, encoder.columns[int(feature)]] += value
    np.testing.assert_array_equal(spread, dense)


# -- values that training never saw ----------------------------------------------------------------


def test_unseen_values_of_a_template() -> None:
    encoder = FeatureEncoder().fit([[["a", "x"], ["b", "x"]]])
    x = [["new", "x"], ["a", "other"], ["newer", "x"], ["new", "other"]]
    assert encoder.encode(x).tolist() == [[2, 0], [0, 1], [3, 0], [2, 1]]
    # Ids of one sequence say nothing about the next.
    assert encoder.encode([["newer", "x"]]).tolist() == [[2, 0]]


@pytest.mark.parametrize("features", ["columns", "bag"])
def test_unseen_values_that_are_not_told_apart(features: str) -> None:
    encoder = FeatureEncoder(features=features).fit([[["a", "x"], ["b", "x"]]])
    x = [["new", "x"], ["a", "other"], ["newer", "x"], ["new", "other"]]
    apart, (rows,) = encoder.encode(x), encoder.transform([x], apart=False)
    most = encoder.n_sparse or np.array([2, 1])
    if features == "columns":
        np.testing.assert_array_equal(rows, np.minimum(apart, most))
    else:
        np.testing.assert_array_equal(rows[:, ::2], np.minimum(apart[:, ::2], most))
    dicts = FeatureEncoder().fit([[{"p": "a", "q": "b"}]])
    x = [{"p": "c", "q": "b"}, {"p": None, "q": "b"}, {"p": "d", "q": "e"}]
    assert dicts.transform([x], apart=False)[0].tolist() == [[1, 0], [-1, 0], [1, 1]]


def test_unseen_attributes() -> None:
    encoder = FeatureEncoder().fit([[{"a": 1, "b": 1}]])
    x = [{"b": 2, "new": 3}, {"newer": 1, "new": 4}]
    assert encoder.encode(x).tolist() == [[1, 2, 2, 3], [3, 1, 2, 4]]
    bag = FeatureEncoder(features="bag").fit([[["a"]]])
    assert bag.encode([["p", "a"], ["q", "p"]]).tolist() == [[1, 1, 0, 1], [2, 1, 1, 1]]


def test_a_string_key_that_training_never_saw() -> None:
    only_templates = FeatureEncoder().fit([[{"w": "a"}]])
    assert only_templates.encode([{"w": "a", "other": "x"}]).tolist() == [[0]]
    with_attributes = FeatureEncoder().fit([[{"w": "a", "n": 1}]])
    assert with_attributes.encode([{"w": "a", "other": "x"}]).tolist() == [[0, 1, 1]]


def test_a_key_that_may_be_misspelt() -> None:
    encoder = FeatureEncoder().fit([[{"word": "a", "shape": "x", "n": 1}, {"word": "b"}]])
    with pytest.warns(StructgpWarning, match=r"X: no token has the feature 'word', but all have 'Word'"):
        encoder.transform([[{"Word": "a", "shape": "x"}, {"Word": "b"}]])
    for tokens in (
        [{"Word": "a"}, {"shape": "x"}],
        [{"word": "a", "Word": "b"}],
        [{"shape": "x", "other": "b"}],
        [{"shape": "x", "n": 2}],
    ):
        encoder.transform([tokens])  # none is missing, none is alike, none is unknown


# -- vectors in dicts ------------------------------------------------------------------------------


def test_vectors_stand_between_templates_and_attributes() -> None:
    X = [
        [
            {"size": 2, "v": np.array([1.5, -2.0]), "w": "a", "u": np.array([7])},
            {"w": "b", "v": np.array([0, 3], dtype=np.int8), "u": np.array([True])},
        ]
    ]
    encoder = FeatureEncoder().fit(X)
    assert encoder.vectors == {"v": 2, "u": 1}
    assert encoder.attributes == {"size": 0}
    assert encoder.blocks == [
        Block("categorical", 0, 1, ("w",)),
        Block("dense", 1, 4),
        Block("sparse", 4, None),
    ]
    (rows,) = encoder.transform(X)
    assert rows.tolist() == [[0, 1.5, -2, 7, 0, 2], [1, 0, 3, 1, -1, 0]]
    assert encoder.pad_row.tolist() == [-1, 0, 0, 0]
    assert len(encoder.encode([])) == 0


def test_vectors_may_be_tensors() -> None:
    tensors = (torch.tensor([1, 2], dtype=torch.bfloat16), torch.tensor([3.0, 4.0], requires_grad=True))
    X = [[{"w": "a", "v": v} for v in tensors]]
    assert FeatureEncoder().fit(X).transform(X)[0].tolist() == [[0, 1, 2], [0, 3, 4]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, -4.0]], device="cuda", requires_grad=True)
    assert rows_of([x, x.detach().cpu(), list(x)]) == [[[1, 2], [3, -4]]] * 3


def test_vectors_alone_are_dense_rows() -> None:
    X = [[{"v": np.array([1.0, 2.0])}], [{"v": np.array([3.0, 4.0])}]]
    assert FeatureEncoder().fit(X).blocks == [Block("dense", 0, 2)]
    assert rows_of(X) == [[[1, 2]], [[3, 4]]]


def test_columns_lift_the_limit_on_templates() -> None:
    token = {f"k{i}": "v" for i in range(vocabulary.MAX_TEMPLATES + 1)} | {"v": np.ones(1)}
    kinds = {
        features: [block.kind for block in FeatureEncoder(features).fit([[token]]).blocks]
        for features in ("auto", "columns")
    }
    assert kinds == {"auto": ["dense", "sparse"], "columns": ["categorical", "dense"]}


GOOD = {"w": "a", "v": np.array([1.0, 2.0])}


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ({"w": "a"}, "vector 'v' is missing; pass 2 numbers with every token, zeros where "),
        ({"w": "a", "v": None}, "vector 'v' is missing; "),
        ({"v": np.ones(3)}, "vector 'v' has 3 numbers, but the first in training had 2; "),
        ({"v": "text"}, "feature 'v' is a str, but training had a vector; pass 2 numbers with every token"),
        ({"v": [1.0, 2.0]}, "feature 'v' is a list"),
        ({"v": [1, 2]}, "feature 'v' is a list, but training had a vector; "),
        ({"v": 5.0}, "feature 'v' is a float, but training had a vector; "),
        ({"v": np.array(1.0)}, "feature 'v' is an array of float64 and shape (); pass a 1-D array"),
        ({"v": np.ones((1, 2))}, "feature 'v' is an array of float64 and shape (1, 2); "),
        ({"v": np.array([])}, "feature 'v' is an array of float64 and shape (0,); "),
        ({"v": np.array(["1", "2"])}, "feature 'v' is an array of <U1 and shape (2,); "),
        ({"v": np.array([1.0, np.nan])}, f"v[1] is nan; {INFINITE}"),
        ({"v": np.array([-np.inf, 1.0])}, f"v[0] is -inf; {INFINITE}"),
        ({"v": np.array([1.0, -1e101])}, "v[1] is -1e+101, too large; rescale the feature"),
        (["a"], "expected a feature dict, got a list; "),
    ],
)
def test_vectors_that_cannot_be(token: Any, message: str) -> None:
    X = [[GOOD], [GOOD, token]]
    assert error_of(X).startswith(f"X[1][1]: {message}")
    assert error_of(X, fitted_on=[[GOOD]]).startswith(f"X[1][1]: {message}")


@pytest.mark.parametrize("bad", [np.array("ab"), np.ones((2, 2)), np.array([])])
def test_a_first_vector_that_is_none(bad: np.ndarray) -> None:
    assert error_of([[{"v": bad}]]).startswith("X[0][0]: feature 'v' is an array of ")


vectors = st.lists(st.floats(-1e100, 1e100), min_size=3, max_size=3)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from("abc"), vectors, st.integers(-2, 2)), min_size=1))
def test_vectors_leave_the_rest_of_a_row_alone(tokens: list[tuple[str, list[float], int]]) -> None:
    with_vectors = [{"w": w, "v": np.array(v), "n": n, "m": 1} for w, v, n in tokens]
    without = [{"w": w, "n": n, "m": 1} for w, _, n in tokens]
    (rows,), (others,) = (FeatureEncoder().fit([x]).transform([x]) for x in (with_vectors, without))
    np.testing.assert_array_equal(np.delete(rows, [1, 2, 3], 1), others)
    np.testing.assert_array_equal(rows[:, 1:4], [v for _, v, _ in tokens])


# -- nothing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "X",
    [
        [[], [{"w": "a", "n": 1.0}]],
        [[], [["a", "b"]]],
        [np.empty((0, 2)), np.ones((1, 2))],
        [scipy.sparse.csr_matrix((0, 3)), scipy.sparse.csr_matrix(np.eye(3))],
    ],
)
def test_an_empty_sequence_has_no_rows(X: Any) -> None:
    encoder = FeatureEncoder().fit(X)
    empty, full = encoder.transform(X)
    assert len(empty) == 0
    assert len(full) > 0
    assert len(encoder.encode([])) == 0


def test_no_token_and_no_feature() -> None:
    for X in ([], [[]], [[], np.empty((0, 2))]):
        assert error_of(X) == "X: no tokens; pass at least one sequence with one token"
    for X in ([[{}]], [[{"a": None}, {"b": 0, "c": False}]], [[[], []]]):
        assert error_of(X) == "X: no token has any feature; pass at least one feature"


def test_pad_row_holds_no_value() -> None:
    dicts = FeatureEncoder().fit([[{"w": "a", "v": "b", "n": 1}]])
    assert dicts.pad_row.tolist() == [-1, -1]
    assert FeatureEncoder().fit([np.ones((1, 3))]).pad_row.tolist() == [0, 0, 0]
    assert FeatureEncoder().fit([[["a"], []]]).pad_row.tolist() == []


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("X", "message"),
    [
        ([np.array([[1, 2], [np.nan, 0]])], f"X[0][1]: column 0 is nan; {INFINITE}"),
        ([[[1.0]], [[2.0], [-np.inf]]], f"X[1][1]: column 0 is -inf; {INFINITE}"),
        (
            [scipy.sparse.csr_matrix(np.array([[0, 2, 0], [0, 0, 0], [1, 0, np.inf]]))],
            f"X[0][2]: column 2 is inf; {INFINITE}",
        ),
        (
            [[{"a": 1.0}], [{"a": 1.0}, {"b": {"c": float("nan")}}]],
            f"X[1][1]: feature 'b:c' is nan; {INFINITE}",
        ),
        ([[{"w": "a", "n": np.float32("inf")}]], f"X[0][0]: feature 'n' is inf; {INFINITE}"),
        (
            [[{"a": object()}]],
            "X[0][0]: feature 'a' is a object; use strings, numbers, flags, lists of strings or dicts",
        ),
        (
            [[{"a": [0.5, 1]}]],
            "X[0][0]: feature 'a' is a list of numbers; make it a vector with np.array, or use strings",
        ),
        (
            [torch.zeros(2, 3), torch.tensor([[1, 2, 0], [0, 0, torch.nan]])],
            f"X[1][1]: column 2 is nan; {INFINITE}",
        ),
        ([torch.zeros(3)], "X[0]: 1 dimensions; pass a 2-D array, one row per token"),
        ([[torch.tensor(1.0)]], "X[0]: 1 dimensions; pass a 2-D array, one row per token"),
        ([torch.tensor(1.0)], f"X[0]: expected a sequence of tokens, got a Tensor; {USE_A_SEQUENCE}"),
        ([np.array(1.0)], f"X[0]: expected a sequence of tokens, got a ndarray; {USE_A_SEQUENCE}"),
        (
            [torch.eye(2).to_sparse()],
            f"X[0]: a tensor of another kind (sparse_coo, float32); {DENSE_TENSOR}",
        ),
        (
            [[{"v": torch.ones(2, dtype=torch.complex64)}]],
            f"X[0][0]: a tensor of another kind (strided, complex64); {DENSE_TENSOR}",
        ),
        (
            [torch.empty(1, 2, device="meta")],
            f"X[0]: a tensor on the device 'meta', which has no values; {DENSE_TENSOR}",
        ),
        (
            [[{"v": torch.ones(1, 2)}]],
            "X[0][0]: feature 'v' is an array of float64 and shape (1, 2); pass a 1-D array of numbers",
        ),
        ([np.zeros(3)], "X[0]: 1 dimensions; pass a 2-D array, one row per token"),
        ([np.zeros((2, 2, 2))], "X[0]: 3 dimensions; pass a 2-D array, one row per token"),
        (["text"], f"X[0]: expected a sequence of tokens, got a str; {USE_A_SEQUENCE}"),
        ([[], "text"], f"X[1]: expected a sequence of tokens, got a str; {USE_A_SEQUENCE}"),
        ([5], f"X[0]: expected a sequence of tokens, got a int; {USE_A_SEQUENCE}"),
        ([[["a"]], None], f"X[1]: expected a sequence of tokens, got a NoneType; {USE_A_SEQUENCE}"),
        ([{"a": 1}], f"X[0]: expected a sequence of tokens, got a dict; {USE_A_SEQUENCE}"),
        (
            [["the", "cat"]],
            "X[0][0]: expected the features of a token, got a str; "
            "make each token a dict, a list of strings, or a row of numbers",
        ),
        (
            [[], [1, 2]],
            "X[1][0]: expected the features of a token, got a int; "
            "make each token a dict, a list of strings, or a row of numbers",
        ),
    ],
)
def test_values_that_cannot_be(X: Any, message: str) -> None:
    assert error_of(X) == message


def test_a_ragged_matrix() -> None:
    message = error_of([np.empty((0, 2)), [[1.0, 2.0], [1.0]]])
    assert message.startswith("X[1]: not a matrix of numbers (")
    assert message.endswith("; pass a 2-D array")


@pytest.mark.parametrize(
    ("X", "message"),
    [
        ([[{"a": 1}, ["x"]]], "X[0][1]: expected a feature dict, got a list; "),
        ([[{"a": 1}], [["x"]]], "X[1]: tokens are strings, but training had dicts; "),
        ([[["a", "b"], "cd"]], "X[0][1]: 'cd' is not a list of strings; "),
        ([[["a", "b"], ["c"], "cd"]], "X[0][2]: 'cd' is not a list of strings; "),
        ([[["a", "b"], {"k": 1, "l": 2}]], "X[0][1]: {'k': 1, 'l': 2} is not a list of strings; "),
        ([[["a", "b"]], [{"k": "v"}]], "X[1]: tokens are dicts, but training had strings; "),
        ([[["a", "b"], 5]], "X[0][1]: 5 is not a list of strings; "),
        (
            [np.eye(2), scipy.sparse.csr_array(np.eye(2))],
            "X[1]: tokens are sparse, but training had dense; ",
        ),
        ([np.eye(2), [["a", "b"]]], "X[1]: tokens are strings, but training had dense; "),
        (
            [scipy.sparse.csr_array(np.eye(2)), [{"a": 1}]],
            "X[1]: tokens are dicts, but training had sparse; ",
        ),
    ],
)
def test_two_forms_in_one_data_set(X: Any, message: str) -> None:
    assert error_of(X) == f"{message}use one form throughout"


@pytest.mark.parametrize("token", [["b", 3], ["b", "c", 3], {3}, [3.5], ["b", None]])
def test_a_token_that_is_not_all_strings(token: Any) -> None:
    stray = next(value for value in token if value != "b" and value != "c")
    message = f"X[0][1]: {stray!r} is not a string; use strings throughout"
    for features in ("auto", "columns", "bag"):
        assert error_of([[["a", "b"], token]], features=features) == message
    assert error_of([[["a", "b"], token]], fitted_on=[[["a", "b"]]]) == message


def test_another_form_than_in_training() -> None:
    forms: dict[str, Any] = {
        "dicts": [[{"w": "a"}]],
        "strings": [[["a", "b"]]],
        "dense": [np.eye(2)],
        "sparse": [scipy.sparse.csr_matrix(np.eye(2))],
    }
    for trained, fitted_on in forms.items():
        for form, X in forms.items():
            if form != trained:
                assert error_of(X, fitted_on=fitted_on) == (
                    f"X[0]: tokens are {form}, but training had {trained}; use one form throughout"
                )


def test_another_width_than_in_training() -> None:
    same = "pass the same features"
    message = f"X[1]: 3 columns, but training had 2; {same}"
    assert error_of([np.eye(2), np.eye(3)]) == message
    assert error_of([scipy.sparse.csr_array(np.eye(n)) for n in (2, 3)]) == message
    assert error_of([[["a"], ["a", "b"]]], fitted_on=[[["a", "b"]]]) == (
        "X[0][0]: 1 strings, but training had 2; give every token equally many, or use features='bag'"
    )


def test_columns_of_different_lengths() -> None:
    remedy = "give every token equally many, or use features='bag'"
    X = [[["a"], ["b", "c"]], [["d", "e", "f"]]]
    assert error_of(X, features="columns") == f"X: tokens have 1, 2, 3 strings; {remedy}"
    assert error_of([[[], []]], features="columns") == f"X: tokens have 0 strings; {remedy}"


def test_an_unknown_reading() -> None:
    assert error_of([[["a"]]], features="rows") == (
        "features: 'rows' is not known; use 'auto', 'columns' or 'bag'"
    )


# -- saving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("X", "new", "features"),
    [
        (
            [[{"w": "é", "n": 2.0, "l": ["x"]}, {"w": "b", "t": "N"}]],
            [[{"w": "?", "n": 1, "m": 2}, {"t": "N"}]],
            "auto",
        ),
        (
            [[{"w": "a", "z": np.ones(2), "b": np.zeros(1), "n": 1}]],
            [[{"z": np.array([3.0, 4.0]), "b": np.array([5.0]), "m": 2}]],
            "auto",
        ),
        ([[["a", "x"], ["b", "x"]]], [[["b", "?"], ["?", "x"]]], "auto"),
        ([[["a", "x"], ["b"]]], [[["b", "?"], [], ["x"]]], "bag"),
        ([np.eye(2)], [np.ones((3, 2))], "auto"),
        ([scipy.sparse.csr_matrix(np.eye(3))], [scipy.sparse.csr_matrix(np.ones((1, 3)))], "auto"),
    ],
)
def test_json_round_trip(X: Any, new: Any, features: str) -> None:
    encoder = FeatureEncoder(features=features).fit(X)
    # As a model file holds it.
    read = FeatureEncoder.from_json(json.loads(json.dumps(encoder.to_json(), sort_keys=True)))
    assert read == encoder
    assert read.blocks == encoder.blocks
    for data in (X, new):
        for one, other in zip(encoder.transform(data), read.transform(data), strict=True):
            np.testing.assert_array_equal(one, other)


# -- labels ----------------------------------------------------------------------------------------


def test_labels_are_numbered_in_order() -> None:
    encoder = LabelEncoder().fit([["O", "B"], [], ["I", "O"]])
    assert encoder.classes == ["B", "I", "O"]
    encoded = encoder.transform([["O", "B"], [], ["?", "I", None]])
    assert [labels.tolist() for labels in encoded] == [[2, 0], [], [UNSEEN, 1, MISSING]]
    assert all(labels.dtype == np.int64 for labels in encoded)
    assert encoder.names([2, 0, 1]) == ["O", "B", "I"]
    assert encoder.names(np.array([1, 1])) == ["I", "I"]


def test_labels_that_fit() -> None:
    X = [[["a"], ["b"]], np.ones((1, 2)), []]
    y = [("A", "B"), np.array(["C"]), []]
    checked = check_labels(X, y)
    assert checked == [["A", "B"], ["C"], []]
    assert all(type(label) is str for labels in checked for label in labels)


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        ([[["a"]]], [], "y: 0 label sequences for 1 sequences of tokens; pass one per sequence"),
        ([[["a"]]], ["A"], "y[0]: expected a list of labels, got a str; pass a list"),
        ([[["a"]]], [None], "y[0]: expected a list of labels, got a NoneType; pass a list"),
        (
            [np.eye(2)],
            [np.eye(2)],
            "y[0]: expected a list of labels, got a ndarray of shape (2, 2); pass a list; for an image, "
            "structure=grid()",
        ),
        (
            [np.eye(2), np.eye(2)],
            [["A", "B"], ["A"]],
            "y[1]: 1 labels for 2 tokens; give every token one label, or None",
        ),
        (
            [[["a"], ["b"]]],
            [["A", 1]],
            "y[0][1]: label 1 is not a string; convert labels with str(); None stands for a missing label",
        ),
        ([5], [["A"]], f"X[0]: expected a sequence of tokens, got a int; {USE_A_SEQUENCE}"),
    ],
)
def test_labels_that_do_not_fit(X: Any, y: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        check_labels(X, y)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.array([[1.0], [1e200]]), r"^X\[0\]\[1\]: column 0 is 1e\+200, too large; rescale the feature$"),
        (
            scipy.sparse.coo_array(np.array([1.0, 2.0])),
            r"^X\[0\]: 1 dimensions; pass a 2-D array, one row per token$",
        ),
    ],
)
def test_numbers_no_kernel_can_use(x: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        FeatureEncoder().fit([x]).transform([x])


# -- some columns of the rows ----------------------------------------------------------------------

MIXED = [
    [
        {"w": "a", "s": "x", "p": "P", "n": 2.0, "v": np.array([1.0, 2.0])},
        {"w": "b", "p": "Q", "v": np.array([3.0, 4.0])},
    ],
    [{"w": "a", "s": "y", "p": "P", "m": 1.0, "n": 0.5, "v": np.array([5.0, 6.0])}],
]


def test_columns_are_found_by_name() -> None:
    encoder = FeatureEncoder().fit(MIXED)
    assert encoder.columns_named(["p", "w"]) == [2, 0]
    assert encoder.columns_named([]) == []
    for name in ("n", "v", "z"):
        with pytest.raises(InputError) as caught:
            encoder.columns_named(["w", name])
        assert str(caught.value) == (
            f"feature {name!r}: not a feature with string values in the training data; "
            "use one of those: 'w', 's', 'p'"
        )
        with pytest.raises(InputError):
            encoder.only([name])
        with pytest.raises(InputError):
            encoder.without([name])
    assert FeatureEncoder().fit([[["a", "b"]]]).columns_named(["1"]) == [1]
    with pytest.raises(InputError, match="use one of those: none"):
        FeatureEncoder().fit([np.ones((2, 3))]).columns_named(["0"])


def test_some_templates_alone() -> None:
    encoder = FeatureEncoder().fit(MIXED)
    view = encoder.only(["p", "w"])
    assert view.templates == ["p", "w"]
    assert view.blocks == [Block("categorical", 0, 2, ("p", "w"))]
    assert view.values == [encoder.values[2], encoder.values[0]]
    assert (view.has_sparse, view.n_sparse, view.dense_width) == (False, 0, 0)
    assert (view.attributes, view.columns) == ({}, [])
    first, second = map(view.select, encoder.transform(MIXED))
    assert (first.tolist(), second.tolist()) == ([[0, 0], [1, 1]], [[0, 0]])
    assert view.pad_row.tolist() == [-1, -1]
    assert encoder.only([]).blocks == []


def test_all_but_some_templates() -> None:
    encoder = FeatureEncoder().fit(MIXED)
    view = encoder.without(["s"])
    assert view.templates == ["w", "p"]
    assert [block.kind for block in view.blocks] == ["categorical", "dense", "sparse"]
    assert [(block.start, block.stop) for block in view.blocks] == [(0, 2), (2, 4), (4, None)]
    assert (view.has_sparse, view.n_sparse, view.dense_width) == (True, 2, 2)
    assert view.attributes == encoder.attributes
    rows = encoder.transform(MIXED)
    for whole, some in zip(rows, map(view.select, rows), strict=True):
        assert some.tolist() == np.delete(whole, 1, axis=1).tolist()
    assert view.pad_row.tolist() == np.delete(encoder.pad_row, 1).tolist()
    bare = encoder.without(["w", "s", "p"])
    assert [block.kind for block in bare.blocks] == ["dense", "sparse"]


def test_columns_of_tensors_and_of_batches() -> None:
    encoder = FeatureEncoder().fit(MIXED)
    rows = encoder.transform(MIXED)[0]
    batch = torch.from_numpy(np.stack([rows, rows + 1]))
    for view in (encoder.only(["p"]), encoder.without(["w"]), encoder.only([])):
        found = view.select(batch)
        assert found.shape[:2] == (2, 2)
        assert found[1].tolist() == view.select(rows + 1).tolist()


@given(
    st.lists(st.tuples(*[st.sampled_from("abc")] * 4), min_size=1, max_size=5),
    st.lists(st.sampled_from("0123"), unique=True),
)
def test_a_view_encodes_as_an_encoder_of_those_columns(
    tokens: list[tuple[str, ...]], names: list[str]
) -> None:
    encoder = FeatureEncoder("columns").fit([tokens])
    rest = [name for name in "0123" if name not in names]
    for view, kept in ((encoder.only(names), names), (encoder.without(names), rest)):
        assert [[str(p)] for p in range(4) if str(p) in kept] == sorted([n] for n in view.templates)
        if kept:
            few = [[tuple(token[int(name)] for name in view.templates) for token in tokens]]
            alone = FeatureEncoder("columns").fit(few)
            assert view.values == alone.values
            assert view.select(encoder.encode(tokens)).tolist() == alone.transform(few)[0].tolist()
            assert view.pad_row.tolist() == alone.pad_row.tolist()


def test_columns_of_sparse_matrices_become_an_array_once() -> None:
    """An encoder that was loaded, extended or copied finds ids as the first one does."""
    X = [scipy.sparse.csr_matrix(np.eye(6)[[1, 4]]), scipy.sparse.csr_matrix(np.eye(6)[[2]])]
    encoder = FeatureEncoder().fit(X)
    loaded = FeatureEncoder.from_json(json.loads(json.dumps(encoder.to_json())))
    more = encoder.extended([scipy.sparse.csr_matrix(np.eye(6)[[3]])])
    assert encoder.columns == loaded.columns == [1, 2, 4]
    assert more.columns == [1, 2, 3, 4]
    new = scipy.sparse.csr_matrix(np.eye(6)[[4, 5]])
    assert encoder.encode(new)[:, 0].tolist() == loaded.encode(new)[:, 0].tolist() == [2, 3 + 5]
    assert more.encode(new)[:, 0].tolist() == [3, 4 + 5]


def test_sequences_encoded_together_are_encoded_as_alone():
    """More of them than are encoded at once, with unknown values and missing keys."""
    rng = np.random.default_rng(0)

    def token():
        found = {f"k{p}": f"v{rng.integers(12)}" for p in range(4) if rng.random() < 0.8}
        return found | {"n": float(rng.integers(3)), f"flag{rng.integers(9)}": True}

    X = [[token() for _ in range(rng.integers(0, 5))] for _ in range(3 * encode.AT_ONCE + 1)]
    X[0] = [token() for _ in range(3)]
    encoder = FeatureEncoder().fit(X[:3])
    assert encoder.templates
    for x, rows in zip(X, encoder.transform(X), strict=True):
        if x:  # without tokens a row has no sparse block
            np.testing.assert_array_equal(rows, encoder.encode(x))
            known = encoder.values
            for p, key in enumerate(encoder.templates):
                names = [t.get(key) for t in x]
                new = [v for v in names if v not in known[p]]
                ids = {v: len(known[p]) + new.index(v) for v in new} | known[p] | {None: -1}
                assert rows[:, p].tolist() == [ids[v] for v in names]


def test_a_token_that_makes_entries_for_missing_keys_is_left_as_it_is():
    encoder = FeatureEncoder().fit([[{"a": "x", "b": "y"}]])
    token = defaultdict(lambda: "x", b="y")
    assert encoder.encode([token]).tolist() == [[-1.0, 0.0]]
    assert dict(token) == {"b": "y"}


def test_columns_have_the_same_ids_from_a_table_and_by_search(monkeypatch):
    rng = np.random.default_rng(1)
    seen, new = (scipy.sparse.random(6, 40, 0.1, "csr", rng=rng) for _ in range(2))
    encoder = FeatureEncoder().fit([seen])
    by_table = encoder.encode(new)
    assert by_table[:, ::2].max() >= len(encoder.columns)  # some were not seen
    monkeypatch.setattr(encode, "MOST_PLACES", 39)
    np.testing.assert_array_equal(encoder.encode(new), by_table)
    more = encoder.extended([new])
    assert set(more.encode(new)[:, ::2].ravel()) <= {-1, *range(len(more.columns))}


def test_rows_of_matrices_that_are_stacked_are_those_of_each():
    """Whatever their dtype, the order of their entries, and what lies behind the last of them."""
    flags = scipy.sparse.csr_matrix((np.ones(4, bool), [1, 1, 2, 2], [0, 4]), shape=(1, 6))
    bytes_ = scipy.sparse.csr_matrix((np.array([100, 100], np.int8), [3, 3], [0, 2]), shape=(1, 6))
    longer = scipy.sparse.csr_matrix(([1.0, 2.0, 3.0], [5, 0, 3], [0, 2, 3]), shape=(2, 6))
    longer.indptr = np.array([0, 1, 2], np.int32)
    parts = [flags, bytes_, longer, scipy.sparse.csr_matrix(np.eye(2, 6))]
    wanted = [[0, 2, 2, 0, 0, 0], [0, 0, 0, 200, 0, 0], [0, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 0]]
    found = stacked(parts)
    np.testing.assert_array_equal(found.toarray(), [*wanted, *np.eye(2, 6)])
    assert found.has_canonical_format
    for part in parts:
        np.testing.assert_array_equal(stacked([part]).toarray(), found[: part.shape[0]].toarray())
        found = found[part.shape[0] :]


def test_what_lies_behind_the_last_entry_of_a_matrix_is_no_feature():
    longer = scipy.sparse.csr_matrix(([1.0, 2.0, 3.0], [5, 0, 3], [0, 2, 3]), shape=(2, 6))
    longer.indptr = np.array([0, 1, 2], np.int32)
    assert FeatureEncoder().fit([longer]).columns == [0, 5]


def test_complex_numbers_in_a_matrix_are_refused_with_their_place():
    good = scipy.sparse.csr_matrix(np.eye(2))
    with pytest.raises(InputError, match=r"X\[1\].*complex"):
        FeatureEncoder().fit([good, good]).transform([good, good.astype(complex)])
