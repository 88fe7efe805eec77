"""Fits to the labels of several annotators, and what is asked of them."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.generate import generate

import structgp
from structgp import (
    Annotations,
    InputError,
    Prior,
    StructuredGPClassifier,
    chain,
    describe,
    layers,
    same,
    segments,
    who_to_ask,
)
from structgp.data.annotations import majority
from structgp.inference.checkpoint import Checkpoint

SKILLS = {"good": 0.95, "fair": 0.8, "poor": 0.6, "random": None}
V = 3


class Crowd:
    """Generated sequences, and what four annotators said of them. share : of sequences that each saw."""

    def __init__(self, n: int, seed: int = 0, share: float = 0.8) -> None:
        data = generate(n, n_labels=V, n_values=5, n_templates=2, mean_length=6, strength=2.5, seed=seed)
        self.X, self.y, rng = data.X, data.y, np.random.default_rng(seed)
        self.classes = sorted({label for labels in data.y for label in labels})
        self.given: list[dict[str, list[str]]] = []
        for y in data.y:
            said = {
                name: self._say(y, right, rng) for name, right in SKILLS.items() if rng.random() < share
            }
            self.given.append(said or {"good": list(y)})
        self.annotations = Annotations(self.given)

    def _say(self, y: list[str], right: float | None, rng: np.random.Generator) -> list[str]:
        if right is None:
            return rng.choice(self.classes, size=len(y)).tolist()
        other = [[c for c in self.classes if c != v] for v in y]
        return [v if rng.random() < right else str(rng.choice(o)) for v, o in zip(y, other, strict=True)]

    def right(self, name: str) -> float:
        """Share of an annotator's labels that are right."""
        told = [(said[name], y) for said, y in zip(self.given, self.y, strict=True) if name in said]
        return float(np.mean([a == b for labels, y in told for a, b in zip(labels, y, strict=True)]))


@pytest.fixture(scope="module")
def crowd() -> Crowd:
    return Crowd(80)


@pytest.fixture(scope="module")
def fitted(crowd: Crowd) -> StructuredGPClassifier:
    return StructuredGPClassifier(n_draws=16).fit(crowd.X, crowd.annotations)


@pytest.fixture(scope="module")
def small() -> Crowd:
    return Crowd(10, seed=1)


def error(model: StructuredGPClassifier, crowd: Crowd, known: Any = None) -> float:
    return structgp.metrics.token_error(crowd.y, model.predict(crowd.X, known))


# -- what is learned -----------------------------------------------------------------------------------


def test_reliabilities_are_found(crowd: Crowd, fitted: StructuredGPClassifier) -> None:
    for name in SKILLS:
        mean, low, high = fitted.annotators_[name]
        assert mean == pytest.approx(crowd.right(name), abs=0.05)
        assert low < mean < high
    wide = fitted.annotators_.reliability("good", level=0.99)
    assert wide.low < fitted.annotators_["good"].low


def test_the_truth_is_closer_than_any_vote(crowd: Crowd, fitted: StructuredGPClassifier) -> None:
    vote = majority(crowd.given, [len(y) for y in crowd.y])
    told = error(fitted, crowd, crowd.annotations)
    assert told < structgp.metrics.token_error(crowd.y, vote) - 0.02  # type: ignore[arg-type]
    assert told < error(fitted, crowd)


def test_the_bound_rises_and_the_fit_says_that_it_has_converged(fitted: StructuredGPClassifier) -> None:
    log = fitted.training_log_
    assert log["stopped"] == "converged"
    assert log["trace"][-1][1] > log["trace"][0][1]
    assert log["fresh_elbo"] == pytest.approx(log["elbo"], rel=0.05)
    assert log["plan"]["annotators"]["value"] == "4, one confusion matrix for each"


def test_one_annotator_who_is_always_right_is_like_labels(small: Crowd) -> None:
    plain = StructuredGPClassifier(n_draws=16).fit(small.X, small.y)
    told = StructuredGPClassifier(n_draws=16).fit(small.X, Annotations.of({"me": small.y}))
    p, q = (
        np.array([[*t.values()] for x in m.predict_marginals(small.X) for t in x]) for m in (plain, told)
    )
    assert np.abs(p - q).mean() < 0.1
    assert told.annotators_["me"].mean > 0.8


def test_errors_that_come_in_runs() -> None:
    """An annotator who repeats the label before half of the time: who knows that is not misled."""
    crowd, rng = Crowd(60, seed=3), np.random.default_rng(0)
    given = []
    for y in crowd.y:
        said = list(y)
        for t in range(1, len(y)):
            said[t] = said[t - 1] if rng.random() < 0.5 else y[t]
        given.append({"runs": said})
    known = {}
    for sequential in (False, True):
        some = Annotations(given, sequential=sequential)
        model = StructuredGPClassifier(n_draws=16).fit(crowd.X, some)
        known[sequential] = error(model, crowd, some)
    assert known[True] < known[False] - 0.02


@pytest.mark.held_out
def test_the_weight_of_the_data_is_chosen_by_what_annotators_said(small: Crowd) -> None:
    model = StructuredGPClassifier(n_draws=16).fit(small.X, small.annotations)
    assert model.held_out_ is not None
    assert 0 < model.held_out_["token_nll"] < 3
    assert model.training_log_["plan"]["data_weight"]["value"] > 0


# -- what is kept, told and asked ----------------------------------------------------------------------


def test_a_file_keeps_what_is_known_of_annotators(
    tmp_path: Path, crowd: Crowd, fitted: StructuredGPClassifier
) -> None:
    fitted.save(tmp_path / "m.sgp")
    read = structgp.load(tmp_path / "m.sgp")
    assert dict(read.annotators_) == dict(fitted.annotators_)
    some = crowd.X[:3], crowd.annotations[:3]
    assert read.predict_marginals(*some) == fitted.predict_marginals(*some)
    np.testing.assert_array_equal(read.annotators_.agreement, fitted.annotators_.agreement)


def test_a_table_of_annotators(fitted: StructuredGPClassifier) -> None:
    told = str(describe(fitted))
    assert "annotators\n  annotator" in told
    names = [line.split()[0] for line in fitted.annotators_.lines()[1:]]
    assert names == ["good", "fair", "poor", "random"]
    confusion = fitted.annotators_.confusion("fair")
    np.testing.assert_allclose(confusion.sum(-1), 1)


def test_agreement_is_counted(crowd: Crowd, fitted: StructuredGPClassifier) -> None:
    both = [(said["good"], said["fair"]) for said in crowd.given if {"good", "fair"} <= set(said)]
    same_label = [a == b for one, other in both for a, b in zip(one, other, strict=True)]
    places = fitted.annotators_.names.index("good"), fitted.annotators_.names.index("fair")
    assert fitted.annotators_.agreement[places] == pytest.approx(np.mean(same_label))
    assert fitted.annotators_.common[places] == len(same_label)


def test_who_to_ask(crowd: Crowd, fitted: StructuredGPClassifier) -> None:
    asked = who_to_ask(fitted, crowd.X, 5)
    assert [ask.annotator for ask in asked] == ["good"] * 5
    assert [ask.gain for ask in asked] == sorted((ask.gain for ask in asked), reverse=True)
    again = who_to_ask(fitted, crowd.X, 80, annotations=crowd.annotations)
    assert all(ask.annotator not in crowd.given[ask.sequence] for ask in again)
    dear = who_to_ask(fitted, crowd.X, 5, costs={"good": 100})
    assert "good" not in {ask.annotator for ask in dear}
    p = np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    gain = fitted.annotators_.information("good", p)
    assert gain[0] > 0.2
    assert gain[1] == pytest.approx(0, abs=1e-12)
    assert fitted.annotators_.information("random", p)[0] < 0.1


# -- any structure, any shape --------------------------------------------------------------------------


def words(X: Any) -> list[Any]:
    return [[{"word": token[0], "more": token[1]} for token in x] for x in X]


@pytest.mark.slow
@pytest.mark.parametrize("structure", [chain() + same("word"), segments()], ids=str)
def test_structures_that_sum_over_labellings(structure: Any, small: Crowd) -> None:
    X = words(small.X)
    model = StructuredGPClassifier(structure=structure, n_draws=8, prior=Prior(data_weight=1.0))
    model.fit(X, small.annotations)
    assert model.annotators_["good"].mean > model.annotators_["random"].mean + 0.2
    told = structgp.metrics.token_error(small.y, model.predict(X, small.annotations))
    assert told < 0.25


def test_layers(small: Crowd) -> None:
    X = words(small.X)
    given = [{name: {"a": y, "b": y[::-1]} for name, y in said.items()} for said in small.given]
    model = StructuredGPClassifier(structure=layers(a=chain(), b=chain()), n_draws=8)
    model.fit(X, Annotations(given))
    assert model.annotators_["good"].mean > model.annotators_["random"].mean + 0.2
    assert set(model.predict(X[:1], Annotations(given[:1]))[0]) == {"a", "b"}


def test_dense_features(small: Crowd) -> None:
    X = [np.array([[float(v[1:]) for v in token] for token in x]) for x in small.X]
    model = StructuredGPClassifier(n_draws=8).fit(X, small.annotations)
    assert model.annotators_["good"].mean > model.annotators_["random"].mean + 0.2


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"structure": "piecewise"},
            "y: labels are those of several annotators, and piecewise cannot weigh",
        ),
        ({"inference": "adam"}, "inference: the 'adam' optimiser does not learn what annotators' labels"),
    ],
)
def test_what_cannot_weigh_annotators(params: dict[str, Any], message: str, small: Crowd) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        StructuredGPClassifier(**params).fit(small.X, small.annotations)


def test_what_is_asked_in_vain(small: Crowd, fitted: StructuredGPClassifier) -> None:
    plain = StructuredGPClassifier(n_draws=4).fit(small.X, small.y)
    assert hasattr(fitted, "annotators_")
    assert not hasattr(plain, "annotators_")
    with pytest.raises(InputError, match=r"^annotators_: the model was fitted to labels that were taken"):
        _ = plain.annotators_
    with pytest.raises(InputError, match=r"^known: annotations, and the model was fitted to labels"):
        plain.predict(small.X, small.annotations)
    with pytest.raises(InputError, match=r"^partial_fit: annotations are fitted as a whole"):
        plain.partial_fit(small.X, small.annotations)
    with pytest.raises(InputError, match=r"^annotator: 'eve' is not an annotator of the training data"):
        fitted.predict(small.X[:1], Annotations([{"eve": small.y[0]}]))
    with pytest.raises(InputError, match=r"^known\[0\]\['good'\]: 'Z' is not a label"):
        fitted.predict(small.X[:1], Annotations([{"good": ["Z"] * len(small.X[0])}]))
    with pytest.raises(InputError, match=r"^known: annotations of 1 sequences for 2"):
        fitted.predict(small.X[:2], Annotations([{}]))
    with pytest.raises(InputError, match=r"^costs: must be above 0, got 0 for 'good'"):
        who_to_ask(fitted, small.X, costs={"good": 0})


# -- rules, and fits that go on ------------------------------------------------------------------------


def test_rules_are_for_the_true_labels(small: Crowd) -> None:
    a, b = small.classes[:2]
    rules = {"forbidden": [(a, b)]}
    model = StructuredGPClassifier(n_draws=8, constraints=rules).fit(small.X, small.annotations)
    found = model.predict(small.X, small.annotations)
    assert not any((s, t) == (a, b) for y in found for s, t in pairwise(y))
    said = [y for of in small.given for y in of.values()]
    assert any((s, t) == (a, b) for y in said for s, t in pairwise(y))


def test_a_killed_fit_goes_on(tmp_path: Path, small: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = StructuredGPClassifier(n_draws=8).fit(small.X, small.annotations)
    path = tmp_path / "fit.checkpoint"

    def die(info: Any) -> None:
        if info.iteration == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("structgp.plan.run.Checkpoint", partial(Checkpoint, seconds=0.0))
    with pytest.raises(KeyboardInterrupt):
        StructuredGPClassifier(n_draws=8).fit(small.X, small.annotations, checkpoint=path, callback=die)
    assert path.exists()
    again = StructuredGPClassifier(n_draws=8).fit(small.X, small.annotations, checkpoint=path)
    np.testing.assert_allclose(again.annotators_.counts, whole.annotators_.counts, atol=1e-6)
    assert not path.exists()


def test_a_warm_start(small: Crowd) -> None:
    model = StructuredGPClassifier(n_draws=8, warm_start=True).fit(small.X, small.annotations)
    model.fit(small.X, small.annotations)
    assert model.annotators_["good"].mean > model.annotators_["random"].mean + 0.2
