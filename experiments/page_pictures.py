"""Pictures of the labelling page and of the report, as a browser shows them. Needs Chromium.

    python -m experiments.page_pictures [-o docs/_static] [--all]

label-page.png shows the page after 60 recipe lines have been labelled over HTTP, by somebody who knows the
true labels and makes one mistake. report-page.png shows the report of the demo's model. With --all, there
are also full-length pictures of both in light and dark themes, 1280 and 400 pixels wide.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.browser import Browser, find
from benchmarks.label_browser import LabelPage
from benchmarks.service import Service

from structgp import StructuredGPClassifier
from structgp.data.corpora import recipes
from structgp.data.sources import write_columns

LABELLED = 60
SLIP = 30
"""Number of the line whose tokens are all labelled as the name, which the model should contradict."""
STATIC = Path(__file__).parents[1] / "docs" / "_static"
LOOKS = [(width, dark) for width in (1280, 400) for dark in (False, True)]


def label_some(service: Service, y: Sequence[Sequence[str]]) -> None:
    """Labels lines in the page's order, and waits until the model has learned from all of them."""
    shown = service.ask("/next?annotator=ann")[1]
    for n in range(LABELLED):
        labels = list(y[shown["sequence"]])
        if n == SLIP:
            labels = ["B-NAME"] + ["I-NAME"] * (len(labels) - 1)
        given = {"request": str(n), "annotator": "ann", "sequence": shown["sequence"], "labels": labels}
        shown = service.ask("/labels", given)[1]["next"]
        if n % 5 == 4 and n > 8:  # people are slow enough for the model to learn meanwhile
            settle(service, n + 1)
    settle(service, LABELLED)


def settle(service: Service, n: int) -> None:
    while True:
        status = service.ask("/status")[1]
        if status["busy"] is None and (status["model"] or {}).get("sequences") == n:
            return
        time.sleep(0.2)


def open_label_page(page: LabelPage, service: Service) -> None:
    """Opens a chosen line with suggestions, and the reasons for the label that the model is least sure
    of."""
    page.visit(service.url + "&annotator=ann")
    page.until("document.querySelector('#curve svg') && document.querySelector('#alternatives .p')")
    page.press(".")
    page.until("document.querySelectorAll('#reasons tr').length > 4")


def label_pictures(program: str, folder: Path, everything: bool) -> None:
    corpus = recipes()
    X, y = [*corpus.X_train, *corpus.X_test], [*corpus.y_train, *corpus.y_test]
    with tempfile.TemporaryDirectory() as place:
        write_columns(Path(place) / "recipes.conll", X)
        (Path(place) / "template").write_text(corpus.template.text, encoding="utf-8")
        options = ["--template", "template", "--types", "QTY,UNIT,NAME,PREP,COMMENT"]
        service = Service("label", "recipes.conll", *options, "--no-browser", folder=place)
        page = LabelPage(program, 300.0)
        try:
            label_some(service, y)
            page.window(1280, 800)
            open_label_page(page, service)
            page.screenshot(folder / "label-page.png", whole=False)
            for width, dark in LOOKS if everything else ():
                page.window(width, dark=dark)
                open_label_page(page, service)
                page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
                page.until("document.querySelector('#doubts li')")
                page.screenshot(folder / f"label-{width}-{'dark' if dark else 'light'}.png")
            assert page.errors == [], page.errors
        finally:
            page.close()
            service.end()


def report_pictures(program: str, folder: Path, everything: bool) -> None:
    corpus = recipes()
    expand = corpus.template.expand
    tagger = StructuredGPClassifier(features="columns").fit(
        list(map(expand, corpus.X_train)), corpus.y_train
    )
    browser: Any = Browser(program)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "report.html"
        words = [[row[0] for row in rows] for rows in corpus.X_test]
        tagger.report(
            list(map(expand, corpus.X_test)),
            corpus.y_test,
            path,
            words=words,
            name="recipes",
            model_name="demo",
        )
        try:
            browser.window(1280, 1160)
            browser.open(path)
            browser.screenshot(folder / "report-page.png", whole=False)
            for width, dark in LOOKS if everything else ():
                browser.window(width, dark=dark)
                browser.open(path)
                browser.screenshot(folder / f"report-{width}-{'dark' if dark else 'light'}.png")
        finally:
            browser.close()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.page_pictures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-o", "--output", type=Path, default=STATIC, help="folder")
    parser.add_argument("--all", action="store_true", help="every theme and width")
    options = parser.parse_args(words)
    program = find()
    if program is None:
        sys.exit("experiments: no Chromium on the path, and CHROMIUM names none")
    options.output.mkdir(parents=True, exist_ok=True)
    label_pictures(program, options.output, options.all)
    report_pictures(program, options.output, options.all)


if __name__ == "__main__":
    main()
