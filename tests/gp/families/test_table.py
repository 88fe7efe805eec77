"""A table of scores against the Gaussian that it stands for, and silence where its scale is 0."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from structgp.gp import FullTable, Table
from structgp.gp.block import LEAST_PRECISION
from structgp.gp.families.weights import PRIOR_SCORES
from structgp.gp.weight_rows import Constant

V, P, SD = 2, 4, 0.8

both_forms = pytest.mark.parametrize("full", [False, True], ids=["diagonal", "full"])


@torch.no_grad()
def somewhere(full: bool, sd: float = SD) -> Table:
    """Not at its prior; standard deviations of either sign."""
    generator = torch.Generator().manual_seed(1)
    block = (FullTable if full else Table)((V, V), sd)
    for p in (block.m, block.factor):
        p += torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return block


def here(block: Table) -> Constant:
    mask = torch.ones(1, 3, dtype=torch.bool)
    return block.conditional(None, mask, block.prior_factor())


@torch.no_grad()
def law(block: Table) -> tuple[Tensor, Tensor]:
    """Mean (P,) and covariance (P, P) of the scores."""
    mean, covariance = block.gaussian(here(block))
    return mean, covariance if isinstance(block, FullTable) else covariance.diag()


@both_forms
def test_mean_and_covariance_by_their_definition(full: bool) -> None:
    block = somewhere(full)
    mean, covariance = law(block)
    lower = block.factor.detach().tril() if full else block.factor[:, 0].detach().diag()
    torch.testing.assert_close(mean, SD * block.m[:, 0].detach())
    torch.testing.assert_close(covariance, SD**2 * lower @ lower.T)
    assert (covariance.tril(-1).abs().max() > 0.1) == full
    scores, sds = block.constant_scores()
    torch.testing.assert_close(scores, mean.view(V, V))
    torch.testing.assert_close(sds.flatten(), covariance.diagonal().sqrt())


@both_forms
@torch.no_grad()
def test_draws_are_linear_in_their_noise(full: bool) -> None:
    """Unit vectors show the mean and the covariance; the second half of the draws mirrors the first."""
    block = somewhere(full)
    mean, covariance = law(block)
    unit = torch.eye(P, dtype=torch.float64)
    offsets = block.scale * block.offsets(here(block), unit, 0, torch.arange(1))
    torch.testing.assert_close(offsets.T @ offsets, covariance)
    doubled = block.scale * block.offsets(here(block), 2 * unit, 0, torch.arange(1))
    torch.testing.assert_close(doubled, 2 * offsets)
    mask = torch.ones(1, 3, dtype=torch.bool)
    drawn = block.draws(5, 0, torch.Generator().manual_seed(0)).at(block, None, mask).flatten(1)
    torch.testing.assert_close(drawn[:3] + drawn[3:], (2 * mean).expand(3, P))
    torch.testing.assert_close(block.mean_draw().at(block, None, mask).flatten(1), mean[None])
    if not full:
        v = torch.randn(3, P, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        twice = block.root_times(block.root_transposed_times(v))
        torch.testing.assert_close(SD**2 * twice, covariance @ v)


@both_forms
def test_divergence_against_torch(full: bool) -> None:
    """V^2 dimensions: the paper's constant is V."""
    block = somewhere(full)
    mean, covariance = law(block)
    prior = SD**2 * torch.eye(P, dtype=torch.float64)
    expected = kl_divergence(
        MultivariateNormal(mean, covariance), MultivariateNormal(torch.zeros_like(mean), prior)
    )
    for entropy in ("bhattacharyya", "jensen"):
        torch.testing.assert_close(block.kl(entropy).detach(), expected)
    expected_count = P - covariance.trace() / SD**2
    torch.testing.assert_close(block.effective_parameters().detach(), expected_count)
    assert (FullTable if full else Table)((V, V), 2.0).kl().item() == 0


@both_forms
def test_only_the_lower_triangle_counts(full: bool) -> None:
    block = somewhere(full)
    before = *law(block), block.kl().detach(), block.constant_scores()[1]
    with torch.no_grad():
        if full:
            block.factor += 5 * torch.ones(P, P, dtype=torch.float64).triu(1)
    for one, other in zip(before, (*law(block), block.kl(), block.constant_scores()[1]), strict=True):
        torch.testing.assert_close(one, other.detach())
    block.round_factor()
    assert torch.equal(block.spread, block.spread.float().double())


@both_forms
@torch.no_grad()
def test_sites_have_the_posterior_of_linear_regression(full: bool) -> None:
    """Prior precision plus the sites' precisions, in the scores themselves."""
    block = somewhere(full)
    generator = torch.Generator().manual_seed(3)
    roots = torch.randn(2, P, P, generator=generator, dtype=torch.float64)
    bends = [root @ root.T if full else root.square().sum(0) for root in roots]
    linear = list(torch.randn(2, P, generator=generator, dtype=torch.float64))
    assert block.solve_sites([here(block)] * 2, linear, bends)
    total = sum(bends) if full else sum(bends).diag()
    covariance = torch.linalg.inv(total + torch.eye(P, dtype=torch.float64) / SD**2)
    mean, found = law(block)
    torch.testing.assert_close(mean, covariance @ sum(linear))
    torch.testing.assert_close(found, covariance)


@both_forms
@torch.no_grad()
def test_sites_that_bend_up_too_far_move_nothing(full: bool) -> None:
    """Whitened precision at or below the least one: 1 - 0.8 is."""
    block = somewhere(full)
    before = block.m.clone(), block.factor.clone()
    assert LEAST_PRECISION > 1 - 0.8
    bend = torch.zeros(P, dtype=torch.float64)
    bend[2] = -0.8 / SD**2
    bends = [bend.diag() if full else bend]
    assert not block.solve_sites([here(block)], [torch.ones_like(bend)], bends)
    assert torch.equal(block.m, before[0])
    assert torch.equal(block.factor, before[1])


@torch.no_grad()
def test_curvature_is_summed_over_examples() -> None:
    block = somewhere(False)
    bend = torch.rand(3, V, V, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    total = block.curvature_sum()
    total.add(here(block), bend[:2])
    total.add(here(block), bend[2:])
    total.finish()
    precision = SD**-2 + bend.sum(0).flatten()
    torch.testing.assert_close(law(block)[1], precision.reciprocal().diag())


# -- the scale ---------------------------------------------------------------------------------------


@both_forms
def test_the_amplitude_is_learned_where_the_scores_stay(full: bool) -> None:
    """Mean and covariance of the scores are held; the fixed point is the mean second moment, with
    ``PRIOR_SCORES`` scores of size 1 more."""
    block = somewhere(full)
    with torch.no_grad():
        block.factor *= 0.3
    before = law(block)
    block.fit_amplitude()
    assert block.prior_sd != pytest.approx(SD, rel=1e-3)
    for one, other in zip(before, law(block), strict=True):
        torch.testing.assert_close(one, other)
    for _ in range(300):
        block.fit_amplitude()
    mean, covariance = law(block)
    second = float(mean.square().sum() + covariance.trace())
    best = (second + PRIOR_SCORES) / (P + PRIOR_SCORES)
    assert block.prior_sd**2 == pytest.approx(best, rel=1e-9)


@both_forms
@torch.no_grad()
def test_the_amplitude_settles_under_a_posterior_wider_than_its_prior(full: bool) -> None:
    """All scores have standard deviation 3: the best prior is narrower, being drawn towards 1."""
    block = (FullTable if full else Table)((V, V), 1.0)
    block.factor *= 3
    found = []
    for _ in range(200):
        block.fit_amplitude()
        found.append(block.prior_sd)
    best = ((9 * P + PRIOR_SCORES) / (P + PRIOR_SCORES)) ** 0.5
    assert best < 3
    assert found[-2:] == pytest.approx([best] * 2, rel=1e-9)


@both_forms
def test_the_divergence_falls_towards_the_learned_amplitude(full: bool) -> None:
    """With the scores held, it is least where the amplitude is their mean second moment."""
    block = somewhere(full)
    mean, covariance = law(block)
    second = float(mean.square().sum() + covariance.trace())

    def cost(log_amplitude: float) -> float:
        size = np.exp(0.5 * log_amplitude)
        moved = (FullTable if full else Table)((V, V), size)
        with torch.no_grad():
            moved.m.copy_(mean[:, None] / size)
            moved.factor.copy_(block.factor * SD / size)
        return moved.kl().item()

    best = np.log(second / P)
    assert cost(best) < min(cost(best - 0.05), cost(best + 0.05))


def test_the_amplitude_has_a_gradient() -> None:
    """Through the scores: the whitened posterior has none of its own."""
    block = somewhere(False)
    total = block.gaussian(here(block))[0].sum()
    (found,) = torch.autograd.grad(total, block.log_amplitude)
    torch.testing.assert_close(found, 0.5 * total.detach())


# -- silence -----------------------------------------------------------------------------------------


@both_forms
@torch.no_grad()
def test_a_scale_of_zero_silences_the_scores(full: bool) -> None:
    """From the start, or later on, when q is somewhere else already."""
    never, later = (FullTable if full else Table)((V, V), 0.0), somewhere(full)
    later.log_amplitude.fill_(-torch.inf)
    for block in (never, later):
        assert block.is_silent
        assert block.prior_sd == 0
        assert not block.mean_parameters()
        assert not block.spread_parameters()
        draws = block.draws(4, 0, torch.Generator().manual_seed(0))
        assert not draws.at(block, None, torch.ones(1, 3, dtype=torch.bool)).any()
        for part in (*law(block), *block.constant_scores()):
            assert (part == 0).all()
    assert never.kl().item() == 0
    assert not (FullTable if full else Table)((V, V), 1e-3).is_silent


@both_forms
@torch.no_grad()
def test_nothing_moves_a_silent_block(full: bool) -> None:
    """Sites, curvature and knowledge of batches leave it at its prior."""
    block = (FullTable if full else Table)((V, V), 0.0)
    before = {name: value.clone() for name, value in block.state_dict().items()}
    ones = torch.ones(P, dtype=torch.float64)
    assert block.solve_sites([here(block)], [ones], [ones.diag() if full else ones])
    block.fit_amplitude()
    if not full:
        total = block.curvature_sum()
        total.add(here(block), torch.ones(3, V, V, dtype=torch.float64))
        total.finish()
        precision, linear = block.knowledge()
        assert not precision.any()
        assert not linear.any()
        block.place(ones[None], ones[None], block.prior_sds(), torch.arange(1))
    for name, value in block.state_dict().items():
        assert torch.equal(value, before[name]), name
