"""Labels of several annotators: as users pass them, as numbers, and by vote."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from structgp import Annotations, InputError
from structgp.data.annotations import Given, majority
from structgp.data.examples import read_examples

SAID: list[dict[str, Any]] = [
    {"ann": ["B", "I", "O"], "bob": ["B", None, "B"]},
    {"bob": ["O"]},
    {"ann": ["O", "O"], "cyd": None},
]
X = [[{"w": "a"}, {"w": "b"}, {"w": "c"}], [{"w": "a"}], [{"w": "b"}, {"w": "d"}]]


def test_names_parts_and_columns() -> None:
    found = Annotations(SAID)
    assert (found.names, len(found)) == (["ann", "bob"], 3)
    assert found[1:].given == [{"bob": ["O"]}, {"ann": ["O", "O"]}]
    assert found.some([2, 0]).given == [found.given[2], found.given[0]]
    columns = {"ann": [SAID[0]["ann"], None, ["O", "O"]], "bob": [SAID[0]["bob"], ["O"], None]}
    assert Annotations.of(columns).given == found.given
    with pytest.raises(InputError, match=r"annotators have 1, 2 sequences; pass None"):
        Annotations.of({"ann": [["O"]], "bob": [["O"], None]})


def test_majority_and_its_ties() -> None:
    said: list[dict[str, list[str | None]]] = [
        {"a": ["X", "Y", None], "b": ["X", "X", None], "c": ["Y", None, None]},
        {"a": ["Y"], "b": ["Y"]},
    ]
    # Of the second token, X and Y have a vote each; Y has four of all votes and X three.
    assert majority(said, [3, 1]) == [["X", "Y", None], ["Y"]]


def test_examples_of_annotations() -> None:
    examples = read_examples(X, Annotations(SAID))
    given = examples.given
    assert given is not None
    assert examples.labels.classes == ["B", "I", "O"]
    assert [y.tolist() for y in examples.y] == [[0, 1, 2], [2], [2, 2]]  # 'O' is more frequent than 'B'
    assert given.starts.tolist() == [0, 5, 6, 8]
    rows = np.stack([given.sequence, given.token, given.annotator, given.label, given.before], 1).tolist()
    assert rows[:5] == [[0, 0, 0, 0, 3], [0, 1, 0, 1, 0], [0, 2, 0, 2, 1], [0, 0, 1, 0, 3], [0, 2, 1, 0, 3]]
    part = given.part([2, 1])
    assert part.sequence.tolist() == [0, 0, 1]
    assert part.label.tolist() == [2, 2, 2]
    assert [y.tolist() for y in given.labellings()] == [[0, 1, 2], [0, -1, 0], [2], [2, 2]]
    assert given.n_contexts == 1
    assert Given.read([{"ann": ["B"]}], ["ann"], ["B", "I"], True).n_contexts == 3


def test_a_sequence_without_weight_is_left_out() -> None:
    examples = read_examples(X, Annotations(SAID), weights=[1, 0, 1])
    assert examples.given is not None
    assert examples.given.starts.tolist() == [0, 5, 5, 7]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([{"ann": ["B", "I"]}, {}, {}], r"annotations\[0\]\['ann'\]: 2 labels for 3 tokens"),
        ([{}, {"ann": "B"}, {}], r"annotations\[1\]\['ann'\]: expected a list of labels, got a str"),
        ([{}, {"ann": [7]}, {}], r"annotations\[1\]\['ann'\]\[0\]: label 7 is not a string"),
        ([{}, {}], r"y: annotations of 2 sequences for 3 sequences of tokens"),
        ([{}, {}, {}], "y: no token has a label"),
    ],
)
def test_what_does_not_fit(said: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        read_examples(X, Annotations(said))


def test_what_is_not_a_dict() -> None:
    with pytest.raises(
        InputError, match=r"^annotations\[1\]: expected a dict from annotator to labels, got a list"
    ):
        Annotations([{}, ["B"]])  # type: ignore[list-item]
