"""A fifth of the training labels are wrong: a likelihood that models this, against two that do not.

    python -m experiments.noisy --data DIR [--seeds N ...] [--fold K ...] [--method M ...] [--jobs N]

The data are the segmentation task, with its five folds and the paper's encoded features. Each training
label is replaced with probability 0.2 by a random other one; errors are measured on the clean labels of the
test halves, over all folds of a seed together. The annotator likelihood of ``examples/noisy_annotators.py``
is a NumPy function without a gradient; it is compared with the chain, under the same prior and fitted in
the same way, and with the cross-validated linear CRF. Fits that are in experiments/results/noisy.jsonl are
not done again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from examples.noisy_annotators import FLIPPED, flip, methods

from experiments.cells import Row, Store, run_all, say
from experiments.data import RESULTS, load_fold, run_command
from structgp import Natural, metrics

TASK = "segmentation"
DRAWS = 64
"""Number of draws in the fits of the annotator likelihood: twice as many as usual, since labels that may be
wrong make these fits noisier."""

KEY = ("method", "draws", "columns", "seed", "fold")
Run = tuple[str | None, bool, int, int, str]
METHODS = ("annotator", "chain", "CRF")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.noisy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", help="folder of the paper's data (default: STRUCTGP_DATA)")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--fold", nargs="+", type=int, choices=range(5), default=list(range(5)))
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--columns", action="store_true", help="raw columns and templates")
    parser.add_argument("--jobs", type=int, default=1, help="fits at a time")
    options = parser.parse_args(words)
    runs = [
        (options.data, options.columns, seed, k, name)
        for seed in options.seeds
        for k in options.fold
        for name in options.method
    ]
    store = Store(RESULTS / "noisy.jsonl", KEY)
    there = store.rows()
    open_runs = [r for r in runs if _key(*r[1:]) not in there]
    for r, row in run_all(run, open_runs, options.jobs):
        if isinstance(row, Exception):
            raise row
        store.add(row)
        say([f"seed {r[2]}, fold {r[3]}, {r[4]}: {row['wrong']} of {row['tokens']} wrong"])
    rows_of = store.rows()
    found = [rows_of[_key(*r[1:])] for r in runs]
    won = 0
    for seed in options.seeds:
        rows = [row for row in found if row["seed"] == seed]
        errors = {
            name: 100
            * sum(row["wrong"] for row in rows if row["method"] == name)
            / sum(row["tokens"] for row in rows if row["method"] == name)
            for name in options.method
        }
        won += min(errors, key=errors.__getitem__) == "annotator"
        shown = "".join(f"  {name} {error:.2f} %" for name, error in errors.items())
        print(f"seed {seed}:{shown}", flush=True)
    if "annotator" in options.method:
        print(f"annotator: lowest error in {won} of {len(options.seeds)} seeds")


def _key(columns: bool, seed: int, k: int, name: str) -> tuple[Any, ...]:
    return name, DRAWS if name == "annotator" else None, columns, seed, k


def run(task: Run) -> Row:
    """Fits a method to flipped labels, and counts the test tokens of the fold that it gets wrong."""
    data, columns, seed, k, name = task
    fold = load_fold(TASK, data, k, columns=columns)
    seen = flip(fold.y, FLIPPED, seed)
    began = time.perf_counter()
    n_labels = len({label for labels in seen for label in labels})
    model = methods(n_labels, inference=Natural(n_draws=DRAWS))[name]().fit(fold.X, seen)
    seconds = round(time.perf_counter() - began, 1)
    tokens = sum(map(len, fold.y_test))
    wrong = round(tokens * metrics.token_error(fold.y_test, model.predict(fold.X_test)))
    row = dict(zip(KEY, _key(columns, seed, k, name), strict=True)) | {"task": TASK, "flipped": FLIPPED}
    return row | {"wrong": wrong, "tokens": tokens, "seconds": seconds}


if __name__ == "__main__":
    run_command(main)
