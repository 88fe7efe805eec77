"""Learning curves from 10 sequences on, against a CRF, and the effect of counting data more than once.

    python -m experiments.few --data DIR [--task TASK ...] [--size N ...] [--seeds N ...]
                              [--method NAME ...]

Each row has one random training set, scored on up to 300 of the other sequences whose labels occur in it.
'once' counts every training sequence once, as in Bayes' rule; 'default' as often as cross-validation within
the training set chooses. The CRF is python-crfsuite's, with its regulariser cross-validated. Rows go to
results/few.jsonl.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.data import keep, run_command
from experiments.suites import columns_suite
from experiments.titles import product_titles
from structgp import Prior, StructuredGPClassifier, metrics
from structgp.data import corpora
from structgp.evaluation.crf import LinearCRF

TASKS = ("titles", "recipes", "basenp", "chunking", "japanesene", "segmentation")
SIZES = (10, 20, 40, 80, 150)
MOST_TEST = 300


def once() -> StructuredGPClassifier:
    """The default classifier, except that every sequence counts once."""
    return StructuredGPClassifier(prior=Prior(data_weight=1.0))


METHODS = {"once": once, "default": StructuredGPClassifier, "linear CRF": LinearCRF}


def load(task: str, data: str | None) -> tuple[list[Any], list[list[str]]]:
    """All labelled sequences of a task."""
    if task == "titles":
        return product_titles(1200, 1)
    if task == "recipes":
        corpus = corpora.recipes()
        X = [corpus.template.expand(x) for x in corpus.X_train + corpus.X_test]
        return X, corpus.y_train + corpus.y_test
    raw = columns_suite(task, data)
    return [raw.template.expand(x) for x in raw.X], raw.y


def compare(
    X: list[Any], y: list[list[str]], size: int, seed: int, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Scores of the methods with these names, by default all, with one training set."""
    order = np.random.default_rng([seed, size]).permutation([i for i, labels in enumerate(y) if labels])
    train, rest = order[:size], order[size:]
    known = {label for i in train for label in y[i]}
    test = [i for i in rest if set(y[i]) <= known][:MOST_TEST]
    row: dict[str, Any] = {"size": size, "seed": seed}
    for name in names or METHODS:
        began = time.process_time()
        model = METHODS[name]().fit([X[i] for i in train], [y[i] for i in train])
        seconds = time.process_time() - began
        row[name] = figures(model, [X[i] for i in test], [y[i] for i in test]) | {"seconds": seconds}
    return row


def figures(model: Any, X: list[Any], y: list[list[str]]) -> dict[str, float]:
    """Per token: NLL, error of the most probable labels, calibration error, mean confidence minus
    accuracy."""
    marginals = model.predict_marginals(X)
    best = [max(p.items(), key=lambda item: item[1]) for tokens in marginals for p in tokens]
    truth = [label for labels in y for label in labels]
    right = np.mean([label == found for label, (found, _) in zip(truth, best, strict=True)])
    return {
        "nll": metrics.token_nll(y, marginals),
        "error": 100 * float(1 - right),
        "ece": metrics.calibration(y, marginals).ece,
        "gap": float(np.mean([p for _, p in best]) - right),
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.few",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", help="folder of the paper's data (default: STRUCTGP_DATA)")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--size", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args(words)
    for task in options.task:
        X, y = load(task, options.data)
        for size in options.size:
            if size >= sum(map(bool, y)):
                print(f"{task:<13}{size:>4}     too few sequences", flush=True)
                continue
            for seed in options.seeds:
                row = {"task": task} | compare(X, y, size, seed, options.method)
                keep("few", row)
                told = "  ".join(
                    f"{name} {row[name]['nll']:.3f} {row[name]['gap']:+.3f} {row[name]['error']:.1f}"
                    for name in options.method
                )
                print(f"{task:<13}{size:>4}{seed:>3}  {told}", flush=True)


if __name__ == "__main__":
    run_command(main)
