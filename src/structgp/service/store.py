"""Labels in one SQLite file: an append-only log of events.

When :meth:`Store.label` or :meth:`Store.undo` returns, the events are on disk: the file is in WAL mode with
``synchronous = FULL``, so a killed process or a power cut loses nothing that was acknowledged. Methods may
be called from any thread; writes take turns."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from structgp.data.json_form import WHOLE, FormError, check_form
from structgp.errors import InputError
from structgp.service.store_schema import (
    FIGURES,
    LABELS,
    SCHEMA,
    SUGGESTED,
    TAG_SET,
    VERSION,
    check_schema,
    statements,
    value_of,
)
from structgp.service.tag_set import Labels, TagSet

STREAMS = ("chosen", "random", "audit", "search", "review", "bulk", "file")
"""Why a sequence was labelled; 'audit' sequences were drawn at random, regardless of the model."""


@dataclass(frozen=True)
class Event:
    """The labels that somebody gave to a sequence. suggested : the model's answer when the sequence was
    shown, or None."""

    id: int
    request: str
    annotator: str
    sequence: int
    stream: str
    labels: Labels
    suggested: dict[str, Any] | None = None


@dataclass(frozen=True)
class Undone:
    """The events that an undo took back, latest first, and the number of the last event of the log."""

    events: list[Event]
    last: int


class StoreError(InputError):
    """The file cannot be read or written: it is damaged, not a file of labels, or the disk is full."""


class Store:
    """The file at ``path``, which is created if it does not exist.

    The events that have not been undone are also kept in memory, by sequence: O(labels). ``version`` grows
    with every change."""

    def __init__(self, path: str) -> None:
        self.path, self.version = path, 0
        self._lock = threading.RLock()
        self._standing: dict[int, Event] = {}
        self._of: dict[int, list[int]] = {}
        if os.path.exists(path) and not os.path.isfile(path):
            raise InputError(path, "not a regular file", "name another file")
        with self._said(), ExitStack() as undo:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=10)
            undo.callback(self._db.close)
            self._db.execute("PRAGMA trusted_schema = OFF")
            self._prepare()
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._read_events()
            undo.pop_all()

    @contextmanager
    def _said(self) -> Iterator[None]:
        """Turns errors that SQLite raises about the file into StoreError."""
        try:
            yield
        except (sqlite3.Error, FormError, UnicodeDecodeError) as error:
            remedy = (
                "check the disk; name a file that 'structgp label' wrote, or one that does not exist yet"
            )
            raise StoreError(self.path, f"cannot hold labels ({error})", remedy) from error

    def _prepare(self) -> None:
        with self._write():
            tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master")}
            if not tables:
                for statement in statements(SCHEMA):
                    self._db.execute(statement)
                self._set("version", VERSION)
            elif "events" not in tables or "about" not in tables:
                raise InputError(self.path, "a database of something else", "name another file")
        version = self.about("version")
        if version != VERSION:
            problem = f"written by another version ({version}, where this one writes {VERSION})"
            raise InputError(self.path, problem, "use the structgp that wrote it")
        check_schema(self._db)

    def _read_events(self) -> None:
        undone = {u for (u,) in self._db.execute("SELECT undoes FROM events WHERE undoes IS NOT NULL")}
        rows = self._db.execute(
            "SELECT e.id, request, annotator, sequence, stream, labels, suggested, words FROM events e"
            " LEFT JOIN sequences s ON s.id = e.sequence WHERE kind = 'label' ORDER BY e.id"
        )
        for id, request, annotator, sequence, stream, text, suggested, words in rows:
            if id in undone:
                continue
            place = f"event {id}"
            check_form([request, annotator, stream], [str], place)
            labels = value_of(text, LABELS, f"labels of {place}")
            told = None if suggested is None else value_of(suggested, SUGGESTED, f"suggestion of {place}")
            n_words = len(value_of(words, [str], f"words of {place}"))
            if stream not in STREAMS or {len(labels), len(labels if told is None else told["labels"])} != {
                n_words
            }:
                raise FormError(f"{place} does not fit its sequence")
            self._add(Event(id, request, annotator, sequence, stream, labels, told))

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # -- the pool ------------------------------------------------------------------------------

    def open_pool(
        self, digest: str, tags: TagSet, sequences: Sequence[tuple[str, Sequence[str]]]
    ) -> TagSet:
        """Ties the file to a pool: its digest, the labels that may be given, and (place, words) of each
        sequence. Returns the tag set of the file, extended by the types in ``tags``. InputError if the file
        belongs to another pool."""
        with self._write():
            known, words = (
                self.about("pool"),
                [json.dumps(list(w), ensure_ascii=False) for _, w in sequences],
            )
            if known is None:
                self._set("pool", digest)
                self._set("tags", tags.to_json())
                rows = ((i, place, words[i]) for i, (place, _) in enumerate(sequences))
                self._db.executemany("INSERT INTO sequences VALUES (?, ?, ?)", rows)
                return tags
            held = self._db.execute("SELECT words FROM sequences ORDER BY id")
            if known != digest or [text for (text,) in held] != words:
                problem = "holds labels of another pool, or the pool's words have changed"
                raise InputError(self.path, problem, "name another file with --db, or restore the pool")
            state = self.about("tags")
            check_form(state, TAG_SET, "tags")
            before = TagSet.from_json(state)
            if before.spans != tags.spans:
                kind = "types of spans (--types)" if before.spans else "tags of tokens (--tags)"
                raise InputError(self.path, f"its labels are {kind}", "use that option again")
            both = TagSet(tuple(dict.fromkeys([*before.types, *tags.types])), tags.spans)
            for event in self._standing.values():
                if not {None, *both.tags}.issuperset(event.labels):
                    raise FormError(f"event {event.id} has a label that is not one of the pool's")
            self._set("tags", both.to_json())
            return both

    def about(self, key: str) -> Any:
        """The value that is stored under a key, or None."""
        with self._lock, self._said():
            row = self._db.execute("SELECT value FROM about WHERE key = ?", (key,)).fetchone()
            return None if row is None else value_of(row[0], object, key)

    def _set(self, key: str, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (key, json.dumps(value)))

    # -- events --------------------------------------------------------------------------------

    def label(
        self,
        request: str,
        annotator: str,
        stream: str,
        labels: Mapping[int, Labels],
        suggested: Mapping[int, dict[str, Any]] | None = None,
    ) -> list[Event]:
        """Adds one event per sequence, either all or none. A request that was acknowledged before adds
        nothing and returns its events from then that have not been undone."""
        with self._write():
            told, now = suggested or {}, _now()
            if self._is_known(request):
                return [e for e in self._standing.values() if e.request == request]
            events = []
            for sequence, given in labels.items():
                note = told.get(sequence)
                values = (request, now, annotator, "label", sequence, stream, json.dumps(given), None)
                id = self._insert((*values, None if note is None else json.dumps(note)))
                events.append(Event(id, request, annotator, sequence, stream, given, note))
        for event in events:
            self._add(event)
        return events

    def undo(self, request: str, annotator: str) -> Undone:
        """Takes back the labels of the annotator's last request. Empty if there is nothing to take back."""
        with self._write():
            own = [e for e in self._standing.values() if e.annotator == annotator and e.stream != "file"]
            if not own or self._is_known(request):
                return Undone([], self.last)
            latest = max(own, key=lambda e: e.id).request
            taken = sorted((e for e in own if e.request == latest), key=lambda e: -e.id)
            for e in taken:
                self._insert((request, _now(), annotator, "undo", e.sequence, e.stream, None, e.id, None))
        for e in taken:
            del self._standing[e.id]
            self._of[e.sequence].remove(e.id)
        self.version += 1
        return Undone(taken, self.last)

    def _is_known(self, request: str) -> bool:
        found = self._db.execute("SELECT 1 FROM events WHERE request = ? LIMIT 1", (request,)).fetchone()
        return found is not None

    def _insert(self, values: tuple[Any, ...]) -> int:
        columns = "request, time, annotator, kind, sequence, stream, labels, undoes, suggested"
        marks = ", ".join("?" * 9)
        done = self._db.execute(f"INSERT INTO events ({columns}) VALUES ({marks})", values)
        assert done.lastrowid is not None
        return done.lastrowid

    def _add(self, event: Event) -> None:
        self._standing[event.id] = event
        self._of.setdefault(event.sequence, []).append(event.id)
        self.version += 1

    @property
    def last(self) -> int:
        """The number of the last event, 0 if there is none."""
        with self._lock:
            return int(self._db.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()[0])

    def standing(self) -> list[Event]:
        """All events that have not been undone, oldest first."""
        with self._lock:
            return list(self._standing.values())

    def current(self, sequence: int, annotator: str | None = None) -> Event | None:
        """The latest labels of a sequence, by this annotator, or by anyone if None."""
        with self._lock:
            found = [self._standing[id] for id in self._of.get(sequence, ())]
        own = [e for e in found if annotator is None or e.annotator == annotator]
        return own[-1] if own else None

    def is_labelled(self, sequence: int) -> bool:
        return bool(self._of.get(sequence))

    def labelled(self) -> dict[int, Event]:
        """The latest event of each sequence that has one."""
        with self._lock:
            return {i: self._standing[ids[-1]] for i, ids in self._of.items() if ids}

    # -- fits ----------------------------------------------------------------------------------

    def add_fit(self, n_sequences: int, figures: dict[str, Any]) -> int:
        with self._write():
            values = (_now(), n_sequences, json.dumps(figures))
            done = self._db.execute("INSERT INTO fits (time, sequences, figures) VALUES (?, ?, ?)", values)
        assert done.lastrowid is not None
        return done.lastrowid

    def fits(self) -> list[dict[str, Any]]:
        """The figures of each fit, such as expected scores, oldest first."""
        with self._lock, self._said():
            rows = self._db.execute("SELECT id, sequences, figures FROM fits ORDER BY id").fetchall()
            found = [(id, n, value_of(text, FIGURES, f"figures of fit {id}")) for id, n, text in rows]
            check_form([n for _, n, _ in found], [WHOLE], "sequences of fits")
        return [{"fit": id} | figures | {"sequences": n} for id, n, figures in found]

    @contextmanager
    def _write(self) -> Iterator[None]:
        """One transaction, which is on disk when the context is left."""
        with self._lock, self._said():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
