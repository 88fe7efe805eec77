"""The bound against a full Gaussian process written out densely, and against finite differences."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel
from torch import Tensor

from structgp.gp import Conditional, Noise, Posterior
from structgp.kernels import TemplateKernel
from structgp.objective import Bound, evidence_lower_bound
from structgp.structures import Chain

LENGTHS = (3, 1, 4)
B, T, V, W = 3, 4, 2, 2
N = sum(LENGTHS)
PAIRWISE_SD = 0.7


def data() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(B, T, W, generator=generator, dtype=torch.float64)
    y = torch.randint(V, (B, T), generator=generator)
    return x, y, torch.arange(T) < torch.tensor(LENGTHS)[:, None]


def random_posterior(inducing: Tensor) -> Posterior:
    kernel = RBFKernel().double()
    kernel.lengthscale = torch.tensor(1.0, dtype=torch.float64)
    posterior = Posterior(kernel, inducing, V, pairwise_sd=PAIRWISE_SD)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in (
            posterior.m,
            posterior.factor,
            posterior.pair_mean,
            posterior.pair_log_sd,
        ):
            change = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += 0.4 * change
    return posterior


def draw(S: int, M: int, seed: int = 2) -> Noise:
    generator = torch.Generator().manual_seed(seed)
    return Noise.draw(S, B, T, V, M, generator=generator, dtype=torch.float64)


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
    noise = draw(S, N)
    # The residual is drawn from a variance of 1e-8, which is jitter and not part of the model.
    noise = Noise(noise.inducing, torch.zeros_like(noise.rest), noise.pairwise)
    with torch.no_grad():
        bound = evidence_lower_bound(
            posterior, Chain().log_prob, posterior.conditional(x, mask), y, mask, noise
        )

    points = rows.numpy()
    K = np.exp(-0.5 * ((points[:, None] - points[None]) ** 2).sum(-1))
    L = np.linalg.cholesky(K)
    b = np.stack([L @ m for m in posterior.m[0].detach().numpy()])
    root = np.stack([L @ np.tril(factor) for factor in posterior.factor[0].detach().numpy()])
    kl = sum(log_normal_ratio(b[j], root[j] @ root[j].T, K) for j in range(V))
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
    for s in range(S):
        g = pair_mean + pair_sd * noise.pairwise[s].numpy()
        for n in range(B):
            f = np.stack([b[j] + root[j] @ noise.inducing[s, n, j].numpy() for j in range(V)], -1)
            table = oracles.chain_table(f[starts[n] : starts[n + 1]], g)
            labels = y[n, : LENGTHS[n]].numpy()
            (here,) = np.flatnonzero((table.labels == labels).all(-1))
            expected += float(table.score[here] - table.log_z) / S
    assert bound.expected_log_prob.item() == pytest.approx(expected, rel=1e-6)
    assert bound.elbo.item() == pytest.approx(expected - kl - kl_pairwise, rel=1e-6)


def test_what_inducing_at_x_leaves_open_is_jitter() -> None:
    x, y, mask = data()
    posterior = random_posterior(x[mask])
    noise = draw(64, N)
    without = Noise(noise.inducing, torch.zeros_like(noise.rest), noise.pairwise)
    with torch.no_grad():
        conditional = posterior.conditional(x, mask)
        assert conditional.residual.abs().max() < 2e-4
        args = posterior, Chain().log_prob, conditional, y, mask
        difference = (
            evidence_lower_bound(*args, noise).elbo - evidence_lower_bound(*args, without).elbo
        )
    assert difference.abs() < 1e-3


def test_never_above_the_evidence() -> None:
    """One token, two labels: log p(y) = log(1/2) by symmetry, and q = p is the best below it."""
    x = torch.zeros(1, 1, W, dtype=torch.float64)
    y, mask = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
    generator = torch.Generator().manual_seed(3)
    noise = Noise.draw(4000, 1, 1, V, 1, generator=generator, dtype=torch.float64)
    kernel = RBFKernel().double()
    for mean, sd in [(0.0, 1.0), (0.2, 0.9), (1.0, 0.3)]:
        posterior = Posterior(kernel, x[0], V)
        with torch.no_grad():
            posterior.m.copy_(torch.tensor([[[mean], [-mean]]]))
            posterior.factor.fill_(sd)
            conditional = posterior.conditional(x, mask)
            bound = evidence_lower_bound(posterior, Chain().log_prob, conditional, y, mask, noise)
        assert bound.elbo < np.log(0.5)


def sparse_case(S: int = 4) -> tuple[Posterior, Conditional, Tensor, Tensor, Noise]:
    x, y, mask = data()
    posterior = random_posterior(x[0, :3] + 0.5)
    return posterior, posterior.conditional(x, mask), y, mask, draw(S, 3)


def part(conditional: Conditional, noise: Noise, index: list[int]) -> tuple[Conditional, Noise]:
    chosen = Conditional(conditional.projection[index], conditional.residual[index])
    return chosen, Noise(noise.inducing[:, index], noise.rest[:, index], noise.pairwise)


def test_batches_are_unbiased() -> None:
    posterior, conditional, y, mask, noise = sparse_case()

    def bound_of(index: list[int]) -> Bound:
        chosen, its_noise = part(conditional, noise, index)
        return evidence_lower_bound(
            posterior,
            Chain().log_prob,
            chosen,
            y[index],
            mask[index],
            its_noise,
            scale=B / len(index),
        )

    with torch.no_grad():
        full = bound_of([0, 1, 2])
        for batches in ([[0], [1], [2]], [[0, 1], [1, 2], [0, 2]]):
            bounds = [bound_of(index) for index in batches]
            expected = torch.stack([b.expected_log_prob for b in bounds]).mean()
            torch.testing.assert_close(expected, full.expected_log_prob)
            torch.testing.assert_close(torch.stack([b.elbo for b in bounds]).mean(), full.elbo)
            for b in bounds:
                torch.testing.assert_close(b.kl_inducing, full.kl_inducing)
                torch.testing.assert_close(b.kl_pairwise, full.kl_pairwise)


def test_batch_gradients_are_unbiased() -> None:
    posterior, conditional, y, mask, noise = sparse_case()
    conditional = Conditional(conditional.projection.detach(), conditional.residual.detach())
    parameters = [posterior.m, posterior.factor, posterior.pair_mean, posterior.pair_log_sd]

    def gradient_of(index: list[int]) -> list[Tensor]:
        chosen, its_noise = part(conditional, noise, index)
        bound = evidence_lower_bound(
            posterior,
            Chain().log_prob,
            chosen,
            y[index],
            mask[index],
            its_noise,
            scale=B / len(index),
        )
        return list(torch.autograd.grad(bound.elbo, parameters))

    full = gradient_of([0, 1, 2])
    singles = [gradient_of([b]) for b in range(B)]
    for whole, *parts in zip(full, *singles, strict=True):
        torch.testing.assert_close(torch.stack(parts).mean(0), whole)


def test_padding_changes_nothing() -> None:
    x, y, mask = data()
    posterior = random_posterior(x[0, :3] + 0.5)
    noise = draw(4, 3)
    wide = torch.nn.functional.pad
    with torch.no_grad():
        bound = evidence_lower_bound(
            posterior, Chain().log_prob, posterior.conditional(x, mask), y, mask, noise
        )
        padded = evidence_lower_bound(
            posterior,
            Chain().log_prob,
            posterior.conditional(wide(x, (0, 0, 0, 2), value=9.0), wide(mask, (0, 2))),
            wide(y, (0, 2), value=99),
            wide(mask, (0, 2)),
            Noise(noise.inducing, wide(noise.rest, (0, 0, 0, 2), value=3.0), noise.pairwise),
        )
    torch.testing.assert_close(padded.elbo, bound.elbo, rtol=1e-8, atol=0)


def assert_gradient(parameter: Tensor, analytic: Tensor, value: object) -> None:
    numeric, h = torch.zeros_like(parameter), 1e-5
    with torch.no_grad():
        for place in np.ndindex(*parameter.shape):
            for sign in (1, -1):
                parameter[place] += sign * h
                numeric[place] += sign * value() / (2 * h)  # type: ignore[operator]
                parameter[place] -= sign * h
    torch.testing.assert_close(analytic, numeric, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["m", "factor", "pair_mean", "pair_log_sd", "log_amplitude"])
def test_gradient_against_finite_differences(name: str) -> None:
    posterior, conditional, y, mask, noise = sparse_case()
    conditional = Conditional(conditional.projection.detach(), conditional.residual.detach())

    def value() -> Tensor:
        return evidence_lower_bound(
            posterior, Chain().log_prob, conditional, y, mask, noise, scale=1.7
        ).elbo

    parameter = getattr(posterior, name)
    (analytic,) = torch.autograd.grad(value(), parameter)
    assert analytic.abs().max() > 1e-3
    assert_gradient(parameter, analytic, value)
    if name == "factor":
        assert (analytic.triu(1) == 0).all()


def test_gradient_of_the_kernel() -> None:
    posterior, _, y, mask, noise = sparse_case()
    x = data()[0]

    def value() -> Tensor:
        conditional = posterior.conditional(x, mask)
        return evidence_lower_bound(posterior, Chain().log_prob, conditional, y, mask, noise).elbo

    raw = posterior.kernel.raw_lengthscale
    (analytic,) = torch.autograd.grad(value(), raw)
    assert_gradient(raw, analytic, value)


def test_gradient_of_template_weights() -> None:
    # No two rows agree in everything: where nothing is left open, jitter is all there is to
    # differentiate.
    generator = torch.Generator().manual_seed(4)
    rows = torch.cartesian_prod(*[torch.arange(3.0, dtype=torch.float64)] * 3)
    rows = rows[torch.randperm(27, generator=generator)]
    x = rows[: B * T].reshape(B, T, 3)
    _, y, mask = data()
    posterior = Posterior(TemplateKernel(3, "product").double(), rows[B * T : B * T + 2], V)
    with torch.no_grad():
        posterior.m += torch.randn(V, 2, generator=generator, dtype=torch.float64)
    noise = draw(4, 2)

    def value() -> Tensor:
        conditional = posterior.conditional(x, mask)
        return evidence_lower_bound(posterior, Chain().log_prob, conditional, y, mask, noise).elbo

    raw = posterior.kernel.raw_weights
    (analytic,) = torch.autograd.grad(value(), raw)
    assert_gradient(raw, analytic, value)


def test_any_function_is_a_likelihood() -> None:
    """A bare callable that knows nothing of structures: Gaussian, so the answer is known."""
    posterior, conditional, y, mask, noise = sparse_case(S=2000)

    def log_prob(f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return -0.5 * (f.square() * mask[..., None]).sum((-1, -2)) + g.sum((-1, -2))[:, None]

    with torch.no_grad():
        bound = evidence_lower_bound(posterior, log_prob, conditional, y, mask, noise)
        q = posterior.at(conditional)
        second = q.mean.square().sum() + q.covariance.diagonal(dim1=-1, dim2=-2).sum()
        expected = -0.5 * second + B * posterior.pair_mean.sum()
    assert bound.expected_log_prob.item() == pytest.approx(expected.item(), rel=0.03)
