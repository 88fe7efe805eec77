"""The fused kernels against enumeration and against the chain in log space.

On a CUDA device (marker ``gpu``) for real; elsewhere in Triton's interpreter, which is chosen before the
kernels are imported, and so in a process of its own.
"""

from __future__ import annotations

import math
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.structures.kernels import DEVICE, INTERPRETED, on_kernels, run_interpreted
from torch import Tensor

from structgp.structures.linear_chain import fused
from structgp.structures.linear_chain.fused import Shape
from structgp.structures.linear_chain.messages import Logs, log_partition

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-10}


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    """All tests below."""
    run_interpreted(__file__)


def test_needs_a_device() -> None:
    f, g, mask = problem(1, 2, 3, 4, device="cpu")[:3]
    assert fused.supports(f, g, mask) == INTERPRETED


def test_library_does_without_triton() -> None:
    command = "import sys, structgp.structures; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", command]).returncode == 0


def problem(
    S: int,
    B: int,
    T: int,
    V: int,
    *,
    dtype: torch.dtype = torch.float64,
    spread: float = 3.0,
    banned: float = 0.0,
    lengths: list[int] | None = None,
    device: str = DEVICE,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """f with garbage at padding, g, mask and weights (S, B); ``banned``: how many scores are -inf."""
    generator = torch.Generator().manual_seed(seed)

    def scores(*shape: int) -> Tensor:
        x = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.masked_fill(torch.rand(shape, generator=generator) < banned, -torch.inf)

    f, g = scores(S, B, T, V), scores(S, V, V)
    weight = torch.randn(S, B, generator=generator, dtype=torch.float64)
    mask = torch.arange(T) < torch.tensor([T] * B if lengths is None else lengths)[:, None]
    garbage = torch.tensor([torch.nan, torch.inf, -torch.inf])[torch.arange(T * V) % 3].reshape(T, V)
    f = torch.where(mask[..., None], f, garbage)
    return f.to(device, dtype), g.to(device, dtype), mask.to(device), weight.to(device, dtype)


@pytest.fixture(autouse=True)
def _has_device(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not (INTERPRETED or torch.cuda.is_available()):
        pytest.skip("needs a CUDA device")


def compare(
    f: Tensor,
    g: Tensor,
    mask: Tensor,
    weight: Tensor,
    shape: Shape | None = None,
    tolerance: float | None = None,
) -> None:
    """With log space in float64: log Z, both gradients, node marginals."""
    logs = Logs(f.double().masked_fill(~mask[..., None], 0), g.double(), mask)
    nodes, pairs = logs.node_marginals(), logs.gradients(weight.double())[1]
    near = {"rtol": tolerance or TOLERANCE[f.dtype], "atol": tolerance or TOLERANCE[f.dtype]}
    log_z, saved = fused.forward(f, g, mask, shape)
    grad_f, grad_g = saved.gradients(weight)
    assert log_z.dtype == grad_f.dtype == grad_g.dtype == f.dtype
    torch.testing.assert_close(log_z.double(), logs.log_z, **near)
    torch.testing.assert_close(grad_f.double(), nodes * weight.double()[..., None, None], **near)
    torch.testing.assert_close(grad_g.double(), pairs, **near)
    torch.testing.assert_close(fused.node_marginals(f, g, mask, shape).double(), nodes, **near)


@on_kernels
@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_problem(data: st.DataObject) -> None:
    S, B, T, V = (data.draw(st.integers(1, most)) for most in (2, 3, 4, 5))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    compare(
        *problem(
            S,
            B,
            T,
            V,
            dtype=dtype,
            spread=data.draw(st.sampled_from([1.0, 15.0, 60.0])),
            banned=data.draw(st.sampled_from([0.0, 0.2, 0.6])),
            lengths=data.draw(st.lists(st.integers(0, T), min_size=B, max_size=B)),
            seed=data.draw(st.integers(0, 100)),
        ),
        Shape(data.draw(st.sampled_from([1, 2, 4]))),
        tolerance=1e-4 if dtype == torch.float32 else None,
    )


@on_kernels
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [(2, 3, 1, 1), (2, 2, 3, 2), (1, 3, 3, 17), (1, 1, 3, 64)])
def test_sizes(size: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    compare(*problem(*size, dtype=dtype))


@on_kernels
@pytest.mark.parametrize("banned", [0.0, 0.3])
@pytest.mark.parametrize("shape", [Shape(4, 4), Shape(8, 2)])
def test_shapes(shape: Shape, banned: float) -> None:
    compare(*problem(2, 5, 4, 3, dtype=torch.float32, banned=banned, lengths=[4, 0, 1, 2, 4]), shape)


@on_kernels
def test_enumeration(oracles: ModuleType) -> None:
    f, g, mask, weight = problem(2, 3, 4, 3, lengths=[4, 1, 2])
    lengths = mask.sum(-1).tolist()
    tables = [
        [
            oracles.chain_table(x[:n].cpu().numpy(), scores.cpu().numpy())
            for x, n in zip(draw, lengths, strict=True)
        ]
        for draw, scores in zip(f, g, strict=True)
    ]
    f, g = f.requires_grad_(), g.requires_grad_()
    log_z = log_partition(f, g, mask)  # supported, and so fused
    (log_z * weight).sum().backward()
    assert f.grad is not None
    assert g.grad is not None
    pairs = torch.zeros_like(g)
    for s, row in enumerate(tables):
        for b, table in enumerate(row):
            n = len(table.nodes)
            assert log_z[s, b].item() == pytest.approx(float(table.log_z), abs=1e-10)
            nodes = torch.tensor(table.nodes.astype(float)).to(DEVICE) * weight[s, b]
            torch.testing.assert_close(f.grad[s, b, :n], nodes)
            assert not f.grad[s, b, n:].any()
            pairs[s] += torch.tensor(table.pairs.astype(float)).to(DEVICE) * weight[s, b]
    torch.testing.assert_close(g.grad, pairs.detach())


@on_kernels
@pytest.mark.parametrize("spread", [250.0, 1e4])
def test_evidence_against_what_vanished(spread: float) -> None:
    """The second label is impossible in float32 as far as the first position knows, and the third position
    allows nothing else: it is what all probability stands on."""
    f = torch.zeros(1, 2, 3, 3, device=DEVICE)
    f[..., 0, 1] = -spread
    f[:, 0, 2] = torch.tensor([-4 * spread, 0.0, -4 * spread])
    g = -2 * spread * (1 - torch.eye(3, device=DEVICE)[None])
    mask = torch.ones(2, 3, dtype=torch.bool, device=DEVICE)
    log_z, saved = fused.forward(f, g, mask)
    torch.testing.assert_close(log_z, torch.tensor([[-spread, math.log(2)]], device=DEVICE))
    grad_f, _ = saved.gradients(torch.ones_like(log_z))
    torch.testing.assert_close(grad_f[0, 0], torch.eye(3, device=DEVICE)[[1, 1, 1]])
    compare(f, g, mask, torch.ones_like(log_z))


@on_kernels
def test_bans_that_meet() -> None:
    """Forward messages favour one end of a corridor of labels, backward messages the other: their
    products vanish in float32, though neither of them does."""
    V, T = 5, 5
    f = torch.zeros(1, 1, T, V, device=DEVICE)
    f[..., 0, 1:] = -torch.inf
    f[..., T - 1, : V - 1] = -torch.inf
    g = torch.full((1, V, V), -torch.inf, device=DEVICE)
    for i in range(V):
        g[0, i, i : i + 2] = torch.tensor([0.0, -55.0])[: V - i]
    mask = torch.ones(1, T, dtype=torch.bool, device=DEVICE)
    log_z, saved = fused.forward(f, g, mask)
    assert log_z.item() == pytest.approx(-220.0)
    grad_f, grad_g = saved.gradients(torch.ones_like(log_z))
    torch.testing.assert_close(grad_f[0, 0], torch.eye(V, device=DEVICE))
    torch.testing.assert_close(grad_g[0], torch.eye(V, device=DEVICE).roll(1, 1).triu())


@on_kernels
@pytest.mark.parametrize("spread", [1.0, 300.0])
def test_no_labelling(spread: float) -> None:
    """log Z is -inf and slopes 0, whatever their weight; the sequence beside is not touched."""
    f, g, mask, weight = problem(1, 3, 3, 2, dtype=torch.float32, spread=spread, lengths=[3, 3, 0])
    f[0, 0, 1] = -torch.inf
    weight[0, 0] = torch.inf
    log_z, saved = fused.forward(f, g, mask, Shape(4))
    assert log_z[0, 0] == -torch.inf
    assert log_z[0, 2] == 0
    grad_f, grad_g = saved.gradients(weight)
    assert not grad_f[0, [0, 2]].any()
    assert torch.isfinite(grad_g).all()
    weight[0, 0] = 0
    compare(f, g, mask, weight, Shape(4))


@on_kernels
def test_masks_longer_than_what_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_MASK_CHUNK", 2)
    compare(*problem(1, 3, 5, 2, lengths=[5, 2, 3]))


@on_kernels
@pytest.mark.filterwarnings("ignore:All-NaN")
def test_what_is_not_a_number_is_told() -> None:
    f, g, mask, _ = problem(1, 2, 3, 2, dtype=torch.float32)
    f[0, 0, 1, 0] = torch.nan
    log_z, _ = fused.forward(f, g, mask)
    assert log_z.isnan().tolist() == [[True, False]]


@on_kernels
def test_what_it_takes() -> None:
    f, g, mask, _ = problem(1, 1, 2, 3)
    assert fused.supports(f, g, mask)
    assert not fused.supports(f.half(), g.half(), mask)
    assert not fused.supports(f, g.float(), mask)
    assert not fused.supports(f[:, :, :0], g, mask[:, :0])
    many = problem(1, 1, 2, 65)
    assert not fused.supports(*many[:3])
