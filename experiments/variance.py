"""The error of each gradient estimator, for several numbers of evaluations of the likelihood.

    python -m experiments.variance --data DIR [--task TASK ...] [--write]

On the sequence of median length of each task, under the posterior that the default fit of fold 0 finds
(500 inducing inputs), it measures the root mean square error of the whitened slope (gradient in the means)
and bend (gradient in the covariances), relative to their size. The reference is the pathwise estimate from
400,000 draws. With ``--write``, the table goes into docs/estimators.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from experiments.data import PLAIN, TASKS, arguments, load_fold, problem_of, run_command
from structgp import Inducing, StructuredGPClassifier
from structgp.inference import Problem
from structgp.inference.estimators import Estimator, Moments, Pathwise
from structgp.inference.latents import Latents
from structgp.plan.options import ESTIMATORS
from structgp.structures import Chain

DOCS = Path(__file__).parent.parent / "docs" / "estimators.md"
BEGIN, END = "<!-- variance table: begin -->", "<!-- variance table: end -->"
VALUES_ONLY = (256, 1024, 4096)
WITH_GRADIENT = (8, 40, 128)
EARLIER = 8
"""Number of earlier estimates, of the same number of draws, that an estimator with memory has seen."""


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments("variance", __doc__, TASKS)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true", help="put the table into the docs")
    options = parser.parse_args(words)
    lines: list[str] = []
    for task in options.task:
        for line in table(task, options.data, options.repeats, options.device):
            print(line, flush=True)
            lines.append(line)
        lines.append("")
    if options.write:
        write("\n".join(lines))


def table(task: str, data: str | None, repeats: int, device: str) -> list[str]:
    problem = one_sequence(task, data, device)
    (batch,), latent = problem.batches, problem.latents(0)
    truth = _truth(problem, latent)
    T, V = batch.mask.shape[1], problem.posterior.node.n_scores
    lines = [
        f"### {task}: {T} tokens, {V} labels",
        "",
        "| estimator | " + " | ".join(f"S = {S}" for S in VALUES_ONLY) + " |",
        "|---|" + "---|" * len(VALUES_ONLY),
    ]
    errors: dict[tuple[str, int], tuple[float, float]] = {}
    for name, estimator in ESTIMATORS.items():
        if estimator.needs_gradient:
            continue
        for S in VALUES_ONLY:
            errors[name, S] = error(problem, latent, truth, estimator.with_draws(S), repeats)
        cells = [_cell(errors[name, S]) for S in VALUES_ONLY]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| estimator | " + " | ".join(f"S = {S}" for S in WITH_GRADIENT) + " |",
        "|---|" + "---|" * len(WITH_GRADIENT),
    ]
    for name, estimator in ESTIMATORS.items():
        if not estimator.needs_gradient:
            continue
        for S in WITH_GRADIENT:
            errors[name, S] = error(problem, latent, truth, estimator.with_draws(S), 4 * repeats)
        cells = [_cell(errors[name, S]) for S in WITH_GRADIENT]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, "", _verdict(errors)]


def one_sequence(task: str, data: str | None, device: str) -> Problem:
    """The problem of the sequence of median length under a fitted posterior."""
    fold = load_fold(task, data, 0)
    model = StructuredGPClassifier(**(PLAIN | {"posterior": Inducing(500, basis="label")}))
    model.fit(fold.X, fold.y)
    lengths = [len(y) for y in fold.y]
    middle = statistics.median_low(lengths)
    n = lengths.index(middle)
    return problem_of(model, Chain(), [fold.X[n]], [fold.y[n]], device=device)


def error(
    problem: Problem, latent: Latents, truth: Moments, estimator: Estimator, repeats: int
) -> tuple[float, float]:
    """Relative root mean square error of slope and bend over independent estimates."""
    generator = torch.Generator().manual_seed(1)
    problem.estimator = estimator
    slopes, bends = [], []
    for _ in range(repeats):
        problem.memory.clear()
        if estimator.uses_memory:
            for _ in range(EARLIER):
                problem.estimate(0, latent, generator)
        found = problem.estimate(0, latent, generator).moments
        slopes.append(_square(found.slopes[0] - truth.slopes[0]))
        bends.append(_square(found.bends[0] - truth.bends[0]))
    sizes = _square(truth.slopes[0]), _square(truth.bends[0])
    means = statistics.mean(slopes), statistics.mean(bends)
    return (means[0] / sizes[0]) ** 0.5, (means[1] / sizes[1]) ** 0.5


def _square(x: Tensor) -> float:
    return float(x.square().sum())


def _truth(problem: Problem, latent: Latents) -> Moments:
    problem.estimator = Pathwise(n_draws=20_000)
    generator = torch.Generator().manual_seed(0)
    total = problem.estimate(0, latent, generator).moments
    for _ in range(19):
        total = total + problem.estimate(0, latent, generator).moments
    return total * (1 / 20)


def _cell(errors: tuple[float, float]) -> str:
    return f"{errors[0]:.3f} \\| {errors[1]:.2f}"


def _verdict(errors: dict[tuple[str, int], tuple[float, float]]) -> str:
    """Says how the best estimator from values compares with the paper's, and how many fewer evaluations the
    pathwise ones need."""
    S, few = max(VALUES_ONLY), WITH_GRADIENT[1]
    paper = errors["control-variate", S]
    ours = {name: e for (name, n), e in errors.items() if n == S and name != "control-variate"}
    best = min(ours, key=lambda name: ours[name][0] / paper[0] + ours[name][1] / paper[1])
    mean, covariance = (ours[best][k] / paper[k] for k in (0, 1))
    words = [
        f"At S = {S}, '{best}' has {mean:.2f} of the error of the paper's control variate for means and "
        f"{covariance:.2f} for covariances."
    ]
    for name in ("pathwise", "pathwise-surrogate"):
        # Errors are inversely proportional to the root of the number of evaluations.
        saved = [S / few * (paper[k] / errors[name, few][k]) ** 2 for k in (0, 1)]
        words.append(
            f"For the error that the paper's has at S = {S}, '{name}' (from its error at S = {few}) needs "
            f"{saved[0]:.0f} times fewer evaluations for means and {saved[1]:.0f} times fewer for "
            "covariances."
        )
    return " ".join(words)


def write(text: str) -> None:
    page = DOCS.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    DOCS.write_text(f"{before}{BEGIN}\n{text.rstrip()}\n{END}{after}", encoding="utf-8")
    print(f"wrote {DOCS.name}")


if __name__ == "__main__":
    run_command(main)
