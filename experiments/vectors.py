"""Templates alone, compared with templates plus word vectors made from the same text without its labels.

    python -m experiments.vectors [--data DIR] [--task recipes chunking] [--fold K ...] [--against crf]

Vectors are made by counting how often words occur near each other in all sentences of the corpus, then
positive pointwise mutual information and a truncated singular value decomposition. This uses the sentences
of the test part too, but no labels. Folds are the paper's for chunking, and five random halves for recipes.
In a model with both, a token is a feature dict, {'0': 'eggs', ..., 'vector': array}: strings are templates,
the array is dense. 'seconds' are wall-clock seconds, 'CPU' processor seconds. Rows go to
results/vectors.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.linalg import svds

from experiments.data import keep, run_command
from experiments.dense import figures
from experiments.suites import Fold, columns_suite
from structgp import StructuredGPClassifier
from structgp.data import corpora
from structgp.data.sources import Template
from structgp.evaluation.crf import LinearCRF

TASKS = ("recipes", "chunking")
N_DIMS, WINDOW = 50, 2
FEATURES = ("templates", "with vectors")
FIGURES = ("error", "nll", "ece", "bias", "seconds", "cpu_seconds")
Rows = list[tuple[str, ...]]


def word_vectors(
    sentences: Sequence[Sequence[str]], n_dims: int = N_DIMS, window: int = WINDOW
) -> dict[str, np.ndarray]:
    """Vectors (n_dims,) of length 1 for all words, in lower case.

    The words up to ``window`` places before and after are counted, separately for each side. Counts become
    positive pointwise mutual information max(0, log(p(w, c) / (p(w) p(c)))), whose leading singular vectors
    are scaled by the roots of the singular values. A word that never has a neighbour gets zeros. There are
    fewer dimensions if there are fewer words."""
    counts: Counter[tuple[str, tuple[int, str]]] = Counter()
    for words in sentences:
        lower = [word.lower() for word in words]
        for t, word in enumerate(lower):
            for step in range(1, window + 1):
                if t >= step:
                    counts[word, (0, lower[t - step])] += 1
                    counts[lower[t - step], (1, word)] += 1
    names = sorted({word.lower() for words in sentences for word in words})
    row = {word: i for i, word in enumerate(names)}
    entries = [(row[w], row[c] + side * len(names), n) for (w, (side, c)), n in counts.items()]
    i, j, n = (np.array(column) for column in zip(*entries, strict=True))
    shape = (len(names), 2 * len(names))
    of_words, of_contexts = np.bincount(i, n, shape[0]), np.bincount(j, n, shape[1])
    information = np.maximum(0, np.log(n * n.sum() / (of_words[i] * of_contexts[j])))
    matrix = csr_array((information, (i, j)), shape=shape)
    left, values, _ = svds(matrix, k=min(n_dims, len(names) - 1), random_state=0)
    vectors = left * np.sqrt(values)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 1e-6)
    return dict(zip(names, vectors, strict=True))


def load(task: str, data: str | None) -> tuple[list[Rows], list[list[str]], Template, list[Fold]]:
    """Columns, labels, template and folds of a task."""
    if task == "chunking":
        raw = columns_suite(task, data)
        return raw.X, raw.y, raw.template, raw.folds
    corpus = corpora.recipes()
    X, y = corpus.X_train + corpus.X_test, corpus.y_train + corpus.y_test
    orders = [np.random.default_rng(k).permutation(len(X)) for k in range(5)]
    halves = [np.array_split(order, 2) for order in orders]
    return X, y, corpus.template, [(train, test) for train, test in halves]


def tokens(rows: Rows, template: Template, vectors: dict[str, np.ndarray] | None) -> list[Any]:
    """The features of a sentence: the strings of its templates, and the vectors of its words if given."""
    strings = template.expand(rows)
    if vectors is None:
        return strings
    both = zip(strings, rows, strict=True)
    return [{str(p): v for p, v in enumerate(of)} | {"vector": vectors[row[0].lower()]} for of, row in both]


def run(X: list[Any], y: list[list[str]], fold: Fold, method: str) -> dict[str, float]:
    """Scores of one fit to the training part of a fold, on the test part."""
    train, test = fold
    model: Any = LinearCRF() if method == "crf" else StructuredGPClassifier(features="columns")
    began, cpu = time.perf_counter(), time.process_time()
    model.fit([X[i] for i in train], [y[i] for i in train])
    seconds = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    return figures([y[i] for i in test], model.predict_marginals([X[i] for i in test])) | seconds


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.vectors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", help="folder of the paper's data (default: STRUCTGP_DATA)")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--fold", nargs="+", type=int, choices=range(5), default=list(range(5)))
    parser.add_argument("--against", choices=["crf"], help="a rival with the same features")
    options = parser.parse_args(words)
    heads = "".join(f"{name:>9}" for name in ("error %", "NLL", "ECE", "bias", "seconds", "CPU"))
    print(f"{'task':<12}{'method':<10}{'features':<15}{heads}")
    for task in options.task:
        columns, y, template, folds = load(task, options.data)
        vectors = word_vectors([[row[0] for row in rows] for rows in columns])
        for method in ("structgp", *([options.against] if options.against else [])):
            for features in FEATURES:
                used = None if features == "templates" else vectors
                X = [tokens(rows, template, used) for rows in columns]
                runs = [run(X, y, folds[k], method) for k in options.fold]
                row = {"task": task, "method": method, "features": features, "runs": runs}
                keep("vectors", row)
                _print_row(row)


def _print_row(row: dict[str, Any]) -> None:
    mean = {f: statistics.mean(found[f] for found in row["runs"]) for f in FIGURES}
    cells = f"{mean['error']:>9.2f}" + "".join(f"{mean[f]:>9.4f}" for f in FIGURES[1:4])
    cost = f"{mean['seconds']:>9.1f}{mean['cpu_seconds']:>9.1f}"
    print(f"{row['task']:<12}{row['method']:<10}{row['features']:<15}{cells}{cost}", flush=True)


if __name__ == "__main__":
    run_command(main)
