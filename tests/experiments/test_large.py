"""The table of the larger experiment, from rows that are made up."""

from __future__ import annotations

import os

import pytest
from experiments.cells import Store
from experiments.suites import encoded_suite

from experiments import large


def row(method: str, split: int, error: float, **more: object) -> dict[str, object]:
    figures = {"error": error, "nll": 0.1, "ece": 0.01, "seconds": 10.0}
    return {"method": method, "split": split, "hit_limit": False, "minutes": None} | figures | more


def test_means_over_splits_beside_the_papers() -> None:
    rows = [row("ours", k, 4.0 + k / 10) for k in range(5)]
    rows += [row("crf, 1", 1, 5.0), row("gp-var-s", 0, 6.0, hit_limit=True, minutes=1.0)]
    text = large.markdown(rows)
    assert "| ours | 4.20 (0.16) |  | 0.100 | 0.010 | 10 |" in text
    assert "| crf, 1 | 5.00 [1] | 4.50 |" in text
    assert "| gp-var-s | 6.00* [1] | 5.14 |" in text
    assert large.plot(rows[::-1]) == large.plot(rows)
    assert large.markdown(rows[::-1]) == text


def test_cells_that_are_there_are_not_done_again(tmp_path, monkeypatch, capsys) -> None:
    store = Store(tmp_path / "large.jsonl", large.KEY)
    for k in range(5):
        store.add(row("ours", k, 4.0))
        store.add(row("gp-var-s", k, 6.0, hit_limit=True, minutes=3.0))
    asked = []

    def none(work, cells, n_jobs):
        asked.append([(cell.method, cell.split) for cell in cells])
        return iter(())

    monkeypatch.setattr("experiments.cells.run_all", none)
    monkeypatch.setattr(large, "data_folder", lambda path: path)
    words = ["--results", str(tmp_path), "--method", "ours", "gp-var-s"]
    assert large.main([*words, "--minutes", "3"]) == 0
    assert large.main([*words, "--minutes", "4"]) == 0
    assert asked == [[], [("gp-var-s", k) for k in range(5)]]
    assert (tmp_path / "large.md").read_text() in capsys.readouterr().out
    assert (tmp_path / "large.svg").read_text().startswith("<svg")


def test_a_failed_cell_is_told(tmp_path, monkeypatch, capsys) -> None:
    def broken(work, cells, n_jobs):
        return iter([(cells[0], RuntimeError("no luck"))])

    monkeypatch.setattr("experiments.cells.run_all", broken)
    monkeypatch.setattr(large, "data_folder", lambda path: path)
    assert large.main(["--results", str(tmp_path), "--quick"]) == 1
    assert "no luck" in capsys.readouterr().err


@pytest.mark.paper
@pytest.mark.skipif("STRUCTGP_DATA" not in os.environ, reason="STRUCTGP_DATA is not set")
def test_no_sequence_is_trained_on_and_tested_on() -> None:
    folds = encoded_suite(large.TASK).folds
    for train, test in folds:
        assert (len(train), len(test)) == (large.TRAIN, 323)
        assert len({*train, *test}) == 823
