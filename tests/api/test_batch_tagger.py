"""Taggers of batches: every kind of batch, pickled, read once, and in workers of Dask."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import structgp.api.batch_tagger as batch_tagger
from structgp import BatchTagger, InputError, StructuredGPClassifier, chain, layers

X = [
    [{"word": "two", "shape": "x"}, {"word": "eggs"}],
    [{"word": "3", "shape": "d"}, {"word": "large", "shape": "x"}, {"word": "onions"}],
]
Y = [["QTY", "NAME"], ["QTY", "O", "NAME"]]
NEW = [[{"word": "4", "shape": "d"}, {"word": "figs"}], [{"word": "large"}], [*X[1], *X[0]]]


@pytest.fixture(scope="module")
def fitted() -> StructuredGPClassifier:
    return StructuredGPClassifier(n_draws=16).fit(X, Y)


@pytest.fixture
def path(fitted: StructuredGPClassifier, tmp_path: Path) -> Path:
    fitted.save(tmp_path / "model.sgp")
    return tmp_path / "model.sgp"


def expected(fitted: StructuredGPClassifier, sequences: list[Any] = NEW) -> tuple[list[Any], list[Any]]:
    labels, marginals = fitted.predict(sequences), fitted.predict_marginals(sequences)
    pairs = [zip(y, p, strict=True) for y, p in zip(labels, marginals, strict=True)]
    return labels, [[p[label] for label, p in of] for of in pairs]


def assert_answers(fitted: StructuredGPClassifier, labels: Any, probabilities: Any) -> None:
    right, sure = expected(fitted)
    assert [list(y) for y in labels] == right
    for found, p in zip(probabilities, sure, strict=True):
        np.testing.assert_allclose(found, p, rtol=1e-12)


def test_lists_and_what_else_is_gone_through(fitted, path):
    tagger = pickle.loads(pickle.dumps(BatchTagger(path, all_labels=True)))
    for batch in (NEW, tuple(NEW), iter(NEW)):
        found = tagger(batch)
        assert_answers(fitted, [row["labels"] for row in found], [row["probabilities"] for row in found])
        assert tagger.classes == list(fitted.classes_)
        np.testing.assert_allclose(found[2]["marginals"], fitted.ask(NEW).marginals(None)[2])
    assert tagger([]) == []


def test_tables_of_pandas(fitted, path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"n": [1, 2, 3], "tokens": NEW}, index=[7, 8, 9])
    found = BatchTagger(path, column="tokens")(frame)
    assert list(found.columns) == ["n", "tokens", "labels", "probabilities"]
    assert list(found.index) == [7, 8, 9]
    assert list(frame.columns) == ["n", "tokens"], "the batch itself stays as it was"
    assert_answers(fitted, found["labels"], found["probabilities"])
    series = BatchTagger(path)(frame["tokens"])
    assert list(series.columns) == ["labels", "probabilities"]
    assert list(series.index) == [7, 8, 9]
    assert_answers(fitted, series["labels"], series["probabilities"])
    assert len(BatchTagger(path, column="tokens")(frame[:0])) == 0


def test_tables_of_arrow(fitted, path):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"tokens": NEW, "n": [1, 2, 3]})
    assert table["tokens"].to_pylist()[1] == [{"shape": None, "word": "large"}], "a key it never had"
    tagger = BatchTagger(path, column="tokens")
    for batch in (table, table.to_batches()[0]):
        found = tagger(batch)
        assert found.schema.names == ["tokens", "n", "labels", "probabilities"]
        assert_answers(fitted, found["labels"].to_pylist(), found["probabilities"].to_pylist())
    assert tagger(found).schema.names == found.schema.names, "columns of that name are replaced"


def test_dicts_of_arrays(fitted, path):
    cells = np.empty(len(NEW), dtype=object)
    cells[:] = [np.array(x, dtype=object) for x in NEW]
    found = BatchTagger(path)({"tokens": cells})
    assert found["tokens"] is cells
    assert_answers(fitted, found["labels"], found["probabilities"])


def test_the_model_is_read_once_per_process_and_again_when_its_file_changes(fitted, path, monkeypatch):
    read, reads = batch_tagger.read_as, []
    monkeypatch.setattr(batch_tagger, "read_as", lambda *given: reads.append(1) or read(*given))
    copies = [pickle.loads(pickle.dumps(BatchTagger(path))) for _ in range(3)]
    threads = [threading.Thread(target=copy, args=(NEW,)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 1
    os.utime(path, (1, 1))
    copies[0](NEW)
    assert len(reads) == 2


def test_parameters_of_answers_are_those_that_are_given(fitted, path):
    few, many = BatchTagger(path, n_draws=2), BatchTagger(path)
    assert few(NEW)[0]["probabilities"] != many(NEW)[0]["probabilities"]
    biased = BatchTagger(path, class_weight={"O": 1e9})(NEW)
    assert {label for row in biased for label in row["labels"]} == {"O"}
    assert_answers(
        fitted, [row["labels"] for row in many(NEW)], [row["probabilities"] for row in many(NEW)]
    )


def test_threads_are_those_that_are_asked_for_and_then_as_before(path, monkeypatch):
    before, seen = torch.get_num_threads(), []
    ask = batch_tagger.Fitted.ask
    watch = lambda self, X: seen.append(torch.get_num_threads()) or ask(self, X)  # noqa: E731
    monkeypatch.setattr(batch_tagger.Fitted, "ask", watch)
    BatchTagger(path, threads=before + 1)(NEW)
    BatchTagger(path, threads=None)(NEW)
    assert seen == [before + 1, before]
    assert torch.get_num_threads() == before


def test_mistakes_are_told(fitted, path, tmp_path):
    with pytest.raises(InputError, match="kernel: cannot be set; use one of n_draws, decode"):
        BatchTagger(path, kernel="rbf")
    with pytest.raises(InputError, match="threads: must be a positive integer or None, got 0"):
        BatchTagger(path, threads=0)
    with pytest.raises(InputError, match="column: the batch has the columns a, b; name the one"):
        BatchTagger(path)({"a": NEW, "b": NEW})
    with pytest.raises(InputError, match="'c' is not one of them: the batch has the columns a"):
        BatchTagger(path, column="c")({"a": NEW})
    missing = BatchTagger(tmp_path / "none.sgp")  # workers may see what this process does not
    with pytest.raises(InputError, match=r"none\.sgp"):
        missing(NEW)
    both = [{"a": y, "b": y} for y in Y]
    StructuredGPClassifier(structure=layers(a=chain(), b=chain()), n_draws=4).fit(X, both).save(path)
    with pytest.raises(InputError, match="does not give one label to each token"):
        BatchTagger(path)(NEW)


@pytest.mark.slow
def test_two_workers_of_dask(fitted, path):
    """Real processes, to which the tagger is sent, and a bag and a table in several partitions."""
    distributed = pytest.importorskip("distributed")
    bag = pytest.importorskip("dask.bag")
    settings = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with distributed.LocalCluster(**settings) as cluster, distributed.Client(cluster) as client:
        given = bag.from_sequence(NEW * 20, npartitions=6)
        found = given.map_partitions(BatchTagger(str(path))).compute()
        pids = client.run(lambda: os.getpid())
    assert len(set(pids.values())) == 2
    assert len(found) == 60
    assert_answers(fitted, [r["labels"] for r in found[:3]], [r["probabilities"] for r in found[:3]])
    assert found[:3] == found[57:]
