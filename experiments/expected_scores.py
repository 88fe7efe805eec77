"""Whether the intervals for scores on unlabelled text hold the true scores.

    python -m experiments.expected_scores --data DIR [--task TASK ...] [--splits 10] [--jobs N]

Each split has a random training set, as large as those of the paper's folds, and the default classifier is
asked for expected scores on up to 300 of the other sequences. Their labels then tell whether the 90 %
intervals of error and F1 hold the true figures. Rows go to results/expected_scores.jsonl; splits that are
already there are not done again.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.cells import Row, Store
from experiments.commands import finish
from experiments.data import RESULTS, run_command
from experiments.splits import FOUR, SIZES, split_of
from structgp import StructuredGPClassifier

KEY = ("task", "split")
MOST_TEST = 300
SCORES = ("error", "precision", "recall", "f1")


@dataclass(frozen=True)
class Cell:
    task: str
    split: int
    data: str | None

    @property
    def name(self) -> str:
        return f"{self.task} {self.split}"


def run_cell(cell: Cell) -> Row:
    fold = split_of(cell.task, cell.data, cell.split, MOST_TEST)
    model = StructuredGPClassifier().fit(fold.X, fold.y)
    expected, report = model.expected_scores(fold.X_test), model.evaluate(fold.X_test, fold.y_test)
    truth = (report.token_error, report.span_precision, report.span_recall, report.span_f1)
    row: Row = {"task": cell.task, "split": cell.split}
    row["data_weight"] = model.training_log_["plan"]["data_weight"]["value"]
    row["error_ratio"] = (model.held_out_ or {}).get("error_ratio")
    for name, true in zip(SCORES, truth, strict=True):
        interval = getattr(expected, name)
        row[name] = {"true": true, **interval._asdict(), "held": interval.low <= true <= interval.high}
    return row


def tell(row: Row) -> str:
    words = []
    for name in ("error", "f1"):
        at = row[name]
        bounds = f"{100 * at['low']:.1f} to {100 * at['high']:.1f}, true {100 * at['true']:.1f}"
        words.append(f"{name} {100 * at['mean']:.1f} ({bounds}{'' if at['held'] else ', missed'})")
    return "; ".join(words)


def table(rows: Sequence[Row], tasks: Sequence[str]) -> str:
    lines = ["| task | splits | error held | F1 held | error, expected / true | F1, expected / true |"]
    lines.append("|---|---|---|---|---|---|")
    for task in (*tasks, "all"):
        here = [row for row in rows if row["task"] == task or (task == "all" and row["task"] in tasks)]
        if here:
            held = [sum(row[name]["held"] for row in here) for name in ("error", "f1")]
            means = [_means(here, name) for name in ("error", "f1")]
            lines.append(f"| {task} | {len(here)} | {held[0]} | {held[1]} | {means[0]} | {means[1]} |")
    return "\n".join(lines)


def _means(rows: Sequence[Row], name: str) -> str:
    expected, true = (100 * np.mean([row[name][key] for row in rows]) for key in ("mean", "true"))
    return f"{expected:.1f} / {true:.1f}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.expected_scores",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", help="folder of the paper's data (default: STRUCTGP_DATA)")
    parser.add_argument("--task", nargs="+", choices=list(SIZES), default=list(FOUR))
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options: Any = parser.parse_args(words)
    store = Store(RESULTS / "expected_scores.jsonl", KEY)
    every = [Cell(task, split, options.data) for split in range(options.splits) for task in options.task]
    there = store.rows()
    finish(run_cell, [c for c in every if (c.task, c.split) not in there], store, options.jobs, tell)
    print(table(list(store.rows().values()), options.task))


# Worker processes import this file again under another name.
if __name__ == "__main__":
    run_command(main)
