"""The loop: what comes next, audits, what is saved, and what the background finds."""

from __future__ import annotations

import random
from math import exp

import pytest

from structgp.errors import InputError
from structgp.service import session as loop
from structgp.service.answering import Answerer
from structgp.service.reasons import why
from structgp.service.refit import Refitter
from structgp.service.session import Session
from structgp.service.store import Store
from structgp.service.tag_set import TagSet

TAGS = TagSet(("QTY", "UNIT", "NAME", "PREP", "COMMENT"), True)


class Still:
    """A background that keeps its tasks and does nothing until ``work``."""

    def __init__(self, refitter: Refitter) -> None:
        self.tasks, self.busy, self.refitter, self.listener = [], None, refitter, None

    def start(self, task):
        if self.busy is not None or task["do"] == "warm":
            return False
        self.busy = task["do"]
        self.tasks.append(task)
        return True

    def work(self):
        task, self.busy = self.tasks.pop(0), None
        for name, value in self.refitter.run(task):
            self.listener(name, value)
        self.listener("done", task["do"])


@pytest.fixture
def opened(pool, tmp_path):
    """``opened(tagger)``: a session with this model."""
    made = []

    def make(tagger=None, seed=0):
        store = Store(str(tmp_path / "labels.db"))
        words = [(pool.place(i), s.words) for i, s in enumerate(pool.sequences)]
        tags = store.open_pool(pool.digest, TAGS, words)
        answerer = Answerer(tagger, None if tagger is None else 1)
        refitter = Refitter(pool.features(), str(tmp_path / "model.sgp"), {"features": "columns"})
        made.append(Session(pool, store, tags, answerer, Still(refitter), seed))
        return made[-1]

    yield make
    for session in made:
        session.answerer.close()
        session.store.close()


def label(session, shown, truth, who="ann", n=[0]):  # noqa: B006
    n[0] += 1
    return session.accept(f"r{n[0]}", who, shown["sequence"], truth[shown["sequence"]], shown["stream"])


def test_cold_start_is_random_and_never_repeats(opened, truth):
    session, seen = opened(), []
    for _ in range(len(truth)):
        shown = session.next("ann")
        assert shown["stream"] == "random"
        assert shown["suggestion"] is None
        assert session.next("ann") == shown, "the same again until it is labelled"
        seen.append(shown["sequence"])
        label(session, shown, truth)
    assert sorted(seen) == list(range(len(truth)))
    assert seen != sorted(seen)
    assert session.next("ann") == {"sequence": None}
    assert session.undo("u", "ann")["sequence"] == seen[-1]
    assert session.next("ann")["sequence"] == seen[-1]


def test_two_annotators_get_different_sequences(opened, truth):
    session = opened()
    a, b = session.next("ann"), session.next("bo")
    assert a["sequence"] != b["sequence"]
    label(session, a, truth, "ann")
    assert session.next("bo") == b
    assert session.next("ann")["sequence"] not in (a["sequence"], b["sequence"])


def test_audits_hide_the_suggestion_and_keep_it(opened, truth, tagger):
    session = opened(tagger)
    answers = tagger.predict(session.pool.features())
    audited = 0
    for _ in range(30):
        shown = session.next("ann")
        hidden = shown["stream"] == "audit"
        assert (shown["suggestion"] is None) == hidden
        (event,) = label(session, shown, truth)
        assert event.stream == shown["stream"]
        assert event.suggested["labels"] == answers[shown["sequence"]]
        audited += hidden
    assert 1 <= audited <= 9
    found = session.status()["audit"]
    assert found["sequences"] == audited
    assert found["low"] <= found["error"] <= found["high"]


def test_a_fit_takes_what_was_labelled_and_the_page_goes_on(opened, truth, tagger):
    session = opened()
    for k in range(loop.ENOUGH):
        assert session.background.busy is None
        shown = session.next("ann")
        if k == 0:
            session.accept("skip", "ann", shown["sequence"], [None] * len(shown["words"]), "random")
            shown = session.next("ann")
        label(session, shown, truth)
    assert session.background.busy == "fit"
    task = session.background.tasks[0]
    assert len(task["labels"]) == loop.ENOUGH, "a sequence of which nothing is known teaches nothing"
    shown = session.next("ann")
    label(session, shown, truth)
    assert len(session.background.tasks) == 1, "one task at a time"
    session.background.work()
    assert session.answerer.number == 1
    assert session.status()["curve"][0]["sequences"] == loop.ENOUGH
    assert session.background.busy == "fit", "the label that came meanwhile"
    streams = set()
    for _ in range(12):
        shown = session.next("ann")
        streams.add(shown["stream"])
        label(session, shown, truth)
    assert "chosen" in streams
    assert session.status()["model"]["f1"]["low"] < session.status()["model"]["f1"]["high"]
    why_it = why(session, 0, 0, None, 100)
    assert sum(p["score"] for p in why_it["parts"]) == pytest.approx(why_it["log_odds"])
    assert {"words", "label", "score"} <= why_it["witnesses"][0].keys()


def test_wrong_labels_are_in_the_queue_of_disagreements(opened, truth):
    session = opened()
    wrong = None
    for _ in range(40):
        shown = session.next("ann")
        labels = list(truth[shown["sequence"]])
        if wrong is None and labels[0] == "B-QTY" and session.store.last > 20 and labels[1:2] == ["B-UNIT"]:
            wrong, labels[0] = shown["sequence"], "B-COMMENT"
        session.accept(f"r{session.store.last}", "ann", shown["sequence"], labels, shown["stream"])
    assert wrong is not None
    session.background.tasks[:], session.background.busy = [], None
    session._fitted_n, session._fitted_version = 0, -1
    session.refit_if_due()
    session.background.work()
    found = session.disagreements()
    assert wrong in [d["sequence"] for d in found]
    (mine,) = [d for d in found if d["sequence"] == wrong and d["token"] == 0]
    assert (mine["given"], mine["model"]) == ("B-COMMENT", "B-QTY")
    assert mine["p"]["given"] < mine["p"]["model"]
    session.accept("review", "ann", wrong, truth[wrong], "review")
    assert wrong not in [d["sequence"] for d in session.disagreements()]


def test_bulk_takes_what_the_model_is_sure_of(opened, truth, tagger, pool):
    session = opened(tagger)
    session.background.refitter.tagger = tagger
    assert not session.bulk(0.1)["ready"]
    with pytest.raises(InputError, match="still reading"):
        session.accept_bulk("b", "ann", 0.1)
    session.background.work()
    found = session.bulk(0.1)
    X = pool.features()
    labels = tagger.predict(X)
    log_probs = tagger.sequence_log_probs(X, labels)
    sure = {i for i, value in enumerate(log_probs) if exp(value) >= 0.1}
    assert found["ready"]
    assert 0 < found["sequences"] == len(sure) < len(X)
    events = session.accept_bulk("b", "ann", 0.1)
    assert {e.sequence for e in events} == sure
    assert all(e.labels == labels[e.sequence] and e.stream == "bulk" for e in events)
    assert session.training_labels() == {}, "the model's own word teaches it nothing"
    assert session.undo("u", "ann")["undone"] == len(sure)
    assert session.store.standing() == []
    for least in (0, 1.5, True, "x"):
        with pytest.raises(InputError, match="least"):
            session.bulk(least)


def test_a_failed_fit_is_said_and_the_page_goes_on(opened, truth):
    session = opened()
    session.hear("error", "InputError: something")
    assert session.status()["error"] == "InputError: something"
    label(session, session.next("ann"), truth)
    session.hear("model", {"path": "/nowhere.sgp", "sequences": 1, "seconds": 0.1})
    assert "/nowhere.sgp" in session.status()["error"]


def test_undo_shows_the_labels_that_were_given(opened, truth, tagger):
    session = opened(tagger)
    shown = session.next("ann")
    label(session, shown, truth)
    session.next("ann")
    again = session.undo("u1", "ann")
    assert again["sequence"] == shown["sequence"]
    assert again["labels"] == truth[shown["sequence"]]
    assert not session.store.is_labelled(shown["sequence"])
    assert session.next("ann")["sequence"] == shown["sequence"]
    assert session.undo("u2", "ann") is None
    assert session.undo("u3", "bo") is None


def test_random_order_depends_on_the_seed(opened, truth):
    first = opened(seed=1)._order
    assert sorted(first) == sorted(range(len(truth)))
    assert first == random.Random(1).sample(range(len(truth)), len(truth))
