"""Does doubt find errors? The most doubtful tokens, and the error of the rest.

    python -m experiments.doubt --data DIR [--task TASK ...] [--fold K ...] [--columns]

On each fold, beside the cross-validated linear CRF: the share of all errors that the 10 % most doubtful
tokens hold, and the area under the risk-coverage curve (mean error of the most confident share of tokens,
over all shares). Doubt is 1 - the probability of the predicted label.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.data import TASKS, arguments, keep, load_fold
from structgp import StructgpError, StructuredGPClassifier, metrics
from structgp.evaluation.crf import LinearCRF

DOUBTFUL = 0.1


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments("doubt", __doc__, TASKS)
    parser.set_defaults(fold=list(range(5)))
    parser.add_argument("--columns", action="store_true", help="raw columns and templates")
    options = parser.parse_args(words)
    for task in options.task:
        rows = [compare(task, k, options) for k in options.fold]
        for row in rows:
            keep("doubt", row)
        for name in ("structgp", "linear CRF"):
            share, area = (
                statistics.mean(row[name][figure] for row in rows) for figure in ("share", "area")
            )
            print(
                f"{task:<14}{name:<12} the most doubtful 10 % hold {100 * share:.0f} % of the errors, area "
                f"under risk-coverage {area:.4f}",
                flush=True,
            )


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
    """Of all errors, how many are among the tokens with the least confidence."""
    pairs = [(max(p, key=p.__getitem__), p, v) for d, t in zip(marginals, y, strict=True)
             for p, v in zip(d, t, strict=True)]  # fmt: skip
    confidence = np.array([p[best] for best, p, _ in pairs])
    wrong = np.array([best != truth for best, _, truth in pairs])
    first = np.argsort(confidence, kind="stable")[: round(DOUBTFUL * len(wrong))]
    return float(wrong[first].sum() / max(1, wrong.sum()))


if __name__ == "__main__":
    try:
        main()
    except StructgpError as error:
        sys.exit(f"experiments: {error}")
