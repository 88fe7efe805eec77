"""The paper's model at the optimum of its bound: what its optimisers would find with unlimited time.

    python -m experiments optimum --data DIR [--task T ...] [--fold K ...] [--quick]

The model and the bound are those of the presets gp-var-b and gp-var-s (and gp-var-p, with the piecewise
pseudo-likelihood): one function per label, 500 inducing inputs, the linear kernel, unit transition scale,
nothing learned. Here they are fitted by the second-order optimiser, which takes seconds if the variance is
small. A preset whose bound is lower has not converged; if the error here is worse than the paper's, time is
not the reason. Each model is fitted with several prior variances of the kernel's weights, since the paper
does not say which one it used."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.cells import Row, Store
from experiments.commands import add_folds, finish, parser_of, publish, tell_error, versions
from experiments.compared import Fitted, fit_quietly
from experiments.data import TASKS, Fold, load_fold
from experiments.suites import data_folder
from experiments.table1 import papers_errors
from structgp import Inducing, Prior, SecondOrder, StructuredGPClassifier, metrics

KEY = ("likelihood", "variance", "task", "fold")
LIKELIHOODS = {"chain": ("gp-var-b", "gp-var-s"), "piecewise": ("gp-var-p",)}
"""Maps each likelihood to the paper's methods that use it."""

VARIANCES = (1.0, 3.0, 10.0, 30.0)
TRAINING_SEQUENCES = {"basenp": 150, "chunking": 50, "segmentation": 20, "japanesene": 50}
INDUCING = 500
SEED = 0


@dataclass(frozen=True)
class Cell:
    likelihood: str
    variance: float
    task: str
    fold: int
    data: str | None

    @property
    def key(self) -> tuple[Any, ...]:
        return self.likelihood, self.variance, self.task, self.fold

    @property
    def name(self) -> str:
        return f"{self.likelihood} {self.variance:g} {self.task} {self.fold}"


def main(words: Sequence[str] | None = None) -> int:
    """0 if all cells were done, 1 if one of them failed."""
    parser = parser_of("optimum", __doc__)
    add_folds(parser, TASKS)
    options = parser.parse_args(words)
    data_folder(options.data)
    folds = options.fold or ([0] if options.quick else list(range(5)))
    store = Store(Path(options.results) / "optimum.jsonl", KEY)
    there = store.rows()
    cells = [
        Cell(likelihood, variance, task, fold, options.data)
        for fold in folds
        for task in options.task
        for likelihood in LIKELIHOODS
        for variance in VARIANCES
    ]
    cells = [cell for cell in cells if cell.key not in there]
    failed = finish(run_cell, cells, store, options.jobs, tell_error)
    publish(store.path, markdown(list(store.rows().values())), {})
    return 1 if failed else 0


def run_cell(cell: Cell) -> Row:
    fold = load_fold(cell.task, cell.data, cell.fold)
    began = time.perf_counter()
    fitted = fit(fold, cell.likelihood, cell.variance)
    seconds = time.perf_counter() - began
    marginals = fitted.model.predict_marginals(fold.X_test)
    return dict(zip(KEY, cell.key, strict=True)) | {
        "error": 100 * metrics.token_error(fold.y_test, fitted.model.predict(fold.X_test)),
        "nll": metrics.token_nll(fold.y_test, marginals),
        "bound": fitted.details["fresh_elbo"],
        "seconds": round(seconds, 2),
        "hit_limit": fitted.hit_limit,
        "seed": SEED,
        "versions": versions(),
    }


def fit(fold: Fold, likelihood: str, variance: float) -> Fitted:
    """Fits the presets' model with weights of this variance."""
    # The variance of a latent value is that of a weight times the number of features of a token.
    active = sum(x.multiply(x).sum() for x in fold.X) / sum(x.shape[0] for x in fold.X)
    model = StructuredGPClassifier(
        kernel="linear",
        random_state=SEED,
        structure=likelihood,
        prior=Prior(amplitude=variance * active, transition_sd=1.0, learn_kernel=False),
        posterior=Inducing(n_inducing=INDUCING, basis="label"),
        inference=SecondOrder(learn_scales=False),
    )
    return fit_quietly(model, fold)


def markdown(rows: Sequence[Row]) -> str:
    """A table of mean errors (and NLL) over folds; * if one of the fits stopped at its number of rounds."""
    head = " | ".join(f"variance {v:g}" for v in VARIANCES)
    lines = [f"| task | likelihood | {head} | paper |", "|---" * (len(VARIANCES) + 3) + "|"]
    for task in TASKS:
        paper = papers_errors()[task]
        for likelihood, methods in LIKELIHOODS.items():
            found = [_summary(cells_of(rows, likelihood, v, task)) for v in VARIANCES]
            published = ", ".join(f"{m} {paper[m][0]:.2f}" for m in methods)
            lines.append(f"| {task} | {likelihood} | {' | '.join(found)} | {published} |")
    return "\n".join(lines) + "\n"


def cells_of(rows: Sequence[Row], likelihood: str, variance: float, task: str) -> list[Row]:
    wanted = likelihood, variance, task
    return [r for r in rows if (r["likelihood"], r["variance"], r["task"]) == wanted]


def _summary(here: Sequence[Row]) -> str:
    if not here:
        return "not run yet"
    count = f" [{len(here)}]" if len(here) < 5 else ""
    limit = "*" if any(r["hit_limit"] for r in here) else ""
    error, nll = (statistics.mean(r[name] for r in here) for name in ("error", "nll"))
    return f"{error:.2f} ({nll:.3f}){limit}{count}"
