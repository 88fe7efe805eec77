"""The chain as an opaque NumPy function: how close a fit from its values comes to one that knows the chain.

    python -m experiments.opaque --data DIR [--task TASK ...] [--fold K ...] [--jobs N]

Bounds are computed on the same 512 fresh draws, in nats per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.data import (
    PLAIN,
    arguments,
    bound_per_sequence,
    each_fold,
    load_fold,
    problem_of,
    run_command,
)
from structgp import Custom, Natural, StructuredGPClassifier, metrics
from structgp.structures import Chain


def opaque_chain(f: np.ndarray, g: np.ndarray, y: np.ndarray) -> np.ndarray:
    """log p of the linear chain, as a user might write it who does not know the library's."""
    message, score, step = f[:, 0], f[:, 0, y[0]], np.exp(g)
    for t in range(1, len(y)):
        top = message.max(1, keepdims=True)
        moved = np.einsum("si,sij->sj", np.exp(message - top), step)
        message = np.log(moved) + top + f[:, t]
        score = score + f[:, t, y[t]] + g[:, y[t - 1], y[t]]
    top = message.max(1)
    return score - top - np.log(np.exp(message - top[:, None]).sum(1))


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments("opaque", __doc__, ["segmentation"])
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(words)
    each_fold("opaque", options, lambda task, k: compare(task, k, options.data, options.jobs))


def compare(task: str, k: int, data: str | None, n_jobs: int) -> dict[str, Any]:
    fold = load_fold(task, data, k)
    row: dict[str, Any] = {"task": task, "fold": k}
    for name, choice in {
        "second-order": {},
        "pathwise": {"inference": Natural()},
        "values only": {
            "structure": Custom(opaque_chain, predict_with="chain", n_jobs=n_jobs),
            "inference": Natural(),
        },
    }.items():
        model = StructuredGPClassifier(**(PLAIN | choice)).fit(fold.X, fold.y)
        log = model.training_log_
        row[name] = {
            "bound": round(bound_per_sequence(problem_of(model, Chain(), fold.X, fold.y)), 3),
            "token_error": round(100 * metrics.token_error(fold.y_test, model.predict(fold.X_test)), 2),
            "gradient": log["gradient"],
            "evaluations": log["evaluations"],
            "seconds": round(log["seconds"], 1),
        }
    row["gap in nats a sequence"] = round(row["pathwise"]["bound"] - row["values only"]["bound"], 3)
    return row


if __name__ == "__main__":
    run_command(main)
