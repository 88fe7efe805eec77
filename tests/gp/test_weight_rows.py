"""Products with sparse rows, and the table of noise that draws of weights look up."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from structgp.gp.kernels import ActiveFeatures
from structgp.gp.weight_rows import NOISE_NUMBERS, NOISE_ROWS, WeightConditional, _row, noise_table


def test_sparse_rows() -> None:
    """A feature that comes twice in a row counts with its sum; what has no place counts nothing."""
    place = torch.tensor([[0, 2, 0], [-1, 1, 2], [-1, -1, -1]])
    value = torch.tensor([[1.0, 2, 3], [5, 0, -1], [1, 1, 1]], dtype=torch.float64)
    expected = np.array([[4.0, 0, 2, 0], [0, 0, -1, 0], [0, 0, 0, 0]])
    features = ActiveFeatures(place[None], value[None], place[None], value[None])
    rows, rng = WeightConditional(features, torch.ones(4)).rows, np.random.default_rng(0)
    right, left = rng.normal(size=(4, 2)), rng.normal(size=(3, 2))
    np.testing.assert_allclose(rows.times(torch.from_numpy(right)), expected @ right)
    h = torch.from_numpy(left)
    np.testing.assert_allclose(rows.transposed_times(h), expected.T @ left)
    np.testing.assert_allclose(rows.squares_times(h), (expected**2).T @ left)
    single = rows.single.times(torch.from_numpy(right).float())
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single, expected @ right, rtol=1e-6, atol=1e-6)


# -- the table of noise ----------------------------------------------------------------------------------


def test_a_table_is_standard_normal_and_its_generators() -> None:
    table = noise_table(2, 16, torch.Generator().manual_seed(3))
    assert table.shape == (NOISE_ROWS, 2, 16)
    assert table.dtype == torch.float64
    error = table.numel() ** -0.5
    assert abs(float(table.mean())) < 4 * error
    assert float(table.square().mean()) == pytest.approx(1, abs=4 * 2**0.5 * error)
    assert torch.equal(table, noise_table(2, 16, torch.Generator().manual_seed(3)))
    assert not torch.equal(table, noise_table(2, 16, torch.Generator().manual_seed(4)))


def test_a_table_of_many_numbers_has_fewer_rows() -> None:
    """A power of two of them, which the rows are found by; as many as there is room for."""
    rows, R, n = noise_table(100, 64, torch.Generator().manual_seed(0)).shape
    assert (R, n) == (100, 64)
    assert rows & (rows - 1) == 0
    assert NOISE_NUMBERS // 2 < rows * R * n <= NOISE_NUMBERS
    names = _row(torch.arange(10 * rows)[None], None, rows)
    assert names.min() >= 0
    assert names.max() < rows


@pytest.mark.parametrize("key", [None, 0, 1, 12_345])
def test_features_are_spread_over_the_table_evenly(key: int | None) -> None:
    """Ten times as many names as rows: Pearson's statistic has mean NOISE_ROWS and this deviation."""
    names = torch.arange(10 * NOISE_ROWS)[None]
    keys = None if key is None else torch.tensor([key])
    rows = _row(names, keys, NOISE_ROWS)[0]
    assert rows.min() >= 0
    assert rows.max() < NOISE_ROWS
    counts = torch.bincount(rows, minlength=NOISE_ROWS).double()
    statistic = float(((counts - 10).square() / 10).sum())
    assert abs(statistic - NOISE_ROWS) < 5 * (2 * NOISE_ROWS) ** 0.5


def test_sequences_do_not_share_rows() -> None:
    """Two keys agree in the row of a name as often as chance does: once in ``NOISE_ROWS``."""
    names = torch.arange(200_000)
    keys = torch.tensor([0, 1, 2, 1000])
    rows = _row(names.expand(4, -1), keys, NOISE_ROWS)
    for i in range(4):
        for j in range(i):
            shared = int((rows[i] == rows[j]).sum())
            chance = len(names) / NOISE_ROWS
            assert abs(shared - chance) < 5 * chance**0.5
    alone = _row(torch.tensor([[17]]), torch.tensor([2]), NOISE_ROWS)
    assert int(alone) == int(rows[2, 17])


@pytest.mark.parametrize("keys", [None, torch.tensor([5, 9])])
def test_compiled_draws_are_those_of_torch(
    keys: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = torch.Generator().manual_seed(0)
    place = torch.randint(-1, 6, (2, 4, 5), generator=rng)
    value = torch.randint(0, 3, (2, 4, 5), generator=rng).double()
    unseen = torch.rand(5, generator=rng, dtype=torch.float64)
    name = torch.randint(0, 99, (2, 4, 5), generator=rng)
    here = WeightConditional(
        ActiveFeatures(place, value, name, unseen.expand(2, 4, 5)), torch.rand(6, generator=rng).double()
    )
    sd, table = torch.randn(3, 6, generator=rng).double(), noise_table(3, 8, rng)
    monkeypatch.setattr("structgp.gp.weight_rows.WORTH_COMPILING", 0)
    found = here.spread(sd, table, keys)
    monkeypatch.setattr("structgp.gp.weight_rows.compiled_moments", lambda: None)
    torch.testing.assert_close(found, here.spread(sd, table, keys))
    assert found.shape == (16, 2, 4, 3)
