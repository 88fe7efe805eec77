"""A small model of the recipes, and the pages that it makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from benchmarks.browser import Browser, find

from structgp.api.estimator import StructuredGPClassifier
from structgp.data.corpora import Recipes, recipes
from structgp.data.sources.columns import write_columns
from structgp.report import Findings, Text, examine


class Page(HTMLParser):
    """What a page holds: ``elements`` as (name, attributes), ``text`` by the id of the nearest element
    that has one, and the content of ``scripts`` and ``styles``."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self._open: list[tuple[str, str]] = []
        self.feed(source)
        self.close()
        assert not self._open, "elements left open"

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((name, attributes))
        if name not in ("br", "input", "meta"):
            self._open.append((name, attributes.get("id") or ""))

    def handle_endtag(self, name: str) -> None:
        assert self._open.pop()[0] == name

    def handle_data(self, data: str) -> None:
        name, _ = self._open[-1] if self._open else ("", "")
        if name == "script":
            self.scripts.append(data)
        elif name == "style":
            self.styles.append(data)
        elif data.strip():
            place = next((id for _, id in reversed(self._open) if id), "")
            self.text[place] = f"{self.text.get(place, '')} {data.strip()}".strip()


@pytest.fixture(scope="session")
def parse() -> type[Page]:
    return Page


@pytest.fixture(scope="session")
def corpus() -> Recipes:
    return recipes()


@pytest.fixture(scope="session")
def fitted(corpus: Recipes) -> StructuredGPClassifier:
    X = [corpus.template.expand(rows) for rows in corpus.X_train[:30]]
    estimator = StructuredGPClassifier(features="columns", n_draws=16).fit(X, corpus.y_train[:30])
    estimator.model_.extra.update({"template": corpus.template.text, "n_columns": 5})
    return estimator


def findings_of(fitted: StructuredGPClassifier, corpus: Recipes, labelled: bool) -> Findings:
    rows, y = corpus.X_test[:40], corpus.y_test[:40]
    words = [[row[0] for row in sequence] for sequence in rows]
    return examine(
        fitted,
        [corpus.template.expand(sequence) for sequence in rows],
        Text("test.conll", words, list(range(1, 41)), y if labelled else None),
        model_name="recipes.model",
        templates={str(i): line.source for i, line in enumerate(corpus.template.unigrams)},
    )


@pytest.fixture(scope="session")
def findings(fitted: StructuredGPClassifier, corpus: Recipes) -> Findings:
    return findings_of(fitted, corpus, True)


@pytest.fixture(scope="session")
def unlabelled(fitted: StructuredGPClassifier, corpus: Recipes) -> Findings:
    return findings_of(fitted, corpus, False)


@pytest.fixture(scope="session")
def two_thousand(findings: Findings) -> Findings:
    """The forty sequences fifty times over."""
    n, truth = 50, findings.truth
    assert truth is not None
    text = dataclasses.replace(
        findings.text, words=findings.text.words * n, lines=list(range(1, 40 * n + 1))
    )
    return dataclasses.replace(
        findings,
        text=text,
        predicted=findings.predicted * n,
        marginals=findings.marginals * n,
        uncertainties=[dataclasses.replace(u, values=u.values * n) for u in findings.uncertainties],
        truth=dataclasses.replace(truth, labels=truth.labels * n, log_probs=truth.log_probs * n),
    )


@pytest.fixture(scope="session")
def folder(
    fitted: StructuredGPClassifier, corpus: Recipes, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A model, a labelled file and a bare one."""
    place = tmp_path_factory.mktemp("report")
    fitted.save(place / "model")
    rows, y = corpus.X_test[:12], corpus.y_test[:12]
    pairs = [list(zip(x, labels, strict=True)) for x, labels in zip(rows, y, strict=True)]
    write_columns(place / "test.conll", [[(*r, label) for r, label in s] for s in pairs])
    write_columns(place / "bare.conll", rows)
    return place


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    program = find()
    if program is None:
        pytest.skip("no Chromium on the path, and CHROMIUM names none")
    opened = Browser(program)
    try:
        yield opened
    finally:
        opened.close()
