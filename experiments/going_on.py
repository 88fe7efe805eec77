"""Data in ten parts, learned one after the other: what is lost compared with a fit to all data.

    python -m experiments.going_on [--first N ...] [--part N] [--parts N] [--seeds N ...] [--way W ...]

The data are the embedded corpus; seeds differ in its order. A model is fitted to the first sequences, and
then the parts are added one by one, with

    partial_fit       as it is by default: the data are remembered
    from a file       partial_fit(remember=False), which is what a model from a file does
    warm_start        fit with warm_start=True on all data so far

Finally, 'refit' is a new fit to all data. Error and NLL on sequences that no fit has seen are printed: at
the start, the worst after any part, and at the end.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.data import keep, run_command
from structgp import StructuredGPClassifier
from structgp.data.corpora import recipes

TESTED = 265
"""Number of sequences of the corpus that are held out for testing."""


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.going_on",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--first", nargs="+", type=int, default=[10, 60], help="sequences at the start")
    parser.add_argument("--part", type=int, default=10, help="sequences of a part")
    parser.add_argument("--parts", type=int, default=10)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--way", nargs="+", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args(words)
    for first in options.first:
        for seed in options.seeds:
            row = compare(first, options.part, options.parts, seed, options.way)
            keep("going_on", row)
            print(f"from {first}, seed {seed}: start {shown(row['start'])}, refit {shown(row['refit'])}")
            for way in options.way:
                found = row[way]
                worst = max(found, key=lambda each: each[1])
                ratio = found[-1][1] / row["refit"][1]
                told = f"worst {shown(worst)}, end {shown(found[-1])}, {ratio:.3f} of the refit's NLL"
                print(f"  {way:<12} {told}", flush=True)


def shown(found: Sequence[float]) -> str:
    return f"{100 * found[0]:.1f} % {found[1]:.3f}"


def partial(model: StructuredGPClassifier, X: list[Any], y: list[Any], n: int, more: int) -> None:
    model.partial_fit(X[n : n + more], y[n : n + more])


def forgetful(model: StructuredGPClassifier, X: list[Any], y: list[Any], n: int, more: int) -> None:
    model.partial_fit(X[n : n + more], y[n : n + more], remember=False)


def warm(model: StructuredGPClassifier, X: list[Any], y: list[Any], n: int, more: int) -> None:
    model.set_params(warm_start=True).fit(X[: n + more], y[: n + more])


WAYS = {"partial_fit": partial, "from a file": forgetful, "warm_start": warm}


def compare(first: int, part: int, parts: int, seed: int, ways: Sequence[str]) -> dict[str, Any]:
    """Error and NLL at the start, after each part, and after a refit."""
    corpus = recipes()
    X = [corpus.template.expand(x) for x in (*corpus.X_train, *corpus.X_test)]
    y = [*corpus.y_train, *corpus.y_test]
    order = np.random.default_rng(seed).permutation(len(X)).tolist()
    X, y = [X[i] for i in order], [y[i] for i in order]
    test = X[-TESTED:], y[-TESTED:]

    def judged(model: StructuredGPClassifier) -> list[float]:
        report = model.evaluate(*test)
        assert report.token_nll is not None
        return [round(report.token_error, 4), round(report.token_nll, 4)]

    row: dict[str, Any] = {"first": first, "part": part, "parts": parts, "seed": seed}
    begun = StructuredGPClassifier().fit(X[:first], y[:first])
    row["start"] = judged(begun)
    for way in ways:
        model, row[way] = copy.deepcopy(begun), []
        for k in range(parts):
            WAYS[way](model, X, y, first + k * part, part)
            row[way].append(judged(model))
    n = first + parts * part
    row["refit"] = judged(StructuredGPClassifier().fit(X[:n], y[:n]))
    return row


if __name__ == "__main__":
    run_command(main)
