"""Posteriors at inducing inputs, one Gaussian or a mixture, against the textbook's dense formulas."""

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

from structgp import InputError
from structgp.gp import Inducing, Mixture, choose_inducing
from structgp.gp.families.inducing_points import InducingBlock
from structgp.gp.inducing_inputs import Projection
from structgp.gp.kernels import TemplateKernel

LENGTHS = (4, 1, 3)
B, T, V, M, W = 3, 4, 2, 5, 2
LENGTH_SCALE = 1.2


def rbf(x: np.ndarray, z: np.ndarray) -> np.ndarray:
    square = ((x[:, None] - z[None]) ** 2).sum(-1)
    return np.exp(-0.5 * square / LENGTH_SCALE**2)


def rbf_kernel() -> RBFKernel:
    kernel = RBFKernel().double()
    kernel.lengthscale = torch.tensor(LENGTH_SCALE, dtype=torch.float64)
    return kernel


def inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, T, W, generator=generator, dtype=torch.float64)
    return x, torch.arange(T) < torch.tensor(LENGTHS)[:, None]


FORMS: dict[str, dict[str, Any]] = {
    "one full": {},
    "one diagonal": {"covariance": "diagonal"},
    "one low-rank": {"covariance": "low-rank", "rank": 2},
    "two full": {"n_components": 2},
    "two low-rank": {"n_components": 2, "covariance": "low-rank", "rank": 3},
    "two diagonal": {"n_components": 2, "covariance": "diagonal"},
}
"""Arguments of ``Inducing``, or of ``Mixture`` where there are several components, by name."""

every_form = pytest.mark.parametrize("form", FORMS)


def make(kernel: Kernel, inducing: Tensor, form: str) -> InducingBlock:
    family = Mixture if "two" in form else Inducing
    return family(kernel, inducing, (V,), **FORMS[form])


def parameters(block: InducingBlock) -> list[str]:
    names = ["m", "factor"]
    names += ["weight_logits"] if isinstance(block, Mixture) else []
    return names + (["directions"] if block.form == "low-rank" else [])


def somewhere(
    kernel: Kernel, seed: int = 1, inducing: Tensor | None = None, form: str = "one full"
) -> InducingBlock:
    """No parameter of the posterior where it started."""
    generator = torch.Generator().manual_seed(seed)
    if inducing is None:
        inducing = 1.5 * torch.randn(M, W, generator=generator, dtype=torch.float64)
    block = make(kernel, inducing, form)
    with torch.no_grad():
        for name in parameters(block):
            parameter = getattr(block, name)
            parameter += torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return block


def conditional(block: InducingBlock, x: Tensor, mask: Tensor) -> Projection:
    return block.conditional(x, mask, block.prior_factor())


def gaussian(block: InducingBlock, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Means (K, B, T, V) and covariances (K, B, V, T, T)."""
    return block.gaussian(conditional(block, x, mask))


def dense(block: InducingBlock) -> Tensor:
    """(K, V, M, M) the covariances of whitened inducing values, by the definition of each form."""
    factor = block.factor.detach()
    if block.form == "low-rank":
        directions = block.directions.detach()
        inner = torch.eye(M, dtype=torch.float64) + directions @ directions.mT
        S = torch.linalg.inv(inner / factor[..., None] / factor[..., None, :])
    else:
        lower = torch.diag_embed(factor) if block.form == "diagonal" else factor.tril()
        S = lower @ lower.mT
    return S.reshape(-1, V, M, M)


def means(block: InducingBlock) -> Tensor:
    """(K, V, M)."""
    return block.m.detach().reshape(-1, V, block.n_values)


def unwhitened(block: InducingBlock, x: np.ndarray, k: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Mean (T, V) and covariance (V, T, T) at x (T, W), from component k, N(mu_j, S_j) of u."""
    Z = block.inducing.numpy()
    K_zz, K_xz = rbf(Z, Z), rbf(x, Z)
    L = np.linalg.cholesky(K_zz)
    A = K_xz @ np.linalg.inv(K_zz)
    K_tilde = rbf(x, x) - A @ K_xz.T
    found_means, covariances = [], []
    for m, S in zip(means(block)[k], dense(block)[k], strict=True):
        found_means.append(A @ L @ m.numpy())
        covariances.append(K_tilde + A @ L @ S.numpy() @ L.T @ A.T)
    return np.stack(found_means, -1), np.stack(covariances)


# -- mean and covariance of the functions ----------------------------------------------------------


@every_form
def test_mean_and_covariance_against_the_dense_formula(form: str) -> None:
    x, mask = inputs()
    block = somewhere(rbf_kernel(), form=form)
    K = block.n_components
    with torch.no_grad():
        mean, covariance = gaussian(block, x, mask)
    assert mean.shape == (K, B, T, V)
    assert covariance.shape == (K, B, V, T, T)
    for k in range(K):
        for b, n in enumerate(LENGTHS):
            expected_mean, expected_covariance = unwhitened(block, x[b, :n].numpy(), k)
            np.testing.assert_allclose(mean[k, b, :n], expected_mean, rtol=1e-6, atol=1e-6)
            found = covariance[k, b, :, :n, :n]
            np.testing.assert_allclose(found, expected_covariance, rtol=0, atol=2e-6)
            assert (mean[k, b, n:] == 0).all()
            assert (covariance[k, b, :, n:] == 0).all()
            assert (covariance[k, b, :, :, n:] == 0).all()


class Call(torch.nn.Module):
    """A function of the block as a module's call, for parameters to be replaced in."""

    def __init__(self, q: InducingBlock, function: Any) -> None:
        super().__init__()
        self.q, self.function = q, function

    def forward(self) -> Any:
        return self.function(self.q)


def has_gradients(block: InducingBlock, names: list[str], function: Any, **close: float) -> bool:
    """``gradcheck`` of a function of the block, in the parameters ``names``."""

    def value(*values: Tensor) -> Any:
        given = {f"q.{name}": v for name, v in zip(names, values, strict=True)}
        return torch.func.functional_call(Call(block, function), given)

    every = dict(block.named_parameters())
    return torch.autograd.gradcheck(value, tuple(every[name] for name in names), **close)


@every_form
def test_mean_and_covariance_have_gradients_in_everything(form: str) -> None:
    """In the parameters of q, the amplitude and the kernel."""
    x, mask = inputs()
    block = somewhere(rbf_kernel(), form=form)
    names = [name for name in parameters(block) if name != "weight_logits"]
    names += ["log_amplitude", "kernel.raw_lengthscale"]
    assert has_gradients(block, names, lambda q: gaussian(q, x[:2, :3], mask[:2, :3]), atol=1e-5)


@every_form
def test_the_posterior_starts_at_the_prior(form: str) -> None:
    """In every family, and at no cost."""
    x, mask = inputs()
    block = make(rbf_kernel(), inputs(5)[0][0], form)
    with torch.no_grad():
        mean, covariance = gaussian(block, x, mask)
        assert (mean == 0).all()
        expected = rbf(x[0].numpy(), x[0].numpy())
        for found in covariance[:, 0].flatten(0, 1):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        assert block.kl().item() == pytest.approx(0, abs=1e-13)
        assert float(block.effective_parameters()) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("form", ["one full", "two full"])
def test_only_the_lower_triangle_counts(form: str) -> None:
    x, mask = inputs()
    block = somewhere(rbf_kernel(), form=form)

    def everything() -> list[Tensor]:
        drawn = block.draws(4, 0, torch.Generator().manual_seed(0)).values
        return [*gaussian(block, x, mask), block.kl(), block.effective_parameters(), drawn]

    with torch.no_grad():
        before = everything()
        block.factor += 5 * torch.ones(M, M, dtype=torch.float64).triu(1)
        for one, other in zip(before, everything(), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("where", ["elsewhere", "at X"])
def test_padding_and_batching_leave_the_conditional_alone(where: str) -> None:
    """Under a kernel that is not stationary: examples differ in their prior variance."""
    x, mask = inputs()
    kernel = ScaleKernel(rbf_kernel()) + LinearKernel()
    inducing = x[mask] if where == "at X" else None
    block = somewhere(kernel.double(), inducing=inducing)
    with torch.no_grad():
        together = conditional(block, x, mask)
        wide = torch.cat([x, torch.full((B, 3, W), 50.0, dtype=torch.float64)], 1)
        wide[1, 1:] = -7.0
        padded = conditional(block, wide, torch.nn.functional.pad(mask, (0, 3)))
        assert (padded.projection[:, T:] == 0).all()
        assert (padded.residual[:, T:] == 0).all()
        assert (padded.residual[:, :, T:] == 0).all()
        torch.testing.assert_close(padded.projection[:, :T], together.projection)
        # sqrt of the jitter is 1e-4: this would see a jitter that depends on padding.
        torch.testing.assert_close(padded.residual[:, :T, :T], together.residual, rtol=0, atol=3e-7)
        for b, n in enumerate(LENGTHS):
            alone = conditional(block, x[b : b + 1, :n], mask[b : b + 1, :n])
            torch.testing.assert_close(alone.projection[0], together.projection[b, :n])
            found = together.residual[b, :n, :n]
            torch.testing.assert_close(alone.residual[0], found, rtol=0, atol=3e-7)


def test_an_example_of_nothing_but_padding() -> None:
    x, mask = inputs()
    mask = mask.clone()
    mask[1] = False
    with torch.no_grad():
        found = conditional(somewhere(rbf_kernel()), x, mask)
    assert (found.projection[1] == 0).all()
    assert (found.residual[1] == 0).all()
    assert found.residual.isfinite().all()


def test_an_example_without_features() -> None:
    """A row that agrees with nothing has no prior variance at all."""
    rows = torch.tensor([[[0.0, 1.0], [-1.0, -1.0]], [[-1.0, -1.0], [-1.0, -1.0]]]).double()
    block = somewhere(TemplateKernel(2).double(), inducing=rows[0, :1])
    with torch.no_grad():
        mean, covariance = gaussian(block, rows, torch.ones(2, 2, dtype=torch.bool))
    assert covariance.isfinite().all()
    np.testing.assert_allclose(covariance[0, 1], 0, atol=1e-7)
    np.testing.assert_allclose(mean[0, 1], 0, atol=1e-7)


@pytest.mark.parametrize("form", ["one full", "two full"])
def test_inducing_at_all_distinct_rows_reproduces_q_of_u(form: str) -> None:
    """Whatever each component of q(u) is, q(f) at the same rows is it: nothing is left open."""
    x, mask = inputs()
    x[2, 1] = x[0, 3]
    x[2, 2] = x[0, 0]
    rows = x[mask]
    kernel = rbf_kernel()
    choice = choose_inducing(kernel, rows, 100)
    assert len(choice.index) == len(rows) - 2
    Z = rows[choice.index]
    block = make(kernel, Z, form)
    K, rng = block.n_components, np.random.default_rng(0)
    mu = rng.normal(size=(K, V, len(Z)))
    root = np.tril(rng.normal(size=(K, V, len(Z), len(Z))))
    L = np.linalg.cholesky(rbf(Z.numpy(), Z.numpy()))
    with torch.no_grad():
        block.m.copy_(torch.tensor(np.linalg.solve(L, mu[..., None])[..., 0]).view_as(block.m))
        block.factor.copy_(torch.tensor(np.linalg.solve(L, root)).view_as(block.factor))
        assert conditional(block, x, mask).residual.abs().max() < 1e-3
        mean, covariance = gaussian(block, x, mask)
    where = [[int((row == Z).all(-1).nonzero()) for row in x[b, :n]] for b, n in enumerate(LENGTHS)]
    for b, index in enumerate(where):
        n = LENGTHS[b]
        for k in range(K):
            np.testing.assert_allclose(mean[k, b, :n], mu[k][:, index].T, rtol=0, atol=1e-4)
            for j in range(V):
                expected = (root[k, j] @ root[k, j].T)[np.ix_(index, index)]
                found = covariance[k, b, j, :n, :n]
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("form", ["one full", "two full"])
def test_the_amplitude_is_a_factor_on_the_kernel(form: str) -> None:
    x, mask = inputs()
    scaled = ScaleKernel(rbf_kernel()).double()
    scaled.outputscale = torch.tensor(2.5, dtype=torch.float64)
    one, other = somewhere(rbf_kernel(), form=form), somewhere(scaled, form=form)
    with torch.no_grad():
        one.log_amplitude.fill_(np.log(2.5))
        for a, b in zip(gaussian(one, x, mask), gaussian(other, x, mask), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


# -- the divergence from the prior --------------------------------------------------------------------


@pytest.mark.parametrize("form", ["one full", "one diagonal", "one low-rank"])
def test_one_component_costs_its_exact_divergence(form: str) -> None:
    """And the paper's bound costs what it leaves: (1 - log 2) / 2 per dimension."""
    block = somewhere(rbf_kernel(), form=form)
    zero, eye = torch.zeros(M, dtype=torch.float64), torch.eye(M, dtype=torch.float64)
    q = MultivariateNormal(means(block)[0], dense(block)[0])
    exact = kl_divergence(q, MultivariateNormal(zero, eye)).sum()
    with torch.no_grad():
        torch.testing.assert_close(block.kl(), exact)
        torch.testing.assert_close(block.kl("bhattacharyya"), exact)
        loose = 0.5 * (1 - np.log(2)) * V * M
        torch.testing.assert_close(block.kl("jensen"), exact + loose)


@pytest.mark.parametrize("form", ["two full", "two diagonal", "two low-rank"])
def test_a_mixture_costs_no_less_than_its_divergence(form: str) -> None:
    """40,000 draws; the better bound is the one that is used."""
    block = somewhere(rbf_kernel(), form=form).requires_grad_(False)
    q = MixtureSameFamily(
        Categorical(block.mixing), Independent(MultivariateNormal(block.m, dense(block)), 1)
    )
    torch.manual_seed(0)
    v = q.sample((40_000,))
    draws = q.log_prob(v) - Normal(0.0, 1.0).log_prob(v).sum((-1, -2))
    error = draws.std() / len(draws) ** 0.5
    found = block.kl()
    assert draws.mean() - 4 * error < found < draws.mean() + 0.7  # log 2: one bit at most
    assert found < block.kl("jensen")
    assert found == block.kl("bhattacharyya")


@every_form
@pytest.mark.parametrize("entropy", ["bhattacharyya", "jensen"])
def test_gradients_of_the_divergence(form: str, entropy: Any) -> None:
    block = somewhere(rbf_kernel(), form=form)
    assert has_gradients(block, parameters(block), lambda q: q.kl(entropy))


@every_form
def test_effective_parameters_count_what_is_narrower_than_the_prior(form: str) -> None:
    """sum over components of their weight times M V - tr S."""
    block = somewhere(rbf_kernel(), form=form).requires_grad_(False)
    trace = dense(block).diagonal(dim1=-1, dim2=-2).sum((-1, -2))
    torch.testing.assert_close(block.effective_parameters(), block.mixing @ (M * V - trace))


# -- forms ------------------------------------------------------------------------------------------


@every_form
def test_sizes(form: str) -> None:
    block = somewhere(rbf_kernel(), form=form)
    K, kind = 1 + ("two" in form), form.split()[1]
    lead = (2, V) if K == 2 else (V,)
    assert (block.n_components, block.n_functions, block.n_values) == (K, V, M)
    assert block.m.shape == (*lead, M)
    assert block.factor.shape == ((*lead, M, M) if kind == "full" else (*lead, M))
    assert block.form == kind
    assert block.rank == (K + 1 if kind == "low-rank" else 0)
    assert block.mixing.shape == (K,)
    assert block.mixing.sum().item() == pytest.approx(1)
    names = {name for name, _ in block.named_parameters() if not name.startswith("kernel.")}
    assert names == {*parameters(block), "log_amplitude"}
    moved = {id(p) for p in [*block.mean_parameters(), *block.spread_parameters()]}
    assert moved == {id(getattr(block, name)) for name in parameters(block)}
    again = type(block)(block.kernel, block.inducing, block.labels, **block.options())
    again.load_state_dict(block.state_dict())


@every_form
def test_rounding_keeps_the_family(form: str) -> None:
    block = somewhere(rbf_kernel(), form=form)
    before = block.factor.detach().clone()
    block.round_factor()
    lower = before.tril() if block.form == "full" else before
    assert torch.equal(block.factor, lower.float().double())
    assert not torch.equal(block.factor, lower)
    if block.form == "low-rank":
        assert torch.equal(block.directions, block.directions.float().double())


@pytest.mark.parametrize(
    ("family", "given", "text"),
    [
        (
            Inducing,
            {"covariance": "banded"},
            "covariance: 'banded' is not known; use one of full, low-rank, diagonal",
        ),
        (Mixture, {"n_components": 0}, "n_components: must be 1 or more, got 0"),
        (Inducing, {"covariance": "low-rank", "rank": -1}, "rank: must be 0 or more, got -1"),
        (Inducing, {"basis": torch.eye(V + 1)}, r"basis: \(3, 3\) for 2 scores"),
    ],
)
def test_options_that_are_not_there(family: Any, given: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        family(rbf_kernel(), inputs()[0][0], (V,), **given)


# -- one Gaussian and several ---------------------------------------------------------------------------


def test_a_mixture_of_copies_is_its_one_component() -> None:
    """The same Gaussian, and with the Bhattacharyya entropy the same cost."""
    x, mask = inputs()
    several = somewhere(rbf_kernel(), form="two full")
    assert isinstance(several, Mixture)
    with torch.no_grad():
        several.log_amplitude.fill_(0.3)
        one = several.alone()
        assert float(one.kl()) == 0
        one.m += 0.7
        one.factor += 0.2 * torch.ones(M, M, dtype=torch.float64)
        several.copy_from(one)
        assert several.mixing.tolist() == [0.5, 0.5]
        torch.testing.assert_close(several.kl(), one.kl())
        for a, b in zip(gaussian(several, x, mask), gaussian(one, x, mask), strict=True):
            torch.testing.assert_close(a, b.expand_as(a))


def test_components_are_moved_apart_by_posterior_deviations() -> None:
    """By 0.5 standard deviations: steps with a mean square of a quarter, within five standard errors."""
    block = somewhere(rbf_kernel(), form="two full")
    assert isinstance(block, Mixture)
    before = block.m.detach().clone()
    n = 200
    moved = []
    for seed in range(n):
        with torch.no_grad():
            block.m.copy_(before)
        block.separate(torch.Generator().manual_seed(seed), by=0.5)
        lower = block.factor.detach().tril()
        step = (block.m.detach() - before)[..., None]
        moved.append(torch.linalg.solve_triangular(lower, step, upper=False))
    count = n * before.numel()
    found = float(torch.stack(moved).square().mean())
    assert found == pytest.approx(0.25, abs=5 * 0.25 * (2 / count) ** 0.5)
