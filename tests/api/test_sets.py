"""Expected scores, sets with a guarantee, and labels left to a person, as a fitted estimator gives them."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import structgp
from structgp import InputError, Prior, StructuredGPClassifier, chain, metrics, same
from structgp.plan.options import LINKED_DRAWS

CLASSES = ["B-X", "I-X", "O"]
WORDS = {"O": "abc", "B-X": "bcd", "I-X": "cde"}


def sequences(n: int, seed: int) -> tuple[list[Any], list[list[str]]]:
    """Words that hint at their labels, spans of one to three tokens, of up to six tokens in all."""
    rng = np.random.default_rng(seed)
    X, y = [], []
    for _ in range(n):
        labels: list[str] = []
        while len(labels) < 6:
            labels += ["O"] if rng.random() < 0.5 else ["B-X", *["I-X"] * rng.integers(0, 3)]
        y.append(labels[: rng.integers(2, 7)])
        X.append([{"w": str(rng.choice(list(WORDS[label])))} for label in y[-1]])
    return X, y


@pytest.fixture(scope="module")
def fitted() -> StructuredGPClassifier:
    return StructuredGPClassifier(n_draws=16).fit(*sequences(30, 0)).calibrate(*sequences(60, 1))


@pytest.fixture(scope="module")
def held_out() -> tuple[list[Any], list[list[str]]]:
    return sequences(120, 2)


def test_expected_error_is_what_the_probabilities_say(fitted, held_out) -> None:
    X, y = held_out
    found, labels = fitted.expected_scores(X), fitted.predict(X)
    marginals = fitted.predict_marginals(X)
    expected = np.mean(
        [1 - p[v] for ps, vs in zip(marginals, labels, strict=True) for p, v in zip(ps, vs, strict=True)]
    )
    assert found.error.mean == pytest.approx(expected, abs=0.01)
    assert found.error.low < metrics.token_error(y, labels) < found.error.high
    assert found.f1.low < metrics.span_scores(y, labels).f1 < found.f1.high
    wider = fitted.expected_scores(X, level=0.99)
    assert wider.f1.low < found.f1.low < found.f1.mean < found.f1.high < wider.f1.high
    assert fitted.expected_scores(X) == found
    assert found.as_dict()["error"] == {
        "mean": found.error.mean,
        "low": found.error.low,
        "high": found.error.high,
    }


def test_what_is_uncertain_about_the_functions_does_not_average_out(fitted, held_out) -> None:
    """More text narrows what single tokens leave open, not what all of them share."""

    def width(n_draws: int) -> float:
        fitted.n_draws = n_draws
        try:
            interval = fitted.expected_scores(held_out[0] * 4).error
        finally:
            fitted.n_draws = 16
        return interval.high - interval.low

    assert width(16) > 2 * width(0)


def test_expected_scores_mistakes(fitted) -> None:
    with pytest.raises(InputError, match="no tokens"):
        fitted.expected_scores([[]])
    with pytest.raises(InputError, match="level: must be between 0 and 1, got 90"):
        fitted.expected_scores([[{"w": "a"}]], level=90)


@pytest.mark.parametrize("coverage", [0.6, 0.8, 0.95])
def test_sets_hold_what_was_asked_for(fitted, held_out, coverage: float) -> None:
    """On new sequences of the same kind, up to the chance of 60 calibration and 120 new ones."""
    X, y = held_out
    tokens, spans, whole = (
        fitted.predict_sets(X, coverage, of=k) for k in ("tokens", "spans", "labellings")
    )
    in_tokens = [
        np.mean([v in s for v, s in zip(*both, strict=True)]) for both in zip(y, tokens, strict=True)
    ]
    in_spans = []
    for labels, found in zip(y, spans, strict=True):
        chunks = metrics.chunks(labels)
        in_spans.append(np.mean([c in {s[:3] for s in found} for c in chunks]) if chunks else 1.0)
    in_whole = [v in [s.labels for s in found] for v, found in zip(y, whole, strict=True)]
    for held in (in_tokens, in_spans, in_whole):
        assert np.mean(held) > coverage - 0.12
    sizes = [len(s) for found in tokens for s in found]
    assert min(sizes) >= 1
    assert max(sizes) > 1 or coverage == 0.6
    assert all(
        list(s) == sorted(s, key=lambda v: -p[v])
        for ps, t in zip(fitted.predict_marginals(X), tokens, strict=True)
        for p, s in zip(ps, t, strict=True)
    )
    assert [found[0].labels for found in whole] == [
        found[0].labels for found in fitted.predict_n_best(X, 1)
    ]


def test_more_coverage_means_larger_sets(fitted, held_out) -> None:
    for kind in ("tokens", "spans", "labellings"):
        small, large = (fitted.predict_sets(held_out[0], c, of=kind) for c in (0.7, 0.95))
        assert len([1 for x in small for s in x for _ in s]) < len([1 for x in large for s in x for _ in s])


def test_a_file_keeps_the_calibration_and_a_fit_drops_it(fitted, held_out, tmp_path: Path) -> None:
    X = held_out[0][:20]
    fitted.save(tmp_path / "model")
    again = structgp.load(tmp_path / "model")
    assert again.predict_sets(X, of="spans") == fitted.predict_sets(X, of="spans")
    again.n_draws = 8
    changed = "n_draws is 8, and was 16 in calibration"
    with pytest.raises(InputError, match=f"{changed}; calibrate again"):
        again.predict_sets(X)
    again.set_params(class_weight="balanced")
    with pytest.raises(InputError, match=f"{changed} and class_weight is not what it was"):
        again.predict_sets(X)
    again.set_params(n_draws=fitted.n_draws)
    with pytest.raises(InputError, match="predict_sets: class_weight is not what it was in calibration"):
        again.predict_sets(X)
    again.set_params(class_weight=None)
    assert again.predict_sets(X, of="spans") == fitted.predict_sets(X, of="spans")
    again.fit(*sequences(5, 3))
    with pytest.raises(InputError, match="not calibrated; calibrate it with labelled"):
        again.predict_sets(X)


def test_draws_of_a_calibration_under_auto(held_out) -> None:
    X = held_out[0][:5]
    tagger = StructuredGPClassifier().fit(*sequences(30, 0)).calibrate(*sequences(60, 1), of="tokens")
    found = tagger.predict_sets(X)
    tagger.set_params(n_draws=128)
    with pytest.raises(InputError, match=r"n_draws is 128, and was 'auto' \(128 draws\) in calibration"):
        tagger.predict_sets(X)
    assert tagger.set_params(n_draws="auto").predict_sets(X) == found


def test_auto_makes_no_difference_to_a_model_that_always_draws(held_out) -> None:
    X, y = sequences(30, 0)
    tagger = StructuredGPClassifier(structure=chain() + same("w"), prior=Prior(data_weight=1)).fit(X, y)
    tagger.calibrate(*sequences(60, 1), of="tokens")
    found = tagger.predict_sets(held_out[0][:5])
    tagger.model_.calibration.settings["local"] = True  # as files have it that are older
    assert tagger.predict_sets(held_out[0][:5]) == found
    assert tagger.set_params(n_draws=LINKED_DRAWS).predict_sets(held_out[0][:5]) == found


def test_calibration_for_one_kind_alone(fitted) -> None:
    other = StructuredGPClassifier(n_draws=16)
    other.model_, other.classes_ = fitted.model_, fitted.classes_
    other.calibrate(*sequences(20, 1), of="tokens")
    assert other.predict_sets([[{"w": "a"}], []])[1] == []
    with pytest.raises(InputError, match="of: not calibrated for 'spans'"):
        other.predict_sets([[{"w": "a"}]], of="spans")
    with pytest.raises(InputError, match="of: 'words' is not known"):
        other.calibrate(*sequences(20, 1), of="words")
    with pytest.raises(InputError, match="no tokens to calibrate with"):
        other.calibrate([[]], [[]])


def test_deferred_where_an_error_is_more_probable_than_asking_costs(fitted, held_out) -> None:
    X = held_out[0]
    labels, marginals = fitted.predict(X), fitted.predict_marginals(X)
    found = fitted.predict(X, defer=0.2)
    for guess, left, ps in zip(labels, found, marginals, strict=True):
        assert left == [v if 1 - p[v] <= 0.2 + 1e-12 else None for v, p in zip(guess, ps, strict=True)]
    n_left = [sum(v is None for y in fitted.predict(X, defer=d) for v in y) for d in (0, 0.05, 0.3, 1)]
    assert n_left == sorted(n_left, reverse=True)
    assert n_left[0] > n_left[1] > n_left[2] > n_left[3] == 0
    for wrong in (-0.1, np.nan, True, "often"):
        with pytest.raises(InputError, match="defer: must be 0 or more"):
            fitted.predict(X, defer=wrong)


def test_deferring_costs_least_of_all_choices(fitted, held_out) -> None:
    """Expected cost token by token: an error costs 1, asking ``defer``."""
    X, defer = held_out[0], 0.3
    found, labels, marginals = (
        fitted.predict(X, defer=defer),
        fitted.predict(X),
        fitted.predict_marginals(X),
    )
    for left, guess, ps in zip(found, labels, marginals, strict=True):
        for v, label, p in zip(left, guess, ps, strict=True):
            assert (defer if v is None else 1 - p[v]) == pytest.approx(min(defer, 1 - p[label]))


def test_costs_of_your_own_count_when_labels_are_deferred(fitted, held_out) -> None:
    X, model = held_out[0][:20], copy.copy(fitted)
    costs = {"B-X": {"O": 5.0}}
    model.set_params(decode="cost", costs=costs)
    labels, marginals = model.predict(X), model.predict_marginals(X)
    n_more = 0
    for guess, left, ps in zip(labels, model.predict(X, defer=0.4), marginals, strict=True):
        for label, kept, p in zip(guess, left, ps, strict=True):
            cost = sum(p[true] * (costs.get(true, {}).get(label, 1.0)) for true in p if true != label)
            assert (kept is None) == (cost > 0.4)
            n_more += 1 - p[label] <= 0.4 < cost
    assert n_more > 0


def test_no_span_is_right_where_none_is_predicted(fitted, held_out) -> None:
    model = copy.copy(fitted).set_params(decode="cost", costs={v: {"B-X": 1e6} for v in CLASSES})
    model.model_ = replace(model.model_, info=model.model_.info | {"error_ratio": [0.5, 0.1]})
    assert not any(label != "O" for y in model.predict(held_out[0]) for label in y)
    found = model.expected_scores(held_out[0])
    assert found.recall.high == found.f1.high == found.precision.high == 0


def test_what_partial_fit_keeps(fitted) -> None:
    X, y = sequences(30, 0)
    model = StructuredGPClassifier(n_draws=4).fit(X, y)
    model.model_ = replace(model.model_, info=model.model_.info | {"error_ratio": [0.5, 0.1]})
    quartiles = model.model_.info["length_quartiles"]
    model.partial_fit([X[0] * 20], [y[0] * 20], remember=False)
    assert model.model_.info["length_quartiles"] == quartiles
    assert model.model_.info["error_ratio"] == [0.5, 0.1]


def test_calibrating_for_nothing_or_for_a_generator(fitted, held_out) -> None:
    X, y = held_out
    with pytest.raises(InputError, match="of: nothing to calibrate for"):
        copy.copy(fitted).calibrate(X, y, of=[])
    model = copy.copy(fitted).calibrate(X, y, of=(kind for kind in ["tokens"]))
    assert list(model.model_.calibration.targets) == ["tokens"]
    unseen = copy.copy(fitted).calibrate(X, [["NEW"] * len(labels) for labels in y], of="tokens")
    with pytest.raises(InputError, match="calibrate with labels that training saw"):
        unseen.predict_sets(X, coverage=0.5)
