"""The benchmarks of fits from disk run, on sizes that say nothing."""

from __future__ import annotations

import pytest

from benchmarks import pace, processes, streaming


@pytest.mark.slow
def test_both_sizes_are_told(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--sizes", "30", "60", "--values", "10", "--steps", "6", "--folder", str(tmp_path)]
    assert streaming.main(sizes) == 0
    said = capsys.readouterr().out
    assert "30 sequences," in said
    assert "60 sequences:" in said
    assert "time per step, 60 over 30 sequences:" in said


@pytest.mark.slow
def test_each_pace_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--sequences", "20", "--values", "10", "--batch-tokens", "200", "--steps", "2", "3"]
    assert pace.main(words) == 0
    assert capsys.readouterr().out.count("batch   200, steps") == 2


@pytest.mark.slow
def test_one_process_and_two_of_which_one_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    processes.main(["--sequences", "600", "--kill"])
    out = capsys.readouterr().out
    nll = [float(line.split("NLL ")[1].split(",")[0]) for line in out.splitlines()[1:]]
    assert len(nll) == 3
    assert max(nll) < 1.01 * min(nll)
    assert "went on from step" in out
