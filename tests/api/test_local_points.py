"""n_draws='auto': probabilities of single labels without the draws, as good as theirs."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.generate import generate

import structgp
from structgp import InputError, Prior, StructuredGPClassifier, metrics
from structgp.answers.local_points import orthogonal, stratified

FIXED = {"prior": Prior(data_weight=2.0, spread=0.75)}
SPANS = ["B-X", "I-X", "O"]


@pytest.fixture(scope="module")
def data() -> tuple[list[Any], list[list[str]]]:
    found = generate(160, n_labels=3, n_values=50, n_templates=4, mean_length=6, strength=2.0, seed=3)
    return found.X, found.y


@pytest.fixture(scope="module")
def fitted(data: Any) -> StructuredGPClassifier:
    return StructuredGPClassifier(**FIXED).fit(data[0][:30], data[1][:30])


@pytest.fixture(scope="module")
def tagger(data: Any) -> StructuredGPClassifier:
    """Of spans, under the rules that all of them obey."""
    y = []
    for labels in data[1][:30]:
        names = [SPANS[int(label[1:])] for label in labels]
        y.append(
            ["O" if a == "I-X" and b == "O" else a for a, b in zip(names, ["O", *names[:-1]], strict=True)]
        )
        for t in range(1, len(y[-1])):
            if y[-1][t] == "I-X" and y[-1][t - 1] == "O":
                y[-1][t] = "B-X"
    return StructuredGPClassifier(**FIXED).fit(data[0][:30], y)


def array(marginals: Any) -> np.ndarray:
    return np.array([list(p.values()) for x in marginals for p in x])


def test_probabilities_are_those_of_many_draws(fitted: Any, tagger: Any, data: Any) -> None:
    X = data[0][30:90]
    for model in (fitted, tagger):
        assert model.n_draws == "auto"
        quick = array(model.predict_marginals(X))
        many, mean = (array(copy.copy(model).set_params(n_draws=n).predict_marginals(X)) for n in (2000, 0))
        assert np.abs(quick - many).mean() < 0.01
        assert np.abs(quick - many).mean() < 0.2 * np.abs(mean - many).mean()
        assert np.abs(quick.sum(1) - 1).max() < 1e-12


def test_no_span_is_more_probable_than_its_labels(tagger: Any, data: Any) -> None:
    X = data[0][30:60]
    seen = 0
    for x, spans, p in zip(X, tagger.predict_spans(X, 0.02), tagger.predict_marginals(X), strict=True):
        assert [span.probability for span in spans] == sorted((s.probability for s in spans), reverse=True)
        for start, stop, label, probability in spans:
            needed = [p[start][f"B-{label}"], *(p[t][f"I-{label}"] for t in range(start + 1, stop))]
            assert 0.02 <= probability <= min(needed) + 1e-12
            # Alone or in a batch; averages are in single precision.
            assert tagger.span_probability(x, start, stop, label) == pytest.approx(probability, abs=1e-7)
            seen += 1
    assert seen > 50


def test_a_span_is_as_probable_as_under_many_draws(tagger: Any, data: Any) -> None:
    X = data[0][30:60]
    many = copy.copy(tagger).set_params(n_draws=2000).predict_spans(X, 0.2)
    quick = {(i, *s[:3]): s[3] for i, spans in enumerate(tagger.predict_spans(X, 0.05)) for s in spans}
    apart = [abs(quick.get((i, *s[:3]), 0) - s[3]) for i, spans in enumerate(many) for s in spans]
    assert np.mean(apart) < 0.02


def test_spans_that_labels_are_chosen_by_are_as_probable_as_under_many_draws(
    tagger: Any, data: Any
) -> None:
    X = data[0][30:90]
    quick, many = (copy.copy(tagger).set_params(n_draws=n).ask(X) for n in ("auto", 2000))
    found = [{span[:3]: span[3] for span in spans} for spans in quick.decoded_spans(0.001)]
    away = [
        abs(found[i].get(span[:3], 0.0) - span[3])
        for i, spans in enumerate(many.decoded_spans(0.05))
        for span in spans
    ]
    assert len(away) > 60
    assert np.mean(away) < 0.05


def test_nothing_is_lost(fitted: Any, data: Any) -> None:
    X, y = data[0][30:], data[1][30:]
    loss = [
        metrics.token_nll(y, copy.copy(fitted).set_params(n_draws=n).predict_marginals(X))
        for n in ("auto", 128, 0)
    ]
    assert loss[0] < 1.01 * loss[1] < loss[2]


@pytest.mark.parametrize("decode", ["accuracy", "f1"])
def test_an_answer_does_not_depend_on_what_else_is_asked(tagger: Any, data: Any, decode: str) -> None:
    X = [*data[0][30:], [], data[0][0] * 30]  # the last is longer than there is noise
    model = copy.copy(tagger).set_params(decode=decode)
    together, labels = model.predict_marginals(X), model.predict(X)
    assert [len(x) for x in X] == [len(p) for p in together]
    order = np.random.default_rng(0).permutation(len(X))
    assert [together[i] for i in order] == model.predict_marginals([X[i] for i in order])
    for i in (0, 7, len(X) - 2, len(X) - 1):
        assert model.predict_marginals([X[i]]) == [together[i]]
        assert model.predict([X[i]]) == [labels[i]]


def test_labels_follow_from_the_probabilities(fitted: Any, tagger: Any, data: Any) -> None:
    X = data[0][30:]
    best = [[max(p, key=p.__getitem__) for p in x] for x in fitted.predict_marginals(X)]
    assert fitted.predict(X) == best
    costs = {"L0": {"L1": 5.0, "L2": 5.0}}
    careful = copy.copy(fitted).set_params(decode="cost", costs=costs).predict(X)
    assert sum(x.count("L0") for x in careful) > sum(x.count("L0") for x in best)
    for decode in ("accuracy", "f1"):
        for labels in copy.copy(tagger).set_params(decode=decode).predict(X):
            assert all(
                a in ("B-X", "I-X") for a, b in zip(["O", *labels], labels, strict=False) if b == "I-X"
            )


def test_settings_of_a_question_are_kept(fitted: Any, data: Any) -> None:
    X = data[0][30:40]
    plain = array(fitted.predict_marginals(X))
    more = array(copy.copy(fitted).set_params(class_weight={"L0": 10.0}).predict_marginals(X))
    assert (more[:, 0] > plain[:, 0]).all()
    known = [["L1", *[None] * (len(x) - 1)] for x in X]
    given = fitted.predict_marginals(X, known)
    assert all(x[0]["L1"] == pytest.approx(1) for x in given)


def test_draws_tell_new_values_apart_whatever_was_asked_before(fitted: Any) -> None:
    """Probabilities of single labels do not need that; values are told apart when an answer does."""
    new = [[[f"new{t}{p}" for p in range(4)] for t in range(5)], [["new", *"abc"]] * 5]
    by_draws = copy.copy(fitted).set_params(n_draws=128).ask(new)
    asked = fitted.ask(new)
    one = asked.marginals()
    sizes = [len(known) for known in fitted.model_.encoder.values]
    assert (asked.rows[0] == sizes).all()
    assert not (asked.rows_apart[0] == sizes).all()
    for some, alone in ((asked.some([0]), by_draws.some([0])), (asked, by_draws)):
        for p, q in zip(some.transition_marginals(), alone.transition_marginals(), strict=True):
            np.testing.assert_array_equal(p, q)
    assert all(np.array_equal(p, q) for p, q in zip(one, asked.marginals(), strict=True))
    assert not np.allclose(asked.transition_marginals()[0], asked.transition_marginals()[1])


def test_copies_and_files_answer_the_same(tagger: Any, data: Any, tmp_path: Path) -> None:
    X = data[0][30:40]
    tagger.save(tmp_path / "model")
    loaded = structgp.load(tmp_path / "model")
    assert loaded.n_draws == "auto"
    for model in (loaded, pickle.loads(pickle.dumps(tagger))):
        assert np.allclose(array(model.predict_marginals(X)), array(tagger.predict_marginals(X)), atol=1e-6)
        assert model.predict(X) == tagger.predict(X)


def test_other_structures_answer_by_draws(data: Any) -> None:
    X, y = data[0][:12], data[1][:12]
    for options in ({"structure": structgp.chain(order=0)}, {"posterior": structgp.Inducing(n_inducing=6)}):
        model = StructuredGPClassifier(**FIXED, **options).fit(X, y)
        assert model.model_.local_points is None
        drawn = copy.copy(model).set_params(n_draws=128)
        assert model.predict_marginals(X) == drawn.predict_marginals(X)


def test_auto_is_the_only_word() -> None:
    with pytest.raises(InputError, match="n_draws: must be a whole number of at least 0, got 'many'"):
        StructuredGPClassifier(n_draws="many").fit([[{"a": "b"}]], [["c"]])


def test_numbers_are_from_all_slices_of_the_normal_distribution() -> None:
    rng = np.random.default_rng(0)
    found = stratified(rng.standard_normal((50, 16)))
    assert np.allclose((found**2).mean(1), 1)
    assert np.allclose(np.sort(np.abs(found), 1), np.sort(np.abs(found[0])))
    fourth = (stratified(rng.standard_normal((1, 512))) ** 4).mean()
    assert fourth == pytest.approx(3, rel=0.02)
    columns = orthogonal(5, 12, rng)
    assert columns.shape == (5, 12)
    gram = columns[:, :5].T @ columns[:, :5]
    assert np.allclose(gram, np.diag(np.diag(gram)))
