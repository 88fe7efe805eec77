"""The paper's table of errors (tab:error-small), rerun: seven methods, four tasks, five folds.

    python -m experiments table1 --data DIR [--task T ...] [--fold K ...] [--method M ...] [--quick]

A cell is one method on one fold of one task. Finished cells are kept in experiments/results/table1.jsonl
and skipped by the next run, so a run may be killed at any time; a cell that the time limit cut short is
done again when --minutes is longer. The paper's presets (gp-var-*) take hours to converge: each fit gets
--minutes, with which the whole table takes about 7 hours on two cores. --quick has one fold and short
schedules, in a file of its own, in a few minutes.

The table of all cells in the file is printed at the end and written beside it, as table1.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from experiments.cells import Row, Store, run_all, say
from experiments.data import RESULTS, TASKS, Fold, load_fold
from experiments.methods import METHODS, TIME_LIMITED, Fitted, Setting
from structgp import __version__, metrics
from structgp.data.corpora import data_folder

EXPECTED = Path(__file__).parent / "expected" / "table1.json"
KEY = ("method", "task", "fold", "quick")
MINUTES = 12.0
SEED = 0


@dataclass(frozen=True)
class Cell:
    """One method on one fold of one task."""

    method: str
    task: str
    fold: int
    data: str | None
    setting: Setting

    @property
    def key(self) -> tuple[Any, ...]:
        return self.method, self.task, self.fold, self.setting.quick

    @property
    def name(self) -> str:
        return f"{self.method} {self.task} {self.fold}"


def main(words: Sequence[str] | None = None) -> int:
    """0 if all cells were done, 1 if one of them failed."""
    options = _parser().parse_args(words)
    data_folder(options.data)
    folds = options.fold or ([0] if options.quick else list(range(5)))
    setting = Setting(options.quick, options.minutes, SEED, options.device)
    # Fold by fold, so that a run cut short has something of every method and task.
    cells = [
        Cell(method, task, fold, options.data, setting)
        for fold in folds
        for task in options.task
        for method in options.method
    ]
    folder = Path(options.results)
    store = Store(folder / f"table1{'-quick' if options.quick else ''}.jsonl", KEY)
    there = store.rows()
    open_cells = [cell for cell in cells if not _is_done(there.get(cell.key), cell)]
    say(
        [
            f"{len(cells)} cells, {len(cells) - len(open_cells)} done before, {options.jobs} processes"
        ]
    )
    failed = _run(open_cells, store, options.jobs)
    rows = list(store.rows().values())
    text = markdown(rows) + "\n" + times(rows)
    store.path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text, end="")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments table1",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", help="folder of the paper's data (default: STRUCTGP_DATA)")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--fold", nargs="+", type=int, choices=range(5), help="default: all")
    parser.add_argument("--method", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--quick", action="store_true", help="one fold, short schedules")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="limit of a gp-var-* fit")
    parser.add_argument("--device", default="cpu", help="of the gp-var-* fits")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--results", default=str(RESULTS), help="folder to keep cells in")
    return parser


def _is_done(row: Row | None, cell: Cell) -> bool:
    if row is None:
        return False
    limited = cell.method in TIME_LIMITED and not cell.setting.quick
    return not (limited and row["hit_limit"] and row["minutes"] < cell.setting.minutes)


def _run(cells: Sequence[Cell], store: Store, n_jobs: int) -> int:
    """Does the cells; how many failed."""
    failed = 0
    for number, (cell, row) in enumerate(run_all(run_cell, cells, n_jobs), 1):
        if isinstance(row, Exception):
            failed += 1
            say([f"[{number}/{len(cells)}] {cell.name}: failed: {row}"])
            continue
        store.add(row)
        limit = " (limit)" if row["hit_limit"] else ""
        say(
            [
                f"[{number}/{len(cells)}] {cell.name}: {row['error']:.2f} %, {row['seconds']:.0f} s{limit}"
            ]
        )
    return failed


def run_cell(cell: Cell) -> Row:
    """Fits, predicts, scores. seconds : of the fit, its cross-validation included."""
    fold = load_fold(cell.task, cell.data, cell.fold)
    key = dict(zip(KEY, cell.key, strict=True))
    return key | score(fold, METHODS[cell.method], cell.setting, cell.method in TIME_LIMITED)


def score(
    fold: Fold, method: Callable[[Fold, Setting], Fitted], setting: Setting, limited: bool
) -> Row:
    """What a cell says beside its key."""
    began = time.perf_counter()
    fitted = method(fold, setting)
    seconds = time.perf_counter() - began
    nll = ece = None
    if fitted.has_probabilities:
        marginals = fitted.model.predict_marginals(fold.X_test)
        nll = metrics.token_nll(fold.y_test, marginals)
        ece = metrics.calibration(fold.y_test, marginals).ece
    return {
        "error": 100 * metrics.token_error(fold.y_test, fitted.model.predict(fold.X_test)),
        "nll": nll,
        "ece": ece,
        "seconds": round(seconds, 2),
        "minutes": setting.minutes if limited else None,
        "hit_limit": fitted.hit_limit,
        "seed": setting.seed,
        "device": setting.device if limited else "cpu",
        "versions": _versions(),
        "details": fitted.details,
    }


def _versions() -> dict[str, str]:
    found = {"structgp": __version__, "python": platform.python_version()}
    for name in ("torch", "gpytorch", "numpy", "scipy", "python-crfsuite"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


# --- rows -> text ----------------------------------------------------------------------------


def markdown(rows: Sequence[Row]) -> str:
    """Error beside the paper's, and NLL and calibration error, means over folds: the same text for the same
    cells, whenever and in whatever order they were done."""
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))["error"]
    lines = [
        "Token error in %, mean (standard deviation over folds); the paper's; the difference in its",
        "standard deviations. * a fold stopped at a limit of time or steps; [n] folds if fewer than five.",
        "",
        "| task | method | here | paper | difference | NLL | ECE |",
        "|---|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        for method in METHODS:
            here = sorted(_of(rows, method, task), key=lambda row: row["fold"])
            if here:
                lines.append(_line(task, method, here, expected[task].get(method)))
    return "\n".join(lines) + "\n"


def _line(task: str, method: str, rows: list[Row], paper: list[float] | None) -> str:
    error = statistics.mean(row["error"] for row in rows)
    spread = statistics.stdev(row["error"] for row in rows) if len(rows) > 1 else None
    mark = "*" if any(row["hit_limit"] for row in rows) else ""
    count = f" [{len(rows)}]" if len(rows) < 5 else ""
    here = f"{error:.2f}{'' if spread is None else f' ({spread:.2f})'}{mark}{count}"
    fields = [task, method, here]
    fields += (
        [f"{paper[0]:.2f} ({paper[1]:.2f})", f"{(error - paper[0]) / paper[1]:+.1f}"]
        if paper
        else ["", ""]
    )
    for name in ("nll", "ece"):
        known = all(row[name] is not None for row in rows)
        fields.append(f"{statistics.mean(row[name] for row in rows):.3f}" if known else "")
    return f"| {' | '.join(fields)} |"


def times(rows: Sequence[Row]) -> str:
    """Mean seconds of a fit."""
    lines = [
        "Seconds a fit:",
        "",
        f"| task | {' | '.join(METHODS)} |",
        "|---" * (len(METHODS) + 1) + "|",
    ]
    for task in TASKS:
        found = [[row["seconds"] for row in _of(rows, method, task)] for method in METHODS]
        cells = [f"{statistics.mean(seconds):.1f}" if seconds else "" for seconds in found]
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _of(rows: Sequence[Row], method: str, task: str) -> list[Row]:
    return [row for row in rows if (row["method"], row["task"]) == (method, task)]
