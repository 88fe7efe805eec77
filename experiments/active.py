"""Learning curves of active learning: how many sequences have to be labelled.

    python -m experiments.active --data DIR [--task TASK ...] [--strategy S ...] [--seeds N ...] [--jobs N]

Tasks are the embedded corpus ('recipes') and the paper's, from raw columns. 60 % of each task's sequences
are the pool, the rest are test data. A run starts from ten random sequences, fits, lets the strategy choose
ten more, and so on up to 100; seeds differ in the split and the start. The result is the number of labelled
sequences at which the mean error is as low as that of random choice at 100.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from experiments.data import TASKS, keep, run_command
from experiments.suites import columns_suite
from structgp import StructuredGPClassifier, select
from structgp.data.corpora import recipes

FIRST, STEP, LAST = 10, 10, 100


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.active",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", help="folder of the paper's data (default: STRUCTGP_DATA)")
    tasks = ("recipes", *TASKS)
    parser.add_argument("--task", nargs="+", choices=tasks, default=["recipes", "basenp"])
    strategies = ["random", "bald", "batch"]
    parser.add_argument("--strategy", nargs="+", default=strategies, help="'random' is always run")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options = parser.parse_args(words)
    strategies = list(dict.fromkeys(["random", *options.strategy]))
    for task in options.task:
        runs = [(task, options.data, s, seed) for s in strategies for seed in options.seeds]
        if options.jobs == 1:
            found = [curve(*run) for run in runs]
        else:
            with ProcessPoolExecutor(options.jobs) as pool:
                found = list(pool.map(curve, *zip(*runs, strict=True)))
        curves = np.array(found).reshape(len(strategies), len(options.seeds), -1)
        report(task, strategies, curves)
        for strategy, rows in zip(strategies, curves, strict=True):
            errors = np.round(100 * rows, 2).tolist()
            keep("active", {"task": task, "strategy": strategy, "seeds": options.seeds, "error": errors})


def load(task: str, data: str | None, seed: int) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Pool and test data, X and y of each."""
    if task == "recipes":
        corpus = recipes()
        X = [corpus.template.expand(x) for x in (*corpus.X_train, *corpus.X_test)]
        y = [*corpus.y_train, *corpus.y_test]
    else:
        raw = columns_suite(task, data)
        X, y = [raw.template.expand(x) for x in raw.X], list(raw.y)
    order = np.random.default_rng([seed, 0]).permutation(len(X))
    cut = int(0.6 * len(X))
    pool, test = order[:cut], order[cut:]
    return [X[i] for i in pool], [y[i] for i in pool], [X[i] for i in test], [y[i] for i in test]


def curve(task: str, data: str | None, strategy: str, seed: int) -> list[float]:
    """Token error at 10, 20, ... 100 labelled sequences."""
    X, y, X_test, y_test = load(task, data, seed)
    chosen = np.random.default_rng([seed, 1]).permutation(len(X))[:FIRST].tolist()
    errors = []
    while True:
        model = StructuredGPClassifier().fit([X[i] for i in chosen], [y[i] for i in chosen])
        errors.append(1 - model.score(X_test, y_test))
        if len(chosen) >= LAST:
            return errors
        left = [i for i in range(len(X)) if i not in set(chosen)]
        picked = select(model, [X[i] for i in left], STEP, strategy, random_state=1000 * seed + len(chosen))
        chosen += [left[i] for i in picked]


def report(task: str, strategies: Sequence[str], curves: np.ndarray) -> None:
    """Prints the mean learning curves. curves : (strategies, seeds, steps)."""
    counts = range(FIRST, LAST + 1, STEP)
    print(f"{task}: mean token error in % at")
    print(f"{'':<18}" + "".join(f"{n:>7}" for n in counts) + "   as random at 100")
    goal = curves[0, :, -1].mean()
    for strategy, rows in zip(strategies, curves, strict=True):
        mean = rows.mean(0)
        there = next((n for n, e in zip(counts, mean, strict=True) if e <= goal), None)
        shown = "".join(f"{100 * e:>7.2f}" for e in mean)
        print(f"{strategy:<18}{shown}   {there or 'never'}", flush=True)


if __name__ == "__main__":
    run_command(main)
