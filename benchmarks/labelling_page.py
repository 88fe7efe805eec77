"""The labelling page on a large pool: the time from accepting a sequence to the next one, during a fit.

    python -m benchmarks.labelling_page [--pool 10000] [--labelled 200] [--accepted 100] [--pause 0.5]

The pool consists of the recipe lines, repeated. Lines are labelled with their true labels over HTTP; then
others are accepted in a browser (if there is Chromium), each after a pause, and the time from the key to
the first frame that shows the next line is measured. Only lines that are accepted while a fit is under way
count. A refit is timed from accepting to the new model's first suggestions; the longest fit also chose its
settings anew.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.browser import find
from benchmarks.label_browser import LabelPage
from benchmarks.service import Service
from structgp.data.corpora import recipes
from structgp.data.sources import write_columns

TYPES = "QTY,UNIT,NAME,PREP,COMMENT"


class Annotator:
    """An annotator who gives the true labels, over HTTP."""

    def __init__(self, service: Service, y: Sequence[Sequence[str]]) -> None:
        self.service, self.y, self.n = service, y, 0
        self.shown = service.ask("/next?annotator=ann")[1]

    def accept(self) -> float:
        """Labels the current line; returns the seconds until the next line has arrived."""
        i, self.n = self.shown["sequence"], self.n + 1
        given = {
            "request": str(self.n),
            "annotator": "ann",
            "sequence": i,
            "labels": self.y[i % len(self.y)],
        }
        began = time.perf_counter()
        status, answer = self.service.ask("/labels", given)
        passed = time.perf_counter() - began
        assert status == 200, answer
        self.shown = answer["next"]
        return passed

    def settle(self) -> None:
        """Waits until no fit is under way."""
        while self.service.ask("/status")[1]["busy"] is not None:
            time.sleep(0.05)


def while_fitting(service: Service, accept: Callable[[], float], n: int, pause: float) -> list[float]:
    """Seconds for each of n lines that were accepted while a fit was under way."""
    found: list[float] = []
    while len(found) < n:
        time.sleep(pause)
        busy = service.ask("/status")[1]["busy"]
        passed = accept()
        found += [passed] if busy == "fit" else []
    return found


def refits(annotator: Annotator, n: int) -> list[tuple[float, float]]:
    """(seconds until the new model makes suggestions, processor seconds of the fit) for n refits."""
    found = []
    while len(found) < n:
        annotator.settle()
        before = annotator.service.ask("/status")[1]["model"]["model"]
        while annotator.service.ask("/status")[1]["busy"] is None:
            annotator.accept()
        began = time.perf_counter()
        while (model := annotator.service.ask("/status")[1]["model"])["model"] == before:
            time.sleep(0.02)
        found.append((time.perf_counter() - began, model["seconds"]))
    return found


def shown(name: str, seconds: list[float]) -> str:
    p50, p95, most = (1000 * np.percentile(seconds, q) for q in (50, 95, 100))
    return (
        f"{name}: {len(seconds)} accepted, median {p50:.0f} ms, 95th percentile {p95:.0f}, most {most:.0f}"
    )


def longest(db: Path) -> str:
    with closing(sqlite3.connect(db)) as opened:
        rows = opened.execute("SELECT sequences, figures FROM fits").fetchall()
    seconds, n = max((json.loads(figures)["seconds"], n) for n, figures in rows)
    return f"the longest fit: {seconds:.1f} s of processor, with {n} labelled lines"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pool", type=int, default=10_000, help="sequences")
    parser.add_argument("--labelled", type=int, default=200, help="before anything is timed")
    parser.add_argument("--accepted", type=int, default=100, help="while a fit is under way")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds before each")
    given = parser.parse_args(words)
    corpus = recipes()
    X, y = [*corpus.X_train, *corpus.X_test], [*corpus.y_train, *corpus.y_test]
    with tempfile.TemporaryDirectory() as folder:
        write_columns(Path(folder) / "pool.conll", list(islice(cycle(X), given.pool)))
        (Path(folder) / "template").write_text(corpus.template.text, encoding="utf-8")
        options = ["--template", "template", "--types", TYPES, "--no-browser"]
        service = Service("label", "pool.conll", *options, folder=folder)
        try:
            measure(service, y, given)
            print(longest(Path(folder) / "pool.conll.labels.db"))
        finally:
            service.end()
    return 0


def measure(service: Service, y: Sequence[Sequence[str]], given: Any) -> None:
    annotator = Annotator(service, y)
    while annotator.n < given.labelled:
        annotator.accept()
    found = refits(annotator, 3)
    n = service.ask("/status")[1]["model"]["sequences"]
    for passed, cpu in found:
        print(f"refit with {n} labelled lines: {passed:.1f} s until it suggests, {cpu:.1f} s of processor")
    print(
        shown("over HTTP", while_fitting(service, annotator.accept, given.accepted, given.pause)),
        flush=True,
    )
    program = find()
    if program is None:
        print("no Chromium on the path, and CHROMIUM names none")
        return
    page = LabelPage(program, 300.0)
    try:
        page.window(1280)
        page.visit(service.url + "&annotator=bo")
        found = while_fitting(service, lambda: page.accept() / 1000, given.accepted, given.pause)
        print(shown("in the browser", found), flush=True)
    finally:
        page.close()


if __name__ == "__main__":
    sys.exit(main())
