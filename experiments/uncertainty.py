"""Whether uncertainty finds errors: errors among the most uncertain tokens, and the error of the rest.

    python -m experiments.uncertainty --data DIR [--task TASK ...] [--fold K ...] [--columns]

For each fold, and also for the cross-validated linear CRF: the share of all errors that are among the 10 %
most uncertain tokens, and the area under the risk-coverage curve (mean error of the most confident share of
tokens, over all shares). Uncertainty is 1 - the probability of the predicted label.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.data import TASKS, arguments, keep, load_fold, run_command
from structgp import StructuredGPClassifier, metrics
from structgp.evaluation.crf import LinearCRF

UNCERTAIN = 0.1


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments("uncertainty", __doc__, TASKS)
    parser.set_defaults(fold=list(range(5)))
    parser.add_argument("--columns", action="store_true", help="raw columns and templates")
    options = parser.parse_args(words)
    for task in options.task:
        rows = [compare(task, k, options) for k in options.fold]
        for row in rows:
            keep("uncertainty", row)
        for name in ("structgp", "linear CRF"):
            share, area = (
                statistics.mean(row[name][figure] for row in rows) for figure in ("share", "area")
            )
            said = f"the most uncertain 10 % hold {100 * share:.0f} % of the errors"
            print(f"{task:<14}{name:<12} {said}, area under risk-coverage {area:.4f}", flush=True)


def compare(task: str, k: int, options: argparse.Namespace) -> dict[str, Any]:
    fold = load_fold(task, options.data, k, columns=options.columns)
    row: dict[str, Any] = {"task": task, "fold": k, "columns": options.columns}
    for name, method in (("structgp", StructuredGPClassifier()), ("linear CRF", LinearCRF(n_jobs=-1))):
        marginals = method.fit(fold.X, fold.y).predict_marginals(fold.X_test)
        row[name] = {
            "share": round(_share(fold.y_test, marginals), 4),
            "area": round(metrics.risk_coverage(fold.y_test, marginals).area, 5),
        }
    return row


def _share(y: Sequence[Sequence[str]], marginals: Sequence[Sequence[dict[str, float]]]) -> float:
    """Share of all errors that are among the tokens with the lowest confidence."""
    every = [p for sequence in marginals for p in sequence]
    best = [max(p, key=p.__getitem__) for p in every]
    confidence = np.array([p[label] for p, label in zip(every, best, strict=True)])
    wrong = np.array(best) != np.concatenate(y)
    first = np.argsort(confidence, kind="stable")[: round(UNCERTAIN * len(wrong))]
    return float(wrong[first].sum() / max(1, wrong.sum()))


if __name__ == "__main__":
    run_command(main)
