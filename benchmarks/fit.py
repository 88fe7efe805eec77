"""Time to a given loss on new data: the test lines of the embedded corpus of recipes.

The goal is a negative log-probability per token that both structgp's default fit and the cross-validated
linear CRF reach: 1 % above the larger of the two. Methods that can be stopped are run with several limits,
each time from the start; the result is the fit that reaches the goal in the least time. Slice sampling and
the paper's two settings have the paper's linear kernel. Times are CPU seconds of all threads.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from experiments.methods.ess import GPStruct
from experiments.presets import paper_model

from benchmarks.record import Options, Row, log_plot, table
from structgp import StructgpWarning, StructuredGPClassifier, metrics
from structgp.data.corpora import recipes
from structgp.evaluation.crf import LinearCRF

Fit = Callable[[float, list[Any], list[Any]], Any]


def ours(limit: float, X: list[Any], y: list[Any]) -> Any:
    """Our default fit. limit : number of steps, 0 for no limit."""
    model = StructuredGPClassifier()
    return model.fit(X, y, callback=lambda info: 0 < limit <= info.iteration + 1)


def crf(limit: float, X: list[Any], y: list[Any]) -> Any:
    return LinearCRF().fit(X, y)


def slices(limit: float, X: list[Any], y: list[Any]) -> Any:
    """Slice sampling. limit : number of iterations of a chain."""
    return GPStruct(int(limit), thin=max(1, int(limit) // 100)).fit(X, y)


def paper(name: str) -> Fit:
    def fit(limit: float, X: list[Any], y: list[Any]) -> Any:
        """One of the paper's settings. limit : seconds of its optimiser."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StructgpWarning)  # the limit is intended
            return paper_model(name, max_seconds=limit).fit(X, y)

    return fit


# Maps a name to the fit, the limits of the quick run, and the limits of the full run.
METHODS: dict[str, tuple[Fit, tuple[float, ...], tuple[float, ...]]] = {
    "crf": (crf, (0,), (0,)),
    "structgp": (ours, (1, 0), (1, 2, 4, 8, 0)),
    "gp-ess": (slices, (30,), (100,)),
    "paper-stochastic": (paper("paper-stochastic"), (2,), (10, 40)),
    "paper-batch": (paper("paper-batch"), (2,), (10, 40)),
}
QUICK_LINES = 40
BOTH = ("crf", "structgp")
SLACK = 1.01


def run(options: Options) -> Iterator[Row]:
    corpus = recipes()
    X, y = [corpus.template.expand(x) for x in corpus.X_train], corpus.y_train
    X_new, y_new = [corpus.template.expand(x) for x in corpus.X_test], corpus.y_test
    if options.quick:
        X, y, X_new, y_new = (part[:QUICK_LINES] for part in (X, y, X_new, y_new))
    ours(1, X[:QUICK_LINES], y[:QUICK_LINES])  # so that loading of libraries is not measured
    for name, (fit, quick, full) in METHODS.items():
        if name not in BOTH and not options.wants(name):
            continue
        for limit in quick if options.quick else full:
            at, at_cpu = time.perf_counter(), time.process_time()
            model = fit(limit, X, y)
            seconds, cpu = time.perf_counter() - at, time.process_time() - at_cpu
            yield {
                "method": name,
                "limit": limit,
                "seconds": seconds,
                "cpu_seconds": cpu,
                "nll": metrics.token_nll(y_new, model.predict_marginals(X_new)),
                "error": 100 * metrics.token_error(y_new, model.predict(X_new)),
                "lines": len(X),
            }


def tables(rows: list[Row]) -> str:
    # The last fit of these two methods is the one without a limit.
    goal = SLACK * max({row["method"]: row["nll"] for row in rows}[name] for name in BOTH)
    whole = {}
    lines = []
    for name in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == name]
        there = [row for row in mine if row["nll"] <= goal]
        best, last = min(mine, key=lambda row: row["nll"]), mine[-1]
        whole[name] = min(there, key=lambda row: row["cpu_seconds"]) if there else None
        lines.append(
            [
                name,
                whole[name]["cpu_seconds"] if whole[name] else "not reached",
                best["nll"],
                best["error"],
                last["cpu_seconds"],
            ]
        )
    reached = whole.get("structgp")
    for line in lines:
        other = whole[line[0]]
        line.append(other["cpu_seconds"] / reached["cpu_seconds"] if other and reached else "")
    header = ["", "CPU s to the goal", "best NLL", "its error, %", "CPU s of the longest fit"]
    header.append("to the goal / structgp's")
    text = f"{rows[0]['lines']} lines; goal: NLL {goal:.4f}, which both crf and structgp reach.\n\n"
    return text + table(header, lines)


def plots(rows: list[Row]) -> dict[str, str]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(row["method"], []).append((row["cpu_seconds"], row["nll"]))
    title = "Loss on new lines against time"
    return {"fit": log_plot(lines, "CPU seconds", "NLL per token", title, log_y=False)}
