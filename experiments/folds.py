"""The default fit on the paper's five folds: error, NLL, calibration and time for each task.

    python -m experiments.folds --data DIR [--task TASK ...] [--fold K ...] [--columns] [--against crf]
                                [--seeds N ...]

Features are the paper's encoded ones, or with ``--columns`` those of the raw columns and their CRF++
template. The CRF is python-crfsuite's, with its regulariser cross-validated on the training half of each
fold. 'mean' is the NLL under the posterior mean instead of draws from the posterior. ECE is averaged over
folds, and 'all' is that of the tokens of all folds together: on the few hundred tokens of one fold, chance
alone adds two or three hundredths. Seeds are values of ``random_state``: on chunking, encoded, they alone
make the mean NLL of the five folds vary from .259 to .275, so figures are means over several seeds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from experiments.data import run_command
from experiments.suites import columns_suite, encoded_suite
from structgp import StructuredGPClassifier, metrics
from structgp.evaluation.crf import LinearCRF

TASKS = ("basenp", "chunking", "segmentation", "japanesene")
FIGURES = ("token_error", "token_nll", "ece")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.folds", description=__doc__)
    parser.add_argument("--data", help="folder of the paper's data (default: STRUCTGP_DATA)")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--fold", nargs="+", type=int, choices=range(5), default=range(5))
    parser.add_argument("--columns", action="store_true", help="raw columns and templates")
    parser.add_argument("--against", choices=["crf"], help="a rival on the same folds")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    options = parser.parse_args(arguments)
    # The measure is token error, whatever the labels look like.
    ours = partial(StructuredGPClassifier, decode="accuracy")
    methods: dict[str, list[Any]] = {"structgp": [partial(ours, random_state=n) for n in options.seeds]}
    if options.against:
        methods["linear CRF"] = [lambda: LinearCRF(n_jobs=-1)]
    print(
        f"{'task':<14}{'method':<12}{'error %':>14}{'NLL':>8}{'ECE':>8}{'all':>8}"
        f"{'seconds per fold':>24}{'mean':>8}"
    )
    for task in options.task:
        X, y, folds = _load(task, options.data, options.columns)
        for name, made in methods.items():
            _print_row(task, name, [[_run(make(), X, y, *folds[k]) for k in options.fold] for make in made])


def _load(task: str, data: str | None, columns: bool) -> tuple[list[Any], list[list[str]], Any]:
    if columns:
        raw = columns_suite(task, data)
        return [raw.template.expand(x) for x in raw.X], raw.y, raw.folds
    encoded = encoded_suite(task, data)
    return list(encoded.X), encoded.y, encoded.folds


def _run(method: Any, X: list[Any], y: list[list[str]], train: Any, test: Any) -> dict[str, Any]:
    began = time.perf_counter()
    method.fit([X[i] for i in train], [y[i] for i in train])
    seconds = time.perf_counter() - began
    X_test, y_test = [X[i] for i in test], [y[i] for i in test]
    marginals = method.predict_marginals(X_test)
    found = {
        "token_error": metrics.token_error(y_test, method.predict(X_test)),
        "token_nll": metrics.token_nll(y_test, marginals),
        "ece": metrics.calibration(y_test, marginals).ece,
        "seconds": seconds,
        "answers": (y_test, marginals),
    }
    if isinstance(method, StructuredGPClassifier):
        plugged_in = method.set_params(n_draws=0).predict_marginals(X_test)
        found["nll_of_mean"] = metrics.token_nll(y_test, plugged_in)
    return found


def _print_row(task: str, name: str, each: list[list[dict[str, Any]]]) -> None:
    """Prints the means of all runs. each : for each random state, the runs of every fold."""
    runs = [run for folds in each for run in folds]
    of_all = statistics.mean(_ece_of_all(folds) for folds in each)
    error, nll, ece = (statistics.mean(run[figure] for run in runs) for figure in FIGURES)
    spread = statistics.stdev(run["token_error"] for run in runs) if len(runs) > 1 else 0.0
    seconds = [run["seconds"] for run in runs]
    plugged_in = [run["nll_of_mean"] for run in runs if "nll_of_mean" in run]
    mean = f"{statistics.mean(plugged_in):>8.3f}" if plugged_in else ""
    print(
        f"{task:<14}{name:<12}{100 * error:>7.2f} ({100 * spread:.2f}){nll:>8.3f}{ece:>8.3f}{of_all:>8.3f}"
        f"{statistics.mean(seconds):>12.1f} (most {max(seconds):.1f}){mean}",
        flush=True,
    )


def _ece_of_all(folds: list[dict[str, Any]]) -> float:
    """ECE over the tokens of several folds together."""
    y, marginals = ([x for run in folds for x in run["answers"][n]] for n in (0, 1))
    return metrics.calibration(y, marginals).ece


if __name__ == "__main__":
    run_command(main)
