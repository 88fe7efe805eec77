"""The ingredient tokenizer, its columns, and the embedded corpus built with them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from structgp.data import corpora
from structgp.data.corpora import columns, recipes, tokenize

RECIPES = Path(corpora.__file__).parent / "recipes"
SPANS = ("QTY", "UNIT", "NAME", "PREP", "COMMENT")
LABELS = {"O"} | {f"{prefix}-{span}" for prefix in "BI" for span in SPANS}
PUNCTUATION = set(",.;:()[]-–—/*!?~…")  # noqa: RUF001
SPLITS = ("train", "test")


def read(split: str) -> list[list[list[str]]]:
    """Return the sequences of a split: rows of the five columns and the label."""
    text = (RECIPES / f"{split}.conll").read_text(encoding="utf-8")
    return [[row.split("\t") for row in block.splitlines()] for block in text.split("\n\n")]


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("", []),
        ("2 cups flour", ["2", "cups", "flour"]),
        ("1/2 cup", ["1/2", "cup"]),
        ("1 1/2 cups", ["1", "1/2", "cups"]),
        ("1½ cups", ["1", "½", "cups"]),
        ("½cup", ["½", "cup"]),
        ("2-3 tsp. salt", ["2-3", "tsp", ".", "salt"]),
        ("1–2 eggs", ["1–2", "eggs"]),  # noqa: RUF001
        ("250g butter", ["250", "g", "butter"]),
        ("1.5l water", ["1.5", "l", "water"]),
        ("2,5 dl", ["2,5", "dl"]),
        ("2x400g tins", ["2", "x", "400", "g", "tins"]),
        ("100g/3½oz sugar", ["100", "g", "/", "3", "½", "oz", "sugar"]),
        ("all-purpose flour, sifted", ["all-purpose", "flour", ",", "sifted"]),
        ("1 14-ounce can", ["1", "14-ounce", "can"]),
        ("(8-ounce) pack", ["(", "8-ounce", ")", "pack"]),
        ("clove(s)", ["clove", "(", "s", ")"]),
        ("baker's 2% milk", ["baker's", "2", "%", "milk"]),
        ("crème fraîche", ["crème", "fraîche"]),
        ('1" ginger', ["1", '"', "ginger"]),
        ("  salt\t& pepper\n", ["salt", "&", "pepper"]),
    ],
)
def test_tokenize(line: str, tokens: list[str]) -> None:
    assert tokenize(line) == tokens


@pytest.mark.parametrize(
    ("token", "shape"),
    [
        ("250", "d"),
        ("1/2", "d/d"),
        ("2-3", "d-d"),
        ("½", "frac"),
        ("½-1", "frac-d"),
        ("Salt", "Xx"),
        ("flour", "x"),
        ("SALT", "X"),
        ("crème", "x"),
        ("all-purpose", "x-x"),
        ("14-ounce", "d-x"),
        (".", "."),
    ],
)
def test_shape(token: str, shape: str) -> None:
    assert columns([token])[0][2] == shape


def test_columns() -> None:
    assert columns(tokenize("1 (14 Ounce) can")) == [
        ("1", "1", "d", "1", "out"),
        ("(", "(", "(", "(", "in"),
        ("14", "14", "d", "14", "in"),
        ("Ounce", "ounce", "Xx", "nce", "in"),
        (")", ")", ")", ")", "in"),
        ("can", "can", "x", "can", "out"),
    ]
    assert columns([]) == []


def test_unbalanced_brackets() -> None:
    assert [row[-1] for row in columns([")", "a", "(", "b"])] == ["out", "out", "in", "in"]


@pytest.mark.parametrize("split", SPLITS)
def test_columns_of_the_corpus(split: str) -> None:
    for sequence in read(split):
        tokens = [row[0] for row in sequence]
        assert [tuple(row[:-1]) for row in sequence] == columns(tokens)


@pytest.mark.parametrize("split", SPLITS)
def test_tokens_survive_a_round_trip(split: str) -> None:
    """No token contains a space, and none is matched by looking at its neighbours."""
    for sequence in read(split):
        tokens = [row[0] for row in sequence]
        assert tokenize(" ".join(tokens)) == tokens


@pytest.mark.parametrize("split", SPLITS)
def test_labels(split: str) -> None:
    """BIO is well formed, all eleven labels occur, and punctuation is always O."""
    sequences = read(split)
    assert {row[-1] for sequence in sequences for row in sequence} == LABELS
    for sequence in sequences:
        previous = "O"
        for token, *_, label in sequence:
            if label.startswith("I-"):
                assert previous in (label, f"B-{label[2:]}"), sequence
            if token in PUNCTUATION:
                assert label == "O", sequence
            previous = label


@pytest.mark.parametrize("split", SPLITS)
def test_file_format(split: str) -> None:
    data = (RECIPES / f"{split}.conll").read_bytes()
    assert data.endswith(b"\n")
    assert not data.endswith(b"\n\n")
    assert b"\r" not in data
    assert b"\n\n\n" not in data
    for sequence in read(split):
        assert sequence
        assert all(len(row) == 6 and all(row) for row in sequence)


def test_counts_and_no_overlap() -> None:
    lines = {split: [" ".join(row[1] for row in sequence) for sequence in read(split)] for split in SPLITS}
    assert len(lines["train"]) >= 300
    assert len(lines["test"]) >= 130
    together = lines["train"] + lines["test"]
    assert len(together) >= 400
    assert len(set(together)) == len(together)


def test_template() -> None:
    text = (RECIPES / "template").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    unigrams = [line for line in lines if line.startswith("U")]
    assert [line for line in lines if line not in unigrams] == ["B"]
    assert 20 <= len(unigrams) <= 25
    names = [line.split(":")[0] for line in unigrams]
    assert len(set(names)) == len(names)
    for line in unigrams:
        assert re.fullmatch(r"U\d\d:%x\[-?[0-2],[0-4]\](/%x\[-?[0-2],[0-4]\])*", line), line


def test_recipes():
    corpus = recipes()
    for X, y in ((corpus.X_train, corpus.y_train), (corpus.X_test, corpus.y_test)):
        assert len(X) == len(y) > 0
        assert [len(x) for x in X] == [len(labels) for labels in y]
        expanded = [corpus.template.expand(x) for x in X]
        assert [len(e) for e in expanded] == [len(x) for x in X]
        assert len({len(token) for e in expanded for token in e}) == 1
    assert {label for y in corpus.y_test for label in y} <= {label for y in corpus.y_train for label in y}
