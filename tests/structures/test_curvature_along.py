"""Curvature along directions against the Hessian of a plain log-likelihood, twice differentiable."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.functional import hessian

from structgp.gp import contrasts
from structgp.structures import Chain, Curvature, Piecewise, Structure
from structgp.structures.linear_chain import messages
from structgp.structures.linear_chain import second_moments as moments

V = 3
LENGTHS = (5, 3, 1, 0)

PlainLogProb = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain_chain(f: Tensor, g: Tensor, y: Tensor) -> Tensor:
    """log p of one sequence, f (T, V), in log space."""
    score, ahead = f[0, y[0]], f[0]
    for t in range(1, len(f)):
        score = score + f[t, y[t]] + g[y[t - 1], y[t]]
        ahead = torch.logsumexp(ahead[:, None] + g, 0) + f[t]
    return score - torch.logsumexp(ahead, 0)


def plain_piecewise(f: Tensor, g: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros((), dtype=f.dtype)
    for t in range(len(f)):
        total = total + f[t, y[t]] - torch.logsumexp(f[t], 0)
        if t > 0:
            i, j = y[t - 1], y[t]
            total = total + 2 * g[i, j] - torch.logsumexp(g[i], 0) - torch.logsumexp(g[:, j], 0)
    return total


STRUCTURES: dict[str, tuple[Structure, PlainLogProb]] = {
    "chain": (Chain(), plain_chain),
    "piecewise": (Piecewise(), plain_piecewise),
}
each_structure = pytest.mark.parametrize("name", STRUCTURES)


def numbers(*shape: int, seed: int, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(shape, generator=generator, dtype=torch.float64)


BASES: dict[str, Tensor | None] = {
    "labels": None,
    "identity": torch.eye(V, dtype=torch.float64),
    "contrasts": contrasts(torch.tensor([4.0, 2.0, 1.0])),
    "any directions": numbers(V, V, seed=1),
    "many directions": numbers(V, 5, seed=8),
    "one direction": numbers(V, 1, seed=2),
}
each_basis = pytest.mark.parametrize("along", BASES)


def draws(
    lengths: tuple[int, ...] = LENGTHS, S: int = 2, size: float = 1.0, T: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """f (S, B, T, V), g (S, V, V), y and mask (B, T)."""
    mask = torch.arange(T or max(lengths)) < torch.tensor(lengths)[:, None]
    f, g = numbers(S, *mask.shape, V, seed=3, size=size), numbers(S, V, V, seed=4, size=size)
    y = torch.randint(V, mask.shape, generator=torch.Generator().manual_seed(5))
    return f, g, y, mask


def by_differentiation(
    plain: PlainLogProb, f: Tensor, g: Tensor, y: Tensor, mask: Tensor, basis: Tensor | None
) -> Curvature:
    """basis^T (-Hessian) basis, the mean over draws."""
    S, B, T, V = f.shape
    basis = torch.eye(V, dtype=f.dtype) if basis is None else basis
    unary, pairwise = f.new_zeros((B, basis.shape[1], T, T)), torch.zeros_like(g[0])
    for s in range(S):
        for b, n in enumerate(mask.sum(-1).tolist()):
            if n == 0:
                continue
            here, labels = f[s, b, :n], y[b, :n]
            second = hessian(lambda x, g=g[s], y=labels: plain(x, g, y), here)  # (n, V, n, V)
            bent = torch.einsum("ir,tiuj,jr->rtu", basis, second, basis)
            unary[b, :, :n, :n] -= bent / S
            second = hessian(lambda x, f=here, y=labels: plain(f, x, y), g[s])
            pairwise -= second.reshape(V * V, V * V).diagonal().view(V, V) / S
    return Curvature(unary, pairwise[None])


def assert_close(found: Curvature, expected: Curvature, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found.node, expected.node, rtol=0, atol=tolerance)
    torch.testing.assert_close(found.next.sum(0), expected.next.sum(0), rtol=tolerance, atol=tolerance)


@each_structure
def test_the_plain_form_is_the_structures(name: str) -> None:
    structure, plain = STRUCTURES[name]
    f, g, y, mask = draws()
    found = structure.log_prob(f, g, y, mask)
    for s in range(len(f)):
        for b, n in enumerate(LENGTHS[:-1]):
            value = float(plain(f[s, b, :n], g[s], y[b, :n]))
            assert float(found[s, b]) == pytest.approx(value, rel=1e-12)


@each_basis
@each_structure
def test_curvature_is_minus_the_hessian_along_the_basis(name: str, along: str) -> None:
    structure, plain = STRUCTURES[name]
    given, basis = draws(), BASES[along]
    found = structure.curvature(*given, basis)
    assert_close(found, by_differentiation(plain, *given, basis))
    assert found.node.abs().max() > 0.05
    assert torch.linalg.eigvalsh(found.node).min() > -1e-12


@each_basis
def test_the_careful_way_bends_alike(along: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages in log space."""
    given, basis = draws(), BASES[along]
    fast = Chain().curvature(*given, basis)
    monkeypatch.setitem(messages.SAFE_SPREAD, torch.float64, -1.0)
    assert_close(Chain().curvature(*given, basis), fast, 1e-11)


@pytest.mark.skipif(messages.compiled_loops() is None, reason="numba is not installed")
@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    along=st.sampled_from(sorted(BASES)),
    size=st.floats(0.1, 20.0),
    forbids=st.booleans(),
)
def test_compiled_loops_bend_alike(lengths: list[int], along: str, size: float, forbids: bool) -> None:
    f, g, _, mask = draws(tuple(lengths), size=size, T=6)
    if forbids:
        g[:, 0, 1] = -torch.inf
    node, step = Chain().walk(f, g, mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "WORTH_COMPILING", 1)
        patch.setattr(moments, "NEGLIGIBLE", 0.0)
        expected = moments._in_torch(node, step, mask, BASES[along])
        assert_close(moments.chain_curvature(node, step, mask, BASES[along]), expected, 1e-11)


@pytest.mark.skipif(messages.compiled_loops() is None, reason="numba is not installed")
def test_compiled_loops_end_where_labels_have_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out is negligible, also where one chain remembers far longer than the others."""
    f, g, _, mask = draws((40, 7, 2), size=2.0, T=40)
    g[1] = 6 * torch.eye(V, dtype=g.dtype)
    walked = *Chain().walk(f, g, mask), mask, BASES["contrasts"]
    expected = moments._in_torch(*walked)
    monkeypatch.setattr(moments, "WORTH_COMPILING", 1)
    assert_close(moments.chain_curvature(*walked), expected, 1e-5)


@each_structure
def test_each_label_is_a_direction(name: str) -> None:
    structure, _ = STRUCTURES[name]
    identity = structure.curvature(*draws(), BASES["identity"])
    assert_close(identity, structure.curvature(*draws()), 1e-13)


@each_basis
@each_structure
def test_padding_and_batching_change_nothing(name: str, along: str) -> None:
    structure, basis = STRUCTURES[name][0], BASES[along]
    f, g, y, mask = draws(T=7)
    f = torch.where(mask[..., None], f, torch.nan)
    together = structure.curvature(f, g, y, mask, basis)
    both = mask[:, None, :, None] & mask[:, None, None, :]
    assert (together.node[~both.expand_as(together.node)] == 0).all()
    pairwise = torch.zeros_like(g[0])
    for b, n in enumerate(LENGTHS[:-1]):
        one = slice(b, b + 1)
        alone = structure.curvature(f[:, one, :n], g, y[one, :n], mask[one, :n], basis)
        torch.testing.assert_close(together.node[one, :, :n, :n], alone.node, rtol=0, atol=1e-12)
        pairwise += alone.next.sum(0)
    torch.testing.assert_close(together.next.sum(0), pairwise, rtol=0, atol=1e-12)


# -- what is far apart ------------------------------------------------------------------------------

T = 60


def turning(strength: float = 0.3) -> tuple[Tensor, Tensor]:
    """A walk that goes round: labels at odd distances do not agree more often than by chance, at even
    ones they do."""
    way = torch.tensor([[0, 1, -1], [-1, 0, 1], [1, -1, 0]], dtype=torch.float64)
    return torch.zeros(1, 2, T, V, dtype=torch.float64), (1 / 3 + strength * way).log()[None]


def memory(strength: float) -> tuple[Tensor, Tensor]:
    f, g = numbers(2, 2, T, V, seed=6, size=0.5), numbers(2, V, V, seed=7, size=0.3)
    together = torch.eye(V, dtype=torch.float64)
    return f / strength, g / strength + strength * together


FAR: dict[str, tuple[Callable[[], tuple[Tensor, Tensor]], bool]] = {
    "forgets": (lambda: memory(0.7), True),
    "goes round": (turning, True),
    "remembers": (lambda: memory(7.0), False),
}
"""Scores, and whether the ends of a sequence have forgotten each other."""


@each_basis
@pytest.mark.parametrize("far", FAR)
def test_an_early_end_leaves_out_nothing(far: str, along: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, forgets = FAR[far]
    (f, g), basis = make(), BASES[along]
    mask = torch.arange(T) < torch.tensor([[T], [T - 9]])
    y = torch.zeros_like(mask, dtype=torch.int64)
    found = Chain().curvature(f, g, y, mask, basis)
    monkeypatch.setattr(moments, "NEGLIGIBLE", 0.0)
    whole = Chain().curvature(f, g, y, mask, basis)
    longest = 1.0 if basis is None else max(1.0, float(basis.square().sum(0).max()))
    torch.testing.assert_close(found.node, whole.node, rtol=0, atol=1e-6 * longest)
    # Summed over all pairs of places.
    torch.testing.assert_close(found.next, whole.next, rtol=3e-6, atol=0)
    assert bool((found.node[:, :, 0, T // 2 :] == 0).all()) == forgets
    if not forgets:
        assert whole.node[0, :, 0, -1].abs().max() > 1e-3


# -- the direction that says nothing -----------------------------------------------------------------


@each_structure
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2), st.integers(0, 4), st.floats(-200, 200), st.integers(0, 2**31))
def test_a_number_added_to_all_labels_of_a_position(
    name: str, b: int, t: int, number: float, seed: int
) -> None:
    structure, _ = STRUCTURES[name]
    assert structure.ignores_shift
    _, g, y, mask = draws()
    f = numbers(2, *mask.shape, V, seed=seed)
    moved = f.clone()
    moved[:, b, t] += number
    one, other = structure.log_prob(f, g, y, mask), structure.log_prob(moved, g, y, mask)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@each_structure
def test_nothing_bends_where_all_labels_move_alike(name: str) -> None:
    alike = torch.ones(V, 1, dtype=torch.float64)
    found = STRUCTURES[name][0].curvature(*draws(), alike)
    assert found.node.abs().max() < 1e-13


def test_others_do_not_say_so(cases: ModuleType) -> None:
    assert not cases.ValueOnly().ignores_shift
    f, g, y, mask = draws()
    structure = cases.Regression(V)
    assert not structure.ignores_shift
    change = structure.log_prob(f + 1, g, y, mask) - structure.log_prob(f, g, y, mask)
    assert change.abs().max() > 0.1
