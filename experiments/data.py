"""Functions for all experiments: a fold of a task, a problem from a fitted model, a row of a table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.suites import columns_suite, encoded_suite
from structgp import Inducing, SecondOrder, StructgpError, StructuredGPClassifier
from structgp.inference import Problem
from structgp.inference.estimators import Estimator, Pathwise
from structgp.inference.loop import make_batches
from structgp.structures import Structure

TASKS = ("basenp", "chunking", "segmentation", "japanesene")
RESULTS = Path(__file__).parent / "results"

PLAIN: dict[str, Any] = {
    "kernel": "linear",
    "posterior": Inducing(basis="label"),
    "inference": SecondOrder(learn_scales="transitions"),
}
"""A model that every optimiser can fit, so that their bounds can be compared: one fixed kernel, and one
function per label, as in the paper."""


@dataclass(frozen=True)
class Fold:
    """X, y for training, and X_test, y_test for scoring."""

    X: list[Any]
    y: list[list[str]]
    X_test: list[Any]
    y_test: list[list[str]]


def load_fold(task: str, data: str | None, fold: int, *, columns: bool = False) -> Fold:
    """One of the paper's folds, with the paper's encoded features or with those of raw columns and
    template."""
    X: list[Any]
    if columns:
        raw = columns_suite(task, data)
        X, y, folds = [raw.template.expand(x) for x in raw.X], raw.y, raw.folds
    else:
        encoded = encoded_suite(task, data)
        X, y, folds = list(encoded.X), encoded.y, encoded.folds
    train, test = folds[fold]
    pick = [[items[i] for i in part] for part in (train, test) for items in (X, y)]
    return Fold(*pick)


def problem_of(
    model: StructuredGPClassifier,
    structure: Structure,
    X: Sequence[Any],
    y: Sequence[Sequence[str]],
    estimator: Estimator | None = None,
    *,
    batch_tokens: int = 1000,
    device: str = "cpu",
) -> Problem:
    """The problem of a fitted posterior and data. The posterior is moved to ``device``."""
    fitted = model.model_
    rows, labels = fitted.encoder.transform(X), fitted.labels.transform(y)
    batches = make_batches(rows, labels, fitted.encoder.pad_row, batch_tokens)
    batches = [fitted.split(batch).to(device) for batch in batches]
    return Problem(fitted.posterior.to(device), structure, batches, estimator or Pathwise())


def bound_per_sequence(problem: Problem, n_draws: int = 512, seed: int = 77) -> float:
    """The evidence bound on fresh draws, the same for equal seeds, in nats per sequence."""
    generator = torch.Generator().manual_seed(seed)
    return problem.fresh_bound(n_draws, generator) / problem.n_sequences


def arguments(prog: str, doc: str | None, tasks: Sequence[str]) -> argparse.ArgumentParser:
    """A parser with --data, --task and --fold, which most experiments share."""
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.{prog}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", help="folder of the paper's data (default: STRUCTGP_DATA)")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(tasks))
    parser.add_argument("--fold", nargs="+", type=int, choices=range(5), default=[0])
    return parser


def each_fold(
    name: str, options: argparse.Namespace, compare: Callable[[str, int], dict[str, Any]]
) -> None:
    """Calls ``compare`` for every task and fold that was asked for, and prints and keeps its rows."""
    for task in options.task:
        for k in options.fold:
            row = compare(task, k)
            print(row, flush=True)
            keep(name, row)


def keep(name: str, row: dict[str, Any]) -> None:
    """Adds a row to results/NAME.jsonl."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def run_command(main: Callable[[], None]) -> None:
    """Runs a command; an error in the input ends it with one line."""
    try:
        main()
    except StructgpError as error:
        sys.exit(f"experiments: {error}")
