"""Whether a fit on the GPU reaches the bound of the CPU, and whether 'converged' is true.

    python -m experiments.precision [--device cuda] [--kernel K ...] [--ratio R ...] [--amplitude A ...]
                                    [--inducing M ...] [--sequences N]

The data are generated sequences of dense features with two clusters per label, so that a linear kernel
alone cannot tell the labels apart. Kernels are fixed: RBF, Matern, linear and their sum, with length-scales
that are multiples (ratio) of the median distance between tokens, and amplitudes as given. Each is fitted
once on the CPU, and on the device with three values of ``random_state``. Every sequence counts once: a data
weight from cross-validation would differ between random states, and so would the bounds that are maximised.
Bounds are those of the fitted posterior on the same 256 fresh draws, in nats per sequence, computed on the
CPU in double precision, which reveals a device that fits something else than it reports.

A row fails if CPU and device differ by more than .1 nat, or if any fit says 'converged' more than .1 nat
below the best of all fits. Rows go to results/precision.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel

from experiments.data import bound_per_sequence, keep, problem_of, run_command
from structgp import Inducing, Prior, StructgpWarning, StructuredGPClassifier

KERNELS = ("rbf", "matern", "linear", "sum")
RATIOS = (0.5, 2.0, 8.0, 30.0)
AMPLITUDES = (1.0, 20.0, 400.0)
INDUCING = (200, 1000)
RESTARTS = 3
MOST = 0.1
"""Largest difference between two bounds that is accepted, in nats per sequence."""

Data = tuple[list[np.ndarray], list[list[str]]]


def dense_sequences(n: int, seed: int = 0, n_labels: int = 8, width: int = 20) -> Data:
    """n sequences of 5 to 12 tokens. The features of label v are centre v or its mirror image, plus noise;
    the next label is v + 1 half of the time, and otherwise drawn at random."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(n_labels, width))
    X, y = [], []
    for _ in range(n):
        T = int(rng.integers(5, 13))
        steps = np.where(rng.random(T) < 0.5, 1, rng.integers(n_labels, size=T))
        labels = np.cumsum(steps) % n_labels
        side = rng.choice([-1.0, 1.0], size=(T, 1))
        X.append(side * centres[labels] + rng.normal(size=(T, width)))
        y.append([f"L{v}" for v in labels])
    return X, y


def kernel_of(name: str, length: float, amplitude: float) -> Kernel:
    """The kernel with this name, length-scale and amplitude. In the sum, each part has a third of the
    amplitude."""
    if name == "sum":
        first, second, third = (kernel_of(part, length, amplitude / 3) for part in KERNELS[:3])
        return first + second + third
    kernel: Kernel = {"rbf": RBFKernel, "matern": MaternKernel, "linear": LinearKernel}[name]()
    if name == "linear":
        kernel.variance = length**-2
    else:
        kernel.lengthscale = length
    scaled = ScaleKernel(kernel)
    scaled.outputscale = amplitude
    return scaled


def fitted(data: Data, kernel: Kernel, n_inducing: int, device: str, seed: int) -> dict[str, Any]:
    """The bound of a fit, and entries of its log."""
    model = StructuredGPClassifier(
        kernel=kernel,
        prior=Prior(learn_kernel=False, data_weight=1.0),
        posterior=Inducing(n_inducing=n_inducing),
        device=device,
        random_state=seed,
    )
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StructgpWarning)
        model.fit(*data)
    seconds, log = time.perf_counter() - began, model.training_log_
    bound = bound_per_sequence(problem_of(model, model.model_.structure, *data), n_draws=256)
    told = {"stopped": log["stopped"], "rounds": len(log["steps"]), "n_inducing": log["n_inducing"]}
    return {"bound": bound, **told, "precision": log["plan"]["precision"], "seconds": round(seconds, 2)}


def compare(
    data: Data, name: str, ratio: float, amplitude: float, n_inducing: int, device: str
) -> dict[str, Any]:
    """One row: the fit on the CPU, several fits on the device, and whether they fail."""
    tokens = torch.from_numpy(np.concatenate(data[0])[:500])
    length = ratio * float(torch.pdist(tokens).median())

    def fit(where: str, seed: int) -> dict[str, Any]:
        return fitted(data, kernel_of(name, length, amplitude), n_inducing, where, seed)

    cpu, there = fit("cpu", 0), [fit(device, seed) for seed in range(RESTARTS)]
    bounds = [cpu["bound"], *(f["bound"] for f in there)]
    apart = abs(bounds[0] - bounds[1])
    claims = [max(bounds) - f["bound"] for f in (cpu, *there) if f["stopped"] == "converged"]
    row = {"kernel": name, "ratio": ratio, "amplitude": amplitude, "inducing": n_inducing}
    found = {"apart": apart, "below": max(claims, default=0.0), "device": device, "cpu": cpu, "fits": there}
    return row | found | {"fails": apart > MOST or max(claims, default=0.0) > MOST}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.precision",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--ratio", nargs="+", type=float, default=list(RATIOS))
    parser.add_argument("--amplitude", nargs="+", type=float, default=list(AMPLITUDES))
    parser.add_argument("--inducing", nargs="+", type=int, default=list(INDUCING))
    parser.add_argument("--sequences", type=int, default=150)
    options = parser.parse_args(words)
    data = dense_sequences(options.sequences)
    print(
        f"{'kernel':<8}{'ratio':>6}{'ampl.':>7}{'M':>6}{'CPU':>10}{options.device + ', 3 starts':>30}",
        end="",
    )
    print(f"{'stopped':>9}{'seconds':>14}", flush=True)
    grid = itertools.product(options.inducing, options.kernel, options.ratio, options.amplitude)
    for n_inducing, name, ratio, amplitude in grid:
        row = compare(data, name, ratio, amplitude, n_inducing, options.device)
        keep("precision", row)
        cpu, fits = row["cpu"], row["fits"]
        print(f"{name:<8}{ratio:>6g}{amplitude:>7g}{cpu['n_inducing']:>6}{cpu['bound']:>10.3f}", end="")
        print("".join(f"{f['bound']:>10.3f}" for f in fits), end="")
        print("".join(f"{f['stopped'][:1]:>3}" for f in (cpu, *fits[:2])), end="")
        print(
            f"{cpu['seconds']:>7.1f}{fits[-1]['seconds']:>7.1f}",
            "FAILS" if row["fails"] else "",
            flush=True,
        )


if __name__ == "__main__":
    run_command(main)
