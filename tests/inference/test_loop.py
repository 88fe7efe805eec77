"""The loop: callbacks, history, what is kept between steps, and the bound on fresh draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.generate import generate
from threadpoolctl import ThreadpoolController, threadpool_limits
from torch import Tensor

from structgp import StructuredGPClassifier
from structgp.data.batch import Batch
from structgp.data.encode import FeatureEncoder
from structgp.data.labels import LabelEncoder
from structgp.errors import InputError, LikelihoodError
from structgp.gp import Inducing, Mixture, Posterior, Table, choose_inducing
from structgp.gp.kernels.build import build_kernel
from structgp.inference import Adam, Natural, Optimizer, Problem, SecondOrder, StepInfo
from structgp.inference import problem as base
from structgp.inference.loop import History, make_batches, one_thread_for_vectors, train
from structgp.inference.second_order import Draws
from structgp.paper import LbfgsBlocks, Saga
from structgp.structures import Chain, Structure

OPTIMIZERS = {
    "adam": Adam(max_steps=12, window=4, tolerance=0.5),
    "lbfgs": LbfgsBlocks(6, 3, 2, max_iterations=3, learn_scales="transitions"),
    "natural": Natural(max_steps=12, window=4),
    "saga": Saga(0.02, 0.005, node_steps=None, transition_steps=None, max_steps=12),
    "second-order": SecondOrder(),
}


def case(
    *, n_labels: int = 3, transition_sd: float = 1.0, batch_tokens: int = 12
) -> tuple[Posterior, list[Batch]]:
    data = generate(6, n_labels=n_labels, mean_length=3, n_templates=2, n_values=4, strength=2.0, seed=3)
    encoder = FeatureEncoder().fit(data.X)
    rows = encoder.transform(data.X)
    labels = LabelEncoder(list(data.chain.labels)).transform(data.y)
    tokens = torch.from_numpy(np.concatenate(rows))
    kernel = build_kernel("template", encoder.blocks, tokens, 2.0).requires_grad_(False)
    chosen = choose_inducing(kernel, tokens, 4)
    node = Inducing(kernel, tokens[chosen.index], (n_labels,))
    posterior = Posterior({"node": node, "next": Table((n_labels, n_labels), transition_sd)})
    return posterior, make_batches(rows, labels, encoder.pad_row, batch_tokens)


def fit(optimizer: Optimizer, seed: int = 0, **kwargs: Any) -> tuple[Posterior, History]:
    posterior, batches = case()
    generator = torch.Generator().manual_seed(seed)
    history = train(posterior, Chain(), batches, optimizer, "a test", generator=generator, **kwargs)
    return posterior, history


def disturb(posterior: Posterior) -> None:
    generator = torch.Generator().manual_seed(5)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=like.dtype)

    with torch.no_grad():
        node = posterior.node
        node.m += 0.7 * noise(node.m)
        node.factor += 0.3 * noise(node.factor).tril()
        node.log_amplitude += 0.4


@dataclass(frozen=True)
class Fitted:
    """seen : what the callback was told, which asks to stop where it ends anyway. calls : how often
    conditionals of a batch were computed."""

    posterior: Posterior
    history: History
    seen: list[StepInfo]
    calls: int


def watched(optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch) -> Fitted:
    seen: list[StepInfo] = []
    calls, original = 0, Inducing.conditional

    def counted(self: Inducing, rows: Tensor, mask: Tensor, factor: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return original(self, rows, mask, factor)

    def callback(info: StepInfo) -> bool:
        seen.append(info)
        return info.finished

    monkeypatch.setattr(Inducing, "conditional", counted)
    posterior, history = fit(optimizer, callback=callback)
    return Fitted(posterior, history, seen, calls)


@pytest.fixture(scope="module")
def fitted() -> Callable[[str], Fitted]:
    @cache
    def made(name: str) -> Fitted:
        with pytest.MonkeyPatch.context() as patch:
            return watched(OPTIMIZERS[name], patch)

    return made


every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


@every_optimizer
def test_callback_sees_every_step(name: str, fitted: Callable[[str], Fitted]) -> None:
    """One that agrees with the end interrupts nothing; and likelihoods computed add up."""
    history, seen = fitted(name).history, fitted(name).seen
    assert seen == history.steps
    assert len(seen) > 1
    assert history.optimizer == OPTIMIZERS[name].name
    assert history.reason == "a test"
    assert history.elbo == seen[-1].elbo
    assert history.seconds > 0
    assert history.stopped in ("converged", "limit")
    assert history.steps[-1].finished
    assert history.gradient == "pathwise"
    assert history.evaluations == sum(step.evaluations for step in history.steps) > 0
    if name == "adam":
        # Whole passes, with 8 draws of each of 6 sequences.
        n_batches = len(case()[1])
        assert len(history.steps) % n_batches == 0
        assert history.evaluations == 8 * 6 * len(history.steps) / n_batches


@every_optimizer
def test_callback_can_stop(name: str) -> None:
    optimizer = OPTIMIZERS[name]

    def stop_soon(info: StepInfo) -> bool:
        return info.iteration == last

    # What stores a gradient of each batch first has not moved before that.
    last = len(case()[1]) if isinstance(optimizer, Saga) else 1
    posterior, history = fit(optimizer, callback=stop_soon)
    assert history.stopped == "interrupted"
    assert len(history.steps) == last + 1
    assert np.isfinite(history.fresh_elbo)
    assert (posterior.node.m != 0).any(), "what was reached is not kept"


def test_why_it_stopped() -> None:
    assert fit(SecondOrder())[1].stopped == "converged"
    assert fit(SecondOrder(max_rounds=1))[1].stopped == "limit"
    assert fit(Adam(max_steps=3))[1].stopped == "limit"


@every_optimizer
def test_the_same_fit_with_nothing_kept(
    name: str, fitted: Callable[[str], Fitted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generator alone decides: where conditionals are computed again each time, to the last bit the
    same."""
    kept, n_batches = fitted(name), len(case()[1])
    # L-BFGS goes back to the best parameters in the end, and refreshes them once. Second order does
    # whenever the scales of the kernel have moved.
    second_order = name == "second-order"
    if second_order:
        assert kept.calls % n_batches == 0
        assert kept.calls <= n_batches * len(kept.history.steps)
    else:
        assert kept.calls == n_batches * (2 if name == "lbfgs" else 1) > 1
    monkeypatch.setattr(base, "CACHE_BYTES", 0)
    computed = watched(OPTIMIZERS[name], monkeypatch)
    assert computed.calls > n_batches * (len(kept.history.steps) if second_order else 2)
    for key, value in kept.posterior.state_dict().items():
        assert torch.equal(value, computed.posterior.state_dict()[key]), key
    assert kept.history.steps == computed.history.steps
    assert kept.history.fresh_elbo == computed.history.fresh_elbo


@pytest.mark.parametrize("name", ["adam", "second-order"])
def test_another_generator_gives_another_fit(name: str, fitted: Callable[[str], Fitted]) -> None:
    other, _ = fit(OPTIMIZERS[name], seed=1)
    assert not torch.equal(fitted(name).posterior.node.m, other.node.m)


# -- the bound on fresh draws -------------------------------------------------------------------


def test_fresh_bound_against_quadrature() -> None:
    """Two labels and no transition scores: log p is a sum over tokens of log sigmoid(+-(f_0 - f_1)), and
    the expectation of each is a one-dimensional integral."""
    posterior, batches = case(n_labels=2, transition_sd=0.0)
    disturb(posterior)
    assert len({len(batch) for batch in batches}) > 1
    with torch.no_grad():
        problem = Problem(posterior, Chain(), batches)
        kept = [problem.conditional(i)[0] for i in range(len(batches))]
        nodes, weights = np.polynomial.hermite_e.hermegauss(60)
        exact = -float(posterior.divergence())
        for batch, conditional in zip(batches, kept, strict=True):
            mean, covariance = posterior.node.gaussian(conditional)
            variances = covariance[0].diagonal(dim1=-1, dim2=-2).sum(1)[batch.mask].numpy()
            away = (mean[0, ..., 0] - mean[0, ..., 1])[batch.mask].numpy()
            sign = np.where(batch.y[batch.mask].numpy() == 0, 1, -1)
            margin = sign[:, None] * (away[:, None] + np.sqrt(variances)[:, None] * nodes)
            exact -= float((np.logaddexp(0, -margin) @ (weights / weights.sum())).sum())
    generator = torch.Generator().manual_seed(0)
    few = [problem.fresh_bound(4, generator) for _ in range(200)]
    error = np.std(few) / np.sqrt(len(few))
    assert np.mean(few) == pytest.approx(exact, abs=4 * error)
    assert error < 0.007 * abs(exact)
    assert problem.fresh_bound(20_000, generator) == pytest.approx(exact, rel=0.003)


def test_the_reported_fresh_bound_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the posterior as it ended, on draws that come after all others."""
    posterior, batches = case()
    seen: list[tuple[int, Tensor]] = []
    original = Problem.fresh_bound

    def watched(self: Problem, n_draws: int, generator: torch.Generator) -> float:
        seen.append((n_draws, self.posterior.node.m.detach().clone()))
        return original(self, n_draws, generator)

    monkeypatch.setattr(Problem, "fresh_bound", watched)
    generator = torch.Generator().manual_seed(0)
    history = train(posterior, Chain(), batches, SecondOrder(), "", generator=generator)
    n_draws, m = seen[-1]
    assert torch.equal(m, posterior.node.m)
    problem = Problem(posterior, Chain(), batches)
    many = [original(problem, n_draws, generator) for _ in range(200)]
    assert abs(history.fresh_elbo - np.mean(many)) < 4 * np.std(many)


def test_fitted_and_fresh_bounds_bracket_the_optimum(
    cases: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the draws it was fitted to, a posterior looks better than the best one does; on fresh ones it
    is worse."""
    best, batches = case()
    generator = torch.Generator().manual_seed(0)
    optimizer = SecondOrder(n_draws=512, learn_scales=False, tolerance=1e-4)
    train(best, Chain(), batches, optimizer, "", generator=generator)
    problem = Problem(best, Chain(), batches)
    optimum = problem.fresh_bound(4000, torch.Generator().manual_seed(1))
    gains = []
    monkeypatch.setattr("structgp.inference.second_order.MOST_DRAWS", 2)
    for seed in range(6):
        found, history = fit(SecondOrder(n_draws=2, learn_scales=False), seed)
        with torch.no_grad():
            draws = Draws(problem, problem.fixed_noise(1, torch.Generator().manual_seed(seed)))
            value = cases.value_and_gradients(draws)[0]
            gains.append(history.elbo - float(value - best.divergence()))
        fresh = Problem(found, Chain(), batches).fresh_bound(4000, torch.Generator().manual_seed(1))
        assert fresh < optimum + 0.02
    # Its variances are those that the curvature asks for, which on two draws are not quite the best.
    assert min(gains) > -0.2
    assert np.mean(gains) > 0.02


# -- choices and batches ------------------------------------------------------------------------


class ValueOnly(Structure):
    """The least a structure can be."""

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return Chain().log_prob(f, g, y, mask)


def test_second_order_without_curvature_says_what_is_missing() -> None:
    posterior, batches = case()
    with pytest.raises(InputError, match="needs the curvature, and ValueOnly offers none"):
        train(posterior, ValueOnly(), batches, SecondOrder(), "", generator=torch.Generator())


# -- likelihoods that fail -----------------------------------------------------------------------


class Failing(Chain):
    """Returns ``value`` for the sequence labelled ``y``, in some of the draws."""

    def __init__(self, y: Tensor, value: float) -> None:
        self.y, self.value = y, value

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        T = len(self.y)
        bad = torch.zeros(len(mask), dtype=torch.bool)
        if mask.shape[1] >= T:
            bad = (mask.sum(-1) == T) & (y[:, :T] == self.y).all(-1)
        values = super().log_prob(f, g, y, mask)
        return torch.where(bad & (f[:, :, 0, 0] > 0), self.value, values)


@pytest.mark.parametrize(("n_components", "value"), [(1, -np.inf), (1, np.inf), (2, np.nan)])
def test_a_likelihood_without_an_expectation_names_the_sequence(n_components: int, value: float) -> None:
    posterior, batches = case()
    if n_components > 1:
        node = Mixture(posterior.node.kernel, posterior.node.inducing, (3,), n_components=2)
        posterior = Posterior({"node": node, "next": posterior["next"]})
    batch = max(batches, key=lambda batch: batch.mask.shape[1])
    n, T = int(batch.index[-1]), int(batch.mask[-1].sum())
    assert n > 0
    structure = Failing(batch.y[-1, :T], value)
    with pytest.raises(LikelihoodError) as caught:
        train(posterior, structure, batches, Adam(), "", generator=torch.Generator())
    error = caught.value
    assert error.place == f"likelihood, training sequence {n + 1} ({T} tokens)"
    assert error.sequence == n
    assert f"log p is {value} at " in error.problem
    assert "% of the draws" in error.problem
    assert "\n" not in str(error)


def test_components_come_one_after_another_in_an_error() -> None:
    posterior, batches = case()
    i = max(range(len(batches)), key=lambda i: len(batches[i]))
    batch = batches[i]
    assert len(batch) > 1
    problem = Problem(posterior, Chain(), batches)
    for row in range(2 * len(batch)):
        with pytest.raises(LikelihoodError) as found:
            problem._fail(i, LikelihoodError("place", "problem", "remedy", row))
        assert found.value.sequence == int(batch.index[row % len(batch)])
    unknown = LikelihoodError("place", "problem", "remedy")
    with pytest.raises(LikelihoodError) as found:
        problem._fail(i, unknown)
    assert found.value is unknown


def test_batches_hold_every_sequence_once() -> None:
    rows = [np.full((n, 2), float(i)) for i, n in enumerate([3, 0, 1, 5, 2, 3])]
    labels = [np.full(len(r), i) for i, r in enumerate(rows)]
    batches = make_batches(rows, labels, np.full(2, -1.0), 6)
    seen = torch.cat([batch.index for batch in batches]).tolist()
    assert sorted(seen) == [0, 2, 3, 4, 5]  # the one without tokens is left out
    for batch in batches:
        assert batch.mask.numel() <= 6
        for b, i in enumerate(batch.index.tolist()):
            assert int(batch.mask[b].sum()) == len(rows[i])
            assert (batch.x[b][batch.mask[b]] == i).all()
            assert (batch.y[b][batch.mask[b]] == i).all()
            assert (batch.x[b][~batch.mask[b]] == -1).all()


def blas_threads() -> set[int]:
    found = ThreadpoolController().select(internal_api="openblas").info()
    return {library["num_threads"] for library in found}


@pytest.fixture
def two_threads() -> Iterator[None]:
    with threadpool_limits(2):
        if blas_threads() != {2}:
            pytest.skip("NumPy and SciPy have another BLAS than OpenBLAS, or one core")
        yield


def test_vectors_have_one_thread_while_a_fit_lasts(two_threads: None) -> None:
    seen = []
    data = generate(4, n_labels=2, n_values=3, mean_length=3, seed=0)
    model = StructuredGPClassifier()
    model.fit(data.X, data.y, callback=lambda _: seen.append(blas_threads()))
    assert blas_threads() == {2}
    assert seen
    assert all(each == {1} for each in seen)


def test_fits_that_overlap_set_the_threads_back_once(two_threads: None) -> None:
    first, second = one_thread_for_vectors(), one_thread_for_vectors()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert blas_threads() == {1}
    second.__exit__(None, None, None)
    assert blas_threads() == {2}
    with one_thread_for_vectors():
        assert blas_threads() == {1}
    assert blas_threads() == {2}
