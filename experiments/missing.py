"""Labels missing at random: summing over them, against leaving out every sequence that lacks one.

    python -m experiments.missing --data DIR [--task TASK ...] [--fold K ...] [--share 0.3]

A random share of the training tokens has no label. The errors are those of the default fit to all labels,
to the remaining labels, and to the sequences that still have all labels (if there are none, of always
predicting the most frequent label).
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.data import Fold, arguments, keep, load_fold, run_command
from structgp import StructuredGPClassifier, metrics


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments("missing", __doc__, ["chunking"])
    parser.set_defaults(fold=list(range(5)))
    parser.add_argument("--share", type=float, default=0.3)
    options = parser.parse_args(words)
    for task in options.task:
        rows = [compare(task, k, options) for k in options.fold]
        for row in rows:
            keep("missing", row)
        means = {
            name: statistics.mean(row["token_error"][name] for row in rows)
            for name in rows[0]["token_error"]
        }
        shown = "  ".join(f"{name} {error:.2f} %" for name, error in means.items())
        rise = means["missing"] / means["all labels"] - 1
        print(f"{task}: {shown}  (rise {100 * rise:+.1f} %)", flush=True)


def compare(task: str, k: int, options: argparse.Namespace) -> dict[str, Any]:
    fold = load_fold(task, options.data, k)
    rng = np.random.default_rng(k)
    y = [[None if rng.random() < options.share else v for v in labels] for labels in fold.y]
    whole = [i for i, labels in enumerate(y) if None not in labels]
    errors = {
        "all labels": _error(fold, fold.X, fold.y),
        "missing": _error(fold, fold.X, y),
        "whole sequences": _error(fold, [fold.X[i] for i in whole], [fold.y[i] for i in whole]),
    }
    print(f"{task} {k}: {errors} ({len(whole)} of {len(y)} sequences are whole)", flush=True)
    return {"task": task, "fold": k, "share": options.share, "token_error": errors}


def _error(fold: Fold, X: Sequence[Any], y: Sequence[Sequence[str | None]]) -> float:
    """Token error in %."""
    if len({label for labels in y for label in labels}) < 2:
        common = Counter(label for labels in fold.y for label in labels).most_common(1)[0][0]
        predicted = [[common] * len(labels) for labels in fold.y_test]
    else:
        predicted = StructuredGPClassifier().fit(X, y).predict(fold.X_test)
    return round(100 * metrics.token_error(fold.y_test, predicted), 2)


if __name__ == "__main__":
    run_command(main)
