"""The paper's figure of progress (fig:-perf-profile), rerun and widened: test NLL and error against time.

    python -m experiments profile --data DIR [--task T ...] [--fold K ...] [--method M ...] [--minutes N]
        [--quick]

The paper's figure shows gp-var-s on its larger experiment, here the task basenp-500; the other tasks are
the folds of its table. Each fit is scored as it goes: ours after every step, the paper's presets at times
that grow by a factor of the root of 2 (gp-var-b when an iteration of its outer loop, 65 steps of L-BFGS, is
done), and all fits when they end. The tuned CRF is only scored at its end, and its time includes
cross-validation. Time, and the limit --minutes of a gp-var-* fit, is processor time from the call of fit
on, without the scoring (gp-var-b is stopped by wall-clock time, since it has to stop within an iteration).
Cells are kept in experiments/results/profile.jsonl, as those of table1 are; --quick does one fold of each
small task with the short schedules of table1 --quick, and keeps it in a separate file.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments import data, large
from experiments.cells import Row, Store
from experiments.commands import add_folds, finish, is_done, parser_of, publish, tell_error, versions
from experiments.compared import GP_MODELS, METHODS, TIME_LIMITED, Setting, fit_quietly
from experiments.data import Fold, load_fold
from experiments.figures import Curve, curves, figure
from experiments.suites import data_folder
from experiments.table1 import KEY, MINUTES, SEED, Cell, cells_of, papers_errors
from structgp import StructuredGPClassifier, metrics
from structgp.inference import StepInfo

LARGE_TASK = "basenp-500"
TASKS = (*data.TASKS, LARGE_TASK)
PROFILED = ("ours", "crf", "gp-var-b", "gp-var-s", "gp-var-p")
NEAR = 0.01
"""A fit has arrived at a level of the NLL if it is within this many nats per token of it."""


def main(words: Sequence[str] | None = None) -> int:
    """0 if all cells were done, 1 if one of them failed."""
    parser = parser_of("profile", __doc__)
    add_folds(parser, TASKS)
    parser.add_argument("--method", nargs="+", choices=PROFILED, default=list(PROFILED))
    parser.add_argument("--minutes", type=float, default=MINUTES, help="limit of a gp-var-* fit")
    options = parser.parse_args(words)
    data_folder(options.data)
    tasks = [task for task in options.task if not (options.quick and task == LARGE_TASK)]
    setting = Setting(options.quick, options.minutes, SEED)
    cells = [
        Cell(method, task, fold, options.data, setting)
        for method in options.method
        for fold in options.fold or ([0] if options.quick else range(5))
        for task in tasks
    ]
    name = f"profile{'-quick' if options.quick else ''}"
    store = Store(Path(options.results) / f"{name}.jsonl", KEY)
    there = store.rows()
    open_cells = [cell for cell in cells if not is_done(there.get(cell.key), options.minutes)]
    failed = finish(run_cell, open_cells, store, options.jobs, tell_error)
    rows = list(store.rows().values())
    publish(store.path, markdown(rows), {f"{name}-{task}": svg for task, svg in plots(rows).items()})
    return 1 if failed else 0


# --- a cell ----------------------------------------------------------------------------------


class Looks:
    """Scores of the model on the test data as its fit goes on, with a clock that is stopped during scoring.

    every_step : look after every step; otherwise whenever the next power of the root of 2, in seconds, is
    reached. limit : seconds after which the fit is stopped. found : seconds, error in % and NLL of each
    look.
    """

    def __init__(self, fold: Fold, every_step: bool, limit: float) -> None:
        self.fold, self.every_step, self.limit = fold, every_step, limit
        self.found: list[tuple[float, float, float]] = []
        self._reached = 0
        self._began = time.process_time()

    def seconds(self) -> float:
        return time.process_time() - self._began

    def step(self, model: StructuredGPClassifier, info: StepInfo) -> bool:
        """To be called in the callback; returns whether time is up. The last step is not looked at here,
        but at the end of the fit."""
        now = self.seconds()
        over = now >= self.limit
        due = now >= 2 ** (self._reached / 2)
        if not (info.finished or over) and (self.every_step or due):
            while 2 ** (self._reached / 2) <= now:
                self._reached += 1
            self.look(model.so_far(), now)
        return over

    def look(self, model: Any, now: float) -> None:
        marginals = model.predict_marginals(self.fold.X_test)
        error = 100 * metrics.token_error(self.fold.y_test, model.predict(self.fold.X_test))
        nll = metrics.token_nll(self.fold.y_test, marginals)
        self.found.append((round(now, 3), round(error, 4), round(nll, 5)))
        self._began += self.seconds() - now


def run_cell(cell: Cell) -> Row:
    task = large.TASK if cell.task == LARGE_TASK else cell.task
    fold = load_fold(task, cell.data, cell.fold)
    return dict(zip(KEY, cell.key, strict=True)) | profile(fold, cell.method, cell.setting)


def profile(fold: Fold, method: str, setting: Setting) -> Row:
    """The fields of a cell's row beside its key. error, nll and seconds are those of the last look."""
    limited = method in TIME_LIMITED and not setting.quick
    looks = Looks(fold, method == "ours", 60 * setting.minutes if limited else math.inf)
    if method in GP_MODELS:
        by_wall = setting if method == "gp-var-b" else replace(setting, minutes=math.inf)
        model = GP_MODELS[method](by_wall)
        fitted = fit_quietly(model, fold, lambda info: looks.step(model, info))
    else:
        fitted = METHODS[method](fold, setting)
    looks.look(fitted.model, looks.seconds())
    seconds, error, nll = looks.found[-1]
    return {
        "error": error,
        "nll": nll,
        "seconds": seconds,
        "looks": looks.found,
        "minutes": setting.minutes if limited else None,
        "hit_limit": fitted.hit_limit or seconds >= looks.limit,
        "seed": setting.seed,
        "versions": versions(),
        "details": fitted.details,
    }


# --- rows -> text ----------------------------------------------------------------------------


def arrival(row: Row, level: float) -> float | None:
    """Seconds at the first look from which on the NLL is never more than ``NEAR`` above the level."""
    since = None
    for seconds, _, nll in row["looks"]:
        near = nll <= level + NEAR
        since = (seconds if since is None else since) if near else None
    return since


def markdown(rows: Sequence[Row]) -> str:
    """The table as Markdown; the same for the same cells, in whatever order they were done."""
    lines = [
        "Means over folds, at the end of the fit. Arrived: the time after which the NLL stays within",
        f"{NEAR} of that end, and within as much of the end of ours on the same fold; in brackets, on how",
        "many of the folds if not on all. * a fit stopped at a limit of time or steps.",
        "",
        "| task | method | folds | error, % | NLL | seconds | arrived | at ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        ours = {row["fold"]: row["nll"] for row in cells_of(rows, "ours", task)}
        for method in PROFILED:
            here = cells_of(rows, method, task)
            if here:
                lines.append(_line(task, method, here, ours))
    return "\n".join(lines) + "\n"


def _line(task: str, method: str, rows: list[Row], ours: dict[int, float]) -> str:
    means = [statistics.mean(row[name] for row in rows) for name in ("error", "nll", "seconds")]
    mark = "*" if any(row["hit_limit"] for row in rows) else ""
    own = [arrival(row, row["nll"]) for row in rows]
    shared = [row for row in rows if row["fold"] in ours]
    at_ours = [arrival(row, ours[row["fold"]]) for row in shared]
    fields = [task, method, str(len(rows)), f"{means[0]:.2f}{mark}", f"{means[1]:.3f}"]
    fields += [f"{means[2]:.1f}", _mean(own), _mean(at_ours)]
    return f"| {' | '.join(fields)} |"


def _mean(found: Sequence[float | None]) -> str:
    there = [seconds for seconds in found if seconds is not None]
    if not there:
        return "never" if found else ""
    count = "" if len(there) == len(found) else f" [{len(there)} of {len(found)}]"
    return f"{statistics.mean(there):.1f}{count}"


def plots(rows: Sequence[Row]) -> dict[str, str]:
    """A figure for each task that has cells: NLL and error, with a line for each fold."""
    return {
        task: _plot(task, [row for row in rows if row["task"] == task])
        for task in TASKS
        if any(row["task"] == task for row in rows)
    }


def _plot(task: str, rows: Sequence[Row]) -> str:
    there = [row for method in PROFILED for row in cells_of(rows, method, task)]
    nll = [Curve(row["method"], [(t, v) for t, _, v in row["looks"]]) for row in there]
    # An error of 0 has no place on a logarithmic axis.
    error = [Curve(row["method"], [(t, max(v, 0.01)) for t, v, _ in row["looks"]]) for row in there]
    name, paper = "gp-var-s", papers_errors().get(task)
    level = large.PAPER[name] if paper is None else paper[name][0]
    panels = [
        curves(f"{task}: NLL against time", f"{task}: NLL per token", nll, PROFILED),
        curves(
            f"{task}: token error against time",
            f"{task}: token error, %",
            error,
            PROFILED,
            {f"the paper's {name}, in the end": level},
        ),
    ]
    shown = {row["method"] for row in there}
    return figure(panels, [method if method in shown else "" for method in PROFILED])
