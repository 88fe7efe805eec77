"""The bound against a full Gaussian process written out densely, against closed forms, and against finite
differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel
from tests.inference.random_posteriors import (
    LENGTHS,
    TRANSITION_SD,
    B,
    V,
    W,
    conditionals,
    data,
    draws,
    every_form,
    latents,
    normal,
    random_posterior,
)
from torch import Tensor

from structgp.data.batch import Batch
from structgp.gp import Inducing, Posterior, Table
from structgp.gp.kernels import TemplateKernel
from structgp.inference.bound import Bound, lower_bound
from structgp.inference.estimators import Estimate, Moments, Noise, Target
from structgp.inference.estimators.moments import path_moments
from structgp.inference.latents import Latents
from structgp.structures import Chain

N = sum(LENGTHS)

LogProb = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def estimate_at(
    posterior: Posterior, latent: Latents, batch: Batch, log_prob: LogProb, noise: Noise
) -> Estimate:
    """Pathwise, at draws that are given."""
    K = posterior.n_components
    y, mask = batch.y.repeat(K, 1), batch.mask.repeat(K, 1)

    def function(noise: Noise) -> Tensor:
        return log_prob(*latent.place(noise), y, mask)

    weight = posterior.mixing.detach().repeat_interleave(len(y) // K)
    target = Target(function, latent.groups, weight)
    moments, values = path_moments(target, noise, function)
    return Estimate(moments, Moments(values.var(0), (), ()), values.numel())


def bound_at(
    posterior: Posterior,
    batch: Batch,
    noise: Noise,
    log_prob: LogProb,
    conditional: list[Any] | None = None,
    *,
    scale: float = 1.0,
    entropy: Any = "bhattacharyya",
) -> Bound:
    """As ``Problem.bound``, at draws that are given; ``scale`` makes a batch stand for more."""
    here = conditionals(posterior, batch) if conditional is None else conditional
    latent = Latents.of(posterior, here, batch.masks)
    estimate = estimate_at(posterior, latent, batch, log_prob, noise)
    expected = scale * latent.expand(estimate.moments, posterior.mixing)
    return Bound(lower_bound(expected, posterior, entropy), expected, estimate)


def part_of(batch: Batch, index: list[int]) -> Batch:
    return Batch(
        batch.x[index],
        batch.y[index],
        batch.mask[index],
        batch.index[index],
        edges=None if batch.edges is None else batch.edges[index],
    )


@pytest.fixture
def chain(oracles: ModuleType) -> LogProb:
    """log p by enumeration, with one table or with one per transition."""
    found: LogProb = oracles.enumerated_log_prob
    return found


def log_normal_ratio(mean: np.ndarray, cov: np.ndarray, prior: np.ndarray) -> float:
    """KL(N(mean, cov) || N(0, prior)) in all dimensions."""
    inverse = np.linalg.inv(prior)
    log_det = np.linalg.slogdet(prior)[1] - np.linalg.slogdet(cov)[1]
    return 0.5 * (np.trace(inverse @ cov) + mean @ inverse @ mean - len(mean) + log_det)


# -- the bound -------------------------------------------------------------------------------------


def test_inducing_at_x_is_the_full_gaussian_process(oracles: ModuleType) -> None:
    """Section 3's bound, from its definition: q(f_j) = N(b_j, Sigma_j) over all N tokens of the data,
    p(f_j) = N(0, K), and every probability by enumeration of labellings."""
    batch = data()
    rows = batch.x[batch.mask]
    posterior = random_posterior(rows)
    S = 8
    noise = draws(posterior, S)
    with torch.no_grad():
        bound = bound_at(posterior, batch, noise, Chain().log_prob)

    points = rows.numpy()
    K = np.exp(-0.5 * ((points[:, None] - points[None]) ** 2).sum(-1))
    L = np.linalg.cholesky(K)
    b = np.stack([L @ m for m in posterior.node.m.detach().numpy()])
    root = np.stack([L @ np.tril(factor) for factor in posterior.node.factor.detach().numpy()])
    covariance = root @ root.transpose(0, 2, 1)
    kl = sum(log_normal_ratio(b[j], covariance[j], K) for j in range(V))
    assert posterior.node.kl().item() == pytest.approx(kl, rel=1e-6)

    table = posterior["next"]
    mean = TRANSITION_SD * table.m[:, 0].detach().numpy()
    sd = TRANSITION_SD * np.abs(table.factor[:, 0].detach().numpy())
    prior = TRANSITION_SD**2 * np.eye(V * V)
    kl_table = log_normal_ratio(mean, np.diag(sd**2), prior)
    assert (bound.expected_log_prob - bound.elbo).item() == pytest.approx(kl + kl_table, rel=1e-6)

    expected = 0.0
    starts = np.cumsum((0, *LENGTHS))
    signed = TRANSITION_SD * table.factor[:, 0].detach().numpy()
    for n in range(B):
        here = slice(starts[n], starts[n + 1])
        spread = [np.linalg.cholesky(covariance[j][here, here]) for j in range(V)]
        for s in range(S):
            e = noise[0][s, n, : LENGTHS[n]].numpy()
            f = np.stack([b[j][here] + spread[j] @ e[:, j] for j in range(V)], -1)
            g = (mean + signed * noise[1][s].numpy()).reshape(V, V)
            every = oracles.chain_table(f, g)
            labels = batch.y[n, : LENGTHS[n]].numpy()
            (place,) = np.flatnonzero((every.labels == labels).all(-1))
            expected += float(every.score[place] - every.log_z) / S
    assert bound.expected_log_prob.item() == pytest.approx(expected, rel=1e-5)
    assert bound.elbo.item() == pytest.approx(expected - kl - kl_table, rel=1e-5)


def test_never_above_the_evidence(oracles: ModuleType) -> None:
    """One token, two labels: log p(y) = log(1/2) by symmetry, and q = p is the best below it."""
    x = torch.zeros(1, 1, W, dtype=torch.float64)
    y, mask = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
    batch = Batch(x, y, mask, torch.arange(1))
    for mean, sd in [(0.0, 1.0), (0.2, 0.9), (1.0, 0.3)]:
        node = Inducing(RBFKernel().double(), x[0], (V,))
        posterior = Posterior({"node": node, "next": Table((V, V))})
        half = draws(posterior, 4000, B=1, T=1, seed=3)
        mirrored = tuple(torch.cat([eps, -eps]) for eps in half)
        with torch.no_grad():
            node.m.copy_(torch.tensor([[mean], [-mean]]))
            node.factor.fill_(sd)
            bound = bound_at(posterior, batch, mirrored, Chain().log_prob)
            exact = oracles.expected_log_prob(posterior, x, y, mask).sum()
        assert bound.elbo < np.log(0.5)
        assert bound.expected_log_prob.item() == pytest.approx(exact.item(), abs=0.03)


@every_form
def test_scale_is_a_factor_on_the_data(form: str, chain: LogProb) -> None:
    batch = data()
    posterior = random_posterior(batch.x[0, :3] + 0.5, form)
    noise = draws(posterior, 4)
    with torch.no_grad():
        one = bound_at(posterior, batch, noise, chain)
        other = bound_at(posterior, batch, noise, chain, scale=2.5)
    torch.testing.assert_close(other.expected_log_prob, 2.5 * one.expected_log_prob)
    rest = posterior.node.kl() + posterior["next"].kl()
    for bound in (one, other):
        torch.testing.assert_close(bound.expected_log_prob - bound.elbo, rest)
        torch.testing.assert_close(bound.elbo, bound.expected_log_prob - rest)


def test_entropies() -> None:
    """The bound takes the one that is asked for."""
    batch = data()
    posterior = random_posterior(batch.x[0, :3] + 0.5, "two full")
    noise = draws(posterior, 2)
    with torch.no_grad():
        found = {}
        for entropy in ("bhattacharyya", "jensen"):
            bound = bound_at(posterior, batch, noise, Chain().log_prob, entropy=entropy)
            found[entropy] = bound.expected_log_prob - bound.elbo
            expected = posterior.node.kl(entropy) + posterior["next"].kl()
            torch.testing.assert_close(found[entropy], expected)
    assert found["jensen"] > found["bhattacharyya"] + 0.1


def test_batches_are_unbiased(chain: LogProb) -> None:
    """In the bound and its gradient in means and spreads of both blocks."""
    batch = data()
    posterior = random_posterior(batch.x[0, :3] + 0.5, "transitions with features")
    noise = draws(posterior, 4)
    parameters = [p for block in posterior.blocks for p in (block.m, block.factor)]

    def bound_of(index: list[int]) -> list[Tensor]:
        its = tuple(eps[:, index] for eps in noise)
        bound = bound_at(posterior, part_of(batch, index), its, chain, scale=B / len(index))
        return [bound.elbo.detach(), *torch.autograd.grad(bound.elbo, parameters)]

    full = bound_of([0, 1, 2])
    for batches in ([[0], [1], [2]], [[0, 1], [1, 2], [0, 2]]):
        for whole, *parts in zip(full, *(bound_of(index) for index in batches), strict=True):
            torch.testing.assert_close(torch.stack(parts).mean(0), whole, rtol=1e-6, atol=1e-8)


@every_form
def test_padding_changes_nothing(form: str, chain: LogProb) -> None:
    """In the bound and its gradient, given the same draws; where the padded draws are large too."""
    batch = data()
    posterior = random_posterior(batch.x[0, :3] + 0.5, form)
    noise = draws(posterior, 4)
    wide = torch.nn.functional.pad
    assert batch.edges is not None
    padded = Batch(
        wide(batch.x, (0, 0, 0, 2), value=9.0),
        wide(batch.y, (0, 2), value=0),
        wide(batch.mask, (0, 2)),
        batch.index,
        edges=wide(batch.edges, (0, 0, 0, 2), value=9.0),
    )
    more = tuple(eps if eps.dim() == 2 else wide(eps, (0, 0, 0, 2), value=30.0) for eps in noise)
    parameters = list(posterior.parameters())
    answers = []
    for args in ((batch, noise), (padded, more)):
        elbo = bound_at(posterior, *args, chain).elbo
        answers.append([elbo, *torch.autograd.grad(elbo, parameters)])
    for one, other in zip(*answers, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_any_function_is_a_likelihood() -> None:
    """A bare callable that knows nothing of structures: Gaussian, so the answer is known."""
    batch = data()
    posterior = random_posterior(batch.x[0, :3] + 0.5)

    def log_prob(f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return -0.5 * (f.square() * mask[..., None]).sum((-1, -2)) + g.sum((-1, -2))[:, None]

    with torch.no_grad():
        bound = bound_at(posterior, batch, draws(posterior, 4000), log_prob)
        mean, covariance = posterior.node.gaussian(conditionals(posterior, batch)[0])
        second = mean.square().sum() + covariance.diagonal(dim1=-1, dim2=-2).sum()
        expected = -0.5 * second + B * posterior["next"].constant_scores()[0].sum()
    # Sequences share the table: errors may all go one way.
    error = float(bound.estimate.variance.value.sqrt().sum()) / 4000**0.5
    assert bound.expected_log_prob.item() == pytest.approx(expected.item(), abs=4 * error)


@pytest.mark.parametrize("form", ["one full", "two full"])
def test_a_silent_table(form: str, chain: LogProb) -> None:
    """No gradient, no nan, in either form of q(g)."""
    batch = data()
    posterior = random_posterior(batch.x[0, :3] + 0.5, form)
    table = posterior["next"]
    with torch.no_grad():
        table.log_amplitude.fill_(-torch.inf)
        table.m.zero_()
    noise = draws(posterior, 4)
    latent = latents(posterior, batch)
    assert (latent.place(noise)[1] == 0).all()
    at = latent.sensitivity(estimate_at(posterior, latent, batch, chain, noise).moments)
    assert (at.mean[1] == 0).all()
    assert (at.covariance[1] == 0).all()
    assert all(a.isfinite().all() for a in (*at.mean, *at.covariance))
    bound = bound_at(posterior, batch, noise, chain)
    named = {n: p for n, p in posterior.named_parameters() if "next.log_amplitude" not in n}
    found = torch.autograd.grad(bound.expected_log_prob, list(named.values()), allow_unused=True)
    for name, gradient in zip(named, found, strict=True):
        if ".next." in name:
            assert gradient is None or (gradient == 0).all()
        else:
            assert gradient.isfinite().all()


def test_a_sequence_of_nothing_but_padding(chain: LogProb) -> None:
    batch = data()
    posterior = random_posterior(batch.x[0, :3] + 0.5)
    noise = draws(posterior, 4)
    none = replace(batch, mask=batch.mask & torch.tensor([[True], [False], [True]]))
    with torch.no_grad():
        latent = latents(posterior, none)
        assert latent.parts[0].factor.isfinite().all()
        found = estimate_at(posterior, latent, none, chain, noise).moments
        whole = latents(posterior, batch)
        rest = estimate_at(posterior, whole, batch, chain, noise).moments
    assert found.value[1] == 0
    assert (found.slopes[0][1] == 0).all()
    torch.testing.assert_close(found.slopes[0][[0, 2]], rest.slopes[0][[0, 2]])


# -- finite differences --------------------------------------------------------------------------


def assert_gradient(parameter: Tensor, analytic: Tensor, value: Callable[[], Tensor]) -> None:
    numeric, h = torch.zeros_like(parameter), 1e-5
    with torch.no_grad():
        for place in np.ndindex(*parameter.shape):
            for sign in (1, -1):
                parameter[place] += sign * h
                numeric[place] += sign * value() / (2 * h)
                parameter[place] -= sign * h
    assert analytic.abs().max() > 1e-3
    torch.testing.assert_close(analytic, numeric, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("node.m", "one full"),
        ("node.m", "two diagonal"),
        ("next.m", "one full"),
        ("next.m", "two full"),
        ("next.m", "transitions with features"),
        ("next.factor", "one full"),
        ("next.log_amplitude", "one full"),
        ("node.weight_logits", "two full"),
    ],
)
def test_gradient_against_finite_differences(name: str, form: str, chain: LogProb) -> None:
    """With the draws held, in whatever moves them without turning them."""
    batch = data()
    posterior = random_posterior(batch.x[0, :3] + 0.5, form)
    with torch.no_grad():
        conditional = conditionals(posterior, batch)
    noise = draws(posterior, 4)

    def value() -> Tensor:
        return bound_at(posterior, batch, noise, chain, conditional, scale=1.7).elbo

    template, attribute = name.split(".")
    parameter = getattr(posterior[template], attribute)
    (analytic,) = torch.autograd.grad(value(), parameter)
    assert_gradient(parameter, analytic, value)


@pytest.mark.parametrize("name", ["factor", "log_amplitude", "kernel.raw_lengthscale"])
@pytest.mark.parametrize("form", ["one full", "two diagonal"])
def test_gradient_of_covariances_against_finite_differences(name: str, form: str) -> None:
    """One position per sequence: its covariance is a number, and all draws move with its root."""
    batch = data()
    short = Batch(batch.x[:, :1], batch.y[:, :1], batch.mask[:, :1], batch.index)
    posterior = random_posterior(short.x[0] + torch.tensor([[0.5], [-0.4], [1.3]]), form)
    noise = draws(posterior, 4, T=1)

    def value() -> Tensor:
        return bound_at(posterior, short, noise, Chain().log_prob).elbo

    parameter = dict(posterior.node.named_parameters())[name]
    (analytic,) = torch.autograd.grad(value(), parameter)
    assert_gradient(parameter, analytic, value)
    if name == "factor" and form == "one full":
        assert (analytic.triu(1) == 0).all()


def test_gradient_of_template_weights() -> None:
    # No two rows agree in everything: where nothing is left open, jitter is all there is to differentiate.
    rows = torch.cartesian_prod(*[torch.arange(3.0, dtype=torch.float64)] * 3)
    rows = rows[torch.randperm(27, generator=torch.Generator().manual_seed(4))]
    batch = data()
    short = Batch(rows[:B].reshape(B, 1, 3), batch.y[:, :1], batch.mask[:, :1], batch.index)
    node = Inducing(TemplateKernel(3, "product").double(), rows[B : B + 2], (V,))
    posterior = Posterior({"node": node, "next": Table((V, V))})
    with torch.no_grad():
        node.m += normal(V, 2, seed=5)
    noise = draws(posterior, 4, T=1)

    def value() -> Tensor:
        return bound_at(posterior, short, noise, Chain().log_prob).elbo

    raw = node.kernel.raw_weights
    (analytic,) = torch.autograd.grad(value(), raw)
    assert_gradient(raw, analytic, value)
