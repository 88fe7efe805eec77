"""Mean and spread of functions at single tokens, against the Gaussian that the posterior says they have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from structgp.gp import Table, Weights, token_moments
from structgp.gp.kernels import RelevanceKernel
from structgp.gp.kernels.block_sum import BlockSumKernel

SIZES = [4, 3, 5]


def kernel(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    templates = RelevanceKernel(SIZES, rare=True).double()
    templates.seldom[[1, 5, 8]] = True
    sparse = RelevanceKernel([6], sparse=True).double()
    found = {
        "templates": templates,
        "plain": RelevanceKernel(SIZES).double(),
        "sparse": sparse,
        "both": BlockSumKernel([templates, sparse], [(0, 3), (3, None)]),
    }[kind]
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return found.requires_grad_(False)


def rows(kind: str, n: int) -> np.ndarray:
    """Known values, unknown ones (above all sizes) and missing ones (-1)."""
    rng = np.random.default_rng(1)
    templates = np.stack([rng.integers(-1, size + 2, n) for size in SIZES], 1)
    ids = np.array([rng.permutation(8)[:3] for _ in range(n)])
    ids[rng.random(ids.shape) < 0.2] = -1
    values = np.where(ids < 0, 0.0, rng.normal(size=ids.shape))
    sparse = np.stack([ids, values], -1).reshape(n, -1)
    parts = {
        "templates": [templates],
        "plain": [templates],
        "sparse": [sparse],
        "both": [templates, sparse],
    }
    return np.concatenate(parts[kind], 1).astype(float)


@pytest.mark.parametrize("kind", ["templates", "plain", "sparse", "both"])
@pytest.mark.parametrize("compiled", [True, False])
def test_moments_are_those_of_the_posterior(
    kind: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(token_moments, "compiled_moments", lambda: None)
    generator = torch.Generator().manual_seed(2)
    block = Weights(kernel(kind), (4,), torch.randn(4, 3, generator=generator).double(), amplitude=1.7)
    with torch.no_grad():
        block.m.copy_(torch.randn(block.m.shape, generator=generator))
        block.factor.copy_(torch.rand(block.factor.shape, generator=generator) + 0.1)
        x = torch.from_numpy(rows(kind, 40))[None]
        here = block.conditional(x, torch.ones(1, 40, dtype=torch.bool), block.prior_factor())
        mean, covariance = block.gaussian(here)
    moments = block.token_moments()
    assert moments is not None
    found_mean, found_sd = moments.at(x[0].numpy())
    assert np.allclose(found_mean, mean[0, 0].numpy(), atol=1e-5)
    variance = covariance[0, 0].diagonal(dim1=-1, dim2=-2).T
    assert np.allclose(found_sd, variance.sqrt().numpy(), atol=1e-5)


def test_a_table_has_independent_functions_and_no_tokens() -> None:
    table = Table((3, 3), sd=2.0, symmetric=True)
    found = table.independent_functions()
    assert found is not None
    mean, sd = found
    assert mean.shape == sd.shape == (6,)
    assert torch.allclose(sd, torch.full((6,), 2.0, dtype=torch.float64))
    assert table.token_moments() is None
