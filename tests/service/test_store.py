"""The log of events: what stands in memory is what the file says, whatever was done in whatever order."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from structgp.errors import InputError
from structgp.service.store import Store, StoreError
from structgp.service.tag_set import TagSet

TAGS = TagSet(("A", "B"), True)
POOL = [(f"pool:{i}", ["two", "eggs"]) for i in range(4)]


def opened(path: Path, digest: str = "d") -> Store:
    store = Store(str(path))
    store.open_pool(digest, TAGS, POOL)
    return store


def in_file(path: Path) -> dict[tuple[int, str], list[str | None]]:
    """The view of the file, as any other tool reads it."""
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT sequence, annotator, labels FROM labels").fetchall()
    db.close()
    return {(s, a): json.loads(labels) for s, a, labels in rows}


actions = st.lists(
    st.tuples(
        st.sampled_from(["label", "undo", "bulk", "again"]),
        st.integers(0, 3),
        st.sampled_from(["ann", "bo"]),
        st.lists(st.sampled_from(["O", "B-A", None]), min_size=2, max_size=2),
    ),
    max_size=12,
)


@settings(max_examples=15, deadline=None)
@given(actions)
def test_memory_file_and_a_plain_replay_agree(steps):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "labels.db"
        store, stack = opened(path), []
        for n, (what, sequence, annotator, labels) in enumerate(steps):
            if what == "undo":
                own = [k for k, (who, _) in enumerate(stack) if who == annotator]
                undone = store.undo(f"r{n}", annotator)
                assert len(undone.events) == (len(stack[own[-1]][1]) if own else 0)
                if own:
                    del stack[own[-1]]
                continue
            given_labels = {sequence: labels}
            if what == "bulk":
                given_labels |= {(sequence + 1) % 4: labels}
            store.label(f"r{n}", annotator, "bulk" if what == "bulk" else "chosen", given_labels)
            if what == "again":
                store.label(f"r{n}", annotator, "chosen", {sequence: ["B-B", "B-B"]})
            stack.append((annotator, given_labels))
        expected = {(s, who): y for who, given_labels in stack for s, y in given_labels.items()}
        assert in_file(path) == expected
        again = opened(path)
        for kept in (store, again):
            found = {(s, who): kept.current(s, who) for s in range(4) for who in ("ann", "bo")}
            assert {k: e.labels for k, e in found.items() if e is not None} == expected
        assert [e.id for e in again.standing()] == [e.id for e in store.standing()]
        store.close()
        again.close()


def test_events_are_never_changed(tmp_path):
    store = opened(tmp_path / "db")
    store.label("r", "ann", "chosen", {0: ["O", "O"]})
    for statement in ("UPDATE events SET annotator = 'bo'", "DELETE FROM events"):
        with sqlite3.connect(tmp_path / "db") as db, pytest.raises(sqlite3.IntegrityError, match="never"):
            db.execute(statement)
        db.close()
    store.close()


def test_a_failed_bulk_leaves_nothing(tmp_path):
    store = opened(tmp_path / "db")
    with pytest.raises(StoreError, match="FOREIGN KEY constraint failed"):
        store.label("r", "ann", "bulk", {0: ["O", "O"], 99: ["O", "O"]})
    assert store.standing() == []
    assert store.last == 0
    store.label("r", "ann", "bulk", {0: ["O", "O"]})
    assert store.last == 1
    store.close()


def test_full_synchronisation_and_wal(tmp_path):
    store = opened(tmp_path / "db")
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)
    store.close()


def test_another_pool_or_another_file_is_refused(tmp_path):
    opened(tmp_path / "db").close()
    with pytest.raises(InputError, match="another pool"):
        opened(tmp_path / "db", "other")
    (tmp_path / "text").write_text("not a database, but long enough to be read as one" * 30)
    with pytest.raises(InputError, match="cannot hold labels"):
        Store(str(tmp_path / "text"))
    with sqlite3.connect(tmp_path / "else") as db:
        db.execute("CREATE TABLE other (x)")
    db.close()
    with pytest.raises(InputError, match="something else"):
        Store(str(tmp_path / "else"))


def test_types_may_be_added_and_kinds_not_changed(tmp_path):
    opened(tmp_path / "db").close()
    store = Store(str(tmp_path / "db"))
    assert store.open_pool("d", TagSet(("B", "C"), True), POOL).types == ("A", "B", "C")
    with pytest.raises(InputError, match="types of spans"):
        store.open_pool("d", TagSet(("B", "C"), False), POOL)
    store.close()


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        (["O"], "1 labels for 2 tokens"),
        ("O O", "a str for 2 tokens"),
        (["B-a", "O"], "did you mean 'B-"),
        (["O", "I-A"], "after 'O'"),
        (["B-B", "I-A"], "after 'B-B'"),
        (["I-A", "O"], "after 'O'"),
    ],
)
def test_labels_are_checked(labels, problem):
    with pytest.raises(InputError, match=problem):
        TAGS.checked(labels, 2)


def test_a_type_is_not_yet_a_label():
    with pytest.raises(InputError, match="did you mean 'B-PERSON'"):
        TagSet(("PERSON", "PLACE"), True).checked(["PERSON"], 1)


def test_unknown_is_not_outside():
    assert TAGS.checked([None, "I-A"], 2) == [None, "I-A"]
    assert TAGS.tags == ("O", "B-A", "I-A", "B-B", "I-B")
    assert TagSet.from_labels(["O", "B-A", "I-A", None], "file").types == ("A",)
    assert TagSet.from_labels(["O", "N", "V"], "file") == TagSet(("N", "O", "V"), False)


WRITER = """
import sys
from structgp.service.store import Store, StoreError
store = Store(sys.argv[1])
for k in range(100_000):
    request = f"{sys.argv[2]}-{k}"
    store.label(request, "ann", "chosen", {k % 4: ["B-A", None]})
    if k % 5 == 4:
        store.undo(request + "-undo", "ann")
        request += "-undo"
    print(request, flush=True)
"""


def kill_writers(folder: Path, n: int) -> None:
    """A process writes and says what has been acknowledged, until it is killed."""
    opened(folder / "db").close()
    acknowledged: list[str] = []
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    for round in range(n):
        command = [sys.executable, "-c", WRITER, str(folder / "db"), str(round)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
            assert writer.stdout is not None
            first = writer.stdout.readline()
            time.sleep(0.05 * (round * 0.618 % 1))
            writer.kill()
            acknowledged += [
                first.strip(),
                *(line.strip() for line in writer.stdout if line.endswith("\n")),
            ]
        with sqlite3.connect(folder / "db") as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            found = {request for (request,) in db.execute("SELECT request FROM events")}
        db.close()
        assert set(acknowledged) <= found
    assert len(acknowledged) > 2 * n


def test_killed_writers_lose_nothing(tmp_path):
    kill_writers(tmp_path, 4)


@pytest.mark.slow
def test_fifty_killed_writers_lose_nothing(tmp_path):
    kill_writers(tmp_path, 50)
