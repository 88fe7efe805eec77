"""Explanations add up, and name what is there."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import scipy.sparse
import torch
from benchmarks.generate import generate

import structgp
from structgp import Inducing, InputError, StructuredGPClassifier, describe, explain


@pytest.fixture(scope="module")
def data():
    return generate(40, n_labels=3, n_values=8, n_templates=2, mean_length=5, seed=2)


@pytest.fixture(scope="module")
def model(data):
    return StructuredGPClassifier(n_draws=64).fit(data.X, data.y)


@pytest.fixture(scope="module")
def functions(data):
    return StructuredGPClassifier(kernel="template", n_draws=64, posterior=Inducing(n_inducing=20)).fit(
        data.X, data.y
    )


def longest(data):
    return max(data.X, key=len)


@pytest.mark.parametrize("kind", ["model", "functions"])
def test_log_odds_are_those_of_the_posterior_mean(kind, request, data):
    model = request.getfixturevalue(kind)
    x = longest(data)
    mean = StructuredGPClassifier(**model.get_params(deep=False)).set_params(n_draws=0)
    mean.model_, mean.classes_ = model.model_, model.classes_
    marginals = mean.predict_marginals_single(x)
    for t, p in enumerate(marginals):
        found = explain(model, x, t, "L0", "L1", n=1000)
        assert found.log_odds == pytest.approx(np.log(p["L0"] / p["L1"]), abs=1e-8)
        assert found.log_odds == pytest.approx(found.unary + found.left + found.right)
        assert sum(part.score for part in found.features) == pytest.approx(found.unary, abs=1e-8)
        assert (found.before is None) == (t == 0)
        assert (found.after is None) == (t == len(x) - 1)
        back = explain(model, x, t, "L1", "L0", n=1000)
        assert back.log_odds == pytest.approx(-found.log_odds)
        assert back.unary == pytest.approx(-found.unary)


def test_the_left_is_what_a_shorter_sequence_says(model, data):
    """Without what comes after, the log-odds are features and left alone."""
    x = longest(data)
    for t in range(1, len(x)):
        found = explain(model, x[: t + 1], t, "L0", "L2")
        whole = explain(model, x, t, "L0", "L2")
        assert found.right == pytest.approx(0, abs=1e-8)
        assert whole.left == pytest.approx(found.left, abs=1e-8)


def test_by_default_the_best_label_against_the_next(model, data):
    x = longest(data)
    for t, p in enumerate(model.predict_marginals_single(x)):
        found = explain(model, x, t)
        first, second = sorted(p, key=lambda v: -p[v])[:2]
        assert (found.label, found.other) == (first, second)
        assert found.probability == pytest.approx(p[first])
    assert explain(model, x, -1) == explain(model, x, len(x) - 1)


def test_features_are_named_by_template_and_value(model, data):
    x = longest(data)
    names = {(part.name, part.value) for part in explain(model, x, 1, n=100).features}
    assert {(str(p), value) for p, value in enumerate(x[1])} <= names
    assert ("label frequency", "") in names
    known = model.model_.encoder.templates
    new = explain(model, [["never seen"] * len(known)], 0, n=100)
    assert all(part.value == "rare" for part in new.features if part.name != "label frequency")


def test_a_transition_is_the_difference_of_two_scores(model, data):
    x = longest(data)
    table = describe(model)
    place = {name: i for i, name in enumerate(table.classes)}
    for t in range(len(x) - 1):
        found = explain(model, x, t, "L0", "L1")
        i, j = place[found.after.if_label], place[found.after.if_other]
        assert found.after.score == pytest.approx(table.transitions[0, i] - table.transitions[1, j])
        variance = table.transition_sds[0, i] ** 2 + table.transition_sds[1, j] ** 2
        assert found.after.sd == pytest.approx(np.sqrt(variance))
        later = explain(model, x, t + 1, "L0", "L1").before
        i, j = place[later.if_label], place[later.if_other]
        assert later.score == pytest.approx(table.transitions[i, 0] - table.transitions[j, 1])


@pytest.mark.parametrize(
    "parameters", [{"structure": structgp.chain(order=0)}, {"prior": structgp.Prior(transition_sd=0)}]
)
def test_without_transitions_none_are_shown(parameters, data):
    model = structgp.StructuredGPClassifier(n_draws=4, **parameters).fit(data.X, data.y)
    assert "transitions" not in str(describe(model))
    assert str(describe(model)).splitlines()[-1].lstrip().startswith("label frequency")
    found = explain(model, longest(data), 1)
    assert (found.before, found.after) == (None, None)
    assert found.log_odds == pytest.approx(found.unary)
    forbidden = {"forbidden": [("L0", "L0")]}
    y = [["L0" if t % 2 else "L1" for t in range(len(x))] for x in data.X]
    bound = structgp.StructuredGPClassifier(n_draws=4, constraints=forbidden, **parameters).fit(data.X, y)
    assert explain(bound, longest(data), 1).before is not None


def test_witnesses_are_tokens_like_this_one_with_labels_that_surprised(model, data):
    x = longest(data)
    found = explain(model, x, 0, "L0", "L1", X_train=data.X, y_train=data.y, n=5).witnesses
    assert len(found) == 10
    scores = [w.score for w in found]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > 0 > scores[-1]
    assert all(data.y[w.sequence][w.token] == w.label for w in found)
    # By hand: kernel times what the model leaves unexplained, along the contrast of the labels.
    fitted = model.model_
    q = fitted.posterior.node
    w = found[0]
    rows = [torch.from_numpy(fitted.encoder.encode(s)) for s in (x, data.X[w.sequence])]
    k = q.kernel(rows[0][:1], rows[1][w.token : w.token + 1]).to_dense()
    p = fitted.ask([data.X[w.sequence]]).marginals()[0][w.token]
    surprise = (np.arange(3) == model.classes_.tolist().index(w.label)) - p
    direction = (q.basis[0] - q.basis[1]) @ q.basis.T
    assert w.score == pytest.approx(float(k * (torch.from_numpy(surprise) @ direction)))


def test_witnesses_speak_as_often_as_the_data_count(model, data):
    def scores(told):
        found = explain(told, longest(data), 0, "L0", "L1", X_train=data.X, y_train=data.y, n=5)
        return [w.score for w in found.witnesses]

    heavy = copy.deepcopy(model)
    heavy.model_.info["plan"]["data_weight"]["value"] = 3.0
    assert scores(heavy) == pytest.approx([3 * score for score in scores(model)])


def test_tokens_without_a_label_hardly_speak(model, data):
    y = [[None] * len(labels) for labels in data.y]
    found = explain(model, longest(data), 0, X_train=data.X, y_train=y).witnesses
    assert max((abs(w.score) for w in found), default=0) < 1e-10


def test_inducing_inputs_speak_where_there_are_some(functions, model, data):
    x = longest(data)
    found = explain(functions, x, 1, n=1000)
    assert sum(w.score for w in found.witnesses) == pytest.approx(found.unary)
    assert all(w.features for w in found.witnesses)
    assert explain(model, x, 1).witnesses == []


@pytest.mark.parametrize("form", ["sparse", "dicts", "dense", "mixed"])
def test_other_features(form, data):
    rng = np.random.default_rng(0)
    X = []
    for x in data.X[:12]:
        dense = rng.standard_normal((len(x), 4)).round(1)
        X.append(
            {
                "sparse": scipy.sparse.csr_matrix(dense * (abs(dense) > 0.7)),
                "dense": dense,
                "dicts": [{"w": t[0], "n": float(v[0]), "m": True} for t, v in zip(x, dense, strict=True)],
                "mixed": [{"w": t[0], "v": v} for t, v in zip(x, dense, strict=True)],
            }[form]
        )
    y = data.y[:12]
    model = StructuredGPClassifier(n_draws=8).fit(X, y)
    found = explain(model, X[0], 0, X_train=X, y_train=y, n=100)
    assert sum(part.score for part in found.features) == pytest.approx(found.unary, abs=1e-6)
    assert found.witnesses
    assert str(found)


def test_the_text_says_it(model, data):
    text = str(explain(model, longest(data), 1, X_train=data.X, y_train=data.y, n=2))
    assert "rather than" in text
    assert "before" in text
    assert "after" in text
    assert text.count("sequence ") == 4


def test_the_summary(model):
    found = describe(model)
    assert found.classes == ["L0", "L1", "L2"]
    assert set(found.templates) == {*model.model_.encoder.templates, "label frequency"}
    mean, sd = model.model_.posterior["next"].constant_scores()
    np.testing.assert_allclose(found.transitions, mean)
    np.testing.assert_allclose(found.transition_sds, sd)
    assert "label frequency" in str(found)


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ({"token": 99}, "token"),
        ({"token": 0, "label": "X"}, "label"),
        ({"token": 0, "other": "X"}, "other"),
        ({"token": 0, "label": "L0", "other": "L0"}, "other"),
        ({"token": 0, "X_train": []}, "X_train"),
    ],
)
def test_mistakes_are_named(model, data, arguments, place):
    with pytest.raises(InputError) as caught:
        explain(model, longest(data), **arguments)
    assert caught.value.place == place


def test_a_class_weight_is_a_reason(data):
    model = StructuredGPClassifier(n_draws=8, class_weight={"L0": 7.0}).fit(data.X[:12], data.y[:12])
    found = explain(model, longest(data), 1, "L0", "L1", n=1000)
    assert sum(part.score for part in found.features) == pytest.approx(found.unary)
    assert {p.name: p.score for p in found.features}["class weight"] == pytest.approx(np.log(7))
    with pytest.raises(InputError, match="no tokens"):
        explain(model, [], 0)


def test_weights_from_numpy_are_saved(data, tmp_path):
    weights = {"L0": np.float32(2), "L1": np.int64(3)}
    model = StructuredGPClassifier(n_draws=8, class_weight=weights).fit(data.X[:12], data.y[:12])
    model.save(tmp_path / "m")
    assert structgp.load(tmp_path / "m").class_weight == {"L0": 2.0, "L1": 3}


def test_constraints_are_lists(data):
    with pytest.raises(InputError, match="is not a list of pairs"):
        StructuredGPClassifier(constraints={"forbidden": {("L0", "L1")}}).fit(data.X, data.y)


def test_dev_data_that_nothing_can_be_told_from(data):
    y = [["NEW", *labels[1:]] for labels in data.y[:4]]
    with pytest.raises(InputError, match="y_dev"):
        StructuredGPClassifier().fit(data.X, data.y, data.X[:4], y, early_stopping=True)
