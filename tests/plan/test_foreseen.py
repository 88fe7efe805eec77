"""How long a fit with a function will take is foreseen from a few calls, and long ones use all cores."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

import numpy as np
import pytest

import structgp.plan.foreseen as foreseen
from structgp import Custom, Inducing, Natural, StructuredGPClassifier
from structgp.data.examples import read_examples
from structgp.plan.foreseen import Foreseen, foresee
from structgp.plan.options import Options
from structgp.plan.resolve import Plan, resolve
from structgp.structures import BlackBox

X = [[{"w": f"w{(3 * n + t) % 7}"} for t in range(2 + n % 4)] for n in range(10)]
Y = [["A" if token["w"] < "w4" else "B" for token in x] for x in X]


def independent(f: np.ndarray, g: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Each label for itself."""
    log_z = np.log(np.exp(f).sum(-1))
    return f[:, np.arange(len(y)), y].sum(1) - log_z.sum(1)


def plan_of(function: Any, **given: Any) -> tuple[Plan, Any]:
    examples = read_examples(X, Y)
    return resolve(Options(structure=function, **given), examples), examples


BY_SCORES: dict[str, Any] = {"inference": Natural(), "posterior": Inducing(n_inducing=5)}


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the function moves: 2 ms for a call and 10 us for each draw."""
    now = [0.0]
    monkeypatch.setattr(foreseen.time, "perf_counter", lambda: now[0])

    def timed(f: np.ndarray, g: np.ndarray, y: np.ndarray) -> np.ndarray:
        now[0] += 0.002 + 1e-5 * len(f)
        return independent(f, g, y)

    return timed


def test_the_time_of_a_call_is_told_from_that_of_a_draw(clock):
    found = foresee(*plan_of(clock, **BY_SCORES))
    assert found.per_call == pytest.approx(0.002)
    assert found.per_draw == pytest.approx(1e-5)
    lengths = sorted(map(len, X))
    one = (0.002 + 256 * 1e-5) * sum(lengths) / lengths[5]
    assert found.seconds == pytest.approx((20 * one, 60 * one))
    assert found.processes == 1, "not worth the start of others"
    assert str(found).startswith("timed takes ")


def test_differences_are_counted_as_values(clock):
    plan, examples = plan_of(clock)
    assert type(plan.structure.value).__name__ == "Differences"
    found, lengths = foresee(plan, examples), sorted(map(len, X))
    values = 32 * 2 * (lengths[5] * 2 + 4)
    one = (0.002 + values * 1e-5) * sum(lengths) / lengths[5]
    assert found.seconds == pytest.approx((40 * one, 150 * one))


def test_what_is_not_foreseen(clock):
    assert foresee(*plan_of("chain")) is None
    assert foresee(*plan_of(clock, inference="adam")) is None

    def fails(f: np.ndarray, g: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.full(len(f), np.nan) if len(f) > 8 else independent(f, g, y)

    assert foresee(*plan_of(fails, **BY_SCORES)) is None, "the fit will say what is wrong"


def where(f: np.ndarray, g: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The values of ``independent``; leaves the number of its process in a folder."""
    open(os.path.join(os.environ["STRUCTGP_SEEN"], str(os.getpid())), "w").close()
    return independent(f, g, y)


@pytest.mark.slow
def test_a_long_fit_uses_all_cores_and_says_how_long(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("STRUCTGP_SEEN", str(tmp_path))
    monkeypatch.setattr(foreseen, "_timed", lambda *given: (1.0, 0.0))
    monkeypatch.setattr("joblib.effective_n_jobs", lambda n: 2 if n == -1 else n)
    given = BY_SCORES | {"inference": Natural(max_steps=1), "n_draws": 4}
    box = BlackBox(where)
    model = StructuredGPClassifier(structure=Custom(box, predict_with="chain"), **given)
    with caplog.at_level(logging.WARNING, "structgp"), pytest.warns(match="stopped after 1 steps"):
        model.fit(X, Y)
    assert len(list(tmp_path.iterdir())) >= 2, "this process, and others"
    assert box.n_jobs is None, "answers are given in one process"
    said = (
        "takes 1.0 s for 256 draws of a sequence: the fit will take some 2 minutes to 6 minutes, in 2 proc"
    )
    assert said in caplog.messages[0]
    assert model.training_log_["foreseen"]["processes"] == 2


@pytest.mark.slow
def test_what_cannot_be_sent_stays_in_one_process(monkeypatch):
    lock = threading.Lock()

    def locked(f: np.ndarray, g: np.ndarray, y: np.ndarray) -> np.ndarray:
        with lock:
            return independent(f, g, y)

    monkeypatch.setattr(foreseen, "_timed", lambda *given: (0.5, 0.0))
    monkeypatch.setattr("joblib.effective_n_jobs", lambda n: 2 if n == -1 else n)
    assert foresee(*plan_of(locked, **BY_SCORES)).processes == 1
    assert foresee(*plan_of(independent, **BY_SCORES)).processes == 2
    assert foresee(*plan_of(Custom(independent, n_jobs=1), **BY_SCORES)).processes == 1
    assert foresee(*plan_of(Custom(independent, n_jobs=3), **BY_SCORES)).processes == 3


@pytest.mark.parametrize(
    ("seconds", "said"),
    [((3.2, 9.6), "3 s to 10 s"), ((70, 300), "70 s to 5 minutes"), ((6000, 30000), "2 hours to 8 hours")],
)
def test_times_are_said_as_one_says_them(seconds, said):
    assert f"the fit will take some {said}" in str(Foreseen(seconds, 0.01, 0.0))


def test_real_calls_are_timed():
    def slow(f: np.ndarray, g: np.ndarray, y: np.ndarray) -> np.ndarray:
        time.sleep(0.005)
        return independent(f, g, y)

    assert 0.004 < foresee(*plan_of(slow, **BY_SCORES)).per_call < 0.05
