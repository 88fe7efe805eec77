"""Kernels for more features than they were learned on: what was learned stays where it was."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from structgp.gp.kernels import RelevanceKernel, covariance, weight_variances
from structgp.gp.kernels.block_sum import BlockSumKernel
from structgp.gp.kernels.relevance import SELDOM, active_features, grown

sizes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


def learned(n: list[int], seed: int, *, is_sparse: bool = False, rare: bool = True) -> RelevanceKernel:
    generator = torch.Generator().manual_seed(seed)
    kernel = RelevanceKernel(n, sparse=is_sparse, rare=rare and not is_sparse).double()
    with torch.no_grad():
        for p in (kernel.log_scale, kernel.log_relevance):
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
        if kernel.rare:
            kernel.seldom.copy_(torch.rand(len(kernel.seldom), generator=generator) < 0.5)
    return kernel


def some_rows(n: list[int], N: int, seed: int) -> Tensor:
    """(N, P) ids of known values, some of them missing."""
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(-1, size, (N,), generator=generator) for size in n]
    return torch.stack(columns, 1).double()


def packed(ids: Tensor, seed: int) -> Tensor:
    """(N, 2 A) pairs of id and value."""
    values = torch.randn(ids.shape, generator=torch.Generator().manual_seed(seed))
    return torch.stack([ids.double(), values.double()], -1).flatten(-2)


@settings(max_examples=40, deadline=None)
@given(sizes, st.data(), st.booleans(), st.integers(0, 99))
def test_old_rows_have_the_same_prior(n: list[int], data: st.DataObject, rare: bool, seed: int) -> None:
    """Covariances of each two of them: also where a value has become one of many."""
    now = [was + data.draw(st.integers(0, 3)) for was in n]
    old, rows = learned(n, seed, rare=rare), some_rows(n, 8, seed)
    # So few that nothing which was seldom comes often now.
    new, place = grown(old, [now], some_rows(now, SELDOM, seed + 1))
    torch.testing.assert_close(covariance(new, rows, rows), covariance(old, rows, rows))
    torch.testing.assert_close(weight_variances(new)[place], weight_variances(old))
    before, after = active_features(old, rows), active_features(new, rows)
    kept = torch.where(before.place >= 0, place[before.place.clamp(min=0)], -1)
    assert torch.equal(kept, after.place)
    assert torch.equal(before.value, after.value)


@settings(max_examples=20, deadline=None)
@given(sizes, st.data(), st.integers(0, 99))
def test_new_features_begin_with_what_their_group_has_taught(
    n: list[int], data: st.DataObject, seed: int
) -> None:
    now = [was + data.draw(st.integers(0, 3)) for was in n]
    old = learned(n, seed)
    new, place = grown(old, [now], some_rows(now, 4, seed))
    fresh = torch.ones(len(weight_variances(new)), dtype=torch.bool)
    fresh[place] = False
    assert int(fresh.sum()) == sum(now) - sum(n)
    scale = new.log_scale.exp()[new.group[:-1]]
    torch.testing.assert_close(weight_variances(new)[:-1][fresh[:-1]], scale[fresh[:-1]])
    assert not any(p.requires_grad for p in new.parameters())


def test_which_values_are_seldom() -> None:
    old = RelevanceKernel([3, 1], rare=True)
    old.seldom.copy_(torch.tensor([True, True, False, False]))
    often = torch.tensor([[0.0, 0.0]] * (SELDOM + 1) + [[3.0, 1.0]] * SELDOM + [[4.0, -1.0]] * 3)
    new, _ = grown(old.double(), [[5, 2]], often.double())
    # Seldom and now seen often; seldom still; common once, so for good; of the new, by how often.
    assert new.seldom.tolist() == [False, True, False, True, False, False, True]


@pytest.mark.parametrize("seed", range(5))
def test_columns_that_move_take_their_weight_along(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    moved = torch.randperm(6, generator=generator)[:4].sort().values
    old = learned([4], seed, is_sparse=True)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(5)])
    new, place = grown(old, [[6]], packed(moved[ids], seed), moved)
    assert place.tolist() == [*moved.tolist(), 6]
    was, now = packed(ids, seed), packed(moved[ids], seed)
    torch.testing.assert_close(covariance(new, now, now), covariance(old, was, was))


def test_parts_side_by_side() -> None:
    parts = [learned([2, 1], 1), learned([3], 2, is_sparse=True)]
    old = BlockSumKernel(parts, [(0, 2), (2, None)])
    rows = torch.cat([some_rows([2, 1], 6, 3), packed(torch.arange(6)[:, None] % 3, 4)], 1)
    new, place = grown(old, [[4, 2], [5]], rows[:1])
    assert isinstance(new, BlockSumKernel)
    assert new.bounds == old.bounds
    torch.testing.assert_close(covariance(new, rows, rows), covariance(old, rows, rows))
    torch.testing.assert_close(weight_variances(new)[place], weight_variances(old))
    assert len(set(place.tolist())) == len(place) == len(weight_variances(old))
