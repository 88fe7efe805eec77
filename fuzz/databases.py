"""Damaged files of labels (SQLite), which must be either read or refused in one line."""

from __future__ import annotations

import json
import random
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from fuzz import damage
from structgp.errors import InputError
from structgp.service.store import Store
from structgp.service.tag_set import TagSet

WORDS = [("pool:1", ["two", "eggs"]), ("pool:4", ["figs"]), ("pool:6", ["a", "b", "c"])]
TAGS = TagSet(("Q", "N"), False)
STATEMENTS = [
    "DROP TABLE fits",
    "DELETE FROM about WHERE key = 'tags'",
    "CREATE TRIGGER t AFTER INSERT ON about BEGIN SELECT 1; END",
    "CREATE VIEW v AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c",
    "ALTER TABLE events RENAME COLUMN labels TO other",
    "PRAGMA user_version = 9",
]


def write(path: Path) -> bytes:
    """Writes a file with labels, an undo and a fit."""
    store = Store(str(path))
    store.open_pool("digest", TAGS, WORDS)
    store.label(
        "a", "ann", "random", {0: ["Q", "N"]}, {0: {"model": 1, "labels": ["Q", "Q"], "probability": 0.5}}
    )
    store.label("b", "bob", "chosen", {1: [None], 2: ["Q", "N", None]})
    store.undo("c", "bob")
    store.label("d", "bob", "audit", {1: ["N"]})
    store.add_fit(2, {"sequences": 2, "error": {"mean": 0.1}})
    store.close()
    return path.read_bytes()


def changed(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """The file with damaged bytes, a changed value, or a changed schema; and what was done."""
    if rng.random() < 0.4:
        return damage.bytes_of(content, rng), "bytes"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "db"
        path.write_bytes(content)
        db = sqlite3.connect(path)
        try:
            db.execute("PRAGMA ignore_check_constraints = ON")
            (trigger,) = db.execute("SELECT sql FROM sqlite_master WHERE name = 'events_stay'").fetchone()
            db.execute("DROP TRIGGER events_stay")
            told = _sql(db, rng)
            db.execute(trigger)
            db.commit()
        except sqlite3.Error as error:
            told = str(error)
        db.close()
        return path.read_bytes(), told


def _sql(db: sqlite3.Connection, rng: random.Random) -> str:
    if rng.random() < 0.2:
        statement = rng.choice(STATEMENTS)
        db.execute(statement)
        return statement
    table = rng.choice(["events", "events", "about", "fits"])
    column = rng.choice([row[1] for row in db.execute(f"PRAGMA table_info({table})")])
    value = _value(db, table, column, rng)
    db.execute(
        f"UPDATE {table} SET {column} = ? WHERE rowid = (SELECT rowid FROM {table} LIMIT 1)", (value,)
    )
    return f"{table}.{column} = {str(value)[:60]!r}"


def _value(db: sqlite3.Connection, table: str, column: str, rng: random.Random) -> Any:
    """Another value for the first row; mostly damaged JSON if the value is JSON."""
    before = db.execute(f"SELECT {column} FROM {table} LIMIT 1").fetchone()[0]
    if isinstance(before, str) and before[:1] in '[{"' and rng.random() < 0.7:
        tree = {"value": json.loads(before)}
        damage.json_value(tree, rng)
        return json.dumps(tree.get("value")).replace(f'"{damage.DEEP}"', "[" * 10_000)
    values = ["", "x", "[", b"\xff\x00", 10**9, -1, 0.5, None, 2**62, "a" * 10_000, b"\xed\xa0\x80"]
    return rng.choice(values)


def answers(path: str, _: str) -> str:
    """'answered', or 'refused' with the error message; raises on anything else."""
    for beside in (f"{path}-wal", f"{path}-shm"):
        Path(beside).unlink(missing_ok=True)
    try:
        store = Store(path)
    except InputError as error:
        return _refused(error)
    try:
        tags = store.open_pool("digest", TAGS, WORDS)
        for i, event in store.labelled().items():
            assert len(event.labels) == len(WORDS[i][1]), "labels of other tokens"
            tags.checked(event.labels, len(event.labels))
        store.fits()
        store.label("e", "ann", "random", {0: ["Q", "Q"]})
        assert store.current(0, "ann").labels == ["Q", "Q"]  # type: ignore[union-attr]
        store.undo("f", "ann")
    except InputError as error:
        return _refused(error)
    finally:
        store.close()
    return "answered"


def _refused(error: InputError) -> str:
    if "\n" in str(error) or len(str(error)) > 2000:
        raise RuntimeError("an error of several lines, or a long one") from error
    return f"refused: {error}"
