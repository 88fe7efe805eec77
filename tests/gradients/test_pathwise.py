"""The average over draws, its spread and its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from structgp.gradients import expected_log_prob


def quadratic(f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return -(f.square() * mask[..., None]).sum((-1, -2)) + g.sum((-1, -2))[:, None] * y.sum(-1)


def draws() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(6, 2, 3, 2, generator=generator, dtype=torch.float64)
    g = torch.randn(6, 2, 2, generator=generator, dtype=torch.float64)
    y = torch.tensor([[1, 0, 2], [1, 1, 0]])
    return f, g, y, torch.tensor([[True, True, True], [True, False, False]])


def test_value_and_spread() -> None:
    f, g, y, mask = draws()
    estimate = expected_log_prob(quadratic, f, g, y, mask)
    values = torch.stack([quadratic(f[[s]], g[[s]], y, mask)[0] for s in range(6)])
    torch.testing.assert_close(estimate.value, values.mean(0))
    torch.testing.assert_close(estimate.spread, (values - values.mean(0)).square().mean(0).sqrt())


def test_one_draw_has_no_spread() -> None:
    f, g, y, mask = draws()
    estimate = expected_log_prob(quadratic, f[:1], g[:1], y, mask)
    assert (estimate.spread == 0).all()


def test_gradient_goes_through_the_draws_and_not_through_the_spread() -> None:
    f, g, y, mask = draws()
    f.requires_grad_()
    g.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda f, g: expected_log_prob(quadratic, f, g, y, mask).value, (f, g)
    )
    assert not expected_log_prob(quadratic, f, g, y, mask).spread.requires_grad


def test_gradient_of_a_gaussian_expectation() -> None:
    """E[-(b + s eps)^2] = -(b^2 + s^2), whose gradients are known."""
    b = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    s = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(50_000, 1, 1, 1, generator=generator, dtype=torch.float64)
    eps = torch.cat([half, -half])
    mask, y = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.int64)
    estimate = expected_log_prob(quadratic, b + s * eps, torch.zeros(len(eps), 1, 1), y, mask)
    grad_b, grad_s = torch.autograd.grad(estimate.value.sum(), (b, s))
    assert estimate.value.item() == pytest.approx(-(0.7**2 + 1.3**2), abs=0.05)
    assert grad_b.item() == pytest.approx(-1.4, abs=1e-10)
    assert grad_s.item() == pytest.approx(-2.6, abs=0.05)
