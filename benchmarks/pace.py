"""Minibatches: the bound and the processor time after each pass, by tokens per batch and steps per visit.

    python -m benchmarks.pace                           # 75,000 tokens, 20 labels: some minutes
    python -m benchmarks.pace --sequences 200 --batch-tokens 500 --steps 4 8

Each fit makes ``PASSES`` passes over generated data, with the initial kernel.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence

import torch

from benchmarks.generate import Generated, generate
from structgp import StructuredGPClassifier
from structgp.errors import StructgpWarning
from structgp.inference import Minibatch, StepInfo

PASSES = 3


def passes(data: Generated, batch_tokens: int, steps: int) -> list[tuple[float, float]]:
    """Seconds and bound at the end of each pass, with the initial kernel."""
    found: list[tuple[float, float]] = []
    began = time.process_time()

    def mark(info: StepInfo) -> None:
        found.append((time.process_time() - began, info.elbo))

    # Nothing about the prior is learned, so that all bounds are those of one model.
    way = Minibatch(batch_tokens, steps=steps, max_passes=PASSES, tolerance=0.0, learning_rounds=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StructgpWarning)
        StructuredGPClassifier(inference=way).fit(data.X, data.y, callback=mark)
    n = len(found) // PASSES
    return found[n - 1 :: n]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--sequences", type=int, default=3_000)
    parser.add_argument("--values", type=int, default=5_000, help="of each of the ten templates")
    parser.add_argument("--batch-tokens", type=int, nargs="+", default=[500, 1_000, 2_000, 4_000])
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 8])
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    data = generate(
        given.sequences, n_labels=20, mean_length=25, n_templates=10, n_values=given.values, seed=0
    )
    print(f"{sum(map(len, data.y))} tokens; seconds and bound after each pass")
    for batch_tokens in given.batch_tokens:
        for steps in given.steps:
            told = "  ".join(f"{s:7.1f} {b:10.0f}" for s, b in passes(data, batch_tokens, steps))
            print(f"batch {batch_tokens:5d}, steps {steps:2d}: {told}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
