"""Which optimiser and which estimator a likelihood gets, and that every name of either fits."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from structgp.errors import InputError
from structgp.inference import Adam, Minibatch, Natural, Problem, SecondOrder
from structgp.inference.estimators import Pathwise
from structgp.inference.loop import History, train
from structgp.paper import Blocks, Mixture, Stochastic
from structgp.plan.choose_optimizer import GRADIENTS, INFERENCE, PRESETS, choose
from structgp.plan.gradient_estimators import ESTIMATORS
from structgp.structures import BlackBox, Chain, Piecewise, Structure

V = 3


def torch_softmax(f: Tensor, g: Tensor, y: Tensor) -> Tensor:
    return f.log_softmax(-1)[:, torch.arange(len(y)), y].sum(-1) - 0.1 * g.square().sum((-1, -2))


def numpy_softmax(f: np.ndarray, g: np.ndarray, y: np.ndarray) -> np.ndarray:
    score = np.asarray(f) - np.logaddexp.reduce(np.asarray(f), axis=-1, keepdims=True)
    picked = score[:, np.arange(len(y)), np.asarray(y)].sum(-1)
    return picked - 0.1 * np.square(np.asarray(g)).sum((-1, -2))


LIKELIHOODS: dict[str, Callable[[], Structure]] = {
    "chain": Chain,
    "piecewise": Piecewise,
    "torch": lambda: BlackBox(torch_softmax),
    "numpy": lambda: BlackBox(numpy_softmax),
}


def chosen(
    cases: ModuleType, inference: Any, likelihood: str, posterior: Any = None, **kwargs: Any
) -> Any:
    structure = LIKELIHOODS[likelihood]()
    q = cases.make_problem(**(posterior or {})).posterior
    return choose(inference, structure, q, **kwargs)


# -- 'auto' ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "optimizer", "estimator", "reason"),
    [
        ("chain", SecondOrder(), ESTIMATORS["pathwise"], "the structure gives its curvature"),
        ("piecewise", SecondOrder(), ESTIMATORS["pathwise"], "the structure gives its curvature"),
        ("torch", Natural(), Pathwise(n_draws=32), "pathwise gradients"),
        ("numpy", Natural(), ESTIMATORS["surrogate"], "gradients from values alone"),
    ],
)
def test_auto_follows_the_likelihood(
    likelihood: str, optimizer: Any, estimator: Any, reason: str, cases: ModuleType
) -> None:
    choice = chosen(cases, "auto", likelihood)
    assert choice.optimizer == optimizer
    assert choice.estimator == estimator
    assert choice.reason == reason


@pytest.mark.parametrize(("likelihood", "first"), [("chain", SecondOrder()), ("numpy", Natural())])
def test_a_mixture_starts_from_one_component(
    likelihood: str, first: Any, cases: ModuleType
) -> None:
    choice = chosen(cases, "auto", likelihood, {"n_components": 2})
    assert choice.optimizer == Mixture(first, then=Adam(0.01))
    assert choice.reason.endswith("; a mixture starts from one component")
    named = chosen(cases, first.name, likelihood, {"n_components": 2})
    assert named.optimizer == choice.optimizer
    # The others move all components at once.
    for name in ("adam", "saga", "sgd", "lbfgs", *PRESETS):
        alone = chosen(cases, name, likelihood, {"n_components": 2}).optimizer
        assert not isinstance(alone, Mixture)


def test_full_pairs_and_a_gradient_that_was_asked_for_have_no_closed_form(
    cases: ModuleType,
) -> None:
    full = chosen(cases, "auto", "chain", {"pairwise_covariance": "full"})
    assert full.optimizer == Natural()
    assert full.estimator == Pathwise(n_draws=32)
    asked = chosen(cases, "auto", "chain", gradient="sobol")
    assert asked.optimizer == Natural()
    assert asked.estimator == ESTIMATORS["sobol"]
    assert asked.reason == "gradients from values alone"


@pytest.mark.parametrize("learn_scales", [False, "pairwise", True])
@pytest.mark.parametrize("inference", INFERENCE)
def test_scales_are_handed_on(inference: str, learn_scales: Any, cases: ModuleType) -> None:
    optimizer = chosen(cases, inference, "chain", learn_scales=learn_scales).optimizer
    assert optimizer.learn_scales == learn_scales
    mixed = chosen(cases, "auto", "chain", {"n_components": 2}, learn_scales=learn_scales)
    assert mixed.optimizer.first.learn_scales == learn_scales
    assert mixed.optimizer.then.learn_scales == learn_scales


# -- names, objects, draws -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("second-order", SecondOrder, {}),
        ("natural", Natural, {}),
        ("adam", Adam, {}),
        ("sgd", Stochastic, {"remembers": False, "mean_step": "auto", "unary_steps": None}),
        (
            "saga",
            Stochastic,
            {"remembers": True, "covariance_step": "auto", "pairwise_steps": None},
        ),
        ("lbfgs", Blocks, {}),
        ("paper-batch", Blocks, {"unary_steps": 50, "pairwise_steps": 10, "hyper_steps": 5}),
        (
            "paper-stochastic",
            Stochastic,
            {
                "remembers": True,
                "mean_step": 1e-4,
                "covariance_step": 1e-5,
                "unary_steps": 3000,
                "pairwise_steps": 1000,
            },
        ),
    ],
)
def test_names(name: str, kind: type, settings: dict[str, Any], cases: ModuleType) -> None:
    choice = chosen(cases, name, "chain")
    assert type(choice.optimizer) is kind
    if name != "lbfgs":
        assert choice.optimizer.name == name
    assert choice.reason.startswith("asked for")
    for field, value in settings.items():
        assert getattr(choice.optimizer, field) == value


def test_an_optimiser_is_taken_as_it_is(cases: ModuleType) -> None:
    given = Adam(max_steps=7, learn_scales=True)
    choice = chosen(cases, given, "numpy", learn_scales=False)
    assert choice.optimizer is given
    assert choice.reason == "given"
    assert choice.estimator == ESTIMATORS["surrogate"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (SecondOrder(n_draws=0), "SecondOrder(n_draws=0)"),
        (SecondOrder(tolerance=-1.0), "SecondOrder(tolerance=-1.0)"),
        (Minibatch(steps=0), "Minibatch(steps=0)"),
        (Minibatch(max_passes=-1), "Minibatch(max_passes=-1)"),
        (Adam(learning_rate=float("nan")), "Adam(learning_rate=nan)"),
    ],
)
def test_numbers_that_no_optimiser_can_use(given: Any, named: str, cases: ModuleType) -> None:
    with pytest.raises(InputError) as error:
        chosen(cases, given, "chain")
    assert (error.value.place, error.value.problem) == ("inference", named)


@pytest.mark.parametrize(
    "given", [SecondOrder(tolerance=0.0, learning_rounds=0), Blocks(hyper_steps=0)]
)
def test_none_may_be_a_choice(given: Any, cases: ModuleType) -> None:
    assert chosen(cases, given, "chain").optimizer is given


@pytest.mark.parametrize("gradient", ESTIMATORS)
def test_gradients_by_name(gradient: str, cases: ModuleType) -> None:
    assert chosen(cases, "adam", "chain", gradient=gradient).estimator == ESTIMATORS[gradient]
    few = chosen(cases, "adam", "chain", gradient=gradient, n_gradient_draws=12).estimator
    assert few == ESTIMATORS[gradient].with_draws(12)


def test_draws(cases: ModuleType) -> None:
    def draws(inference: Any, likelihood: str = "torch", **kwargs: Any) -> int:
        return int(chosen(cases, inference, likelihood, **kwargs).estimator.n_draws)

    assert draws("natural") == draws("lbfgs") == draws("auto") == 32
    assert draws("auto", posterior={"n_components": 2}) == 32
    assert draws("adam") == draws("saga") == draws(Adam()) == ESTIMATORS["pathwise"].n_draws
    assert draws("natural", "numpy") == ESTIMATORS["surrogate"].n_draws
    for name in INFERENCE:
        assert draws(name, n_gradient_draws=10) == 10
    # Second-order inference draws for itself.
    for name in ("auto", "second-order"):
        choice = chosen(cases, name, "chain", n_gradient_draws=10)
        assert choice.optimizer == SecondOrder(n_draws=10)


def test_presets_are_the_papers(cases: ModuleType) -> None:
    assert set(PRESETS) == {"paper-batch", "paper-stochastic"}
    batch, stochastic = PRESETS["paper-batch"], PRESETS["paper-stochastic"]
    assert (batch.n_gradient_draws, batch.n_inducing) == (10_000, 500)
    assert (stochastic.n_gradient_draws, stochastic.n_inducing) == (4_000, 500)
    assert (batch.learn_kernel, batch.learn_scales) == (False, "all")
    assert (stochastic.learn_kernel, stochastic.learn_scales) == (False, False)
    for name, preset in PRESETS.items():
        choice = chosen(cases, name, "chain")
        assert choice.estimator == ESTIMATORS["control-variate"].with_draws(preset.n_gradient_draws)
        other = chosen(cases, name, "chain", gradient="sobol", n_gradient_draws=64)
        assert other.estimator == ESTIMATORS["sobol"].with_draws(64)
        assert chosen(cases, name, "chain", gradient="pathwise").estimator.name == "pathwise"


# -- what cannot be ----------------------------------------------------------------------------------


def test_pathwise_needs_a_gradient(cases: ModuleType) -> None:
    with pytest.raises(InputError) as caught:
        chosen(cases, "auto", "numpy", gradient="pathwise")
    assert str(caught.value) == (
        "gradient: 'pathwise' needs a likelihood that can be differentiated; use gradient='auto', "
        "or write the likelihood in torch"
    )


def test_second_order_uses_no_gradient_from_values(cases: ModuleType) -> None:
    with pytest.raises(InputError, match=r"^gradient: 'second-order' does not use 'score'; use "):
        chosen(cases, "second-order", "chain", gradient="score")
    assert chosen(cases, "second-order", "chain", gradient="pathwise").optimizer == SecondOrder()


@pytest.mark.parametrize("likelihood", ["torch", "numpy"])
def test_second_order_needs_the_curvature(likelihood: str, cases: ModuleType) -> None:
    choice = chosen(cases, "second-order", likelihood)
    problem = cases.make_problem(LIKELIHOODS[likelihood]())
    with pytest.raises(
        InputError, match=r"^inference: 'second-order' needs the curvature, and BlackBox offers"
    ):
        choice.optimizer.start(problem, torch.Generator())


# -- roll-call: every name fits --------------------------------------------------------------------

MOST_STEPS = {
    "auto": 30,
    "second-order": 30,
    "minibatch": 30,
    "natural": 30,
    "adam": 100,
    "sgd": 100,
    "saga": 100,
    "lbfgs": 1,
    "paper-batch": 1,
    "paper-stochastic": 400,
}
"""Enough for the bound to rise; the paper's step sizes are small."""


def fitted(problem: Problem, choice: Any, most: int) -> History:
    return train(
        problem.posterior,
        problem.structure,
        problem.batches,
        choice.optimizer,
        choice.reason,
        estimator=choice.estimator,
        generator=torch.Generator().manual_seed(0),
        callback=lambda info: info.iteration + 1 >= most,
    )


def test_roll_call() -> None:
    assert set(MOST_STEPS) == set(INFERENCE), "an inference without a case"
    assert set(GRADIENTS) == {"auto", *ESTIMATORS}


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("inference", INFERENCE)
def test_every_inference_fits(inference: str, opaque: bool, cases: ModuleType) -> None:
    if inference == "second-order" and opaque:
        pytest.skip("needs the curvature")
    if inference == "minibatch":
        pytest.skip("in weight space, see test_minibatch.py")
    problem = cases.make_problem(cases.Opaque() if opaque else Chain(), batch_tokens=9)
    assert len(problem.batches) == 2
    before = cases.many_draw_bound(problem, 2000)
    scales = PRESETS[inference].learn_scales if inference in PRESETS else "pairwise"
    choice = choose(
        inference,
        problem.structure,
        problem.posterior,
        n_gradient_draws=128 if inference in PRESETS or opaque else None,
        learn_scales=scales,
    )
    history = fitted(problem, choice, MOST_STEPS[inference])
    assert [step.iteration for step in history.steps] == list(range(len(history.steps)))
    assert all(step.evaluations > 0 for step in history.steps)
    assert np.isfinite([step.elbo for step in history.steps]).all()
    assert history.optimizer == choice.optimizer.name
    assert history.gradient == choice.estimator.name
    gain = cases.many_draw_bound(problem, 2000) - before
    assert gain > (0.2 if inference == "paper-stochastic" else 4)


@pytest.fixture(scope="module")
def best(cases: ModuleType) -> float:
    problem = cases.make_problem()
    cases.finish(SecondOrder(256, tolerance=1e-4, learn_scales=False), problem)
    return float(cases.many_draw_bound(problem))


LOOSE = {"score": 3.0, "control-variate": 0.6, "leave-one-out": 0.6, "surrogate-piecewise": 0.4}
"""Nats below the optimum that the noise of an estimator may cost on this few draws; 0.2 if not here."""


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_every_gradient_fits(gradient: str, cases: ModuleType, best: float) -> None:
    opaque = not gradient.startswith("pathwise")
    problem = cases.make_problem(cases.Opaque() if opaque else Chain())
    choice = choose(
        "natural", problem.structure, problem.posterior, gradient=gradient, learn_scales=False
    )
    assert choice.estimator.name == {"auto": "surrogate"}.get(gradient, gradient)
    fitted(problem, choice, 60)
    assert cases.many_draw_bound(problem) > best - LOOSE.get(gradient, 0.2)
