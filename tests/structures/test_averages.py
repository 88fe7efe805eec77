"""Label probabilities of a chain from draws of the rest of a sequence and points for each token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from structgp.structures.linear_chain import averages
from structgp.structures.linear_chain.averages import N_DRAWS, ChainAverages, GaussianScores, reachable
from structgp.structures.masks import Rules

P, HALF = 3, 16


def bio(V: int) -> Rules:
    """Label 2 only follows 1 or itself, no sequence begins with it, none ends with label 0."""
    follows, starts, ends = (torch.ones(shape, dtype=torch.bool) for shape in ((V, V), (V,), (V,)))
    follows[:, 2] = False
    follows[[1, 2], 2] = True
    starts[2] = ends[0] = False
    return Rules(follows, starts, ends)


def case(
    lengths: list[int], V: int, R: int, rules: Rules | None, size: float = 1.0, seed: int = 0
) -> tuple[ChainAverages, GaussianScores]:
    rng = np.random.default_rng(seed)
    N = sum(lengths)
    g = torch.from_numpy(rng.normal(size=(N_DRAWS, V, V)))
    made = ChainAverages(rng.normal(size=(P, R, N_DRAWS // 2)), rng.normal(size=(R, HALF)), g, rules)
    basis = rng.normal(size=(V, R)) / np.sqrt(R)
    begin = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mean, sd = size * rng.normal(size=(N, V)), rng.gamma(2.0, 0.4, (N, R))
    return made, GaussianScores(mean.astype(np.float32), sd.astype(np.float32), basis, begin)


def by_hand(oracles: Any, made: ChainAverages, at: GaussianScores, b: int) -> np.ndarray:
    """(T, V) of sequence b: labellings are enumerated under every draw of the other tokens with every point
    of the token itself."""
    some = slice(at.begin[b], at.begin[b + 1])
    mean, own = at.mean[some].astype(float), at.basis * at.sd[some].astype(float)[:, None]
    T, V = mean.shape
    mean[0, ~made.starts] = mean[-1, ~made.ends] = -np.inf
    drawn = mean + np.einsum("tvr,trs->stv", own, made.noise[np.arange(T) % P])
    points = np.concatenate([made.points, -made.points], 1)
    found = np.zeros((T, V))
    for s in range(N_DRAWS):
        for t in range(T):
            for point in points.T:
                f = drawn[s].copy()
                f[t] = mean[t] + own[t] @ point
                found[t] += oracles.chain_table(f, made.g[s].numpy()).nodes[t]
    return found / (N_DRAWS * points.shape[1])


@pytest.mark.parametrize("rules", [None, bio(3)], ids=["free", "rules"])
def test_every_draw_of_the_rest_meets_every_point(oracles: Any, rules: Any) -> None:
    made, at = case([3, 1, 2], 3, 2, rules)
    found = made.marginals(at)
    for b in range(3):
        part = slice(at.begin[b], at.begin[b + 1])
        assert np.allclose(found[part], by_hand(oracles, made, at, b), atol=1e-6)
    assert np.allclose(found.sum(1), 1, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    V=st.integers(3, 9),
    rules=st.booleans(),
    size=st.sampled_from([0.5, 3.0, 12.0]),
    seed=st.integers(0, 99),
)
def test_loops_are_as_log_space(lengths: list[int], V: int, rules: bool, size: float, seed: int) -> None:
    made, at = case(lengths, V, V - 1, bio(V) if rules else None, size, seed)
    found = made.marginals(at)
    for start, stop in zip(at.begin[:-1], at.begin[1:], strict=True):
        if stop > start:
            some = slice(start, stop)
            expected = made._in_log_space(at.mean[some], at.sd[some], at.basis)
            assert np.allclose(found[some], expected, atol=2e-6)


def test_wide_scores_are_answered_in_log_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence has scores that single precision cannot hold; the other stays as it was."""
    made, at = case([4, 5], 4, 3, bio(4))
    alone = made.marginals(at)
    at.mean[:4] += 300 * np.eye(4)[[1, 2, 0, 3]].astype(np.float32)
    asked = []
    careful = ChainAverages._in_log_space
    monkeypatch.setattr(
        ChainAverages,
        "_in_log_space",
        lambda self, mean, *rest: asked.append(len(mean)) or careful(self, mean, *rest),
    )
    found = made.marginals(at)
    assert asked == [4]
    assert np.array_equal(found[4:], alone[4:])
    assert np.allclose(found[:3].argmax(1), [1, 2, 0])
    assert (found[1] > 0).all()


def test_wide_draws_are_answered_in_log_space() -> None:
    made, at = case([4], 4, 3, None)
    at.sd[2] *= 100
    found = made.marginals(at)
    assert np.allclose(found, made._in_log_space(at.mean, at.sd, at.basis), atol=1e-12)


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    made, at = case([6, 0, 2], 5, 4, bio(5))
    loops = made.marginals(at)
    monkeypatch.setattr(averages, "compiled_averages", lambda: None)
    assert np.allclose(made.marginals(at), loops, atol=2e-6)


def test_answers_do_not_depend_on_the_batch_or_on_threads() -> None:
    lengths = [700, 3, 800, 20]
    made, at = case(lengths, 4, 3, None)
    together, threads = made.marginals(at), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert np.array_equal(made.marginals(at), together)
    finally:
        torch.set_num_threads(threads)
    for b, n in enumerate(lengths):
        some = slice(at.begin[b], at.begin[b + 1])
        alone = GaussianScores(at.mean[some], at.sd[some], at.basis, np.array([0, n]))
        assert np.array_equal(made.marginals(alone), together[some])


def test_which_labels_can_stand_where() -> None:
    rules = bio(3)
    before, behind = reachable(rules.follows[None], rules.starts.numpy(), rules.ends.numpy())
    assert before.tolist() == [[True, True, False], [True, True, True], [True, True, True]]
    assert behind[0].tolist() == [False, True, True]
    assert behind[-1].all()
    turns = torch.tensor([[[False, True], [True, False]]])
    before, _ = reachable(turns, np.array([True, False]), np.array([True, True]))
    assert before[0].tolist() == [True, False]
    assert before[1].tolist() == [False, True]
    assert before[-1].all()
