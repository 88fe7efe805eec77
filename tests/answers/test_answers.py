"""Answers from several draws, under rules and given known labels: against Bayes over all labellings."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from structgp.answers import labellings, potentials, uncertainty
from structgp.structures import Chain, Rules
from structgp.structures.program import draws_at_once

CLOSE = 1e-8
SETTINGS = [
    {},
    {"known": 0.4},
    {"bans": 0.25},
    {"known": 0.4, "bans": 0.2},
    {"known": 0.4, "bans": 0.2, "size": 60.0},
]
KNOWN = [s for s in SETTINGS if "known" in s]

under_all = pytest.mark.parametrize("setting", SETTINGS, ids=str)


@pytest.fixture
def make(oracles: ModuleType, mixtures: ModuleType) -> Any:
    """A random mixture."""
    return lambda seed=0, **given: mixtures.mixture(oracles, seed, **given)


def best_labelling(at: potentials.Potentials) -> torch.Tensor:
    """(B, T) under the first draw."""
    return at.structure.decode(at.f, at.g, at.mask)[0]


# -- what is known ------------------------------------------------------------------------------------


@under_all
def test_a_draw_counts_as_much_as_it_expected_what_is_known(make: Any, setting: Any) -> None:
    case = make(**setting)
    at = case.at()
    torch.testing.assert_close(at.share.sum(0), torch.ones(4, dtype=at.f.dtype))
    for b in range(4):
        np.testing.assert_allclose(at.share[:, b], case.by_hand(b).share, rtol=0, atol=CLOSE)


def test_without_known_labels_draws_count_alike(make: Any) -> None:
    assert (make(bans=0.25).at().share == 0.25).all()


def test_a_shift_is_added_before_anything_is_known(make: Any) -> None:
    case = make(known=0.4)
    shift = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    at = case.at(shift)
    shifted = replace(case, f=case.f + shift.numpy()).at()
    torch.testing.assert_close(at.f, shifted.f)
    torch.testing.assert_close(at.share, shifted.share)


def test_neighbours_that_know_nothing(make: Any) -> None:
    """What is known of one sequence says nothing of another."""
    case = make()
    case.y[0, 1] = 2
    at = case.at()
    torch.testing.assert_close(at.share[:, 1:], torch.full((4, 3), 0.25, dtype=at.f.dtype))
    assert (at.share[:, 0] - 0.25).abs().max() > 0.01


# -- probabilities ------------------------------------------------------------------------------------


@under_all
def test_marginals_and_pairs(make: Any, setting: Any) -> None:
    case = make(1, **setting)
    p, pairs = (
        ask(case.at()).numpy() for ask in (potentials.Potentials.marginals, labellings.transition_marginals)
    )
    assert pairs.shape == (4, 3, 3, 3)
    for b, n in enumerate(case.lengths):
        table = case.by_hand(b)
        np.testing.assert_allclose(p[b, :n], table.marginals(table.prob, 3), rtol=0, atol=CLOSE)
        assert not p[b, n:].any()
        on = (table.labels[..., None] == np.arange(3)).astype(float)
        expected = np.einsum("n,nti,ntj->tij", table.prob, on[:, :-1], on[:, 1:])
        np.testing.assert_allclose(pairs[b, : n - 1], expected, rtol=0, atol=CLOSE)
        np.testing.assert_allclose(pairs[b, : n - 1].sum(-1), p[b, : n - 1], rtol=0, atol=CLOSE)
        np.testing.assert_allclose(pairs[b, : n - 1].sum(-2), p[b, 1:n], rtol=0, atol=CLOSE)
        assert not pairs[b, max(0, n - 1) :].any()


def test_some_draws_at_a_time_are_all_of_them(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(2, S=5, known=0.3)

    def everything() -> list[torch.Tensor]:
        at = case.at()
        found = uncertainty.sequence_uncertainty(at, 20, torch.Generator().manual_seed(1))
        return [
            labellings.transition_marginals(at),
            found.data,
            *labellings.n_best(at, case.at(mean=True), 5),
        ]

    at_once = everything()
    monkeypatch.setattr("structgp.structures.program.TRANSITIONS_AT_ONCE", 2 * 4 * 4 * 9)
    assert draws_at_once(case.at().f) == 2
    for one, other in zip(at_once, everything(), strict=True):
        torch.testing.assert_close(one, other)
    monkeypatch.setattr("structgp.structures.program.TRANSITIONS_AT_ONCE", 1)
    f, g, y = torch.tensor(case.f), torch.tensor(case.g), torch.tensor(case.y)
    apart = Chain().local_curvature(f, g, y, case.mask)
    monkeypatch.undo()
    whole = Chain().local_curvature(f, g, y, case.mask)
    torch.testing.assert_close(apart.node, whole.node)
    torch.testing.assert_close(apart.next, whole.next)


@under_all
def test_log_prob_of_what_is_known(make: Any, setting: Any) -> None:
    case = make(3, **setting)
    values = labellings.log_prob(case.unconditional(), case.batch.y)
    expected = [np.log(case.by_hand(b).joint.sum(1).mean()) for b in range(4)]
    np.testing.assert_allclose(values, expected, rtol=1e-10, atol=CLOSE)
    shift = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    values = labellings.log_prob(case.unconditional(shift), case.batch.y)
    shifted = replace(case, f=case.f + shift.numpy())
    expected = [np.log(shifted.by_hand(b).joint.sum(1).mean()) for b in range(4)]
    np.testing.assert_allclose(values, expected, rtol=1e-10, atol=CLOSE)


# -- whole labellings ---------------------------------------------------------------------------------


def assert_best(case: Any, n: int, *, mean: bool, exactly: bool) -> None:
    """The probabilities of ``n_best`` are those of its labellings; ``exactly``, the largest there are."""
    plugged = case.at(mean=True)
    labels, values = labellings.n_best(plugged if mean else case.at(), plugged, n)
    assert labels.shape == (len(case.lengths), n, case.f.shape[2])
    for b, length in enumerate(case.lengths):
        table = case.by_hand(b, mean=mean)
        # In logs, as the least of them are far below rounding.
        there = int((values[b] > -torch.inf).sum())
        assert (values[b, there:] == -torch.inf).all()
        assert not labels[b, :, length:].any()
        found = labels[b, :there, :length].numpy()
        assert len({tuple(y) for y in found}) == there
        own = table.prob[[table.of(y) for y in found]]
        np.testing.assert_allclose(values[b, :there].exp(), own, rtol=0, atol=CLOSE)
        assert (values[b, : there - 1] >= values[b, 1:there]).all()
        if exactly:
            possible = sum(
                case.obeys(y) and case.oracles.agrees(y, case.y[b, :length]) for y in table.labels
            )
            assert there == min(n, possible)
            largest = np.sort(table.prob)[::-1][:there]
            np.testing.assert_allclose(values[b, :there].exp(), largest, rtol=0, atol=CLOSE)
        if n >= len(table.labels):
            assert float(values[b].exp().sum()) == pytest.approx(1, abs=CLOSE)


@under_all
@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_n_best_of_the_mean_is_exact(make: Any, setting: Any, n: int) -> None:
    assert_best(make(4, **setting), n, mean=True, exactly=True)


@under_all
def test_n_best_of_draws(make: Any, setting: Any) -> None:
    """Twice as many candidates as asked for: all there are, of 3^4, from 41 on."""
    case = make(5, **setting)
    for n in (41, 81, 100):
        assert_best(case, n, mean=False, exactly=True)
    for n in (1, 3, 10):
        assert_best(case, n, mean=False, exactly=False)


def test_the_best_of_any_draw_is_a_candidate(make: Any) -> None:
    """Two labellings of even draws; the mean of the scores is for two others."""
    case = make(0, lengths=(1,), V=4, S=2)
    case.f[:, 0, 0] = [[50.0, 0.0, 30.0, 29.0], [0.0, 50.0, 30.0, 29.0]]
    labels, values = labellings.n_best(case.at(), case.at(mean=True), 1)
    assert int(case.at(mean=True).f.argmax()) == 2
    assert int(labels[0, 0, 0]) in (0, 1)
    assert float(values[0, 0].exp()) == pytest.approx(0.5, abs=1e-6)


@under_all
def test_viterbi_is_the_best_under_the_mean(make: Any, setting: Any) -> None:
    case = make(6, **setting)
    best = best_labelling(case.at(mean=True)).numpy()
    for b, n in enumerate(case.lengths):
        table = case.by_hand(b, mean=True)
        assert table.prob[table.of(best[b, :n])] == pytest.approx(table.prob.max(), abs=1e-12)
        assert not best[b, n:].any()


@under_all
def test_best_tokens_get_the_most_right(make: Any, setting: Any) -> None:
    """In expectation, of all labellings that are allowed."""
    case = make(7, **setting)
    p = case.at().marginals()
    best = labellings.best_tokens(p, case.mask, case.rules).numpy()
    for b, n in enumerate(case.lengths):
        table = case.by_hand(b)
        right = p[b].numpy()[np.arange(n), table.labels].sum(-1)
        right[[not case.obeys(y) for y in table.labels]] = -1
        right[[not case.oracles.agrees(y, case.y[b, :n]) for y in table.labels]] = -1
        assert right[table.of(best[b, :n])] == pytest.approx(right.max(), abs=1e-12)
        assert not best[b, n:].any()


def test_best_tokens_are_no_marginal_modes_where_those_are_forbidden() -> None:
    """0.6 + 0.6 tokens right is not to be had: 0 may not follow 0."""
    p = torch.tensor([[[0.6, 0.4], [0.6, 0.4]]], dtype=torch.float64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    follows = torch.tensor([[False, True], [True, True]])
    rules = Rules(follows, torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool))
    assert labellings.best_tokens(p, mask, None).tolist() == [[0, 0]]
    assert sorted(labellings.best_tokens(p, mask, rules)[0].tolist()) == [0, 1]


@pytest.mark.parametrize("setting", [{}, {"known": 0.4, "bans": 0.2}], ids=str)
def test_labellings_are_drawn_as_often_as_they_are_probable(make: Any, setting: Any) -> None:
    """20,000 of them, within four standard errors."""
    case, n = make(8, lengths=(3, 1, 2), **setting), 20_000
    drawn = labellings.sample_labellings(case.at(), n, torch.Generator().manual_seed(0)).numpy()
    assert drawn.shape == (n, 3, 3)
    for b, length in enumerate(case.lengths):
        table = case.by_hand(b)
        assert not drawn[:, b, length:].any()
        index = drawn[:, b, :length] @ 3 ** np.arange(length)[::-1]
        share = np.bincount(index, minlength=len(table.prob)) / n
        error = np.sqrt(table.prob * (1 - table.prob) / n)
        assert (np.abs(share - table.prob) <= 4 * error + 1e-12).all()


def test_one_draw_of_labellings_is_of_one_function(make: Any) -> None:
    """Draws that disagree altogether: labellings agree within themselves."""
    case = make(0, lengths=(3,), V=2, S=2)
    case.g[:] = 0
    case.f[0], case.f[1] = [50.0, 0.0], [0.0, 50.0]
    drawn = labellings.sample_labellings(case.at(), 40, torch.Generator().manual_seed(0))[:, 0]
    assert set(map(tuple, drawn.tolist())) == {(0, 0, 0), (1, 1, 1)}


def test_the_seed_decides(make: Any) -> None:
    at = make(9).at()
    one, again, other = (
        labellings.sample_labellings(at, 30, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


# -- promises -----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**16),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    st.sampled_from([0.2, 0.4]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([1.0, 20.0, 300.0]),
)
def test_no_labelling_breaks_a_rule_or_forgets_what_is_known(
    oracles: ModuleType,
    mixtures: ModuleType,
    seed: int,
    lengths: tuple[int, ...],
    bans: float,
    known: float,
    size: float,
) -> None:
    case = mixtures.mixture(oracles, seed, lengths, S=2, known=known, bans=bans, size=size)
    at, plugged = case.at(), case.at(mean=True)
    labels, values = labellings.n_best(at, plugged, 5)
    drawn = labellings.sample_labellings(at, 20, torch.Generator().manual_seed(0))
    p = at.marginals()
    for b, n in enumerate(lengths):
        found = [
            best_labelling(plugged)[b],
            labellings.best_tokens(p, case.mask, case.rules)[b],
            *labels[b, values[b] > -torch.inf],
            *drawn[:, b],
        ]
        assert len(found) > 22
        for y in found:
            assert case.obeys(y[:n].tolist())
            assert oracles.agrees(y[:n].tolist(), case.y[b, :n])


@pytest.mark.parametrize("setting", KNOWN, ids=str)
def test_answers_do_not_depend_on_the_batch(make: Any, setting: Any) -> None:
    case = make(10, **setting)
    at, plugged = case.at(), case.at(mean=True)
    n_best = labellings.n_best(at, plugged, 4)
    for b, n in enumerate(case.lengths):
        alone, one = case.alone(b), slice(b, b + 1)
        torch.testing.assert_close(at.marginals()[one, :n], alone.marginals(), rtol=0, atol=1e-10)
        torch.testing.assert_close(
            labellings.transition_marginals(at)[one, : n - 1],
            labellings.transition_marginals(alone),
            rtol=0,
            atol=1e-10,
        )
        labels, values = labellings.n_best(alone, case.alone(b, mean=True), 4)
        np.testing.assert_allclose(n_best[1][one].exp(), values.exp(), rtol=0, atol=1e-10)
        likely = values[0] > np.log(1e-6)
        assert torch.equal(n_best[0][b, likely, :n], labels[0, likely])
