"""Which labels may follow which, against the definition of each scheme and against enumeration."""

from __future__ import annotations

import json
from itertools import pairwise, product
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from structgp import metrics
from structgp.data.examples import read_examples
from structgp.data.schemes import Allowed, allowed
from structgp.errors import InputError, StructgpWarning

BIO = ["B-X", "B-Y", "I-X", "I-Y", "O"]
IOBES = ["B-X", "E-X", "I-X", "O", "S-X", "S-Y"]
BILOU = ["B-X", "I-X", "L-X", "O", "U-X", "U-Y"]


def bio(labels: tuple[str, ...]) -> bool:
    """An I goes on with a B or an I of its type."""
    for before, label in pairwise(("O", *labels)):
        tag, _, kind = label.partition("-")
        if tag == "I" and before not in (f"B-{kind}" if kind else "B", label):
            return False
    return True


def iobes(labels: tuple[str, ...]) -> bool:
    """O, S, and B I ... I E of one type, one after the other."""
    kind: str | None = None  # of the span that is open
    for label in labels:
        tag, _, this = label.partition("-")
        if tag in ("I", "E", "L"):
            if kind != this:
                return False
            kind = this if tag == "I" else None
        elif kind is not None:
            return False
        elif tag == "B":
            kind = this
    return kind is None


def says(found: Allowed, classes: list[str], labels: tuple[str, ...]) -> bool:
    return found.breaks([classes.index(label) for label in labels]) is None


@pytest.mark.parametrize(
    ("name", "classes", "valid"),
    [
        ("BIO", BIO, bio),
        ("IOB2", BIO, bio),
        ("bio", BIO, bio),
        ("BIO", ["B-X", "I-X"], bio),
        ("BIO", ["B", "I", "O"], bio),
        ("BIO", ["B", "I"], bio),
        ("BIO", ["B-X", "B-Y", "I-X", "O", "OTHER"], bio),
        ("BIO", ["B-a-b", "B-a-c", "I-a-b", "I-a-c"], bio),
        ("IOBES", IOBES, iobes),
        ("BIOES", IOBES, iobes),
        ("BIOES", ["B-X", "E-X", "I-X", "S-X"], iobes),
        ("IOBES", ["B", "E", "I", "O", "S"], iobes),
        ("IOBES", ["B-X", "B-Y", "E-X", "E-Y", "O"], iobes),
        ("BILOU", BILOU, iobes),
        ("bilou", ["B", "I", "L", "U"], iobes),
    ],
)
def test_schemes_allow_what_is_well_formed(name: str, classes: list[str], valid: Any) -> None:
    found = allowed(name, classes)
    V = len(classes)
    assert found.follows.shape == (V, V)
    assert found.starts.shape == found.ends.shape == (V,)
    for n in range(4):
        for labels in product(classes, repeat=n):
            assert says(found, classes, labels) == valid(labels), labels


@pytest.mark.parametrize(("name", "classes"), [("BIO", BIO), ("IOBES", IOBES)])
def test_spans_of_what_is_allowed_are_what_the_tags_say(name: str, classes: list[str]) -> None:
    """Every B and S begins a span, and nothing else does."""
    found = allowed(name, classes)
    for labels in product(classes, repeat=3):
        if says(found, classes, labels):
            starts = [start for start, *_ in metrics.chunks(labels)]
            assert starts == [t for t, label in enumerate(labels) if label[0] in "BS"]


def test_labels_without_a_tag_are_outside() -> None:
    found = allowed("BIO", ["BAR", "B-X", "I-X", "Inside", "NOUN"])
    assert found.follows.astype(int).tolist() == [
        [1, 1, 0, 1, 1],
        [1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1],
        [1, 1, 0, 1, 1],
        [1, 1, 0, 1, 1],
    ]
    assert found.starts.tolist() == [True, True, False, True, True]
    assert found.ends.all()


def test_forbidden_pairs() -> None:
    found = allowed({"forbidden": [("a", "b"), (None, "c"), ["b", None]]}, ["a", "b", "c"])
    assert found.follows.astype(int).tolist() == [[1, 0, 1], [1, 1, 1], [1, 1, 1]]
    assert found.starts.tolist() == [True, True, False]
    assert found.ends.tolist() == [True, False, True]


def test_allowed_pairs() -> None:
    classes = ["a", "b", "c"]
    found = allowed({"allowed": [("a", "b"), ("b", "a")]}, classes)
    assert found.follows.astype(int).tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 0]]
    # Of beginnings and ends nothing is said.
    assert found.starts.all()
    assert found.ends.all()
    found = allowed({"allowed": [("a", "b"), (None, "a")]}, classes)
    assert found.starts.tolist() == [True, False, False]
    assert found.ends.all()
    found = allowed({"allowed": (("a", "b"), ("b", None))}, classes)
    assert found.starts.all()
    assert found.ends.tolist() == [False, True, False]


def test_no_pairs_at_all() -> None:
    assert allowed({"forbidden": []}, ["a", "b"]).follows.all()
    assert not allowed({"allowed": []}, ["a", "b"]).follows.any()


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ("IOB1", "'IOB1' is not a scheme; use one of BIO, IOB2, IOBES, BIOES, BILOU"),
        ({}, "{} is not a declaration"),
        (7, "7 is not a declaration"),
        ({"forbidden": [], "allowed": []}, "is not a declaration"),
        ({"banned": []}, "is not a declaration"),
        ([("a", "b")], "is not a declaration"),
        ({"forbidden": "ab"}, "'ab' is not a list of pairs"),
        ({"forbidden": None}, "None is not a list of pairs"),
        ({"forbidden": ["ab"]}, "'ab' is not a pair of labels"),
        ({"forbidden": [("a",)]}, "('a',) is not a pair of labels"),
        ({"forbidden": [("a", "b", "a")]}, "is not a pair of labels"),
        ({"forbidden": [3]}, "3 is not a pair of labels"),
        ({"forbidden": [("a", "d")]}, "'d' is not a label in the training data; use a, b, O"),
        ({"allowed": [(0, "a")]}, "0 is not a label"),
        ({"allowed": [(["a"], "b")]}, "['a'] is not a label"),
        ({"allowed": [(None, None)]}, "(None, None) has no label"),
        ("BIO", "the labels a, b, O do not belong to the scheme BIO"),
        ("IOBES", "the labels a, b, O do not belong to the scheme IOBES"),
    ],
)
def test_errors(declared: Any, said: str) -> None:
    with pytest.raises(InputError) as caught:
        allowed(declared, ["a", "b", "O"], "here")
    assert caught.value.place == "here"
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bio_has_no_ends_and_singles() -> None:
    for label in ("E-X", "S-X", "L-X", "U-X"):
        with pytest.raises(InputError, match="not belong to the scheme BIO"):
            allowed("BIO", ["B-X", "I-X", label])


# -- labellings ---------------------------------------------------------------------------------------


@st.composite
def rules(draw: st.DrawFn) -> Allowed:
    V = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    bans = draw(st.sampled_from([0.0, 0.3, 0.6]))
    return Allowed(*(rng.random(shape) >= bans for shape in ((V, V), V, V)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rules())
def test_breaks_nowhere_if_and_only_if_allowed(oracles: ModuleType, found: Allowed) -> None:
    V = len(found.starts)
    for n in range(4):
        for labels in oracles.labellings(n, V):
            t = found.breaks(labels.tolist())
            obeys = oracles.obeys(labels, found.follows, found.starts, found.ends)
            assert (t is None) == obeys
            if t is not None:
                # Up to there nothing is wrong, but that it may not be the end.
                anywhere = Allowed(found.follows, found.starts, np.ones(V, bool))
                assert anywhere.breaks(labels[:t].tolist()) is None
                assert found.breaks(labels[: t + 1].tolist()) == t or t < n - 1


def test_the_first_place_that_breaks() -> None:
    found = allowed({"forbidden": [("a", "b"), (None, "b"), ("a", None)]}, ["a", "b"])
    a, b, none = 0, 1, -1
    assert found.breaks([b, a, b]) == 0
    assert found.breaks([a, a, b]) == 2
    assert found.breaks([none, b, a]) == 2
    assert found.breaks([a, none, b]) is None
    assert found.breaks([none, b, none]) is None
    assert found.breaks([a, b, b, a]) == 1
    assert found.breaks([]) is None
    last = allowed({"forbidden": [("b", "a")]}, ["a", "b"])
    assert last.breaks([none, a]) is None
    assert last.breaks([b, a]) == 1


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rules(), st.integers(0, 4), st.integers(0, 2**16), st.sampled_from([0.3, 0.6, 1.0]))
def test_has_labelling(oracles: ModuleType, found: Allowed, T: int, seed: int, share: float) -> None:
    V = len(found.starts)
    possible = np.random.default_rng(seed).random((T, V)) < share
    there = any(
        oracles.obeys(y, found.follows, found.starts, found.ends)
        and all(possible[t, label] for t, label in enumerate(y))
        for y in oracles.labellings(T, V)
    )
    assert found.has_labelling(possible) is there


def test_kept_in_a_file() -> None:
    found = allowed("IOBES", IOBES)
    again = Allowed.from_json(json.loads(json.dumps(found.to_json())))
    assert again is not None
    for name in ("follows", "starts", "ends"):
        assert getattr(again, name).dtype == bool
        assert np.array_equal(getattr(again, name), getattr(found, name))
    assert Allowed.from_json(None) is None


# -- training data ------------------------------------------------------------------------------------

X = [[["u"], ["v"], ["w"]], [["u"], ["w"]]]


def test_examples_with_labels_missing() -> None:
    found = read_examples([*X, []], [["b", None, "a"], ["a", "b"], []], constraints=None)
    assert [y.tolist() for y in found.y] == [[1, -1, 0], [0, 1], []]
    assert found.some_missing
    assert found.label_counts.tolist() == [2, 2]
    assert found.constraints is None
    assert not read_examples(X, [["b", "a", "a"], ["a", "b"]]).some_missing


def test_sequences_without_a_label_are_left_out() -> None:
    with pytest.warns(StructgpWarning, match="1 of 3 sequences have no label at all"):
        found = read_examples(
            [X[1], *X],
            [[None, None], ["b", None, "a"], ["a", "b"]],
            weights=[5, 1, 2],
            constraints={"forbidden": [("b", "b")]},
        )
    assert [len(r) for r in found.rows] == [0, 3, 2]
    assert found.weights is not None
    assert found.weights.tolist()[1:] == [1, 2]
    assert found.constraints is not None
    assert found.constraints.follows.tolist() == [[True, True], [True, False]]


def test_no_label_at_all() -> None:
    with pytest.raises(InputError, match=r"^y: no token has a label"):
        read_examples(X, [[None] * 3, [None] * 2])


@pytest.mark.parametrize(
    ("y", "place", "said"),
    [
        ([["a", "b", "b"], ["a", "b"]], "y[0][2]", "label 'b' after 'b', which the constraints"),
        ([["a", "b", "a"], ["c", "b"]], "y[1][0]", "label 'c' at token 1 of 2"),
        ([["a", "b", "c"], ["a", "c"]], "y[0][2]", "label 'c' at token 3 of 3"),
        ([["a", None, "c"], ["a", "b"]], "y[0][2]", "label 'c' at token 3 of 3"),
        ([["b", None, "b"], [None, "c"]], "y[1][1]", "label 'c' at token 2 of 2"),
        ([["d", None, "b"], ["a", "c"]], "y[0][0]", "no labelling that agrees with its labels"),
    ],
)
def test_labels_that_break_the_constraints(y: Any, place: str, said: str) -> None:
    forbidden = [("b", "b"), (None, "c"), ("c", None), *(("d", x) for x in "acd")]
    if not any("d" in labels for labels in y):
        forbidden = forbidden[:3]
    with pytest.raises(InputError) as caught:
        read_examples(X, y, constraints={"forbidden": forbidden}, classes=["a", "b", "c"])
    assert caught.value.place == place
    assert said in str(caught.value)


def test_places_count_the_sequences_left_out() -> None:
    with (
        pytest.warns(StructgpWarning),
        pytest.raises(InputError, match=r"^y\[1\]\[1\]: label 'a' after 'b'"),
    ):
        read_examples(X, [[None] * 3, ["b", "a"]], constraints={"forbidden": [("b", "a")]})
