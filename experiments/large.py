"""The paper's larger experiment: basenp, 500 training sequences, the other 323 for testing, five splits.

    python -m experiments large --data DIR [--fold K ...] [--method M ...] [--minutes N] [--quick]

The CRF has the paper's two regularisers, 0.1 and 1, and one that is cross-validated; gp-var-s is the preset
'paper-stochastic', each fit of which is given --minutes; ours is the default fit. The paper's splits are
not published: these come with the data, and were drawn at random by seed. Cells are kept in
experiments/results/large.jsonl, as those of table1 are. --quick does one split, without the preset.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.cells import Row, Store
from experiments.commands import finish, is_done, parser_of, publish, tell_error
from experiments.compared import METHODS, Fitted, Setting
from experiments.data import Fold, load_fold
from experiments.figures import Dot, dots, figure
from experiments.suites import data_folder
from experiments.table1 import SEED, mean_and_spread, score, summary
from structgp.evaluation.crf import LinearCRF

TASK = "basenp_large"
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
    "crf, tuned": METHODS["crf"],
    "gp-var-s": METHODS["gp-var-s"],
    "ours": METHODS["ours"],
}


@dataclass(frozen=True)
class Cell:
    method: str
    split: int
    data: str | None
    setting: Setting

    @property
    def name(self) -> str:
        return f"{self.method} {self.split}"


def main(words: Sequence[str] | None = None) -> int:
    """0 if all cells were done, 1 if one of them failed."""
    parser = parser_of("large", __doc__)
    parser.add_argument(
        "--fold", "--split", nargs="+", type=int, choices=range(5), help="splits; default: all"
    )
    parser.add_argument("--method", nargs="+", choices=list(LARGE))
    parser.add_argument("--minutes", type=float, default=30.0, help="limit of a gp-var-s fit")
    options = parser.parse_args(words)
    data_folder(options.data)
    splits = options.fold or ([0] if options.quick else list(range(5)))
    methods = options.method or [m for m in LARGE if not (options.quick and m == "gp-var-s")]
    setting = Setting(False, options.minutes, SEED)
    store = Store(Path(options.results) / "large.jsonl", KEY)
    there = store.rows()
    cells = [
        Cell(method, split, options.data, setting)
        for split in splits
        for method in methods
        if not is_done(there.get((method, split)), options.minutes)
    ]
    failed = finish(run_cell, cells, store, options.jobs, tell_error)
    rows = list(store.rows().values())
    publish(store.path, markdown(rows), {"large": plot(rows)})
    return 1 if failed else 0


def run_cell(cell: Cell) -> Row:
    key = {"method": cell.method, "split": cell.split}
    fold, limited = load_fold(TASK, cell.data, cell.split), cell.method == "gp-var-s"
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
        found = cells_of(rows, method)
        if not found:
            continue
        means = [statistics.mean(row[name] for row in found) for name in ("nll", "ece", "seconds")]
        paper = f"{PAPER[method]:.2f}" if method in PAPER else ""
        lines.append(
            f"| {method} | {summary(found)} | {paper} | {means[0]:.3f} | {means[1]:.3f} | {means[2]:.0f} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Row]) -> str:
    """A figure with the errors found here, and the paper's as hollow dots."""
    there = {method: cells_of(rows, method) for method in LARGE}
    shown = [Dot(method, *mean_and_spread(found)) for method, found in there.items() if found]
    shown += [Dot(method, error, hollow=True) for method, error in PAPER.items()]
    panel = dots("basenp, 500 sequences", "token error, %", list(LARGE), shown)
    return figure([panel], ["here", "", "", "", "the paper's"])


def cells_of(rows: Sequence[Row], method: str) -> list[Row]:
    """The rows of one method, sorted by split."""
    return sorted((r for r in rows if r["method"] == method), key=lambda row: row["split"])
