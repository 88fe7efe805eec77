"""Draws that differ from their mean by fixed amounts: value and slopes as by ``log_prob`` and autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from structgp.structures import Chain, Rules
from structgp.structures.linear_chain import messages
from structgp.structures.linear_chain.fixed_draws import packs_of


@pytest.fixture(autouse=True)
def always_compiled(monkeypatch):
    monkeypatch.setattr(messages, "WORTH_COMPILING", 0)
    monkeypatch.setattr("structgp.structures.linear_chain.fixed_draws.WORTH_COMPILING", 0)


def case(seed, S=8, B=5, T=6, V=3, spread=1.0):
    """Offsets, means, labels, mask and weights."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return spread * torch.randn(shape, generator=random, dtype=torch.float64)

    lengths = torch.randint(1, T + 1, (B,), generator=random)
    lengths[0] = T
    mask = torch.arange(T) < lengths[:, None]
    y = torch.randint(0, V, (B, T), generator=random)
    weight = torch.rand(B, generator=random, dtype=torch.float64) + 0.5
    return normal(S, B, T, V), normal(S, V, V), normal(B, T, V), normal(V, V), y, mask, weight


def by_autograd(chain, f, g, mean_f, mean_g, y, mask, weight):
    mean_f, mean_g = mean_f.clone().requires_grad_(), mean_g.clone().requires_grad_()
    value = chain.log_prob(f + mean_f, g + mean_g, y, mask).mean(0) @ weight
    return value.detach(), *torch.autograd.grad(value, (mean_f, mean_g))


def agree(chain, f, g, mean_f, mean_g, y, mask, weight):
    fixed = chain.fixed_draws(f, g, y, mask, weight)
    found = fixed.value_and_slopes(mean_f, mean_g)
    wanted = by_autograd(chain, f, g, mean_f, mean_g, y, mask, weight)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31), S=st.sampled_from([1, 2, 4, 8, 16, 32]), B=st.integers(1, 40),
    T=st.integers(1, 12), V=st.integers(2, 9),
)  # fmt: skip
def test_value_and_slopes_are_those_of_autograd(seed, S, B, T, V):
    agree(Chain(), *case(seed, S, B, T, V))


def test_rules_leave_out_what_they_forbid():
    follows = torch.tensor([[True, True, False], [True, True, True], [False, True, True]])
    starts, ends = torch.tensor([True, True, False]), torch.tensor([True, False, True])
    f, g, mean_f, mean_g, y, mask, weight = case(0)
    last = mask.sum(-1, keepdim=True) - 1
    y = (torch.arange(6) < last).long()  # 1 throughout, and 0 at the end
    agree(Chain(Rules(follows, starts, ends)), f, g, mean_f, mean_g, y, mask, weight)


def test_labels_that_rules_forbid_are_left_to_those_who_say_so():
    follows = torch.tensor([[True, False, True], [True, True, True], [True, True, True]])
    anywhere = torch.ones(3, dtype=torch.bool)
    f, g, mean_f, mean_g, y, mask, weight = case(1)
    y[0, :2] = torch.tensor([0, 1])
    fixed = Chain(Rules(follows, anywhere, anywhere)).fixed_draws(f, g, y, mask, weight)
    assert fixed.value_and_slopes(mean_f, mean_g) is None


def test_missing_labels_and_evidence():
    f, g, mean_f, mean_g, y, mask, weight = case(2)
    missing = y.clone()
    missing[1, 0] = missing[0, 2] = missing[0, 3] = -1
    agree(Chain(), f, g, mean_f, mean_g, missing, mask, weight)
    evidence = torch.randn(5, 6, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    agree(Chain(), f, g, mean_f, mean_g, evidence, mask, weight)


def test_what_stands_at_padding_does_not_matter():
    f, g, mean_f, mean_g, y, mask, weight = case(4)
    wanted = Chain().fixed_draws(f, g, y, mask, weight).value_and_slopes(mean_f, mean_g)
    f, y = f.masked_fill(~mask[..., None], torch.inf), y.masked_fill(~mask, -7)
    mean_f = mean_f.masked_fill(~mask[..., None], torch.nan)
    found = Chain().fixed_draws(f, g, y, mask, weight).value_and_slopes(mean_f, mean_g)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads, monkeypatch):
    given = case(5, S=16, B=70)
    f, g, mean_f, mean_g, *rest = given
    wanted = Chain().fixed_draws(f, g, *rest).value_and_slopes(mean_f, mean_g)
    monkeypatch.setattr("structgp.structures.threads.WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = Chain().fixed_draws(f, g, *rest).value_and_slopes(mean_f, mean_g)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_scores_too_wide_for_probability_space_are_refused():
    f, g, mean_f, mean_g, *rest = case(6)
    fixed = Chain().fixed_draws(f, g, *rest)
    assert fixed.value_and_slopes(mean_f, mean_g) is not None
    assert fixed.value_and_slopes(1000 * mean_f, mean_g) is None
    assert fixed.value_and_slopes(mean_f, 1000 * mean_g) is None
    assert Chain().fixed_draws(1000 * f, g, *rest).value_and_slopes(mean_f, mean_g) is None


def test_only_where_it_is_known_to_be_right():
    class Own(Chain):
        def log_prob(self, f, g, y, mask):
            return 2 * super().log_prob(f, g, y, mask)

    f, g, _, _, *rest = case(7)
    assert Own().fixed_draws(f, g, *rest) is None
    assert Chain().fixed_draws(f[:6], g[:6], *rest) is None  # no whole vectors of draws
    assert Chain().fixed_draws(f.float(), g.float(), *rest) is None


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=30), G=st.sampled_from([1, 2, 4, 8]))
def test_packs_hold_every_sequence_once_and_one_length_each(lengths, G):
    found = packs_of(np.array(lengths), G)
    assert found.shape[1] == G
    assert sorted(found[found >= 0]) == list(range(len(lengths)))
    for pack in found:
        assert pack[0] >= 0
        assert len({lengths[b] for b in pack if b >= 0}) == 1


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31), S=st.sampled_from([1, 2, 4, 8, 16]), B=st.integers(1, 20),
    T=st.integers(1, 8), V=st.integers(2, 6), missing=st.booleans(), contrasts=st.booleans(),
)  # fmt: skip
def test_variances_are_the_curvature(seed, S, B, T, V, missing, contrasts):
    f, g, mean_f, mean_g, y, mask, weight = case(seed, S, B, T, V)
    if missing:
        y[:, T // 2] = -1
    basis = torch.randn(V, V - 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    basis = basis if contrasts else None
    found = Chain().fixed_draws(f, g, y, mask, weight).variances(mean_f, mean_g, basis)
    wanted = Chain().local_curvature(f + mean_f, g + mean_g, y, mask, basis)
    torch.testing.assert_close(found[0], wanted.node, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[1], wanted.next, rtol=1e-9, atol=1e-9)
