"""Which feature is the word, what its parts are, and that rows, growth and files know them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from structgp.data import corpora
from structgp.data.documents import token_features
from structgp.data.encode import FeatureEncoder
from structgp.data.examples import Examples, read_examples
from structgp.data.find_words import evidence_of, find_word
from structgp.data.word_parts import LONGEST, PARTS, parts_of
from structgp.errors import InputError

CORPUS = corpora.recipes()
LINES = [line for line in CORPUS.template.text.splitlines() if line.startswith("U")]


def by_beginning(X: Any) -> list[list[str]]:
    """Labels that the first letter of a token's word tells."""
    each = [[token["w"] if isinstance(token, dict) else token[0] for token in x] for x in X]
    return [["A" if word[0] in "abcd" else "B" for word in words] for words in each]


def read(X: Any, y: Any = None, **given: Any) -> Examples:
    y = by_beginning(X) if y is None else y
    return read_examples(X, y, **{"word_parts": True, **given})


def templates_of(X: Any, y: Any = None, **given: Any) -> list[str]:
    return read(X, y, **given).encoder.templates


def test_parts_of_words_long_and_short():
    assert len(PARTS) == 2 * LONGEST + 1 == len(parts_of("butter"))
    assert dict(zip(PARTS, parts_of("Butter"), strict=True))["first 3 letters"] == "But"
    assert dict(zip(PARTS, parts_of("Butter"), strict=True))["last letter"] == "r"
    assert parts_of("2") == ("2",) * 8 + ("d",)
    assert parts_of("") == ("",) * 9


@pytest.mark.parametrize("n", [20, 100, 300])
def test_the_word_of_a_template_is_the_one_at_the_token(n):
    """Among words before and after, joined features, endings and shapes."""
    X = [CORPUS.template.expand(rows) for rows in CORPUS.X_train[:n]]
    encoder = read(X, CORPUS.y_train[:n]).encoder
    assert encoder.parts is not None
    assert LINES[encoder.parts.word] in ("U00:%x[0,0]", "U03:%x[0,1]")
    # The template has the shape and the last three letters.
    assert not any(name.startswith("last 3 letters") for name in encoder.templates)


def test_the_word_of_default_features_is_found_and_parts_that_they_have_are_left_out():
    X = [token_features([row[0] for row in rows]) for rows in CORPUS.X_train[:100]]
    names = templates_of(X, CORPUS.y_train[:100])
    new = names[len(X[0][0]) :]
    assert set(new) <= {
        f"{p} of {w}" for p in ("first 4 letters", "last 4 letters", "shape") for w in ("word", "lower")
    }
    assert new


def words(rng: np.random.Generator, n: int) -> list[str]:
    return ["".join(rng.choice(list("abcdefgh"), 6)) for _ in range(n)]


def sentences(n: int = 20, length: int = 6) -> list[list[str]]:
    rng = np.random.default_rng(0)
    return [words(rng, length) for _ in range(n)]


def test_neither_joined_features_nor_closed_classes_nor_characters_are_words():
    text = sentences()
    before = [["_", *s[:-1]] for s in text]
    joined = [
        [{"w-1": b, "w-1,w": f"{b} {w}", "w": w} for b, w in zip(bs, s, strict=True)]
        for bs, s in zip(before, text, strict=True)
    ]
    names = templates_of(joined)
    assert "first letter of w" in names
    assert not any(name.endswith(("of w-1", "of w-1,w")) for name in names)
    closed = [[{"w": f"{w[0]}{w[0]}"} for w in s] for s in text]
    assert templates_of(closed) == ["w"]
    characters = [[{"w": chr(k + n)} for n in range(20)] for k in range(97, 500, 20)]
    assert templates_of(characters) == ["w"]


def test_words_of_sequences_that_all_end_alike_are_told_by_their_labels():
    text = [[*s, "."] for s in sentences(40)]
    often = sorted({w for s in text[:3] for w in s[:-1]})
    text = [[often[len(s[0]) * k % len(often)], *s] for k, s in enumerate(text)]
    after = [[*s[1:], "_"] for s in text]
    both = zip(after, text, strict=True)
    X = [[{"w+1": b, "w": w} for b, w in zip(bs, s, strict=True)] for bs, s in both]
    assert templates_of(X, word_parts=False) == ["w+1", "w"]
    assert "first letter of w" in templates_of(X)


def test_parts_are_left_out_where_a_feature_has_told_what_they_tell():
    """As a part of speech has."""
    X = [[{"w": w, "kind": "AB"[w[0] in "abcd"]} for w in s] for s in sentences()]
    assert templates_of(X) == ["w", "kind"]
    assert "first letter of w" in templates_of([[{"w": token["w"]} for token in x] for x in X])
    assert "first letter of w" in templates_of(X, word_parts="w")


@pytest.mark.parametrize("joined", ["{before}|{word}", "http://x/{word}", "{word}#{before}"])
def test_a_word_joined_with_something_else_is_not_the_word(joined):
    X = []
    for s in sentences():
        pairs = zip(["-", *s[:-1]], s, strict=True)
        X.append([{"w": w, "joined": joined.format(before=b, word=w)} for b, w in pairs])
    found = templates_of(X)
    assert "first letter of w" in found
    assert "first letter of joined" not in found


def test_parts_that_tell_known_words_apart_are_kept():
    """New words may share them."""
    X = [[{"w": w} for w in s] for s in sentences()]
    assert {f"first {n} letters of w" for n in (2, 3, 4)} <= set(templates_of(X, word_parts="w"))


def test_a_feature_may_be_named_and_an_unknown_one_is_an_error():
    X = [[{"w": w, "kind": "ab"} for w in s] for s in sentences()]
    assert templates_of(X, word_parts="kind") == ["w", "kind"]  # one value says nothing
    assert "last 2 letters of w" in templates_of(X, word_parts="w")
    with pytest.raises(InputError, match="feature 'W'"):
        read(X, word_parts="W")


def test_a_feature_tells_as_much_as_other_tokens_with_its_value_do():
    ids, labels = np.array([0, 0, 1]), np.array([0, 0, 1])
    common = np.array([2 / 3, 1 / 3])
    told = np.log([[(1 + 2 / 3) / 2 / (2 / 3), (1 / 3) / 2 / (1 / 3)], [1.0, 1.0]])
    assert np.allclose(evidence_of(ids, labels, common, np.array([1, 2])), told)


TOKENS = st.dictionaries(st.sampled_from(["w", "x"]), st.text("abA1", max_size=6), max_size=2)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(TOKENS, max_size=4), min_size=1, max_size=4), st.lists(TOKENS, max_size=5))
def test_rows_are_those_of_tokens_that_have_the_parts_themselves(X, new):
    X = [*X, [{"w": "Ab1", "x": "b"}]]
    encoder = FeatureEncoder().fit(X)
    word = encoder.templates.index("w")
    before = encoder.transform(X)
    encoder.add_parts(word, range(len(PARTS)))
    names = encoder.templates[len(encoder.given) :]

    def spelt_out(x: list[dict[str, str]]) -> list[dict[str, str]]:
        own = [dict(zip(names, parts_of(t["w"]), strict=True)) if "w" in t else {} for t in x]
        return [{**t, **parts} for t, parts in zip(x, own, strict=True)]

    by_hand = FeatureEncoder().fit([spelt_out(x) for x in X])
    order = by_hand.columns_named(encoder.templates)
    for x, rows in zip(X, before, strict=True):
        assert np.array_equal(encoder.with_parts(rows), encoder.encode(x))
    for x in [*X, new]:
        if x:
            rows, as_given = encoder.encode(x), by_hand.encode(spelt_out(x))[:, order]
            for values, own, other in zip(encoder.values, rows.T, as_given.T, strict=True):
                assert np.array_equal(np.minimum(own, len(values)), np.minimum(other, len(values)))
                assert np.array_equal(own == own[:, None], other == other[:, None])
    grown = encoder.extended([new])
    known = FeatureEncoder.from_json(json.loads(json.dumps(grown.to_json())))
    assert known.templates == grown.templates == encoder.templates
    for old, now, read_back in zip(encoder.values, grown.values, known.values, strict=True):
        assert list(now)[: len(old)] == list(old)
        assert list(read_back) == list(now)
    for x in [*X, new]:
        assert np.array_equal(grown.encode(x), known.encode(x))


def test_columns_of_strings_have_parts_too():
    X = [[(w, "x") for w in s] for s in sentences(5)]
    examples = read(X)
    assert "first 2 letters of 0" in examples.encoder.templates
    assert np.array_equal(examples.rows[0], examples.encoder.encode(X[0]))
    with pytest.raises(InputError, match="3 strings, but training had 2"):
        examples.encoder.encode([("a", "b", "c")])


def test_nodes_without_the_word_have_none_of_its_parts():
    encoder = read([[{"w": w, "x": w[-3:]} for w in s] for s in sentences(5)]).encoder
    assert encoder.without(["w"]).templates == ["x"]
    assert "first letter of w" in encoder.without(["x"]).templates


def test_labels_that_are_missing_are_not_looked_at():
    X = [[{"w": w} for w in s] for s in sentences(5)]
    y = [[None, *labels[1:]] for labels in by_beginning(X)]
    assert read(X, y).encoder.parts is not None
    assert find_word([["a"]], [np.zeros((1, 1))], [np.array([-1])]) is None


def test_labels_that_no_token_has_are_no_trouble():
    """As where annotators disagree, or classes are named beforehand."""
    X = [[{"w": w} for w in s] for s in sentences()]
    assert templates_of(X, classes=["A", "AA", "B"]) == templates_of(X) != ["w"]
