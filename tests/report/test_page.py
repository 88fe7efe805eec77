"""What the page says, and that nothing from the data can become part of its code."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re

import numpy as np
import pytest
import scipy.special

from structgp.api.estimator import StructuredGPClassifier
from structgp.errors import InputError
from structgp.evaluation.metrics import calibration, risk_coverage
from structgp.report import Text, examine, render
from structgp.report.findings import TokenUncertainty, token_uncertainties
from structgp.report.markup import decimal, percent
from structgp.report.sections import by_type
from structgp.report.tables import MOST_LABELS, confusion, frequent

EVIL = "</script><b onclick=alert(1)>&amp;'\"<!--"


def data_of(page):
    (data,) = [s for s in page.scripts if s.startswith("{")]
    return json.loads(data)


@pytest.fixture(scope="module")
def page(findings, parse):
    return parse(render(findings))


# -- content ---------------------------------------------------------------------------------------


def test_the_headline_has_the_figures_of_evaluate(findings, page):
    scores, text = findings.truth.scores, page.text[""]
    assert "test.conll" in text
    assert "recipes.model" in text
    for figure in (
        percent(scores.token_error),
        percent(scores.span_f1),
        decimal(scores.token_nll, 3),
        decimal(scores.ece, 3),
        "40 sequences",
        "30 sequences",
        "11 labels",
        "second-order",
    ):
        assert figure in text, figure


def test_every_section_is_there(page):
    anchors = [a["href"] for name, a in page.elements if name == "a"]
    ids = {a.get("id") for _, a in page.elements}
    assert anchors == ["#confidence", "#types", "#confusions", "#learned", "#fit", "#text"]
    assert {anchor[1:] for anchor in anchors} < ids
    titles = page.text["confidence"]
    assert "Reliability: expected calibration error" in titles
    assert "Error among the tokens that are answered, by their share" in titles
    assert "fresh" in page.text["fit"]
    assert "Evidence bound by step" in page.text["fit"]


def test_plots_have_titles_and_labelled_axes(page):
    plots = [a for name, a in page.elements if name == "svg"]
    assert len(plots) >= 4
    assert all(a["role"] == "img" for a in plots)
    for label in ("confidence", "share that is right", "tokens", "error among them"):
        assert label in page.text["confidence"]
    assert "bound (nats)" in page.text["fit"]


def test_curves_tell_what_the_metrics_do(findings, page):
    truth, text = findings.truth, page.text["confidence"]
    assert truth.calibration == calibration(truth.labels, findings.marginals)
    assert decimal(risk_coverage(truth.labels, findings.marginals, findings.predicted).area, 4) in text
    for b in truth.calibration.bins:
        assert f"{b.count:,} token" in text
    expected = findings.expected.error
    assert f"expects an error of {percent(expected.mean)} (90" in text
    assert findings.deferral.expected[-1] == pytest.approx(expected.mean)
    assert f"{decimal(findings.deferral.doubt[-1], 3)} {percent(expected.mean)}" in text


def test_what_to_expect_of_unlabelled_text(unlabelled, parse):
    page = parse(render(unlabelled))
    everything = " ".join(page.text.values())
    error, f1 = unlabelled.expected.error, unlabelled.expected.f1
    for score in (error, f1):
        assert (
            f"{percent(score.mean)} 90\u202f% interval {percent(score.low)} to {percent(score.high)}"
            in everything
        )
    assert "what the model expects" not in everything  # there is one curve alone


def test_templates_and_transitions_have_names(findings, page):
    text = page.text["learned"]
    scales = findings.estimator.training_log_["kernel_scales"]
    assert "U12:%x[0,2]" in text
    assert decimal(scales["12"], 2) in text
    mean, _ = findings.estimator.model_.posterior["next"].constant_scores()
    first = f"{decimal(float(mean[0, 0]), 2)}, standard deviation"
    cells = [a["title"] for name, a in page.elements if name == "td" and a.get("title")]
    assert any("B-COMMENT then B-COMMENT" in t and first in t for t in cells)


def test_scores_by_type(findings, page, parse):
    scores, told = findings.truth.scores, page.text["types"]
    assert set(scores.by_type) == {"QTY", "UNIT", "NAME", "PREP", "COMMENT"}
    for kind, of in (*scores.by_type.items(), *scores.by_label.items()):
        cells = " ".join(map(percent, (of.precision, of.recall, of.f1)))
        assert f"{kind} {cells} {of.n_true}" in told
    tags = [{"A": "NOUN", "B": "VERB"}[v] for v in "AB"]
    plain = dataclasses.replace(scores, by_type=dict.fromkeys(tags, scores.by_type["QTY"]))
    plain = dataclasses.replace(plain, by_label=plain.by_type)
    assert "span" not in by_type(plain)


def test_text_comes_first_where_nothing_is_labelled(findings, unlabelled, parse):
    for found, first in ((findings, False), (unlabelled, True)):
        page = parse(render(found))
        ids = [a["id"] for name, a in page.elements if name == "section" and "id" in a]
        assert (ids[0] if first else ids[-1]) == "text"
        assert ids.count("text") == 1
        anchors = [a["href"] for name, a in page.elements if name == "a"]
        assert [f"#{i}" for i in ids] == anchors


def test_a_page_from_python(fitted, corpus, findings, tmp_path, parse):
    X = [corpus.template.expand(rows) for rows in corpus.X_test[:40]]
    fitted.report(X, corpus.y_test[:40], tmp_path / "a.html", name="test.conll", model_name="recipes.model")
    page = parse((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert percent(findings.truth.scores.span_f1) in page.text[""]
    assert data_of(page)["sequences"][0][2] == findings.text.words[0]
    words = [["w"] * len(x) for x in X]
    fitted.report(iter(X), None, tmp_path / "a.html", words=words)
    assert data_of(parse((tmp_path / "a.html").read_text(encoding="utf-8")))["sequences"][0][2][0] == "w"
    for y, words, problem in (
        ([*corpus.y_test[:39], [None]], None, "y: some labels are missing"),
        (corpus.y_test[:3], None, "y: 3 entries for 40 sequences"),
        (None, [], "words: 0 entries for 40 sequences"),
    ):
        with pytest.raises(InputError, match=problem):
            fitted.report(X, y, tmp_path / "a.html", words=words)
    with pytest.raises(InputError, match="X: no tokens"):
        fitted.report([[]], None, tmp_path / "a.html")


def test_the_confusion_matrix_counts_every_token(findings, page):
    counts = findings.truth.confusion
    assert counts.total() == findings.truth.scores.n_tokens
    titles = [a.get("title") or "" for name, a in page.elements if name == "td"]
    found = [re.match(r"([\d,]+) of [\d,]+ (\S+) labelled (\S+) ", t) for t in titles]
    assert {(m[2], m[3]): int(m[1]) for m in found if m} == dict(counts)


def test_the_text_is_all_there(findings, page):
    data, truth = data_of(page), findings.truth
    assert [s[2] for s in data["sequences"]] == findings.text.words
    for i, (line, surprise, _, predicted, errors, uncertainties, alternatives) in enumerate(
        data["sequences"]
    ):
        assert line == i + 1
        assert surprise == pytest.approx(-truth.log_probs[i], abs=0.006)
        labels = [data["labels"][p] for p in predicted]
        assert labels == findings.predicted[i]
        for t, label in zip(errors[::2], errors[1::2], strict=True):
            labels[t] = data["labels"][label]
        assert labels == truth.labels[i]
        np.testing.assert_allclose(uncertainties[0], 1000 * findings.uncertainties[0].values[i], atol=0.51)
        for t, named in enumerate(alternatives):
            p = {data["labels"][k]: v / 1000 for k, v in zip(named[::2], named[1::2], strict=True)}
            assert {findings.predicted[i][t], truth.labels[i][t]} <= p.keys()
            assert p == pytest.approx({k: findings.marginals[i][t][k] for k in p}, abs=0.0006)
            assert next(iter(p.values())) == max(p.values())
            assert len(p) >= 5 or sum(p.values()) > 0.9


def test_total_uncertainty_is_the_entropy_of_the_marginals(fitted, corpus):
    x = corpus.template.expand(corpus.X_test[3])
    total, model = token_uncertainties(fitted.ask([x]))
    assert (model.values[0] <= total.values[0]).all()
    np.testing.assert_allclose(model.values[0], fitted.predict_uncertainty([x]).model[0])
    marginals = np.array([list(p.values()) for p in fitted.predict_marginals_single(x)])
    np.testing.assert_allclose(total.values[0], -scipy.special.xlogy(marginals, marginals).sum(1))


def test_several_kinds_of_uncertainty_are_all_on_the_page(findings, parse):
    total = findings.uncertainties[0]
    model = TokenUncertainty("model", "of the model", "a part", [v / 2 for v in total.values], 0.3)
    data = data_of(parse(render(dataclasses.replace(findings, uncertainties=[total, model]))))
    assert [u["name"] for u in data["uncertainties"]] == ["total", "model"]
    assert data["sequences"][0][5][1] == pytest.approx([d / 2 for d in data["sequences"][0][5][0]], abs=1)


# -- special cases ---------------------------------------------------------------------------------


def test_without_labels_the_sections_that_need_them_say_so(unlabelled, parse):
    page = parse(render(unlabelled))
    for section in ("confidence", "confusions"):
        assert "this file has none" in page.text[section]
    assert "Mean uncertainty" in page.text[""]
    assert "Token error" not in page.text[""]
    data = data_of(page)
    assert not data["labelled"]
    assert all(s[1] is None and s[4] == [] for s in data["sequences"])
    assert "+" in page.text["learned"]


def test_figures_of_cross_validation(findings, unlabelled, parse, monkeypatch):
    assert "cross-validation" not in parse(render(findings)).text["confidence"]
    found = {"n_tokens": 1234, "n_folds": 2, "token_error": 0.125, "verdict": "Confidence fits: <all>."}
    monkeypatch.setitem(findings.estimator.training_log_, "held_out", found)
    monkeypatch.setitem(findings.estimator.model_.info["plan"]["data_weight"], "value", 3.25)
    for one in (findings, unlabelled):
        page = parse(render(one))
        assert "in 2 folds): an error of 12.5" in page.text["confidence"]
        assert "Confidence fits: <all>." in page.text["confidence"]
        assert "Data weight 3.25" in page.text[""]


def test_a_label_that_training_never_saw(fitted, corpus, parse):
    rows = corpus.X_test[:3]
    y = [["B-NEW", *labels[1:]] for labels in corpus.y_test[:3]]
    words = [[row[0] for row in sequence] for sequence in rows]
    X = [corpus.template.expand(sequence) for sequence in rows]
    page = parse(render(examine(fitted, X, Text("t", words, [1, 2, 3], y), model_name="m", templates=None)))
    assert "3 tokens with unseen labels left out" in page.text[""]
    data = data_of(page)
    assert "B-NEW" in data["labels"]
    assert [s[1] for s in data["sequences"]] == [None] * 3
    assert "B-NEW" in page.text["confusions"]


def test_a_model_without_a_trace_or_weights(findings, parse, monkeypatch):
    info = {k: v for k, v in findings.estimator.model_.info.items() if k not in ("trace", "kernel_scales")}
    monkeypatch.setattr(
        findings.estimator, "model_", dataclasses.replace(findings.estimator.model_, info=info)
    )
    page = parse(render(findings))
    assert "no trace" in page.text["fit"]
    assert "no weights by template" in page.text["learned"]


def test_many_labels_are_cut_to_the_frequent_ones(findings, parse):
    pairs = findings.truth.confusion.copy()
    for k in range(60):
        pairs[f"L{k:02}", f"L{k:02}"] = 1000 + k
    table, left_out = confusion(pairs)
    shown = parse(table)
    rows = [a["title"] for name, a in shown.elements if name == "th" and a.get("scope") == "row"]
    assert rows == [f"L{k:02}" for k in range(60 - MOST_LABELS, 60)]
    assert left_out == 20 + len({label for pair in findings.truth.confusion for label in pair})
    assert frequent({"b": 1, "a": 1}) == ["a", "b"]


# -- safety ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nasty(corpus):
    """A model and its text with markup for names, words, labels and templates."""
    rows, y = corpus.X_train[:15], [[EVIL + k for k in labels] for labels in corpus.y_train[:15]]
    words = [[EVIL + row[0] for row in sequence] for sequence in rows]
    X = [corpus.template.expand(sequence) for sequence in rows]
    return examine(
        StructuredGPClassifier(features="columns", n_draws=4).fit(X, y),
        X,
        Text(EVIL + "data", words, list(range(15)), [[EVIL, *labels[1:]] for labels in y]),
        model_name=EVIL,
        templates={str(i): EVIL + line.source for i, line in enumerate(corpus.template.unigrams)},
    )


@pytest.mark.filterwarnings("ignore:labels")
def test_nothing_from_the_data_is_read_as_html(nasty, page, parse):
    source = render(nasty)
    other = parse(source)
    assert EVIL not in source
    assert "<b onclick" not in source
    assert [name for name, _ in other.elements].count("script") == 2
    names = {name for name, _ in other.elements}
    assert names == {name for name, _ in page.elements}
    assert not any(key.startswith("on") for _, a in other.elements for key in a)
    assert data_of(other)["sequences"][0][2][0].startswith(EVIL)
    assert EVIL + "data" in other.text[""]
    assert EVIL + "U12" in other.text["learned"]


def test_the_page_asks_for_nothing_and_runs_one_script(findings, page):
    source = render(findings)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|\bsrc=|\bfetch\(|XMLHttp", source)
    (policy,) = [a["content"] for n, a in page.elements if a.get("http-equiv")]
    script = page.scripts[-1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == (f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'")
    assert "innerHTML" not in script


def test_equal_findings_give_equal_bytes(fitted, corpus, findings):
    X = [corpus.template.expand(rows) for rows in corpus.X_test[:40]]
    again = examine(fitted, X, findings.text, model_name=findings.model_name, templates=findings.templates)
    assert render(again) == render(findings)


def test_json_has_no_infinity(findings, parse):
    truth = dataclasses.replace(findings.truth, log_probs=[-math.inf] * 40)
    data = data_of(parse(render(dataclasses.replace(findings, truth=truth))))
    assert {s[1] for s in data["sequences"]} == {1e9}


# -- constraints -----------------------------------------------------------------------------------


def test_constraints_show_in_labels_and_transitions(corpus, parse):
    X = [corpus.template.expand(x) for x in corpus.X_train[:15]]
    model = StructuredGPClassifier(constraints="BIO", n_draws=8).fit(X, corpus.y_train[:15])
    tests = [corpus.template.expand(x) for x in corpus.X_test[:15]]
    words = [[row[0] for row in x] for x in corpus.X_test[:15]]
    found = examine(model, tests, Text("t", words, [0] * 15, None), model_name="m")
    assert found.predicted == model.predict(tests)
    text = render(found)
    assert "O then I-NAME: the constraints forbid it" in text
    assert "B-NAME then I-NAME: the constraints" not in text
    assert parse(text)
