"""Draws that differ from their mean by fixed amounts: value and slopes as by ``log_prob`` and autograd."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from structgp.inference.fixed_batch import MOST_IN_VAIN, FixedBatch
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
        torch.testing.assert_close(torch.as_tensor(mine, dtype=torch.float64), theirs, rtol=1e-9, atol=1e-9)


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
    assert found[0] == wanted[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1:], wanted[1:], strict=True))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads, monkeypatch):
    given = case(5, S=16, B=70)
    f, g, mean_f, mean_g, *rest = given
    wanted = Chain().fixed_draws(f, g, *rest).value_and_slopes(mean_f, mean_g)
    monkeypatch.setattr("structgp.threads.WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = Chain().fixed_draws(f, g, *rest).value_and_slopes(mean_f, mean_g)
    assert found[0] == wanted[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1:], wanted[1:], strict=True))


FOLLOWS = torch.tensor([[True, True, False], [True, True, True], [True, True, True]])  # O, B, I
ANYWHERE = torch.ones(3, dtype=torch.bool)
BIO = Rules(FOLLOWS, torch.tensor([True, True, False]), ANYWHERE)


def agree_wide(chain, f, g, mean_f, mean_g, y, mask, weight):
    """With torch in log space, and its curvature; slopes to within rounding of scores of this size."""
    fixed = chain.fixed_draws(f, g, y, mask, weight)
    wanted = by_autograd(chain, f, g, mean_f, mean_g, y, mask, weight)
    for mine, theirs in zip(fixed.value_and_slopes(mean_f, mean_g), wanted, strict=True):
        torch.testing.assert_close(torch.as_tensor(mine, dtype=torch.float64), theirs, rtol=1e-9, atol=1e-7)
    bends, curvature = fixed.variances(mean_f, mean_g, None), chain.local_curvature
    wanted = curvature(f + mean_f, g + mean_g, y, mask, None)
    torch.testing.assert_close(bends[0], wanted.node, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(bends[1], wanted.next, rtol=1e-7, atol=1e-7)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31), S=st.sampled_from([2, 8, 16]), widths=st.tuples(*[st.floats(0, 3.5)] * 4),
    rules=st.booleans(), missing=st.booleans(),
)  # fmt: skip
def test_any_width_of_scores_gives_what_log_space_gives(seed, S, widths, rules, missing):
    *scores, y, mask, weight = case(seed, S)
    y = torch.where(y == 2, 1, y)  # O and B only: allowed by the rules
    if missing:
        y[:, 2:4] = -1
    scores = [10**w * x for w, x in zip(widths, scores, strict=True)]
    agree_wide(Chain(BIO) if rules else Chain(), *scores, y, mask, weight)


def enumerated(f, g, mean_f, mean_g, y, follows):
    """The score of y less log Z, averaged over draws, of one sequence by a sum over all labellings."""
    _, T, V = f.shape
    paths = torch.cartesian_prod(*[torch.arange(V)] * T)
    allowed = follows[paths[:, :-1], paths[:, 1:]].all(1)
    paths, f, g = paths[allowed], f + mean_f, g + mean_g
    score = f[:, torch.arange(T), paths].sum(-1) + g[:, paths[:, :-1], paths[:, 1:]].sum(-1)
    told = f[:, torch.arange(T), y].sum(-1) + g[:, y[:-1], y[1:]].sum(-1)
    return (told - score.logsumexp(-1)).mean()


STAYING = Rules(torch.tensor([[False] * 3, [False, True, False], [False, False, True]]), ANYWHERE, ANYWHERE)


def nothing_said():
    """A sequence of three tokens with three labels, whose scores are all 0, and whose labels are 1."""
    shapes = (8, 1, 3, 3), (8, 3, 3), (1, 3, 3), (3, 3)
    scores = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    return *scores, torch.ones(1, 3, dtype=torch.int64), torch.ones(1, 3).bool(), torch.ones(1).double()


def both_count_the_same(f, g, mean_f, mean_g, y, mask, weight):
    """Three tokens with one label, 1 or 2; nothing follows 0 or is followed by it."""
    fixed = Chain(STAYING).fixed_draws(f, g, y, mask, weight)
    value, slopes, table = fixed.value_and_slopes(mean_f, mean_g)
    wanted = enumerated(f[:, 0], g, mean_f[0], mean_g, y[0], STAYING.follows)
    assert float(wanted) == pytest.approx(-math.log(2), abs=1e-9)
    assert float(value) == pytest.approx(-math.log(2), abs=1e-9)
    half = torch.tensor([0.0, 0.5, -0.5], dtype=torch.float64)
    torch.testing.assert_close(slopes[0], half.expand(3, 3), rtol=0, atol=1e-9)
    torch.testing.assert_close(table, 2 * torch.diag(half), rtol=0, atol=1e-9)
    node, of_table = fixed.variances(mean_f, mean_g, None)
    torch.testing.assert_close(node[0], half.square().expand(3, 3), rtol=0, atol=1e-9)
    torch.testing.assert_close(of_table[0], 2 * torch.diag(half.square()), rtol=0, atol=1e-9)


@pytest.mark.parametrize("width", [690.0, 699.9, 700.1, 705.0, 710.0])
@pytest.mark.parametrize("by_draws", [False, True])
def test_the_width_from_which_exponentials_are_not_trusted(width, by_draws):
    """Of two labellings that count as much, one goes through a score of exp(-width). Were that 0, both
    passes would lose it, and agree on half of the sum."""
    f, g, mean_f, mean_g, *rest = nothing_said()
    scores = torch.tensor([[0, 0, 0], [0, -width, -400], [-305, 0, 400 - width]], dtype=torch.float64)
    (f if by_draws else mean_f).add_(scores)
    both_count_the_same(f, g, mean_f, mean_g, *rest)


@pytest.mark.parametrize("width", [340.0, 350.0, 690.0, 710.0, 2000.0])
@pytest.mark.parametrize("by_draws", [False, True])
def test_any_width_of_a_table(width, by_draws):
    """The same of a score of the table. What becomes 0 there is missed by the pass back."""
    f, g, mean_f, mean_g, *rest = nothing_said()
    (g if by_draws else mean_g)[..., 1, 1] = -width
    mean_f[0, :, 2] = torch.tensor([-width, -width / 2, -width / 2], dtype=torch.float64)
    both_count_the_same(f, g, mean_f, mean_g, *rest)


@pytest.mark.parametrize("step", [50.0, 115.0, 118.0, 240.0, 690.0])
def test_what_the_pass_forward_loses_is_found_by_the_pass_back(step):
    """Nobody changes labels. Up to the middle all speaks for one of them, and from there more for the other
    one: no position is wide, and messages are."""
    follows, T = torch.eye(3, dtype=torch.bool), 12
    f, g, mean_f, mean_g, _, _, weight = case(8, S=16, B=2, T=T)
    mean_f[:, : T // 2, 0] += step
    mean_f[:, T // 2 :, 1] += step + 2.0
    y, mask = torch.ones(2, T, dtype=torch.int64), torch.arange(T) < torch.tensor([[T], [T - 2]])
    agree_wide(Chain(Rules(follows, ANYWHERE, ANYWHERE)), f, g, mean_f, mean_g, y, mask, weight)


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


def test_what_fails_again_and_again_is_not_tried_any_more() -> None:
    tries = []

    class Fails:
        def value_and_slopes(self, *scores: object) -> None:
            tries.append(scores)

    batch = FixedBatch.__new__(FixedBatch)
    batch._blocks, batch._draws = [], Fails()
    assert [batch.slopes([]) for _ in range(5)] == [None] * 5
    assert len(tries) == MOST_IN_VAIN
