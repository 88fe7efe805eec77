"""Labels chosen for the score they are judged by: F1, token error and cost of each decoding, beside a CRF.

    python -m experiments.decisions --data DIR [--task TASK ...] [--split NAME ...] [--jobs N]
        [--skip-crf | --only-crf] [--speed]

A cell is one split of one task: 'fold0' to 'fold4' are the paper's folds (for the embedded corpus, five
parts, each of which is the test set once), 'random0' to 'random9' are random halves. One default fit
answers for every decoding; the CRF has its regulariser cross-validated and decodes by Viterbi. A token of a
span that is labelled as outside costs ``MISSED``, any other error 1. Rows go to results/decisions.jsonl,
and finished cells are not done again. --speed times span probabilities, compared with the loop that was
used before, and labels under two decodings."""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cells import Row, Store
from experiments.commands import finish, publish, versions
from experiments.data import RESULTS, Fold, run_command
from experiments.suites import columns_suite
from structgp import StructuredGPClassifier, metrics
from structgp.answers import spans
from structgp.data import corpora
from structgp.evaluation.crf import LinearCRF

TASKS = ("basenp", "chunking", "japanesene", "recipes")
SPLITS = tuple(f"fold{k}" for k in range(5)) + tuple(f"random{k}" for k in range(10))
KEY = ("task", "split", "method")
DECODINGS = ("f1", "accuracy", "sequence", "cost")
MISSED = 5.0


@dataclass(frozen=True)
class Cell:
    """One method on one split of one task."""

    task: str
    split: str
    method: str
    data: str | None

    @property
    def key(self) -> tuple[str, ...]:
        return self.task, self.split, self.method

    @property
    def name(self) -> str:
        return " ".join(self.key)


def load_split(task: str, split: str, data: str | None) -> Fold:
    """The sequences for training and for testing."""
    k = int(split[-1])
    if task == "recipes":
        corpus = corpora.recipes()
        X = [corpus.template.expand(x) for x in corpus.X_train + corpus.X_test]
        y = corpus.y_train + corpus.y_test
        parts = np.array_split(np.random.default_rng(0).permutation(len(X)), 5)
        train, test = np.concatenate([*parts[: k % 5], *parts[k % 5 + 1 :]]), parts[k % 5]
    else:
        raw = columns_suite(task, data)
        X, y = [raw.template.expand(x) for x in raw.X], raw.y
        train, test = raw.folds[k % 5]
    if split.startswith("random"):
        train, test = np.array_split(np.random.default_rng([1, k]).permutation(len(X)), 2)
    return Fold(*([items[i] for i in part] for part in (train, test) for items in (X, y)))


def run_cell(cell: Cell) -> Row:
    """Fits once, and scores every decoding on the test set."""
    fold, began = load_split(cell.task, cell.split, cell.data), time.perf_counter()
    is_crf = cell.method == "linear CRF"
    model: Any = (LinearCRF() if is_crf else StructuredGPClassifier()).fit(fold.X, fold.y)
    row: Row = dict(zip(KEY, cell.key, strict=True)) | {"seconds": time.perf_counter() - began}
    row["nll"] = metrics.token_nll(fold.y_test, model.predict_marginals(fold.X_test))
    costs = {label: {"O": MISSED} for label in model.classes_ if label != "O"}
    for decode in ("viterbi",) if is_crf else DECODINGS:
        if not is_crf:
            model.set_params(decode=decode, costs=costs if decode == "cost" else None)
        row[decode] = figures(fold.y_test, model.predict(fold.X_test))
    if not is_crf:
        plan = model.training_log_["plan"]
        names = ("constraints", "decode", "threshold", "data_weight")
        row |= {name: plan[name]["value"] for name in names if name in plan}
    return row | {"versions": versions()}


def figures(y: Sequence[Sequence[str]], found: Sequence[Sequence[str]]) -> dict[str, float]:
    """F1, precision, recall and error in per cent, and the cost per token."""
    scores = metrics.span_scores(y, found)
    pairs = [pair for truth, guess in zip(y, found, strict=True) for pair in zip(truth, guess, strict=True)]
    cost = sum((MISSED if guess == "O" else 1.0) * (truth != guess) for truth, guess in pairs)
    return {
        "f1": 100 * scores.f1,
        "precision": 100 * scores.precision,
        "recall": 100 * scores.recall,
        "error": 100 * metrics.token_error(y, found),
        "cost": cost / len(pairs),
    }


def table(rows: Sequence[Row]) -> str:
    """Means over folds, and how often 'f1' has the higher F1 on random splits."""
    lines = ["Span F1 in %, token error in %, cost per token; means over folds.", ""]
    lines += ["| task | decoding | F1 | error | cost | NLL | folds |", "|---|---|---|---|---|---|---|"]
    for task in TASKS:
        here = [row for row in rows if row["task"] == task]
        for decode in (*DECODINGS, "viterbi"):
            found = [row for row in here if decode in row and row["split"].startswith("fold")]
            if found:
                means = [statistics.mean(row[decode][k] for row in found) for k in ("f1", "error", "cost")]
                nll = statistics.mean(row["nll"] for row in found)
                name = "CRF, viterbi" if decode == "viterbi" else decode
                cells = "{:.2f} | {:.2f} | {:.3f}".format(*means)
                lines.append(f"| {task} | {name} | {cells} | {nll:.3f} | {len(found)} |")
    lines += ["", "Random splits on which 'f1' has a higher F1 than another decoding:", ""]
    for task in TASKS:
        found = [r for r in rows if r["task"] == task and r["split"].startswith("random") and "f1" in r]
        wins = {d: sum(r["f1"]["f1"] > r[d]["f1"] for r in found) for d in ("accuracy", "sequence")}
        if found:
            lines.append(f"- {task}: " + ", ".join(f"{d} {n} of {len(found)}" for d, n in wins.items()))
    return "\n".join(lines) + "\n"


def speed(task: str, data: str | None, n: int = 600) -> str:
    """Seconds for the span probabilities of n sequences, and for the potentials that all answers need; and
    tokens labelled per second, the best of five runs."""
    fold = load_split(task, "fold0", data)
    model = StructuredGPClassifier().fit(fold.X, fold.y)
    X = (fold.X_test * (n // len(fold.X_test) + 1))[:n]
    asked = model.ask(X)
    boundaries = spans.Boundaries.of(model.model_.labels.classes)
    asked.spans(0.1)
    began = time.perf_counter()
    batches = [(len(batch.index), at) for batch, at in asked.potentials()]
    times, found = [time.perf_counter() - began], []
    for search in (spans.likely_spans, spans.spans_by_walk):
        began = time.perf_counter()
        found.append([one for _, at in batches for one in search(at, boundaries, 0.1)])
        times.append(time.perf_counter() - began)
    values = [{(i, *s[:3]): s[3] for i, each in enumerate(f) for s in each} for f in found]
    assert values[0].keys() == values[1].keys()
    apart = max(abs(p - values[1][span]) for span, p in values[0].items())
    told = f"potentials {times[0]:.2f} s, spans {times[1]:.3f} s, before {times[2]:.2f} s"
    rates = []
    for decode in ("f1", "accuracy"):
        model.set_params(decode=decode)
        seconds = min(timeit.repeat(lambda: model.predict(X), number=1, repeat=5))
        rates.append(f"'{decode}' {sum(map(len, X)) / seconds:,.0f} tokens/s")
    ratio = f"{times[2] / times[1]:.0f} times; values differ by {apart:.0e}"
    return f"{task}: {told}, {ratio}; {', '.join(rates)}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.decisions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", help="folder of the paper's data (default: STRUCTGP_DATA)")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--split", nargs="+", choices=SPLITS, default=list(SPLITS))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--results", default=str(RESULTS), help="folder to keep cells in")
    parser.add_argument("--skip-crf", action="store_true", help="without the CRF, which needs crfsuite")
    parser.add_argument("--only-crf", action="store_true", help="the CRF alone")
    parser.add_argument("--speed", action="store_true", help="time span probabilities instead")
    options = parser.parse_args(words)
    if options.speed:
        for task in options.task:
            print(speed(task, options.data), flush=True)
        return
    methods = ["structgp"] * (not options.only_crf) + ["linear CRF"] * (not options.skip_crf)
    store = Store(Path(options.results) / "decisions.jsonl", KEY)
    there = store.rows()
    cells = [Cell(t, s, m, options.data) for s in options.split for t in options.task for m in methods]
    finish(run_cell, [c for c in cells if c.key not in there], store, options.jobs, tell)
    publish(store.path, table(list(store.rows().values())), {})


def tell(row: Row) -> str:
    found = {name: row[name]["f1"] for name in (*DECODINGS, "viterbi") if name in row}
    return ", ".join(f"{name} {f1:.2f}" for name, f1 in found.items()) + f", {row['seconds']:.0f} s"


if __name__ == "__main__":
    run_command(main)
