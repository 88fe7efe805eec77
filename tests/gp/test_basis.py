"""Labels made of contrasts: the axes themselves, and the same model without the direction that says
nothing."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.inference.random_posteriors import conditionals
from torch import Tensor

from structgp.answers import potentials
from structgp.data.batch import Batch
from structgp.gp import Inducing, Mixture, Posterior, Table, contrasts
from structgp.inference import Natural, Problem, SecondOrder
from structgp.inference.estimators import Estimator, Pathwise, Surrogate
from structgp.paper import Score
from structgp.structures import Chain

generated = settings(max_examples=40, deadline=None, derandomize=True)


def bend_of(p: Tensor) -> Tensor:
    """How a softmax with probabilities p bends."""
    return p.diag() - p[:, None] * p


# -- the axes ----------------------------------------------------------------------------------------


@generated
@given(
    st.integers(2, 8).flatmap(
        lambda V: arrays(float, V, elements=st.one_of(st.just(0.0), st.floats(1e-6, 1e6)))
    )
)
@example(np.array([5.0, 0.0, 0.0, 0.0]))
@example(np.array([3.0, 3.0, 3.0]))
@example(np.array([1e6, 1e-6]))
def test_contrasts_are_the_axes_of_the_softmax(frequency: np.ndarray) -> None:
    assume(frequency.sum() > 0)
    given = torch.tensor(frequency)
    B = contrasts(given)
    V = len(frequency)
    assert B.shape == (V, V - 1)
    assert B.dtype == torch.float64
    torch.testing.assert_close(B.T @ B, torch.eye(V - 1).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(B.sum(0), torch.zeros(V - 1).double(), rtol=0, atol=1e-12)
    bent = B.T @ bend_of(given / given.sum()) @ B
    # Up to what tells equally frequent labels apart.
    torch.testing.assert_close(bent, bent.diagonal().diag(), rtol=0, atol=1e-5)
    # One of the two directions of each axis, always the same.
    first = (B.abs() > 0.999 * B.abs().amax(0)).int().argmax(0)
    assert (B.gather(0, first[None]) > 0).all()
    assert torch.equal(contrasts(given.clone()), B)


@pytest.mark.parametrize("counts", [[2, 1, 2], [1, 1, 1, 1], [5, 3, 3, 3, 1, 1], [0, 0, 0, 4]])
def test_rounding_does_not_choose_the_axes(counts: list[int]) -> None:
    """Of labels that are equally frequent, and the sign where two entries are equally large."""
    given = torch.tensor(counts, dtype=torch.float64)
    noise = torch.randn(len(counts), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for sign in (1, -1):
        moved = contrasts(given + sign * 1e-13 * given.sum() * noise.abs())
        torch.testing.assert_close(moved, contrasts(given), rtol=0, atol=1e-4)


def test_counts_are_frequencies() -> None:
    counts = torch.tensor([7, 1, 4, 0])
    expected = contrasts(counts.double() / counts.sum())
    torch.testing.assert_close(contrasts(counts), expected, rtol=0, atol=1e-12)


@generated
@given(st.floats(0, 1e6), st.floats(1e-3, 1e6))
def test_two_labels_have_one_contrast(one: float, other: float) -> None:
    B = contrasts(torch.tensor([one, other], dtype=torch.float64))
    size = torch.full((2, 1), 0.5, dtype=torch.float64).sqrt()
    torch.testing.assert_close(B.abs(), size, rtol=0, atol=1e-12)
    assert float(B.prod()) < 0


# -- the posterior of the labels -----------------------------------------------------------------------


def two_sequences() -> Batch:
    """Of 3 and of 2 positions."""
    generator = torch.Generator().manual_seed(3)
    x = 1.5 * torch.randn(2, 3, 1, generator=generator, dtype=torch.float64)
    y, mask = torch.tensor([[1, 0, 0], [1, 1, 0]]), torch.arange(3) < torch.tensor([[3], [2]])
    return Batch(x, y, mask, torch.arange(2))


def problem_in(
    basis: Tensor | None, n_labels: int, *, away: float = 0.0, sd: float = 1.0, **form: Any
) -> Problem:
    """Two inducing inputs; the posterior is moved from the prior by noise of size ``away``."""
    inducing = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    family = Mixture if "n_components" in form else Inducing
    node = family(RBFKernel().double(), inducing, (n_labels,), basis=basis, **form)
    q = Posterior({"node": node, "next": Table((n_labels, n_labels), sd)})
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in q.named_parameters():
            if name != "next.log_amplitude":
                p += away * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return Problem(q, Chain(), [two_sequences()])


def rotation(n: int) -> Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]


def law_of_labels(problem: Problem) -> tuple[Tensor, Tensor]:
    """Mean (K, B, T V) and covariance (K, B, T V, T V) of the scores of nodes, read off the way from
    standard normal numbers to them, which is affine."""
    latent = problem.latents(0)
    K, B, T, R = latent.parts[0].mean.shape
    V = problem.posterior.node.n_scores
    units = torch.eye(T * R, dtype=torch.float64).reshape(-1, 1, T, R).expand(-1, K * B, -1, -1)
    noise = torch.cat([torch.zeros_like(units[:1]), units])
    f, _ = latent.place((noise, torch.zeros(len(noise), V * V, dtype=torch.float64)))
    f = torch.where(problem.batches[0].mask.repeat(K, 1)[..., None], f, 0).flatten(2)
    rest = f[1:] - f[0]
    covariance = torch.einsum("sbi,sbj->bij", rest, rest)
    return f[0].unflatten(0, (K, B)), covariance.unflatten(0, (K, B))


def law_by_hand(problem: Problem) -> tuple[Tensor, Tensor]:
    """The same from the Gaussians of the functions."""
    node, mask = problem.posterior.node, problem.batches[0].mask
    mean, covariance = node.gaussian(problem.conditional(0)[0])
    both = torch.einsum("kbrts,vr,wr->kbtvsw", covariance, node.basis, node.basis)
    mean = torch.where(mask[..., None], mean @ node.basis.T, 0)
    return mean.flatten(2).detach(), both.flatten(4).flatten(2, 3).detach()


def assert_same_law(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=0, atol=2e-7)


@pytest.mark.parametrize("form", [{}, {"covariance": "diagonal"}, {"n_components": 2}])
def test_a_rotation_of_the_labels_is_the_same_prior(form: dict[str, Any]) -> None:
    turned, labels = problem_in(rotation(3), 3, **form), problem_in(None, 3, **form)
    assert labels.posterior.node.has_own_functions
    assert not turned.posterior.node.has_own_functions
    assert_same_law(law_of_labels(turned), law_of_labels(labels))
    _, covariance = law_of_labels(labels)
    assert covariance.abs().max() > 0.9


@pytest.mark.parametrize("form", [{}, {"n_components": 2, "covariance": "diagonal"}])
@pytest.mark.parametrize("n_functions", [2, 3])
def test_labels_are_sums_of_functions(n_functions: int, form: dict[str, Any]) -> None:
    """Under a basis with columns of different lengths, away from the prior."""
    basis = rotation(3)[:, :n_functions] * torch.tensor([0.6, 1.7, 1.0])[:n_functions]
    problem = problem_in(basis, 3, away=0.4, **form)
    assert (problem.posterior.node.n_scores, problem.posterior.node.n_functions) == (3, n_functions)
    assert_same_law(law_of_labels(problem), law_by_hand(problem))


def test_draws_for_predictions_have_the_same_law() -> None:
    """Mean and covariance over 40,000 draws within five standard errors or so."""
    basis = contrasts(torch.tensor([3.0, 2.0, 1.0])) * torch.tensor([0.6, 1.7])
    problem = problem_in(basis, 3, away=0.4)
    q, batch = problem.posterior, problem.batches[0]
    mean, covariance = (part[0] for part in law_by_hand(problem))
    f = potentials.sample(q, 40_000, 1).potentials(Chain(), batch).f
    f = torch.where(batch.mask[..., None], f, 0).flatten(2)
    torch.testing.assert_close(f.mean(0), mean, rtol=0, atol=1e-9)  # antithetic
    found = torch.einsum("sbi,sbj->bij", f - mean, f - mean) / len(f)
    size = float(covariance.abs().max())
    torch.testing.assert_close(found, covariance, rtol=0, atol=0.04 * size)
    plugged = potentials.mean(q).potentials(Chain(), batch).f[0]
    plugged = torch.where(batch.mask[..., None], plugged, 0).flatten(1)
    torch.testing.assert_close(plugged, mean, rtol=0, atol=1e-9)


def test_contrasts_sum_to_zero_in_every_draw() -> None:
    problem = problem_in(contrasts(torch.tensor([5.0, 1.0, 2.0])), 3, away=0.5)
    q, batch, latent = problem.posterior, problem.batches[0], problem.latents(0)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(50, 2, 3, 2, generator=generator, dtype=torch.float64)
    drawn, _ = latent.place((noise, torch.zeros(50, 9, dtype=torch.float64)))
    both = [
        draws.potentials(Chain(), batch).f for draws in (potentials.sample(q, 50, 0), potentials.mean(q))
    ]
    for f in (drawn, *both):
        assert f.shape[-1] == 3
        assert f.abs().max() > 0.1
        assert f.sum(-1).abs().max() < 1e-12


# -- fits -----------------------------------------------------------------------------------------------


def noisy_labels() -> Batch:
    """Ten sequences of three tokens, whose inputs are around -1.5, 0 and 1.5 for the three labels."""
    generator = torch.Generator().manual_seed(5)
    y = torch.randint(0, 3, (10, 3), generator=generator)
    noise = torch.randn(10, 3, 1, generator=generator, dtype=torch.float64)
    mask = torch.ones(10, 3, dtype=torch.bool)
    return Batch(1.5 * (y[..., None] - 1.0) + 0.8 * noise, y, mask, torch.arange(10))


def test_contrasts_have_the_higher_bound() -> None:
    """The direction that is left out is the prior under both; independent contrasts are nearer to the
    posterior than independent labels. Two optimisers agree on both."""
    batch = noisy_labels()
    inducing = torch.linspace(-2, 2, 5, dtype=torch.float64)[:, None]
    frequency = torch.bincount(batch.y.flatten(), minlength=3)
    optimizers = SecondOrder(128, tolerance=1e-3, learn_scales=False), Natural(learn_scales=False)
    bounds = np.empty((2, 2))
    for i, optimizer in enumerate(optimizers):
        for j, basis in enumerate((None, contrasts(frequency))):
            node = Inducing(RBFKernel().double(), inducing, (3,), basis=basis)
            q = Posterior({"node": node, "next": Table((3, 3))})
            problem = Problem(q, Chain(), [batch], Pathwise(32))
            state, finished = optimizer.start(problem, torch.Generator().manual_seed(1)), False
            while not finished:
                state, info = optimizer.step(problem, state)
                finished = info.finished
            bounds[i, j] = problem.fresh_bound(4000, torch.Generator().manual_seed(99))
    gain = bounds[:, 1] - bounds[:, 0]
    assert (gain > 0.3).all()
    # The same model: its evidence is above both bounds, which are not far from each other.
    assert (gain < 5).all()
    np.testing.assert_allclose(bounds[0], bounds[1], rtol=0, atol=0.15)


def test_pace_of_stochastic_steps() -> None:
    """1 and a quarter of the largest eigenvalue, which grows with the square of a column."""

    def bound(basis: Tensor | None) -> float:
        problem = problem_in(basis, 3)
        return problem.posterior.node.curvature_bound(problem.of_block(0)) - 1

    one = bound(contrasts(torch.ones(3)))
    assert one == pytest.approx(bound(None), rel=1e-9)
    A = problem_in(None, 3).conditional(0)[0].projection.flatten(0, 1)
    largest = float(torch.linalg.eigvalsh(A.T @ A)[-1])
    assert one == pytest.approx(0.25 * largest, rel=1e-6)
    longer = contrasts(torch.ones(3)) * torch.tensor([1.0, 3.0])
    assert bound(longer) == pytest.approx(9 * one, rel=1e-9)


# -- estimators -----------------------------------------------------------------------------------------

SMALL: dict[str, tuple[int, dict[str, Any]]] = {
    "two labels": (2, {"sd": 0.8}),
    "two labels, mixture": (2, {"n_components": 2, "covariance": "diagonal"}),
    "three labels": (3, {"sd": 0.0}),
}
"""Few enough directions for quadrature: T + 1 with two labels, 2 T with three and no transitions."""


def small_problem(name: str, estimator: Estimator) -> Problem:
    V, form = SMALL[name]
    basis = contrasts(torch.arange(1.0, V + 1)) * torch.linspace(0.7, 1.4, V - 1)
    problem = problem_in(basis, V, away=0.4, **form)
    batch = problem.batches[0]
    if V == 3:
        y = torch.where(batch.mask, torch.tensor([[2, 0, 1], [1, 2, 0]]), 0)[:, :2]
        batch = Batch(batch.x[:, :2], y, batch.mask[:, :2], batch.index)
    return Problem(problem.posterior, Chain(), [batch], estimator)


def by_quadrature(problem: Problem, oracles: ModuleType) -> Tensor:
    """(K, B) E_q[log p(y_n | f_n, g)], differentiable in all that is behind the posterior."""
    q, batch = problem.posterior, problem.batches[0]
    node, table = q.node, q["next"]
    means, covariances = node.gaussian(conditionals(q, batch)[0])
    size = 0 if table.is_silent else table.n_scores
    table_mean = (table.scale * table.m[:, 0])[:size]
    table_covariance = (table.scale * table.factor[:, 0]).square().diag()[:size, :size]
    answer = []
    for mean, covariance in zip(means, covariances, strict=True):
        for b, T in enumerate(batch.mask.sum(-1).tolist()):
            f = (mean[b, :T] @ node.basis.T).T.flatten()  # label by label, then g
            here = covariance[b, :, :T, :T]
            spread = torch.einsum("rts,vr,wr->vtws", here, node.basis, node.basis)
            spread = spread.flatten(2).flatten(0, 1)
            log_p, weight = oracles._at_nodes(
                torch.cat([f, table_mean]),
                torch.block_diag(spread, table_covariance),
                batch.y[b, :T],
                q.node.n_scores,
                14,
            )
            answer.append(weight @ log_p)
    return torch.stack(answer).reshape(q.n_components, len(batch))


ORTHOGONAL = Score("antithetic-orthogonal", "orthogonal", "mean", 256)
SURROGATE = Surrogate("surrogate", "composite", uses_memory=True, n_draws=128)


@pytest.mark.parametrize(
    ("case", "estimator", "share"),
    [
        ("two labels", Pathwise(16), 0.1),
        ("two labels, mixture", Pathwise(16), 0.1),
        ("three labels", Pathwise(16), 0.1),
        ("three labels", ORTHOGONAL, 0.2),
        ("two labels, mixture", SURROGATE, 0.1),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_estimators_are_unbiased(
    case: str, estimator: Estimator, share: float, oracles: ModuleType
) -> None:
    """Each entry of the mean of 40 gradients is within four standard errors of quadrature's, and those
    are small: all together a tenth or a fifth of the gradient's length."""
    problem = small_problem(case, estimator)
    q, R = problem.posterior, problem.posterior.node.n_functions
    silent = "next." if q["next"].is_silent else "none"
    named = {name: p for name, p in q.named_parameters() if not name.startswith(silent)}
    exact = by_quadrature(problem, oracles)
    wanted = torch.autograd.grad((q.mixing @ exact).sum(), list(named.values()))
    latent = problem.latents(0, move_kernel=True)
    target = problem.target(0, latent)
    assert target.groups[0].n_functions == R == q.node.n_scores - 1
    generator = torch.Generator().manual_seed(0)
    found, values = [], []
    for _ in range(40):
        moments = problem.estimator(target, generator).moments
        assert moments.slopes[0].shape[-1] == moments.bends[0].shape[1] == R
        total = latent.expand(moments, q.mixing)
        found.append(torch.autograd.grad(total, list(named.values()), retain_graph=True))
        values.append(moments.value.reshape(exact.shape))
    errors = []
    for parameter, expected, *samples in zip(named, wanted, *found, strict=True):
        errors.append(standard_error(samples))
        away = torch.stack(samples).mean(0) - expected
        assert (away.abs() <= 4 * errors[-1] + 1e-7).all(), parameter
    assert length(errors) < share * length(wanted)
    away = torch.stack(values).mean(0) - exact.detach()
    assert (away.abs() <= 4 * standard_error(values) + 1e-4).all()


def length(parts: Sequence[Tensor]) -> float:
    return float(torch.cat([p.flatten() for p in parts]).norm())


def standard_error(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples).std(0) / len(samples) ** 0.5
