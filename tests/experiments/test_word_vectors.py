"""Word vectors from counting, beside templates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from experiments import vectors
from structgp.data import corpora


def sentences(n: int, seed: int) -> list[list[str]]:
    """A determiner, a noun, a verb, in this order: words of one kind never stand near each other."""
    rng = np.random.default_rng(seed)
    kinds = (["the", "a", "this"], ["cat", "dog", "egg", "fig"], ["sat", "ran", "fell"])
    return [[str(rng.choice(words)) for words in kinds] for _ in range(n)]


def test_words_with_the_same_neighbours_have_like_vectors() -> None:
    text = sentences(200, 0)
    found = vectors.word_vectors([[word.title() for word in words] for words in text], n_dims=5)
    assert set(found) == {word for words in text for word in words}
    assert all(v.shape == (5,) and np.linalg.norm(v) == pytest.approx(1) for v in found.values())
    assert found["cat"] @ found["dog"] > 0.7
    assert found["sat"] @ found["fell"] > 0.7
    assert abs(found["cat"] @ found["sat"]) < 0.4
    again = vectors.word_vectors(text, n_dims=5)
    assert all(np.allclose(found[word], again[word]) for word in found)


def test_the_vectors_give_back_the_mutual_information() -> None:
    """With all dimensions, products of vectors before scaling are those of the rows of the matrix: words
    with equal rows have equal vectors."""
    text = [["a", "x", "b"], ["a", "y", "b"], ["c", "z", "c"], ["alone"]]
    found = vectors.word_vectors(text, n_dims=50)
    np.testing.assert_allclose(found["x"], found["y"], atol=1e-7)
    assert found["x"] @ found["z"] == pytest.approx(0, abs=1e-7)
    assert not found["alone"].any()


def test_tokens_hold_both_kinds() -> None:
    corpus = corpora.recipes()
    rows = corpus.X_train[0]
    known = {row[0].lower(): np.full(2, float(len(row[0]))) for row in rows}
    plain = vectors.tokens(rows, corpus.template, None)
    both = vectors.tokens(rows, corpus.template, known)
    for row, strings, token in zip(rows, plain, both, strict=True):
        assert [token[str(p)] for p in range(len(strings))] == list(strings)
        assert token["vector"].tolist() == [len(row[0])] * 2


def test_recipes_are_halved_five_times() -> None:
    X, y, _, folds = vectors.load("recipes", None)
    assert len(folds) == 5
    for train, test in folds:
        assert sorted([*train, *test]) == list(range(len(X)))
        assert abs(len(train) - len(test)) <= 1
    assert [len(rows) for rows in X] == [len(labels) for labels in y]


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = []
    seen: list[Any] = []

    def run(X: list[Any], y: list[list[str]], fold: Any, method: str) -> dict[str, float]:
        seen.append((type(X[0][0]), method))
        return dict.fromkeys(vectors.FIGURES, 0.5)

    monkeypatch.setattr(vectors, "keep", lambda name, row: rows.append(row))
    monkeypatch.setattr(vectors, "run", run)
    vectors.main(["--task", "recipes", "--fold", "1", "3", "--against", "crf"])
    assert seen == [(kind, m) for m in ("structgp", "crf") for kind in (tuple, dict) for _ in range(2)]
    assert [(row["method"], row["features"], len(row["runs"])) for row in rows] == [
        (method, features, 2) for method in ("structgp", "crf") for features in vectors.FEATURES
    ]
    assert len(capsys.readouterr().out.splitlines()) == 5
