"""A mixture of two components against one: the bound that K = 2 reaches from two perturbed copies.

    python -m experiments.mixture --data DIR [--task TASK ...] [--fold K ...]

Bounds are computed on the same 512 fresh draws, in nats per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.data import (
    PLAIN,
    arguments,
    bound_per_sequence,
    each_fold,
    load_fold,
    problem_of,
    run_command,
)
from structgp import Mixture, StructuredGPClassifier
from structgp.structures import Chain


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments("mixture", __doc__, ["segmentation", "basenp"])
    parser.add_argument("--inducing", type=int, default=300)
    options = parser.parse_args(words)
    each_fold("mixture", options, lambda task, k: compare(task, k, options.data, options.inducing))


def compare(task: str, k: int, data: str | None, n_inducing: int) -> dict[str, Any]:
    fold = load_fold(task, data, k)
    row: dict[str, Any] = {"task": task, "fold": k, "inducing": n_inducing}
    for K in (1, 2):
        posterior = Mixture(K, n_inducing=n_inducing, basis="label")
        model = StructuredGPClassifier(**(PLAIN | {"posterior": posterior}))
        model.fit(fold.X, fold.y)
        row[f"K = {K}"] = round(bound_per_sequence(problem_of(model, Chain(), fold.X, fold.y)), 3)
        row[f"seconds, K = {K}"] = round(model.training_log_["seconds"], 1)
        if K == 2:
            m = model.model_.posterior.node.m
            row["weights"] = [round(w, 3) for w in model.model_.posterior.mixing.tolist()]
            row["distance of the means"] = round(float((m[0] - m[1]).norm()), 3)
    row["gain"] = round(row["K = 2"] - row["K = 1"], 3)
    return row


if __name__ == "__main__":
    run_command(main)
