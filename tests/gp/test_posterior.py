"""q of one sequence's latent values against the textbook's dense formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import Kernel, LinearKernel, RBFKernel, ScaleKernel
from torch import Tensor
from torch.distributions import (
    Categorical,
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    kl_divergence,
)

from structgp.gp import Posterior, SequenceGaussian, choose_inducing
from structgp.gp.kernels import TemplateKernel

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


FORMS = {
    "one full": {},
    "one diagonal": {"covariance": "diagonal"},
    "one low-rank": {"covariance": "low-rank", "rank": 2},
    "two full": {"n_components": 2, "pairwise_covariance": "full"},
    "two low-rank": {
        "n_components": 2,
        "covariance": "low-rank",
        "rank": 3,
        "pairwise_covariance": "full",
    },
    "two diagonal": {"n_components": 2, "covariance": "diagonal", "pairwise_covariance": "full"},
}
"""Arguments of ``Posterior``, by name."""

every_form = pytest.mark.parametrize("form", FORMS)


def random_posterior(
    kernel: Kernel, seed: int = 1, inducing: Tensor | None = None, form: str = "one full"
) -> Posterior:
    generator = torch.Generator().manual_seed(seed)
    if inducing is None:
        inducing = 1.5 * torch.randn(M, W, generator=generator, dtype=torch.float64)
    posterior = Posterior(kernel, inducing, V, pairwise_sd=0.8, **FORMS[form])
    with torch.no_grad():
        names = ["m", "factor", "pair_mean", "weight_logits"]
        names += ["pair_factor"] if posterior.pairs_are_full else []
        names += ["directions"] if posterior.form == "low-rank" else []
        for name in names:
            parameter = getattr(posterior, name)
            parameter += torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if not posterior.pairs_are_full:
            posterior.pair_log_sd += 0.1
    return posterior


def dense(posterior: Posterior) -> Tensor:
    """(K, V, M, M) the covariances of whitened inducing values, by the definition of each form."""
    factor = posterior.factor.detach()
    if posterior.form == "low-rank":
        V = posterior.directions.detach()
        inner = torch.eye(M, dtype=torch.float64) + V @ V.mT
        precision = inner / factor[..., None] / factor[..., None, :]
        return torch.linalg.inv(precision)
    lower = torch.diag_embed(factor) if posterior.is_diagonal else factor.tril()
    return lower @ lower.mT


def unwhitened(posterior: Posterior, x: np.ndarray, k: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Mean (T, V) and covariance (V, T, T) at x (T, W), from component k, N(mu_j, S_j) of u."""
    Z = posterior.inducing.numpy()
    K_zz, K_xz = rbf(Z, Z), rbf(x, Z)
    L = np.linalg.cholesky(K_zz)
    A = K_xz @ np.linalg.inv(K_zz)
    K_tilde = rbf(x, x) - A @ K_xz.T
    means, covariances = [], []
    for m, S in zip(posterior.m[k].detach(), dense(posterior)[k], strict=True):
        means.append(A @ L @ m.numpy())
        covariances.append(K_tilde + A @ L @ S.numpy() @ L.T @ A.T)
    return np.stack(means, -1), np.stack(covariances)


@every_form
def test_mean_and_covariance_against_the_dense_formula(form: str) -> None:
    x, mask = inputs()
    posterior = random_posterior(rbf_kernel(), form=form)
    K = posterior.n_components
    with torch.no_grad():
        q = posterior.at(posterior.conditional(x, mask))
        mean, covariance = q.mean, q.covariance
    assert mean.shape == (K, B, T, V)
    assert covariance.shape == (K, B, V, T, T)
    for k in range(K):
        for b, n in enumerate(LENGTHS):
            expected_mean, expected_covariance = unwhitened(posterior, x[b, :n].numpy(), k)
            np.testing.assert_allclose(mean[k, b, :n], expected_mean, rtol=1e-6, atol=1e-6)
            found = covariance[k, b, :, :n, :n]
            np.testing.assert_allclose(found, expected_covariance, rtol=0, atol=2e-6)
            assert (mean[k, b, n:] == 0).all()
            assert (covariance[k, b, :, n:] == 0).all()
            assert (covariance[k, b, :, :, n:] == 0).all()


@every_form
def test_mean_and_covariance_have_gradients_in_everything(form: str) -> None:
    """In the parameters of q, the amplitude and the kernel."""
    x, mask = inputs()
    posterior = random_posterior(rbf_kernel(), form=form)
    names = ["m", "factor", "log_amplitude", "kernel.raw_lengthscale"]
    names += ["directions"] if posterior.form == "low-rank" else []
    parameters = tuple(p for name, p in posterior.named_parameters() if name in names)
    assert len(parameters) == len(names)

    def both(*values: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(sorted(names, key=order.index), values, strict=True))
        q = torch.func.functional_call(
            At(posterior), {"q." + n: v for n, v in given.items()}, (x, mask)
        )
        return q.mean, q.covariance

    order = [name for name, _ in posterior.named_parameters()]
    assert torch.autograd.gradcheck(both, parameters, atol=1e-5)


class At(torch.nn.Module):
    """``Posterior.at`` as a call, for parameters to be replaced in."""

    def __init__(self, q: Posterior) -> None:
        super().__init__()
        self.q = q

    def forward(self, x: Tensor, mask: Tensor) -> SequenceGaussian:
        return self.q.at(self.q.conditional(x, mask))


@every_form
def test_the_prior_is_where_nothing_was_learned(form: str) -> None:
    """In every family, and at no cost."""
    x, mask = inputs()
    posterior = Posterior(rbf_kernel(), inputs(5)[0][0], V, **FORMS[form])
    with torch.no_grad():
        q = posterior.at(posterior.conditional(x, mask))
        assert (q.mean == 0).all()
        expected = rbf(x[0].numpy(), x[0].numpy())
        for covariance in q.covariance[:, 0].flatten(0, 1):
            np.testing.assert_allclose(covariance, expected, rtol=0, atol=1e-6)
        assert posterior.kl_inducing().item() == pytest.approx(0, abs=1e-13)
        assert posterior.kl_pairwise().item() == 0
        pairs = posterior.pairwise().covariance
    assert torch.equal(pairs, torch.eye(V * V) if "two" in form else torch.ones(V, V))


@pytest.mark.parametrize("form", ["one full", "two full"])
def test_only_the_lower_triangle_counts(form: str) -> None:
    x, mask = inputs()
    posterior = random_posterior(rbf_kernel(), form=form)

    def everything() -> list[Tensor]:
        q, pairs = posterior.at(conditional), posterior.pairwise()
        answer = [q.covariance, posterior.kl_inducing(), posterior.kl_pairwise(), pairs.covariance]
        noise = torch.ones(2, V, V, dtype=torch.float64)
        return [*answer, pairs.place(noise)]

    with torch.no_grad():
        conditional = posterior.conditional(x, mask)
        before = everything()
        posterior.factor += 5 * torch.ones(M, M, dtype=torch.float64).triu(1)
        if posterior.pairs_are_full:
            posterior.pair_factor += 5 * torch.ones(V * V, V * V, dtype=torch.float64).triu(1)
        for one, other in zip(before, everything(), strict=True):
            torch.testing.assert_close(one, other)


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
    np.testing.assert_allclose(q.covariance[0, 1].detach(), 0, atol=1e-7)
    np.testing.assert_allclose(q.mean[0, 1].detach(), 0, atol=1e-7)


@pytest.mark.parametrize("K", [1, 2])
def test_inducing_at_all_distinct_rows_reproduces_q_of_u(K: int) -> None:
    """Whatever each component of q(u) is, q(f) at the same rows is it: nothing is left open."""
    x, mask = inputs()
    x[2, 1] = x[0, 3]
    x[2, 2] = x[0, 0]
    rows = x[mask]
    kernel = rbf_kernel()
    choice = choose_inducing(kernel, rows, 100)
    assert len(choice.index) == len(rows) - 2
    Z = rows[choice.index]
    rng = np.random.default_rng(0)
    mu = rng.normal(size=(K, V, len(Z)))
    root = np.tril(rng.normal(size=(K, V, len(Z), len(Z))))
    posterior = Posterior(kernel, Z, V, n_components=K)
    L = np.linalg.cholesky(rbf(Z.numpy(), Z.numpy()))
    with torch.no_grad():
        posterior.m.copy_(torch.tensor(np.linalg.solve(L, mu[..., None])[..., 0]))
        posterior.factor.copy_(torch.tensor(np.linalg.solve(L, root)))
        conditional = posterior.conditional(x, mask)
        q = posterior.at(conditional)
        mean, covariance = q.mean.numpy(), q.covariance.numpy()
    assert conditional.residual.abs().max() < 1e-3
    where = [[int((row == Z).all(-1).nonzero()) for row in x[b, :n]] for b, n in enumerate(LENGTHS)]
    for b, index in enumerate(where):
        n = LENGTHS[b]
        for k in range(K):
            np.testing.assert_allclose(mean[k, b, :n], mu[k][:, index].T, rtol=0, atol=1e-4)
            for j in range(V):
                expected = (root[k, j] @ root[k, j].T)[np.ix_(index, index)]
                found = covariance[k, b, j, :n, :n]
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)


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


# -- pairwise scores -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["one full", "two full"])
def test_pairwise_draws(form: str) -> None:
    """Linear in the numbers they are made of: unit vectors show the mean and the covariance."""
    posterior = random_posterior(rbf_kernel(), form=form)
    unit = torch.eye(V * V, dtype=torch.float64).reshape(-1, V, V)
    with torch.no_grad():
        q = posterior.pairwise()
        torch.testing.assert_close(q.place(0 * unit), posterior.pair_mean.expand_as(unit))
        away = (q.place(unit) - q.mean).flatten(1).numpy()
        doubled = q.place(2 * unit) - q.mean
        expected = q.covariance if q.is_full else torch.diag(q.covariance.flatten())
    np.testing.assert_allclose(doubled.flatten(1), 2 * away, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(away.T @ away, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(q.variance.flatten(), expected.diagonal(), rtol=1e-12)
    if q.is_full:
        lower = np.tril(posterior.pair_factor.detach().numpy())
        np.testing.assert_allclose(expected, lower @ lower.T, rtol=1e-12)
        assert np.abs(np.tril(expected, -1)).max() > 0.1
    else:
        np.testing.assert_allclose(expected.diagonal(), (0.8 * np.exp(0.1)) ** 2, rtol=1e-12)


@pytest.mark.parametrize("pairwise_covariance", ["diagonal", "full"])
def test_pairwise_scores_can_be_off(pairwise_covariance: Any) -> None:
    """From the start, or later on, when q(g) is somewhere else already."""
    given = {"pairwise_covariance": pairwise_covariance}
    never = Posterior(rbf_kernel(), inputs()[0][0], V, pairwise_sd=0.0, **given)
    later = Posterior(rbf_kernel(), inputs()[0][0], V, **given)
    with torch.no_grad():
        later.pair_mean += 1
        later.log_pairwise_sd.fill_(-torch.inf)
        noise = torch.ones(4, V, V, dtype=torch.float64)
        for posterior in (never, later):
            assert not posterior.has_pairs
            assert posterior.pairwise_sd == 0
            assert (posterior.pairwise().place(noise) == 0).all()
            assert (posterior.pairwise().covariance == 0).all()
            assert posterior.kl_pairwise().item() == 0


@pytest.mark.parametrize("form", ["one full", "two full"])
def test_kl_pairwise_against_torch(form: str) -> None:
    """V^2 dimensions: the paper's constant is V."""
    posterior = random_posterior(rbf_kernel(), form=form)
    q = posterior.pairwise()
    covariance = q.covariance if q.is_full else torch.diag(q.covariance.flatten())
    prior = 0.8**2 * torch.eye(V * V, dtype=torch.float64)
    expected = kl_divergence(
        MultivariateNormal(q.mean.flatten(), covariance),
        MultivariateNormal(torch.zeros(V * V, dtype=torch.float64), prior),
    )
    torch.testing.assert_close(posterior.kl_pairwise(), expected)


def test_the_pairwise_scale_has_a_gradient() -> None:
    for form in ("one full", "two full"):
        posterior = random_posterior(rbf_kernel(), form=form)
        (found,) = torch.autograd.grad(posterior.kl_pairwise(), posterior.log_pairwise_sd)
        with torch.no_grad():
            q = posterior.pairwise()
            # d KL / d log s = V^2 - (sum of second moments) / s^2.
            second = (q.mean.square() + q.variance).sum()
            torch.testing.assert_close(found, V * V - second / 0.8**2)


# -- the divergence of q(u) --------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["one full", "one diagonal", "one low-rank"])
def test_one_component_costs_its_exact_divergence(form: str) -> None:
    """And the bounds cost what they leave: nothing, and (1 - log 2) / 2 a dimension."""
    posterior = random_posterior(rbf_kernel(), form=form)
    zero, eye = torch.zeros(M, dtype=torch.float64), torch.eye(M, dtype=torch.float64)
    q = MultivariateNormal(posterior.m[0].detach(), dense(posterior)[0])
    exact = kl_divergence(q, MultivariateNormal(zero, eye)).sum()
    with torch.no_grad():
        for entropy in ("auto", "exact", "bhattacharyya"):
            torch.testing.assert_close(posterior.kl_inducing(entropy), exact)
        loose = 0.5 * (1 - np.log(2)) * V * M
        torch.testing.assert_close(posterior.kl_inducing("jensen"), exact + loose)


@pytest.mark.parametrize("form", ["two full", "two diagonal", "two low-rank"])
def test_a_mixture_costs_no_less_than_its_divergence(form: str) -> None:
    """100,000 draws; the better bound is the one that is used."""
    posterior = random_posterior(rbf_kernel(), form=form).requires_grad_(False)
    q = MixtureSameFamily(
        Categorical(posterior.weights),
        Independent(MultivariateNormal(posterior.m, dense(posterior)), 1),
    )
    torch.manual_seed(0)
    v = q.sample((100_000,))
    draws = q.log_prob(v) - Normal(0.0, 1.0).log_prob(v).sum((-1, -2))
    error = draws.std() / len(draws) ** 0.5
    found = posterior.kl_inducing()
    assert draws.mean() - 4 * error < found < draws.mean() + 0.7  # log 2: one bit at most
    assert found < posterior.kl_inducing("jensen")
    assert found == posterior.kl_inducing("bhattacharyya")


@every_form
@pytest.mark.parametrize("entropy", ["auto", "bhattacharyya", "jensen"])
def test_gradients_of_the_divergence(form: str, entropy: Any) -> None:
    posterior = random_posterior(rbf_kernel(), form=form)

    names = ["m", "factor", "weight_logits"]
    names += ["directions"] if posterior.form == "low-rank" else []

    def value(*values: Tensor) -> Tensor:
        given = {f"q.{name}": v for name, v in zip(names, values, strict=True)}
        return torch.func.functional_call(Cost(posterior), given, (entropy,))

    assert torch.autograd.gradcheck(value, tuple(getattr(posterior, name) for name in names))


class Cost(torch.nn.Module):
    """``Posterior.kl_inducing`` as a call, for parameters to be replaced in."""

    def __init__(self, q: Posterior) -> None:
        super().__init__()
        self.q = q

    def forward(self, entropy: Any) -> Tensor:
        return self.q.kl_inducing(entropy)


def test_no_exact_divergence_of_a_mixture() -> None:
    posterior = random_posterior(rbf_kernel(), form="two full")
    with pytest.raises(ValueError, match="'exact' has no closed form with 2 components"):
        posterior.kl_inducing("exact")


# -- forms ------------------------------------------------------------------------------------------


@every_form
def test_sizes(form: str) -> None:
    posterior = random_posterior(rbf_kernel(), form=form)
    K, diagonal, full = 1 + ("two" in form), "diagonal" in form, "two" in form
    low = "low-rank" in form
    assert (posterior.n_components, posterior.n_labels, posterior.n_inducing) == (K, V, M)
    assert (posterior.is_diagonal, posterior.pairs_are_full) == (diagonal, full)
    assert posterior.factor.shape == ((K, V, M) if diagonal or low else (K, V, M, M))
    assert posterior.form == form.split()[1]
    assert posterior.rank == (K + 1 if low else 0)
    assert posterior.weights.sum().item() == pytest.approx(1)
    torch.testing.assert_close(posterior.log_weights.exp(), posterior.weights)
    names = {name for name, _ in posterior.named_parameters() if not name.startswith("kernel.")}
    assert names == {
        "m",
        "factor",
        "weight_logits",
        "pair_mean",
        "pair_factor" if full else "pair_log_sd",
        "log_amplitude",
        "log_pairwise_sd",
        *(["directions"] if low else []),
    }


@every_form
def test_rounding_keeps_the_family(form: str) -> None:
    posterior = random_posterior(rbf_kernel(), form=form)
    before = posterior.factor.detach().clone()
    posterior.round_factor()
    lower = before.tril() if posterior.form == "full" else before
    assert torch.equal(posterior.factor, lower.float().double())
    if posterior.form == "low-rank":
        assert torch.equal(posterior.directions, posterior.directions.float().double())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"covariance": "banded"},
            "covariance: 'banded' is not known; use one of full, low-rank, diagonal",
        ),
        ({"pairwise_covariance": None}, "pairwise_covariance: None is not known"),
        ({"n_components": 0}, "n_components: 0 is too few"),
        ({"covariance": "low-rank", "rank": -1}, "rank: -1 is too few"),
        ({"pairwise_covariance": "low-rank"}, "pairwise_covariance: 'low-rank' is not known"),
    ],
)
def test_options_that_are_not_there(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Posterior(rbf_kernel(), inputs()[0][0], V, **given)
