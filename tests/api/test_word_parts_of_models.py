"""A model with parts of words knows words that it has never seen; says so; and keeps it in its file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import structgp
from structgp import Prior, StructuredGPClassifier, describe, explain
from structgp.answers.file_checks import _check_encoder
from structgp.cli import main
from structgp.data import shards
from structgp.data.json_form import FormError
from structgp.data.word_parts import feature_name
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


@pytest.mark.parametrize("parts", [[7, 0], [0, 9], [0, -1]])
def test_a_file_with_other_parts_is_refused(parts):
    header = {"templates": ["word"], "values": [["a"]], "form": "dicts", "vectors": [], "width": 0}
    with pytest.raises(FormError, match=r"encoder\.parts are not parts of a template"):
        _check_encoder(header | {"columns": [], "parts": parts}, "encoder", 10)
    _check_encoder(header | {"columns": [], "parts": [0, 8]}, "encoder", 10)


def test_parts_of_a_template_line_are_named_after_it():
    lines = {"2": "U02:%x[0,0]"}
    assert feature_name("shape of 2", lines) == "shape of U02:%x[0,0]"
    assert feature_name("2", lines) == "U02:%x[0,0]"
    assert feature_name("size of 2", lines) == "size of 2"


@pytest.mark.parametrize(("given", "found"), [("none", None), ("U:%x[0,0]", "0"), ("0", "0")])
def test_the_command_line_says_which_words_are_taken_apart(tmp_path, given, found):
    X, y = data(8, 0)
    rows = [
        "\n".join(f"{t['word']} {label}" for t, label in zip(x, of, strict=True))
        for x, of in zip(X, y, strict=True)
    ]
    (tmp_path / "train").write_text("\n\n".join(rows) + "\n")
    (tmp_path / "template").write_text("U:%x[0,0]\nB\n")
    words = ["train", str(tmp_path / "template"), str(tmp_path / "train"), "-o", str(tmp_path / "m.sgp")]
    result = CliRunner().invoke(main, [*words, "--data-weight", "1", "--word-parts", given])
    assert result.exit_code == 0, result.output
    plan = structgp.load(tmp_path / "m.sgp").training_log_["plan"]
    assert plan["word_parts"]["value"] == found


def test_a_warm_start_with_other_parts_starts_from_the_prior(tagger):
    X, y = data(20, 0)
    for asked, found in (("before", "before"), (None, None)):
        again = StructuredGPClassifier(prior=BAYES, warm_start=True).fit(X, y)
        again.set_params(word_parts=asked)
        with pytest.warns(structgp.StructgpWarning, match="other parts of words"):
            again.fit(X, y)
        plan = again.training_log_["plan"]["word_parts"]
        assert (plan["value"], plan["reason"]) == (found, "asked for")


def test_a_model_that_goes_on_says_that_it_keeps_its_parts(tagger, tmp_path):
    tagger.save(tmp_path / "m.sgp")
    again = structgp.load(tmp_path / "m.sgp").set_params(word_parts=None)
    with pytest.warns(structgp.StructgpWarning, match=r"word_parts: None is not heeded.*those of 'word'"):
        again.partial_fit(*data(5, 4))
    plan = again.training_log_["plan"]["word_parts"]
    assert (plan["value"], plan["reason"]) == ("word", "as in the earlier fit")


def test_parts_are_found_when_all_data_that_are_remembered_show_them():
    X, y = data(20, 0)
    same = [[{"word": f"w{t}", "before": "_"} for t in range(4)]] * 3, [["NOUN", "VERB"] * 2] * 3
    grown = StructuredGPClassifier(prior=BAYES).partial_fit(*same)
    assert grown.training_log_["plan"]["word_parts"]["value"] is None
    grown.partial_fit(X, y)
    assert grown.training_log_["plan"]["word_parts"]["value"] == "word"
    grown.set_params(word_parts="before").partial_fit(*data(2, 5))
    assert grown.training_log_["plan"]["word_parts"]["value"] == "before"


def test_a_users_own_feature_may_have_the_name_of_a_part():
    X, y = data(20, 0)
    own = [[{**token, "last letter of word": token["before"][-1]} for token in x] for x in X]
    model = StructuredGPClassifier(prior=BAYES).fit(own, y)
    templates = model.model_.encoder.templates
    assert len(set(templates)) == len(templates)
    assert "last 2 letters of word" in templates
    assert model.predict(own) == y


def test_shards_have_no_parts_and_say_so(tmp_path):
    X, y = data(20, 0)
    kept = shards.write(list(zip(X, y, strict=True)), tmp_path / "shards")
    plan = StructuredGPClassifier().fit(kept).training_log_["plan"]["word_parts"]
    assert (plan["value"], plan["reason"]) == (None, "shards hold features as they were written")
    with pytest.raises(InputError, match=r"^word_parts: parts of 'word' are asked for, and shards hold"):
        StructuredGPClassifier(word_parts="word").fit(kept)
