"""Bounds on the entropy of a mixture: against sampling, in the cases where they are known, and the
paper's gradients of its own bound.

Of the supplement's gradients all six are right as printed, those of the weights too if the weights
are taken as free numbers (nothing in them keeps the sum at 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, Independent, MixtureSameFamily, MultivariateNormal, Normal

from structgp.gp.divergences import (
    cross_entropy,
    entropy_bhattacharyya,
    entropy_gaussian,
    entropy_jensen,
    kl_whitened,
)

Mixture = tuple[Tensor, Tensor, Tensor]
Bound = Callable[[Tensor, Tensor, Tensor], Tensor]
BOUNDS: dict[str, Bound] = {"jensen": entropy_jensen, "bhattacharyya": entropy_bhattacharyya}
FORMS = ["full", "diagonal"]

every_bound = pytest.mark.parametrize("bound", BOUNDS.values(), ids=BOUNDS)
every_form = pytest.mark.parametrize("form", FORMS)


def mixture(K: int, V: int, M: int, form: str, seed: int = 0, apart: float = 1.0) -> Mixture:
    """log_weights, mean, factor; diagonal entries of either sign."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sd = (0.3 + normal(K, V, M).abs()) * normal(K, V, M).sign()
    factor = sd if form == "diagonal" else torch.diag_embed(sd) + 0.5 * normal(K, V, M, M).tril(-1)
    return normal(K).log_softmax(0), apart * normal(K, V, M), factor


def covariances(mean: Tensor, factor: Tensor) -> Tensor:
    """(K, V, M, M)."""
    lower = torch.diag_embed(factor) if factor.dim() == mean.dim() else factor
    return lower @ lower.mT


def distribution(log_weights: Tensor, mean: Tensor, factor: Tensor) -> MixtureSameFamily:
    parts = MultivariateNormal(mean, covariance_matrix=covariances(mean, factor))
    return MixtureSameFamily(Categorical(logits=log_weights), Independent(parts, 1))


def sampled(q: MixtureSameFamily, value: Callable[[Tensor], Tensor], n: int, seed: int) -> Tensor:
    """Mean and standard error of ``value`` over n draws."""
    torch.manual_seed(seed)
    values = value(q.sample((n,)))
    return torch.stack([values.mean(), values.std() / n**0.5])


def entropy(parts: Mixture, n: int, seed: int) -> Tensor:
    q = distribution(*parts)
    return sampled(q, lambda v: -q.log_prob(v), n, seed)


# -- exact parts -----------------------------------------------------------------------------------


@every_form
def test_entropy_of_each_component(form: str) -> None:
    _, mean, factor = mixture(3, 2, 4, form)
    expected = MultivariateNormal(mean, covariance_matrix=covariances(mean, factor)).entropy()
    torch.testing.assert_close(entropy_gaussian(mean, factor), expected.sum(-1))


@every_form
def test_cross_entropy_against_sampling(form: str) -> None:
    parts = mixture(3, 2, 3, form)
    prior = Normal(torch.zeros((), dtype=torch.float64), 1.0)
    value, error = sampled(
        distribution(*parts), lambda v: -prior.log_prob(v).sum((-1, -2)), 100_000, seed=0
    )
    assert (cross_entropy(*parts) - value).abs() < 4 * error
    assert error < 0.02 * value


@every_form
def test_one_component_makes_the_exact_divergence(form: str) -> None:
    log_weights, mean, factor = mixture(1, 3, 4, form)
    exact = kl_whitened(mean, factor)
    found = cross_entropy(log_weights, mean, factor) - entropy_gaussian(mean, factor).sum()
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=0)


# -- against sampling ------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("apart", [0.3, 1.0, 4.0])
def test_bounds_are_below_the_entropy_and_near_it(form: str, apart: float) -> None:
    """100,000 draws. Jensen's is within a third of a nat a dimension, the other within half of that."""
    K, V, M = 3, 2, 2
    parts = mixture(K, V, M, form, seed=2, apart=apart)
    value, error = entropy(parts, 100_000, seed=1)
    assert error < 0.01
    jensen, other = entropy_jensen(*parts), entropy_bhattacharyya(*parts)
    assert value - V * M / 3 < jensen < value + 4 * error
    assert value - V * M / 6 < other < value + 4 * error


@settings(max_examples=60, deadline=None)
@given(
    K=st.integers(1, 3),
    V=st.integers(1, 3),
    M=st.integers(1, 3),
    form=st.sampled_from(FORMS),
    apart=st.floats(0, 5),
    seed=st.integers(0, 10_000),
)
def test_bounds_hold_for_any_mixture(K: int, V: int, M: int, form: str, apart: float, seed: int) -> None:
    """2,000 draws: below the sampled entropy plus five standard errors, since many are tried. And
    between what the components have and what choosing among them can add."""
    parts = mixture(K, V, M, form, seed, apart)
    log_weights, mean, factor = parts
    value, error = entropy(parts, 2000, seed)
    jensen, other = entropy_jensen(*parts), entropy_bhattacharyya(*parts)
    assert jensen < value + 5 * error
    assert other < value + 5 * error + 1e-9
    inside = (log_weights.exp() * entropy_gaussian(mean, factor)).sum()
    choice = -(log_weights.exp() * log_weights).sum()
    assert inside - 1e-9 <= other <= inside + choice + 1e-9


def test_which_bound_is_the_better_one() -> None:
    """Two components of width 1, equally likely, in n dimensions: the difference is
    n (1 - log 2) / 2 - log((1 + a) / (1 + a^2)) with a = exp(-distance^2 / 8), least where a is
    sqrt 2 - 1. So Jensen's bound can be the better one for n = 1, by 0.035, and never for n > 1."""
    a = math.sqrt(2) - 1
    distance = math.sqrt(-8 * math.log(a))
    half = torch.full((2,), math.log(0.5), dtype=torch.float64)
    for n in (1, 2, 4):
        mean = torch.zeros(2, 1, n, dtype=torch.float64)
        mean[1, 0, 0] = distance
        parts = half, mean, torch.ones_like(mean)
        found = float(entropy_bhattacharyya(*parts) - entropy_jensen(*parts))
        expected = 0.5 * n * (1 - math.log(2)) - math.log((1 + a) / (1 + a**2))
        assert found == pytest.approx(expected, abs=1e-12)
        assert (found < 0) == (n == 1)


# -- known cases -----------------------------------------------------------------------------------


@every_form
def test_one_component(form: str) -> None:
    """Jensen's bound is loose by (1 - log 2) / 2 = 0.153 a dimension; the other is exact."""
    V, M = 3, 4
    parts = mixture(1, V, M, form)
    (exact,) = entropy_gaussian(*parts[1:])
    loose = 0.5 * (1 - math.log(2)) * V * M
    assert loose == pytest.approx(0.153 * V * M, rel=0.01)
    torch.testing.assert_close(entropy_jensen(*parts), exact - loose, rtol=1e-13, atol=0)
    torch.testing.assert_close(entropy_bhattacharyya(*parts), exact, rtol=1e-14, atol=0)


@every_bound
@every_form
@pytest.mark.parametrize("K", [2, 3])
def test_equal_copies_are_one_component(bound: Bound, form: str, K: int) -> None:
    """Whatever their weights; with gradients that are finite and add up to those of the one."""
    _, mean, factor = mixture(1, 2, 4, form)
    log_weights = mixture(K, 1, 1, form, seed=5)[0]
    one = [x.clone().requires_grad_() for x in (mean, factor)]
    copies = [x.expand(K, *x.shape[1:]).clone().requires_grad_() for x in (mean, factor)]
    alone, together = bound(torch.zeros(1).double(), *one), bound(log_weights, *copies)
    torch.testing.assert_close(together, alone, rtol=1e-14, atol=1e-14)
    # A mean alone has no bearing on the entropy, nor a place in the graph.
    expected = torch.autograd.grad(alone, one, materialize_grads=True)
    for copied, single in zip(torch.autograd.grad(together, copies), expected, strict=True):
        assert copied.isfinite().all()
        total = copied.sum(0, keepdim=True)
        total = total.tril() if total.dim() == 4 else total  # what is above it is no parameter
        torch.testing.assert_close(total, single, rtol=1e-12, atol=1e-13)


@every_form
def test_far_apart_components_add_their_choice(form: str) -> None:
    K = 3
    _, mean, factor = mixture(K, 2, 3, form)
    log_weights = torch.full((K,), -math.log(K), dtype=torch.float64)
    mean = mean + 1000 * torch.arange(K, dtype=torch.float64)[:, None, None]
    inside = entropy_gaussian(mean, factor).mean()
    found = entropy_bhattacharyya(log_weights, mean, factor)
    torch.testing.assert_close(found, inside + math.log(K), rtol=1e-13, atol=0)


@every_bound
def test_diagonal_is_a_special_full(bound: Bound) -> None:
    log_weights, mean, sd = mixture(3, 2, 3, "diagonal")
    full = bound(log_weights, mean, torch.diag_embed(sd))
    torch.testing.assert_close(bound(log_weights, mean, sd), full, rtol=1e-13, atol=0)


@every_bound
@every_form
def test_the_order_of_components_does_not_matter(bound: Bound, form: str) -> None:
    """Widths that differ by a factor of a million: the pair is looked at from one side only."""
    log_weights, mean, factor = mixture(3, 2, 3, form)
    factor = factor * torch.tensor([1e-3, 1.0, 1e3]).double().view(3, *[1] * (factor.dim() - 1))
    value = bound(log_weights, mean, factor)
    assert value.isfinite()
    for order in ([1, 2, 0], [2, 1, 0]):
        other = bound(log_weights[order], mean[order], factor[order])
        torch.testing.assert_close(other, value, rtol=1e-10, atol=0)


@every_bound
@every_form
def test_a_component_of_no_weight_does_not_count(bound: Bound, form: str) -> None:
    _, mean, factor = mixture(3, 2, 3, form)
    faded = torch.tensor([0.0, 0.5, -800.0], dtype=torch.float64).log_softmax(0)
    value = bound(faded, mean, factor)
    torch.testing.assert_close(value, bound(faded[:2], mean[:2], factor[:2]), rtol=1e-13, atol=0)


@every_bound
@every_form
def test_gradients(bound: Bound, form: str) -> None:
    parts = tuple(x.requires_grad_() for x in mixture(3, 2, 3, form))
    assert torch.autograd.gradcheck(bound, parts)
    assert torch.autograd.gradcheck(cross_entropy, parts)


# -- the paper's gradients -------------------------------------------------------------------------


def test_the_papers_gradients_of_the_entropy_bound() -> None:
    """``eq:grad-ent-init`` to ``eq:grad-ent-end``, written out over all V M dimensions at once."""
    K, V, M = 3, 2, 2
    log_weights, mean, factor = mixture(K, V, M, "full", seed=4)
    pi = log_weights.exp().requires_grad_()
    S = covariances(mean, factor).requires_grad_()
    mean.requires_grad_()
    value = entropy_jensen(pi.log(), mean, torch.linalg.cholesky(S))
    grad_mean, grad_S, grad_pi = torch.autograd.grad(value, (mean, S, pi))

    n = V * M
    weight, m = pi.detach().numpy(), mean.detach().numpy().reshape(K, n)
    blocks = np.zeros((K, n, n))
    for k in range(K):
        for j in range(V):
            here = slice(j * M, (j + 1) * M)
            blocks[k, here, here] = S[k, j].detach().numpy()
    N, inverse = np.zeros((K, K)), np.zeros((K, K, n, n))
    for k in range(K):
        for l in range(K):
            C = blocks[k] + blocks[l]
            inverse[k, l] = np.linalg.inv(C)
            away = m[k] - m[l]
            log_det = np.linalg.slogdet(C)[1]
            log_density = -0.5 * (n * np.log(2 * np.pi) + log_det + away @ inverse[k, l] @ away)
            N[k, l] = np.exp(log_density)
    z = N @ weight
    for k in range(K):
        by_mean, by_S, by_pi = np.zeros(n), np.zeros((n, n)), -np.log(z[k])
        for l in range(K):
            away = m[k] - m[l]
            share = weight[k] * weight[l] * (N[k, l] / z[k] + N[k, l] / z[l])
            by_mean += share * inverse[k, l] @ away
            bent = inverse[k, l] @ np.outer(away, away) @ inverse[k, l]
            by_S += 0.5 * share * (inverse[k, l] - bent)
            by_pi -= weight[l] * N[k, l] / z[l]
        np.testing.assert_allclose(grad_mean[k].reshape(-1), by_mean, rtol=1e-10, atol=1e-12)
        for j in range(V):
            here = slice(j * M, (j + 1) * M)
            # Autograd of a Cholesky factor spreads the gradient over both triangles alike.
            np.testing.assert_allclose(grad_S[k, j], by_S[here, here], rtol=1e-10, atol=1e-12)
        assert float(grad_pi[k]) == pytest.approx(by_pi, rel=1e-10)


def test_the_papers_gradients_of_the_cross_term() -> None:
    """Of ``crossterm`` in whitened coordinates, where K_zz is the identity."""
    K, V, M = 3, 2, 3
    log_weights, mean, factor = mixture(K, V, M, "full", seed=4)
    pi = log_weights.exp().requires_grad_()
    S = covariances(mean, factor).requires_grad_()
    mean.requires_grad_()
    value = -cross_entropy(pi.log(), mean, torch.linalg.cholesky(S))
    grad_mean, grad_S, grad_pi = torch.autograd.grad(value, (mean, S, pi))
    weight = pi.detach()[:, None, None]
    torch.testing.assert_close(grad_mean, -weight * mean.detach())
    eye = torch.eye(M, dtype=torch.float64)
    torch.testing.assert_close(grad_S, (-0.5 * weight[..., None] * eye).expand(K, V, M, M))
    square = mean.square().sum((-1, -2)) + S.diagonal(dim1=-1, dim2=-2).sum((-1, -2))
    torch.testing.assert_close(grad_pi, -0.5 * (V * M * math.log(2 * math.pi) + square))
