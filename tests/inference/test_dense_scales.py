"""Scales and shape of a kernel on dense columns: the evidence against plain Gaussian algebra and finite
differences, where learning ends, and the fit against one at inducing inputs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

from structgp.gp import DenseWeights, Inducing, Posterior, Table, contrasts
from structgp.gp.families import dense_scales
from structgp.gp.families.dense_scales import (
    PRIOR_COUNT,
    Quadratic,
    evidence,
    gram_of,
    learn_shape,
    learn_size,
    spread_of,
)
from structgp.gp.kernels import DenseKernel, covariance
from structgp.gp.linalg import cholesky
from structgp.inference import Problem, SecondOrder
from structgp.inference.loop import make_batches
from structgp.structures import Chain

N, D, V, R = 12, 3, 3, 2


def make_kernel(choice: Any = "linear+rbf-ard", n_inducing: int = N) -> tuple[DenseKernel, Tensor]:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(N, D)) * [1.0, 3.0, 0.3])
    kernel = DenseKernel.of(choice, x).requires_grad_(False)
    kernel.place(x[:n_inducing])
    kernel.log_scale.copy_(torch.tensor([0.2, 0.8, 1.1]))
    if kernel.ard:
        kernel.log_length.add_(torch.tensor([0.1, -0.2, 0.3]))
    return kernel, x


def quadratic(kernel: DenseKernel, x: Tensor) -> Quadratic:
    """Slopes and curvatures that nobody has."""
    rng = np.random.default_rng(1)
    bend = torch.from_numpy(rng.uniform(0.05, 0.25, (N, R)))
    linear = torch.from_numpy(rng.normal(size=(N, R)))
    features = kernel.features(x, kernel.prior_factor())
    return Quadratic(x, features.values, features.left, bend, linear)


# -- the evidence ------------------------------------------------------------------------------------


def integral(K: Tensor, bend: Tensor, linear: Tensor) -> Tensor:
    """log E[exp(l h - H h^2 / 2)] under h ~ N(0, K): of targets l / H with noise 1 / H, less a constant."""
    target, noise = linear / bend, 1 / bend
    normal = torch.distributions.MultivariateNormal(torch.zeros(N).double(), K + noise.diag())
    alone = torch.distributions.Normal(target, noise.sqrt()).log_prob(target)
    return normal.log_prob(target) - alone.sum() + 0.5 * (linear * target).sum()


@pytest.mark.parametrize("choice", ["linear", "rbf", "linear+rbf-ard", "matern"])
def test_evidence_is_that_of_a_gaussian(choice: str) -> None:
    kernel, x = make_kernel(choice)
    seen = quadratic(kernel, x)
    K = covariance(kernel, x, x)
    wanted = sum(integral(K, seen.bend[:, r], seen.linear[:, r]) for r in range(R))
    torch.testing.assert_close(evidence(kernel, seen), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "choice", ["linear+rbf", "rbf-ard", "linear+matern", ScaleKernel(RBFKernel())], ids=str
)
def test_slopes_of_the_evidence(choice: Any) -> None:
    kernel, x = make_kernel(choice)
    seen, parameters = quadratic(kernel, x), kernel.free_parameters()
    for p in parameters:
        p.requires_grad_(True)
    grads = torch.autograd.grad(evidence(kernel, seen), parameters)
    step = 1e-5
    for p, grad in zip(parameters, grads, strict=True):
        for k in range(p.numel()):
            found = []
            for sign in (1, -1):
                with torch.no_grad():
                    before = p.clone()
                    p.view(-1)[k] += sign * step
                    found.append(float(evidence(kernel, seen)))
                    p.copy_(before)
            slope = (found[0] - found[1]) / (2 * step)
            assert float(grad.reshape(-1)[k]) == pytest.approx(slope, rel=1e-5, abs=1e-6)
    assert sum(g.numel() for g in grads) == sum(p.numel() for p in parameters)


def test_evidence_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a kernel with a wide range of eigenvalues, and slopes that single precision cannot solve."""
    kernel, _ = make_kernel("rbf")
    kernel.log_scale.copy_(torch.tensor([2.0, 0.0, 3.0]))
    kernel.log_length.add_(1.5)
    rng = np.random.default_rng(2)
    x, bend = torch.from_numpy(rng.normal(size=(400, D))), torch.from_numpy(rng.uniform(0.1, 0.5, (400, R)))
    targets = torch.from_numpy(rng.normal(size=(400, R))) + 10.0
    seen = Quadratic(x, x[:, :0], x[:, 0], bend, bend * targets)
    double = evidence(kernel, seen)
    monkeypatch.setattr(dense_scales, "SINGLE_WORK", 0)
    assert float(evidence(kernel, seen)) == pytest.approx(float(double), abs=0.02)
    monkeypatch.setattr(dense_scales, "REFINEMENTS", 1)
    assert float(evidence(kernel, seen)) != pytest.approx(float(double), abs=1.0)


# -- what is learned ---------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_gram_matrices_are_sums_over_tokens(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their lower triangles, panel by panel, without tokens that say nothing."""
    monkeypatch.setattr(dense_scales, "PANEL", 3)
    monkeypatch.setattr(dense_scales, "kind_for", lambda *_: kind)
    rng = np.random.default_rng(0)
    values, bend = (torch.from_numpy(rng.normal(size=(40, n))) for n in (8, 3))
    bend = torch.where(bend > 0, bend, 1e-6)
    wanted = torch.einsum("tf,tr,tg->rfg", values, bend, values)
    found = gram_of(values, bend, torch.ones(3))
    torch.testing.assert_close(found.tril().double(), wanted.tril(), rtol=1e-3, atol=1e-3)
    # A token counts by what it adds to the precision of functions as large as they are.
    few = gram_of(values, bend, torch.full((3,), 1e-6))
    assert not few.any()
    root = spread_of(found, torch.tensor(2.0))
    assert not root.tril(-1).any()
    wanted = torch.linalg.inv(torch.eye(8) + 2 * wanted)
    torch.testing.assert_close((root @ root.mT).double(), wanted, rtol=1e-2, atol=1e-3)


def bound_of_size(seen: Quadratic, log_grown: float) -> float:
    """The bound at the best posterior if the kernel is exp(log_grown) as large."""
    grown, total = np.exp(log_grown), 0.0
    for r in range(R):
        precision = torch.eye(seen.values.shape[1]) + grown * seen.values.T @ (
            seen.bend[:, r, None] * seen.values
        )
        pull = np.sqrt(grown) * seen.values.T @ seen.linear[:, r]
        total += float(0.5 * pull @ torch.linalg.solve(precision, pull) - 0.5 * precision.logdet())
        total -= 0.5 * grown * float(seen.bend[:, r] @ seen.left)
    return total


@torch.no_grad()
@pytest.mark.parametrize("n_inducing", [N, 2])
def test_the_size_ends_where_the_bound_has_no_slope(n_inducing: int) -> None:
    """It stops where the next step would move it by less than 1 %."""
    kernel, x = make_kernel("rbf", n_inducing)

    def slope() -> float:
        seen = quadratic(kernel, x)
        return (bound_of_size(seen, 0.01) - bound_of_size(seen, -0.01)) / 0.02

    before = slope()
    for _ in range(5):
        m, root = learn_size(kernel, quadratic(kernel, x))
    seen = quadratic(kernel, x)
    determined = float(m.numel() - root.square().sum() + (seen.bend * seen.left[:, None]).sum())
    assert abs(slope()) <= 0.006 * (determined + PRIOR_COUNT) < 0.5 * abs(before)
    for r in range(R):
        S = torch.linalg.inv(torch.eye(len(m[r])) + seen.values.T @ (seen.bend[:, r, None] * seen.values))
        torch.testing.assert_close(root[r] @ root[r].T, S, rtol=0.02, atol=1e-3)
        torch.testing.assert_close(m[r], S @ seen.values.T @ seen.linear[:, r], rtol=0.02, atol=1e-2)


@torch.no_grad()
def test_without_sweeps_the_size_stays() -> None:
    kernel, x = make_kernel()
    before = kernel.log_scale.clone()
    learn_size(kernel, quadratic(kernel, x), 0)
    torch.testing.assert_close(kernel.log_scale, before, rtol=0, atol=0)


def test_the_shape_climbs_and_the_features_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = make_kernel()
    block = DenseWeights(kernel, (V,), contrasts(torch.ones(V)))
    seen = quadratic(kernel, x)
    before = float(evidence(kernel, seen))
    after = learn_shape(block, seen)
    assert float(evidence(kernel, after)) > before + 0.1
    torch.testing.assert_close(after.values, kernel.features(x, kernel.prior_factor()).values)
    assert not any(p.requires_grad for p in kernel.parameters())
    # With steps enough, the slope is that of the prior which holds the parameters.
    monkeypatch.setattr(dense_scales, "SHAPE_STEPS", 500)
    monkeypatch.setattr(dense_scales, "LEAST_SLOPE", 1e-6)
    monkeypatch.setattr(dense_scales, "PRIOR_SD", 1e6)
    for _ in range(20):
        seen = learn_shape(block, seen)
    kernel.log_scale.requires_grad_(True)
    (slope,) = torch.autograd.grad(evidence(kernel, seen), [kernel.log_scale])
    assert float(slope[kernel.log_scale > -5].abs().max()) < 0.02


# -- the fit -----------------------------------------------------------------------------------------


def single_tokens(node: Any, x: Tensor) -> Problem:
    """Every row a sequence of its own: the curvature between tokens is that of each by itself."""
    labels = (x[:, 0] > 0).long() + (x[:, 1] > 2).long()
    rows, y = [row[None].numpy() for row in x], [label[None].numpy() for label in labels]
    batches = make_batches(rows, y, np.zeros(D), 1000)
    return Problem(Posterior({"node": node, "next": Table((V, V))}), Chain(), batches)


class DrawsOfFunctions(DenseWeights):
    """With draws as of ``Inducing``: of the functions, on every sequence by itself."""

    fixed_noise = Inducing.fixed_noise

    def offsets(self, conditional: Any, noise: Any, i: int, numbers: Tensor) -> Tensor:
        factor = cholesky(self.gaussian(conditional)[1][0] / self.scale.square())
        return torch.einsum("brtu,sbur->sbtr", factor, noise[i])


@torch.no_grad()
@pytest.mark.parametrize("choice", ["linear+rbf", "rbf-ard", ScaleKernel(RBFKernel())], ids=str)
def test_the_fit_is_that_at_inducing_inputs(choice: Any, cases: ModuleType) -> None:
    """All rows are inducing inputs of both."""
    kernel, x = make_kernel(choice)
    basis = contrasts(torch.tensor([3.0, 2.0, 1.0]))
    found = []
    for node in (DrawsOfFunctions(kernel, (V,), basis, 1.3), Inducing(kernel, x, (V,), basis=basis)):
        node.log_amplitude.fill_(np.log(1.3))
        problem = single_tokens(node, x)
        optimizer = SecondOrder(16, tolerance=1e-9, max_rounds=30, learn_scales=False)
        last = cases.finish(optimizer, problem)[-1]
        mean, sd = node.scores_at(x)
        found.append((torch.tensor(last.elbo, dtype=torch.float64), mean, sd))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
