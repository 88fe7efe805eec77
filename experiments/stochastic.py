"""SAGA against SGD: the variance of a step's direction over the data, memory, and time per step.

    python -m experiments.stochastic --data DIR [--task TASK ...]

After a number of passes of SAGA from the prior, the posterior and the stored gradients are kept fixed, and
the direction that each sequence would give is computed with SAGA and with plain SGD, both from one estimate
on that sequence (equal cost). Variance is the mean squared distance from the mean direction, for the part
that concerns the means. With the paper's 4,000 draws and control variate, it consists of the scatter over
sequences, which SAGA removes, and of the noise of the draws, which SAGA doubles; with 32 pathwise draws the
noise is smaller. The time of a step is measured with the chain and with its piecewise pseudo-likelihood,
with the paper's draws.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import torch

from experiments.data import arguments, keep, load_fold, run_command
from experiments.methods.sgd import SGD
from structgp.data.encode import FeatureEncoder
from structgp.data.labels import LabelEncoder
from structgp.gp import Inducing, Posterior, Table
from structgp.gp.kernels.build import build_kernel
from structgp.inference import Problem
from structgp.inference.loop import make_batches
from structgp.paper import Saga
from structgp.plan.options import ESTIMATORS, PRESETS
from structgp.plan.start import flat_tokens, pick_inducing
from structgp.structures import Chain, Piecewise, Structure

PASSES = (1, 3, 10)
TIMED_STEPS = 40


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments("stochastic", __doc__, ["segmentation", "chunking"])
    parser.add_argument("--passes", nargs="+", type=int, default=list(PASSES))
    options = parser.parse_args(words)
    for task in options.task:
        rows = [step_times(task, options.data)]
        for gradient, draws in (("control-variate", 4000), ("pathwise", 32)):
            rows.append(variances(task, options.data, sorted(options.passes), gradient, draws))
        for row in rows:
            print(row, flush=True)
            keep("stochastic", row)


def variances(
    task: str, data: str | None, passes: list[int], gradient: str, draws: int
) -> dict[str, object]:
    problem = build(task, data, Chain())
    problem.estimator = ESTIMATORS[gradient].with_draws(draws)
    saga = Saga(mean_step=None, covariance_step=None, node_steps=None, transition_steps=None)
    sgd = SGD(learn_scales=False)
    state = saga.start(problem, torch.Generator().manual_seed(0))
    n = len(problem.batches)
    row: dict[str, object] = {
        "task": task,
        "what": "SAGA variance over SGD variance",
        "gradient": gradient,
        "draws": draws,
    }
    for step in range(max(passes) * n):
        state, _ = saga.step(problem, state)
        if (step + 1) % n == 0 and (step + 1) // n in passes:
            with_store = [_direction(saga, problem, state, i) for i in range(n)]
            without = [_direction(sgd, problem, state, i) for i in range(n)]
            ratio = _variance(with_store) / _variance(without)
            row[f"after {(step + 1) // n} passes"] = round(ratio, 4)
    node = problem.posterior.node
    parameters = node.n_functions * (node.n_values + node.n_values**2) * 8
    row["stored MB"] = round(state.memory_bytes / 1e6, 2)
    row["as parameter gradients MB"] = round(n * parameters / 1e6, 1)
    return row


def step_times(task: str, data: str | None) -> dict[str, object]:
    """Seconds per SAGA step; the structures take turns, so that a noisy machine disturbs both alike."""
    optimizer = Saga()
    runs = {}
    for name, structure in (("chain", Chain()), ("piecewise", Piecewise())):
        problem = build(task, data, structure)
        runs[name] = problem, optimizer.start(problem, torch.Generator().manual_seed(0))
    seconds, alone = dict.fromkeys(runs, 0.0), dict.fromkeys(runs, 0.0)
    for step in range(TIMED_STEPS):
        for name, (problem, state) in runs.items():
            began = time.perf_counter()
            optimizer.step(problem, state)
            seconds[name] += time.perf_counter() - began
            alone[name] += _likelihood_seconds(problem, step % len(problem.batches))
    return {
        "task": task,
        "what": "seconds a step",
        **{name: round(s / TIMED_STEPS, 4) for name, s in seconds.items()},
        "piecewise / chain": round(seconds["piecewise"] / seconds["chain"], 3),
        "likelihood alone": round(alone["piecewise"] / alone["chain"], 3),
    }


def _likelihood_seconds(problem: Problem, i: int) -> float:
    """Seconds for the likelihood values of batch i at the paper's number of draws, without the drawing."""
    batch, V = problem.batches[i], problem.posterior.node.n_scores
    S = problem.estimator.n_draws // 10  # as many at a time as in the estimator
    f = torch.randn(S, *batch.mask.shape, V)
    g = torch.randn(S, V, V)
    began = time.perf_counter()
    for _ in range(10):
        problem.structure.log_prob(f, g, batch.y, batch.mask)
    return time.perf_counter() - began


def build(task: str, data: str | None, structure: Structure) -> Problem:
    """The problem of fold 0 with the settings of the stochastic preset, at the prior."""
    preset = PRESETS["paper-stochastic"]
    fold = load_fold(task, data, 0)
    encoder, labels = FeatureEncoder().fit(fold.X), LabelEncoder().fit(fold.y)
    rows, y = encoder.transform(fold.X), labels.transform(fold.y)
    tokens = flat_tokens(rows)
    kernel = build_kernel("linear", encoder.blocks, tokens).requires_grad_(False)
    inducing, _ = pick_inducing(kernel, tokens, preset.n_inducing, seed=0)
    V = len(labels.classes)
    posterior = Posterior({"node": Inducing(kernel, inducing, (V,)), "next": Table((V, V))})
    batches = make_batches(rows, y, encoder.pad_row, 1)
    estimator = ESTIMATORS[preset.optimizer.gradient].with_draws(preset.optimizer.n_draws or 1)
    return Problem(posterior, structure, batches, estimator)


def _direction(optimizer: Saga, problem: Problem, state: object, i: int) -> torch.Tensor:
    trial = copy.copy(state)
    trial.stored = dict(state.stored)
    trial.generator = torch.Generator().manual_seed(1000 + i)
    return optimizer.direction(problem, trial, i)[0].m[0]


def _variance(directions: list[torch.Tensor]) -> float:
    stacked = torch.stack(directions)
    return float((stacked - stacked.mean(0)).square().flatten(1).sum(1).mean())


if __name__ == "__main__":
    run_command(main)
