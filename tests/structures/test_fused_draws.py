"""Draws that differ from their mean by fixed amounts, by the fused kernels: as by autograd.

On a CUDA device (marker ``gpu``) for real; elsewhere in Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.structures.kernels import DEVICE, INTERPRETED, on_kernels, run_interpreted

from structgp.structures import Chain, Rules
from structgp.structures.linear_chain import fused
from structgp.structures.linear_chain.fused_draws import FusedDraws
from structgp.structures.linear_chain.messages import Logs, next_variances


@pytest.fixture(autouse=True)
def _has_device(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not (INTERPRETED or torch.cuda.is_available()):
        pytest.skip("needs a CUDA device")


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    """All tests below."""
    run_interpreted(__file__)


def case(seed, S=4, B=3, T=4, V=3, dtype=torch.float64, spread=1.0):
    """Offsets, means, labels, mask and weights."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return (spread * torch.randn(shape, generator=random, dtype=torch.float64)).to(DEVICE, dtype)

    lengths = torch.randint(1, T + 1, (B,), generator=random)
    lengths[0] = T
    mask = torch.arange(T) < lengths[:, None]
    y = torch.randint(0, V, (B, T), generator=random).to(DEVICE)
    weight = (torch.rand(B, generator=random, dtype=torch.float64) + 0.5).to(DEVICE)
    return normal(S, B, T, V), normal(S, V, V), normal(B, T, V), normal(V, V), y, mask.to(DEVICE), weight


def agree(chain, f, g, mean_f, mean_g, y, mask, weight, basis=None):
    fixed = chain.fixed_draws(f, g, y, mask, weight)
    assert isinstance(fixed, FusedDraws)
    near = 1e-9 if f.dtype == torch.float64 else 2e-4
    leaves = [x.double().clone().requires_grad_() for x in (mean_f, mean_g)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "supports", lambda *_: False)  # by torch operations
        value = chain.log_prob(f.double() + leaves[0], g.double() + leaves[1], y, mask).mean(0) @ weight
        wanted = value.detach(), *torch.autograd.grad(value, leaves)
        bends = chain.local_curvature(f.double() + mean_f, g.double() + mean_g, y, mask, basis)
    for mine, theirs in zip(fixed.value_and_slopes(mean_f, mean_g), wanted, strict=True):
        mine = torch.as_tensor(mine, dtype=torch.float64).to(theirs)
        torch.testing.assert_close(mine, theirs, rtol=near, atol=near)
    for mine, theirs in zip(fixed.variances(mean_f, mean_g, basis), (bends.node, bends.next), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=near, atol=near)


@on_kernels
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31), S=st.integers(1, 4), B=st.integers(1, 4), T=st.integers(1, 5),
    V=st.integers(2, 5), dtype=st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_value_slopes_and_variances_are_those_of_autograd(seed, S, B, T, V, dtype):
    agree(Chain(), *case(seed, S, B, T, V, dtype))


@on_kernels
def test_rules_missing_labels_and_a_basis():
    follows = torch.tensor([[True, True, False], [True, True, True], [False, True, True]])
    anywhere = torch.ones(3, dtype=torch.bool)
    f, g, mean_f, mean_g, y, mask, weight = case(0)
    basis = torch.tensor([[1.0, 0.5], [-1.0, 0.5], [0.0, -1.0]], dtype=torch.float64, device=DEVICE)
    agree(Chain(), f, g, mean_f, mean_g, y, mask, weight, basis)
    ones = torch.ones_like(y)
    agree(Chain(Rules(follows, anywhere, anywhere)), f, g, mean_f, mean_g, ones, mask, weight)
    y[0, 1] = y[1] = -1
    agree(Chain(), f, g, mean_f, mean_g, y, mask, weight)


@on_kernels
def test_a_labelling_that_rules_forbid_has_no_value():
    follows = torch.tensor([[False, True, True], [True, True, True], [True, True, True]])
    anywhere = torch.ones(3, dtype=torch.bool)
    f, g, mean_f, mean_g, y, mask, weight = case(1)
    fixed = Chain(Rules(follows, anywhere, anywhere)).fixed_draws(f, g, torch.zeros_like(y), mask, weight)
    assert fixed.value_and_slopes(mean_f, mean_g) is None


@on_kernels
@pytest.mark.parametrize("spread", [1.0, 60.0, 400.0])
def test_variances_of_transitions_are_those_of_log_space(spread):
    """Where probabilities vanish on the way, and where they do not."""
    f, g, _, _, _, mask, _ = case(2, V=5, T=6, spread=spread)
    node, bend = next_variances(f, g, mask)
    wanted = Logs(f.masked_fill(~mask[..., None], 0), g, mask).next_variances()
    torch.testing.assert_close(node, wanted[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(bend, wanted[1], rtol=1e-9, atol=1e-9)
