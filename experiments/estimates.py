"""Whether the held-out figures of a fit tell how well it will predict.

    python -m experiments.estimates --data DIR [--task TASK ...] [--splits N] [--size N]
                                    [--kernels] [--jobs N]

Each random split has a training set of ``size`` sequences, or two thirds of all if that is less; the others
are test data. 'estimate' is the negative log-likelihood per token that cross-validation within the training
set predicts (``held_out_``); 'truth' is that of the test data, over tokens whose label occurs in training,
as in the folds. With --kernels, five priors are compared: Kendall's tau says whether the estimates rank
them as the test data do; in brackets, the same for the loss in the folds of cross-validation, from which
the estimate is extrapolated to all data by a learning curve. Rows go to results/estimates.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from scipy.stats import kendalltau

from experiments.data import TASKS, keep, run_command
from experiments.suites import columns_suite
from structgp import Prior, StructuredGPClassifier, metrics

KERNELS: dict[str, dict[str, Any]] = {
    "relevance": {},
    "relevance, not learned": {"prior": Prior(learn_kernel=False)},
    "template": {"kernel": "template"},
    "template-product": {"kernel": "template-product"},
    "template-product, not learned": {"kernel": "template-product", "prior": Prior(learn_kernel=False)},
}


def compare(data: str | None, size: int, job: tuple[str, int, str]) -> dict[str, Any]:
    """Estimate and truth of one fit."""
    torch.set_num_threads(1)
    task, split, kernel = job
    raw = columns_suite(task, data)
    X, y = [raw.template.expand(x) for x in raw.X], raw.y
    order = np.random.default_rng(split).permutation([i for i, labels in enumerate(y) if labels])
    train = order[: min(size, 2 * len(order) // 3)]
    test = order[len(train) :]
    model = StructuredGPClassifier(**KERNELS[kernel]).fit([X[i] for i in train], [y[i] for i in train])
    assert model.held_out_ is not None
    truth = metrics.token_nll([y[i] for i in test], model.predict_marginals([X[i] for i in test]))
    row = {"task": task, "split": split, "kernel": kernel, "size": size}
    folds = model.held_out_["learning_curve"]["nll_of_folds"]
    return row | {"estimate": model.held_out_["token_nll"], "folds": folds, "truth": truth}


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """For each task, how far estimates are from the truth, and how they rank kernels."""
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        here = [row for row in rows if row["task"] == task]
        default = [(row["estimate"], row["truth"]) for row in here if row["kernel"] == "relevance"]
        means = np.mean(default, axis=0)
        line = f"{task:<13} {len(default):>3} splits  estimate {means[0]:.3f}  truth {means[1]:.3f}"
        line += f"  ({means[0] / means[1] - 1:+.1%})"
        kernels = list(dict.fromkeys(row["kernel"] for row in here))
        if len(kernels) > 1:
            splits = {row["split"] for row in here if row["kernel"] != "relevance"}
            table = [[r for r in here if r["kernel"] == k and r["split"] in splits] for k in kernels]
            told = {
                f: [np.mean([r[f] for r in rows]) for rows in table] for f in ("estimate", "folds", "truth")
            }
            tau, of_folds = (kendalltau(told[f], told["truth"]).statistic for f in ("estimate", "folds"))
            line += f"  tau {tau:.2f} ({of_folds:.2f}) over {len(splits)} splits"
        lines.append(line)
    return lines


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.estimates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", help="folder of the paper's data (default: STRUCTGP_DATA)")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--size", type=int, default=60)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(words)
    kernels = list(KERNELS) if options.kernels else ["relevance"]
    jobs = [(task, n, kernel) for kernel in kernels for n in range(options.splits) for task in options.task]
    rows = []
    with get_context("spawn").Pool(options.jobs) as pool:
        for row in pool.imap_unordered(partial(compare, options.data, options.size), jobs):
            rows.append(row)
            keep("estimates", row)
            print(*row.values(), flush=True)
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    run_command(main)
