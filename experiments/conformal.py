"""Coverage and size of conformal sets over random calibrations, for our probabilities and those of a CRF.

    python -m experiments.conformal --data DIR [--task TASK ...] [--splits 1] [--jobs N] [--skip-crf]

On each split, a model is fitted once. 200 times, 200 of the other sequences are drawn for calibration, and
the sets of the rest are examined: the mean share of targets that they hold, and their mean size. 'promised'
is the coverage that was asked for, or, in a stratum of lengths where it is higher, the share that the first
label (or labelling) alone would hold: sets are never empty, so coverage cannot be below that. 'unanswered'
is the share of sequences in strata that cannot support the coverage; the guarantee counts them as held.
Token sets are made in the same way from the probabilities of the cross-validated CRF. 'short' and 'long'
are the coverages of sequences up to the median training length and beyond. 'titles' are generated. Rows go
to results/conformal.jsonl; rows that are already there are not computed again.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.cells import Row, Store
from experiments.commands import finish
from experiments.data import RESULTS, Fold, run_command
from experiments.splits import FOUR, SIZES, split_of
from structgp import InputError, StructuredGPClassifier
from structgp.answers.best_spans import LEAST_COUNTED
from structgp.answers.conformal import KINDS, Calibration, Targets, Thresholds, label_scores
from structgp.answers.sets import MOST_LABELLINGS
from structgp.evaluation import metrics
from structgp.evaluation.crf import LinearCRF

KEY = ("task", "split", "method")
TASKS = (*FOUR, "titles")
COVERAGES = {
    "tokens": (0.9, 0.95, 0.98, 0.99),
    "spans": (0.8, 0.9, 0.95),
    "labellings": (0.5, 0.7, 0.8, 0.9),
}
N_CALIBRATION, REPEATS = 200, 200
MOST_REST = 700
"""Largest number of sequences for calibration and testing together."""


@dataclass(frozen=True)
class Cell:
    task: str
    split: int
    method: str
    data: str | None

    @property
    def name(self) -> str:
        return f"{self.method} {self.task} {self.split}"


@dataclass(frozen=True)
class Answered:
    """A model's answers about sequences. scores : scores of each sequence's targets. probabilities :
    probabilities of all possible members of its sets, (tokens, labels) or (1, candidates). sure : whether a
    set always holds its first member."""

    scores: list[np.ndarray]
    probabilities: list[np.ndarray]
    sure: bool


def from_marginals(marginals: list[Any], y: list[list[str]], classes: Sequence[str]) -> Answered:
    number = {label: i for i, label in enumerate(classes)}
    p = [np.array([[at[c] for c in classes] for at in tokens]) for tokens in marginals]
    truth = [np.array([number.get(label, -2) for label in labels]) for labels in y]
    return Answered([label_scores(a, b) for a, b in zip(p, truth, strict=True)], p, True)


def ours(fold: Fold) -> dict[str, Answered]:
    model = StructuredGPClassifier().fit(fold.X, fold.y)
    found = {"tokens": from_marginals(model.predict_marginals(fold.X_test), fold.y_test, model.classes_)}
    asked, scores, listed = model.ask(fold.X_test), [], []
    for spans, labels in zip(asked.spans(LEAST_COUNTED), fold.y_test, strict=True):
        p = {span[:3]: min(span[3], 1 - 1e-12) for span in spans}
        scores.append(np.array([p.get(span, 0.0) for span in metrics.chunks(labels)]))
        listed.append(np.array([list(p.values())]))
    found["spans"] = Answered(scores, listed, False)
    scores, listed = [], []
    for best, labels in zip(model.predict_n_best(fold.X_test, MOST_LABELLINGS), fold.y_test, strict=True):
        here = [math.inf if rank == 0 else one.probability for rank, one in enumerate(best)]
        scores.append(
            np.array([max([p for p, one in zip(here, best, strict=True) if one.labels == labels] or [0])])
        )
        listed.append(np.array([[one.probability for one in best]]))
    found["labellings"] = Answered(scores, listed, True)
    return found


def crf(fold: Fold) -> dict[str, Answered]:
    model = LinearCRF().fit(fold.X, fold.y)
    return {"tokens": from_marginals(model.predict_marginals(fold.X_test), fold.y_test, model.classes_)}


METHODS = {"ours": ours, "crf": crf}


def repeated(
    found: Answered, lengths: np.ndarray, quartiles: tuple[int, ...], coverage: float
) -> Row | None:
    """Means over calibrations; None if one of the calibrations cannot guarantee the coverage."""
    rng, n = np.random.default_rng(0), min(N_CALIBRATION, len(lengths) // 2)
    each: list[list[float]] = []
    for _ in range(REPEATS):
        order = rng.permutation(len(lengths))
        targets = Targets.of([found.scores[i] for i in order[:n]])
        calibration = Calibration(lengths[order[:n]], {"sets": targets}, quartiles, {})
        try:
            limits = calibration.thresholds("sets", coverage)
        except InputError:
            return None
        each.append(looked_at(found, order[n:], lengths, limits, quartiles[1]))
    names = ("held", "short", "long", "size", "unanswered")
    figures = dict(zip(names, np.nanmean(each, axis=0).tolist(), strict=True))
    figures["error"] = float(np.std([at[0] for at in each]) / math.sqrt(REPEATS))
    stratum = np.searchsorted(limits.cuts, lengths)
    sure = np.array([_share(s, 1.0) if found.sure else 0.0 for s in found.scores])
    promised = [
        max(coverage, sure[stratum == k].mean()) * np.mean(stratum == k) for k in np.unique(stratum)
    ]
    return figures | {"promised": float(sum(promised)), "n_calibration": n}


def looked_at(
    found: Answered, test: np.ndarray, lengths: np.ndarray, limits: Thresholds, median: int
) -> list[float]:
    """The share of targets in the sets of all, of short and of long test sequences; the mean size of a set;
    and the share of sequences without an answer."""
    each = [limits.of(lengths[i]) for i in test]
    least = [0.0 if limit is None else limit for limit in each]
    held = np.array([_share(found.scores[i], limit) for i, limit in zip(test, least, strict=True)])
    answered = [i for i, limit in zip(test, each, strict=True) if limit is not None]
    sizes = [_sizes(found, i, limits.of(lengths[i]) or 0.0) for i in answered]
    long = lengths[test] > median
    size = np.concatenate(sizes).mean() if sizes else math.nan
    return [held.mean(), held[~long].mean(), held[long].mean(), size, 1 - len(answered) / len(test)]


def _share(scores: np.ndarray, limit: float) -> float:
    return float(np.mean(scores >= limit)) if len(scores) else 1.0


def _sizes(found: Answered, i: int, limit: float) -> np.ndarray:
    """The size of each set of a sequence."""
    number = (found.probabilities[i] >= limit).sum(1)
    return np.maximum(1, number) if found.sure else number


def run_cell(cell: Cell) -> Row:
    fold = split_of(cell.task, cell.data, cell.split, MOST_REST)
    lengths = np.array([len(labels) for labels in fold.y_test])
    cuts = np.quantile([len(labels) for labels in fold.y], [0.25, 0.5, 0.75], method="inverted_cdf")
    rows = []
    for kind, found in METHODS[cell.method](fold).items():
        for coverage in COVERAGES[kind]:
            figures = repeated(found, lengths, tuple(int(c) for c in cuts), coverage)
            rows.append({"kind": kind, "coverage": coverage, "figures": figures})
    return {"task": cell.task, "split": cell.split, "method": cell.method, "rows": rows}


def table(rows: Sequence[Row], tasks: Sequence[str]) -> str:
    lines = [
        "| kind | coverage | task | promised | ours: held, short, long, size | CRF: the same | unanswered |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for kind in KINDS:
        for coverage in COVERAGES[kind]:
            for task in tasks:
                found = {method: _means(rows, (task, method, kind, coverage)) for method in METHODS}
                if found["ours"] is not None:
                    told = " | ".join(_told(found[method]) for method in METHODS)
                    here = f"| {kind} | {coverage} | {task} | {found['ours']['promised']:.3f} | {told}"
                    lines.append(f"{here} | {found['ours']['unanswered']:.3f} |")
    return "\n".join(lines)


def _means(rows: Sequence[Row], key: tuple[str, str, str, float]) -> dict[str, float] | None:
    """Means over splits of the figures of one task, method, kind and coverage; None if there are none."""
    every = [
        at["figures"]
        for row in rows
        for at in row["rows"]
        if (row["task"], row["method"], at["kind"], at["coverage"]) == key and at["figures"] is not None
    ]
    return {name: float(np.mean([at[name] for at in every])) for name in every[0]} if every else None


def _told(at: dict[str, float] | None) -> str:
    return "-" if at is None else f"{at['held']:.3f}, {at['short']:.3f}, {at['long']:.3f}, {at['size']:.3f}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.conformal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", help="folder of the paper's data (default: STRUCTGP_DATA)")
    parser.add_argument("--task", nargs="+", choices=list(SIZES), default=list(TASKS))
    parser.add_argument("--splits", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--skip-crf", action="store_true", help="leave the CRF out")
    options: Any = parser.parse_args(words)
    store = Store(RESULTS / "conformal.jsonl", KEY)
    methods = ["ours"] if options.skip_crf else list(METHODS)
    every = [
        Cell(task, split, method, options.data)
        for split in range(options.splits)
        for task in options.task
        for method in methods
    ]
    there = store.rows()
    open_cells = [c for c in every if (c.task, c.split, c.method) not in there]
    finish(run_cell, open_cells, store, options.jobs, lambda row: f"{len(row['rows'])} rows")
    print(table(list(store.rows().values()), options.task))


# Worker processes import this file again under another name.
if __name__ == "__main__":
    run_command(main)
