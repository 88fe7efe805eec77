"""A fifth of the training labels wrong: a likelihood that knows it, against two models that do not.

    python -m experiments.noisy --data DIR [--seeds N ...] [--jobs N]

The segmentation task, fold 0, the paper's encoded features. Each training label is replaced with
probability 0.2 by another at random; errors are against the clean labels of the test half. The annotator
likelihood of ``examples/noisy_annotators.py`` is a NumPy function without a gradient; the rivals are the
chain, under the same prior and fitted the same way, and the cross-validated linear CRF.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from examples.noisy_annotators import FLIPPED, flip, methods

from experiments.data import Fold, keep, load_fold
from structgp import StructgpError, metrics

TASK = "segmentation"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.noisy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", help="folder of the paper's data (default: STRUCTGP_DATA)")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the likelihood")
    parser.add_argument("--device", default="cpu", help="where latent values are drawn")
    options = parser.parse_args(words)
    fold = load_fold(TASK, options.data, 0)
    won = 0
    for seed in options.seeds:
        row = compare(fold, seed, options.jobs, options.device)
        errors = row["token_error"]
        won += errors["annotator"] < min(errors[name] for name in errors if name != "annotator")
        shown = "".join(f"  {name} {errors[name]:.2f} %" for name in errors)
        print(f"seed {seed}:{shown}  ({row['seconds']['annotator']:.0f} s)", flush=True)
        keep("noisy", row)
    verdict = "below all in every seed" if won == len(options.seeds) else "NOT below all in all"
    print(f"annotator: {verdict} ({won} of {len(options.seeds)})")


def compare(fold: Fold, seed: int, n_jobs: int = 1, device: str = "cpu") -> dict[str, Any]:
    """Token error against clean labels, in %, of models that were shown flipped ones."""
    seen = flip(fold.y, FLIPPED, seed)
    n_labels = len({label for labels in seen for label in labels})
    row: dict[str, Any] = {"task": TASK, "fold": 0, "flipped": FLIPPED, "seed": seed}
    row |= {"token_error": {}, "seconds": {}}
    for name, method in methods(n_labels, n_jobs=n_jobs).items():
        began = time.perf_counter()
        model = method()
        if name == "annotator":
            model.set_params(device=device)
        model.fit(fold.X, seen)
        row["seconds"][name] = round(time.perf_counter() - began, 1)
        error = metrics.token_error(fold.y_test, model.predict(fold.X_test))
        row["token_error"][name] = round(100 * error, 2)
        if name == "annotator":
            row |= {k: model.training_log_[k] for k in ("optimizer", "gradient", "evaluations")}
    return row


if __name__ == "__main__":
    try:
        main()
    except StructgpError as error:
        sys.exit(f"experiments: {error}")
