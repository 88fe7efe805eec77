"""Minibatches in weight space: they end where the fit on all data at once does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.generate import generate

from structgp import StructuredGPClassifier
from structgp.data.encode import FeatureEncoder
from structgp.data.labels import LabelEncoder
from structgp.errors import InputError
from structgp.gp import FullTable, Inducing, Posterior, Table, Weights, contrasts
from structgp.gp.kernels import RelevanceKernel
from structgp.gp.kernels.build import build_kernel
from structgp.inference import Minibatch, Problem, SecondOrder
from structgp.inference.batch_sites import Site
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
    node = Weights(kernel.requires_grad_(False), (V,), contrasts(counts))
    q = Posterior({"node": node, "next": Table((V, V))})
    batches = make_batches(rows, labels, encoder.pad_row, batch_tokens)
    return Problem(q, structure or Chain(), batches)


def finish(optimizer: Any, problem: Problem) -> tuple[Any, list[Any]]:
    state, steps = optimizer.start(problem, torch.Generator().manual_seed(0)), []
    while not steps or not steps[-1].finished:
        state, info = optimizer.step(problem, state)
        steps.append(info)
    return state, steps


def bound(problem: Problem) -> float:
    return problem.fresh_bound(1000, torch.Generator().manual_seed(5))


EXACT = Minibatch(n_draws=256, steps=15, tolerance=5e-3, learn_scales=False)
"""Draws are new in each pass: bounds of two passes differ by a tenth of a nat or so for ever."""


@pytest.fixture(scope="module")
def ends() -> SimpleNamespace:
    whole, parts = make_problem(batch_tokens=10_000), make_problem()
    assert (len(whole.batches), len(parts.batches)) == (1, 4)
    finish(SecondOrder(n_draws=256, tolerance=1e-4, learn_scales=False), whole)
    state, steps = finish(EXACT, parts)
    return SimpleNamespace(whole=whole, parts=parts, state=state, steps=steps)


def test_the_optimum_is_that_of_all_data_at_once(ends: SimpleNamespace) -> None:
    assert ends.steps[-1].converged
    assert bound(ends.parts) == pytest.approx(bound(ends.whole), abs=0.15)
    p, q = ends.parts.posterior, ends.whole.posterior
    for ours, theirs in zip(p.blocks, q.blocks, strict=True):
        assert float((ours.m - theirs.m).detach().abs().max()) < 0.15
        assert float((ours.factor - theirs.factor).detach().abs().max()) < 0.05


def assert_prior_times_sites(problem: Problem, state: MinibatchState) -> None:
    """The sums that the state holds, and the posterior, are those of prior and sites, for every block."""
    n = len(problem.batches)
    for k, block in enumerate(problem.posterior.blocks):
        precision, linear = torch.zeros_like(state.precision[k]), torch.zeros_like(state.linear[k])
        for i in range(n):
            kept = state.sites[i]
            assert kept is not None
            index, _ = problem.conditional(i)[k].compact
            site = kept[k].at(state.scale[k])
            precision[index] += site.precision
            linear[index] += site.linear
        torch.testing.assert_close(precision, state.precision[k])
        torch.testing.assert_close(linear, state.linear[k])
        prior = block.prior_sds().detach().square()[:, None]
        total = 1 / prior + precision
        m, sd = (p.detach().reshape(block.n_functions, -1).T for p in (block.m, block.factor))
        torch.testing.assert_close(m * prior.sqrt(), linear / total)
        torch.testing.assert_close(sd.square() * prior, 1 / total)


def test_the_posterior_is_the_prior_times_the_sites(ends: SimpleNamespace) -> None:
    assert_prior_times_sites(ends.parts, ends.state)


@pytest.mark.parametrize("learn_scales", ["transitions", "all"])
def test_it_still_is_when_scales_have_moved(learn_scales: Any) -> None:
    """And the running divergence is the one that is computed anew."""
    problem = make_problem()
    state, _ = finish(Minibatch(max_passes=3, tolerance=0, learn_scales=learn_scales), problem)
    assert abs(float(problem.posterior["next"].log_amplitude.detach())) > 0.01
    assert_prior_times_sites(problem, state)
    optimizer = Minibatch(learn_scales=learn_scales)
    for _ in range(2):
        optimizer.step(problem, state)
        divergence = float(problem.posterior.divergence().detach())
        assert state.divergence == pytest.approx(divergence, rel=1e-9)


def test_every_step_visits_one_batch_and_counts_it(ends: SimpleNamespace) -> None:
    assert len(ends.steps) % 4 == 0
    for step in ends.steps:
        assert step.evaluations % 256 == 0
        assert np.isfinite(step.elbo)
    assert ends.steps[-1].elbo == pytest.approx(bound(ends.parts), abs=1.5)


def test_the_kernel_is_learned_and_the_bound_rises() -> None:
    fixed, learned = make_problem(), make_problem()
    finish(Minibatch(learn_scales="transitions"), fixed)
    state, _ = finish(Minibatch(), learned)
    assert state.learned == 5
    assert bool((learned.posterior.node.kernel.log_scale != 0).any())
    assert bound(learned) > bound(fixed) + 1


def test_single_precision_is_enough_for_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded, exact = make_problem(), make_problem()
    optimizer = Minibatch(max_passes=5, tolerance=0)
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
    q = problem.posterior.node
    for _ in range(2):
        i, before = state.order[-1], {"m": q.m.clone(), "factor": q.factor.clone()}
        optimizer.step(problem, state)
        free = torch.ones(q.n_values, dtype=torch.bool)
        free[problem.conditional(i)[0].compact[0]] = False
        assert 0 < int(free.sum()) < q.n_values
        for name, old in before.items():
            now = getattr(q, name).detach()
            assert torch.equal(now[..., free], old[..., free])
            assert not torch.equal(now, old)
        assert state.divergence == pytest.approx(problem.posterior.divergence().item(), rel=1e-9)


# -- transitions with features --------------------------------------------------------------------------


def featured(structure: Structure, batch_tokens: int) -> Problem:
    """Weights of the transitions too, of a feature with three values."""
    problem = make_problem(structure, batch_tokens)
    batches = []
    for batch in problem.batches:  # the same feature, however the data are batched
        edges = (batch.x[:, 1:, :1] + 2 * batch.x[:, :-1, :1]) % 3
        batches.append(replace(batch, x=batch.x[..., :1], edges=edges))
    kernels = [RelevanceKernel([n]).double().requires_grad_(False) for n in (5, 3)]
    q = Posterior({"node": Weights(kernels[0], (V,)), "next": Weights(kernels[1], (V, V))})
    return Problem(q, structure, batches)


FIXED = Minibatch(n_draws=2, steps=30, tolerance=0.0, max_passes=10, learn_scales=False)
"""Of a quadratic likelihood mirrored draws leave no noise in the means."""


def test_transitions_with_features_end_where_all_data_at_once_does(cases: ModuleType) -> None:
    structure = cases.RegressionOfTransitions(V)
    whole, parts = featured(structure, 10_000), featured(structure, 40)
    assert (len(whole.batches), len(parts.batches)) == (1, 4)
    finish(SecondOrder(n_draws=2, tolerance=1e-6, learn_scales=False), whole)
    state, _ = finish(FIXED, parts)
    here = whole.conditional(0)
    for k, (ours, theirs) in enumerate(zip(parts.posterior.blocks, whole.posterior.blocks, strict=True)):
        torch.testing.assert_close(ours.factor, theirs.factor, rtol=1e-4, atol=0)
        with torch.no_grad():  # what tokens see: of constant and values, only the sum is well known
            found, expected = (here[k].times(block.m) for block in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=0, atol=0.02)
    assert float(expected.abs().max()) > 0.5
    assert_prior_times_sites(parts, state)


@pytest.mark.parametrize(
    "optimizer",
    [
        Minibatch(n_draws=2, steps=20, max_passes=3, tolerance=0.0, learn_scales=False),
        SecondOrder(n_draws=2, tolerance=1e-9, max_rounds=6, learn_scales=False),
    ],
    ids=["minibatch", "second-order"],
)
def test_a_table_is_a_block_of_weights_with_one_constant_feature(optimizer: Any, cases: ModuleType) -> None:
    """Of a quadratic likelihood both fits are the same, whether all transitions share a table or each
    looks its constant up."""
    structure = cases.RegressionOfTransitions(V)

    class Shared(Structure):
        """The same likelihood of one table: its curvature is summed over an example's transitions."""

        def log_prob(self, f: Any, g: Any, y: Any, mask: Any) -> Any:
            each = g[:, None, None].expand(-1, len(y), mask.shape[1] - 1, -1, -1)
            return structure.log_prob(f, each, y, mask)

        def local_curvature(self, f: Any, g: Any, y: Any, mask: Any) -> Any:
            found = structure.local_curvature(f, g, y, mask)
            return SimpleNamespace(node=found.node, next=found.next.sum(1))

    problem = featured(structure, 40)
    sd = 1.3
    kernel = RelevanceKernel([1]).double().requires_grad_(False)
    with torch.no_grad():
        kernel.log_scale[-1] = 2 * np.log(sd)
    blocks = {"weights": Weights(kernel, (V, V)), "table": Table((V, V), sd)}
    found = {}
    for name, after in blocks.items():
        node = Weights(problem.posterior.node.kernel, (V,))
        batches = [
            replace(b, edges=torch.full_like(b.edges, -1.0) if name == "weights" else None)
            for b in problem.batches
        ]
        likelihood = structure if name == "weights" else Shared()
        made = Problem(Posterior({"node": node, "next": after}), likelihood, batches)
        finish(optimizer, made)
        found[name] = made
    weights, table = blocks["weights"], blocks["table"]
    assert (weights.m[:, :-1] == 0).all()  # the value that no transition has
    torch.testing.assert_close(weights.m[:, -1:], table.m, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights.factor[:, -1:], table.factor, rtol=1e-6, atol=0)
    torch.testing.assert_close(weights.kl(), table.kl(), rtol=1e-5, atol=0)
    assert table.m.abs().max() > 0.3


def test_scales_of_transitions_with_features_are_learned(cases: ModuleType, oracles: ModuleType) -> None:
    """Under the chain, with sites on disk or in memory to the last bit."""
    found = []
    for folder in (None, "sites"):
        problem = featured(cases.Enumerated(oracles), 40)
        problem = Problem(problem.posterior, problem.structure, problem.batches[:2])
        before = problem.fresh_bound(20, torch.Generator().manual_seed(5))
        path = None if folder is None else str(Path(mkdtemp()) / folder)
        optimizer = Minibatch(max_passes=3, tolerance=0, n_draws=2, steps=3, sites_folder=path)
        _, steps = finish(optimizer, problem)
        found.append([step.elbo for step in steps])
        after = problem.fresh_bound(20, torch.Generator().manual_seed(5))
        assert after > before + 3
        assert (problem.posterior["next"].kernel.log_scale != 0).any()
    assert found[0] == found[1]


def test_going_on_from_a_posterior_of_transitions_with_features(cases: ModuleType) -> None:
    """The old posterior is the prior of the new data: the first half, then the second, is about all at
    once. Of a quadratic likelihood but for what weights have in common."""
    structure = cases.RegressionOfTransitions(V)
    whole, halves = featured(structure, 40), featured(structure, 40)
    finish(FIXED, whole)
    q, fresh = halves.posterior, featured(structure, 40).posterior
    finish(FIXED, Problem(q, structure, halves.batches[:2]))
    state, _ = finish(replace(FIXED, goes_on=True), Problem(q, structure, halves.batches[2:]))
    assert state.known is not None
    with torch.no_grad():  # what transitions see: of constant and values, only the sum is well known
        here = [whole.conditional(i)[1] for i in range(len(whole.batches))]
        after, expected, prior = (
            torch.cat([c.times(p["next"].m).flatten() for c in here]) for p in (q, whole.posterior, fresh)
        )
    assert float((after - expected).norm()) < 0.5 * float((prior - expected).norm())
    # What was known is not lost where the second half has nothing to say.
    precision = 1 / q["next"].factor.detach().square() - 1
    total = 1 / whole.posterior["next"].factor.detach().square() - 1
    torch.testing.assert_close(precision, total, rtol=1e-3, atol=1e-6)


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
    kernel = build_kernel("relevance", FeatureEncoder().fit([[["a"]]]).blocks, torch.zeros(1, 1).double())
    node = Inducing(kernel, torch.zeros(1, 1).double(), (2,))
    problem = Problem(Posterior({"node": node, "next": Table((2, 2))}), Chain(), [])
    with pytest.raises(InputError, match="'minibatch' fits one Gaussian of weights"):
        Minibatch().start(problem, torch.Generator())
    full = Posterior({"node": make_problem().posterior.node, "next": FullTable((V, V))})
    with pytest.raises(InputError, match="with independent transition scores"):
        Minibatch().start(Problem(full, Chain(), []), torch.Generator())
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


@pytest.mark.parametrize("single", [False, True])
def test_stopping_early_keeps_what_there_is(single: bool) -> None:
    X, y = data()
    model = StructuredGPClassifier(inference=Minibatch(batch_tokens=20, single=single), n_draws=8)
    model.fit(X, y, callback=lambda info: True)
    assert float(model.model_.posterior.node.m.abs().max()) > 0.1
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
