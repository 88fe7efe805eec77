"""Likelihood evaluations until 1 nat per sequence from the optimum: second-order fit and paper's schedule.

    python -m experiments.evaluations --data DIR [--task TASK ...] [--fold K ...] [--minutes 4]

Both fit the same model: a fixed linear kernel, 500 inducing inputs, one function per label, fixed scales.
The optimum is between the fresh bound and the bound of a long second-order fit with 256 draws, and the aim
is 1 nat per sequence below the higher of these. Bounds are computed on the same 256 fresh draws, in nats
per sequence; computing them is not counted. An evaluation is the likelihood of one sequence at one draw.
The paper's schedule is 'paper-stochastic': SAGA with one sequence per step, 4,000 draws and control
variates. Its bound is checked after every 1 / 40 of its minutes, so that it may have arrived up to one
check earlier; '>' means that it had not arrived when its minutes were over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from experiments.data import (
    PLAIN,
    arguments,
    bound_per_sequence,
    each_fold,
    load_fold,
    problem_of,
    run_command,
)
from structgp import Inducing, Prior, StructuredGPClassifier
from structgp.inference import Optimizer, Problem, SecondOrder
from structgp.paper import PRESETS
from structgp.plan.options import ESTIMATORS
from structgp.structures import Chain

N_INDUCING = 500
WITHIN = 1.0
LOOKS = 40
LOOK_DRAWS = 256
PRESET = PRESETS["paper-stochastic"].optimizer


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments("evaluations", __doc__, ["segmentation", "chunking"])
    parser.add_argument("--minutes", type=float, default=4, help="limit of the paper's schedule")
    options = parser.parse_args(words)
    each_fold("evaluations", options, lambda task, k: compare(task, k, options.data, options.minutes))


def compare(task: str, k: int, data: str | None, minutes: float) -> dict[str, Any]:
    fold = load_fold(task, data, k)
    long = SecondOrder(n_draws=256, tolerance=0.002, max_rounds=40, learn_scales=False)
    settings = PLAIN | {
        "prior": Prior(learn_kernel=False),
        "posterior": Inducing(N_INDUCING, basis="label"),
        "inference": long,
    }
    model = StructuredGPClassifier(**settings).fit(fold.X, fold.y)
    problem = problem_of(model, Chain(), fold.X, fold.y)
    fitted = model.training_log_["elbo"] / problem.n_sequences
    fresh = bound_per_sequence(problem, LOOK_DRAWS)
    row: dict[str, Any] = {"task": task, "fold": k, "inducing": problem.posterior.node.n_values}
    row["optimum between"] = [round(fresh, 3), round(fitted, 3)]
    aim = max(fresh, fitted) - WITHIN

    def look() -> float:
        return bound_per_sequence(problem, LOOK_DRAWS)

    _to_prior(problem)
    row["second-order"] = _count(SecondOrder(learn_scales=False), problem, look, aim)
    _to_prior(problem)
    single = problem_of(model, Chain(), fold.X, fold.y, batch_tokens=1)
    single.estimator = ESTIMATORS[PRESET.gradient].with_draws(PRESET.n_draws or 1)
    row["paper-stochastic"] = _count(PRESET, single, look, aim, minutes)
    ratio = row["paper-stochastic"]["evaluations"] / row["second-order"]["evaluations"]
    arrived = row["paper-stochastic"]["arrived"]
    row["ratio"] = f"{'' if arrived else '> '}{ratio:.3g}"
    return row


def _count(
    optimizer: Optimizer,
    problem: Problem,
    look: Callable[[], float],
    aim: float,
    minutes: float | None = None,
) -> dict[str, Any]:
    """Steps until a look finds the bound at the aim. It looks after every step, or, with ``minutes``, 40
    times at even intervals; the time of the looks themselves is not counted."""
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    spent, looks, evaluations, steps = 0.0, 0, 0, 0
    path = [round(look(), 2)]
    while True:
        began = time.perf_counter()
        state, info = optimizer.step(problem, state)
        spent += time.perf_counter() - began
        evaluations, steps = evaluations + info.evaluations, steps + 1
        waits = minutes is not None and spent < 60 * minutes * (looks + 1) / LOOKS
        if waits and not info.finished:
            continue
        bound, looks = look(), looks + 1
        path.append(round(bound, 2))
        late = minutes is not None and looks >= LOOKS
        if bound >= aim or late or info.finished:
            return {
                "arrived": bound >= aim,
                "evaluations": evaluations,
                "steps": steps,
                "seconds": round(spent, 1),
                "bounds": path,
            }


def _to_prior(problem: Problem) -> None:
    """Resets the posterior to its state before a fit."""
    with torch.no_grad():
        for block in problem.posterior.blocks:
            block.m.zero_()
            full = block.factor.dim() > block.m.dim()
            block.factor.copy_(torch.eye(block.factor.shape[-1]) if full else torch.ones(()))
    problem.posterior.requires_grad_(True)


if __name__ == "__main__":
    run_command(main)
