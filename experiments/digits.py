"""Handwritten digit strings: an RBF kernel on pixels against a linear CRF on the same pixels.

    python -m experiments.digits [--chain NAME ...] [--seeds N ...]

Strings of 5 to 12 digits are drawn from one of two Markov chains, 200 for training and 1,000 for testing;
each digit is shown by one of scikit-learn's bundled 8x8 images. Half of the images are for training strings
and half for test strings; within a half, an image may occur more than once, so that the 1,000 test strings
show the same 900 images some 9 times. The fit is the default one; 'mean' is its NLL under the posterior
mean. The CRF's regulariser is cross-validated. Aim: at most half the CRF's error.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from experiments.data import Fold, keep, run_command
from structgp import StructuredGPClassifier, metrics
from structgp.evaluation.crf import LinearCRF

N_STRINGS, N_TEST_STRINGS = 200, 1_000
SHORTEST, LONGEST = 5, 12
SUCCESSOR = 0.5
CHAINS = {
    "any": {step: SUCCESSOR if step == 1 else (1 - SUCCESSOR) / 9 for step in range(10)},
    "five": dict.fromkeys(range(1, 6), 0.2),
}
"""Probability that digit d is followed by (d + step) mod 10, by step: half of the time the next digit, else
any other; or one of the next five."""
FIGURES = ("token_error", "token_nll", "ece", "seconds")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.digits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--chain", nargs="+", choices=CHAINS, default=list(CHAINS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args(words)
    head = f"{'error %':>9}{'NLL':>8}{'ECE':>8}{'seconds':>9}{'ratio':>8}{'mean':>8}"
    for chain in options.chain:
        print(f"{chain:<6}{'method':<12}{head}")
        report(chain, options.seeds)


def report(chain: str, seeds: Sequence[int]) -> None:
    rows = []
    for seed in seeds:
        rows.append(compare(seed, chain))
        _print_row(str(seed), rows[-1])
        keep("digits", rows[-1])
    mean: dict[str, Any] = {
        name: {f: statistics.mean(row[name][f] for row in rows) for f in FIGURES}
        for name in ("structgp", "linear CRF")
    }
    mean["ratio"] = mean["structgp"]["token_error"] / mean["linear CRF"]["token_error"]
    mean["nll_of_mean"] = statistics.mean(row["nll_of_mean"] for row in rows)
    _print_row("mean", mean)


def compare(seed: int, chain: str = "any") -> dict[str, Any]:
    """Both methods on the strings of one seed; 'ratio' is the ratio of their errors."""
    data = digit_strings(seed, chain)
    row: dict[str, Any] = {"seed": seed, "chain": chain, "test_tokens": sum(map(len, data.y_test))}
    for name, method in (("structgp", StructuredGPClassifier()), ("linear CRF", LinearCRF())):
        began = time.perf_counter()
        method.fit(data.X, data.y)
        seconds = time.perf_counter() - began
        marginals = method.predict_marginals(data.X_test)
        row[name] = {
            "token_error": 100 * metrics.token_error(data.y_test, method.predict(data.X_test)),
            "token_nll": metrics.token_nll(data.y_test, marginals),
            "ece": metrics.calibration(data.y_test, marginals).ece,
            "seconds": round(seconds, 1),
        }
        if name == "structgp":
            plugged_in = method.set_params(n_draws=0).predict_marginals(data.X_test)
            row["nll_of_mean"] = metrics.token_nll(data.y_test, plugged_in)
    row["ratio"] = row["structgp"]["token_error"] / row["linear CRF"]["token_error"]
    return row


def digit_strings(seed: int, chain: str = "any") -> Fold:
    """Strings as (T, 64) arrays of pixels from 0 to 1, and digits as labels."""
    rng = np.random.default_rng(seed)
    pixels, digits = load_digits(return_X_y=True)
    order = rng.permutation(len(digits))
    parts: list[list[Any]] = []
    halves = np.array_split(order, 2)
    for images, n_strings in zip(halves, (N_STRINGS, N_TEST_STRINGS), strict=True):
        X, y = [], []
        for _ in range(n_strings):
            string = _draw_string(rng, CHAINS[chain])
            shown = [rng.choice(images[digits[images] == digit]) for digit in string]
            X.append(pixels[shown] / 16)
            y.append([str(digit) for digit in string])
        parts += [X, y]
    return Fold(*parts)


def _draw_string(rng: np.random.Generator, chain: dict[int, float]) -> list[int]:
    string = [int(rng.integers(10))]
    steps, chances = list(chain), list(chain.values())
    for _ in range(int(rng.integers(SHORTEST, LONGEST + 1)) - 1):
        string.append((string[-1] + int(rng.choice(steps, p=chances))) % 10)
    return string


def _print_row(label: str, row: dict[str, Any]) -> None:
    for name in ("structgp", "linear CRF"):
        error, nll, ece, seconds = (row[name][figure] for figure in FIGURES)
        ratio = f"{row['ratio']:>8.2f}{row['nll_of_mean']:>8.3f}" if name == "structgp" else ""
        print(f"{label:<6}{name:<12}{error:>9.2f}{nll:>8.3f}{ece:>8.3f}{seconds:>9.1f}{ratio}", flush=True)


if __name__ == "__main__":
    run_command(main)
