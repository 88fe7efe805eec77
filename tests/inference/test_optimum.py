"""Where every optimiser ends: the known optimum of a Gaussian likelihood, and the chain's bound."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from structgp.inference import Adam, Natural, Problem, SecondOrder
from structgp.inference.estimators import Pathwise, Surrogate
from structgp.paper import LbfgsBlocks, Saga

PACE: dict[str, Any] = {
    "mean_step": None,
    "covariance_step": None,
    "node_steps": None,
    "transition_steps": None,
}

# -- a quadratic likelihood: GP regression ---------------------------------------------------------

EXACT: dict[str, tuple[Any, float]] = {
    "natural": (Natural(rate=1.0, tolerance=0.0, reductions=1, learn_scales=False), 1e-7),
    "natural, half steps": (
        Natural(tolerance=0.0, window=10, reductions=1, max_steps=40, learn_scales=False),
        1e-4,
    ),
    "blocks": (LbfgsBlocks(learn_scales=False, objective_tolerance=1e-9, parameter_tolerance=0.0), 2e-3),
    "saga": (Saga(**PACE, tolerance=1e-7, max_steps=2500), 5e-3),
    "adam": (Adam(learn_scales=False, tolerance=1e-4, reductions=4, max_steps=800), 0.02),
}
"""Optimiser, and how far the means it ends at may be from the optimum."""


@pytest.mark.parametrize("name", EXACT)
def test_regression_has_one_answer(name: str, cases: ModuleType) -> None:
    """A likelihood that bends by 1/4, as much as a softmax can, with exact moments: what is left between an
    optimiser and the optimum is the optimiser's own."""
    optimizer, tolerance = EXACT[name]
    problem = cases.make_problem(
        cases.Regression(2, noise=4.0), n_labels=2, n_inducing=99, batch_tokens=1, estimator=cases.Exact()
    )
    assert len(problem.batches) == 4
    cases.finish(optimizer, problem)
    exact = cases.exact_regression(problem)
    means, covariances = cases.at_tokens(problem)
    np.testing.assert_allclose(means, exact.mean, rtol=0, atol=tolerance)
    q = problem.posterior
    np.testing.assert_allclose(
        q["next"].constant_scores()[0], exact.transition_mean, rtol=0, atol=tolerance
    )
    start = 0
    for covariance in covariances:
        T = covariance.shape[-1]
        expected = exact.covariance[start : start + T, start : start + T]
        for block in covariance:
            np.testing.assert_allclose(block, expected, rtol=0, atol=10 * tolerance)
        start += T
    sd = q["next"].constant_scores()[1].detach()
    np.testing.assert_allclose(sd, exact.transition_sd, rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize(
    ("name", "covariance"), [("natural", "full"), ("blocks", "diagonal"), ("saga", "full")]
)
def test_a_full_table_of_regression(name: str, covariance: str, cases: ModuleType) -> None:
    """The transition scores of this likelihood are independent: a full q(g) must find that out."""
    optimizer, tolerance = EXACT[name]
    problem = cases.make_problem(
        cases.Regression(2, noise=4.0),
        n_labels=2,
        n_inducing=99,
        batch_tokens=1,
        estimator=cases.Exact(),
        covariance=covariance,
        full_table=True,
    )
    cases.disturb(problem.posterior)
    problem.posterior.node.log_amplitude.data.zero_()
    cases.finish(optimizer, problem)
    exact = cases.exact_regression(problem)
    q = problem.posterior
    means, _ = cases.at_tokens(problem)
    np.testing.assert_allclose(means, exact.mean, rtol=0, atol=tolerance)
    np.testing.assert_allclose(
        q["next"].constant_scores()[0], exact.transition_mean, rtol=0, atol=tolerance
    )
    expected = exact.transition_sd**2 * np.eye(4)
    found = q["next"].gaussian(None)[1].detach()
    np.testing.assert_allclose(found, expected, rtol=0, atol=10 * tolerance)


# -- the chain: as high as second-order inference ------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "diagonal": {"covariance": "diagonal"},
    "full table": {"full_table": True},
    "no transitions": {"transition_sd": 0.0},
}

CLIMBERS: dict[str, tuple[Any, Any, bool]] = {
    "natural": (Natural(learn_scales=False), Pathwise(n_draws=32), False),
    "natural, values only": (
        Natural(learn_scales=False),
        Surrogate("surrogate", "composite", uses_memory=True, n_draws=256),
        True,
    ),
    "blocks": (LbfgsBlocks(learn_scales=False, max_iterations=4), Pathwise(n_draws=128), False),
    "saga": (Saga(**PACE, tolerance=0.004, max_steps=800), Pathwise(n_draws=16), False),
    "adam": (Adam(learn_scales=False, max_steps=600), Pathwise(n_draws=8), False),
}
"""Optimiser, estimator, and whether the likelihood hides its gradient."""


@pytest.fixture(scope="module")
def best(cases: ModuleType) -> Callable[[str], tuple[float, float]]:
    """The bound before the fit, and after second-order inference on many draws; with a full table that of a
    diagonal one, which is as far as it goes."""
    found: dict[str, tuple[float, float]] = {}

    def get(option: str) -> tuple[float, float]:
        if option not in found:
            options = {} if option == "full table" else OPTIONS[option]
            problem = cases.make_problem(**options)
            before = cases.many_draw_bound(problem, 5000)
            optimizer = SecondOrder(512, tolerance=1e-5, learn_scales=False)
            cases.finish(optimizer, problem)
            found[option] = before, cases.many_draw_bound(problem, 5000)
        return found[option]

    return get


TRIED = [
    *((name, "plain") for name in CLIMBERS),
    *(("natural", option) for option in OPTIONS if option != "plain"),
    ("blocks", "full table"),
    ("adam", "no transitions"),
]


@pytest.mark.parametrize(("name", "option"), TRIED)
def test_the_chains_bound(
    name: str, option: str, cases: ModuleType, best: Callable[[str], tuple[float, float]]
) -> None:
    optimizer, estimator, opaque = CLIMBERS[name]
    one_by_one = getattr(optimizer, "one_sequence_a_batch", False)
    problem: Problem = cases.make_problem(
        cases.Opaque() if opaque else None,
        estimator=estimator,
        batch_tokens=1 if one_by_one else 1000,
        **OPTIONS[option],
    )
    assert problem.structure.has_gradient != opaque
    before, reference = best(option)
    assert reference > before + 0.5
    cases.finish(optimizer, problem)
    reached = cases.many_draw_bound(problem, 5000)
    assert reached > reference - 0.12
    # A full q(g) may be better; within one family nothing is, but for the draws.
    assert reached < reference + (0.3 if option == "full table" else 0.03)
