"""Minibatches in weight space: they end where the fit on all data at once does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.generate import generate
from structgp.inference.weight_sites import Site

from structgp import StructuredGPClassifier
from structgp.data.encode import FeatureEncoder
from structgp.data.examples import LabelEncoder
from structgp.errors import InputError
from structgp.gp import Posterior, WeightPosterior, contrasts
from structgp.gp.kernels.block_sum import build_kernel
from structgp.inference import Minibatch, Problem, SecondOrder
from structgp.inference.loop import make_batches
from structgp.inference.minibatch import MinibatchState
from structgp.structures import BlackBox, Chain, Piecewise, Structure

V = 3


def make_problem(structure: Structure | None = None, batch_tokens: int = 30) -> Problem:
    data = generate(24, n_labels=V, mean_length=4, n_templates=2, n_values=5, strength=2.0, seed=1)
    encoder = FeatureEncoder().fit(data.X)
    rows = encoder.transform(data.X)
    labels = LabelEncoder(list(data.chain.labels)).transform(data.y)
    kernel = build_kernel("relevance", encoder.blocks, torch.from_numpy(np.concatenate(rows)))
    counts = torch.from_numpy(np.bincount(np.concatenate(labels), minlength=V))
    q = WeightPosterior(kernel.requires_grad_(False), V, basis=contrasts(counts))
    batches = make_batches(rows, labels, encoder.pad_row, batch_tokens)
    return Problem(q, structure or Chain(), batches)


def finish(optimizer: Any, problem: Problem) -> tuple[Any, list[Any]]:
    state, steps = optimizer.start(problem, torch.Generator().manual_seed(0)), []
    while not steps or not steps[-1].finished:
        state, info = optimizer.step(problem, state)
        steps.append(info)
    return state, steps


def bound(problem: Problem) -> float:
    return problem.fresh_bound(4000, torch.Generator().manual_seed(5))


EXACT = Minibatch(n_draws=512, steps=30, tolerance=1e-3, learn_scales=False)


@pytest.fixture(scope="module")
def ends() -> SimpleNamespace:
    whole, parts = make_problem(batch_tokens=10_000), make_problem()
    assert (len(whole.batches), len(parts.batches)) == (1, 4)
    finish(SecondOrder(n_draws=512, tolerance=1e-4, learn_scales=False), whole)
    state, steps = finish(EXACT, parts)
    return SimpleNamespace(whole=whole, parts=parts, state=state, steps=steps)


def test_the_optimum_is_that_of_all_data_at_once(ends: SimpleNamespace) -> None:
    assert ends.steps[-1].converged
    assert bound(ends.parts) == pytest.approx(bound(ends.whole), abs=0.15)
    p, q = ends.parts.posterior, ends.whole.posterior
    assert float((p.m - q.m).detach().abs().max()) < 0.1
    assert float((p.factor - q.factor).detach().abs().max()) < 0.05
    assert float((p.pair_mean - q.pair_mean).detach().abs().max()) < 0.1


def test_the_posterior_is_the_prior_times_the_sites(ends: SimpleNamespace) -> None:
    state: MinibatchState = ends.state
    precision, linear = torch.zeros_like(state.precision), torch.zeros_like(state.linear)
    sites = [state.sites[i].at(state.scale) for i in range(len(ends.parts.batches))]
    for i, site in enumerate(sites):
        index = ends.parts.weights(i).compact[0]
        precision[index] += site.precision
        linear[index] += site.linear
    torch.testing.assert_close(precision, state.precision)
    torch.testing.assert_close(linear, state.linear)
    q = ends.parts.posterior
    prior = q.prior_factor().square()[:, None]
    total = 1 / prior + precision
    torch.testing.assert_close(q.m[0].T * prior.sqrt(), linear / total)
    torch.testing.assert_close((q.factor[0].T * prior.sqrt()).square(), 1 / total)
    pairs = sum(site.pair_precision for site in sites)
    sd = (q.pairwise_sd**-2 + pairs).rsqrt()
    torch.testing.assert_close(q.pair_log_sd.exp().detach(), sd)


def test_every_step_visits_one_batch_and_counts_it(ends: SimpleNamespace) -> None:
    assert len(ends.steps) % 4 == 0
    for step in ends.steps:
        assert step.evaluations % 512 == 0
        assert np.isfinite(step.elbo)
    assert ends.steps[-1].elbo == pytest.approx(bound(ends.parts), abs=1.5)


def test_the_kernel_is_learned_and_the_bound_rises() -> None:
    fixed, learned = make_problem(), make_problem()
    finish(Minibatch(learn_scales="pairwise"), fixed)
    state, _ = finish(Minibatch(), learned)
    assert state.learned == 5
    assert bool((learned.posterior.kernel.log_scale != 0).any())
    assert bound(learned) > bound(fixed) + 1


def test_single_precision_is_enough_for_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded, exact = make_problem(), make_problem()
    optimizer = Minibatch(max_passes=8, tolerance=0)
    _, steps = finish(optimizer, rounded)
    monkeypatch.setattr(Site, "rounded", lambda self: self)
    _, others = finish(optimizer, exact)
    assert steps[-1].elbo != others[-1].elbo
    assert steps[-1].elbo == pytest.approx(others[-1].elbo, abs=1e-4)


def test_a_visit_touches_the_weights_of_its_batch_alone() -> None:
    """And the running divergence is the one that is computed anew."""
    problem = make_problem()
    optimizer = Minibatch(learn_scales=False, batch_tokens=30)
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    optimizer.step(problem, state)
    q = problem.posterior
    for _ in range(2):
        i, before = state.order[-1], q.snapshot()
        optimizer.step(problem, state)
        free = torch.ones(q.n_inducing, dtype=torch.bool)
        free[problem.weights(i).compact[0]] = False
        assert 0 < int(free.sum()) < q.n_inducing
        for name in ("m", "factor"):
            now = getattr(q, name).detach()
            assert torch.equal(now[..., free], before[name][..., free])
            assert not torch.equal(now, before[name])
        assert state.divergence == pytest.approx(float(q.kl_inducing().detach()), rel=1e-9)


def test_other_structures_that_know_their_curvature() -> None:
    problem = make_problem(Piecewise())
    before = bound(problem)
    finish(Minibatch(), problem)
    assert bound(problem) > before + 20


def test_a_limit_of_passes() -> None:
    _, steps = finish(Minibatch(max_passes=2, tolerance=0), make_problem())
    assert len(steps) == 8
    assert not steps[-1].converged


def test_what_it_cannot_fit() -> None:
    kernel = build_kernel(
        "relevance", FeatureEncoder().fit([[["a"]]]).blocks, torch.zeros(1, 1).double()
    )
    problem = Problem(Posterior(kernel, torch.zeros(1, 1).double(), 2), Chain(), [])
    with pytest.raises(InputError, match="'minibatch' fits weights"):
        Minibatch().start(problem, torch.Generator())
    problem = make_problem(BlackBox(lambda f, g, y: f.sum((1, 2))))
    with pytest.raises(InputError, match="needs the curvature, and BlackBox offers none"):
        Minibatch().start(problem, torch.Generator())


# -- through the classifier --------------------------------------------------------------------------


def data() -> tuple[list[Any], list[list[str]]]:
    found = generate(20, n_labels=3, mean_length=5, n_templates=2, n_values=6, strength=2.0, seed=2)
    return list(found.X), found.y


def test_by_name() -> None:
    X, y = data()
    model = StructuredGPClassifier(inference="minibatch", n_draws=16).fit(X, y)
    log = model.training_log_
    assert (log["optimizer"], log["posterior"]) == ("minibatch", "weights")
    assert log["fresh_elbo"] == pytest.approx(log["elbo"], abs=5)
    assert model.score(X, y) > 0.6


def test_draws_are_not_ignored() -> None:
    X, y = data()
    two = [
        StructuredGPClassifier(n_draws=2, inference=Minibatch(n_draws=n, learn_scales="auto"))
        .fit(X, y, callback=lambda info: True)
        .training_log_["evaluations"]
        for n in (8, 16)
    ]
    assert two[1] > 1.5 * two[0]


def test_stopping_early_keeps_what_there_is() -> None:
    X, y = data()
    model = StructuredGPClassifier(inference=Minibatch(batch_tokens=20), n_draws=8)
    model.fit(X, y, callback=lambda info: True)
    assert model.training_log_["stopped"] == "interrupted"
    assert model.training_log_["elbo"] < -10  # batches to come are not for free
    assert np.isfinite(model.training_log_["fresh_elbo"])


def test_numbers_without_scale_do_not_end_it() -> None:
    X, y = data()
    rng = np.random.default_rng(0)
    X = [[{"w": str(t[0]), "n": 1e6 * float(rng.normal())} for t in x] for x in X]
    model = StructuredGPClassifier(inference="minibatch", n_draws=8).fit(X, y)
    for tokens in model.predict_marginals(X):
        for p in tokens:
            assert sum(p.values()) == pytest.approx(1)
