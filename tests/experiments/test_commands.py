"""What the commands share, and that killing one changes nothing."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from experiments.cells import Store
from experiments.commands import add_folds, finish, is_done, parser_of, publish, versions
from experiments.data import TASKS

from experiments import ablation, table1
from structgp import InputError

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Cell:
    name: str


def test_rows_are_kept_and_failures_counted(tmp_path, monkeypatch, capsys):
    def some(work, cells, n_jobs):
        assert n_jobs == 3
        return iter([(cells[0], work(cells[0])), (cells[1], ValueError("no luck"))])

    monkeypatch.setattr("experiments.cells.run_all", some)
    store = Store(tmp_path / "rows.jsonl", ("name",))
    cells = [Cell("a"), Cell("b")]
    assert finish(lambda cell: {"name": cell.name}, cells, store, 3, lambda row: "well") == 1
    assert store.rows() == {("a",): {"name": "a"}}
    said = capsys.readouterr().err.splitlines()
    assert said[1:] == ["[1/2] a: well", "[2/2] b: failed: ValueError: no luck"]


def test_a_cell_that_its_limit_cut_short_is_done_again_with_more_time():
    cut = {"hit_limit": True, "minutes": 5.0}
    assert not is_done(None, 1.0)
    assert not is_done(cut, 10.0)
    assert is_done(cut, 5.0)
    assert is_done(cut | {"hit_limit": False}, 10.0)
    assert is_done(cut | {"minutes": None}, 10.0)


def test_a_minute_of_another_device_is_another_minute():
    cut = {"hit_limit": True, "minutes": 5.0, "device": "cuda"}
    assert is_done(cut, 10.0, "cpu")
    assert not is_done(cut, 10.0, "cuda")


def test_what_cannot_be_kept_or_done_is_told_before_the_first_cell(tmp_path):
    def finish_in(folder, n_jobs):
        finish(len, [Cell("a")], Store(folder / "rows.jsonl", ("name",)), n_jobs, str)

    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="--results"):
        finish_in(tmp_path / "file", 1)
    with pytest.raises(InputError, match="--jobs"):
        finish_in(tmp_path, 0)


def test_versions_tell_states_of_the_source_apart():
    assert set(versions()) >= {"structgp", "source", "python", "torch"}
    assert len(versions()["source"]) == 8


def test_every_command_has_the_same_options():
    parser = parser_of("name", "what it is")
    add_folds(parser, TASKS)
    options = parser.parse_args(["--data", "d", "--fold", "0", "2", "--quick"])
    assert (options.data, options.fold, options.quick) == ("d", [0, 2], True)
    assert options.task == list(TASKS)
    assert options.jobs >= 1


def test_text_and_figures_are_written_beside_the_rows(tmp_path, capsys):
    publish(tmp_path / "new" / "name.jsonl", "text\n", {"other": "<svg>"})
    assert (tmp_path / "new" / "name.md").read_text() == capsys.readouterr().out == "text\n"
    assert (tmp_path / "new" / "other.svg").read_text() == "<svg>"


# --- kills -----------------------------------------------------------------------------------

KILLED = {
    "table1": (table1.KEY, ["--task", *TASKS[:2]], 14),
    "ablation": (ablation.KEY, ["--task", TASKS[0], "--base", "default"], 6),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", KILLED)
def test_killed_five_times_at_random_it_gives_the_same_table(command, data, tmp_path):
    key, chosen, n_cells = KILLED[command]
    words = [sys.executable, "-m", "experiments", command, "--quick", "--jobs", "2", *chosen]
    words += ["--data", str(data), "--results"]

    def run(folder):
        done = subprocess.run([*words, str(folder)], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def rows(folder):
        return Store(folder / f"{command}-quick.jsonl", key).rows()

    def figures(folder):
        # What no clock has a part in.
        names = ("error", "nll", "ece", "bound", "hit_limit")
        found = {k: [row.get(name) for name in names] for k, row in rows(folder).items()}
        return json.dumps(sorted(found.items()))

    whole, killed, rng, kills = tmp_path / "whole", tmp_path / "killed", random.Random(0), 0
    text = run(whole)
    file = killed / f"{command}-quick.jsonl"
    while kills < 5:
        process = subprocess.Popen(
            [*words, str(killed)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        # While it starts, or when it has one or two cells more.
        aim, end = len(rows(killed)) + rng.randrange(3), time.monotonic() + 120
        while process.poll() is None and len(rows(killed)) < aim and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(rng.uniform(0, 1))
        kills += process.poll() is None
        process.kill()
        process.wait()
        if file.exists() and (kills % 2 or len(rows(killed)) == n_cells):
            # As if the kill had come in the middle of a row.
            os.truncate(file, max(0, file.stat().st_size - rng.randrange(1, 80)))
    again = run(killed)
    assert len(rows(killed)) == n_cells
    assert figures(killed) == figures(whole)
    if command == "table1":
        assert again.split(b"Seconds per fit")[0] == text.split(b"Seconds per fit")[0]
