"""Labels that look like slips."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from structgp import StructgpWarning, StructuredGPClassifier
from structgp.data.labels import LabelEncoder
from structgp.data.odd_labels import meant_by, single, warn_of_odd_labels


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("NMAE", "NAME"),
        ("NAM", "NAME"),
        ("NAMEE", "NAME"),
        ("NANE", "NAME"),
        ("name", "NAME"),
        ("B-QUNATITY", "B-QUANTITY"),
    ],
)
def test_slips(slip: str, meant: str) -> None:
    assert meant_by({slip: 2, meant: 20, "OTHER": 300}) == {slip: meant}
    assert meant_by({slip: 2, meant: 19}) == {}  # not much more frequent
    assert meant_by({slip: 4, meant: 400}) == {}  # too often for a slip


@pytest.mark.parametrize(
    ("one", "other"),
    [("I-NAME", "B-NAME"), ("NN", "NNS"), ("L1", "L2"), ("ROW1", "ROW2"), ("B", "I"), ("NAME", "NUMBER")],
)
def test_labels_that_are_close_on_purpose(one: str, other: str) -> None:
    assert meant_by({one: 1, other: 1000}) == {}


def examples(**counts: int) -> SimpleNamespace:
    return SimpleNamespace(labels=LabelEncoder(list(counts)), label_counts=np.array([*counts.values()]))


def test_one_warning_names_all() -> None:
    with pytest.warns(StructgpWarning) as caught:
        warn_of_odd_labels(examples(NAME=200, NMAE=1, O=300, RARE=1, OTHER=2))
    (only,) = caught
    expected = "labels: 'NMAE' (once) is close to 'NAME'; 'RARE' occurs once; check them for slips"
    assert str(only.message) == expected


def test_question_marks() -> None:
    """``structgp next`` writes them in place of labels."""
    counts = {"NAME": 20, "?": 2}
    found = SimpleNamespace(labels=LabelEncoder(list(counts)), label_counts=np.array([*counts.values()]))
    punctuation = SimpleNamespace(labels=LabelEncoder(["O", ".", "?"]), label_counts=np.array([90, 9, 9]))
    warn_of_odd_labels(punctuation)
    with pytest.warns(StructgpWarning, match=r"'\?' \(2 times\) is taken for a label, .*--missing '\?'"):
        warn_of_odd_labels(found)


@pytest.mark.parametrize("n", [99, 100])
def test_labels_that_nearly_all_occur_once(n: int) -> None:
    """They are not slips: nothing can be learned of them, and that is said."""
    once = {f"L{number}": 1 for number in range(n)}
    expected = (
        "100 of 101 occur once, on 50% of the tokens: .* hardly be better than chance"
        if n == 100
        else "slips"
    )
    with pytest.warns(StructgpWarning, match=expected):
        warn_of_odd_labels(examples(O=200 - n if n == 100 else 150, **once))


def test_a_prefix_may_come_once() -> None:
    assert single({"B-UNIT": 9, "I-UNIT": 1, "B-RARE": 1, "O": 50}) == ["B-RARE"]


def test_few_tokens_have_labels_that_occur_once() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_odd_labels(examples(NAME=100, O=50, RARE=1))
        warn_of_odd_labels(examples(NAME=100, O=150, RARE=1), {"RARE": 1})


def test_a_fit_and_a_later_part_say_so() -> None:
    X = [[{"w": "a"}, {"w": "b"}]] * 12
    y = [["NAME", "OTHER"]] * 12
    slipped = [*y[:-1], ["NAME", "OTEHR"]]
    with pytest.warns(StructgpWarning, match=r"'OTEHR' \(once\) is close to 'OTHER'") as caught:
        model = StructuredGPClassifier(n_draws=4).fit(X, slipped)
    assert caught[0].filename == __file__
    with pytest.warns(StructgpWarning, match=r"'NMAE' \(once\) is close to 'NAME'") as caught:
        model.partial_fit(X[:1], [["NMAE", "OTHER"]])
    assert caught[0].filename == __file__
