"""A quadratic likelihood is its own sites; any other has sites with its sensitivities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel
from torch import Tensor

from structgp.gp import Posterior
from structgp.inference.bound import Latents, Sensitivity, latents
from structgp.inference.sites import Sites

B, T, V = 3, 3, 2
MASK = torch.arange(T) < torch.tensor([[3], [1], [2]])

FORMS: dict[str, dict[str, Any]] = {
    "one full": {},
    "two diagonal": {
        "n_components": 2,
        "covariance": "diagonal",
        "pairwise_covariance": "full",
    },
}

every_form = pytest.mark.parametrize("form", FORMS)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def latents_of(form: str, seed: int = 0) -> Latents:
    posterior = Posterior(RBFKernel().double(), normal(2, 1, seed=90), V, **FORMS[form])
    with torch.no_grad():
        for i, p in enumerate(posterior.parameters()):
            p += 0.4 * normal(*p.shape, seed=100 * seed + i)
        x = 2 * normal(B, T, 1, seed=91)
        return latents(posterior, posterior.conditional(x, MASK), MASK)


def quadratic(latent: Latents) -> Sites:
    """r^T f - f^T Lambda f / 2 for each label, and the same in g; nothing at padding."""
    K = len(latent.mean)
    both = MASK[:, None, :, None] & MASK[:, None, None, :]
    precision, pairs = normal(K, B, V, T, T, seed=50), normal(V * V, V * V, seed=51)
    full = latent.pairs.is_full
    return Sites(
        normal(K, B, T, V, seed=52) * MASK[..., None],
        (precision @ precision.mT) * both,
        normal(V, V, seed=53),
        pairs @ pairs.T if full else pairs.diagonal().abs().reshape(V, V),
    )


def expectation(sites: Sites, mean: Tensor, covariance: Tensor, g: Tensor, S: Tensor) -> Tensor:
    """E[r^T f - f^T Lambda f / 2] in closed form, the pairwise part included."""
    square = torch.einsum("kbtv,kbvtu,kbuv->", mean, sites.precision, mean)
    unary = (sites.linear * mean).sum() - 0.5 * (square + (sites.precision * covariance).sum())
    flat, Lambda = g.flatten(), sites.pair_precision
    bent = flat @ Lambda @ flat if Lambda.shape != g.shape else (Lambda * g.square()).sum()
    return unary + (sites.pair_linear * g).sum() - 0.5 * (bent + (Lambda * S).sum())


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(vars(one).values(), vars(other).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@every_form
def test_sensitivity_is_the_gradient_of_the_expectation(form: str) -> None:
    latent = latents_of(form)
    sites = quadratic(latent)
    pairs = latent.pairs
    point = [latent.mean, latent.covariance, pairs.mean, pairs.covariance]
    point = [a.detach().clone().requires_grad_() for a in point]
    gradient = torch.autograd.grad(expectation(sites, *point), point)
    assert_same(sites.sensitivity(latent), Sensitivity(*gradient))


@every_form
def test_a_quadratic_likelihood_is_recovered_from_anywhere(form: str) -> None:
    """From its sensitivities under one posterior; and under another one they are the same sites."""
    here, there = latents_of(form), latents_of(form, seed=7)
    sites = quadratic(here)
    for latent in (here, there):
        assert_same(Sites.of(latent, sites.sensitivity(latent)), sites)
        through = latent.sensitivity(latent.moments(sites.sensitivity(latent)))
        for a, b in zip(
            vars(Sites.of(latent, through)).values(), vars(sites).values(), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@every_form
def test_sites_have_the_sensitivities_they_were_made_of(form: str) -> None:
    latent = latents_of(form)
    K = len(latent.mean)
    bend = normal(K, B, V, T, T, seed=60)
    pairs = normal(V * V, V * V, seed=61)
    at = Sensitivity(
        normal(K, B, T, V, seed=62),
        bend + bend.mT,
        normal(V, V, seed=63),
        pairs + pairs.T if latent.pairs.is_full else normal(V, V, seed=64),
    )
    assert_same(Sites.of(latent, at).sensitivity(latent), at)


@every_form
def test_towards(form: str) -> None:
    latent = latents_of(form)
    one = quadratic(latent)
    other = Sites(*(a + normal(*a.shape, seed=70) for a in vars(one).values()))
    assert_same(one.towards(other, 0.0), one)
    assert_same(one.towards(other, 1.0), other)
    between = one.towards(other, 0.3)
    for a, b, c in zip(*(vars(s).values() for s in (one, other, between)), strict=True):
        torch.testing.assert_close(c, 0.7 * a + 0.3 * b)


@every_form
def test_sites_carry_no_graph(form: str) -> None:
    """They are kept for as long as training lasts."""
    posterior = Posterior(RBFKernel().double(), normal(2, 1, seed=90), V, **FORMS[form])
    latent = latents(posterior, posterior.conditional(normal(B, T, 1, seed=91), MASK), MASK)
    assert latent.mean.requires_grad
    sites = Sites.of(latent, quadratic(latent).sensitivity(latent))
    assert not any(a.requires_grad for a in vars(sites).values())
    assert not any(a.requires_grad for a in vars(sites.sensitivity(latent)).values())
