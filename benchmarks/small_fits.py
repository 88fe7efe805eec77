"""Fits to the paper's four tasks, encoded and raw: time of the default fit and of the cross-validated CRF.

    python -m benchmarks.small_fits --data DIR [--tasks basenp ...] [--folds 0] [--threads 1] [--busy 0]

Both make all their choices on the training sequences, within the measured time. Seconds are wall-clock and
CPU seconds of one process; a first fit, which loads the compiled loops, is not counted. With ``--busy 1``,
another process computes on one of the cores all the time, and with ``--threads 2``, fits distribute work to
two threads. Rows are appended to benchmarks/results/small_fits.jsonl.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from experiments.data import TASKS, load_fold

from benchmarks.conll_sized import Clock
from benchmarks.record import Options, Row, keep, table
from structgp import StructuredGPClassifier
from structgp.evaluation.crf import LinearCRF


def compare(task: str, data: str | None, fold: int, form: str) -> Row:
    given, row = load_fold(task, data, fold, columns=form == "raw"), dict[str, Any]()
    for name, model in (("ours", StructuredGPClassifier()), ("crf", LinearCRF())):
        clock = Clock()
        model.fit(given.X, given.y)
        row |= {f"{name}_{what}": value for what, value in clock.read().items()}
    ratios = {what: row[f"ours_{what}"] / row[f"crf_{what}"] for what in ("seconds", "cpu_seconds")}
    about = {"task": task, "form": form, "fold": fold}
    return about | row | {f"over_crf_{what}": value for what, value in ratios.items()}


@contextmanager
def busy_cores(n: int) -> Iterator[None]:
    """Keeps the first n cores that this process may use busy, each with a pinned process that computes
    endlessly."""
    others: list[subprocess.Popen[bytes]] = []
    cores = sorted(os.sched_getaffinity(0))
    try:
        for core in cores[:n]:
            others.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            os.sched_setaffinity(others[-1].pid, {core})
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def tables(rows: list[Row]) -> str:
    names = (
        "task",
        "form",
        "ours_cpu_seconds",
        "crf_cpu_seconds",
        "over_crf_cpu_seconds",
        "over_crf_seconds",
    )
    header = ["", "", "CPU s", "CRF's", "ratio", "ratio by the clock"]
    return table(header, [[row[name] for name in names] for row in rows])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="folder of the paper's data; by default STRUCTGP_DATA")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=TASKS)
    parser.add_argument("--folds", nargs="*", type=int, default=[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--busy", type=int, default=0, help="cores that other processes keep busy")
    given = parser.parse_args(words)
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    compare("segmentation", given.data, 0, "encoded")
    with busy_cores(given.busy):
        for fold in given.folds:
            for task in given.tasks:
                for form in ("encoded", "raw"):
                    rows.append(compare(task, given.data, fold, form) | {"busy": given.busy})
                    print(rows[-1], flush=True)
    keep("small_fits", rows, Options(threads=given.threads))
    print(tables(rows))


if __name__ == "__main__":
    main()
