"""The paper's table of errors (tab:error-small), rerun: seven methods, four tasks, five folds.

    python -m experiments table1 --data DIR [--task T ...] [--fold K ...] [--method M ...] [--quick]

A cell is one method on one fold of one task. Finished cells are kept in experiments/results/table1.jsonl
and skipped by the next run, so a run may be killed at any time; a cell that the time limit cut short is
done again if --minutes is longer on the same --device. The paper's presets (gp-var-*) take hours to
converge: each fit is given --minutes. --quick does one fold with short schedules, in a few minutes, and
keeps its cells in a separate file.

The table of all cells in the file is printed at the end and written beside the file, as table1.md.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.cells import Row, Store
from experiments.commands import add_folds, finish, is_done, parser_of, publish, tell_error, versions
from experiments.compared import METHODS, TIME_LIMITED, Fitted, Setting
from experiments.data import TASKS, Fold, load_fold
from experiments.figures import Dot, dots, figure
from experiments.suites import data_folder
from structgp import metrics

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
    parser = parser_of("table1", __doc__)
    add_folds(parser, TASKS)
    parser.add_argument("--method", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--minutes", type=float, default=MINUTES, help="limit of a gp-var-* fit")
    parser.add_argument("--device", default="cpu", help="of the gp-var-* fits")
    options = parser.parse_args(words)
    data_folder(options.data)
    folds = options.fold or ([0] if options.quick else list(range(5)))
    setting = Setting(options.quick, options.minutes, SEED, options.device)
    # Fold by fold, so that an interrupted run has cells of every method and task.
    cells = [
        Cell(method, task, fold, options.data, setting)
        for fold in folds
        for task in options.task
        for method in options.method
    ]
    store = Store(Path(options.results) / f"table1{'-quick' if options.quick else ''}.jsonl", KEY)
    there = store.rows()
    open_cells = [
        cell for cell in cells if not is_done(there.get(cell.key), options.minutes, options.device)
    ]
    failed = finish(run_cell, open_cells, store, options.jobs, tell_error)
    rows = list(store.rows().values())
    publish(store.path, markdown(rows) + "\n" + times(rows), {store.path.stem: plot(rows)})
    return 1 if failed else 0


def run_cell(cell: Cell) -> Row:
    """Fits, predicts and scores. 'seconds' is the time of the fit, including its cross-validation."""
    fold = load_fold(cell.task, cell.data, cell.fold)
    key = dict(zip(KEY, cell.key, strict=True))
    return key | score(fold, METHODS[cell.method], cell.setting, cell.method in TIME_LIMITED)


def score(fold: Fold, method: Callable[[Fold, Setting], Fitted], setting: Setting, limited: bool) -> Row:
    """The fields of a cell's row beside its key."""
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
        "minutes": setting.minutes if limited and not setting.quick else None,
        "hit_limit": fitted.hit_limit,
        "seed": setting.seed,
        "device": setting.device if limited else "cpu",
        "versions": versions(),
        "details": fitted.details,
    }


# --- rows -> text ----------------------------------------------------------------------------


def papers_errors() -> dict[str, dict[str, list[float]]]:
    """The paper's errors: task -> method -> [mean, standard deviation]."""
    return json.loads(EXPECTED.read_text(encoding="utf-8"))["error"]


def markdown(rows: Sequence[Row]) -> str:
    """A table of errors beside the paper's, NLL and calibration error, as means over folds; the same text
    for the same cells, whenever and in whatever order they were done."""
    expected = papers_errors()
    lines = [
        "Token error in %, mean (standard deviation over folds); the paper's; the difference in its",
        "standard deviations. * a fold stopped at a limit of time or steps; [n] folds if fewer than five.",
        "",
        "| task | method | here | paper | difference | NLL | ECE |",
        "|---|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        for method in METHODS:
            here = cells_of(rows, method, task)
            if here:
                lines.append(_line(task, method, here, expected[task].get(method)))
    return "\n".join(lines) + "\n"


def _line(task: str, method: str, rows: list[Row], paper: list[float] | None) -> str:
    error, _ = mean_and_spread(rows)
    fields = [task, method, summary(rows)]
    fields += (
        [f"{paper[0]:.2f} ({paper[1]:.2f})", f"{(error - paper[0]) / paper[1]:+.1f}"] if paper else ["", ""]
    )
    for name in ("nll", "ece"):
        known = all(row[name] is not None for row in rows)
        fields.append(f"{statistics.mean(row[name] for row in rows):.3f}" if known else "")
    return f"| {' | '.join(fields)} |"


def summary(rows: Sequence[Row]) -> str:
    """A summary such as '4.75 (0.32)* [3]', which the head of the table explains."""
    error, spread = mean_and_spread(rows)
    mark = "*" if any(row["hit_limit"] for row in rows) else ""
    count = f" [{len(rows)}]" if len(rows) < 5 else ""
    return f"{error:.2f}{f' ({spread:.2f})' if len(rows) > 1 else ''}{mark}{count}"


def mean_and_spread(rows: Sequence[Row]) -> tuple[float, float]:
    """Mean and standard deviation of the errors; the latter is 0 for a single row."""
    errors = [row["error"] for row in rows]
    return statistics.mean(errors), statistics.stdev(errors) if len(errors) > 1 else 0.0


def times(rows: Sequence[Row]) -> str:
    """A table of the mean seconds per fit."""
    lines = ["Seconds per fit:", "", f"| task | {' | '.join(METHODS)} |", "|---" * (len(METHODS) + 1) + "|"]
    for task in TASKS:
        found = [[row["seconds"] for row in cells_of(rows, method, task)] for method in METHODS]
        cells = [f"{statistics.mean(seconds):.1f}" if seconds else "" for seconds in found]
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Row]) -> str:
    """A panel for each task: the errors found here, and the paper's as hollow dots."""
    expected, panels = papers_errors(), []
    for task in TASKS:
        there = {method: cells_of(rows, method, task) for method in METHODS}
        shown = [Dot(method, *mean_and_spread(found)) for method, found in there.items() if found]
        if shown:
            shown += [Dot(method, *paper, hollow=True) for method, paper in expected[task].items()]
            panels.append(dots(task, "token error, %", list(METHODS), shown))
    return figure(panels, ["here", "", "", "", "the paper's"])


def cells_of(rows: Sequence[Row], method: str, task: str) -> list[Row]:
    """The rows of one method and task, sorted by fold."""
    found = [row for row in rows if (row["method"], row["task"]) == (method, task)]
    return sorted(found, key=lambda row: row["fold"])
