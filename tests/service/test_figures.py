"""The panel's figures: audits, intervals, the outlook, agreement."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from structgp.service import figures
from structgp.service.figures import Audit
from structgp.service.store import Event


def event(labels, suggested, stream="audit", annotator="ann", sequence=0, p=0.9):
    told = None if suggested is None else {"labels": suggested, "probability": p, "model": 1}
    return Event(1, "r", annotator, sequence, stream, labels, told)


def test_audits_compare_known_labels_alone():
    events = [
        event(["A", None, "B"], ["A", "A", "A"]),
        event(["A"], ["B"], stream="chosen"),
        event(["A"], None),
        event([None], ["A"]),
    ]
    assert figures.audits(events) == [Audit(2, 1, 0.9)]


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=60))
def test_intervals_hold_the_share(numbers):
    found = figures.audited_error([Audit(n, min(n, k), 0.5) for n, k in numbers])
    assert found is not None
    assert 0 <= found["low"] <= found["error"] <= found["high"] <= 1
    assert found["sequences"] == min(len(numbers), figures.AUDITED)


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Errors come together: half of the sequences have none. At seed 0, of 400 samples of 40 sequences, at
    least 85 % hold the true share."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(400):
        lengths = rng.integers(3, 12, 40)
        rates = np.where(rng.random(40) < 0.5, 0.0, 0.4)
        wrong = rng.binomial(lengths, rates)
        at = figures.audited_error(
            [Audit(int(n), int(k), 0.5) for n, k in zip(lengths, wrong, strict=True)]
        )
        assert at is not None
        held += at["low"] <= 0.2 <= at["high"]
    assert 0.85 <= held / 400 <= 0.97


def test_without_errors_the_interval_is_not_empty():
    found = figures.audited_error([Audit(8, 0, 0.9)] * 5)
    assert found is not None
    assert found["error"] == found["low"] == 0
    assert 0.1 < found["high"] < 0.5
    assert figures.audited_error([]) is None


def test_precision_above_a_probability():
    audits = [Audit(3, 0, 0.95), Audit(3, 1, 0.92), Audit(3, 2, 0.5)]
    found = figures.measured_precision(audits, 0.9)
    assert (found["share"], found["sequences"]) == (0.5, 2)
    assert found["low"] < 0.5 < found["high"]
    none = figures.measured_precision(audits, 0.99)
    assert (none["share"], none["low"], none["high"], none["sequences"]) == (None, 0, 1, 0)


def test_the_outlook_follows_a_power_law():
    fits = [{"sequences": n, "error": {"mean": 0.8 * n**-0.5}} for n in (10, 20, 30, 40, 60, 80, 100, 120)]
    found = figures.outlook(fits, 1000, 7.0)
    assert found is not None
    assert found["error"] == pytest.approx(0.8 * 120**-0.5)
    assert found["after"] == pytest.approx(0.8 * 180**-0.5)
    removed = 0.8 * (120**-0.5 - 121**-0.5) * 7 * 999
    assert found["removed"] == pytest.approx(removed, rel=0.02)
    assert found["pays"]
    assert figures.outlook(fits[:3], 1000, 7.0) is None
    flat = [{"sequences": n, "error": {"mean": 0.1}} for n in (10, 20, 30, 40)]
    level = figures.outlook(flat, 1000, 7.0)
    assert level is not None
    assert not level["pays"]
    near = [{"sequences": n, "error": {"mean": 0.1}} for n in (40, 41, 42, 43)]
    assert figures.outlook(near, 1000, 7.0) is None


def test_the_outlook_does_not_look_past_a_change_of_settings():
    """Before it, the model was too sure of itself: a curve through all fits would rise."""
    sure = [{"sequences": n, "settings": 20, "error": {"mean": 0.2}} for n in range(20, 40, 2)]
    fits = sure + [
        {"sequences": n, "settings": 40, "error": {"mean": 2.0 * n**-0.5}} for n in (40, 44, 48, 52)
    ]
    found = figures.outlook(fits, 1000, 7.0)
    assert found is not None
    assert found["after"] == pytest.approx(2.0 * 78**-0.5)
    assert found["pays"]
    assert figures.outlook(fits[:-1], 1000, 7.0) is None


def test_agreement_of_annotators_and_unchanged_suggestions():
    events = [
        event(["A", "B", None], None, annotator="ann"),
        event(["A", "A", "A"], None, annotator="bo"),
        event(["B"], None, annotator="bo", sequence=1),
    ]
    (found,) = figures.agreement(events)
    assert found == {"annotators": ["ann", "bo"], "tokens": 2, "same": 0.5}
    shown = [event(["A"], ["A"], "chosen"), event(["B"], ["A"], "chosen"), event(["A"], ["A"], "audit")]
    assert figures.unchanged(shown) == {"sequences": 2, "unchanged": 1}
