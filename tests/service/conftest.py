"""A pool of recipes, sessions on it, and services in processes of their own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.browser import find
from benchmarks.service import Service

from structgp import StructuredGPClassifier
from structgp.data.corpora import Recipes, recipes
from structgp.data.sources import write_columns
from structgp.plan.options import Prior
from structgp.service.label_pool import Pool, read_pool

TYPES = "QTY,UNIT,NAME,PREP,COMMENT"


@pytest.fixture(scope="session")
def corpus() -> Recipes:
    return recipes()


@pytest.fixture(scope="session")
def files(corpus: Recipes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pool of 60 lines, its template, and a model of 40 other lines."""
    place = tmp_path_factory.mktemp("service")
    write_columns(place / "pool.conll", corpus.X_test[:60])
    (place / "template").write_text(corpus.template.text, encoding="utf-8")
    return place


@pytest.fixture(scope="session")
def pool(files: Path) -> Pool:
    return read_pool([str(files / "pool.conll")], template=str(files / "template"))


@pytest.fixture(scope="session")
def truth(pool: Pool, corpus: Recipes) -> list[list[str]]:
    """The true labels of each sequence of the pool."""
    return corpus.y_test[: len(pool)]


@pytest.fixture(scope="session")
def tagger(corpus: Recipes) -> StructuredGPClassifier:
    X = [corpus.template.expand(x) for x in corpus.X_train[:40]]
    fresh = StructuredGPClassifier(features="columns", prior=Prior(data_weight=1.0))
    return fresh.fit(X, corpus.y_train[:40])


@pytest.fixture(scope="session")
def service() -> type[Service]:
    return Service


@pytest.fixture
def labelling(files: Path, tmp_path: Path) -> Iterator[Any]:
    """``start()`` starts ``structgp label`` on the pool, always with the same database."""
    started: list[Service] = []

    def start(*more: str) -> Service:
        options = ["--template", str(files / "template"), "--types", TYPES, "--no-browser"]
        db = ["--db", str(tmp_path / "labels.db")]
        started.append(Service("label", str(files / "pool.conll"), *options, *db, *more))
        return started[-1]

    yield start
    for service in started:
        service.end(signal.SIGKILL)


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the browser."""
    found = find()
    if found is None:
        pytest.skip("no Chromium on the path, and CHROMIUM names none")
    return found
