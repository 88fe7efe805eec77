"""Mixtures: never below the one component they come from, and above it where there is more to say."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from structgp.gp import Mixture
from structgp.inference import Adam, Natural, Problem, SecondOrder
from structgp.inference.estimators import Pathwise
from structgp.paper import MixtureFit
from structgp.paper import mixture_fit as module
from structgp.paper.mixture_fit import _judge
from structgp.structures import Structure

FORMS: list[dict[str, Any]] = [{}, {"covariance": "diagonal", "full_table": True}, {"transition_sd": 0.0}]
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: ", ".join(form) or "plain")


def first(form: dict[str, Any]) -> Any:
    full = form.get("full_table", False)
    return Natural(learn_scales=False) if full else SecondOrder(learn_scales=False)


@every_form
@pytest.mark.parametrize("K", [3])
def test_equal_copies_have_the_bound_of_one(K: int, form: dict[str, Any], cases: ModuleType) -> None:
    """Exactly: the expectations here are no estimates, and the entropy knows equal components."""

    def problem(n_components: int) -> Problem:
        made: Problem = cases.make_problem(
            cases.Regression(3), estimator=cases.Exact(), n_components=n_components, **form
        )
        return made

    one, many = problem(1), problem(K)
    cases.disturb(one.posterior)
    many.posterior.node.copy_from(one.posterior.node)
    many.posterior["next"].load_state_dict(one.posterior["next"].state_dict())
    bounds = [float(p.bound(0, torch.Generator()).elbo.detach()) for p in (one, many)]
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-9)
    assert many.posterior.mixing.tolist() == pytest.approx([1 / K] * K)


@pytest.mark.parametrize(("seed", "form"), list(enumerate(FORMS)))
def test_never_below_one_component(seed: int, form: dict[str, Any], cases: ModuleType) -> None:
    """On the draws that both are judged by; here Adam does what it can."""
    problem = cases.make_problem(n_components=2, **form)
    optimizer = MixtureFit(first(form), then=Adam(0.01, max_steps=40, learn_scales=False))
    state = optimizer.start(problem, torch.Generator().manual_seed(seed))
    info = None
    while info is None or not info.finished:
        state, info = optimizer.step(problem, state)
    assert _judge(problem, state.seed) >= state.one_elbo


@every_form
def test_a_mixture_that_loses_goes_back(form: dict[str, Any], cases: ModuleType) -> None:
    """Steps far too long: what is left is the copies, number by number."""
    problem = cases.make_problem(n_components=2, **form)
    optimizer = MixtureFit(first(form), then=Adam(3.0, max_steps=5, learn_scales="transitions"))
    state = optimizer.start(problem, torch.Generator().manual_seed(1))
    moved = cases.numbers(problem.posterior)
    assert not torch.equal(moved["node.m"][0], moved["node.m"][1])
    info = None
    while info is None or not info.finished:
        state, info = optimizer.step(problem, state)
    for name, value in problem.posterior.state_dict().items():
        assert torch.equal(value, state.one[name]), name
    assert torch.equal(problem.posterior.node.m[0], problem.posterior.node.m[1])


def test_going_back_takes_the_kernel_along(cases: ModuleType) -> None:
    problem = cases.make_problem(n_components=2)
    optimizer = MixtureFit(SecondOrder(), then=Adam(3.0, max_steps=5, learn_scales="all"))
    cases.finish(optimizer, problem)
    scratch = Problem(problem.posterior, problem.structure, problem.batches, problem.estimator)
    assert cases.many_draw_bound(problem, 100) == cases.many_draw_bound(scratch, 100)


def test_the_first_component_is_fitted_as_if_alone(cases: ModuleType) -> None:
    alone, problem = cases.make_problem(), cases.make_problem(n_components=2)
    for made in (alone, problem):
        with torch.no_grad():
            made.posterior.node.log_amplitude.fill_(0.4)
    cases.finish(SecondOrder(), alone)
    state = MixtureFit(SecondOrder()).start(problem, torch.Generator().manual_seed(1))
    expected = alone.posterior.state_dict()
    for name, value in state.one.items():
        if name.endswith((".m", ".factor")) and name.startswith("node."):
            assert all(torch.equal(part, expected[name]) for part in value), name
        elif "weight_logits" not in name:
            assert torch.equal(value, expected[name]), name


class TwoModes(Structure):
    """The first label's latent values are near 2 on average, or near -2, a little less likely."""

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        values = f[..., 0]
        count = mask.sum(-1)
        mean = torch.where(mask, values, 0).sum(-1) / count
        modes = torch.stack([0.3 - 2 * (mean - 2).square(), -2 * (mean + 2).square()])
        return torch.logsumexp(modes, 0) + 0 * g.sum((-1, -2))[:, None]


def two_modes(cases: ModuleType, n_components: int) -> Problem:
    """One token, and so two modes in all."""
    problem: Problem = cases.make_problem(
        TwoModes(),
        n_labels=2,
        n_sequences=1,
        mean_length=1,
        n_inducing=1,
        n_components=n_components,
        transition_sd=0.0,
        estimator=Pathwise(n_draws=32),
    )
    return problem


def test_two_modes_are_worth_two_components(cases: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One component sits on the likelier mode and misses log(1 + exp(-0.3)); two have one each."""

    def far_apart(self: Mixture, generator: torch.Generator, by: float) -> None:
        with torch.no_grad():
            self.m[1].neg_()

    monkeypatch.setattr(Mixture, "separate", far_apart)
    one, both = two_modes(cases, 1), two_modes(cases, 2)
    cases.finish(Natural(learn_scales=False), one)
    optimizer = MixtureFit(Natural(learn_scales=False), then=Adam(0.05, max_steps=400, learn_scales=False))
    cases.finish(optimizer, both, seed=5)
    q = both.posterior
    gain = cases.many_draw_bound(both) - cases.many_draw_bound(one)
    assert 0.4 < gain < 0.65
    with torch.no_grad():
        ends = q.node.m[:, 0, 0] * q.node.m[0, 0, 0].sign()
    assert ends[0] > 0 > ends[1]
    assert q.mixing.min() > 0.25


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_moved_apart_by_posterior_standard_deviations(covariance: str, cases: ModuleType) -> None:
    problem = cases.make_problem(n_components=2, covariance=covariance, n_labels=3, n_inducing=6)
    with torch.no_grad():
        problem.posterior.node.factor *= 0.2
    before = problem.posterior.node.m.detach().clone()
    problem.posterior.node.separate(torch.Generator().manual_seed(0), 0.5)
    away = (problem.posterior.node.m.detach() - before).flatten()
    assert float(away.std()) == pytest.approx(0.5 * 0.2, rel=0.4)


def test_evaluations_of_both_stages_are_counted(cases: ModuleType) -> None:
    structure = cases.Counted()
    problem = cases.make_problem(structure, n_components=2)
    optimizer = MixtureFit(SecondOrder(), then=Adam(0.01, max_steps=6))
    steps = cases.finish(optimizer, problem)
    assert sum(step.evaluations for step in steps) == structure.evaluated
    n, draws = problem.n_sequences, problem.estimator.n_draws
    assert [step.evaluations for step in steps[1:-1]] == [2 * n * draws] * 4
    judged = module.JUDGE_DRAWS * 2 * n
    assert steps[-1].evaluations == 2 * n * draws + judged
    alone = sum(s.evaluations for s in cases.finish(SecondOrder(), cases.make_problem()))
    assert steps[0].evaluations == alone + 2 * n * draws + judged


def test_its_name_has_both(cases: ModuleType) -> None:
    assert MixtureFit(SecondOrder()).name == "second-order, then adam"
