"""Which form the covariances get, by what they cost; and the estimator with the low-rank one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.generate import generate
from experiments.methods.sgd import SGD

import structgp
from structgp import Inducing, Prior, StructuredGPClassifier
from structgp.data.examples import Examples, read_examples
from structgp.inference import Adam, SecondOrder
from structgp.paper import MixtureFit, Saga
from structgp.plan.choices import MOST_BYTES, MOST_WORK
from structgp.plan.options import Options
from structgp.plan.resolve import resolve


@pytest.fixture(scope="module")
def examples() -> Examples:
    made = generate(5, n_labels=3, mean_length=4, n_templates=2, n_values=4, seed=0)
    return read_examples(made.X, made.y)


@pytest.fixture(scope="module")
def form(examples: Examples) -> Any:
    def chosen(R: int, M: int, N: int, posterior: Any = "inducing", **given: Any) -> tuple[str, int]:
        plan = resolve(Options(posterior=posterior, **given), examples).with_covariance(R, M, N)
        return plan.covariance.value, plan.rank

    return chosen


def test_the_dearest_that_is_affordable(form: Any) -> None:
    assert form(13, 1000, 20_000) == ("full", 0)
    assert form(49, 2000, 20_000) == ("low-rank", 64)
    assert form(49, 2000, 1_000_000) == ("diagonal", 0)


def test_memory_alone_and_time_alone(form: Any) -> None:
    M = 1500
    R = MOST_BYTES // (8 * M * M)
    assert form(R, M, 10) == ("full", 0)
    assert form(R + 1, M, 10) == ("low-rank", 64)
    assert form(R // 2 + 1, M, 10, structgp.Mixture(2)) == ("low-rank", 64)
    N = int(MOST_WORK / (3 * M * M)) - M
    assert form(3, M, N) == ("full", 0)
    assert form(3, M, N + 10) == ("low-rank", 64)


def test_what_the_optimiser_can_take(form: Any) -> None:
    large = 49, 2000, 20_000
    for inference in ("second-order", "adam", "lbfgs", Adam(), MixtureFit(SecondOrder())):
        assert form(*large, inference=inference) == ("low-rank", 64)
    for inference in ("saga", SGD(), Saga(), MixtureFit(Saga())):
        assert form(*large, inference=inference) == ("diagonal", 0)
    assert form(*large, inference="paper-batch") == ("full", 0)


def test_natural_gradients_go_by_memory(form: Any) -> None:
    given: dict[str, Any]
    for given in (
        {"inference": "natural"},
        {"structure": lambda f, g, y: np.full(len(f), -len(y) * np.log(f.shape[-1]))},
    ):
        assert form(13, 1000, 10**6, **given) == ("full", 0)
        assert form(49, 2000, 10**6, **given) == ("low-rank", 64)


def test_asked_for_is_asked_for(form: Any) -> None:
    assert form(99, 9000, 10**6, Inducing(covariance="full")) == ("full", 0)
    assert form(2, 9, 10, Inducing(covariance="diagonal")) == ("diagonal", 0)
    assert form(2, 9, 10, Inducing(covariance="low-rank")) == ("low-rank", 9)
    assert form(2, 9, 10, Inducing(covariance="low-rank", rank=4)) == ("low-rank", 4)


# -- the estimator ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data() -> tuple[list[np.ndarray], list[list[str]]]:
    """Dense rows: the values of two templates at random places in the plane."""
    made = generate(25, n_labels=3, mean_length=5, n_templates=2, n_values=6, strength=2.0, seed=0)
    place = np.random.default_rng(0).normal(size=(2, 6, 2))
    names = {v: k for k, v in enumerate(made.chain.values)}
    rows = [
        np.array([np.concatenate([place[p, names[v]] for p, v in enumerate(token)]) for token in x])
        for x in made.X
    ]
    return rows, made.y


def fit(data: Any, posterior: Inducing, **given: Any) -> StructuredGPClassifier:
    posterior = replace(posterior, n_inducing=20)
    return StructuredGPClassifier(n_draws=16, random_state=1, posterior=posterior, **given).fit(*data)


def test_fit_save_load(data: Any, tmp_path: Path) -> None:
    low = fit(data, Inducing(covariance="low-rank", rank=5))
    log = low.training_log_
    assert (log["covariance"], log["covariance_rank"]) == ("low-rank", 5)
    assert log["covariance_reason"] == "asked for"
    q = low.model_.posterior.node
    assert q.directions.shape == (2, 20, 5)
    assert bool(q.directions.any())
    low.save(tmp_path / "model")
    again = structgp.load(tmp_path / "model")
    for name, tensor in q.state_dict().items():
        assert torch.equal(again.model_.posterior.node.state_dict()[name], tensor), name
    assert again.predict_marginals(data[0]) == low.predict_marginals(data[0])
    assert again.get_params()["posterior__rank"] == 5


def test_bounds_of_the_three(data: Any) -> None:
    """Under one kernel: what the kernel is learned to be depends on the form."""
    same: dict[str, Any] = {
        "prior": Prior(learn_kernel=False),
        "inference": SecondOrder(learn_scales=False),
    }
    forms = [Inducing(covariance="diagonal"), Inducing(covariance="low-rank", rank=4), Inducing()]
    logs = [fit(data, form, **same).training_log_ for form in forms]
    assert [log["covariance"] for log in logs] == ["diagonal", "low-rank", "full"]
    assert logs[0]["elbo"] < logs[1]["elbo"] < logs[2]["elbo"]
    assert logs[2]["covariance_reason"].startswith("full ones take")


def test_answers_do_not_depend_on_the_batch(data: Any) -> None:
    low = fit(data, Inducing(covariance="low-rank", rank=3))
    together = low.predict_marginals(data[0])
    for i in (0, 7, 12):
        (alone,) = low.predict_marginals(data[0][i : i + 1])
        for one, other in zip(alone, together[i], strict=True):
            assert one == pytest.approx(other, abs=1e-9)


def test_low_rank_means_inducing_inputs() -> None:
    made = generate(15, n_labels=3, mean_length=4, n_templates=2, n_values=4, seed=0)
    low = StructuredGPClassifier(n_draws=4, posterior=Inducing(covariance="low-rank")).fit(made.X, made.y)
    assert low.training_log_["posterior"] == "inducing"
    weights = StructuredGPClassifier(n_draws=4).fit(made.X, made.y)
    assert (weights.training_log_["posterior"], weights.training_log_["covariance"]) == (
        "weights",
        "diagonal",
    )
    with pytest.raises(structgp.errors.InputError, match=r"^covariance: 'saga' sums gradients"):
        StructuredGPClassifier(inference="saga", posterior=Inducing(covariance="low-rank")).fit(
            made.X, made.y
        )
