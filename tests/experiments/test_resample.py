"""Comparison split by split, from rows that are made up."""

from __future__ import annotations

from experiments.cells import Store
from experiments.suites import EncodedSuite

from experiments import resample


def row(method: str, split: int, error: float, nll: float | None = 0.1) -> dict[str, object]:
    key = {"method": method, "task": "basenp", "split": split, "hit_limit": False, "seconds": 1.0}
    return key | {"error": error, "nll": nll, "ece": nll}


def test_methods_are_compared_on_the_splits_that_both_have() -> None:
    rows = [row("ours", k, error) for k, error in enumerate([4.0, 5.0, 9.0])]
    rows += [row("crf", k, error, 0.2) for k, error in enumerate([4.5, 5.1])]
    rows += [row("svm", 0, 7.0, None)]
    text = resample.markdown(rows)
    assert "| basenp | ours | 3 | 6.00 | 0.100 | 0.100 |" in text
    # Differences .5 and .1: mean .3, standard deviation .28.
    assert "| basenp | crf | 2 | 4.80 (+0.30, 0.28) | 0.200 (+0.100, 0.000) |" in text
    assert "| basenp | svm | 1 | 7.00 |  |  |" in text
    assert resample.markdown(rows[::-1]) == text


def test_cells_that_are_there_are_not_done_again(tmp_path, monkeypatch, capsys) -> None:
    Store(tmp_path / "resample.jsonl", resample.KEY).add(row("ours", 0, 4.0))
    asked = []

    def none(work, cells, n_jobs):
        asked.extend(cell.key for cell in cells)
        return iter(())

    monkeypatch.setattr("experiments.cells.run_all", none)
    monkeypatch.setattr(resample, "data_folder", lambda path: path)
    assert resample.main(["--results", str(tmp_path), "--quick", "--task", "basenp"]) == 0
    assert asked == [("crf", "basenp", 0), ("crf", "basenp", 1), ("ours", "basenp", 1)]
    assert (tmp_path / "resample.md").read_text() in capsys.readouterr().out


def test_a_split_has_every_sequence_once(monkeypatch) -> None:
    suite = EncodedSuite(
        task="basenp",
        X=list(range(20)),
        y=[[str(i)] for i in range(20)],
        y_raw_known=[],
        folds=[(list(range(5)), [])] * 5,
    )
    monkeypatch.setattr(resample, "encoded_suite", lambda task, data: suite)
    fold = resample.load("basenp", None, 0)
    assert (len(fold.X), len(fold.X_test)) == (5, 15)
    assert sorted([*fold.X, *fold.X_test]) == suite.X
    assert fold.y + fold.y_test == [[str(x)] for x in [*fold.X, *fold.X_test]]
    assert resample.load("basenp", None, 1).X != fold.X
