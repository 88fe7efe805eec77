"""A pool of recipes, sessions on it, and services in processes of their own."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from structgp import StructuredGPClassifier
from structgp.data.corpora import Recipes, recipes
from structgp.data.sources import write_columns
from structgp.plan.options import Prior
from structgp.service.label_pool import Pool, read_pool

ROOT = Path(__file__).parents[2]
PATIENCE = 300.0
"""Seconds that a busy machine may take for what takes one."""
TYPES = "QTY,UNIT,NAME,PREP,COMMENT"


def _load(path: str) -> ModuleType:
    """A module of this folder that is no test; importlib mode puts none on the path."""
    name = "structgp_tests.service." + path.removesuffix(".py")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


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


class Service:
    """A command in a process of its own, and a client of it."""

    def __init__(self, *arguments: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "structgp", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http"), self.process.communicate()[1]
        self.port = int(self.url.split(":")[2].split("/")[0])
        self.token = self.url.partition("token=")[2]

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        given = {"Authorization": f"Bearer {self.token}"} | headers
        try:
            connection.request("GET" if data is None else "POST", path, data, given)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit status and standard error, of which a killed service leaves none."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        if number == signal.SIGKILL:  # what it started holds its pipes for a moment longer
            assert self.process.stdout is not None
            assert self.process.stderr is not None
            self.process.stdout.close()
            self.process.stderr.close()
            return self.process.wait(PATIENCE), ""
        errors = self.process.communicate(timeout=PATIENCE)[1]
        return self.process.returncode, errors


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
def label_browser() -> ModuleType:
    module = _load("label_browser.py")
    if module.browser.find() is None:
        pytest.skip("no Chromium on the path, and CHROMIUM names none")
    return module
