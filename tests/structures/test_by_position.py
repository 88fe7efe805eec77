"""Tables of transition scores position by position: against enumeration, and against one shared table."""

from __future__ import annotations

from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from structgp.errors import InputError
from structgp.structures import BlackBox, Chain, Differences, Piecewise, composite
from structgp.structures.linear_chain import fused, messages
from structgp.structures.linear_chain.messages import Logs, Scaled, log_partition, pass_messages
from structgp.structures.program import by_position

pytestmark = pytest.mark.usefixtures("loops")

generated = settings(max_examples=40, deadline=None, derandomize=True)


def potentials(
    seed: int, lengths: tuple[int, ...], V: int = 3, S: int = 2, size: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """f, g by position, labels and mask; junk at padding."""
    generator = torch.Generator().manual_seed(seed)
    B, T = len(lengths), max(1, *lengths)
    f = size * torch.randn(S, B, T, V, generator=generator, dtype=torch.float64)
    g = size * torch.randn(S, B, T - 1, V, V, generator=generator, dtype=torch.float64)
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    f = f.masked_fill(~mask[..., None], torch.nan)
    g = g.masked_fill(~mask[:, 1:, None, None], torch.nan)
    return f, g, torch.randint(V, (B, T), generator=generator), mask


def tables(oracles: ModuleType, f: Tensor, g: Tensor, mask: Tensor) -> Any:
    """Draw, sequence, length and enumeration."""
    for s, b in product(*map(range, f.shape[:2])):
        n = int(mask[b].sum())
        yield s, b, n, oracles.chain_table(f[s, b, :n].numpy(), g[s, b, : max(n - 1, 0)].numpy())


@generated
@given(
    st.integers(0, 2**16),
    st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
    st.integers(1, 3),
    st.sampled_from([1.0, 30.0, 200.0]),
)
def test_log_z_and_its_gradients(
    oracles: ModuleType, seed: int, lengths: tuple[int, ...], V: int, size: float
) -> None:
    f, g, _, mask = potentials(seed, lengths, V, size=size)
    f.requires_grad_()
    g.requires_grad_()
    log_z = log_partition(f, g, mask)
    weight = torch.linspace(-1, 2, log_z.numel(), dtype=f.dtype).view_as(log_z)
    grad_f, grad_g = torch.autograd.grad((weight * log_z).sum(), (f, g))
    assert grad_g.shape == g.shape
    for s, b, n, table in tables(oracles, f.detach(), g.detach(), mask):
        assert log_z[s, b].item() == pytest.approx(float(table.log_z), rel=1e-10, abs=1e-10)
        w, m = float(weight[s, b]), max(n - 1, 0)
        np.testing.assert_allclose(grad_f[s, b, :n], w * table.nodes, rtol=0, atol=1e-10)
        both = np.einsum("n,nti,ntj->tij", table.prob, table.on[:, :-1], table.on[:, 1:])
        np.testing.assert_allclose(grad_g[s, b, :m], w * both[:m].astype(float), rtol=0, atol=1e-10)
        assert not grad_f[s, b, n:].any()
        assert not grad_g[s, b, m:].any()


def test_gradients_of_log_prob_against_differences() -> None:
    f, g, y, mask = potentials(0, (3, 1, 2))
    f, g = f.nan_to_num(0).requires_grad_(), g.nan_to_num(0).requires_grad_()
    for structure in (Chain(), Piecewise()):
        for labels in (y, y.masked_fill(torch.eye(3) > 0, -1)):
            assert torch.autograd.gradcheck(
                lambda f, g: structure.log_prob(f, g, labels, mask),  # noqa: B023
                (f, g),
            )


@pytest.mark.parametrize("size", [1.0, 20.0])
def test_the_ways_to_carry_the_numbers_agree(size: float) -> None:
    f, g, _, mask = potentials(1, (6, 1, 4, 0), 4, size=size)
    clean = f.nan_to_num(0), g.nan_to_num(0), mask
    ways = [Scaled(*clean), Logs(*clean)]
    if messages.compiled_loops() is not None:
        ways.append(messages.compiled_loops()(f, g, mask))
    weight = torch.linspace(-1, 2, 8, dtype=f.dtype).view(2, 4)
    found = [
        (way.log_z, *way.gradients(weight), way.node_marginals(), *way.walk(), *way.next_variances())
        for way in ways
    ]
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)
    assert found[0][-1].shape == g.shape


def test_wide_tables_take_the_careful_way() -> None:
    f, g, _, mask = potentials(2, (4, 3), 3)
    assert not isinstance(pass_messages(f, g, mask), Logs)
    assert isinstance(pass_messages(f, 1000 * g, mask), Logs)
    narrowed = pass_messages(f.float(), 40 * g.float(), mask)
    assert not isinstance(narrowed, Logs | Scaled)
    expected = pass_messages(f, 40 * g.float().double(), mask).walk()
    for one, other in zip(narrowed.walk(), expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5)
    some = g.clone()
    some[0, 0, 1, :, 2] = -torch.inf  # label 2 cannot be entered at one position
    assert not isinstance(pass_messages(f, some, mask), Logs)
    careful = Logs(f.nan_to_num(0), some.nan_to_num(0, neginf=-torch.inf), mask)
    torch.testing.assert_close(log_partition(f, some, mask), careful.log_z)
    # What is lost on a detour may cost the spread of every position.
    assert not isinstance(pass_messages(f, 60 * g, mask), Logs)
    assert isinstance(pass_messages(f, 60 * some, mask), Logs)


def test_one_position_has_no_table() -> None:
    f, g, y, mask = potentials(3, (1, 1))
    assert g.shape == (2, 2, 0, 3, 3)
    torch.testing.assert_close(log_partition(f, g, mask), f[:, :, 0].logsumexp(-1))
    assert Chain().local_curvature(f, g, y, mask).next.shape == (2, 0, 3, 3)
    assert Chain().curvature(f, g, y, mask).next.shape == (2, 0, 3, 3)


def test_kernels_take_shared_tables_only(monkeypatch: pytest.MonkeyPatch) -> None:
    f, g, _, mask = potentials(4, (3, 2))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(fused, "_triton_is_there", lambda: True)
    assert fused.supports(f, g[:, 0, 0], mask)
    assert not fused.supports(f, g, mask)


# -- curvature ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [False, True])
def test_curvature(oracles: ModuleType, missing: bool) -> None:
    """Nodes: their covariance, at positions whose label is known. Transitions: p (1 - p) at each."""
    f, g, y, mask = potentials(5, (4, 1, 3))
    if missing:
        y[0, 1] = y[2, 0] = -1
    known = (y >= 0) & mask
    S, B, T, V = f.shape
    node, lost = np.zeros((B, V, T, T)), np.zeros((B, T - 1, V, V))
    on_place = np.zeros((B, T, V))
    for _, b, n, table in tables(oracles, f, g, mask):
        agrees = np.array([oracles.agrees(z, y[b, :n].tolist()) for z in table.labels])
        told = oracles.among(table, agrees)
        node[b, :, :n, :n] += table.node_covariance.astype(float) / S
        on_place[b, :n] += (bend(table.nodes) - bend(told.nodes)).astype(float) / S
        for t in range(n - 1):
            p, q = (np.einsum("n,ni,nj->ij", x.prob, x.on[:, t], x.on[:, t + 1]) for x in (table, told))
            lost[b, t] += (bend(p) - bend(q)).astype(float) / S
    found, local = Chain().curvature(f, g, y, mask), Chain().local_curvature(f, g, y, mask)
    both = (known[:, None, :, None] & known[:, None, None]).numpy()
    np.testing.assert_allclose(found.node, node * both, rtol=0, atol=1e-8)
    np.testing.assert_allclose(local.node, on_place.clip(min=0), rtol=0, atol=1e-10)
    for curvature in (found, local):
        np.testing.assert_allclose(curvature.next, lost.clip(min=0), rtol=0, atol=1e-10)


def bend(p: np.ndarray) -> np.ndarray:
    return p * (1 - p)


def test_curvature_of_the_piecewise_likelihood() -> None:
    """Minus the second derivative in each entry of each table."""
    f, g, y, mask = potentials(6, (4, 1, 3), S=1)
    y[0, 3] = -1
    found, h = Piecewise().curvature(f, g, y, mask), 1e-3
    assert found.next.shape == g.shape[1:]
    for t, i, j in product(range(3), range(3), range(3)):
        step = torch.zeros_like(g)
        step[:, :, t, i, j] = h
        values = [Piecewise().log_prob(f, g + k * step, y, mask)[0] for k in (-1, 0, 1)]
        bent = -(values[0] - 2 * values[1] + values[2]) / h**2
        torch.testing.assert_close(found.next[:, t, i, j], bent, rtol=0, atol=1e-6)


# -- one shared table, given position by position ---------------------------------------------------------


@pytest.mark.parametrize("what", ["Chain", "Piecewise", "piecewise", "composite"])
def test_the_same_table_everywhere_is_the_shared_one(what: str) -> None:
    f, _, y, mask = potentials(7, (5, 1, 3, 2))
    f = f.nan_to_num(0)
    g = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=f.dtype)
    structures = {"Chain": Chain(), "Piecewise": Piecewise()}
    ask = composite.PARTS[what] if what in composite.PARTS else structures[what].log_prob
    shared = g.clone().requires_grad_()
    apart = by_position(g, mask).clone().requires_grad_()
    one, other = ask(f, shared, y, mask), ask(f, apart, y, mask)
    torch.testing.assert_close(one, other)
    weight = torch.linspace(-1, 2, one.numel(), dtype=f.dtype).view_as(one)
    (whole,) = torch.autograd.grad((weight * one).sum(), shared)
    (parts,) = torch.autograd.grad((weight * other).sum(), apart)
    torch.testing.assert_close(parts.sum((1, 2)), whole)
    assert not parts[:, ~mask[:, 1:]].any()


def test_windows_as_wide_as_the_sequence_are_the_chain() -> None:
    f, g, y, mask = potentials(8, (3, 2, 3))
    expected = Chain().log_prob(f, g, y, mask)
    torch.testing.assert_close(composite.windows(f, g, y, mask, 3), expected)


# -- functions --------------------------------------------------------------------------------------------


def test_a_function_sees_one_table() -> None:
    def constant(f: Tensor, g: Tensor, y: Tensor) -> Tensor:
        return f.sum((-1, -2)) + g.sum((-1, -2))

    f, g, y, mask = potentials(9, (3, 2))
    for structure in (BlackBox(constant), Differences(Chain()), Differences(BlackBox(constant))):
        with pytest.raises(InputError, match="cannot have transitions that depend on features"):
            structure.log_prob(f, g, y, mask)
    with pytest.raises(InputError, match="cannot have transitions that depend on features"):
        Differences(Chain()).local_curvature(f, g, y, mask)
