"""Looks at a fit by a clock that the test moves, whole cells on made-up data, and what rows say."""

from __future__ import annotations

import math

import pytest
from experiments.cells import Store
from experiments.compared import GP_MODELS, METHODS, Setting
from experiments.data import TASKS, load_fold
from experiments.profile import KEY, PROFILED, Looks, arrival, markdown, plots
from experiments.table1 import score

from experiments import profile
from structgp.inference import StepInfo

QUICK = Setting(True, 1.0, 0)


def row(method, task, fold, looks, **changes):
    seconds, error, nll = looks[-1]
    end = {"error": error, "nll": nll, "seconds": seconds, "looks": looks, "hit_limit": False}
    return dict(zip(KEY, (method, task, fold, False), strict=True)) | end | changes


# --- looking ---------------------------------------------------------------------------------


class Model:
    """Whose every answer takes two seconds of the clock that is ``now[0]``."""

    def __init__(self, now):
        self.now = now

    def so_far(self):
        return self

    def predict(self, X):
        self.now[0] += 2.0
        return [["a"]]

    def predict_marginals(self, X):
        return [[{"a": 0.5, "b": 0.5}]]


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.process_time", lambda: now[0])
    return now


@pytest.fixture
def fold():
    return profile.Fold([], [], [[["x"]]], [["a"]])


def steps(looks, model, clock, seconds, n):
    """n steps of so many seconds each; whether one of them was told to stop."""
    stop = False
    for i in range(n):
        clock[0] += seconds
        stop = looks.step(model, StepInfo(i, 0.0, 1, finished=False)) or stop
    return stop


def test_looks_take_no_time_and_come_at_growing_times(clock, fold):
    looks = Looks(fold, False, math.inf)
    assert not steps(looks, Model(clock), clock, 0.25, 64)
    assert looks.seconds() == pytest.approx(16.0)
    times = [seconds for seconds, _, _ in looks.found]
    # Steps of 0.25 s: the first one at or after each power of the root of 2.
    assert times == [math.ceil(4 * 2 ** (k / 2) - 1e-9) / 4 for k in range(9)]
    assert {(error, nll) for _, error, nll in looks.found} == {(0.0, round(math.log(2), 5))}


def test_every_step_is_looked_at_but_the_last_which_is_the_end(clock, fold):
    looks, model = Looks(fold, True, math.inf), Model(clock)
    steps(looks, model, clock, 0.1, 3)
    clock[0] += 0.1
    assert not looks.step(model, StepInfo(3, 0.0, 1, finished=True))
    assert [seconds for seconds, _, _ in looks.found] == [0.1, 0.2, 0.3]


def test_a_long_step_is_looked_at_once(clock, fold):
    looks = Looks(fold, False, math.inf)
    steps(looks, Model(clock), clock, 50.0, 2)
    assert [seconds for seconds, _, _ in looks.found] == [50.0, 100.0]


def test_the_limit_stops_the_fit_and_looks_do_not_count(clock, fold):
    looks, model = Looks(fold, True, 3.0), Model(clock)
    assert not steps(looks, model, clock, 1.0, 2)
    assert steps(looks, model, clock, 1.0, 1)


# --- cells on made-up data ---------------------------------------------------------------------


def test_the_last_look_is_what_the_table_has(data):
    fold = load_fold(TASKS[0], str(data), 0)
    for method in ("ours", "crf"):
        found = profile.profile(fold, method, QUICK)
        table = score(fold, METHODS[method], QUICK, False)
        assert found["error"] == pytest.approx(table["error"], abs=1e-3)
        assert found["nll"] == pytest.approx(table["nll"], abs=1e-4)
        times = [seconds for seconds, _, _ in found["looks"]]
        assert times == sorted(times)
        n_steps = found["details"]["steps"] if method == "ours" else 1
        assert len(times) == n_steps
        assert not found["hit_limit"]


def test_a_preset_is_stopped_by_its_limit_of_processor_time(data):
    fold = load_fold(TASKS[0], str(data), 0)
    found = profile.profile(fold, "gp-var-s", Setting(False, 1.2 / 60, 0))
    assert found["hit_limit"]
    assert found["minutes"] == 1.2 / 60
    assert 1.2 <= found["seconds"] < 10.0
    assert len(found["looks"]) >= 2


def test_cells_are_done_once_and_written(data, tmp_path, monkeypatch, capsys):
    def here(work, cells, n_jobs):
        return ((cell, work(cell)) for cell in cells)

    monkeypatch.setattr("experiments.cells.run_all", here)
    words = ["--quick", "--data", str(data), "--results", str(tmp_path), "--jobs", "1"]
    words += ["--task", TASKS[0], "--method", "crf"]
    assert profile.main(words) == 0
    text = capsys.readouterr().out
    assert (tmp_path / "profile-quick.md").read_text() == text
    assert (tmp_path / f"profile-quick-{TASKS[0]}.svg").exists()
    assert list(Store(tmp_path / "profile-quick.jsonl", KEY).rows()) == [("crf", TASKS[0], 0, True)]
    assert profile.main(words) == 0
    out, err = capsys.readouterr()
    assert out == text
    assert "0 cells to do" in err


# --- rows -> text ------------------------------------------------------------------------------


def test_arrival_is_when_it_stays():
    found = row("ours", "basenp", 0, [[1, 9, 0.5], [2, 8, 0.3], [3, 8, 0.4], [4, 8, 0.305], [5, 8, 0.3]])
    assert arrival(found, 0.3) == 4
    assert arrival(found, 0.5) == 1
    assert arrival(found, 0.2) is None


def test_a_line_of_the_summary():
    rows = [row("ours", "basenp", k, [[1, 6, 0.4], [2, 5, 0.2 + k / 100]]) for k in range(2)]
    rows += [row("gp-var-s", "basenp", 0, [[1, 50, 2.0], [600, 7, 0.3]], hit_limit=True)]
    lines = markdown(rows).splitlines()
    assert lines[-2:] == [
        "| basenp | ours | 2 | 5.00 | 0.205 | 2.0 | 2.0 | 2.0 |",
        "| basenp | gp-var-s | 1 | 7.00* | 0.300 | 600.0 | 600.0 | never |",
    ]
    assert markdown(rows[::-1]) == markdown(rows)


def test_a_figure_of_every_task_that_has_cells():
    rows = [row("ours", task, 0, [[1, 6, 0.4], [2, 0, 0.2]]) for task in ("basenp", "basenp-500")]
    found = plots(rows)
    assert list(found) == ["basenp", "basenp-500"]
    assert plots(rows[::-1]) == found
    assert "gp-var-b" not in found["basenp"]


def test_methods_are_those_of_the_table():
    assert set(PROFILED) <= set(METHODS)
    assert set(GP_MODELS) <= set(PROFILED)
