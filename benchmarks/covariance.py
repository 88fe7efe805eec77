"""Full, low-rank and diagonal covariances of inducing values: seconds, memory, and what is lost.

    python -m benchmarks.covariance cost       one round of the second-order fit at M = 2,000, V = 50
    python -m benchmarks.covariance quality    bound and dev NLL at M = 300, V = 14

The data are generated (``benchmarks.generate``), with values given as random dense vectors. Each form runs
in a separate process, since peak memory is measured per process. Seconds are processor seconds, to be
measured with one thread (OMP_NUM_THREADS=1); only ratios of the figures are meaningful.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch

from benchmarks.generate import generate
from structgp import Inducing, StructuredGPClassifier
from structgp.data.encode import FeatureEncoder
from structgp.data.labels import LabelEncoder
from structgp.gp import Inducing as InducingBlock
from structgp.gp import Posterior, Table
from structgp.gp.kernels.build import build_kernel
from structgp.inference import Problem, SecondOrder
from structgp.inference.loop import make_batches
from structgp.structures import Chain

FORMS = ("full", "low-rank", "diagonal")


def dense_data(n: int, n_labels: int, width: int = 16, seed: int = 0) -> tuple[list[Any], list[Any]]:
    """n sequences of dense rows. A row is the sum of a random vector for each template's value, plus
    noise."""
    data = generate(
        n, n_labels=n_labels, mean_length=12, n_templates=3, n_values=40, strength=1.5, seed=seed
    )
    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(3, 40, width))
    place = {v: k for k, v in enumerate(data.chain.values)}
    X = [
        np.array([sum(vectors[p, place[v]] for p, v in enumerate(token)) for token in x])
        + 0.1 * rng.normal(size=(len(x), width))
        for x in data.X
    ]
    return X, data.y


def one_round(form: Any, n: int, n_inducing: int, n_labels: int) -> dict[str, Any]:
    """Measures the start and one round of the second-order fit, with random inducing inputs."""
    X, y = dense_data(n, n_labels)
    encoder = FeatureEncoder().fit(X)
    rows = encoder.transform(X)
    labels = LabelEncoder(sorted({label for labels in y for label in labels}))
    tokens = torch.from_numpy(np.concatenate(rows))
    kernel = build_kernel("auto", encoder.blocks, tokens, 3.0).requires_grad_(False)
    chosen = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))[:n_inducing]
    before = _peak()
    V = len(labels.classes)
    node = InducingBlock(kernel, tokens[chosen], (V,), covariance=form)
    posterior = Posterior({"node": node, "next": Table((V, V))})
    batches = make_batches(rows, labels.transform(y), encoder.pad_row, 1000)
    problem = Problem(posterior, Chain(), batches)
    shared = _peak()
    optimizer = SecondOrder(n_draws=4, learn_scales=False)
    clock = time.process_time()
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    first = time.process_time()
    _, info = optimizer.step(problem, state)
    last = time.process_time()
    return {
        "form": form,
        "tokens": len(tokens),
        "start_seconds": first - clock,
        "round_seconds": last - first,
        "peak_gb": _peak(),
        "before_gb": before,
        "with_kernel_gb": shared,
        "factor_gb": sum(
            p.numel() * 8 / 1e9 for k, p in node.named_parameters() if k in ("factor", "directions")
        ),
        "elbo": info.elbo,
    }


def quality(form: str, n: int, n_inducing: int, n_labels: int, rank: int | None) -> dict[str, Any]:
    """A whole fit, with a kernel that is the same for all forms."""
    X, y = dense_data(n + 200, n_labels)
    dev = X[n:], y[n:]
    model = StructuredGPClassifier(
        random_state=0,
        posterior=Inducing(n_inducing=n_inducing, covariance=form, rank=rank),
        inference=SecondOrder(learn_scales=False),
    ).fit(X[:n], y[:n], *dev)
    log = model.training_log_
    return {
        "form": form if rank is None else f"{form} {rank}",
        "n_inducing": log["n_inducing"],
        "elbo": log["elbo"],
        "fresh_elbo": log["fresh_elbo"],
        "rounds": len(log["steps"]),
        "seconds": log["seconds"],
        "dev": {k: v for k, v in log["dev"].items() if isinstance(v, float)},
    }


def _peak() -> float:
    """Peak memory of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["cost", "quality"])
    parser.add_argument("--sequences", type=int)
    parser.add_argument("--inducing", type=int)
    parser.add_argument("--labels", type=int)
    parser.add_argument("--form", choices=FORMS, help="this one alone, in this process")
    parser.add_argument("--rank", type=int)
    given = parser.parse_args()
    M = given.inducing or (2000 if given.what == "cost" else 300)
    V = given.labels or (50 if given.what == "cost" else 14)
    N = given.sequences or (200 if given.what == "cost" else 150)
    if given.form is not None:
        sizes = N, M, V
        found = (
            one_round(given.form, *sizes)
            if given.what == "cost"
            else quality(given.form, *sizes, given.rank)
        )
        print(json.dumps(found), flush=True)
        return
    runs = [(form, None) for form in FORMS]
    if given.what == "quality":
        runs[1:2] = [("low-rank", rank) for rank in (16, 64, 128)]
    for form, rank in runs:
        command = [sys.executable, "-m", "benchmarks.covariance", given.what, "--form", form]
        command += ["--sequences", str(N), "--inducing", str(M), "--labels", str(V)]
        command += [] if rank is None else ["--rank", str(rank)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
