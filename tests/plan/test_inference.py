"""Which optimiser and which estimator a likelihood gets, and that every name of either fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from experiments.methods.sgd import SGD
from torch import Tensor

from structgp.errors import InputError
from structgp.inference import Adam, Minibatch, Natural, Problem, SecondOrder
from structgp.inference.estimators import Pathwise
from structgp.inference.loop import History, train
from structgp.paper import LbfgsBlocks, MixtureFit, Saga
from structgp.plan.choices import learns_on_bound, optimizer_of
from structgp.plan.gradient_choice import gradient_of
from structgp.plan.options import (
    ESTIMATORS,
    GRADIENTS,
    INFERENCE,
    NAMED,
    PRESETS,
    Inducing,
    Mixture,
    Options,
)
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


@dataclass(frozen=True)
class Chosen:
    optimizer: Any
    estimator: Any
    reason: str


def chosen(inference: Any, likelihood: str | Structure, family: Any = None) -> Chosen:
    structure = LIKELIHOODS[likelihood]() if isinstance(likelihood, str) else likelihood
    family = family or Inducing()
    options = Options(inference=inference, posterior=family)
    found = optimizer_of(options, structure, family, learns_on_bound(options, structure, ()))
    return Chosen(
        found.value, gradient_of(getattr(found.value, "first", found.value), structure).value, found.reason
    )


# -- 'auto' ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "optimizer", "estimator", "reason"),
    [
        ("chain", SecondOrder(), ESTIMATORS["pathwise"], "the structure gives its curvature"),
        ("piecewise", SecondOrder(), ESTIMATORS["pathwise"], "the structure gives its curvature"),
        ("torch", Natural(), Pathwise(n_draws=32), "pathwise gradients"),
        ("numpy", Natural(), ESTIMATORS["surrogate"].with_draws(256), "gradients from values alone"),
    ],
)
def test_auto_follows_the_structure(likelihood: str, optimizer: Any, estimator: Any, reason: str) -> None:
    choice = chosen("auto", likelihood)
    assert choice.optimizer == optimizer
    assert choice.estimator == estimator
    assert choice.reason == reason


@pytest.mark.parametrize(("likelihood", "first"), [("chain", SecondOrder()), ("numpy", Natural())])
def test_a_mixture_starts_from_one_component(likelihood: str, first: Any) -> None:
    choice = chosen("auto", likelihood, Mixture(2))
    assert choice.optimizer == MixtureFit(first, then=Adam(0.01))
    assert choice.reason.endswith("; a mixture starts from one component")
    for same in (first.name, first):
        assert chosen(same, likelihood, Mixture(2)).optimizer == choice.optimizer
    # The others move all components at once.
    for name in ("adam", "saga", "lbfgs", *PRESETS, SGD()):
        assert not isinstance(chosen(name, likelihood, Mixture(2)).optimizer, MixtureFit)
    assert not isinstance(chosen("auto", likelihood, Mixture(1)).optimizer, MixtureFit)


def test_full_transitions_and_a_gradient_that_was_asked_for_have_no_closed_form() -> None:
    full = chosen("auto", "chain", Inducing(transition_covariance="full"))
    assert full.optimizer == Natural()
    assert full.estimator == Pathwise(n_draws=32)
    asked = chosen(Natural(gradient="sobol"), "chain")
    assert asked.estimator == ESTIMATORS["sobol"]


@pytest.mark.parametrize("inference", [name for name in INFERENCE if name not in ("auto", *PRESETS)])
def test_open_scales_are_settled(inference: str) -> None:
    found = chosen(inference, "chain").optimizer.learn_scales
    assert found == ("all" if inference in ("second-order", "minibatch") else "transitions")
    for scales in (False, "transitions", True):
        given = replace(NAMED[inference], learn_scales=scales)
        assert chosen(given, "chain").optimizer.learn_scales == scales


@pytest.mark.parametrize("scales", [False, "transitions", True])
def test_scales_of_both_stages_of_a_mixture(scales: Any) -> None:
    mixed = chosen(SecondOrder(learn_scales=scales), "chain", Mixture(2)).optimizer
    assert mixed.first.learn_scales == scales
    assert mixed.then.learn_scales == scales


# -- names, objects, draws -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("second-order", SecondOrder, {}),
        ("natural", Natural, {}),
        ("adam", Adam, {}),
        ("saga", Saga, {"covariance_step": None, "transition_steps": None}),
        ("lbfgs", LbfgsBlocks, {}),
        ("paper-batch", LbfgsBlocks, {"node_steps": 50, "transition_steps": 10, "hyper_steps": 5}),
        (
            "paper-stochastic",
            Saga,
            {"mean_step": 1e-4, "covariance_step": 1e-5, "node_steps": 3000, "transition_steps": 1000},
        ),
    ],
)
def test_names(name: str, kind: type, settings: dict[str, Any]) -> None:
    choice = chosen(name, "chain")
    assert type(choice.optimizer) is kind
    if name != "lbfgs":
        assert choice.optimizer.name == name
    assert choice.reason.startswith("asked for")
    for field, value in settings.items():
        assert getattr(choice.optimizer, field) == value


def test_an_optimiser_is_taken_as_it_is() -> None:
    given = Adam(max_steps=7, learn_scales=True)
    choice = chosen(given, "numpy")
    assert choice.optimizer is given
    assert choice.reason == "asked for"
    assert choice.estimator == ESTIMATORS["surrogate"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (SecondOrder(n_draws=0), "SecondOrder(n_draws=0)"),
        (SecondOrder(tolerance=-1.0), "SecondOrder(tolerance=-1.0)"),
        (Minibatch(steps=0), "Minibatch(steps=0)"),
        (Minibatch(max_passes=-1), "Minibatch(max_passes=-1)"),
        (Adam(learning_rate=float("nan")), "Adam(learning_rate=nan)"),
        (Natural(n_draws=0), "Natural(n_draws=0)"),
    ],
)
def test_numbers_that_no_optimiser_can_use(given: Any, named: str) -> None:
    with pytest.raises(InputError) as error:
        Options(inference=given)
    assert (error.value.place, error.value.problem) == ("inference", named)


@pytest.mark.parametrize(
    "given", [SecondOrder(tolerance=0.0, learning_rounds=0), LbfgsBlocks(transition_steps=0, hyper_steps=0)]
)
def test_zero_may_be_a_choice(given: Any) -> None:
    Options(inference=given)
    assert chosen(given, "chain").optimizer is given


def test_names_of_fields_that_are_not_known() -> None:
    with pytest.raises(InputError, match=r"^gradient: 'steepest' is not known; use one of auto, pa"):
        Options(inference=Natural(gradient="steepest"))
    with pytest.raises(InputError, match=r"^learn_scales: 'pairwise' is not known; use one of auto"):
        Options(inference=Adam(learn_scales="pairwise"))  # type: ignore[arg-type]


@pytest.mark.parametrize("gradient", ESTIMATORS)
def test_gradients_by_name(gradient: str) -> None:
    assert chosen(Adam(gradient=gradient), "chain").estimator == ESTIMATORS[gradient]
    few = chosen(Adam(gradient=gradient, n_draws=12), "chain").estimator
    assert few == ESTIMATORS[gradient].with_draws(12)


def test_draws() -> None:
    def draws(inference: Any, likelihood: str = "torch", family: Any = None) -> int:
        return int(chosen(inference, likelihood, family).estimator.n_draws)

    assert draws("natural") == draws("lbfgs") == draws("auto") == 32
    assert draws("auto", family=Mixture(2)) == 32
    assert draws("adam") == draws("saga") == draws(Adam()) == ESTIMATORS["pathwise"].n_draws
    assert draws("natural", "numpy") == 256
    for optimizer in NAMED.values():
        assert draws(replace(optimizer, n_draws=10)) == 10


def test_presets_are_the_papers() -> None:
    assert set(PRESETS) == {"paper-batch", "paper-stochastic"}
    batch, stochastic = PRESETS["paper-batch"], PRESETS["paper-stochastic"]
    assert (batch.optimizer.n_draws, batch.n_inducing) == (10_000, 500)
    assert (stochastic.optimizer.n_draws, stochastic.n_inducing) == (4_000, 500)
    assert (batch.learn_kernel, batch.optimizer.learn_scales) == (False, "all")
    assert (stochastic.learn_kernel, stochastic.optimizer.learn_scales) == (False, False)
    for name, preset in PRESETS.items():
        choice = chosen(name, "chain")
        draws = preset.optimizer.n_draws
        assert draws is not None
        assert choice.estimator == ESTIMATORS["control-variate"].with_draws(draws)


# -- what cannot be ----------------------------------------------------------------------------------


def test_pathwise_needs_a_gradient() -> None:
    with pytest.raises(InputError) as caught:
        chosen(Natural(gradient="pathwise"), "numpy")
    assert str(caught.value) == (
        "gradient: 'pathwise' needs a structure that can be differentiated; use gradient='auto', "
        "or write the structure in torch"
    )


@pytest.mark.parametrize("likelihood", ["torch", "numpy"])
def test_second_order_needs_the_curvature(likelihood: str, cases: ModuleType) -> None:
    choice = chosen("second-order", likelihood)
    problem = cases.make_problem(LIKELIHOODS[likelihood]())
    with pytest.raises(
        InputError, match=r"^inference: 'second-order' needs the curvature, and BlackBox offers"
    ):
        choice.optimizer.start(problem, torch.Generator())


# -- roll-call: every name fits --------------------------------------------------------------------

MOST_STEPS = {
    "auto": 15,
    "second-order": 15,
    "minibatch": 15,
    "natural": 15,
    "adam": 30,
    "saga": 30,
    "lbfgs": 1,
    "paper-batch": 1,
    "paper-stochastic": 120,
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
    before = cases.many_draw_bound(problem, 500)
    given: Any = inference
    if inference in PRESETS:
        given = replace(PRESETS[inference].optimizer, n_draws=128)
    elif inference != "auto":
        given = replace(NAMED[inference], learn_scales="transitions")
        given = replace(given, n_draws=64) if opaque else given
    if isinstance(given, LbfgsBlocks):
        given = replace(given, node_steps=4, transition_steps=2, hyper_steps=1)
    choice = chosen(given, problem.structure)
    history = fitted(problem, choice, MOST_STEPS[inference])
    assert [step.iteration for step in history.steps] == list(range(len(history.steps)))
    assert all(step.evaluations > 0 for step in history.steps)
    assert np.isfinite([step.elbo for step in history.steps]).all()
    assert history.optimizer == choice.optimizer.name
    assert history.gradient == choice.estimator.name
    gain = cases.many_draw_bound(problem, 500) - before
    assert gain > (0.1 if inference == "paper-stochastic" else 3)


@pytest.fixture(scope="module")
def best(cases: ModuleType) -> float:
    problem = cases.make_problem()
    cases.finish(SecondOrder(256, tolerance=1e-4, learn_scales=False), problem)
    return float(cases.many_draw_bound(problem, 5000))


LOOSE = {"score": 3.0, "control-variate": 0.6, "leave-one-out": 0.6, "surrogate-piecewise": 0.4}
"""Nats below the optimum that the noise of an estimator may cost on this few draws; 0.2 if not here."""


def test_auto_without_gradients_is_the_surrogate(cases: ModuleType) -> None:
    auto, named = (
        chosen(Natural(gradient=g, learn_scales=False), cases.Opaque()) for g in ("auto", "surrogate")
    )
    assert auto.estimator == named.estimator


@pytest.mark.parametrize("gradient", ESTIMATORS)
def test_every_gradient_fits(gradient: str, cases: ModuleType, best: float) -> None:
    opaque = not gradient.startswith("pathwise")
    problem = cases.make_problem(cases.Opaque() if opaque else Chain())
    choice = chosen(Natural(gradient=gradient, learn_scales=False), problem.structure)
    assert choice.estimator.name == gradient
    fitted(problem, choice, 45)
    assert cases.many_draw_bound(problem, 5000) > best - LOOSE.get(gradient, 0.2)
