"""From standard normal numbers to scores, and from slope and bend back to the posterior's parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tests.inference.random_posteriors import (
    LENGTHS,
    B,
    T,
    V,
    data,
    draws,
    every_form,
    latents,
    normal,
    random_posterior,
)
from torch import Tensor

from structgp.data.batch import Batch
from structgp.gp import Posterior
from structgp.inference.estimators import Noise
from structgp.inference.latents import Latents, Sensitivity


def setting(form: str, grad: bool = False) -> tuple[Posterior, Latents, Batch]:
    batch = data()
    posterior = random_posterior(batch.x[0, :3] + 0.5, form)
    with torch.set_grad_enabled(grad):
        return posterior, latents(posterior, batch), batch


def blocks_of_examples(latent: Latents) -> list[int]:
    return [k for k, part in enumerate(latent.parts) if not part.block.shared]


def lengths(k: int) -> tuple[int, ...]:
    """Tuples of each example: tokens, or transitions."""
    return LENGTHS if k == 0 else tuple(n - 1 for n in LENGTHS)


def units(latent: Latents, k: int) -> tuple[Noise, list[tuple[int, int]]]:
    """Each number of block k 1 in turn, the same for all examples, all others 0; and which."""
    n, R = latent.groups[k].shape(1)[2:]
    places = [(t, r) for t in range(n) for r in range(R)]
    zero = [torch.zeros(len(places), *g.shape(1)[1:], dtype=torch.float64) for g in latent.groups]
    for s, (t, r) in enumerate(places):
        zero[k][s, :, t, r] = 1
    return tuple(zero), places


@every_form
def test_draws_are_joint_over_the_tuples_of_an_example(form: str) -> None:
    """Linear in the numbers: unit vectors show mean and covariance. Functions are independent, tuples are
    not, and what is drawn at padding reaches no real tuple."""
    posterior, latent, _ = setting(form)
    K = posterior.n_components
    for k in blocks_of_examples(latent):
        part = latent.parts[k]
        noise, places = units(latent, k)
        nothing = tuple(0 * eps for eps in noise)
        centre, moved = (latent.place(n)[k].flatten(3) for n in (nothing, noise))
        twice = latent.place(tuple(-2 * eps for eps in noise))[k].flatten(3)
        torch.testing.assert_close(centre[0], part.mean.flatten(0, 1))
        torch.testing.assert_close(twice - centre, -2 * (moved - centre))
        away = (moved - centre).unflatten(1, (K, B))
        between = 0.0
        for c in range(K):
            for b, n in enumerate(lengths(k)):
                found = torch.einsum("stv,suw->vtwu", *[away[:, c, b, :n]] * 2)
                for v in range(part.block.n_functions):
                    expected = part.covariance[c, b, v, :n, :n]
                    torch.testing.assert_close(found[v, :, v], expected, rtol=1e-6, atol=1e-6)
                    others = [w for w in range(part.block.n_functions) if w != v]
                    assert (found[v][:, others] == 0).all()
                    between = max(between, float(expected.tril(-1).abs().sum()))
                beyond = [s for s, (t, _) in enumerate(places) if t >= n]
                assert (away[beyond][:, c, b, :n] == 0).all()
        assert between > 0.02  # or tuples drawn one by one would pass


@every_form
def test_scores_of_all_blocks_are_placed(form: str) -> None:
    posterior, latent, _ = setting(form)
    noise = draws(posterior, 5)
    f, g = latent.place(noise)
    assert f.shape == (5, B * posterior.n_components, T, V)
    after = posterior["next"]
    if after.shared:
        here = after.conditional(None, None, after.prior_factor())
        away = (after.scale * here.spread(after.factor, noise[1])).detach().view(5, V, V)
        torch.testing.assert_close(g, after.constant_scores()[0] + away)
    else:
        assert g.shape == (5, B, T - 1, V, V)
    narrow = latent.place(tuple(eps.float() for eps in noise))
    assert {a.dtype for a in narrow} == {torch.float32}
    for one, other in zip(narrow, (f, g), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_draws_carry_no_gradient() -> None:
    """What a likelihood is differentiated in is the standard normal numbers."""
    posterior, latent, _ = setting("one full", grad=True)
    assert latent.parts[0].mean.requires_grad
    assert not any(a.requires_grad for a in latent.place(draws(posterior, 2)))


def random_sensitivity(latent: Latents, batch: Batch) -> Sensitivity:
    means, covariances = [], []
    for k, part in enumerate(latent.parts):
        mean, bend = normal(*part.mean.shape, seed=3 + k), normal(*part.covariance.shape, seed=k)
        if bend.dim() > 1:
            bend = bend + bend.mT
        if not part.block.shared:
            mask = batch.masks[k]
            mean = mean * mask[..., None]
            bend = bend * (mask[:, None, :, None] & mask[:, None, None, :])
        means.append(mean)
        covariances.append(bend)
    return Sensitivity(tuple(means), tuple(covariances))


@every_form
def test_sensitivity_and_moments_are_inverse(form: str) -> None:
    _, latent, batch = setting(form)
    at = random_sensitivity(latent, batch)
    moments = latent.moments(at)
    assert (moments.value == 0).all()
    again = latent.sensitivity(moments)
    torch.testing.assert_close(again.mean, at.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(again.covariance, at.covariance, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(latent.moments(again).entries, moments.entries, rtol=1e-6, atol=1e-6)


@every_form
def test_sensitivity_is_bonnets_and_prices(form: str) -> None:
    """grad_b = L^-T slope, grad_Sigma = L^-T bend L^-1 / 2, one example and function at a time."""
    posterior, latent, batch = setting(form)
    moments = latent.moments(random_sensitivity(latent, batch))
    at = latent.sensitivity(moments)
    for k in blocks_of_examples(latent):
        part = latent.parts[k]
        for c, v in np.ndindex(posterior.n_components, part.block.n_functions):
            for b, n in enumerate(lengths(k)):
                inverse = np.linalg.inv(part.factor[c, b, v, :n, :n].numpy())
                slope = moments.slopes[k][c * B + b, :n, v].numpy()
                bend = moments.bends[k][c * B + b, v, :n, :n].numpy()
                np.testing.assert_allclose(at.mean[k][c, b, :n, v], inverse.T @ slope, rtol=1e-6, atol=1e-9)
                found = at.covariance[k][c, b, v, :n, :n]
                expected = 0.5 * inverse.T @ bend @ inverse
                np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
    if posterior["next"].shared:
        factor = latent.parts[1].factor
        full = factor if factor.dim() == 2 else factor.diag()
        inverse = np.linalg.inv(full.numpy())
        slope = inverse.T @ moments.slopes[1].numpy()
        np.testing.assert_allclose(at.mean[1], slope, rtol=1e-8)
        bend = moments.bends[1] if factor.dim() == 2 else moments.bends[1].diag()
        expected = 0.5 * inverse.T @ bend.numpy() @ inverse
        expected = expected if factor.dim() == 2 else np.diag(expected)
        np.testing.assert_allclose(at.covariance[1], expected, rtol=1e-8)


def quadratic_expectation(latent: Latents, r: Any, bend: Any) -> Tensor:
    """(K, B) E[r^T h - h^T Lambda h / 2] of all blocks; what is of a table, in equal shares."""
    total: Any = 0
    for part, a, Lambda in zip(latent.parts, r, bend, strict=True):
        mean, S = part.mean, part.covariance
        if part.block.shared:
            whole = Lambda if Lambda.dim() == 2 else Lambda.diag()
            bent = mean @ whole @ mean + (Lambda * S).sum()
            total = total + ((a * mean).sum() - 0.5 * bent) / B
        else:
            square = torch.einsum("kbtv,bvtu,kbuv->kb", mean, Lambda, mean)
            bent = square + (Lambda * S).sum((-1, -2, -3))
            total = total + (a * mean).sum((-1, -2)) - 0.5 * bent
    return total


@every_form
def test_expand_is_right_to_first_order(form: str) -> None:
    """For E[r^T h - h^T Lambda h / 2] of every block, a closed form in mean and covariance: value and
    gradient in every parameter; weights, amplitudes and kernels included."""
    posterior, latent, batch = setting(form, grad=True)
    r, bend = [], []
    for k, part in enumerate(latent.parts):
        root = normal(*part.covariance.shape[-4:], seed=6 + k)
        if part.block.shared:
            r.append(normal(V * V, seed=5))
            bend.append(root @ root.T if root.dim() == 2 else root.abs())
        else:
            mask = batch.masks[k]
            r.append(normal(*part.mean.shape[1:], seed=5 + k) * mask[..., None])
            both = mask[:, None, :, None] & mask[:, None, None, :]
            bend.append((root @ root.mT) * both)
    each = quadratic_expectation(latent, r, bend)
    exact = (posterior.mixing @ each).sum()
    means = [part.mean for part in latent.parts]
    slopes = torch.autograd.grad(each.sum(), means, retain_graph=True)
    # What is shared is counted once, and not once per component.
    shares = [1 / len(each) if part.block.shared else 1.0 for part in latent.parts]
    at = Sensitivity(
        tuple(share * slope for share, slope in zip(shares, slopes, strict=True)),
        tuple(
            (-0.5 * Lambda).expand_as(part.covariance)
            for Lambda, part in zip(bend, latent.parts, strict=True)
        ),
    )
    with torch.no_grad():
        moments = replace(latent.moments(at), value=each.flatten().detach())
    total = latent.expand(moments, posterior.mixing)
    torch.testing.assert_close(total, exact)
    named = dict(posterior.named_parameters())
    found = torch.autograd.grad(total, list(named.values()), retain_graph=True)
    wanted = torch.autograd.grad(exact, list(named.values()))
    for name, one, other in zip(named, found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)
        assert other.abs().max() > 1e-2, name


def test_the_derivative_in_a_weight() -> None:
    """pi_k times (what component k expects less what all expect), summed over sequences."""
    posterior, latent, batch = setting("two full", grad=True)
    values = normal(2 * B, seed=9)
    moments = replace(latent.moments(random_sensitivity(latent, batch)), value=values)
    total = latent.expand(moments, posterior.mixing)
    (found,) = torch.autograd.grad(total, posterior.node.weight_logits)
    mixing, each = posterior.mixing.detach(), values.reshape(2, B).sum(-1)
    torch.testing.assert_close(total.detach(), mixing @ each)
    torch.testing.assert_close(found, mixing * (each - mixing @ each))
