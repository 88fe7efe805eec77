"""Compiled draws of linear functions: the same numbers as torch operations."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from structgp.gp import weight_rows
from structgp.gp.kernels import ActiveFeatures
from structgp.gp.weight_rows import WeightConditional, noise_table


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 4, 2, 8), (1, 1, 1, 1, 1), (7, 2, 9, 5, 4)])
def test_the_same_draws(keyed: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    B, T, A, R, n = shape
    random = torch.Generator().manual_seed(B + T)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=random, dtype=torch.float64)

    M = 11
    place = torch.randint(-1, M, (B, T, A), generator=random)
    value = normal(B, T, A) * (torch.rand(B, T, A, generator=random) < 0.8)
    name = torch.randint(-(2**62), 2**62, (B, T, A), generator=random)
    features = ActiveFeatures(place, value, name, normal(B, T, A).square())
    here = WeightConditional(features, normal(M).abs())
    table, keys = noise_table(R, n, random), torch.arange(5, 5 + B) if keyed else None
    given = normal(R, M), table, keys
    found = {}
    for worth in (0, float("inf")):
        monkeypatch.setattr(weight_rows, "WORTH_COMPILING", worth)
        found[worth] = here.spread(*given)
    assert found[0].shape == (2 * n, B, T, R)
    torch.testing.assert_close(found[0], found[float("inf")], rtol=1e-12, atol=1e-12)
    assert torch.equal(found[0][:n], -found[0][n:])
