from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
import time

import pytest
from experiments.cells import Store, run_all
from tests.experiments.work import half


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "new folder" / "rows.jsonl", ("method", "fold"))


def row(fold, value=0.0):
    return {"method": "m", "fold": fold, "value": value}


def test_rows_come_back_and_the_last_of_a_cell_counts(store):
    assert store.rows() == {}
    for new in (row(0), row(1, math.inf), row(0, 2.5)):
        store.add(new)
    assert store.rows() == {("m", 0): row(0, 2.5), ("m", 1): row(1, math.inf)}


def test_every_beginning_of_the_file_is_good_to_go_on_from(store):
    """Wherever a kill cuts the file, whole rows are there and new ones can be added."""
    for fold in range(3):
        store.add(row(fold))
    whole = store.path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        store.path.write_bytes(whole[:cut])
        # A line is whole without its line end too.
        n_whole = sum(end - 1 <= cut for end in ends)
        assert list(store.rows()) == [("m", fold) for fold in range(n_whole)]
        store.add(row(9))
        assert list(store.rows()) == [*(("m", fold) for fold in range(n_whole)), ("m", 9)]


def test_what_is_no_row_is_passed_over(store):
    store.add(row(0))
    with store.path.open("ab") as file:
        file.write(b'\xff\x00\n[1, 2]\n{"method": "m"}\n\n')
    store.add(row(1))
    assert list(store.rows()) == [("m", 0), ("m", 1)]
    lines = store.path.read_bytes().split(b"\n")
    assert json.loads(lines[0]) == row(0)


def test_pool_gives_rows_and_errors(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    found = dict(run_all(half, [1, 2, 3], 2))
    assert found[1] == {"half": 0.5, "threads": "1"}
    assert found[2] == {"half": 1.0, "threads": "1"}
    assert str(found[3]) == "three"
    assert list(run_all(half, [], 2)) == []


def test_workers_do_not_outlive_a_parent_that_is_killed(tmp_path):
    script = textwrap.dedent(
        f"""
        import sys
        sys.path.insert(0, {os.getcwd()!r})
        from experiments.cells import run_all
        from tests.experiments.work import sleep
        if __name__ == "__main__":
            list(run_all(sleep, [{str(tmp_path / "pid")!r}], 1))
        """
    )
    file = tmp_path / "parent.py"
    file.write_text(script)
    parent = subprocess.Popen([sys.executable, str(file)])
    pid_file = tmp_path / "pid"
    _until(lambda: pid_file.exists() and pid_file.read_text())
    worker = int(pid_file.read_text())
    parent.kill()
    parent.wait()
    _until(lambda: not _is_alive(worker))


def _until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
