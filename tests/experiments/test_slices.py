from __future__ import annotations

import math

import pytest
import torch
from experiments.methods.slices import elliptical_slices, split_rhat


def run(ratio, covariance, *, n_chains=64, n_iterations=300, thin=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    root = torch.linalg.cholesky(covariance)

    def draw(n):
        eps = torch.randn(n, len(root), generator=generator, dtype=torch.float64)
        return eps @ root.T

    return elliptical_slices(
        ratio,
        draw,
        draw(n_chains),
        n_iterations=n_iterations,
        burn_in=n_iterations // 3,
        thin=thin,
        generator=generator,
    )


def test_a_gaussian_likelihood_gives_the_posterior_in_closed_form():
    covariance = torch.tensor([[1.0, 0.8], [0.8, 2.0]], dtype=torch.float64)
    noise, y = 0.3, torch.tensor([1.0, -0.5], dtype=torch.float64)
    found = run(lambda x: -0.5 * ((x - y).square() / noise).sum(1), covariance)
    gain = covariance @ torch.linalg.inv(covariance + noise * torch.eye(2))
    rows = found.kept.flatten(0, 1)
    # 12,800 correlated states: a standard error of about a hundredth of the spread.
    assert torch.allclose(rows.mean(0), gain @ y, atol=0.02)
    assert torch.allclose(rows.T.cov(), covariance - gain @ covariance, atol=0.02)
    assert float(split_rhat(found.kept).max()) < 1.05


def test_without_a_likelihood_every_first_point_is_taken():
    found = run(lambda x: x.new_zeros(len(x)), torch.eye(3, dtype=torch.float64))
    assert found.evaluations == 64 * 301
    assert found.angle == pytest.approx(math.pi, rel=0.05)
    assert torch.allclose(found.kept.flatten(0, 1).var(0), torch.ones(3).double(), atol=0.1)


def test_a_likelihood_that_cuts_half_of_the_plane():
    # The half-normal distribution: mean sqrt(2 / pi).
    found = run(
        lambda x: torch.where(x[:, 0] > 0, 0.0, -math.inf).double(), torch.eye(1, dtype=torch.float64)
    )
    rows = found.kept[found.kept[:, 0, 0] > 0]
    assert (rows > 0).all()
    assert float(rows.mean()) == pytest.approx(math.sqrt(2 / math.pi), abs=0.02)


def test_what_is_kept_is_as_many_of_every_chain():
    ratio = lambda x: -x.square().sum(1)  # noqa: E731
    every = run(ratio, torch.eye(2, dtype=torch.float64), n_iterations=90)
    third = run(ratio, torch.eye(2, dtype=torch.float64), n_iterations=90, thin=3)
    assert every.kept.shape == (64, 60, 2)
    assert torch.equal(every.kept[:, 2::3], third.kept)
    assert third.evaluations == every.evaluations


def test_rhat_tells_chains_that_agree_from_others():
    generator = torch.Generator().manual_seed(0)
    same = torch.randn(4, 500, 2, generator=generator)
    assert torch.allclose(split_rhat(same), torch.ones(2), atol=0.01)
    apart = same + torch.arange(4)[:, None, None]
    assert (split_rhat(apart) > 1.3).all()
    drifting = same + torch.linspace(0, 3, 500)[:, None]
    assert (split_rhat(drifting) > 1.2).all()
    assert split_rhat(torch.ones(2, 10, 1)).isnan().all()
