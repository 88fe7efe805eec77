"""A function given to the estimator answers under itself, in every way that it can be asked."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from experiments.opaque import opaque_chain
from experiments.opaque_answers import FUNCTIONS, compare, generated

import structgp
from structgp import Custom, InputError, StructgpWarning, StructuredGPClassifier
from structgp.structures import ByValues, Chain, Structure

DRAWS = 8


@pytest.fixture(scope="module")
def data() -> tuple[list[Any], list[Any]]:
    X, y = generated(opaque_chain, 24, (2, 5), 1)
    # Labels that are spans, so that every question makes sense.
    return X, [[{"A": "B-X", "B": "I-X", "C": "O"}[v] for v in labels] for labels in y]


@pytest.fixture(scope="module")
def pair(data: Any) -> tuple[StructuredGPClassifier, StructuredGPClassifier]:
    """One fit of the chain as a function: answered by itself, and by the chain."""
    own = StructuredGPClassifier(structure=opaque_chain, n_draws=DRAWS).fit(*data)
    model, chain = own.model_, StructuredGPClassifier(n_draws=DRAWS)
    chain.model_ = structgp.answers.ask.Model(
        model.encoder, model.labels, model.posterior, info=model.info, n_draws=DRAWS
    )
    return own, chain


def numbers(found: Any) -> np.ndarray:
    return np.concatenate([np.array([list(p.values()) for p in x]) for x in found])


QUESTIONS: dict[str, Any] = {
    "marginals": lambda m, X, known: numbers(m.predict_marginals(X, known)),
    "transitions": lambda m, X, known: np.concatenate(m.predict_transition_marginals(X, known)),
    "labels": lambda m, X, known: m.predict(X, known),
    "n best": lambda m, X, known: [
        (list(y), round(p, 8)) for found in m.predict_n_best(X, 3, known) for y, p in found
    ],
    "spans": lambda m, X, known: np.array(sorted(s[3] for x in m.predict_spans(X, 0.05, known) for s in x)),
    "token uncertainty": lambda m, X, known: np.concatenate(m.predict_uncertainty(X, known=known).model),
    "data's part": lambda m, X, known: m.predict_uncertainty(X, "sequences", known).data,
    "one span": lambda m, X, known: np.array(
        [
            m.span_probability(X[0], 0, 2, *given, known=None if known is None else known[0])
            for given in (("X", "exact"), (None, "bounds"), (None, "covers"))
        ]
    ),
}


@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_function_that_is_the_chain_answers_as_the_chain(
    question: str, partly: bool, pair: Any, data: Any
) -> None:
    X, y = data[0][:6], data[1][:6]
    known = [[v if t == 1 else None for t, v in enumerate(labels)] for labels in y] if partly else None
    own, chain = (QUESTIONS[question](model, X, known) for model in pair)
    if isinstance(own, np.ndarray):
        np.testing.assert_allclose(own, chain, atol=1e-8)
    else:
        assert own == chain


def test_samples_scores_sets_and_weights(pair: Any, data: Any) -> None:
    own, chain = pair
    X, y = data
    assert [len(s) for s in own.sample_labellings(X[:2], 5)] == [5, 5]
    scores, wanted = own.expected_scores(X), chain.expected_scores(X)
    assert scores.error.mean == pytest.approx(wanted.error.mean, abs=0.02)
    assert scores.f1.mean == pytest.approx(wanted.f1.mean, abs=0.03)
    partly = [[None, *labels[1:]] for labels in y]
    np.testing.assert_allclose(own.sequence_log_probs(X, y), chain.sequence_log_probs(X, y), atol=1e-8)
    np.testing.assert_allclose(
        own.sequence_log_probs(X, partly), chain.sequence_log_probs(X, partly), atol=1e-8
    )
    assert own.evaluate(X, y).token_nll == pytest.approx(chain.evaluate(X, y).token_nll)
    assert len(own.calibrate(X[12:], y[12:]).predict_sets(X[:3], 0.6, of="spans")) == 3
    heavy = {"B-X": 4.0}
    both = [numbers(m.set_params(class_weight=heavy).predict_marginals(X)) for m in pair]
    np.testing.assert_allclose(*both, atol=1e-8)
    assert np.abs(both[0] - numbers(own.set_params(class_weight=None).predict_marginals(X))).max() > 0.05
    chain.set_params(class_weight=None)


def test_long_sequences_within_their_error(pair: Any, data: Any) -> None:
    own, chain = pair
    X = [x for x, _ in zip(generated(opaque_chain, 3, (12, 14), 9)[0], range(3), strict=True)]
    error = np.concatenate(own.monte_carlo_error(X))
    off = numbers(own.predict_marginals(X)) - numbers(chain.predict_marginals(X))
    assert 0.001 < error.max() < 0.02
    assert np.abs(off / error.clip(1e-4)).max() < 4.5
    assert np.mean((off / error.clip(1e-4)) ** 2) < 2
    assert (np.concatenate(own.monte_carlo_error(data[0])) == 0).all()
    assert (np.concatenate(chain.monte_carlo_error(X)) == 0).all()


def test_what_is_refused_and_by_whom(pair: Any, data: Any) -> None:
    own, _ = pair
    with pytest.raises(InputError, match="opaque_chain offers no neighbours; use 'chain'"):
        structgp.explain(own, data[0][0], 0)
    anything = {"allowed": [(a, b) for a in own.classes_ for b in own.classes_]}
    with pytest.raises(InputError, match=r"opaque_chain does not know them; use .*predict_with='chain'"):
        StructuredGPClassifier(structure=opaque_chain, constraints=anything).fit(*data)
    plan = own.training_log_["plan"]
    assert plan["constraints"]["value"] is None
    assert "is not cross-validated: compare it with Prior(data_weight=1)" in plan["data_weight"]["reason"]
    assert plan["answers"]["value"] == "enumeration"
    by_chain = Custom(opaque_chain, predict_with="chain")
    fitted = StructuredGPClassifier(structure=by_chain, n_draws=DRAWS).fit(*data)
    assert fitted.training_log_["plan"]["answers"] == {"value": "chain", "reason": "asked for"}
    assert type(fitted.model_.structure) is Chain


class OnlyValues(Structure):
    """A structure without marginals."""

    def log_prob(self, f: Any, g: Any, y: Any, mask: Any) -> Any:
        chosen = f.log_softmax(-1).gather(-1, y.expand(len(f), -1, -1)[..., None])[..., 0]
        return (chosen * mask).sum(-1) + 0 * g.sum((1, 2))[:, None]


def test_a_structure_with_values_alone(data: Any, tmp_path: Any) -> None:
    model = StructuredGPClassifier(structure=OnlyValues(), n_draws=0).fit(*data)
    assert isinstance(model.model_.structure, ByValues)
    x = data[0][0]
    alone = [model.predict_marginals_single([token])[0] for token in x]
    np.testing.assert_allclose(numbers([model.predict_marginals_single(x)]), numbers([alone]), atol=1e-8)
    model.save(tmp_path / "model")
    again = structgp.load(tmp_path / "model", structure=OnlyValues())
    assert again.predict_marginals(data[0]) == model.predict_marginals(data[0])


def test_a_function_that_is_no_distribution_is_told_at_the_fit(data: Any) -> None:
    def doubled(f: Any, g: Any, y: Any) -> Any:
        return opaque_chain(np.asarray(f), np.asarray(g), np.asarray(y)) + math.log(2)

    with pytest.warns(StructgpWarning, match="likelihood doubled: its probabilities sum to 2 over all"):
        model = StructuredGPClassifier(structure=doubled, n_draws=DRAWS).fit(*data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        total = model.predict_n_best(data[0][:1], 3 ** len(data[0][0]))[0]
    assert sum(p for _, p in total) == pytest.approx(1)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "chain"])
def test_functions_that_are_no_chain_predict_better_under_themselves(name: str) -> None:
    found = compare(name, 5, 0, n_train=30, n_test=20, n_draws=DRAWS)
    assert found["own"]["NLL"] < found["chain"]["NLL"] - 0.005
    assert found["own"]["MC error"] == 0
