"""Thresholds of sets against their definition, and coverage against the guarantee."""

from __future__ import annotations

import json

import numpy as np
import pytest

from structgp import InputError
from structgp.answers.conformal import Calibration, Targets, label_scores, label_sets, needed


def generated(n: int, seed: int) -> list[np.ndarray]:
    """Scores of one to six targets per sequence, alike within a sequence; some of 0 and of 1."""
    rng = np.random.default_rng(seed)
    scores = [rng.random() ** 0.5 * rng.random(rng.integers(1, 7)) ** 0.2 for _ in range(n)]
    return [np.where(s > 0.9, 1.0, np.where(rng.random(len(s)) < 0.01, 0.0, s)) for s in scores]


def losses(scores: list[np.ndarray], threshold: float) -> np.ndarray:
    return np.array([np.mean(s < threshold) if len(s) else 0.0 for s in scores])


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9])
def test_the_largest_threshold_that_loses_little_enough(coverage: float) -> None:
    for n in (9, 10, 50):
        scores = [*generated(n - 1, n), np.empty(0)]  # a sequence without targets loses nothing
        found = Targets.of(scores).threshold(coverage)
        tried = [t for t in (*np.unique(np.concatenate(scores)), 1.0) if t > 0]
        kept = [t for t in tried if losses(scores, t).sum() + 1 <= (1 - coverage) * (n + 1) + 1e-9]
        assert found == (max(kept) if kept else None)


@pytest.mark.parametrize("coverage", [0.7, 0.9])
def test_coverage_of_new_sequences(coverage: float) -> None:
    """The mean over calibrations is at least what is asked for, and not much more."""
    pool, n, rng = generated(3000, 0), 60, np.random.default_rng(1)
    held = []
    for _ in range(150):
        order = rng.permutation(len(pool))
        threshold = Targets.of([pool[i] for i in order[:n]]).threshold(coverage)
        assert threshold is not None
        held.append(1 - losses([pool[i] for i in order[n : n + 200]], threshold).mean())
    error = np.std(held) / np.sqrt(len(held))
    assert coverage - 3 * error <= np.mean(held) <= coverage + 2 / (n + 1) + 3 * error


def test_one_target_per_sequence_is_split_conformal_prediction() -> None:
    scores = np.random.default_rng(0).random(19)
    found = Targets.of([s[None] for s in scores]).threshold(0.9)
    assert found == np.sort(scores)[int(0.1 * 20) - 1]


def test_strata_come_from_the_number_of_sequences() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 41, size=400)
    scores = [np.array([0.9 if length <= 20 else 0.1 * rng.random()]) for length in lengths]

    def calibration(n: int) -> Calibration:
        return Calibration(lengths[:n], {"tokens": Targets.of(scores[:n])}, (10, 20, 30), {})

    assert [len(calibration(n).cuts(0.9)) for n in (199, 200, 399, 400)] == [0, 1, 1, 3]
    found = calibration(400).thresholds("tokens", 0.9)
    short, long = found.of(20), found.of(21)
    assert short == 0.9
    assert long is not None
    assert long < 0.1
    assert len({found.of(length) for length in range(21, 31)}) == 1
    assert len(calibration(400).thresholds("tokens", 0.9, by_length=False).values) == 1


def test_parts_are_those_of_their_sequences() -> None:
    scores = generated(30, 2)
    which = np.arange(30) % 3 == 1
    part, alone = (
        Targets.of(scores).part(which),
        Targets.of([s for s, w in zip(scores, which, strict=True) if w]),
    )
    for a, b in zip(vars(part).values(), vars(alone).values(), strict=True):
        assert np.array_equal(a, b)


def test_too_few_sequences() -> None:
    assert [needed(c) for c in (0.5, 0.8, 0.9, 0.95, 0.99)] == [1, 4, 9, 19, 99]
    scores = [np.array([0.5])] * 9
    nine = Calibration(np.full(9, 3), {"tokens": Targets.of(scores)}, (), {})
    assert nine.thresholds("tokens", 0.9).values == [0.5]
    with pytest.raises(InputError, match=r"9 calibration sequences are too few.*at least 19.*at most 0.9"):
        nine.thresholds("tokens", 0.95)
    with pytest.raises(InputError, match=r"must be between 0 and 1, got 90"):
        nine.thresholds("tokens", 90)
    with pytest.raises(InputError, match=r"not calibrated for 'spans'.*'tokens'"):
        nine.thresholds("spans", 0.9)
    lost = Calibration(
        np.full(99, 3), {"spans": Targets.of([*[np.zeros(1)] * 20, *[np.ones(1)] * 79])}, (), {}
    )
    with pytest.raises(InputError, match=r"ask for at most 0.79"):
        lost.thresholds("spans", 0.9)
    assert lost.thresholds("spans", 0.79).values == [1.0]


def test_labels_in_sets_are_those_with_a_score_of_at_least_the_threshold() -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(4), size=50)
    for threshold in (0.05, 0.3, 0.9, 1.0):
        sets = label_sets(p, threshold)
        for v in range(4):
            assert np.array_equal(sets[:, v], label_scores(p, np.full(50, v)) >= threshold)
        assert sets.any(1).all()
    assert label_sets(p, None).all()
    assert label_scores(p, np.full(50, -2)).max() == 0


def test_a_calibration_survives_its_json() -> None:
    before = Calibration(
        np.array([3, 4]), {"tokens": Targets.of(generated(2, 0))}, (1, 2, 3), {"n_draws": 6}
    )
    after = Calibration.from_json(json.loads(json.dumps(before.to_json())))
    assert after is not None
    assert after.settings == before.settings
    assert after.thresholds("tokens", 0.4).values == before.thresholds("tokens", 0.4).values
    assert Calibration.from_json(None) is None
    for wrong in ({"lengths": [3]}, {"targets": {"tokens": [[1, 1], [2], [0.5]]}}):
        with pytest.raises(ValueError, match="sequence"):
            Calibration.from_json(before.to_json() | wrong)
