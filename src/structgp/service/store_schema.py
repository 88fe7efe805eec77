"""The tables of the file that holds the labels. Rows of ``events`` are never changed or removed."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from typing import Any

from structgp.data.json_form import NUMBER, WHOLE, FormError, check_form

VERSION = 1

SCHEMA = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL);

CREATE TABLE sequences (
  id    INTEGER PRIMARY KEY,  -- place in the pool, from 0
  place TEXT NOT NULL,        -- file and line
  words TEXT NOT NULL         -- JSON list of strings
);

CREATE TABLE events (
  id        INTEGER PRIMARY KEY AUTOINCREMENT,
  request   TEXT NOT NULL,    -- chosen by who asked; the same again changes nothing
  time      TEXT NOT NULL,    -- UTC, ISO 8601
  annotator TEXT NOT NULL,
  kind      TEXT NOT NULL CHECK (kind IN ('label', 'undo')),
  sequence  INTEGER NOT NULL REFERENCES sequences (id),
  stream    TEXT NOT NULL,    -- why this sequence: chosen, random, audit, search, review, bulk, file
  labels    TEXT,             -- JSON list, null for 'don't know'; NULL for an undo
  undoes    INTEGER UNIQUE REFERENCES events (id),
  suggested TEXT,             -- JSON: model, labels, probability, as they were when the sequence was shown
  UNIQUE (request, sequence),
  CHECK ((kind = 'label') = (labels IS NOT NULL)),
  CHECK ((kind = 'undo') = (undoes IS NOT NULL))
);
CREATE INDEX events_of_sequence ON events (sequence, annotator, id);

CREATE TRIGGER events_stay BEFORE UPDATE ON events
BEGIN SELECT RAISE(ABORT, 'events are never changed'); END;
CREATE TRIGGER events_last BEFORE DELETE ON events
BEGIN SELECT RAISE(ABORT, 'events are never removed'); END;

CREATE TABLE fits (
  id        INTEGER PRIMARY KEY AUTOINCREMENT,
  time      TEXT NOT NULL,
  sequences INTEGER NOT NULL, -- labelled ones that it was fitted to
  figures   TEXT NOT NULL     -- JSON: seconds, expected error and F1 with intervals
);

-- The latest labels that each annotator gave each sequence and did not take back.
CREATE VIEW labels AS
SELECT e.id, e.sequence, e.annotator, e.time, e.stream, e.labels
FROM events e
WHERE e.id = (
  SELECT max(n.id) FROM events n
  WHERE n.kind = 'label' AND n.sequence = e.sequence AND n.annotator = e.annotator
    AND NOT EXISTS (SELECT 1 FROM events u WHERE u.undoes = n.id)
);
"""

LABELS = [(None, str)]
SUGGESTED = {"model": (None, WHOLE), "labels": [str], "probability": (None, NUMBER)}
TAG_SET = {"types": [str], "spans": bool}
FIGURES = {"error?": (None, {"mean": NUMBER}), "f1?": (None, {"mean": NUMBER})}
"""Expected forms of the JSON values in the tables."""


def value_of(text: Any, form: Any, place: str) -> Any:
    """The JSON value in a cell; FormError if it does not have this form."""
    try:
        found = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise FormError(f"{place} is not JSON") from None
    check_form(found, form, place)
    return found


def statements(script: str) -> Iterator[str]:
    """The statements of a script, one by one: ``executescript`` would end the transaction."""
    part = ""
    for line in script.splitlines():
        part += line + "\n"
        if sqlite3.complete_statement(part):
            yield part
            part = ""


def check_schema(db: sqlite3.Connection) -> None:
    """Raises FormError if tables, views and triggers differ from those of ``SCHEMA``: a trigger or view in
    a file from somebody else could do anything."""
    fresh = sqlite3.connect(":memory:")
    fresh.executescript(SCHEMA)
    query = "SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_stat%'"
    expected, found = ({(*at, _plain(sql)) for *at, sql in some.execute(query)} for some in (fresh, db))
    fresh.close()
    if expected != found:
        name = sorted(str(name) for _, name, _ in expected ^ found)[0]
        raise FormError(f"{name[:60]} is not what structgp makes")


def _plain(sql: str | None) -> str:
    """The statement without comments and line breaks."""
    return " ".join(re.sub(r"--[^\n]*", "", sql or "").split())
