from __future__ import annotations

import json

import pytest
from experiments.cells import Store
from experiments.compared import METHODS
from experiments.data import TASKS
from experiments.table1 import KEY, markdown, times

from experiments import table1


def row(method, task, fold, error, **changes):
    found = {"nll": 0.2, "ece": 0.01, "seconds": 3.0, "minutes": None, "hit_limit": False}
    return dict(zip(KEY, (method, task, fold, False), strict=True)) | {"error": error} | found | changes


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


# --- runs on made-up data --------------------------------------------------------------------


@pytest.mark.slow
def test_finished_cells_are_not_done_again(data, tmp_path, capfd):
    words = ["--quick", "--data", str(data), "--results", str(tmp_path), "--jobs", "1"]
    words += ["--task", *TASKS[:2], "--method", "svm"]
    assert table1.main(words) == 0
    first = capfd.readouterr()
    assert "2 cells to do, 0 in table1-quick.jsonl" in first.err
    assert (tmp_path / "table1-quick.md").read_text() == first.out
    lines = (tmp_path / "table1-quick.jsonl").read_text().splitlines()
    (found,) = {json.loads(line)["fold"] for line in lines}
    assert found == 0
    assert table1.main(words) == 0
    again = capfd.readouterr()
    assert "0 cells to do, 2 in table1-quick.jsonl" in again.err
    assert again.out == first.out
    assert (tmp_path / "table1-quick.jsonl").read_text().splitlines() == lines


@pytest.mark.slow
def test_a_cell_that_fails_leaves_the_others(data, tmp_path, monkeypatch, capfd):
    words = ["--quick", "--data", str(data), "--results", str(tmp_path), "--jobs", "1"]
    # The third task has no file there.
    assert table1.main([*words, "--method", "svm", "--task", TASKS[0], TASKS[2]]) == 1
    assert f"svm {TASKS[2]} 0: failed" in capfd.readouterr().err
    assert list(Store(tmp_path / "table1-quick.jsonl", KEY).rows()) == [("svm", TASKS[0], 0, True)]
