"""The paper's larger experiment: basenp, 500 sequences to train on, the other 323 to test on, five splits.

    python -m experiments large --data DIR [--split K ...] [--method M ...] [--minutes N] [--quick]

The CRF has the paper's two regularisers, 0.1 and 1, and is not tuned; gp-var-s is the preset
'paper-stochastic', each fit of which gets --minutes; ours is the default fit. The paper's splits are not
published: these are drawn at random, by seed. Cells are kept in experiments/results/large.jsonl as those
of table1 are. --quick is one split without the preset.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cells import Row, Store, run_all, say
from experiments.data import RESULTS, Fold
from experiments.methods import METHODS, Fitted, Setting
from experiments.table1 import SEED, score
from structgp.baselines.crf import LinearCRF
from structgp.data.corpora import encoded_suite

TRAIN = 500
KEY = ("method", "split")
PAPER = {"crf, 0.1": 5.13, "crf, 1": 4.50, "gp-var-s": 5.14}


def _crf(c2: float) -> Callable[[Fold, Setting], Fitted]:
    def fit(fold: Fold, setting: Setting) -> Fitted:
        model = LinearCRF(c2=(c2,), random_state=setting.seed).fit(fold.X, fold.y)
        return Fitted(model, True, False, {"c2": c2})

    return fit


LARGE: dict[str, Callable[[Fold, Setting], Fitted]] = {
    "crf, 0.1": _crf(0.1),
    "crf, 1": _crf(1.0),
    "gp-var-s": METHODS["gp-var-s"],
    "ours": METHODS["ours"],
}


@dataclass(frozen=True)
class Cell:
    method: str
    split: int
    data: str | None
    setting: Setting


def main(words: Sequence[str] | None = None) -> int:
    """0 if all cells were done, 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments large",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", help="folder of the paper's data (default: STRUCTGP_DATA)")
    parser.add_argument("--split", nargs="+", type=int, choices=range(5))
    parser.add_argument("--method", nargs="+", choices=list(LARGE))
    parser.add_argument("--quick", action="store_true", help="one split, without gp-var-s")
    parser.add_argument("--minutes", type=float, default=30.0, help="limit of a gp-var-s fit")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--results", default=str(RESULTS), help="folder to keep cells in")
    options = parser.parse_args(words)
    splits = options.split or ([0] if options.quick else list(range(5)))
    methods = options.method or [m for m in LARGE if not (options.quick and m == "gp-var-s")]
    setting = Setting(False, options.minutes, SEED)
    store = Store(Path(options.results) / "large.jsonl", KEY)
    there = store.rows()
    cells = [
        Cell(method, split, options.data, setting)
        for split in splits
        for method in methods
        if not _is_done(there.get((method, split)), options.minutes)
    ]
    say([f"{len(cells)} cells to do, {options.jobs} processes"])
    failed = 0
    for cell, row in run_all(run_cell, cells, options.jobs):
        if isinstance(row, Exception):
            failed += 1
            say([f"{cell.method} {cell.split}: failed: {row}"])
            continue
        store.add(row)
        say([f"{cell.method} {cell.split}: {row['error']:.2f} %, {row['seconds']:.0f} s"])
    text = markdown(list(store.rows().values()))
    store.path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text, end="")
    return 1 if failed else 0


def _is_done(row: Row | None, minutes: float) -> bool:
    return row is not None and not (row["hit_limit"] and (row["minutes"] or minutes) < minutes)


def load_split(data: str | None, split: int) -> Fold:
    suite = encoded_suite("basenp", data)
    order = np.random.default_rng([SEED, split]).permutation(len(suite.X)).tolist()
    parts: list[Any] = []
    for places in (order[:TRAIN], order[TRAIN:]):
        parts += [[suite.X[i] for i in places], [suite.y[i] for i in places]]
    return Fold(*parts)


def run_cell(cell: Cell) -> Row:
    key = {"method": cell.method, "split": cell.split}
    fold, limited = load_split(cell.data, cell.split), cell.method == "gp-var-s"
    return key | score(fold, LARGE[cell.method], cell.setting, limited)


def markdown(rows: Sequence[Row]) -> str:
    lines = [
        "Token error in %, mean (standard deviation over splits); the paper's. * a fit stopped at its",
        "limit of time; [n] splits if fewer than five.",
        "",
        "| method | here | paper | NLL | ECE | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for method in LARGE:
        found = sorted((r for r in rows if r["method"] == method), key=lambda row: row["split"])
        if not found:
            continue
        error = [row["error"] for row in found]
        spread = f" ({statistics.stdev(error):.2f})" if len(error) > 1 else ""
        mark = "*" if any(row["hit_limit"] for row in found) else ""
        count = f" [{len(found)}]" if len(found) < 5 else ""
        means = [statistics.mean(row[name] for row in found) for name in ("nll", "ece", "seconds")]
        here = f"{statistics.mean(error):.2f}{spread}{mark}{count}"
        paper = f"{PAPER[method]:.2f}" if method in PAPER else ""
        lines.append(
            f"| {method} | {here} | {paper} | {means[0]:.3f} | {means[1]:.3f} | {means[2]:.0f} |"
        )
    return "\n".join(lines) + "\n"
