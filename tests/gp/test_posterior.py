"""q of one sequence's latent values against the textbook's dense formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpytorch.kernels import Kernel, LinearKernel, RBFKernel, ScaleKernel
from torch import Tensor

from structgp.gp import Noise, Posterior, choose_inducing
from structgp.kernels import TemplateKernel

LENGTHS = (4, 1, 3)
B, T, V, M, W = 3, 4, 2, 5, 2
LENGTH_SCALE = 1.2


def rbf(x: np.ndarray, z: np.ndarray, amplitude: float = 1.0) -> np.ndarray:
    square = ((x[:, None] - z[None]) ** 2).sum(-1)
    return amplitude * np.exp(-0.5 * square / LENGTH_SCALE**2)


def rbf_kernel() -> RBFKernel:
    kernel = RBFKernel().double()
    kernel.lengthscale = torch.tensor(LENGTH_SCALE, dtype=torch.float64)
    return kernel


def inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, T, W, generator=generator, dtype=torch.float64)
    return x, torch.arange(T) < torch.tensor(LENGTHS)[:, None]


def random_posterior(kernel: Kernel, seed: int = 1, inducing: Tensor | None = None) -> Posterior:
    generator = torch.Generator().manual_seed(seed)
    if inducing is None:
        inducing = 1.5 * torch.randn(M, W, generator=generator, dtype=torch.float64)
    posterior = Posterior(kernel, inducing, V, pairwise_sd=0.8)
    with torch.no_grad():
        for parameter in (posterior.m, posterior.factor, posterior.pair_mean):
            parameter += torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        posterior.pair_log_sd += 0.1
    return posterior


def unwhitened(posterior: Posterior, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean (T, V) and covariance (V, T, T) at x (T, W), from q(u) = N(mu_j, S_j)."""
    Z = posterior.inducing.numpy()
    K_zz, K_xz = rbf(Z, Z), rbf(x, Z)
    L = np.linalg.cholesky(K_zz)
    A = K_xz @ np.linalg.inv(K_zz)
    K_tilde = rbf(x, x) - A @ K_xz.T
    means, covariances = [], []
    for m, factor in zip(posterior.m.detach(), posterior.factor.detach(), strict=True):
        mu, root = L @ m.numpy(), L @ np.tril(factor.numpy())
        means.append(A @ mu)
        covariances.append(K_tilde + A @ (root @ root.T) @ A.T)
    return np.stack(means, -1), np.stack(covariances)


def test_mean_and_covariance_against_the_dense_formula() -> None:
    x, mask = inputs()
    posterior = random_posterior(rbf_kernel())
    with torch.no_grad():
        q = posterior.at(posterior.conditional(x, mask))
        mean, covariance = q.mean, q.covariance
    assert mean.shape == (B, T, V)
    assert covariance.shape == (B, V, T, T)
    for b, n in enumerate(LENGTHS):
        expected_mean, expected_covariance = unwhitened(posterior, x[b, :n].numpy())
        np.testing.assert_allclose(mean[b, :n], expected_mean, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(covariance[b, :, :n, :n], expected_covariance, rtol=0, atol=2e-6)
        assert (mean[b, n:] == 0).all()
        assert (covariance[b, :, n:] == 0).all()
        assert (covariance[b, :, :, n:] == 0).all()


def test_the_prior_is_where_nothing_was_learned() -> None:
    x, mask = inputs()
    posterior = Posterior(rbf_kernel(), inputs(5)[0][0], V)
    with torch.no_grad():
        q = posterior.at(posterior.conditional(x, mask))
    assert (q.mean == 0).all()
    expected = rbf(x[0].numpy(), x[0].numpy())
    for j in range(V):
        np.testing.assert_allclose(q.covariance[0, j].detach(), expected, rtol=0, atol=1e-6)
    assert posterior.kl_inducing().item() == 0
    assert posterior.kl_pairwise().item() == 0


def test_only_the_lower_triangle_counts() -> None:
    x, mask = inputs()
    posterior = random_posterior(rbf_kernel())
    with torch.no_grad():
        conditional = posterior.conditional(x, mask)
        noise = Noise.draw(2, B, T, V, M, generator=torch.Generator(), dtype=torch.float64)
        before = posterior.at(conditional).rsample(noise), posterior.at(conditional).covariance
        divergence = posterior.kl_inducing()
        posterior.factor += 5 * torch.ones(M, M, dtype=torch.float64).triu(1)
        after = posterior.at(conditional).rsample(noise), posterior.at(conditional).covariance
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(posterior.kl_inducing().detach(), divergence)


def test_draws_have_the_joint_mean_and_covariance() -> None:
    """20,000 draws in antithetic pairs: the mean is exact, the covariance has 10,000 terms."""
    S = 20_000
    x, mask = inputs()
    posterior = random_posterior(rbf_kernel())
    generator = torch.Generator().manual_seed(0)
    noise = Noise.draw(S, B, T, V, M, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        q = posterior.at(posterior.conditional(x, mask))
        f = q.rsample(noise).numpy()
        mean, covariance = q.mean.numpy(), q.covariance.numpy()
    assert f.shape == (S, B, T, V)
    np.testing.assert_allclose(f.mean(0), mean, rtol=0, atol=1e-10)
    assert (f[:, ~mask.numpy()] == 0).all()

    away = (f - mean).transpose(0, 1, 3, 2).reshape(S, -1)  # (S, B V T)
    expected = np.zeros((B, V, T, B, V, T))
    for b in range(B):
        for j in range(V):
            expected[b, j, :, b, j] = covariance[b, j]  # labels and sequences are independent
    expected = expected.reshape(B * V * T, -1)
    found = away.T @ away / S
    sd = np.sqrt(expected.diagonal())
    error = np.sqrt((np.outer(sd, sd) ** 2 + expected**2) / (S / 2))
    assert (np.abs(found - expected) <= 4 * error).all()

    # Positions drawn independently would be found out.
    between = covariance[0, 0][np.triu_indices(T, 1)]
    assert (np.abs(between) > 12 * error.max()).any()


def test_each_part_of_the_doubt_is_drawn() -> None:
    """With fresh noise for one part and none for the other, each part has its own covariance."""
    S = 20_000
    x, mask = inputs()
    posterior = random_posterior(rbf_kernel())
    noise = Noise.draw(
        S, B, T, V, M, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    with torch.no_grad():
        conditional = posterior.conditional(x, mask)
        q = posterior.at(conditional)
        zero = torch.zeros_like
        spread = conditional.projection[0] @ posterior.factor[1].tril()
        cases = [
            (Noise(noise.inducing, zero(noise.rest), noise.pairwise), spread @ spread.mT),
            (
                Noise(zero(noise.inducing), noise.rest, noise.pairwise),
                conditional.residual[0] @ conditional.residual[0].mT,
            ),
        ]
        for part, expected in cases:
            away = q.rsample(part)[:, 0, :, 1] - q.mean[0, :, 1]
            found = away.mT @ away / S
            size = expected.diagonal().sqrt()
            error = ((torch.outer(size, size).square() + expected.square()) / (S / 2)).sqrt()
            assert ((found - expected).abs() <= 4 * error).all()


def test_noise_comes_in_antithetic_pairs() -> None:
    def draw(S: int) -> Noise:
        generator = torch.Generator().manual_seed(3)
        return Noise.draw(S, 2, 3, 4, 5, generator=generator, dtype=torch.float64)

    noise = draw(6)
    assert noise.inducing.shape == (6, 2, 4, 5)
    assert noise.rest.shape == (6, 2, 3, 4)
    assert noise.pairwise.shape == (6, 4, 4)
    for part in (noise.inducing, noise.rest, noise.pairwise):
        assert (part[:3] == -part[3:]).all()
        assert part.flatten(1)[:3].unique().numel() == part[:3].numel()
    odd = draw(5)
    assert len(odd.rest) == 5
    torch.testing.assert_close(odd.inducing, noise.inducing[:5])
    assert len(draw(1).pairwise) == 1


def test_noise_is_standard_normal() -> None:
    generator = torch.Generator().manual_seed(4)
    noise = Noise.draw(2000, 1, 5, 2, 5, generator=generator, dtype=torch.float32)
    for part in (noise.inducing, noise.rest):
        assert part.dtype == torch.float32
        assert part.square().mean().item() == pytest.approx(1, abs=4 * np.sqrt(2 / 10_000))
        assert part.pow(4).mean().item() == pytest.approx(3, abs=4 * np.sqrt(96 / 10_000))


@pytest.mark.parametrize("where", ["elsewhere", "at X"])
def test_padding_and_batching_leave_the_conditional_alone(where: str) -> None:
    """Under a kernel that is not stationary: sequences differ in their prior variance."""
    x, mask = inputs()
    kernel = ScaleKernel(rbf_kernel()) + LinearKernel()
    inducing = x[mask] if where == "at X" else None
    posterior = random_posterior(kernel.double(), inducing=inducing)
    with torch.no_grad():
        together = posterior.conditional(x, mask)
        wide = torch.cat([x, torch.full((B, 3, W), 50.0, dtype=torch.float64)], 1)
        wide[1, 1:] = -7.0
        padded = posterior.conditional(wide, torch.nn.functional.pad(mask, (0, 3)))
        assert (padded.projection[:, T:] == 0).all()
        assert (padded.residual[:, T:] == 0).all()
        assert (padded.residual[:, :, T:] == 0).all()
        torch.testing.assert_close(padded.projection[:, :T], together.projection)
        # sqrt of the jitter is 1e-4: this would see a jitter that depends on padding.
        torch.testing.assert_close(padded.residual[:, :T, :T], together.residual, rtol=0, atol=3e-7)
        for b, n in enumerate(LENGTHS):
            alone = posterior.conditional(x[b : b + 1, :n], mask[b : b + 1, :n])
            torch.testing.assert_close(alone.projection[0], together.projection[b, :n])
            found = together.residual[b, :n, :n]
            torch.testing.assert_close(alone.residual[0], found, rtol=0, atol=3e-7)


def test_a_sequence_of_nothing_but_padding() -> None:
    x, mask = inputs()
    mask = mask.clone()
    mask[1] = False
    posterior = random_posterior(rbf_kernel())
    with torch.no_grad():
        conditional = posterior.conditional(x, mask)
    assert (conditional.projection[1] == 0).all()
    assert (conditional.residual[1] == 0).all()
    assert conditional.residual.isfinite().all()


def test_a_sequence_without_features() -> None:
    """A row that agrees with nothing has no prior variance at all."""
    rows = torch.tensor([[[0.0, 1.0], [-1.0, -1.0]], [[-1.0, -1.0], [-1.0, -1.0]]]).double()
    posterior = random_posterior(TemplateKernel(2).double(), inducing=rows[0, :1])
    with torch.no_grad():
        q = posterior.at(posterior.conditional(rows, torch.ones(2, 2, dtype=torch.bool)))
    assert q.covariance.isfinite().all()
    np.testing.assert_allclose(q.covariance[1].detach(), 0, atol=1e-7)
    np.testing.assert_allclose(q.mean[1].detach(), 0, atol=1e-7)


def test_inducing_at_all_distinct_rows_reproduces_q_of_u() -> None:
    """Whatever q(u) is, q(f) at the same rows is it: nothing is left open."""
    x, mask = inputs()
    x[2, 1] = x[0, 3]
    x[2, 2] = x[0, 0]
    rows = x[mask]
    kernel = rbf_kernel()
    choice = choose_inducing(kernel, rows, 100)
    assert len(choice.index) == len(rows) - 2
    Z = rows[choice.index]
    rng = np.random.default_rng(0)
    mu = rng.normal(size=(V, len(Z)))
    root = np.tril(rng.normal(size=(V, len(Z), len(Z))))
    posterior = Posterior(kernel, Z, V)
    L = np.linalg.cholesky(rbf(Z.numpy(), Z.numpy()))
    with torch.no_grad():
        posterior.m.copy_(torch.tensor(np.linalg.solve(L, mu.T).T))
        posterior.factor.copy_(torch.tensor(np.linalg.solve(L, root)))
        conditional = posterior.conditional(x, mask)
        q = posterior.at(conditional)
        mean, covariance = q.mean.numpy(), q.covariance.numpy()
    assert conditional.residual.abs().max() < 1e-3
    where = [[int((row == Z).all(-1).nonzero()) for row in x[b, :n]] for b, n in enumerate(LENGTHS)]
    for b, index in enumerate(where):
        n = LENGTHS[b]
        np.testing.assert_allclose(mean[b, :n], mu[:, index].T, rtol=0, atol=1e-4)
        for j in range(V):
            expected = (root[j] @ root[j].T)[np.ix_(index, index)]
            np.testing.assert_allclose(covariance[b, j, :n, :n], expected, rtol=0, atol=1e-3)


def test_log_amplitude_is_a_factor_on_the_kernel() -> None:
    x, mask = inputs()
    scaled = ScaleKernel(rbf_kernel()).double()
    scaled.outputscale = torch.tensor(2.5, dtype=torch.float64)
    one, other = random_posterior(rbf_kernel()), random_posterior(scaled)
    with torch.no_grad():
        one.log_amplitude.fill_(np.log(2.5))
        q, p = (each.at(each.conditional(x, mask)) for each in (one, other))
        torch.testing.assert_close(q.mean, p.mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(q.covariance, p.covariance, rtol=1e-6, atol=1e-6)


def test_pairwise_draws() -> None:
    S = 20_000
    posterior = random_posterior(rbf_kernel())
    noise = Noise.draw(S, 1, 1, V, M, generator=torch.Generator(), dtype=torch.float64)
    with torch.no_grad():
        g = posterior.sample_pairwise(noise)
        assert g.shape == (S, V, V)
        torch.testing.assert_close(g.mean(0), posterior.pair_mean.detach())
        sd = posterior.pair_log_sd.exp()
    error = 4 / np.sqrt(2 * S / 2)
    np.testing.assert_allclose(g.std(0) / sd, 1, rtol=0, atol=error)
    np.testing.assert_allclose(sd, 0.8 * np.exp(0.1), rtol=1e-12)


def test_pairwise_scores_can_be_off() -> None:
    posterior = Posterior(rbf_kernel(), inputs()[0][0], V, pairwise_sd=0.0)
    noise = Noise.draw(4, 1, 1, V, T, generator=torch.Generator(), dtype=torch.float64)
    assert (posterior.sample_pairwise(noise) == 0).all()
    assert posterior.kl_pairwise().item() == 0


def test_sizes() -> None:
    posterior = random_posterior(rbf_kernel())
    assert (posterior.n_labels, posterior.n_inducing) == (V, M)
