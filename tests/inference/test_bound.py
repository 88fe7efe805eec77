"""The bound against a full Gaussian process written out densely, against closed forms, and against
finite differences."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel
from torch import Tensor

from structgp.gp import Conditional, Posterior
from structgp.gp.kernels import TemplateKernel
from structgp.inference.bound import Bound, Latents, Sensitivity, evidence_lower_bound, latents
from structgp.inference.estimators import Draws, Estimate, Moments, Target
from structgp.inference.estimators.moments import path_moments
from structgp.structures import Chain

LENGTHS = (3, 1, 4)
B, T, V, W = 3, 4, 2, 2
N = sum(LENGTHS)
PAIRWISE_SD = 0.7

LogProb = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

FORMS: dict[str, dict[str, Any]] = {
    "one full": {},
    "one diagonal": {"covariance": "diagonal", "pairwise_covariance": "full"},
    "two full": {"n_components": 2, "pairwise_covariance": "full"},
    "two diagonal": {"n_components": 2, "covariance": "diagonal"},
}

every_form = pytest.mark.parametrize("form", FORMS)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def data() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(B, T, W, generator=generator, dtype=torch.float64)
    y = torch.randint(V, (B, T), generator=generator)
    return x, y, torch.arange(T) < torch.tensor(LENGTHS)[:, None]


def random_posterior(inducing: Tensor, form: str = "one full") -> Posterior:
    kernel = RBFKernel().double()
    kernel.lengthscale = torch.tensor(1.0, dtype=torch.float64)
    posterior = Posterior(kernel, inducing, V, pairwise_sd=PAIRWISE_SD, **FORMS[form])
    with torch.no_grad():
        for i, (name, p) in enumerate(posterior.named_parameters()):
            if not name.startswith(("kernel", "log_")):
                p += 0.4 * normal(*p.shape, seed=10 + i)
    return posterior


def draws(S: int, B: int = B, T: int = T, seed: int = 2) -> Draws:
    return Draws(normal(S, B, T, V, seed=seed), normal(S, V, V, seed=seed + 100))


def estimate_at(
    posterior: Posterior, latent: Latents, log_prob: LogProb, y: Tensor, numbers: Draws
) -> Estimate:
    """Pathwise, at draws that are given: numbers (S, K B, T, V)."""
    K = posterior.n_components
    mask = latent.mask.repeat(K, 1)

    def function(unary: Tensor, pairwise: Tensor) -> Tensor:
        return log_prob(*latent.place(unary, pairwise), y.repeat(K, 1), mask)

    weight = posterior.weights.detach().repeat_interleave(len(y))
    target = Target(function, mask, weight, V, posterior.pairs_are_full)
    moments, values = path_moments(target, numbers, function)
    return Estimate(moments, moments * 0.0, values.std(0, correction=0), values.numel())


def bound_at(
    posterior: Posterior,
    conditional: Conditional,
    y: Tensor,
    mask: Tensor,
    numbers: Draws,
    log_prob: LogProb | None = None,
    **options: Any,
) -> Bound:
    latent = latents(posterior, conditional, mask)
    chosen = log_prob or Chain().log_prob
    estimate = estimate_at(posterior, latent, chosen, y, numbers)
    return evidence_lower_bound(posterior, latent, estimate, **options)


def detached(conditional: Conditional) -> Conditional:
    return Conditional(conditional.projection.detach(), conditional.residual.detach())


# -- the bound -------------------------------------------------------------------------------------


def log_normal_ratio(mean: np.ndarray, cov: np.ndarray, prior: np.ndarray) -> float:
    """KL(N(mean, cov) || N(0, prior)) in all dimensions."""
    inverse = np.linalg.inv(prior)
    log_det = np.linalg.slogdet(prior)[1] - np.linalg.slogdet(cov)[1]
    return 0.5 * (np.trace(inverse @ cov) + mean @ inverse @ mean - len(mean) + log_det)


def test_inducing_at_x_is_the_full_gaussian_process(oracles: ModuleType) -> None:
    """Section 3's bound, from its definition: q(f_j) = N(b_j, Sigma_j) over all N tokens of the
    data, p(f_j) = N(0, K), and every probability by enumeration of labellings."""
    x, y, mask = data()
    rows = x[mask]
    posterior = random_posterior(rows)
    S = 16
    numbers = draws(S)
    with torch.no_grad():
        bound = bound_at(posterior, posterior.conditional(x, mask), y, mask, numbers)

    points = rows.numpy()
    K = np.exp(-0.5 * ((points[:, None] - points[None]) ** 2).sum(-1))
    L = np.linalg.cholesky(K)
    b = np.stack([L @ m for m in posterior.m[0].detach().numpy()])
    root = np.stack([L @ np.tril(factor) for factor in posterior.factor[0].detach().numpy()])
    covariance = root @ root.transpose(0, 2, 1)
    kl = sum(log_normal_ratio(b[j], covariance[j], K) for j in range(V))
    assert bound.kl_inducing.item() == pytest.approx(kl, rel=1e-6)

    pair_mean = posterior.pair_mean.detach().numpy()
    pair_sd = np.exp(posterior.pair_log_sd.detach().numpy())
    eye = np.eye(V * V)
    kl_pairwise = log_normal_ratio(
        pair_mean.ravel(), np.diag(pair_sd.ravel() ** 2), PAIRWISE_SD**2 * eye
    )
    assert bound.kl_pairwise.item() == pytest.approx(kl_pairwise, rel=1e-10)

    expected = 0.0
    starts = np.cumsum((0, *LENGTHS))
    for n in range(B):
        here = slice(starts[n], starts[n + 1])
        spread = [np.linalg.cholesky(covariance[j][here, here]) for j in range(V)]
        for s in range(S):
            e = numbers.unary[s, n, : LENGTHS[n]].numpy()
            f = np.stack([b[j][here] + spread[j] @ e[:, j] for j in range(V)], -1)
            table = oracles.chain_table(f, pair_mean + pair_sd * numbers.pairwise[s].numpy())
            labels = y[n, : LENGTHS[n]].numpy()
            (place,) = np.flatnonzero((table.labels == labels).all(-1))
            expected += float(table.score[place] - table.log_z) / S
    assert bound.expected_log_prob.item() == pytest.approx(expected, rel=1e-5)
    assert bound.elbo.item() == pytest.approx(expected - kl - kl_pairwise, rel=1e-5)


def test_never_above_the_evidence(oracles: ModuleType) -> None:
    """One token, two labels: log p(y) = log(1/2) by symmetry, and q = p is the best below it."""
    x = torch.zeros(1, 1, W, dtype=torch.float64)
    y, mask = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
    numbers = draws(4000, B=1, T=1, seed=3)
    mirrored = Draws(
        torch.cat([numbers.unary, -numbers.unary]), torch.cat([numbers.pairwise, -numbers.pairwise])
    )
    for mean, sd in [(0.0, 1.0), (0.2, 0.9), (1.0, 0.3)]:
        posterior = Posterior(RBFKernel().double(), x[0], V)
        with torch.no_grad():
            posterior.m.copy_(torch.tensor([[[mean], [-mean]]]))
            posterior.factor.fill_(sd)
            bound = bound_at(posterior, posterior.conditional(x, mask), y, mask, mirrored)
            exact = oracles.expected_log_prob(posterior, x, y, mask).sum()
        assert bound.elbo < np.log(0.5)
        assert bound.expected_log_prob.item() == pytest.approx(exact.item(), abs=0.03)


@every_form
def test_scale_is_a_factor_on_the_data(form: str) -> None:
    x, y, mask = data()
    posterior = random_posterior(x[0, :3] + 0.5, form)
    conditional = posterior.conditional(x, mask)
    numbers = draws(4, B=B * posterior.n_components)
    with torch.no_grad():
        one = bound_at(posterior, conditional, y, mask, numbers)
        other = bound_at(posterior, conditional, y, mask, numbers, scale=2.5)
    torch.testing.assert_close(other.expected_log_prob, 2.5 * one.expected_log_prob)
    for bound in (one, other):
        torch.testing.assert_close(bound.kl_inducing, posterior.kl_inducing())
        torch.testing.assert_close(bound.kl_pairwise, posterior.kl_pairwise())
        rest = bound.kl_inducing + bound.kl_pairwise
        torch.testing.assert_close(bound.elbo, bound.expected_log_prob - rest)


def test_entropies() -> None:
    """The bound takes the one that is asked for."""
    x, y, mask = data()
    posterior = random_posterior(x[0, :3] + 0.5, "two full")
    args = posterior, posterior.conditional(x, mask), y, mask, draws(4, B=2 * B)
    with torch.no_grad():
        for entropy in ("auto", "bhattacharyya", "jensen"):
            bound = bound_at(*args, entropy=entropy)
            torch.testing.assert_close(bound.kl_inducing, posterior.kl_inducing(entropy))


def part(conditional: Conditional, index: list[int]) -> Conditional:
    return Conditional(conditional.projection[index], conditional.residual[index])


def test_batches_are_unbiased() -> None:
    x, y, mask = data()
    posterior, numbers = random_posterior(x[0, :3] + 0.5), draws(4)
    conditional = detached(posterior.conditional(x, mask))
    parameters = [posterior.m, posterior.factor, posterior.pair_mean, posterior.pair_log_sd]

    def bound_of(index: list[int]) -> list[Tensor]:
        """The bound, and its gradient."""
        its = Draws(numbers.unary[:, index], numbers.pairwise)
        bound = bound_at(
            posterior, part(conditional, index), y[index], mask[index], its, scale=B / len(index)
        )
        return [bound.elbo.detach(), *torch.autograd.grad(bound.elbo, parameters)]

    full = bound_of([0, 1, 2])
    for batches in ([[0], [1], [2]], [[0, 1], [1, 2], [0, 2]]):
        for whole, *parts in zip(full, *(bound_of(index) for index in batches), strict=True):
            torch.testing.assert_close(torch.stack(parts).mean(0), whole, rtol=1e-6, atol=1e-8)


@every_form
def test_padding_changes_nothing(form: str) -> None:
    """In the bound and its gradient, given the same draws; where the padded draws are large too."""
    x, y, mask = data()
    posterior = random_posterior(x[0, :3] + 0.5, form)
    numbers = draws(4, B=B * posterior.n_components)
    wide = torch.nn.functional.pad
    parameters = [p for n, p in posterior.named_parameters() if n != "log_pairwise_sd"]
    answers = []
    for args in [
        (posterior.conditional(x, mask), y, mask, numbers),
        (
            posterior.conditional(wide(x, (0, 0, 0, 2), value=9.0), wide(mask, (0, 2))),
            wide(y, (0, 2), value=99),
            wide(mask, (0, 2)),
            Draws(wide(numbers.unary, (0, 0, 0, 2), value=30.0), numbers.pairwise),
        ),
    ]:
        elbo = bound_at(posterior, *args).elbo
        answers.append([elbo, *torch.autograd.grad(elbo, parameters)])
    for one, other in zip(*answers, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_any_function_is_a_likelihood() -> None:
    """A bare callable that knows nothing of structures: Gaussian, so the answer is known."""
    x, y, mask = data()
    posterior = random_posterior(x[0, :3] + 0.5)
    conditional = posterior.conditional(x, mask)

    def log_prob(f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return -0.5 * (f.square() * mask[..., None]).sum((-1, -2)) + g.sum((-1, -2))[:, None]

    with torch.no_grad():
        bound = bound_at(posterior, conditional, y, mask, draws(4000), log_prob)
        q = posterior.at(conditional)
        second = q.mean.square().sum() + q.covariance.diagonal(dim1=-1, dim2=-2).sum()
        expected = -0.5 * second + B * posterior.pair_mean.sum()
    # Sequences share the pairwise scores: errors may all go one way.
    error = float(bound.estimate.spread.sum()) / 4000**0.5
    assert bound.expected_log_prob.item() == pytest.approx(expected.item(), abs=4 * error)


# -- the way from standard normal numbers ------------------------------------------------------------


def units(rows: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """(T V, rows, T, V) each number 1 in turn, and which; the same for all sequences."""
    places = [(t, v) for t in range(T) for v in range(V)]
    unary = torch.zeros(len(places), rows, T, V, dtype=torch.float64)
    for s, (t, v) in enumerate(places):
        unary[s, :, t, v] = 1
    return unary, places


@every_form
def test_draws_are_joint_over_the_positions_of_a_sequence(form: str) -> None:
    """Linear in the numbers: unit vectors show mean and covariance. Labels are independent,
    positions are not, and what is drawn at padding reaches no real position."""
    x, _, mask = data()
    posterior = random_posterior(x[0, :3] + 0.5, form)
    K = posterior.n_components
    with torch.no_grad():
        latent = latents(posterior, posterior.conditional(x, mask), mask)
        unary, places = units(K * B)
        pairs = torch.zeros(len(unary), V, V, dtype=torch.float64)
        centre, _ = latent.place(0 * unary, pairs)
        moved, _ = latent.place(unary, pairs)
        twice, _ = latent.place(-2 * unary, pairs)
    torch.testing.assert_close(centre[0], latent.mean.detach().flatten(0, 1))
    torch.testing.assert_close(twice - centre, -2 * (moved - centre))
    away = (moved - centre).reshape(len(places), K, B, T, V)
    between = 0.0
    for k in range(K):
        for b, n in enumerate(LENGTHS):
            found = torch.einsum("stv,suw->vtwu", *[away[:, k, b, :n]] * 2)
            for v in range(V):
                expected = latent.covariance[k, b, v, :n, :n]
                torch.testing.assert_close(found[v, :, v], expected, rtol=1e-6, atol=1e-6)
                assert (found[v, :, 1 - v] == 0).all()
                between = max(between, float(expected.tril(-1).abs().max()))
            beyond = [s for s, (t, _) in enumerate(places) if t >= n]
            assert (away[beyond][:, k, b, :n] == 0).all()
    assert between > 0.02  # or positions drawn one by one would pass


@every_form
def test_pairs_are_placed(form: str) -> None:
    x, _, mask = data()
    posterior = random_posterior(x[0, :3] + 0.5, form)
    numbers = draws(5, B=B * posterior.n_components)
    with torch.no_grad():
        latent = latents(posterior, posterior.conditional(x, mask), mask)
        f, g = latent.place(numbers.unary, numbers.pairwise)
        torch.testing.assert_close(g, posterior.pairwise().place(numbers.pairwise))
        narrow = latent.place(numbers.unary.float(), numbers.pairwise.float())
    assert f.shape == (5, B * posterior.n_components, T, V)
    assert {a.dtype for a in narrow} == {torch.float32}
    torch.testing.assert_close(narrow[0].double(), f, rtol=1e-4, atol=1e-4)


def test_draws_carry_no_gradient() -> None:
    """What a likelihood is differentiated in is the standard normal numbers."""
    x, _, mask = data()
    posterior = random_posterior(x[0, :3] + 0.5)
    latent = latents(posterior, posterior.conditional(x, mask), mask)
    numbers = draws(2)
    assert not any(a.requires_grad for a in latent.place(numbers.unary, numbers.pairwise))


def random_sensitivity(latent: Latents) -> Sensitivity:
    K, mask = len(latent.mean), latent.mask
    both = mask[:, None, :, None] & mask[:, None, None, :]
    bend, pairs = normal(K, B, V, T, T, seed=1), normal(V * V, V * V, seed=2)
    return Sensitivity(
        normal(K, B, T, V, seed=3) * mask[..., None],
        (bend + bend.mT) * both,
        normal(V, V, seed=4),
        pairs + pairs.T if latent.pairs.is_full else pairs.diagonal().reshape(V, V),
    )


@every_form
def test_sensitivity_and_moments_are_inverse(form: str) -> None:
    x, _, mask = data()
    posterior = random_posterior(x[0, :3] + 0.5, form)
    latent = latents(posterior, posterior.conditional(x, mask), mask)
    at = random_sensitivity(latent)
    moments = latent.moments(at)
    assert (moments.value == 0).all()
    again = latent.sensitivity(moments)
    for one, other in zip(vars(at).values(), vars(again).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for one, other in zip(
        vars(moments).values(), vars(latent.moments(again)).values(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@every_form
def test_sensitivity_is_bonnets_and_prices(form: str) -> None:
    """grad_b = L^-T slope, grad_Sigma = L^-T bend L^-1 / 2, one sequence and label at a time."""
    x, _, mask = data()
    posterior = random_posterior(x[0, :3] + 0.5, form)
    K = posterior.n_components
    with torch.no_grad():
        latent = latents(posterior, posterior.conditional(x, mask), mask)
        pairs = posterior.pairwise()
    moments = latent.moments(random_sensitivity(latent))
    at = latent.sensitivity(moments)
    for k in range(K):
        for b, n in enumerate(LENGTHS):
            for v in range(V):
                inverse = np.linalg.inv(latent.factor[k, b, v, :n, :n].numpy())
                slope = moments.slope[k * B + b, :n, v].numpy()
                bend = moments.bend[k * B + b, v, :n, :n].numpy()
                np.testing.assert_allclose(at.mean[k, b, :n, v], inverse.T @ slope, rtol=1e-6)
                expected = 0.5 * inverse.T @ bend @ inverse
                found = at.covariance[k, b, v, :n, :n]
                np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
    full = pairs.factor if pairs.is_full else pairs.factor.flatten().diag()
    inverse = np.linalg.inv(full.numpy())
    slope = inverse.T @ moments.pair_slope.flatten().numpy()
    np.testing.assert_allclose(at.pair_mean.flatten(), slope, rtol=1e-8)
    if pairs.is_full:
        expected = 0.5 * inverse.T @ moments.pair_bend.numpy() @ inverse
    else:
        expected = 0.5 * moments.pair_bend.numpy() / pairs.factor.numpy() ** 2
    np.testing.assert_allclose(at.pair_covariance, expected, rtol=1e-8)


@every_form
def test_expand_is_right_to_first_order(form: str) -> None:
    """For E[r^T f - f^T Lambda f / 2] and the same in g, which are closed forms in mean and
    covariance: value and gradient in every parameter, weights, amplitude and kernel included."""
    x, _, mask = data()
    posterior = random_posterior(x[0, :3] + 0.5, form)
    latent = latents(posterior, posterior.conditional(x, mask), mask)
    r = normal(B, T, V, seed=5) * mask[..., None]
    both = mask[:, None, :, None] & mask[:, None, None, :]
    bend = normal(B, V, T, T, seed=6)
    bend = bend @ bend.mT * both
    q, full = latent.pairs, latent.pairs.is_full
    pair_r, pair_bend = normal(V, V, seed=7), normal(V * V, V * V, seed=8)
    pair_bend = pair_bend @ pair_bend.T if full else pair_bend.diagonal().reshape(V, V)

    # Of each component and sequence; what is of the pairwise scores, in equal shares.
    square = torch.einsum("kbtv,bvtu,kbuv->kb", latent.mean, bend, latent.mean)
    trace = (bend * latent.covariance).sum((-1, -2, -3))
    unary = (r * latent.mean).sum((-1, -2)) - 0.5 * (square + trace)
    flat = q.mean.flatten()
    bent = flat @ pair_bend @ flat if full else (pair_bend * q.mean.square()).sum()
    pairs = (pair_r * q.mean).sum() - 0.5 * (bent + (pair_bend * q.covariance).sum())
    exact = (posterior.weights @ (unary + pairs / B)).sum()

    with torch.no_grad():
        applied = (pair_bend @ flat).view_as(q.mean) if full else pair_bend * q.mean
        at = Sensitivity(
            r - torch.einsum("bvtu,kbuv->kbtv", bend, latent.mean),
            (-0.5 * bend).expand_as(latent.covariance),
            pair_r - applied,
            -0.5 * pair_bend,
        )
        moments = latent.moments(at)
        moments = Moments((unary + pairs / B).flatten(), *list(vars(moments).values())[1:])
    total = latent.expand(moments, posterior.weights)
    torch.testing.assert_close(total, exact)
    named = {n: p for n, p in posterior.named_parameters() if n != "log_pairwise_sd"}
    found = torch.autograd.grad(total, list(named.values()), retain_graph=True)
    wanted = torch.autograd.grad(exact, list(named.values()))
    for name, one, other in zip(named, found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)
        if name != "weight_logits" or posterior.n_components > 1:
            assert other.abs().max() > 1e-2, name


def test_the_derivative_in_a_weight() -> None:
    """pi_k times (what component k expects less what all expect), summed over sequences."""
    x, _, mask = data()
    posterior = random_posterior(x[0, :3] + 0.5, "two full")
    latent = latents(posterior, posterior.conditional(x, mask), mask)
    moments = latent.moments(random_sensitivity(latent))
    values = normal(2 * B, seed=9)
    moments = Moments(values, *list(vars(moments).values())[1:])
    total = latent.expand(moments, posterior.weights)
    (found,) = torch.autograd.grad(total, posterior.weight_logits)
    weights, each = posterior.weights.detach(), values.reshape(2, B).sum(-1)
    torch.testing.assert_close(total.detach(), weights @ each)
    torch.testing.assert_close(found, weights * (each - weights @ each))


@pytest.mark.parametrize("form", ["one full", "two full"])
def test_pairs_that_are_off(form: str) -> None:
    """No gradient, no nan, in either form of q(g)."""
    x, y, mask = data()
    posterior = random_posterior(x[0, :3] + 0.5, form)
    with torch.no_grad():
        posterior.log_pairwise_sd.fill_(-torch.inf)
    numbers = draws(4, B=B * posterior.n_components)
    latent = latents(posterior, posterior.conditional(x, mask), mask)
    _, g = latent.place(numbers.unary, numbers.pairwise)
    assert (g == 0).all()
    moments = estimate_at(posterior, latent, Chain().log_prob, y, numbers).moments
    at = latent.sensitivity(moments)
    assert (at.pair_mean == 0).all()
    assert (at.pair_covariance == 0).all()
    assert all(a.isfinite().all() for a in vars(at).values())
    elbo = bound_at(posterior, posterior.conditional(x, mask), y, mask, numbers).elbo
    named = {n: p for n, p in posterior.named_parameters() if n != "log_pairwise_sd"}
    found = torch.autograd.grad(elbo, list(named.values()), allow_unused=True)
    for name, gradient in zip(named, found, strict=True):
        if name.startswith("pair"):
            assert gradient is None or (gradient == 0).all()
        else:
            assert gradient.isfinite().all()


def test_a_sequence_of_nothing_but_padding() -> None:
    x, y, mask = data()
    posterior, numbers = random_posterior(x[0, :3] + 0.5), draws(4)
    none = mask & torch.tensor([[True], [False], [True]])
    with torch.no_grad():
        latent = latents(posterior, posterior.conditional(x, none), none)
        assert latent.factor.isfinite().all()
        found = estimate_at(posterior, latent, Chain().log_prob, y, numbers).moments
        rest = estimate_at(
            posterior,
            latents(posterior, posterior.conditional(x, mask), mask),
            Chain().log_prob,
            y,
            numbers,
        ).moments
    assert found.value[1] == 0
    assert (found.slope[1] == 0).all()
    torch.testing.assert_close(found.slope[[0, 2]], rest.slope[[0, 2]])


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
        ("m", "one full"),
        ("m", "two diagonal"),
        ("pair_mean", "one full"),
        ("pair_mean", "two full"),
        ("pair_log_sd", "one full"),
        ("weight_logits", "two full"),
    ],
)
def test_gradient_against_finite_differences(name: str, form: str) -> None:
    """With the draws held, in whatever moves them without turning them."""
    x, y, mask = data()
    posterior = random_posterior(x[0, :3] + 0.5, form)
    conditional = detached(posterior.conditional(x, mask))
    numbers = draws(4, B=B * posterior.n_components)

    def value() -> Tensor:
        return bound_at(posterior, conditional, y, mask, numbers, scale=1.7).elbo

    parameter = getattr(posterior, name)
    (analytic,) = torch.autograd.grad(value(), parameter)
    assert_gradient(parameter, analytic, value)


@pytest.mark.parametrize("name", ["factor", "log_amplitude", "kernel.raw_lengthscale"])
@pytest.mark.parametrize("form", ["one full", "two diagonal"])
def test_gradient_of_covariances_against_finite_differences(name: str, form: str) -> None:
    """One position a sequence: its covariance is a number, and all draws move with its root."""
    x, y, mask = data()
    x, y, mask = x[:, :1], y[:, :1], mask[:, :1]
    posterior = random_posterior(x[0] + torch.tensor([[0.5], [-0.4], [1.3]]), form)
    numbers = draws(4, B=B * posterior.n_components, T=1)

    def value() -> Tensor:
        return bound_at(posterior, posterior.conditional(x, mask), y, mask, numbers).elbo

    parameter = dict(posterior.named_parameters())[name]
    (analytic,) = torch.autograd.grad(value(), parameter)
    assert_gradient(parameter, analytic, value)
    if name == "factor" and form == "one full":
        assert (analytic.triu(1) == 0).all()


def test_gradient_of_template_weights() -> None:
    # No two rows agree in everything: where nothing is left open, jitter is all there is to
    # differentiate.
    rows = torch.cartesian_prod(*[torch.arange(3.0, dtype=torch.float64)] * 3)
    rows = rows[torch.randperm(27, generator=torch.Generator().manual_seed(4))]
    x = rows[:B].reshape(B, 1, 3)
    _, y, mask = data()
    y, mask = y[:, :1], mask[:, :1]
    posterior = Posterior(TemplateKernel(3, "product").double(), rows[B : B + 2], V)
    with torch.no_grad():
        posterior.m += normal(1, V, 2, seed=5)
    numbers = draws(4, T=1)

    def value() -> Tensor:
        return bound_at(posterior, posterior.conditional(x, mask), y, mask, numbers).elbo

    raw = posterior.kernel.raw_weights
    (analytic,) = torch.autograd.grad(value(), raw)
    assert_gradient(raw, analytic, value)
