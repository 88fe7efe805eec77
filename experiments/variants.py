"""The default fit against itself with one thing changed: bound, held-out error and NLL.

    python -m experiments.variants --data DIR [--task TASK ...] [--fold K ...] [--variant NAME ...]

'minibatch' : sites are updated batch by batch instead of from all data at once. 'fixed kernel' : every
feature's weight has prior variance 1, and nothing about the kernel is learned. 'inducing inputs' : the
posterior is over function values, with a full covariance, instead of weights. Features are the paper's
encoded ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from experiments.data import TASKS, arguments, each_fold, load_fold, run_command
from structgp import StructuredGPClassifier, metrics
from structgp.inference import SecondOrder

VARIANTS: dict[str, Callable[[], StructuredGPClassifier]] = {
    "default": StructuredGPClassifier,
    "minibatch": lambda: StructuredGPClassifier(inference="minibatch"),
    "fixed kernel": lambda: StructuredGPClassifier(inference=SecondOrder(learning_rounds=0)),
    "inducing inputs": lambda: StructuredGPClassifier(posterior="inducing"),
}


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments("variants", __doc__, TASKS)
    others = [name for name in VARIANTS if name != "default"]
    parser.add_argument("--variant", nargs="+", choices=others, default=others)
    options = parser.parse_args(words)
    rows: list[dict[str, Any]] = []

    def compare(task: str, k: int) -> dict[str, Any]:
        fold = load_fold(task, options.data, k)
        row: dict[str, Any] = {"task": task, "fold": k}
        for name in ("default", *options.variant):
            began = time.perf_counter()
            model = VARIANTS[name]().fit(fold.X, fold.y)
            seconds = time.perf_counter() - began
            marginals = model.predict_marginals(fold.X_test)
            error = metrics.token_error(fold.y_test, model.predict(fold.X_test))
            row[name] = {
                "bound": round(model.training_log_["fresh_elbo"] / len(fold.X), 3),
                "token_error": round(100 * error, 2),
                "token_nll": round(metrics.token_nll(fold.y_test, marginals), 4),
                "seconds": round(seconds, 1),
            }
        rows.append(row)
        return row

    each_fold("variants", options, compare)
    for task in options.task:
        mine = [row for row in rows if row["task"] == task]
        for name in ("default", *options.variant):
            means = {
                figure: sum(row[name][figure] for row in mine) / len(mine)
                for figure in ("bound", "token_error", "token_nll")
            }
            shown = "  ".join(f"{figure} {value:.4g}" for figure, value in means.items())
            print(f"{task:<14}{name:<18}{shown}")


if __name__ == "__main__":
    run_command(main)
