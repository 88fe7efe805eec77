"""Rules that are adopted by themselves, and labels chosen for a measure, through the estimator."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import structgp
from structgp import InputError, Prior, StructgpWarning, StructuredGPClassifier, metrics
from structgp.data.corpora import recipes
from structgp.data.schemes import allowed, obeyed_scheme, scheme_of
from structgp.plan.decisions import UNKNOWN_THRESHOLD
from structgp.structures import Chain

SCHEMES = {
    "BIO": (["B-X", "I-X", "O"], ["B", "I", "O"], ["B-X", "O"], ["B-X", "B-Y", "I-Y"]),
    "IOBES": (["B-X", "E-X", "O", "S-X"], ["B-X", "E-X", "I-X", "O"]),
    "BILOU": (["B-X", "L-X", "O", "U-X"],),
    "IO": (["I-X", "O"], ["I-X", "I-Y", "O"], ["I", "O"]),
    None: (
        ["DT", "IN", "NN"], ["NOUN", "O", "VERB"], ["B", "I"], ["B", "O"], ["B-X", "I", "O"],
        ["I-X", "IN", "O"],
        ["B-X", "E-X", "L-X", "O"], ["O"], ["S-X", "O"], ["0", "1"], ["B-", "I-", "O"], ["I-X", "I-Y"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "classes"), [(k, c) for k, sets in SCHEMES.items() for c in sets])
def test_the_scheme_of_labels(name: str | None, classes: list[str]) -> None:
    assert scheme_of(classes) == name
    if name is not None:
        assert allowed(name, classes).follows.shape == (len(classes), len(classes))


@pytest.mark.parametrize(
    ("y", "name"),
    [
        (["BIO", "BB"], "BIO"),
        (["B?O", "?I", ""], "BIO"),
        (["BIO", "I"], None),
        (["OI"], None),
        (["O?I"], "BIO"),
        (["?"], "BIO"),
    ],
)
def test_every_labelling_must_obey(y: list[str], name: str | None) -> None:
    """A missing label may be any."""
    classes = ["B", "I", "O"]
    encoded = [np.array([-1 if c == "?" else classes.index(c) for c in z], dtype=np.int64) for z in y]
    assert obeyed_scheme(classes, encoded) == name


@pytest.fixture(scope="module")
def corpus() -> Any:
    return recipes()


@pytest.fixture(scope="module")
def fitted(corpus: Any) -> StructuredGPClassifier:
    return StructuredGPClassifier().fit(corpus.X_train[:40], corpus.y_train[:40])


def restored(fitted: StructuredGPClassifier, **params: Any) -> StructuredGPClassifier:
    other = StructuredGPClassifier(**params)
    other.model_, other.training_log_, other.classes_ = (
        fitted.model_,
        fitted.training_log_,
        fitted.classes_,
    )
    return other


def chosen(model: StructuredGPClassifier, name: str) -> Any:
    return model.training_log_["plan"][name]["value"]


def test_the_plan_says_what_was_adopted(fitted: StructuredGPClassifier) -> None:
    assert [chosen(fitted, name) for name in ("constraints", "decode")] == ["BIO", "f1"]
    assert chosen(fitted, "threshold") == fitted.model_.info["threshold"] == UNKNOWN_THRESHOLD
    assert fitted.model_.rules is not None


def test_adopted_and_declared_rules_are_the_same_fit(fitted: StructuredGPClassifier, corpus: Any) -> None:
    declared = StructuredGPClassifier(constraints="BIO").fit(corpus.X_train[:40], corpus.y_train[:40])
    assert declared.training_log_["elbo"] == fitted.training_log_["elbo"]
    assert declared.predict(corpus.X_test[:9]) == fitted.predict(corpus.X_test[:9])


@pytest.mark.parametrize("change", ["asked", "broken", "likelihood", "other labels"])
def test_nothing_is_adopted(corpus: Any, change: str) -> None:
    X, y = corpus.X_train[:8], [list(z) for z in corpus.y_train[:8]]
    given: dict[str, Any] = {"constraints": None} if change == "asked" else {}
    if change == "broken":
        y[0][0] = "I-NAME"
    if change == "likelihood":
        given = {"structure": type("Mine", (Chain,), {})()}
    if change == "other labels":
        y = [[label.replace("-", "_") for label in z] for z in y]
    with pytest.warns(StructgpWarning, match="do not obey BIO") if change == "broken" else nullcontext():
        model = StructuredGPClassifier(**given).fit(X, y)
    assert chosen(model, "constraints") is None
    assert model.model_.rules is None
    assert chosen(model, "decode") == ("accuracy" if change == "other labels" else "f1")


def test_partial_fit_goes_on_under_the_same_rules(corpus: Any) -> None:
    X, y = corpus.X_train, corpus.y_train
    model = StructuredGPClassifier().partial_fit(X[:8], y[:8]).partial_fit(X[8:12], y[8:12])
    assert chosen(model, "constraints") == "BIO"
    broken = [["I-NAME", *z[1:]] for z in y[12:14]]
    with pytest.warns(StructgpWarning, match="do not obey BIO"):
        model.partial_fit(X[12:14], broken)
    assert chosen(model, "constraints") is None
    model.partial_fit(X[14:16], y[14:16])  # once given up, they stay so
    assert chosen(model, "constraints") is None


def test_each_decoding_is_best_at_its_own(fitted: StructuredGPClassifier, corpus: Any) -> None:
    """By the model's own expectation: tokens right, cost, probability of the whole."""
    X, costs = corpus.X_test[:12], {"B-NAME": {"O": 9.0}, "I-NAME": {"O": 9.0, "B-NAME": 0.2}}
    settings: dict[str, Any] = {name: {"decode": name} for name in ("f1", "accuracy", "sequence")}
    settings["cost"] = {"decode": "cost", "costs": costs}
    found = {name: restored(fitted, **params).predict(X) for name, params in settings.items()}
    assert found["f1"] == restored(fitted).predict(X)
    p = fitted.predict_marginals(X)
    right, cost, whole = {}, {}, {}
    for name, labellings in found.items():
        tokens = [pair for z, of in zip(labellings, p, strict=True) for pair in zip(z, of, strict=True)]
        right[name] = sum(q[label] for label, q in tokens)
        cost[name] = sum(
            q[u] * costs.get(u, {}).get(v, float(u != v)) for v, q in tokens for u in fitted.classes_
        )
        whole[name] = sum(map(float, np.exp(fitted.sequence_log_probs(X, labellings))))
    assert max(right, key=right.__getitem__) == "accuracy"
    assert min(cost, key=cost.__getitem__) == "cost"
    assert max(whole, key=whole.__getitem__) == "sequence"
    rules = fitted.model_.constraints
    for labels in (z for labellings in found.values() for z in labellings):
        assert rules.breaks([list(fitted.classes_).index(v) for v in labels]) is None


def test_labels_do_not_depend_on_what_else_is_asked(fitted: StructuredGPClassifier, corpus: Any) -> None:
    X = corpus.X_test[:8]
    assert fitted.predict(X) == [fitted.predict_single(x) for x in X]


def test_a_matrix_of_costs(fitted: StructuredGPClassifier, corpus: Any) -> None:
    V = len(fitted.classes_)
    by_matrix = restored(fitted, decode="cost", costs=1 - np.eye(V)).predict(corpus.X_test[:9])
    assert by_matrix == restored(fitted, decode="accuracy").predict(corpus.X_test[:9])


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"decode": "cost"}, "^costs: no costs to decode by; "),
        ({"costs": {}}, "^costs: given beside decode='auto'"),
        ({"decode": "cost", "costs": [[0.0, 1.0]]}, r"^costs: shape \(1, 2\) for "),
        ({"decode": "cost", "costs": {"B-NAME": 3.0}}, "^costs: must be a dict from predicted label"),
        ({"decode": "cost", "costs": {"B-NAME": {"X": 3.0}}}, "^costs: 'X' is not a label"),
        ({"decode": "cost", "costs": {"B-NAME": {"O": "3"}}}, "^costs: must be a number, got '3'"),
        ({"decode": "cost", "costs": {"B-NAME": {"O": float("inf")}}}, "^costs: must be finite"),
        ({"decode": "cost", "costs": "much"}, "^costs: not all numbers"),
        ({"decode": "viterbi"}, "^decode: 'viterbi' is not known; use one of auto, f1, accuracy, "),
    ],
)
def test_costs_that_are_not_possible(
    fitted: StructuredGPClassifier, corpus: Any, params: Any, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        restored(fitted, **params).predict(corpus.X_test[:1])


def test_spans_of_labels_that_are_none() -> None:
    X, y = [[{"w": "a"}, {"w": "b"}]] * 6, [["P", "Q"]] * 6
    model = StructuredGPClassifier(decode="f1", prior=Prior(data_weight=1.0)).fit(X, y)
    with pytest.raises(InputError, match=r"^decode: the labels P, Q are not in a tagging scheme; "):
        model.predict(X)


def test_a_file_keeps_what_was_decided(fitted: StructuredGPClassifier, corpus: Any, tmp_path: Any) -> None:
    costs = {"B-NAME": {"O": 9.0}}
    model = restored(fitted, decode="cost", costs=costs, constraints=None)
    model.save(tmp_path / "m")
    loaded = structgp.load(tmp_path / "m")
    assert (loaded.decode, loaded.costs, loaded.constraints) == ("cost", costs, None)
    assert loaded.predict(corpus.X_test[:9]) == model.predict(corpus.X_test[:9])
    auto = {"decode": "auto", "costs": None}
    assert loaded.set_params(**auto).predict(corpus.X_test[:9]) == fitted.predict(corpus.X_test[:9])


@pytest.mark.held_out
def test_the_threshold_is_half_of_the_f1_expected_of_left_out_data(corpus: Any) -> None:
    model = StructuredGPClassifier().fit(corpus.X_train[:20], corpus.y_train[:20])
    expected = model.held_out_["expected_f1"]
    assert 0.2 < expected < 0.95
    assert model.model_.info["threshold"] == chosen(model, "threshold") == expected / 2
    onward = model.set_params(warm_start=True).fit(corpus.X_train[:22], corpus.y_train[:22])
    assert chosen(onward, "threshold") == expected / 2


def test_evaluate_scores_what_predict_says(fitted: StructuredGPClassifier, corpus: Any) -> None:
    X, y = corpus.X_test[:20], corpus.y_test[:20]
    report, found = fitted.evaluate(X, y), fitted.predict(X)
    assert report.token_error == metrics.token_error(y, found) == pytest.approx(1 - fitted.score(X, y))
    assert report.span_f1 == metrics.span_scores(y, found).f1


def test_a_piecewise_fit_adopts_rules_for_its_answers() -> None:
    X = [[["a"], ["b"], ["c"]], [["c"], ["a"], ["b"]]]
    model = StructuredGPClassifier(structure=structgp.piecewise(), n_draws=4)
    model.fit(X, [["B-X", "I-X", "O"], ["O", "B-X", "I-X"]])
    assert model.training_log_["plan"]["constraints"]["value"] == "BIO"
    assert model.predict_marginals_single(X[0])[0]["I-X"] == 0


def test_with_much_data_the_threshold_is_half_of_the_f1_expected_of_training_data(
    corpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("structgp.plan.choices.MANY_TOKENS", 50)
    X, y = corpus.X_train[:20], corpus.y_train[:20]
    model = StructuredGPClassifier(prior=Prior(data_weight=1)).fit(X, y)
    f1 = model.expected_scores(X).f1.mean
    assert model.model_.info["threshold"] == chosen(model, "threshold") == pytest.approx(f1 / 2, abs=0.03)
