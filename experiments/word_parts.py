"""Parts of words as features, by random splits within training halves.

    python -m experiments.word_parts --data DIR [--task TASK ...] [--set NAME ...] [--splits N] [--size N]

DIR has the folder ``columns``. Training halves are those of ``experiments.default_features``; test halves
are never read. Each split trains with as many sequences as the paper's folds have, or with ``--size``, and
tests on the rest of the half. 'template' is the task's own template, 'words' consists of its lines that
read only the word. The figures with ``word_parts=None`` are printed, and how much they change with 'auto',
with the standard error of the change over splits."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.default_features import of_words, training_half
from experiments.splits import SIZES
from structgp import StructuredGPClassifier

TASKS = ("basenp", "chunking", "japanesene", "recipes", "segmentation")
SETS = ("template", "words")
FIGURES = ("span_f1", "token_error", "token_nll")


def figures(X: Sequence[Any], y: Sequence[Any], train: Any, test: Any, parts: str | None) -> list[float]:
    """Span F1, token error and token NLL of one default fit."""
    model = StructuredGPClassifier(word_parts=parts, features="columns")
    model.fit([X[i] for i in train], [y[i] for i in train])
    report = model.evaluate([X[i] for i in test], [y[i] for i in test])
    return [getattr(report, name) or float("nan") for name in FIGURES]


def compare(task: str, name: str, data: Path, n_splits: int, size: int | None) -> str:
    """A line of the table."""
    template, rows, y = training_half(task, data)
    template = of_words(template, task) if name == "words" else template
    X = [template.expand(own) for own in rows]
    there = [i for i, labels in enumerate(y) if labels]
    found: dict[str | None, list[list[float]]] = {None: [], "auto": []}
    for k in range(n_splits):
        order = np.random.default_rng([29, k]).permutation(there).tolist()
        n = size or SIZES[task]
        for parts, kept in found.items():
            kept.append(figures(X, y, order[:n], order[n:], parts))
    whole, change = np.array(found[None]), np.array(found["auto"]) - np.array(found[None])
    errors = change.std(0, ddof=1) / n_splits**0.5 if n_splits > 1 else change[0] * np.nan
    cells = zip(whole.mean(0), change.mean(0), errors, (100, 100, 1), (2, 2, 4), strict=True)
    told = [f"{v * u:.{d}f} {c * u:+.{d}f} ({e * u:.{d}f})" for v, c, e, u, d in cells]
    return f"{task:<14}{name:<12}" + "".join(f"{cell:>26}" for cell in told)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--task", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--set", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--size", type=int, help="training sequences (default: as the paper's folds)")
    given = parser.parse_args(words)
    heads = ("span F1, %", "token error, %", "token NLL")
    print(f"{'task':<14}{'features':<12}" + "".join(f"{head:>26}" for head in heads), flush=True)
    for task in given.task:
        for name in given.set:
            if task not in ("recipes", "segmentation") or name == "template":  # they have nothing but words
                print(compare(task, name, given.data, given.splits, given.size), flush=True)


if __name__ == "__main__":
    main()
