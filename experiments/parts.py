"""Learning part by part against learning all at once: what ``partial_fit`` loses.

    python -m experiments.parts --data DIR [--task TASK ...] [--fold K ...] [--parts 10]

The training half comes in ten parts, each seen once and then forgotten; the posterior so far is the prior
for the next part.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from experiments.data import arguments, each_fold, load_fold, run_command
from structgp import StructuredGPClassifier


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments("parts", __doc__, ["basenp"])
    parser.set_defaults(fold=list(range(5)))
    parser.add_argument("--parts", type=int, default=10)
    options = parser.parse_args(words)
    each_fold("parts", options, lambda task, k: compare(task, k, options))


def compare(task: str, k: int, options: argparse.Namespace) -> dict[str, Any]:
    fold = load_fold(task, options.data, k)
    row: dict[str, Any] = {"task": task, "fold": k, "parts": options.parts}
    began = time.perf_counter()
    once = StructuredGPClassifier().fit(fold.X, fold.y).evaluate(fold.X_test, fold.y_test)
    row["seconds, at once"] = round(time.perf_counter() - began, 1)
    model, n = StructuredGPClassifier(), options.parts
    began = time.perf_counter()
    for i in range(n):
        model.partial_fit(fold.X[i::n], fold.y[i::n], remember=False)
    report = model.evaluate(fold.X_test, fold.y_test)
    row["seconds, in parts"] = round(time.perf_counter() - began, 1)
    for name, found in (("at once", once), ("in parts", report)):
        assert found.token_nll is not None
        row[name] = {"error": round(100 * found.token_error, 2), "nll": round(found.token_nll, 4)}
    row["ratio of NLL"] = round(row["in parts"]["nll"] / row["at once"]["nll"], 3)
    return row


if __name__ == "__main__":
    run_command(main)
