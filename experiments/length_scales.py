"""Whether a fit recovers known length-scales from labels that a Gaussian process has generated.

    python -m experiments.length_scales [--length L ...] [--ard] [--seeds N ...] [--labels V]
        [--sequences N]

``experiments.dense.process`` draws one function per label from an RBF kernel on 10 inputs, and labels from
a chain with these scores. The fit has kernel='rbf', or with --ard 'rbf-ard', where only 3 inputs matter,
with length-scales 1, 1.5 and 2; every sequence counts once, so that nothing is cross-validated. 'learned /
true' is the ratio of the learned to the true length-scale, for the inputs that matter; 'irrelevant' is the
ratio of the shortest learned length-scale of the other inputs to the longest of those that matter. Aim:
within 20 %, and 5 or more. Rows go to results/length_scales.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.data import keep, run_command
from experiments.dense import process
from structgp import Prior, StructuredGPClassifier

N_INPUTS, RELEVANT, IRRELEVANT = 10, (1.0, 1.5, 2.0), 1000.0


def learned(
    seed: int, lengths: Sequence[float], n_labels: int = 3, n_sequences: int = 150
) -> dict[str, Any]:
    """One fit. lengths : one length-scale for all inputs, or one for each."""
    ard = len(lengths) > 1
    true = np.broadcast_to(np.array(lengths), (N_INPUTS,))
    task = process(seed, n_sequences, 1, n_inputs=N_INPUTS, lengthscale=true.tolist(), n_labels=n_labels)
    began = time.process_time()
    model = StructuredGPClassifier(kernel="rbf-ard" if ard else "rbf", prior=Prior(data_weight=1.0))
    model.fit(task.X, task.y)
    found = np.array(model.training_log_["length_scales"], dtype=float)
    matters = true < IRRELEVANT
    ratio = (np.broadcast_to(found, true.shape) / true)[matters] if ard else found.reshape(1) / true[:1]
    row = {"seed": seed, "lengths": list(lengths), "labels": n_labels, "sequences": n_sequences}
    row["ratios"] = ratio.round(3).tolist()
    row["cpu_seconds"] = round(time.process_time() - began, 1)
    if ard:
        row["irrelevant"] = round(float(found[~matters].min() / found[matters].max()), 1)
    return row


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.length_scales",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--length", nargs="*", type=float, default=[1.5, 3.0, 6.0])
    parser.add_argument(
        "--ard", action="store_true", help="3 inputs that matter, and 7 that do not, besides"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--labels", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=150, help="of 8 tokens each, to learn from")
    options = parser.parse_args(words)
    cases: list[tuple[float, ...]] = [(length,) for length in options.length]
    if options.ard:
        cases.append((*RELEVANT, *[IRRELEVANT] * (N_INPUTS - len(RELEVANT))))
    print(f"{'true':<14}{'seed':<6}{'CPU':>6}  learned / true")
    for case in cases:
        rows = [learned(seed, case, options.labels, options.sequences) for seed in options.seeds]
        for row in rows:
            keep("length_scales", row)
            _print_row(row)
        if len(case) == 1:
            typical = np.exp(statistics.mean(float(np.log(row["ratios"][0])) for row in rows))
            print(f"{_name(case):<14}{'all':<6}{'':>6}  {typical:.2f}", flush=True)


def _name(lengths: Sequence[float]) -> str:
    return ", ".join(f"{length:g}" for length in lengths if length < IRRELEVANT)


def _print_row(row: dict[str, Any]) -> None:
    ratios = "  ".join(f"{ratio:.2f}" for ratio in row["ratios"])
    others = f"  irrelevant {row['irrelevant']:.1f}" if "irrelevant" in row else ""
    told = f"{_name(row['lengths']):<14}{row['seed']:<6}{row['cpu_seconds']:>6.1f}"
    print(f"{told}  {ratios}{others}", flush=True)


if __name__ == "__main__":
    run_command(main)
