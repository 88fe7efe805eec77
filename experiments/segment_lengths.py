"""Whether scores of segment lengths help if lengths matter, and do no harm if they do not.

    python -m experiments.segment_lengths [--task durations recipes] [--seeds N ...]

'durations' are generated: runs of three labels whose length is 2, 5 or 8, give or take one, observed with
noise. 'recipes' are the spans of the embedded corpus. The fits are the default ones of ``chain()`` and
``segments()``; NLL is in nats per token and per sequence, and seconds are processor seconds.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from experiments.data import run_command
from structgp import StructuredGPClassifier, chain, segments
from structgp.data.corpora import recipes

LENGTHS = {"A": 2, "B": 5, "C": 8}
Data = tuple[list[Any], list[Any], list[Any], list[Any]]


def durations(seed: int, n: int = 150) -> Data:
    """n training sequences and as many test sequences."""
    rng = np.random.default_rng(seed)
    X, y = [], []
    for _ in range(2 * n):
        labels: list[str] = []
        label = "ABC"[rng.integers(3)]
        while len(labels) < 20:
            labels += [label] * int(LENGTHS[label] + rng.integers(-1, 2))
            label = str(rng.choice([other for other in "ABC" if other != label]))
        labels = labels[: int(rng.integers(12, 20))]
        seen = [v if rng.random() < 0.5 else "ABC"[rng.integers(3)] for v in labels]
        X.append([{"seen": s} for s in seen])
        y.append(labels)
    return X[:n], y[:n], X[n:], y[n:]


def spans(seed: int) -> Data:
    found = recipes()
    return found.X_train, found.y_train, found.X_test, found.y_test


TASKS = {"durations": (durations, 9), "recipes": (spans, 8)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.segment_lengths",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    options = parser.parse_args()
    print(
        f"{'task':<10} {'seed':>4} {'structure':<14} {'token NLL':>9} {'seq. NLL':>9} {'error':>6} "
        f"{'F1':>6} {'CPU s':>6}"
    )
    for task in options.task:
        make, longest = TASKS[task]
        for seed in options.seeds:
            X, y, X_test, y_test = make(seed)
            for structure in (chain(), segments(longest)):
                began = time.process_time()
                model = StructuredGPClassifier(structure=structure, random_state=seed).fit(X, y)
                seconds, found = time.process_time() - began, model.evaluate(X_test, y_test)
                figures = f"{found.token_nll:>9.4f} {found.sequence_nll:>9.3f} {found.token_error:>6.1%}"
                f1 = "-" if found.span_f1 is None else f"{found.span_f1:.1%}"
                print(
                    f"{task:<10} {seed:>4} {structure!r:<14} {figures} {f1:>6} {seconds:>6.1f}", flush=True
                )


if __name__ == "__main__":
    run_command(main)
