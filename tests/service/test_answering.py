"""Answers from one worker thread: those of the classifier, whoever else asks and whatever goes wrong."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from math import exp

import pytest

from structgp import StructuredGPClassifier
from structgp.data.documents import Document, token_features
from structgp.data.formats.document_reader import DocumentReader
from structgp.data.sources import ColumnReader, JsonReader
from structgp.errors import InputError, StructgpError
from structgp.plan.options import Prior
from structgp.service.answering import Answerer, _Waiting, answers_of
from structgp.service.tag_requests import documents_of, tokens_of


@pytest.fixture
def answerer(tagger):
    made = Answerer()
    made.replace(tagger, 3)
    yield made
    made.close()


def test_answers_are_those_of_the_classifier(answerer, tagger, pool):
    X = pool.features()[:6]
    labels = tagger.predict(X)
    found = answerer.ask(X, "page").result()
    uncertainty, log_probs = tagger.predict_uncertainty(X), tagger.sequence_log_probs(X, labels)
    for n, one in enumerate(found):
        assert one["labels"] == labels[n]
        assert one["model"] == 3
        assert one["probability"] == pytest.approx(exp(log_probs[n]), abs=1e-6)
        assert [u[0] for u in one["uncertainty"]] == pytest.approx(list(uncertainty.total[n]), abs=1e-6)
        p = tagger.predict_marginals([X[n]])[0]
        assert one["probabilities"] == pytest.approx(
            [at[y] for at, y in zip(p, labels[n], strict=True)], abs=1e-6
        )
        for start, stop, label, q in one["spans"]:
            assert q == pytest.approx(tagger.span_probability(X[n], start, stop, label), abs=1e-6)


def test_kept_potentials_change_no_answer(tagger, pool):
    X = pool.features()[:10]
    asked, kept = tagger.ask(X), tagger.ask(X).keeping()
    for _ in range(2):
        for a, b in zip(asked.marginals(), kept.marginals(), strict=True):
            assert a.tolist() == b.tolist()
        assert [y.tolist() for y in asked.labels()] == [y.tolist() for y in kept.labels()]
    known = [[None] * len(x) for x in X]
    known[0][0] = "B-QTY"
    for a, b in zip(asked.marginals(known), kept.marginals(known), strict=True):
        assert a.tolist() == b.tolist()
    assert kept.some([3]).kept is None


def test_one_bad_request_among_others_fails_alone(answerer, pool, monkeypatch):
    X = pool.features()
    futures = [answerer.ask([X[0]], "labels")]
    futures += [answerer.ask([[("only", "two")]], "labels"), answerer.ask([X[1]], "labels")]
    assert len(futures[0].result()) == len(futures[2].result()) == 1
    with pytest.raises(InputError):
        futures[1].result()
    with pytest.raises(InputError, match="detail"):
        answerer.ask([X[0]], "everything").result()


def test_an_event_loop_is_told_once_for_all_of_a_batch(answerer, tagger, pool, monkeypatch):
    X = [*pool.features()[:20], [("only", "two")]]
    monkeypatch.setattr(answerer, "tagger", Slow(tagger))
    told = []

    async def ask_all():
        loop = asyncio.get_running_loop()
        own = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda f, *a: (told.append(f), own(f, *a)))
        asking = [asyncio.ensure_future(answerer.answers([x], "labels")) for x in X]
        gone = asyncio.ensure_future(answerer.answers([X[0]], "labels"))
        await asyncio.sleep(0.01)
        gone.cancel()
        return await asyncio.gather(*asking, return_exceptions=True)

    *found, bad = asyncio.run(ask_all())
    assert [one["labels"] for (one,) in found] == tagger.predict(X[:-1])
    assert isinstance(bad, InputError)
    assert len(told) <= 3, "one or two for the first, one for those who came meanwhile"


class Slow:
    """A tagger that takes a moment for its first answer, so that others join."""

    def __init__(self, tagger):
        self.tagger, self.wait = tagger, 0.3

    def ask(self, X):
        time.sleep(self.wait)
        self.wait = 0.0
        return self.tagger.ask(X)

    def __getattr__(self, name):
        return getattr(self.tagger, name)


def test_a_loop_that_is_gone_stops_nobody(answerer, pool):
    X = pool.features()

    async def leave():
        asking = asyncio.ensure_future(answerer.answers([X[0]], "labels"))
        await asyncio.sleep(0)
        asking.cancel()

    asyncio.run(leave())
    assert len(answerer.ask([X[1]], "labels").result()) == 1


def test_probabilities_are_found_once(answerer, tagger, pool, monkeypatch):
    """Labels are chosen by them, and they are told with the labels."""
    points, calls = tagger.ask(pool.features()[:3]).model.local_points, []
    if points is None:
        pytest.skip("this model answers by draws")
    own = type(points).marginals
    monkeypatch.setattr(type(points), "marginals", lambda *a: (calls.append(1), own(*a))[1])
    assert len(list(answers_of(tagger, pool.features()[:3], "all"))) == 3
    assert len(calls) == 1


def test_what_waits_is_answered_before_the_end(tagger, pool):
    answerer = Answerer(tagger)
    futures = [answerer.ask([x], "labels") for x in pool.features()[:20]]
    answerer.close()
    assert [f.result()[0]["labels"] for f in futures] == tagger.predict(pool.features()[:20])
    with pytest.raises(StructgpError, match="ending"):
        answerer.ask([pool.features()[0]]).result()
    with pytest.raises(StructgpError, match="ending"):
        asyncio.run(answerer.answers([pool.features()[0]]))


def test_texts_for_models_of_documents():
    documents = [
        Document.from_text("Ann Lee left Rome.", [(0, 7, "PER"), (13, 17, "LOC")]),
        Document.from_text("Bo left Paris.", [(0, 2, "PER"), (8, 13, "LOC")]),
    ]
    X = [token_features(d.words) for d in documents]
    tagger = StructuredGPClassifier(prior=Prior(data_weight=8.0)).fit(
        X, [list(d.labels) for d in documents]
    )
    reader = DocumentReader("text")
    (found,) = documents_of(["Ann Lee left Paris."], reader)
    assert [found.text[a:b] for a, b in found.tokens] == ["Ann", "Lee", "left", "Paris", "."]
    (answer,) = answers_of(tagger, [reader.tokens(found)], "labels")
    assert answer["labels"] == tagger.predict([token_features(found.words)])[0]
    with pytest.raises(InputError, match="not trained on documents"):
        documents_of(["a"], JsonReader())
    with pytest.raises(InputError, match="list of strings"):
        documents_of([1], reader)


def test_tokens_are_checked(corpus):
    reader = ColumnReader(corpus.template, 5)
    assert tokens_of([[]], reader) == [[]]
    assert tokens_of([[["a"] * 5]], reader) == [corpus.template.expand([("a",) * 5])]
    assert tokens_of([[{"word": "a"}]], JsonReader()) == [[{"word": "a"}]]
    for given, at in (([["a"]], r"\[0\]\[0\]"), ([[["a"] * 4]], r"\[0\]\[0\]"), ([3], r"\[0\]")):
        with pytest.raises(InputError, match=rf"sequences{at}"):
            tokens_of(given, reader)
    with pytest.raises(InputError, match="not a list of tokens"):
        tokens_of([["a"]], JsonReader())


def test_a_batch_waits_for_those_who_were_just_answered(answerer, pool, monkeypatch):
    """And nobody waits alone, or for longer than is said."""
    waited = []
    own = answerer._all_here.wait
    monkeypatch.setattr(
        answerer._all_here, "wait", lambda seconds: (waited.append(seconds), own(seconds))[1]
    )
    answerer._gather(0, 10.0)
    assert waited == []
    answerer._gather(1, 0.0)
    assert waited == []
    began = time.perf_counter()
    answerer._gather(1, 60.0)
    assert time.perf_counter() - began < 30, "nobody joins any more"
    assert waited
    answerer._closed = True
    answerer._gather(1, 10.0)
    answerer._closed = False


def test_a_batch_begins_when_all_are_there(tagger, pool, monkeypatch):
    """However long the others might have been waited for."""
    monkeypatch.setattr("structgp.service.answering.PAUSE", 60.0)
    answerer = Answerer(tagger)
    answerer.ask([pool.features()[0]], "labels").result()
    began = time.perf_counter()
    gathering = threading.Thread(target=answerer._gather, args=(3, 60.0))
    monkeypatch.setattr(answerer, "_queue", queue.SimpleQueue())  # which nobody reads
    gathering.start()
    for _ in range(3):
        assert gathering.is_alive()
        answerer._put(_Waiting([pool.features()[0]], "labels", None))
    gathering.join(30)
    assert time.perf_counter() - began < 30
