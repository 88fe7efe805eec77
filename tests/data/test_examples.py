"""Training data as a fit needs it: what is left out, what counts, and in which order labels come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from structgp.data.examples import read_examples
from structgp.errors import InputError, StructgpWarning

X: list[Any] = [[["a"], ["b"]], [["c"]], [["a"], ["a"], ["d"]]]
Y: list[list[str | None]] = [["A", "B"], ["C"], ["A", None, "B"]]


def test_what_is_read() -> None:
    found = read_examples(X, Y)
    assert found.labels.classes == ["A", "B", "C"]
    assert [y.tolist() for y in found.y] == [[0, 1], [2], [0, -1, 1]]
    assert [r.tolist() for r in found.rows] == [[[0], [1]], [[2]], [[0], [0], [3]]]
    assert found.label_counts.tolist() == [2, 2, 1]
    assert (found.weights, found.constraints, found.some_missing) == (None, None, True)
    assert not read_examples(X[:2], Y[:2]).some_missing


def test_sequences_without_a_label_are_left_out() -> None:
    y = [Y[0], [None], Y[2]]
    with pytest.warns(StructgpWarning, match=r"^1 of 3 sequences have no label at all"):
        found = read_examples(X, y, weights=[1.0, 2.0, 3.0])
    assert [len(r) for r in found.rows] == [2, 0, 3], "nothing is in its place"
    assert found.n_sequences == 2
    assert found.label_counts.tolist() == [4, 4]
    assert found.encoder.values == [{"a": 0, "b": 1, "d": 2}], "features of theirs are not learned"
    assert found.labels.classes == ["A", "B"]


def test_sequences_without_weight_are_left_out() -> None:
    found, without = read_examples(X, Y, weights=[1, 0, 1]), read_examples(X[::2], Y[::2])
    assert found.encoder == without.encoder
    assert found.labels == without.labels
    assert found.label_counts.tolist() == without.label_counts.tolist()
    assert found.n_sequences == 2
    assert np.array_equal(np.concatenate(found.rows), np.concatenate(without.rows))


def test_sequences_of_nothing_are_no_sequences_without_a_label() -> None:
    assert len(read_examples([*X, []], [*Y, []]).rows) == 4


def test_labels_count_as_often_as_their_sequences() -> None:
    twice = read_examples([*X, X[2]], [*Y, Y[2]]).label_counts
    found = read_examples(X, Y, weights=[1.0, 1.0, 2.0]).label_counts
    np.testing.assert_array_equal(found, twice)
    np.testing.assert_allclose(read_examples(X, Y, weights=[0.5, 0.25, 1]).label_counts, [1.5, 1.5, 0.25])


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        (["many", 1, 1], "not all numbers"),
        ([1, 1], r"shape \(2,\) for 3 sequences"),
        ([[1], [1], [1]], r"shape \(3, 1\) for 3 sequences"),
        (2.0, r"shape \(\) for 3 sequences"),
        ([1, -1, 1], "must be finite, not negative, and not all zero"),
        ([1, np.nan, 1], "must be finite, not negative, and not all zero"),
        ([1, np.inf, 1], "must be finite, not negative, and not all zero"),
        ([0, 0, 0], "must be finite, not negative, and not all zero"),
    ],
)
def test_weights_that_are_none(weights: Any, problem: str) -> None:
    with pytest.raises(InputError, match=f"^sample_weight: {problem}; pass"):
        read_examples(X, Y, weights=weights)


@pytest.mark.filterwarnings("ignore:.*no label at all")
def test_nothing_to_learn_from() -> None:
    none: list[list[str | None]] = [[None] * len(y) for y in Y]
    with pytest.raises(InputError, match=r"^y: no token has a label"):
        read_examples(X, none)
    with pytest.raises(InputError, match=r"^y: no token with a label is in a sequence with weight"):
        read_examples(X, [none[0], none[1], Y[2]], weights=[1, 1, 0])
    encoder = read_examples(X, Y).encoder
    for nothing in ([], [[], []]):
        with pytest.raises(InputError, match=r"^X: no tokens"):
            read_examples(nothing, nothing, encoder=encoder, classes=["A", "B"])


def test_labels_known_already_come_first_and_stay() -> None:
    assert read_examples(X, Y, classes=["Z", "B"]).labels.classes == ["A", "B", "C", "Z"]
    found = read_examples(X, Y, encoder=read_examples(X, Y).encoder, classes=["Z", "B"])
    assert found.labels.classes == ["Z", "B", "A", "C"]
    assert found.y[0].tolist() == [2, 1]
    assert found.label_counts.tolist() == [0, 2, 2, 1]


def test_one_label_is_too_few_unless_another_is_known() -> None:
    with pytest.raises(InputError, match=r"^y: every token has the same label, 'C'"):
        read_examples(X[1:2], Y[1:2])
    assert read_examples(X[1:2], Y[1:2], classes=["A"]).n_labels == 2


@pytest.mark.filterwarnings("ignore:.*no label at all")
def test_what_breaks_the_constraints_is_named_by_its_place_in_the_data() -> None:
    rules = {"forbidden": [("A", "B")]}
    with pytest.raises(InputError, match=r"^y\[0\]\[1\]: label 'B' after 'A', which"):
        read_examples(X, Y, constraints=rules)
    y = [[None, None], Y[1], ["A", "B", "C"]]
    with pytest.raises(InputError, match=r"^y\[2\]\[1\]: label 'B' after 'A'"):
        read_examples(X, y, constraints=rules)
    with pytest.raises(InputError, match=r"^y\[2\]\[1\]: label 'B' after 'A'"):
        read_examples(X, [["B", "A"], *y[1:]], constraints=rules, weights=[0, 1, 1])


def test_known_labels_that_nothing_between_them_can_join() -> None:
    rules = {"forbidden": [("A", label) for label in "AC"] + [("B", "B"), ("C", "B"), ("A", "B")]}
    with pytest.raises(InputError, match=r"^y\[2\]\[0\]: no labelling that agrees with its labels"):
        read_examples(X, [["B", "A"], Y[1], ["A", None, "B"]], constraints=rules)
    free = read_examples(X, [["B", "A"], Y[1], ["B", None, "A"]], constraints=rules)
    assert free.constraints is not None
    assert not free.constraints.follows[0].any()


@pytest.mark.filterwarnings("ignore:.*no label at all")
def test_mistakes_are_named_by_their_place_in_the_data() -> None:
    wrong: list[Any] = [X[0], X[1], [["a"], ["a", "b"], ["d"]]]
    with pytest.raises(InputError, match=r"^X\[2\]\[1\]: 2 strings, but training had 1"):
        read_examples(wrong, [[None, None], Y[1], Y[2]], encoder=read_examples(X, Y).encoder)
