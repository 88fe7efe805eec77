"""A model with parts of words knows words that it has never seen; says so; and keeps it in its file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import structgp
from structgp import Prior, StructuredGPClassifier, describe, explain
from structgp.errors import InputError

BAYES = Prior(data_weight=1.0)
ENDINGS = {"ung": "NOUN", "ieren": "VERB"}


def data(n: int, seed: int) -> tuple[list[Any], list[list[str]]]:
    """Words whose endings tell their labels, none of which comes again."""
    rng = np.random.default_rng(seed)
    X, y = [], []
    for _ in range(n):
        ends = rng.choice(list(ENDINGS), 4)
        words = ["".join(rng.choice(list("abcdefgh"), 6)) + end for end in ends]
        X.append([{"word": w, "before": b} for w, b in zip(words, ["_", *words[:-1]], strict=True)])
        y.append([ENDINGS[end] for end in ends])
    return X, y


@pytest.fixture(scope="module")
def tagger() -> StructuredGPClassifier:
    return StructuredGPClassifier(prior=BAYES).fit(*data(20, 0))


def test_new_words_share_what_their_parts_have_taught(tagger):
    X, y = data(20, 1)
    assert tagger.score(X, y) == 1.0
    whole = StructuredGPClassifier(prior=BAYES, word_parts=None).fit(*data(20, 0))
    assert whole.score(X, y) < 0.7


def test_the_plan_the_summary_and_reasons_name_the_parts(tagger):
    plan = tagger.training_log_["plan"]
    assert plan["word_parts"]["value"] == "word"
    assert "last letter of word" in describe(tagger).templates
    X, _ = data(1, 2)
    found = explain(tagger, X[0], 0)
    end = X[0][0]["word"][-1:]
    assert ("last letter of word", end) in [(part.name, part.value) for part in found.features]


def test_a_file_keeps_them(tagger, tmp_path):
    X, _ = data(5, 3)
    tagger.save(tmp_path / "m.sgp")
    again = structgp.load(tmp_path / "m.sgp")
    assert again.predict_marginals(X) == tagger.predict_marginals(X)
    assert again.get_params()["word_parts"] == "auto"


def test_more_data_bring_more_parts():
    X, y = data(10, 0)
    more, labels = data(10, 4)
    tagger = StructuredGPClassifier(prior=BAYES).fit(X, y)
    n = [len(values) for values in tagger.model_.encoder.values]
    tagger.partial_fit([[{"word": "Xyz", "before": "_"}, *more[0][1:]], *more[1:]], labels)
    encoder = tagger.model_.encoder
    assert all(len(values) > before for values, before in zip(encoder.values[:3], n, strict=False))
    assert "Xy" in encoder.values[encoder.templates.index("first 2 letters of word")]
    once = StructuredGPClassifier(prior=BAYES).fit(X, y)
    once.partial_fit(more, labels, remember=False)
    assert once.score(*data(10, 5)) == 1.0


@pytest.mark.parametrize(
    "given",
    [{"word_parts": None}, {"kernel": "template"}, {"posterior": "inducing"}, {"inference": "natural"}],
)
def test_words_stay_whole_where_that_is_asked_for_or_relevances_are_not_learned(given):
    X, y = data(6, 0)
    tagger = StructuredGPClassifier(prior=BAYES, **given).fit(X, y)
    assert tagger.model_.encoder.templates == ["word", "before"]
    assert tagger.training_log_["plan"]["word_parts"]["value"] is None


def test_any_feature_may_be_named():
    X, y = data(6, 0)
    tagger = StructuredGPClassifier(prior=BAYES, word_parts="before").fit(X, y)
    assert "first letter of before" in tagger.model_.encoder.templates
    for wrong, said in (("befor", "feature 'befor'"), (3, "word_parts: must be the name of a feature")):
        with pytest.raises(InputError, match=said):
            StructuredGPClassifier(word_parts=wrong).fit(X, y)
