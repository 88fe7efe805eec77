"""The contribution of each part: fits with one thing changed, against three named bases.

    python -m experiments ablation --data DIR [--task T ...] [--fold K ...] [--base B ...] [--quick]

'default' : the default fit. 'inducing' : the second-order fit with the paper's kind of prior, 500 inducing
inputs under a fixed linear kernel of unit variance, and contrasts of the labels. 'stochastic' : the same
prior with a function for each label, SAGA on one sequence per step with its own step sizes, the paper's
4,000 draws and control variate, 1,500 steps. A change concerns control variates, memory (SAGA or SGD), the
number of inducing inputs M, draws S, kernel, basis, or mixture components K. Error and NLL are measured on
the test half; the bound is computed on the same 256 fresh draws, in nats per training sequence; seconds are
those of one processor.

Fold 0 of two tasks takes about half an hour on two cores. Cells are kept in
experiments/results/ablation.jsonl, as those of table1 are. --quick runs segmentation with 300 stochastic
steps, and keeps its cells in a separate file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.cells import Row, Store
from experiments.commands import finish, is_done, parser_of, publish, tell_error, versions
from experiments.compared import fit_quietly
from experiments.data import TASKS, Fold, bound_per_sequence, load_fold, problem_of
from experiments.figures import Dot, dots, figure
from experiments.methods.sgd import SGD
from experiments.suites import data_folder
from experiments.table1 import SEED
from structgp import Inducing, Mixture, Prior, StructuredGPClassifier, Weights, metrics
from structgp.inference import SecondOrder
from structgp.paper import Saga
from structgp.structures import Chain

KEY = ("base", "change", "task", "fold", "quick")
NONE = "none"
ABLATED = ("segmentation", "chunking")
INDUCING = 500
FIXED: dict[str, Any] = {
    "kernel": "linear",
    "prior": Prior(transition_sd=1.0, learn_kernel=False),
    "posterior": Inducing(INDUCING),
}


def _default(**changes: Any) -> Callable[[bool], StructuredGPClassifier]:
    return lambda quick: StructuredGPClassifier(random_state=SEED, **changes)


def _inducing(**changes: Any) -> Callable[[bool], StructuredGPClassifier]:
    settings = FIXED | {"inference": SecondOrder(learn_scales=False)} | changes
    return lambda quick: StructuredGPClassifier(random_state=SEED, **settings)


def _stochastic(
    kind: type[Saga] = Saga, *, n_inducing: int = INDUCING, basis: str = "label", **changes: Any
) -> Callable[[bool], StructuredGPClassifier]:
    """Makes models of the base 'stochastic'. changes : fields of the optimiser."""
    own = {"gradient": "control-variate", "n_draws": 4000} | changes

    def make(quick: bool) -> StructuredGPClassifier:
        own_pace = kind(
            mean_step=None,
            covariance_step=None,
            node_steps=None,
            transition_steps=None,
            learn_scales=False,
            max_steps=300 if quick else 1500,
            **own,
        )
        posterior = Inducing(n_inducing, basis=basis)
        settings = FIXED | {"posterior": posterior, "inference": own_pace}
        return StructuredGPClassifier(random_state=SEED, **settings)

    return make


ABLATIONS: dict[str, dict[str, Callable[[bool], StructuredGPClassifier]]] = {
    "default": {
        NONE: _default(),
        "S = 4": _default(inference=SecondOrder(n_draws=4)),
        "S = 64": _default(inference=SecondOrder(n_draws=64)),
        "kernel not learned": _default(inference=SecondOrder(learning_rounds=0)),
        "a function for each label": _default(posterior=Weights(basis="label")),
        "inducing inputs": _default(posterior="inducing"),
    },
    "inducing": {
        NONE: _inducing(),
        "M = 50": _inducing(posterior=Inducing(50)),
        "M = 200": _inducing(posterior=Inducing(200)),
        "M = 1000": _inducing(posterior=Inducing(1000)),
        "S = 4": _inducing(inference=SecondOrder(n_draws=4, learn_scales=False)),
        "kernel learned": _inducing(
            kernel="relevance", prior=Prior(learn_kernel=True), inference=SecondOrder()
        ),
        "a function for each label": _inducing(posterior=Inducing(INDUCING, basis="label")),
        "K = 2": _inducing(posterior=Mixture(2, n_inducing=INDUCING)),
    },
    "stochastic": {
        NONE: _stochastic(),
        "SGD": _stochastic(SGD),
        "no control variate": _stochastic(gradient="score"),
        "SGD, no control variate": _stochastic(SGD, gradient="score"),
        "pathwise gradients, S = 32": _stochastic(gradient="pathwise", n_draws=32),
        "S = 250": _stochastic(n_draws=250),
        "S = 1000": _stochastic(n_draws=1000),
        "M = 200": _stochastic(n_inducing=200),
        "contrasts": _stochastic(basis="contrast"),
    },
}


@dataclass(frozen=True)
class Cell:
    """One change of one base on one fold of one task."""

    base: str
    change: str
    task: str
    fold: int
    quick: bool
    data: str | None

    @property
    def key(self) -> tuple[Any, ...]:
        return self.base, self.change, self.task, self.fold, self.quick

    @property
    def name(self) -> str:
        return f"{self.base}, {self.change}, {self.task} {self.fold}"


def main(words: Sequence[str] | None = None) -> int:
    """0 if all cells were done, 1 if one of them failed."""
    parser = parser_of("ablation", __doc__)
    parser.add_argument("--task", nargs="+", choices=TASKS, help="default: segmentation, chunking")
    parser.add_argument("--fold", nargs="+", type=int, choices=range(5), default=[0])
    parser.add_argument("--base", nargs="+", choices=list(ABLATIONS), default=list(ABLATIONS))
    options = parser.parse_args(words)
    data_folder(options.data)
    tasks = options.task or ABLATED[: 1 if options.quick else 2]
    cells = [
        Cell(base, change, task, fold, options.quick, options.data)
        for fold in options.fold
        for task in tasks
        for base in options.base
        for change in ABLATIONS[base]
    ]
    name = f"ablation{'-quick' if options.quick else ''}"
    store = Store(Path(options.results) / f"{name}.jsonl", KEY)
    there = store.rows()
    open_cells = [cell for cell in cells if not is_done(there.get(cell.key), 0.0)]
    failed = finish(run_cell, open_cells, store, options.jobs, tell_error)
    rows = list(store.rows().values())
    publish(store.path, markdown(rows), {name: plot(rows)})
    return 1 if failed else 0


def run_cell(cell: Cell) -> Row:
    fold = load_fold(cell.task, cell.data, cell.fold)
    make = ABLATIONS[cell.base][cell.change]
    return dict(zip(KEY, cell.key, strict=True)) | score(fold, make(cell.quick))


def score(fold: Fold, model: StructuredGPClassifier) -> Row:
    """The fields of a cell's row beside its key."""
    began = time.process_time()
    fitted = fit_quietly(model, fold)
    seconds = time.process_time() - began
    marginals = model.predict_marginals(fold.X_test)
    return {
        "error": 100 * metrics.token_error(fold.y_test, model.predict(fold.X_test)),
        "nll": metrics.token_nll(fold.y_test, marginals),
        "bound": bound_per_sequence(problem_of(model, Chain(), fold.X, fold.y), 256),
        "seconds": round(seconds, 2),
        "minutes": None,
        "hit_limit": fitted.hit_limit,
        "seed": SEED,
        "versions": versions(),
        "details": fitted.details,
    }


# --- rows -> text ----------------------------------------------------------------------------


def markdown(rows: Sequence[Row]) -> str:
    """The table as Markdown; the same for the same cells, in whatever order they were done."""
    lines = [
        "One thing changed against each base; in brackets the difference from the base, means over the",
        "folds that both have. * a fit stopped at its number of steps.",
        "",
        "| task | base | change | error, % | NLL | bound | seconds | folds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        for base, changes in ABLATIONS.items():
            for change in changes:
                here = _of(rows, base, change, task)
                if here:
                    lines.append(_line(here, _of(rows, base, NONE, task)))
    return "\n".join(lines) + "\n"


def _line(here: dict[int, Row], base: dict[int, Row]) -> str:
    first = next(iter(here.values()))
    folds = sorted(here)
    shared = [k for k in folds if k in base]
    fields = [first["task"], first["base"], first["change"]]
    for name, digits in (("error", 2), ("nll", 3), ("bound", 2), ("seconds", 1)):
        text = f"{_mean(here, folds, name):.{digits}f}"
        if name == "error" and any(row["hit_limit"] for row in here.values()):
            text += "*"
        if shared and first["change"] != NONE:
            change = _mean(here, shared, name) - _mean(base, shared, name)
            text += f" ({change:+.{digits}f})"
        fields.append(text)
    return f"| {' | '.join(fields)} | {len(folds)} |"


def _mean(rows: dict[int, Row], folds: Sequence[int], name: str) -> float:
    return sum(rows[k][name] for k in folds) / len(folds)


def _of(rows: Sequence[Row], base: str, change: str, task: str) -> dict[int, Row]:
    """The rows of one base, change and task, by fold."""
    wanted = (base, change, task)
    return {r["fold"]: r for r in rows if (r["base"], r["change"], r["task"]) == wanted}


def plot(rows: Sequence[Row]) -> str:
    """A figure with a panel for each task and base: the NLL with each change."""
    panels = []
    for task in TASKS:
        for base, changes in ABLATIONS.items():
            there = {change: _of(rows, base, change, task) for change in changes}
            shown = [
                Dot(change, _mean(found, sorted(found), "nll")) for change, found in there.items() if found
            ]
            if shown:
                panels.append(dots(f"{task}, {base}", "NLL per token", list(changes), shown))
    return figure(panels, [])
