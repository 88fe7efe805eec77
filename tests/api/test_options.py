"""Option objects: nested names as in scikit-learn, frozen defaults, files."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.generate import Generated, generate
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

import structgp
from structgp import Inducing, Mixture, Prior, SecondOrder, StructuredGPClassifier, Weights


@pytest.fixture(scope="module")
def data() -> Generated:
    return generate(12, n_labels=3, mean_length=4, n_templates=2, n_values=5, strength=2.0, seed=0)


def test_defaults_are_kept_as_they_are() -> None:
    """What scikit-learn's check of defaults asks for, but for the types that it allows."""
    signature = inspect.signature(StructuredGPClassifier.__init__)
    estimator = StructuredGPClassifier()
    given = {n: p.default for n, p in signature.parameters.items() if n != "self"}
    assert all(getattr(estimator, name) is value for name, value in given.items())
    assert all(value.__hash__ is not None for value in given.values())
    assert vars(estimator).keys() == given.keys()


def test_nested_names() -> None:
    estimator = StructuredGPClassifier(posterior=Inducing(7), inference=SecondOrder(tolerance=0.5))
    deep = estimator.get_params()
    assert deep["prior__transition_sd"] == 1.5
    assert deep["posterior__n_inducing"] == 7
    assert deep["inference__tolerance"] == 0.5
    assert not any("__" in name for name in estimator.get_params(deep=False))
    assert not any(n.startswith("posterior__") for n in StructuredGPClassifier().get_params())


def test_a_nested_name_replaces_the_option_object() -> None:
    usual, estimator = Prior(), StructuredGPClassifier()
    shared = estimator.prior
    estimator.set_params(prior__transition_sd=0.5, prior__amplitude=2.0, n_draws=4)
    assert estimator.prior == Prior(amplitude=2.0, transition_sd=0.5)
    assert estimator.n_draws == 4
    assert shared == usual
    assert StructuredGPClassifier().prior == usual
    estimator.set_params(posterior=Mixture(3), posterior__entropy="jensen")
    assert estimator.posterior == Mixture(3, "jensen")
    with pytest.raises(dataclasses.FrozenInstanceError):
        estimator.prior.transition_sd = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("name", ["prior__sd", "posterior__n_inducing", "kernel__scale", "nothing__at_all"])
def test_nested_names_that_are_not_there(name: str) -> None:
    with pytest.raises(ValueError, match=f"Invalid parameter '{name}'"):
        StructuredGPClassifier().set_params(**{name: 1})


def test_clone() -> None:
    estimator = StructuredGPClassifier(prior=Prior(2.0, 0.5), posterior=Weights("label"))
    assert clone(estimator).get_params() == estimator.get_params()


def test_grid_search(data: Generated) -> None:
    grid = {"prior__transition_sd": [0.0, 1.5], "inference__max_rounds": [20]}
    model = StructuredGPClassifier(n_draws=4, inference=SecondOrder())
    search = GridSearchCV(model, grid, cv=2, error_score="raise").fit(data.X, data.y)
    assert search.best_params_.keys() == grid.keys()
    assert len(set(search.cv_results_["mean_test_score"])) == 2
    sd = search.best_estimator_.prior.transition_sd
    assert (sd > 0) == (not search.best_estimator_.model_.posterior["next"].is_silent)
    assert model.prior == Prior()


def test_a_file_keeps_option_objects(data: Generated, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "prior": Prior(amplitude=np.float64(2.0)),
        "posterior": Inducing(6, "diagonal"),
        "inference": SecondOrder(n_draws=8, max_rounds=30),
    }
    model = StructuredGPClassifier(n_draws=4, **given).fit(data.X, data.y)
    model.save(tmp_path / "model")
    loaded = structgp.load(tmp_path / "model")
    assert {name: getattr(loaded, name) for name in given} == given
    assert loaded.predict(data.X) == model.predict(data.X)


def test_lazy_names() -> None:
    for name in ("Prior", "Weights", "Inducing", "Mixture", "Custom", "SecondOrder", "Minibatch"):
        assert getattr(structgp, name).__name__ == name
        assert name in structgp.__all__
    for name in ("Natural", "Adam"):
        assert callable(getattr(structgp, name)().step)
