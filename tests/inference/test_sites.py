"""A quadratic likelihood is its own sites; any other has sites with its sensitivities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel
from torch import Tensor

from structgp.gp import FullTable, Inducing, Mixture, Posterior, Table
from structgp.inference.latents import Latents, Sensitivity, Sites

B, T, V = 3, 3, 2
MASK = torch.arange(T) < torch.tensor([[3], [1], [2]])
MASKS = MASK, MASK[:, 1:]

every_form = pytest.mark.parametrize("form", ["one full", "two diagonal", "transitions with features"])


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def posterior_of(form: str) -> Posterior:
    Z = normal(2, 1, seed=90)
    if form == "two diagonal":
        node: Any = Mixture(RBFKernel().double(), Z, (V,), n_components=2, covariance="diagonal")
        return Posterior({"node": node, "next": FullTable((V, V))})
    node = Inducing(RBFKernel().double(), Z, (V,))
    featured = form == "transitions with features"
    after = Inducing(RBFKernel().double(), Z, (V, V)) if featured else Table((V, V))
    return Posterior({"node": node, "next": after})


def latents_of(form: str, seed: int = 0, grad: bool = False) -> Latents:
    posterior = posterior_of(form)
    with torch.set_grad_enabled(grad):
        with torch.no_grad():
            for i, p in enumerate(posterior.parameters()):
                p += 0.4 * normal(*p.shape, seed=100 * seed + i)
        rows = 2 * normal(B, T, 1, seed=91), 2 * normal(B, T - 1, 1, seed=92)
        conditionals = [
            block.conditional(x, mask, block.prior_factor())
            for block, x, mask in zip(posterior.blocks, rows, MASKS, strict=True)
        ]
        return Latents.of(posterior, conditionals, MASKS)


def quadratic(latent: Latents) -> Sites:
    """r^T h - h^T Lambda h / 2 for each function of each block; nothing at padding."""
    linear, precision = [], []
    for k, (mean, part) in enumerate(zip(latent.means, latent.parts, strict=True)):
        r, root = normal(*mean.shape, seed=52 + k), normal(*part.covariance.shape, seed=50 + k)
        if mean.dim() == 1:
            Lambda = root.abs() if root.dim() == 1 else root @ root.T
        else:
            mask = MASKS[k]
            Lambda = (root @ root.mT) * (mask[:, None, :, None] & mask[:, None, None, :])
            r = r * mask[..., None]
        linear.append(r)
        precision.append(Lambda)
    return Sites(tuple(linear), tuple(precision))


def expectation(sites: Sites, means: list[Tensor], covariances: list[Tensor]) -> Tensor:
    """sum_b E[r^T h - h^T Lambda h / 2] in closed form."""
    total = means[0].new_zeros(())
    for r, Lambda, mean, S in zip(sites.linear, sites.precision, means, covariances, strict=True):
        if mean.dim() > 1:
            bent = torch.einsum("kbtv,kbvtu,kbuv->", mean, Lambda, mean)
        else:
            bent = mean @ (Lambda if Lambda.dim() == 2 else Lambda.diag()) @ mean
        total = total + (r * mean).sum() - 0.5 * (bent + (Lambda * S).sum())
    return total


def entries(one: Sites | Sensitivity) -> list[Tensor]:
    return [a for group in vars(one).values() for a in group]


def assert_same(one: Any, other: Any, tolerance: float = 1e-9) -> None:
    for a, b in zip(entries(one), entries(other), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@every_form
def test_sensitivity_is_the_gradient_of_the_expectation(form: str) -> None:
    latent = latents_of(form)
    sites = quadratic(latent)
    means = [m.clone().requires_grad_() for m in latent.means]
    covariances = [part.covariance.clone().requires_grad_() for part in latent.parts]
    gradient = torch.autograd.grad(expectation(sites, means, covariances), means + covariances)
    expected = Sensitivity(tuple(gradient[: len(means)]), tuple(gradient[len(means) :]))
    assert_same(sites.sensitivity(latent), expected)


@every_form
def test_a_quadratic_likelihood_is_recovered_from_anywhere(form: str) -> None:
    """From its sensitivities under one posterior; and under another one they are the same sites."""
    here, there = latents_of(form), latents_of(form, seed=7)
    sites = quadratic(here)
    for latent in (here, there):
        assert_same(Sites.of(latent, sites.sensitivity(latent)), sites)
        through = latent.sensitivity(latent.moments(sites.sensitivity(latent)))
        assert_same(Sites.of(latent, through), sites, 1e-6)


@every_form
def test_sites_have_the_sensitivities_they_were_made_of(form: str) -> None:
    latent = latents_of(form)
    covariances = [normal(*part.covariance.shape, seed=60) for part in latent.parts]
    at = Sensitivity(
        tuple(normal(*m.shape, seed=62) for m in latent.means),
        tuple(c if c.dim() == 1 else c + c.mT for c in covariances),
    )
    assert_same(Sites.of(latent, at).sensitivity(latent), at)


@every_form
def test_towards(form: str) -> None:
    one = quadratic(latents_of(form))
    other = one.map(lambda a: a + normal(*a.shape, seed=70))
    assert_same(one.towards(other, 0.0), one)
    assert_same(one.towards(other, 1.0), other)
    assert_same(one.towards(other, 0.3), one.map(lambda a, b: 0.7 * a + 0.3 * b, other))


@every_form
def test_sites_carry_no_graph(form: str) -> None:
    """They are kept for as long as training lasts."""
    latent = latents_of(form, grad=True)
    assert latent.parts[0].mean.requires_grad
    sites = Sites.of(latent, quadratic(latent).sensitivity(latent))
    assert not any(a.requires_grad for a in entries(sites))
    assert not any(a.requires_grad for a in entries(sites.sensitivity(latent)))
