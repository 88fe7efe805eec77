"""Requests that nobody should send, and files of labels that are damaged."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fuzz import databases, requests
from structgp.errors import InputError
from structgp.service import answering, tag_requests
from structgp.service.answering import _in_parts
from structgp.service.store import Store, StoreError

HEADERS = [(b"host", b"localhost"), (b"authorization", b"Bearer secret")]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    apps, store, answerer = requests.services(tmp_path_factory.mktemp("services"))
    yield apps
    answerer.close()
    store.close()


def post(app: Any, path: str, body: bytes, headers: Any = ()) -> tuple[int, dict[str, Any]]:
    status, answer = asyncio.run(requests.ask(app, "POST", path, "", body, [*HEADERS, *headers]))
    return status, json.loads(answer)


def test_some_requests(tmp_path: Path) -> None:
    tally = requests.campaign(150, 1, tmp_path)
    assert not tally.failures
    assert set(tally.outcomes) == {"answered", "refused"}


@pytest.mark.parametrize("label", [{}, [1], 7, True])
def test_labels_that_are_not_text(label: Any, services: dict[str, Any]) -> None:
    given = {"request": "r", "annotator": "ann", "sequence": 0, "labels": ["Q", label]}
    status, answer = post(services["label"], "/labels", json.dumps(given).encode())
    assert status == 400
    assert answer["error"].startswith("labels[1]: ")


def test_halves_of_characters(services: dict[str, Any]) -> None:
    for app in services.values():
        status, answer = post(app, "/tag", rb'{"\ud800": 1}')
        assert status == 400
        assert answer["problem"] == "half of a character (\\ud800)"
    assert post(services["serve"], "/tag", rb'{"sequences": [[["\ud83d\ude00", "1"]]]}')[0] == 200


def test_a_length_of_many_digits(services: dict[str, Any]) -> None:
    assert post(services["serve"], "/tag", b"{}", [(b"content-length", b"9" * 5000)])[0] == 413


def test_requests_are_answered_in_parts(services: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request takes does not grow with all of it."""
    body = json.dumps(
        {"sequences": [[["two", "1"]] * n for n in (3, 1, 0, 2, 9)], "detail": "all"}
    ).encode()
    whole = post(services["serve"], "/tag", body)
    monkeypatch.setattr(answering, "AT_ONCE", 4)
    assert [len(part) for part in _in_parts([[1] * n for n in (3, 1, 0, 2, 9)])] == [3, 1, 1]
    assert post(services["serve"], "/tag", body) == whole
    monkeypatch.setattr(tag_requests, "MOST_TOKENS", 14)
    assert post(services["serve"], "/tag", body)[1]["problem"] == "15 tokens, where 14 is the most"


def test_some_damaged_files_of_labels(tmp_path: Path) -> None:
    content, path, seen = databases.write(tmp_path / "whole"), tmp_path / "db", set()
    for k in range(60):
        changed, told = databases.changed(content, random.Random(k))
        path.write_bytes(changed)
        try:
            seen.add(databases.answers(str(path), "").partition(":")[0])
        except Exception as error:
            raise AssertionError(told) from error
    assert seen == {"answered", "refused"}


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("CREATE TRIGGER t AFTER INSERT ON events BEGIN SELECT 1; END", "t is not what structgp makes"),
        ("DELETE FROM about WHERE key = 'pool'", "UNIQUE constraint failed"),
        ("UPDATE about SET value = '[' WHERE key = 'tags'", "tags is not JSON"),
        ("UPDATE about SET value = '{\"types\": 3}' WHERE key = 'tags'", "tags.types must be a list"),
        ("UPDATE sequences SET words = '[\"x\"]' WHERE id = 1", "words have changed"),
        ("UPDATE fits SET figures = '3'", "figures of fit 1 must be an object"),
        ("DELETE FROM sequences WHERE id = 0", "words of event 1 is not JSON"),
    ],
)
def test_files_of_labels_that_do_not_fit(statement: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "db"
    databases.write(path)
    db = sqlite3.connect(path)
    db.execute(statement)
    db.commit()
    db.close()
    assert says in databases.answers(str(path), "")


def test_a_name_of_a_table_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "db"
    path.write_bytes(databases.write(path).replace(b"events_stay", b"events\xa9stay", 1))
    assert "cannot hold labels" in databases.answers(str(path), "")


def test_a_label_that_the_pool_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "db"
    content = databases.write(path)
    assert content.count(b'["Q", "N", null]') == 1
    path.write_bytes(content.replace(b'["N"]', b'["M"]'))
    assert "has a label that is not one of the pool's" in databases.answers(str(path), "")


def test_a_file_of_labels_that_is_a_pipe_or_on_a_full_disk(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a regular file"):
        Store(str(tmp_path / "pipe"))
    store = Store(str(tmp_path / "db"))
    store.open_pool("d", databases.TAGS, databases.WORDS)
    store._db.execute("PRAGMA max_page_count = 1")
    with pytest.raises(StoreError, match=r"cannot hold labels .*full"):
        store.label("r", "ann", "random", {0: ["Q" * 10**5, "N"]})
    assert store.standing() == []
    store.close()
