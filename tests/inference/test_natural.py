"""Natural gradients: exact on a quadratic, careful with noise, and clear about what they cannot fit."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel

from structgp.errors import InputError
from structgp.gp import Inducing, Posterior
from structgp.gp.block import LEAST_PRECISION
from structgp.inference import Natural, Problem, SecondOrder
from structgp.inference.estimators import Estimate, Pathwise, Surrogate
from structgp.inference.latents import Sites
from structgp.inference.natural import _split, amplitude_slope, set_posterior
from structgp.structures import Chain


def begin(optimizer: Natural, problem: Problem) -> Any:
    return optimizer.start(problem, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("batch_tokens", "covariance", "full"), [(1, "full", True), (1000, "diagonal", False)]
)
def test_one_whole_step_on_a_quadratic(
    batch_tokens: int, covariance: str, full: bool, cases: ModuleType
) -> None:
    """From anywhere, at any amplitude; and there it stays."""
    problem = cases.make_problem(
        cases.Regression(2),
        n_labels=2,
        estimator=cases.Exact(),
        batch_tokens=batch_tokens,
        covariance=covariance,
        full_table=full,
    )
    cases.disturb(problem.posterior)
    q = problem.posterior
    optimizer = Natural(rate=1.0, learn_scales=False)
    state = begin(optimizer, problem)
    state, _ = optimizer.step(problem, state)
    kept = [
        (0.5 * q.node.log_amplitude.detach()).exp() * problem.conditional(i)[0].projection[b.mask]
        for i, b in enumerate(problem.batches)
    ]
    A = torch.cat(kept).numpy()
    targets = torch.cat([problem.structure.table[b.y[b.mask]] for b in problem.batches]).numpy()
    precision = np.eye(A.shape[1]) + A.T @ A / cases.LABEL_NOISE
    mean = np.linalg.solve(precision, A.T @ targets / cases.LABEL_NOISE)
    np.testing.assert_allclose(q.node.m.detach().T, mean, rtol=0, atol=1e-6)
    factor = q.node.factor.detach().numpy()
    for j in range(2):
        if covariance == "diagonal":
            np.testing.assert_allclose(factor[j] ** -2, np.diag(precision), rtol=1e-5)
        else:
            found = np.linalg.inv(factor[j] @ factor[j].T)
            np.testing.assert_allclose(found, precision, rtol=0, atol=1e-4)
    exact = cases.exact_regression(problem)
    np.testing.assert_allclose(q["next"].constant_scores()[0], exact.transition_mean, rtol=0, atol=1e-7)
    variance = q["next"].constant_scores()[1].detach() ** 2
    np.testing.assert_allclose(variance, exact.transition_sd**2, rtol=1e-7)
    before = cases.numbers(q)
    optimizer.step(problem, state)
    for name, value in cases.numbers(q).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_a_step_is_part_of_the_way(rate: float, cases: ModuleType) -> None:
    """In natural parameters: from the prior, the precision gets its share of the data's."""
    problem = cases.make_problem(cases.Regression(2), n_labels=2, estimator=cases.Exact())
    q = problem.posterior
    optimizer = Natural(rate=rate, learn_scales=False)
    optimizer.step(problem, begin(optimizer, problem))
    A = problem.conditional(0)[0].projection[problem.batches[0].mask]
    lower = q.node.factor[0].detach()
    precision = torch.linalg.inv(lower @ lower.T)
    expected = torch.eye(len(precision), dtype=torch.float64) + rate * A.T @ A / cases.LABEL_NOISE
    torch.testing.assert_close(precision, expected, rtol=0, atol=1e-5)


def test_the_bound_reported_is_of_the_posterior_before_the_step(cases: ModuleType) -> None:
    problem = cases.make_problem(cases.Regression(2), n_labels=2, estimator=cases.Exact())
    cases.disturb(problem.posterior)
    expected = float(problem.bound(0, torch.Generator()).elbo.detach())
    optimizer = Natural(learn_scales=False)
    _, info = optimizer.step(problem, begin(optimizer, problem))
    assert info.elbo == pytest.approx(expected, rel=1e-9)


# -- noise that would leave no posterior ---------------------------------------------------------


class Bent(Pathwise):
    """Pathwise estimates with ``bend`` (in whitened coordinates) added to what they bend by."""

    bends: tuple[Any, ...] = (0.0, 0.0)

    def __call__(self, target: Any, generator: Any, memory: Any = None) -> Estimate:
        found = super().__call__(target, generator, memory)
        mask = target.groups[0].mask
        eye = torch.eye(mask.shape[1], dtype=torch.float64) * mask[:, None, None]
        node, table = found.moments.bends
        bends = node + self.bends[0] * eye, table + self.bends[1]
        return replace(found, moments=replace(found.moments, bends=bends))


def bent(node: float = 0.0, table: Any = 0.0) -> Bent:
    estimator = Bent(n_draws=8)
    object.__setattr__(estimator, "bends", (node, table))
    return estimator


@pytest.mark.parametrize("bend", [8.0, 1e7])
@pytest.mark.parametrize("noise", ["node", "table", "full table"])
def test_noise_that_bends_up_still_leaves_a_posterior(bend: float, noise: str, cases: ModuleType) -> None:
    full = noise == "full table"
    estimator = bent(bend) if noise == "node" else bent(table=bend * (torch.eye(9) if full else 1))
    problem = cases.make_problem(estimator=estimator, full_table=full)
    q = problem.posterior
    optimizer = Natural(learn_scales=False)
    state, info = optimizer.step(problem, begin(optimizer, problem))
    assert np.isfinite(info.elbo)
    assert torch.isfinite(q.node.m).all()
    lower = q.node.factor.detach().tril()
    assert torch.linalg.eigvalsh(lower @ lower.mT).max() <= 1 / LEAST_PRECISION + 1e-9
    prior = q["next"].prior_sd ** 2
    assert q["next"].constant_scores()[1].max() ** 2 <= prior / LEAST_PRECISION + 1e-9
    # What is held is what the posterior is of: going nowhere from there changes nothing.
    before = cases.numbers(q)
    with torch.no_grad():
        assert set_posterior(problem, state.sites)
    for name, value in cases.numbers(q).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=1e-9)


def test_what_bends_up_is_split_off_without_changing_a_gradient(cases: ModuleType) -> None:
    problem = cases.make_problem(estimator=bent(8.0))
    cases.disturb(problem.posterior)
    with torch.no_grad():
        latent = problem.latents(0)
        found = problem.estimate(0, latent, torch.Generator().manual_seed(0))
        site = Sites.of(latent, latent.sensitivity(found.moments))
        down, up = _split(site, latent)
        whole = site.sensitivity(latent)
        both, near = down.plus(up, 1.0), {"atol": 1e-6, "rtol": 1e-6}
        torch.testing.assert_close(down.sensitivity(latent).mean, whole.mean, **near)
        torch.testing.assert_close(both.precision, site.precision, **near)
        torch.testing.assert_close(both.linear, site.linear, **near)
        factor = latent.parts[0].factor
        for part, sign in ((down, 1), (up, -1)):
            values = torch.linalg.eigvalsh(factor.mT @ part.precision[0] @ factor)
            assert (sign * values).min() > -1e-6
            assert (sign * part.precision[1]).min() >= 0


class Contrary(Pathwise):
    """Pathwise estimates that point the wrong way."""

    sign = -1.0

    def __call__(self, target: Any, generator: Any, memory: Any = None) -> Estimate:
        found = super().__call__(target, generator, memory)
        slopes = 10 * self.sign * found.moments.slopes[0], *found.moments.slopes[1:]
        moments = replace(found.moments, slopes=slopes)
        return replace(found, moments=moments)


def test_a_step_that_made_it_worse_is_taken_back(cases: ModuleType) -> None:
    problem = cases.make_problem(cases.Regression(2), n_labels=2, estimator=Contrary(n_draws=32))
    start = cases.many_draw_bound(problem, 2000)
    found = problem.estimate(0, problem.latents(0), torch.Generator().manual_seed(1))
    spread = float(found.variance.value.sum()) ** 0.5
    optimizer = Natural(learn_scales=False)
    state = begin(optimizer, problem)
    infos = []
    while not infos or not infos[-1].finished:
        state, info = optimizer.step(problem, state)
        infos.append(info)
    # Even the shortest step makes it worse: it ends about where it began, and says so.
    assert len(infos) < 60
    assert not infos[-1].converged
    assert state.trust < 0.01
    assert cases.many_draw_bound(problem, 2000) > start - 25 * spread


def test_a_refusal_moves_nothing(cases: ModuleType) -> None:
    problem = cases.make_problem()
    optimizer = Natural(learn_scales=False)
    state = begin(optimizer, problem)
    state, _ = optimizer.step(problem, state)
    (site,) = state.sites
    before = cases.numbers(problem.posterior)
    with torch.no_grad():
        node, table = site.precision
        for wild in ((-100 - node.abs(), table), (node, torch.full_like(table, -1e3))):
            assert not set_posterior(problem, [replace(site, precision=wild)])
        for name, value in cases.numbers(problem.posterior).items():
            assert torch.equal(value, before[name]), name
        assert set_posterior(problem, [site])


def test_a_likelihood_that_is_not_concave(cases: ModuleType) -> None:
    """It bends the wrong way almost everywhere, and the posterior ends wider than the prior."""

    class Spread(Chain):
        def log_prob(self, f: Any, g: Any, y: Any, mask: Any) -> Any:
            size = torch.where(mask[..., None], f, 0).square().sum((-1, -2))
            return 0.5 * torch.log1p(size) - 0.1 * g.square().sum((-1, -2))[:, None]

    problem = cases.make_problem(Spread(), estimator=Pathwise(n_draws=32))
    before = cases.many_draw_bound(problem, 2000)
    steps = cases.finish(Natural(learn_scales=False), problem)
    assert steps[-1].converged
    assert cases.many_draw_bound(problem, 2000) > before + 0.1


# -- schedule, scales, refusals ------------------------------------------------------------------


def test_steps_are_averaged_once_the_bound_rises_slowly(cases: ModuleType) -> None:
    problem = cases.make_problem(cases.Regression(2), n_labels=2, estimator=cases.Exact())
    optimizer = Natural(window=2, reductions=3, tolerance=0.01, learn_scales=False)
    state = begin(optimizer, problem)
    rates, info = [state.rate], None
    while info is None or not info.finished:
        state, info = optimizer.step(problem, state)
        rates.append(state.rate)
    assert info.converged
    first = rates.count(0.5)
    assert first >= 2, "full steps at the start"
    np.testing.assert_allclose(1 / np.array(rates[first - 1 :]), 2 + np.arange(len(rates) - first + 1))
    assert rates[-1] <= 0.5 * 0.5**2


def test_averaging_makes_the_quadratics_the_mean_of_all_estimates_since(cases: ModuleType) -> None:
    """Sites that move by 1 / 2, 1 / 3, ... of the way are a running mean: all estimates weigh the same."""
    optimizer, held, seen = Natural(rate=0.5), 0.0, []
    problem = cases.make_problem(cases.Regression(2), n_labels=2, estimator=cases.Exact())
    state = begin(optimizer, problem)
    state.averaged = 0
    for value in (4.0, -2.0, 7.0, 1.0):
        held += state.rate * (value - held)
        seen.append(value)
        optimizer._is_settled(problem, state)
    assert held == pytest.approx(sum(seen) / 5)  # and one of zero, where it began


def test_estimators_from_values_take_half_their_draws_before_averaging(cases: ModuleType) -> None:
    problem = cases.make_problem(estimator=Surrogate("surrogate-quadratic", None, True, n_draws=512))
    optimizer = Natural(learn_scales=False)
    state = begin(optimizer, problem)
    state, few = optimizer.step(problem, state)
    state.averaged = 0
    state, all_ = optimizer.step(problem, state)
    assert (few.evaluations, all_.evaluations) == (256 * problem.n_sequences, 512 * problem.n_sequences)


def test_the_limit_is_flagged(cases: ModuleType) -> None:
    steps = cases.finish(Natural(max_steps=3), cases.make_problem())
    assert len(steps) == 3
    assert not steps[-1].converged


def test_sites_are_the_memory_of_the_surrogate(cases: ModuleType) -> None:
    """After the first step the estimator is told what is known already, and needs fewer draws."""
    told: list[bool] = []

    class Watched(Surrogate):
        def __call__(self, target: Any, generator: Any, memory: Any = None) -> Estimate:
            told.append(memory is not None)
            return super().__call__(target, generator, memory)

    estimator = Watched("surrogate", "composite", True, 64)
    problem = cases.make_problem(cases.Opaque(), estimator=estimator, batch_tokens=9)
    optimizer = Natural(learn_scales=False)
    state = begin(optimizer, problem)
    for _ in range(2):
        state, _ = optimizer.step(problem, state)
    assert told == [False, False, True, True]
    assert problem.memory == {}


def test_mixtures_are_refused(cases: ModuleType) -> None:
    with pytest.raises(
        InputError, match=r"^inference: 'natural' fits one Gaussian .*; use inference='adam' for a"
    ):
        begin(Natural(), cases.make_problem(n_components=2))


def test_the_kernel_is_refused(cases: ModuleType) -> None:
    with pytest.raises(InputError, match=r"^learn_scales: 'natural' inference cannot move the kernel"):
        begin(Natural(learn_scales="all"), cases.make_problem())


def test_amplitudes_go_where_second_order_takes_them(cases: ModuleType) -> None:
    """From a kernel too large by far. The amplitude of nodes has a prior of its own here, and none
    there."""

    def start(**kwargs: Any) -> Problem:
        problem: Problem = cases.make_problem(n_sequences=12, mean_length=5, **kwargs)
        problem.posterior.node.kernel.outputscale = cases.AMPLITUDE * 3
        problem.refresh()
        return problem

    second, natural = start(), start(estimator=Pathwise(n_draws=32))
    options = {"tolerance": 1e-4, "learning_tolerance": 0.0, "learning_rounds": 15}
    cases.finish(SecondOrder(64, learn_scales=True, max_rounds=20, **options), second)
    cases.finish(Natural(tolerance=0.005, learn_scales=True), natural)
    expected, found = (p.posterior.node.log_amplitude.item() for p in (second, natural))
    assert abs(expected) > 0.4
    assert found == pytest.approx(expected, abs=0.3)
    assert cases.many_draw_bound(natural, 4000) > cases.many_draw_bound(second, 4000) - 0.3
    expected, found = (p.posterior["next"].log_amplitude.item() for p in (second, natural))
    assert found == pytest.approx(expected, abs=0.2)


@pytest.mark.parametrize("amplitude", [-1.0, 0.5])
def test_the_slope_in_the_amplitude(amplitude: float, cases: ModuleType) -> None:
    """Against differences of an exact bound."""
    problem = cases.make_problem(cases.Regression(2), n_labels=2, estimator=cases.Exact())
    cases.disturb(problem.posterior)
    node, ends = problem.posterior.node, []
    with torch.no_grad():
        for away in (1e-5, -1e-5, 0.0):
            node.log_amplitude.fill_(amplitude + away)
            ends.append(float(problem.bound(0, torch.Generator()).elbo))
        latent = problem.latents(0)
        found = problem.estimate(0, latent, torch.Generator())
        slope = amplitude_slope(latent, latent.sensitivity(found.moments)).sum()
    assert float(slope) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5)


def test_transitions_at_inducing_inputs(cases: ModuleType) -> None:
    """Transitions with features under any kernel: the exact answer of GP regression in one whole step."""
    problem = cases.make_problem(
        cases.RegressionOfTransitions(2), n_labels=2, n_sequences=6, estimator=cases.Exact()
    )
    (batch,) = problem.batches
    rng = np.random.default_rng(1)
    batch = replace(batch, edges=torch.from_numpy(rng.normal(size=(*batch.masks[1].shape, 1))))
    rows = batch.edges[batch.masks[1]]
    after = Inducing(RBFKernel().double().requires_grad_(False), rows, (2, 2))
    q = Posterior({"node": problem.posterior.node, "next": after})
    problem = replace(problem, posterior=q, batches=[batch])
    optimizer = Natural(rate=1.0, learn_scales=False)
    optimizer.step(problem, begin(optimizer, problem))
    aims = problem.structure.aims[batch.y[:, :-1], batch.y[:, 1:]][batch.masks[1]].flatten(1)
    K = torch.exp(-0.5 * (rows - rows.T).square() / float(after.kernel.lengthscale) ** 2)
    noisy = K + cases.LABEL_NOISE * torch.eye(len(K))
    with torch.no_grad():
        mean, covariance = after.gaussian(problem.conditional(0)[1])
    expected = K @ torch.linalg.solve(noisy, aims)
    torch.testing.assert_close(mean[0][batch.masks[1]], expected, rtol=0, atol=1e-4)
    exact = (K - K @ torch.linalg.solve(noisy, K)).diagonal()
    found = covariance[0].diagonal(dim1=-1, dim2=-2).mT[batch.masks[1]]
    torch.testing.assert_close(found, exact[:, None].expand_as(found), rtol=0, atol=1e-4)
