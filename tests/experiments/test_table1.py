from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from experiments.cells import Store
from experiments.data import TASKS
from experiments.methods import METHODS, Setting
from experiments.table1 import KEY, Cell, markdown, times

from experiments import table1
from structgp.data.generate import generate

ROOT = Path(__file__).parents[2]


def row(method, task, fold, error, **changes):
    found = {"nll": 0.2, "ece": 0.01, "seconds": 3.0, "minutes": None, "hit_limit": False}
    return (
        dict(zip(KEY, (method, task, fold, False), strict=True))
        | {"error": error}
        | found
        | changes
    )


# --- the table -------------------------------------------------------------------------------


def test_the_paper_has_a_figure_for_every_cell_but_ours():
    expected = json.loads(table1.EXPECTED.read_text())["error"]
    assert set(expected) == set(TASKS)
    for figures in expected.values():
        assert [*figures, "ours"] == list(METHODS)


def test_a_line_of_the_table():
    rows = [row("svm", "basenp", k, 5.47 + 0.1 * k, nll=None, ece=None) for k in range(5)]
    rows += [row("ours", "chunking", 0, 7.0, hit_limit=True)]
    lines = markdown(rows).splitlines()
    assert lines[-2:] == [
        "| basenp | svm | 5.67 (0.16) | 5.91 (0.44) | -0.5 |  |  |",
        "| chunking | ours | 7.00* [1] |  |  | 0.200 | 0.010 |",
    ]
    assert markdown(rows[::-1]) == markdown(rows)
    assert times(rows).splitlines()[-4].startswith("| basenp | 3.0 |")


def test_a_cell_that_its_limit_cut_short_is_done_again_with_more_time():
    cell = Cell("gp-var-s", "basenp", 0, None, Setting(False, 10.0, 0))
    cut = row("gp-var-s", "basenp", 0, 5.0, minutes=5.0, hit_limit=True)
    assert not table1._is_done(None, cell)
    assert not table1._is_done(cut, cell)
    assert table1._is_done(cut | {"minutes": 10.0}, cell)
    assert table1._is_done(cut | {"hit_limit": False}, cell)


# --- runs on made-up data --------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder like that of the paper's data, with small tasks of the same names."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "encoded").mkdir()
    for number, task in enumerate(TASKS[:2]):
        made = generate(20, n_labels=3, mean_length=5, n_templates=2, n_values=6, seed=number)
        lengths = [len(x) for x in made.X]
        ids = [6 * j + int(v[1:]) for x in made.X for token in x for j, v in enumerate(token)]
        labels = np.array([int(label[1:]) for y in made.y for label in y])
        orders = [np.random.default_rng(k).permutation(20) for k in range(5)]
        np.savez(
            folder / "encoded" / f"{task}.npz",
            indptr=np.arange(0, len(ids) + 1, 2),
            indices=np.array(ids),
            seq_offsets=np.concatenate([[0], np.cumsum(lengths)]),
            labels=labels,
            labels_raw=labels,
            fold_train=np.array([order[:10] for order in orders]),
            fold_test=np.array([order[10:] for order in orders]),
            n_labels=np.array(3),
        )
    return folder


def command(data, results, methods):
    words = ["table1", "--quick", "--data", data, "--results", results, "--jobs", "2"]
    words += ["--task", *TASKS[:2], "--method", *methods]
    return [sys.executable, "-m", "experiments", *map(str, words)]


def run(data, results, methods):
    done = subprocess.run(
        command(data, results, methods), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def test_finished_cells_are_not_done_again(data, tmp_path):
    first = run(data, tmp_path, ["svm"])
    assert "2 cells, 0 done before" in first.stderr
    assert (tmp_path / "table1-quick.md").read_text() == first.stdout
    lines = (tmp_path / "table1-quick.jsonl").read_text().splitlines()
    (found,) = {json.loads(line)["fold"] for line in lines}
    assert found == 0
    again = run(data, tmp_path, ["svm"])
    assert "2 cells, 2 done before" in again.stderr
    assert again.stdout == first.stdout
    assert (tmp_path / "table1-quick.jsonl").read_text().splitlines() == lines


def test_a_cell_that_fails_leaves_the_others(data, tmp_path, monkeypatch, capfd):
    words = ["--quick", "--data", str(data), "--results", str(tmp_path), "--jobs", "1"]
    # The third task has no file there.
    assert table1.main([*words, "--method", "svm", "--task", TASKS[0], TASKS[2]]) == 1
    assert f"svm {TASKS[2]} 0: failed" in capfd.readouterr().err
    assert list(Store(tmp_path / "table1-quick.jsonl", KEY).rows()) == [("svm", TASKS[0], 0, True)]


@pytest.mark.slow
def test_killed_at_random_and_started_again_it_gives_the_same_table(data, tmp_path):
    methods = ["svm", "crf", "gp-ess", "gp-var-s", "ours"]
    whole = run(data, tmp_path / "whole", methods).stdout.split("Seconds a fit")[0]
    rng = random.Random(0)
    results, kills = tmp_path / "killed", 0
    file = results / "table1-quick.jsonl"
    while len(Store(file, KEY).rows()) < 2 * len(methods) - 1 or kills < 3:
        process = subprocess.Popen(
            command(data, results, methods),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # Later and later, so that it comes to an end on a slow machine too.
        time.sleep(rng.uniform(1, 8 + 2 * kills))
        process.kill()
        process.wait()
        kills += 1
        if file.exists() and kills % 2:
            # As if the kill had come in the middle of a row.
            os.truncate(file, max(0, file.stat().st_size - rng.randrange(1, 80)))
    resumed = run(data, results, methods)
    assert resumed.stdout.split("Seconds a fit")[0] == whole
    assert kills >= 3
