"""Seminars and two layers, on generated documents."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from experiments import seminars, two_layers
from structgp import Prior, Spec, StructuredGPClassifier, chain, same

NAMES = ("Alda", "Borg", "Cole", "Dunn", "Ekman", "Falk", "Gray", "Hale", "Ives", "Jung")


def documents(n: int) -> list[list[tuple[str, str, str]]]:
    """Token, line and label: a speaker announced by 'Speaker :' and mentioned again, and one to four
    hosts."""
    random, found = np.random.default_rng(0), []
    for i in range(n):
        name, time = NAMES[i % len(NAMES)], f"{random.integers(1, 12)}:00"
        first = [("Speaker", "O"), (":", "O"), (name, "B-speaker")]
        second = [("At", "O"), (time, "B-stime"), (name, "B-speaker"), ("talks", "O")]
        letter = "abcdefghijklmnopqrst"[i]
        hosts = [f"{name}{letter}" for name in ("Hobb", "Kess", "Lann", "Murr")[: 1 + i % 4]]
        third = [(word, "O") for host in hosts for word in ("Max", host, "and")]
        found.append([(w, str(line), v) for line, row in enumerate((first, second, third)) for w, v in row])
    return found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "structures").mkdir()
    text = "\n".join("".join("\t".join(row) + "\n" for row in doc) for doc in documents(20))
    (tmp_path / "structures" / "seminars.col").write_text(text, encoding="utf-8")
    return tmp_path


def test_features_say_where_in_its_line_a_word_stands() -> None:
    words, lines = zip(*[(w, line) for w, line, _ in documents(1)[0]], strict=True)
    found = seminars.features(words, lines)
    assert found[2]["opening"] == "speaker"
    assert found[2]["place"] == "2"
    assert found[2]["place from end"] == "0"
    assert found[5]["opening before"] == "speaker"
    assert found[4]["shape"] == "0:00"
    assert found[0]["word-1"] == "-"


def test_kinds_are_of_rare_words(data: Path) -> None:
    X, _ = seminars.load(str(data))
    marked = seminars.marked(X, seminars.rare(X))
    kinds = {(token["word"], token["line"]): token["kind"] for token in marked[0]}
    assert kinds["Speaker", "0"] == kinds["At", "1"] == ""
    assert kinds["Alda", "0"] == kinds["Alda", "1"] == "Xx"


LEE = seminars.Links(Counter({"talk": 9, "talks": 9}))
"""Links where training documents often have 'talk', and never another word."""


def test_names_are_linked_by_their_last_words() -> None:
    x = seminars.features(["Ann", "Lee", "Ann", "Lee", "talks"], list("00111"))
    assert LEE.mentions(x) == [(1, 3)]
    assert seminars.Links(Counter(lee=1)).mentions(x) == []
    assert seminars.Links(Counter(lee=1)).mentions(x, own=1) == [(1, 3)]
    (found,) = seminars.marked([x], lambda word: True)
    assert [token["kind"] for token in found] == ["", "Xx", "", "Xx", "x"]


def test_a_name_is_linked_in_capitals_and_before_a_capitalised_word() -> None:
    x = seminars.features(["Ann", "Lee", "LEE", "Lee", "Talk", "lee"], list("001223"))
    assert LEE.mentions(x) == [(1, 2), (2, 3)]


def test_names_with_many_mentions_are_not_linked() -> None:
    for n in (seminars.MOST_MENTIONS, seminars.MOST_MENTIONS + 1):
        x = seminars.features(["Lee", "talks"] * n, ["0"] * (2 * n))
        linked = [(t, t + 2) for t in range(0, 2 * n - 2, 2)] if n <= seminars.MOST_MENTIONS else []
        assert LEE.mentions(x) == linked


def test_who_sent_an_announcement_is_not_linked() -> None:
    x = seminars.features(["Ann", "Lee", "PostedBy", ":", "Ann", "Lee", "Lee"], list("0011112"))
    assert LEE.mentions(x) == [(1, 6)]


def links_among(words: str, lines: str) -> dict[str, list[tuple[int, int]]]:
    """Links between different names, of the kinds that there are."""
    x = seminars.features(words.split(), list(lines))
    return {kind: links for kind, links in LEE.others(x).items() if links}


def test_the_announced_name_is_linked_with_the_first_mention_of_each_other_one() -> None:
    words, lines = "Bo Falk met Who : Ann Lee Cy Gray Bo Falk Bo Talk Hale", "00011112233445"
    # 'Talk' is a usual word, 'Hale' has no first name
    assert links_among(words, lines) == {"three names": [(1, 6), (6, 8)]}
    x = seminars.features(words.split(), list(lines))
    nothing = {kind: [] for kind in seminars.AMONG}
    assert LEE.graph(x).edges == {"mentions": [(1, 10)]} | nothing | {"three names": [(1, 6), (6, 8)]}


def test_at_most_so_many_names_are_linked_with_the_announced_one() -> None:
    n = seminars.MOST_NAMES + 3
    names = " ".join(f"Ann Na{chr(97 + i)}xx" for i in range(n))
    lines = [str(i) for i in range(n) for _ in range(2)]
    found = LEE.others(seminars.features(names.split(), lines))["more names"]
    assert found == [(1, 2 * i + 1) for i in range(1, seminars.MOST_NAMES)]


def test_a_training_document_does_not_count_itself() -> None:
    often = seminars.Links(Counter(lee=seminars.OTHERS_ELSEWHERE + 1))
    x = seminars.features(["Who", ":", "Ann", "Lee"], list("0000"))
    assert often.graph(x).edges["the only name"] == []
    assert often.graph(x, own=1).edges["the only name"] == [(0, 3)]


def test_without_an_announced_name_the_first_one_is_linked_with_the_others() -> None:
    assert links_among("Ann Lee Bo Falk Ann Lee", "001122") == {"two names": [(1, 3)]}
    assert links_among("Ann Lee Bo Falk Cy Gray Di Hale", "00112233") == {
        "more names": [(1, 3), (1, 5), (1, 7)]
    }


def test_the_only_name_is_linked_with_the_first_token() -> None:
    assert links_among("Who : Ann Lee", "0000") == {"the only name": [(0, 3)]}
    assert links_among("a talk", "00") == {}


def test_folds_have_every_document_once() -> None:
    folds = seminars.folds(23)
    assert sorted(np.concatenate([test for _, test in folds])) == list(range(23))
    for train, test in folds:
        assert not set(train) & set(test)
        rest, left_out = seminars.within(train)
        assert sorted([*rest, *left_out]) == sorted(train)


def test_scores_of_seminars_by_field() -> None:
    truth, guessed = ["B-speaker", "I-speaker", "O", "B-stime"], ["B-speaker", "O", "O", "B-stime"]
    found = seminars.counts([truth], [guessed])
    assert found["speaker"] == [0, 1, 1]
    assert found["stime"] == [1, 1, 1]
    assert seminars.f1([found])["overall"] == pytest.approx(50.0)


def test_tokens_of_seminars_by_field() -> None:
    truth = ["B-speaker", "I-speaker", "O", "B-speaker", "B-stime"]
    guessed = ["B-speaker", "O", "I-speaker", "B-stime", "B-stime"]
    found = seminars.token_counts([truth], [guessed])
    assert found["speaker"] == [1, 2, 3]
    assert found["stime"] == [1, 2, 1]


def test_a_missed_token_is_reachable_if_its_word_is_found_elsewhere_in_the_document() -> None:
    truth, guessed = ["B-speaker", "I-speaker", "B-speaker", "O"], ["O", "I-speaker", "O", "O"]
    found, mended = seminars.missed([["lee", "lee", "ann", "lee"]], [truth], [guessed])
    assert found["speaker"] == [2, 1]
    assert mended == [["B-speaker", "I-speaker", "O", "O"]]
    apart, same = seminars.missed([["lee"], ["lee"]], [["B-speaker"]] * 2, [["O"], ["B-speaker"]])
    assert apart["speaker"] == [1, 0]
    assert same == [["O"], ["B-speaker"]]


def test_a_skip_chain_is_fitted_and_scored(data: Path) -> None:
    X, y = seminars.load(str(data))
    model = StructuredGPClassifier(structure=seminars.linked(), prior=Prior(data_weight=1.0))
    row = seminars.compare(model, X, y, range(15), range(15, 20))
    assert row["counts"]["speaker"][2] == 10
    assert row["nll"] < 0.5


def sentences(n: int) -> tuple[list[list[str]], list[list[str]], list[list[str]]]:
    words = [["the", "dog", "runs"], ["a", "cat", "sleeps"], ["dogs", "run", "."]]
    tags = [["DT", "NN", "VB"], ["DT", "NN", "VB"], ["NN", "VB", "."]]
    chunks = [["B-NP", "I-NP", "B-VP"], ["B-NP", "I-NP", "B-VP"], ["B-NP", "B-VP", "O"]]
    return tuple([items[i % 3] for i in range(n)] for items in (words, tags, chunks))  # type: ignore[return-value]


@pytest.mark.parametrize("method", ["words", pytest.param("cascade", marks=pytest.mark.slow), "layers"])
def test_chunks_of_generated_sentences(method: str) -> None:
    words, tags, y = sentences(12)
    X = [two_layers.features(row) for row in words]
    row = two_layers.run(two_layers.METHODS[method](), X, tags, y, range(9), range(9, 12))
    assert row["error"] < 40
    assert np.isfinite(row["nll"])


def test_each_third_is_predicted_from_the_other_two() -> None:
    parts = two_layers.thirds([3, 5, 8, 9, 11, 12, 20])
    assert sorted(i for _, left_out in parts for i in left_out) == [3, 5, 8, 9, 11, 12, 20]
    for rest, left_out in parts:
        assert sorted(rest + left_out) == [3, 5, 8, 9, 11, 12, 20]
        assert len(left_out) in (2, 3)


def test_tags_around_a_word_are_features() -> None:
    (found,) = two_layers.with_tags([two_layers.features(["the", "dog"])], [["DT", "NN"]])
    assert (found[0]["tag+0"], found[0]["tag+1"], found[1]["tags-1"]) == ("DT", "NN", "DT NN")
    assert two_layers.shape("U.S.-1,500") == "X.X.-0,0"


def test_links_whose_score_depends_on_both_ends() -> None:
    spec = chain() + same("word", where={"kind": "Xx"}, features=["word-1"])
    assert Spec.from_json(spec.to_json()) == spec
    assert "features=('word-1',)" in repr(spec)
    assert not spec.templates[-1].symmetric
    rows = documents(12)
    X = [seminars.features([r[0] for r in doc], [r[1] for r in doc]) for doc in rows]
    y = [[r[2] for r in doc] for doc in rows]
    model = StructuredGPClassifier(structure=spec, prior=Prior(data_weight=1.0))
    row = seminars.compare(model, X, y, range(9), range(9, 12))
    assert row["nll"] < 0.5
