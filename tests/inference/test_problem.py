"""What a problem adds to an estimator: errors that name their sequence, memory, and a fresh bound."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel
from torch import Tensor

from structgp import StructuredGPClassifier, Weights
from structgp.data.batch import Batch
from structgp.errors import LikelihoodError
from structgp.gp import Inducing, Mixture, Posterior, Table
from structgp.inference import Problem
from structgp.inference import problem as base
from structgp.inference.estimators import Estimator, Pathwise, PathwiseSurrogate, Surrogate
from structgp.inference.latents import Sites
from structgp.paper import Score
from structgp.structures import BlackBox, Chain, Curvature, Structure

LENGTHS = (2, 3, 1)
B, T, V = 3, 3, 2
MASK = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
PLACES = (40, 7, 12)
"""Where the sequences of the batch stand in the data."""

ESTIMATORS: dict[str, Estimator] = {
    made.name: made.with_draws(64)
    for made in (
        Pathwise(),
        PathwiseSurrogate(),
        Score("score", "iid", "none"),
        Score("control-variate", "iid", "control-variate"),
        Score("sobol", "sobol", "mean"),
        Surrogate("surrogate-quadratic", None, uses_memory=True),
        Surrogate("surrogate", "composite", uses_memory=True),
    )
}

every_estimator = pytest.mark.parametrize("name", ESTIMATORS)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(structure: Structure | None = None, name: str = "pathwise", n_components: int = 1) -> Problem:
    kernel, Z = RBFKernel().double(), normal(2, 1, seed=0)
    node: Any = Inducing(kernel, Z, (V,))
    if n_components > 1:
        node = Mixture(kernel, Z, (V,), n_components=n_components)
    posterior = Posterior({"node": node, "next": Table((V, V), 0.8)})
    with torch.no_grad():
        for i, (parameter, p) in enumerate(posterior.named_parameters()):
            if "kernel" not in parameter and "next.log_amplitude" not in parameter:
                p += 0.4 * normal(*p.shape, seed=10 + i)
    y = torch.tensor([[0, 1, 0], [1, 1, 0], [1, 0, 0]])
    batch = Batch(2 * normal(B, T, 1, seed=1), y, MASK, torch.tensor(PLACES))
    return Problem(posterior, structure or Chain(), [batch], ESTIMATORS[name])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Broken(Chain):
    """``value`` in place of log p for sequence b of the batch where its first score is positive."""

    def __init__(self, value: float, b: int) -> None:
        self.value, self.b = value, b
        self.share = 0.0

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        values = super().log_prob(f, g, y, mask)
        bad = torch.zeros_like(values, dtype=torch.bool)
        bad[:, self.b] = f[:, self.b, 0, 0] > 0
        self.share = 100 * float(bad[:, self.b].double().mean())
        return torch.where(bad, self.value, values)


@pytest.mark.parametrize(
    ("name", "value"), [*((name, -np.inf) for name in ESTIMATORS), ("pathwise", np.nan), ("score", np.inf)]
)
def test_values_that_have_no_expectation(name: str, value: float) -> None:
    """The error names the sequence by its number in the data, from 1, its length, what came back and for
    which share of the draws."""
    structure = Broken(value, 1)
    problem = make(structure, name)
    with pytest.raises(LikelihoodError) as caught:
        problem.bound(0, generator())
    text = str(caught.value)
    assert "training sequence 8 (3 tokens)" in text
    assert f"log p is {value} at" in text
    assert caught.value.sequence == 7
    (share,) = re.findall(r"at ([0-9.e+-]+) % of the draws", text)
    assert float(share) == pytest.approx(structure.share, rel=0.01)
    assert 0 < float(share) < 100
    assert "\n" not in text


def test_sequences_of_the_second_component_are_the_same_ones() -> None:
    problem = make(Broken(-np.inf, B + 2), n_components=2)
    with pytest.raises(LikelihoodError, match=r"training sequence 13 \(1 tokens\)"):
        problem.bound(0, generator())


def test_the_fresh_bound_says_so_too() -> None:
    with pytest.raises(LikelihoodError, match=r"training sequence 41 \(2 tokens\)"):
        make(Broken(np.nan, 0)).fresh_bound(32, generator())


@pytest.mark.parametrize("n_components", [1, 2])
@pytest.mark.parametrize("batched", [False, True])
def test_an_error_of_the_users_function_is_located(n_components: int, batched: bool) -> None:
    """The function is tried on an example; then it meets a sequence of three tokens."""
    tried = False

    def fails(f: np.ndarray, g: np.ndarray, y: np.ndarray) -> np.ndarray:
        if tried and len(y) == 3:
            raise RuntimeError("no such thing")
        return f[:, 0, 0]

    def fails_too(f: np.ndarray, g: np.ndarray, y: np.ndarray, mask: np.ndarray) -> np.ndarray:
        values = np.asarray(f)[:, :, 0, 0].copy()
        values[:, np.asarray(mask).sum(-1) == 3] = np.nan if tried else 0
        return values

    function = fails_too if batched else fails
    structure = BlackBox(function, batched=batched)
    structure.probe(V)
    tried = True
    problem = make(structure, "score", n_components=n_components)
    with pytest.raises(LikelihoodError) as caught:
        problem.bound(0, generator())
    text = str(caught.value)
    assert "training sequence 8 (3 tokens)" in text
    assert function.__name__ in text
    assert ("nan" if batched else "no such thing") in text


# -- memory ------------------------------------------------------------------------------------------


@every_estimator
def test_memory_is_for_those_who_use_it(name: str) -> None:
    problem = make(name=name)
    problem.bound(0, generator())
    assert set(problem.memory) == ({0} if ESTIMATORS[name].uses_memory else set())


class Spy:
    """An estimator that keeps what it was told and what it found."""

    name, n_draws, needs_gradient, parts, uses_memory = "spy", 64, False, None, True

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.found: list[Any] = []

    def with_draws(self, n_draws: int) -> Spy:
        return self

    def __call__(self, target: Any, generator: torch.Generator, memory: Any = None) -> Any:
        self.told.append(memory)
        self.found.append(Score("any", "iid", "mean", 64)(target, generator))
        return self.found[-1]


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(vars(one).values(), vars(other).values(), strict=True):
        torch.testing.assert_close(a, b)  # a tensor, or one per block


def test_memory_follows_the_estimates() -> None:
    """First nothing; then what was found; then a running mean of the sites, read at the posterior as it is
    by then."""
    problem = make()
    problem.estimator = spy = Spy()
    random = generator()
    problem.bound(0, random)
    latent = problem.latents(0)
    first = Sites.of(latent, latent.sensitivity(spy.found[0].moments))
    assert spy.told == [None]
    assert_same(problem.memory[0], first)
    with torch.no_grad():
        problem.posterior.node.m += 0.5
        problem.posterior.node.factor *= 0.8
        problem.posterior["next"].m -= 0.2
    problem.bound(0, random)
    moved = problem.latents(0)
    assert_same(spy.told[1], moved.moments(first.sensitivity(moved)))
    second = Sites.of(moved, moved.sensitivity(spy.found[1].moments))
    assert_same(problem.memory[0], first.towards(second, base.MEMORY_RATE))


def test_a_memory_that_is_given_is_used_and_left_alone() -> None:
    problem = make()
    problem.estimator = spy = Spy()
    problem.bound(0, generator())
    kept, latent = problem.memory[0], problem.latents(0)
    given = kept.map(lambda a: 2 * a)
    problem.estimate(0, latent, generator(1), given)
    assert_same(spy.told[1], latent.moments(given.sensitivity(latent)))
    assert problem.memory[0] is kept


def test_memory_reduces_the_variance() -> None:
    """The fifth estimate, with what the first four left, against one without."""
    problem = make(name="surrogate-quadratic")
    problem.estimator = ESTIMATORS["surrogate-quadratic"].with_draws(512)
    random = generator()
    variances = []
    for _ in range(5):
        found = problem.estimate(0, problem.latents(0), random)
        variances.append(float(found.variance.slopes[0].sum() + found.variance.bends[0].sum()))
    assert min(variances[2:]) < 0.6 * variances[0]


def test_a_silent_table_leaves_a_memory_of_numbers() -> None:
    problem = make(name="surrogate")
    with torch.no_grad():
        problem.posterior["next"].log_amplitude.fill_(-torch.inf)
    random = generator()
    for _ in range(3):
        bound = problem.bound(0, random)
        assert bound.elbo.isfinite()
        assert all(a.isfinite().all() for a in problem.memory[0].precision)
    assert (problem.memory[0].precision[1] == 0).all()


# -- bounds ------------------------------------------------------------------------------------------


def exact_bound(problem: Problem, oracles: ModuleType) -> float:
    q, total = problem.posterior, 0.0
    with torch.no_grad():
        for batch in problem.batches:
            value = oracles.expected_log_prob(q, batch.x, batch.y, batch.mask)
            total += float((q.mixing @ value).sum())
        return total - float(q.divergence())


@pytest.mark.parametrize("n_components", [1, 2])
def test_the_fresh_bound_is_unbiased(n_components: int, oracles: ModuleType) -> None:
    """60 of them on 128 draws each against quadrature, over two batches, four standard errors. With two
    components these have unequal weights, and do not expect the same."""
    problem = make(n_components=n_components)
    with torch.no_grad():
        if n_components > 1:
            problem.posterior.node.weight_logits += torch.tensor([1.5, -0.5])
            problem.posterior.node.m[-1] *= 3
    (batch,) = problem.batches
    tensors = batch.x, batch.y, batch.mask, batch.index
    parts = [Batch(*(a[i] for a in tensors)) for i in ([0, 2], [1])]
    problem = Problem(problem.posterior, Chain(), parts)
    random = generator()
    found = torch.tensor([problem.fresh_bound(128, random) for _ in range(60)])
    error = float(found.std()) / 60**0.5
    assert abs(float(found.mean()) - exact_bound(problem, oracles)) < 4 * error
    assert error < 0.1


def test_a_batch_stands_for_all() -> None:
    """Over batches that come equally often the mean of the bounds is the bound, whatever their sizes; and a
    bound of all of them has no other estimate in it than the batch's own."""
    problem = make()
    (batch,) = problem.batches
    tensors = batch.x, batch.y, batch.mask, batch.index
    parts = [Batch(*(a[i] for a in tensors)) for i in ([0, 2], [1])]
    halves = Problem(problem.posterior, Chain(), parts, problem.estimator)
    assert halves.n_sequences == 3
    for i in range(2):
        bound = halves.bound(i, generator(i))
        value = (halves.posterior.mixing @ bound.estimate.moments.value.reshape(1, -1)).sum()
        torch.testing.assert_close(bound.expected_log_prob, 2 * value)
        rest = halves.posterior.divergence()
        torch.testing.assert_close(bound.elbo, bound.expected_log_prob - rest)


def covariance(problem: Problem, **options: bool) -> Tensor:
    return problem.latents(0, **options).parts[0].covariance


def test_what_is_kept_is_what_would_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And after the kernel has moved, once told."""
    problem = make()
    before = covariance(problem)
    monkeypatch.setattr(base, "CACHE_BYTES", 0)
    again = make()
    torch.testing.assert_close(before, covariance(again))
    monkeypatch.undo()
    with torch.no_grad():
        problem.posterior.node.kernel.lengthscale = 0.3
    torch.testing.assert_close(covariance(problem), before)
    moved = covariance(problem, move_kernel=True)
    assert not torch.allclose(moved, before)
    problem.refresh()
    torch.testing.assert_close(covariance(problem), moved)


def test_the_kernel_has_a_gradient_only_if_it_moves() -> None:
    problem = make()
    raw = problem.posterior.node.kernel.raw_lengthscale
    still = problem.bound(0, generator()).elbo
    assert torch.autograd.grad(still, raw, allow_unused=True) == (None,)
    moving = problem.bound(0, generator(), move_kernel=True).elbo
    torch.testing.assert_close(still, moving)
    (found,) = torch.autograd.grad(moving, raw)
    assert found.abs() > 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"log_prob": lambda p: p[0]}, r"log_prob has shape \(3,\) where \(\d+, 3\) was expected"),
        ({"node": lambda p: p[..., :1]}, r"curvature of node has shape \(3, 4, 1\) where \(3, 4, 2\) was"),
        ({"next": lambda p: p[0]}, r"curvature of next has shape \(2, 2\) where \(3, 2, 2\) was expected"),
    ],
)
def test_shapes_that_would_be_broadcast_are_refused(wrong: Any, says: str) -> None:
    class Wrong(Chain):
        def log_prob(self, *given: Any) -> Tensor:
            return wrong.get("log_prob", lambda p: p)(super().log_prob(*given))

        def local_curvature(self, *given: Any) -> Curvature:
            found = super().local_curvature(*given)
            return Curvature(*(wrong.get(k, lambda p: p)(getattr(found, k)) for k in ("node", "next")))

    data = [[["a"], ["b"], ["a"], ["b"]]] * 3, [["x", "y", "x", "y"]] * 3
    with pytest.raises(LikelihoodError, match=says):
        StructuredGPClassifier(structure=Wrong(), posterior=Weights(basis="label")).fit(*data)
