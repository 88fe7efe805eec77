"""The posterior in weight space against dense one-hot features, and its draws against their moments."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from structgp.gp import Weights, contrasts
from structgp.gp.kernels import RelevanceKernel, covariance, weight_variances
from structgp.gp.kernels.block_sum import BlockSumKernel
from structgp.gp.kernels.sparse import pack
from structgp.gp.weight_rows import NOISE_ROWS, WeightConditional, _row, noise_table

V, R = 3, 2
SIZES, ATTRIBUTES = [3, 2], 4
LENGTHS = (4, 2, 3, 1)
B, T, AMPLITUDE = len(LENGTHS), 5, 1.7
KEYS = torch.tensor([3, 1, 7, 12])


# -- a posterior somewhere ---------------------------------------------------------------------------


def make_kernel(seed: int = 0) -> Kernel:
    """Two templates with rare values, and attributes; no parameter where it started."""
    rng = np.random.default_rng(seed)
    parts = [RelevanceKernel(SIZES, rare=True), RelevanceKernel([ATTRIBUTES], sparse=True)]
    parts[0].seldom.copy_(torch.tensor([True, False, False, False, True]))
    kernel = BlockSumKernel(parts, [(0, 2), (2, None)]).double().requires_grad_(False)
    for p in kernel.parameters():
        p.copy_(0.5 * torch.from_numpy(rng.normal(size=p.shape)))
    return kernel


def make_rows(seed: int = 10) -> tuple[Tensor, Tensor]:
    """Values missing, never seen, and some attributes twice. Padding looks like anything else."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, 5, size=(B, T, 2)).astype(float)
    names = rng.integers(-1, 6, size=(B, T, 3))
    values = np.where(names < 0, 0, rng.normal(1, 0.5, names.shape))
    packed = pack(torch.from_numpy(names), torch.from_numpy(values))
    mask = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
    return torch.cat([torch.from_numpy(ids), packed], -1), mask


def prior() -> Weights:
    return Weights(make_kernel(), (V,), contrasts(torch.tensor([3.0, 2.0, 1.0])))


@torch.no_grad()
def somewhere(seed: int = 2) -> Weights:
    q, rng = prior(), np.random.default_rng(seed)
    q.m.copy_(torch.from_numpy(rng.normal(size=q.m.shape)))
    q.factor.copy_(torch.from_numpy(rng.normal(size=q.factor.shape)))
    q.log_amplitude.fill_(np.log(AMPLITUDE))
    assert (q.factor < 0).any()
    return q


@dataclass(frozen=True)
class Dense:
    """One sequence: known (T, M), what its tokens hold of each weight; unseen (T, E), of features that
    were never seen, with the prior variances (E,) of theirs."""

    known: np.ndarray
    unseen: np.ndarray
    variance: np.ndarray


def dense(kernel: Kernel, x: np.ndarray) -> Dense:
    """Rows x (T, W), read value by value."""
    columns, bag = kernel.kernels
    D = sum(SIZES) + len(SIZES)
    M = D + 1 + ATTRIBUTES + 1
    known, found = np.zeros((len(x), M)), {}
    known[:, D] = known[:, M - 1] = 1
    scales = np.exp(columns.log_scale.numpy()), np.exp(bag.log_scale.numpy())
    seldom = columns.seldom.tolist()
    for t, row in enumerate(x):
        start = 0
        for p, size in enumerate(SIZES):
            value = int(row[p])
            if 0 <= value < size:
                known[t, start + value] = 1
            elif value >= size:
                found.setdefault((p, value), (scales[0][p], np.zeros(len(x))))[1][t] = 1
            if value >= size or (value >= 0 and seldom[start + value]):
                known[t, sum(SIZES) + p] = 1
            start += size
        for name, number in zip(row[2::2], row[3::2], strict=True):
            if 0 <= name < ATTRIBUTES:
                known[t, D + 1 + int(name)] += number
            elif name >= ATTRIBUTES:
                found.setdefault(name, (scales[1][0], np.zeros(len(x))))[1][t] += number
    unseen = np.array([column for _, column in found.values()]).reshape(-1, len(x)).T
    return Dense(known, unseen, np.array([variance for variance, _ in found.values()]))


def conditional(q: Weights, x: Tensor, mask: Tensor) -> WeightConditional:
    return q.conditional(x, mask, q.prior_factor())


def at(q: Weights, x: Tensor | None = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean (B, T, R) and covariance (B, R, T, T) of the functions."""
    rows, there = make_rows()
    mean, covariance = q.gaussian(conditional(q, rows if x is None else x, there if mask is None else mask))
    assert len(mean) == len(covariance) == 1
    return mean[0], covariance[0]


def test_the_rows_have_all_there_is() -> None:
    """Known, rare, unseen and missing, or the tests below say nothing of it."""
    (x, mask), kernel = make_rows(), make_kernel()
    parts = [dense(kernel, x[b, :n].numpy()) for b, n in enumerate(LENGTHS)]
    assert np.concatenate([p.known for p in parts]).any(0).all()
    assert all(p.unseen.shape[1] for p in parts[:3])
    assert (np.abs(parts[0].unseen) > 0).sum(0).max() > 1
    assert (x[mask] == -1).any(0)[:2].all()
    assert max(abs(p.known).max() for p in parts) > 2


# -- mean and covariance -------------------------------------------------------------------------------


@torch.no_grad()
def test_at_the_prior_it_is_the_prior() -> None:
    x, mask = make_rows()
    q = prior()
    mean, found = at(q)
    assert not mean.any()
    both = mask[:, None, :, None] & mask[:, None, None, :]
    expected = torch.where(both, covariance(q.kernel, x, x)[:, None], 0)
    torch.testing.assert_close(found, expected.expand(B, R, T, T))
    assert float(q.kl()) == pytest.approx(0, abs=1e-12)
    assert float(q.effective_parameters()) == 0


@torch.no_grad()
def test_mean_and_covariance_against_dense_features() -> None:
    x, _ = make_rows()
    q = somewhere()
    mean, found = at(q)
    assert mean.shape == (B, T, R)
    assert found.shape == (B, R, T, T)
    weights = weight_variances(q.kernel).numpy()
    for b, r in np.ndindex(B, R):
        n = LENGTHS[b]
        rows = dense(q.kernel, x[b, :n].numpy())
        beta = np.sqrt(weights) * q.m[r].numpy()
        expected = np.sqrt(AMPLITUDE) * rows.known @ beta
        np.testing.assert_allclose(mean[b, :n, r], expected, rtol=1e-10, atol=1e-12)
        spread = weights * q.factor[r].numpy() ** 2
        expected = rows.known * spread @ rows.known.T + rows.unseen * rows.variance @ rows.unseen.T
        here = found[b, r].numpy()
        np.testing.assert_allclose(here[:n, :n], AMPLITUDE * expected, rtol=1e-10, atol=1e-12)
        assert not here[n:].any()
        assert not here[:, n:].any()
        assert not mean[b, n:].any()


class At(torch.nn.Module):
    """``Weights.gaussian`` as a call, for parameters to be replaced in."""

    def __init__(self, q: Weights) -> None:
        super().__init__()
        self.q = q

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return at(self.q, x, mask)


def test_mean_and_covariance_have_gradients_in_everything() -> None:
    """In m, the standard deviations, the amplitude and the kernel."""
    x, mask = make_rows()
    q = somewhere()
    q.kernel.requires_grad_(True)
    names = ["m", "factor", "log_amplitude"]
    names += [f"kernel.{name}" for name, _ in q.kernel.named_parameters()]
    parameters = dict(q.named_parameters())

    def both(*values: Tensor) -> tuple[Tensor, Tensor]:
        given = {f"q.{name}": value for name, value in zip(names, values, strict=True)}
        return torch.func.functional_call(At(q), given, (x[:2], mask[:2]))

    assert torch.autograd.gradcheck(both, tuple(parameters[name] for name in names))


@torch.no_grad()
def test_an_amplitude_is_a_factor_on_the_kernel() -> None:
    q, scaled = somewhere(), somewhere()
    scaled.log_amplitude.fill_(0)
    for name, p in scaled.kernel.named_parameters():
        if name.endswith("log_scale"):
            p += np.log(AMPLITUDE)
    for one, other in zip(at(q), at(scaled), strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_sizes() -> None:
    q = prior()
    M = sum(SIZES) + len(SIZES) + 1 + ATTRIBUTES + 1
    assert q.m.shape == q.factor.shape == (R, M)
    assert (q.n_scores, q.n_functions, q.n_values, q.n_components) == (V, R, M, 1)
    torch.testing.assert_close(q.prior_factor(), weight_variances(q.kernel).sqrt())
    x, mask = make_rows()
    held = conditional(q, x, mask).features
    numbers = sum(getattr(held, name).numel() for name in ("place", "value", "name", "unseen"))
    assert numbers <= q.conditional_size(mask, x.shape[-1]) <= 4 * numbers


# -- products ------------------------------------------------------------------------------------------


def whole(q: Weights) -> np.ndarray:
    """(B, T, M) A of all tokens, zero at padding."""
    x, mask = make_rows()
    rows = [dense(q.kernel, x[b].numpy()).known * mask[b].numpy()[:, None] for b in range(B)]
    return np.sqrt(AMPLITUDE * weight_variances(q.kernel).numpy()) * np.stack(rows)


@torch.no_grad()
def test_products_against_dense_ones() -> None:
    q, rng = somewhere(), np.random.default_rng(4)
    A, here = whole(q) / AMPLITUDE**0.5, conditional(q, *make_rows())
    h = rng.normal(size=(B, T, R))
    np.testing.assert_allclose(here.times(q.m), A @ q.m.numpy().T, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(q.scale * here.times(q.m), at(q)[0])
    found = here.transposed_times(torch.from_numpy(h))
    np.testing.assert_allclose(found, np.einsum("btm,btr->rm", A, h), rtol=1e-10, atol=1e-12)
    found = here.squares_times(torch.from_numpy(h))
    np.testing.assert_allclose(found, np.einsum("btm,btr->rm", A**2, h), rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_products_are_adjoint() -> None:
    q, rng = somewhere(), np.random.default_rng(5)
    here = conditional(q, *make_rows())
    h = torch.from_numpy(rng.normal(size=(B, T, R)))
    left = (here.times(q.m) * h).sum()
    right = (q.m * here.transposed_times(h)).sum()
    torch.testing.assert_close(left, right)


# -- draws ---------------------------------------------------------------------------------------------


def row_of(name: int, key: int | None = None) -> int:
    keys = None if key is None else torch.tensor([key])
    return int(_row(torch.tensor([[name]]), keys, NOISE_ROWS))


def unit_table(here: WeightConditional, keys: Tensor | None = None) -> Tensor:
    """(NOISE_ROWS, R, n) numbers whose second moments are exactly those of noise: every feature that occurs
    has an axis of its own, and its own sign in each function."""
    found = here.features
    rows = [_row(found.name[..., a], keys, NOISE_ROWS) for a in range(found.name.shape[-1])]
    used = torch.unique(torch.stack(rows, -1)[found.value != 0])
    names = [
        (name, key)
        for b in range(len(found.name))
        for name in torch.unique(found.name[b][found.value[b] != 0]).tolist()
        for key in [None if keys is None else int(keys[b])]
    ]
    assert len(used) == len(set(names)), "two features share a row"
    n = len(used)
    table = torch.full((NOISE_ROWS, R, n), torch.nan, dtype=torch.float64)
    for r in range(R):
        table[used, r] = (-1) ** r * n**0.5 * torch.eye(n, dtype=torch.float64)
    # Rows of what is not there are read as well.
    return table.nan_to_num(7.0)


@torch.no_grad()
@pytest.mark.parametrize("keys", [None, KEYS], ids=["same weights", "own weights"])
def test_draws_have_the_covariance_exactly(keys: Tensor | None) -> None:
    """Of noise whose second moments are exact; between sequences too, where they share their weights."""
    q, (x, _) = somewhere(), make_rows()
    here = conditional(q, *make_rows())
    table = unit_table(here, keys)
    n = table.shape[-1]
    draws = q.scale * here.spread(q.factor, table, keys)
    assert draws.shape == (2 * n, B, T, R)
    assert torch.equal(draws[n:], -draws[:n])
    found = torch.einsum("sbtr,sbur->brtu", draws, draws) / (2 * n)
    torch.testing.assert_close(found, at(q)[1])
    between = torch.einsum("str,sur->rtu", draws[:, 0, : LENGTHS[0]], draws[:, 2, : LENGTHS[2]])
    together = torch.cat([x[0, : LENGTHS[0]], x[2, : LENGTHS[2]]])[None]
    shared = at(q, together, torch.ones(together.shape[:2], dtype=torch.bool))[1]
    expected = shared[0, :, : LENGTHS[0], LENGTHS[0] :]
    assert (expected.abs() > 0.01).all()
    torch.testing.assert_close(between / (2 * n), expected * (keys is None))


@torch.no_grad()
def test_draws_have_the_covariance_of_the_posterior() -> None:
    """4,000 pairs from tables of noise, five standard errors; the mean is exactly zero, and functions and
    sequences have nothing to do with each other."""
    n, rounds = 400, 10
    q, expected = somewhere(), at(somewhere())[1]
    here = conditional(q, *make_rows())
    total = torch.zeros(B, T, R, dtype=torch.float64)
    found, sequences = torch.zeros_like(expected), torch.zeros_like(expected[0])
    functions = torch.zeros_like(expected[:, 0])
    for seed in range(rounds):
        table = noise_table(R, n, torch.Generator().manual_seed(seed))
        draws = q.scale * here.spread(q.factor.abs(), table, KEYS)
        total += draws.sum(0)
        half = draws[:n]
        found += torch.einsum("sbtr,sbur->brtu", half, half) / (n * rounds)
        sequences += torch.einsum("str,sur->rtu", half[:, 0], half[:, 2]) / (n * rounds)
        functions += torch.einsum("sbt,sbu->btu", half[..., 0], half[..., 1]) / (n * rounds)
    assert total.abs().max() < 1e-9
    sd, few = expected.diagonal(dim1=-1, dim2=-2).sqrt(), 5 / (n * rounds) ** 0.5

    def of(left: Tensor, right: Tensor) -> Tensor:
        return left[..., :, None] * right[..., None, :]

    error = (of(sd, sd).square() + expected.square()).sqrt()
    assert ((found - expected).abs() <= few * error).all()
    assert (sequences.abs() <= few * of(sd[0], sd[2])).all()
    assert (functions.abs() <= few * of(sd[:, 0], sd[:, 1])).all()


@torch.no_grad()
@pytest.mark.parametrize("keyed", [False, True])
def test_draws_of_a_sequence_are_its_own(keyed: bool) -> None:
    """Neither padding nor what else is in the batch has a part in them."""
    q, (x, mask) = somewhere(), make_rows()
    keys = KEYS if keyed else None
    table = noise_table(R, 3, torch.Generator().manual_seed(0))
    draws = conditional(q, x, mask).spread(q.factor, table, keys)
    for b, n in enumerate(LENGTHS):
        assert not draws[:, b, n:].any()
        assert draws[:, b, :n].any(-1).all()
        alone = conditional(q, x[b : b + 1, :n], mask[b : b + 1, :n])
        own = None if keys is None else keys[b : b + 1]
        assert torch.equal(alone.spread(q.factor, table, own)[:, 0], draws[:, b, :n])


@torch.no_grad()
def test_a_feature_has_one_deviation_or_one_in_each_sequence() -> None:
    """The same token twice in one sequence, and once in another."""
    q, (x, _) = somewhere(), make_rows()
    rows = torch.stack([x[0, :2], x[0, :2]])
    rows[0, 1] = rows[0, 0]
    here = conditional(q, rows, torch.ones(2, 2, dtype=torch.bool))
    table = noise_table(R, 3, torch.Generator().manual_seed(0))
    same = here.spread(q.factor, table)
    own = here.spread(q.factor, table, torch.tensor([0, 1]))
    for draws in (same, own):
        assert torch.equal(draws[:, 0, 0], draws[:, 0, 1])
    assert torch.equal(same[:, 0, 0], same[:, 1, 0])
    assert ((own[:, 0, 0] - own[:, 1, 0]).abs() > 1e-3).all()
    again = here.spread(q.factor, table, torch.tensor([1, 1]))
    assert torch.equal(again[:, 0, 0], again[:, 1, 0])
    assert torch.equal(again[:, 0, 0], own[:, 1, 0])


@torch.no_grad()
def test_what_the_data_settles_does_not_move() -> None:
    """Draws with no deviation left are of the features that were never seen, at their prior variance."""
    q = somewhere()
    here = conditional(q, *make_rows())
    draws = here.spread(torch.zeros_like(q.factor), unit_table(here))
    found = torch.einsum("sbtr,sbur->brtu", draws, draws) / len(draws)
    for b, n in enumerate(LENGTHS):
        rows = dense(q.kernel, make_rows()[0][b, :n].numpy())
        expected = rows.unseen * rows.variance @ rows.unseen.T
        for r in range(R):
            np.testing.assert_allclose(found[b, r, :n, :n], expected, rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_weights_that_do_not_occur_are_not_asked() -> None:
    """Functions of a batch through its own weights alone are those through all of them."""
    q, (x, mask) = somewhere(), make_rows()
    here = conditional(q, x[:1], mask[:1])
    index, _ = here.compact
    assert len(index) < q.n_values
    noise = q.fixed_noise(3, [mask[:1]], torch.Generator().manual_seed(0))
    found = q.drawn_functions(here, noise, 0, KEYS[:1])
    expected = here.times(q.m) + here.spread(q.factor.abs(), noise, KEYS[:1])
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_draws_scale_with_the_amplitude() -> None:
    q, rows = somewhere(), make_rows()
    draws = q.draws(4, 0, torch.Generator().manual_seed(0))
    before = draws.at(q, *rows)
    q.log_amplitude += 1.0
    torch.testing.assert_close(draws.at(q, *rows), math.exp(0.5) * before)


@torch.no_grad()
def test_features_of_two_kinds_do_not_share_noise() -> None:
    """Value 0 of the first template and attribute 0 are two features; a value of zero is none."""
    q = prior()
    x = torch.tensor([[[0, -1, -1, 0], [-1, -1, 0, 1.0], [-1, 0, -1, 0]]], dtype=torch.float64)
    here = conditional(q, x, torch.ones(1, 3, dtype=torch.bool))
    assert len({row_of(n) for n in here.features.name[here.features.value != 0].tolist()}) == 6
    # Without the constants, and without being rare, nothing is left in common.
    constant = torch.tensor([False, False, False, False, True, False, True])
    value = torch.where(constant, 0, here.features.value)
    value[..., 2:4] = 0
    alone = replace(here, features=replace(here.features, value=value))
    draws = alone.spread(q.factor, unit_table(alone))
    found = torch.einsum("stz,suz->tu", draws[:, 0], draws[:, 0])
    assert not (found - found.diagonal().diag()).any()
    assert (found.diagonal() > 0).all()


@torch.no_grad()
def test_a_step_of_the_scales_leaves_the_weights_and_what_the_data_say_of_them() -> None:
    """Scales of the prior move; means of the weights, and their precision beyond the prior's, do not."""
    q = somewhere()
    q.factor.copy_(0.2 + 0.7 * q.factor.abs() / q.factor.abs().max())
    before, size = q.knowledge()[0], q.basis.norm(dim=0)
    mean, scales = size * (q.prior_factor() * q.m).T, q.prior_factor().clone()
    q.learn_scales()
    after, grown = q.knowledge()[0], q.basis.norm(dim=0) / size
    assert not torch.allclose(q.prior_factor(), scales)
    torch.testing.assert_close(grown * size * (q.prior_factor() * q.m).T, mean)
    torch.testing.assert_close(after / grown.square(), before)
