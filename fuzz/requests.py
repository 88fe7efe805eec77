"""Malformed requests to the services of ``serve`` and ``label``: each must be answered in JSON, with a
status that says whose fault it is, and no labels may be lost."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fuzz import damage, models
from fuzz.trial import Tally, _place
from structgp.service.answering import Answerer
from structgp.service.guard import Guard
from structgp.service.label_app import label_app
from structgp.service.label_pool import read_pool
from structgp.service.session import Session
from structgp.service.store import Store
from structgp.service.tag_requests import serve_app
from structgp.service.tag_set import TagSet

TOKEN = "secret"
SECONDS = 60.0
GOOD: list[tuple[str, str, Any]] = [
    ("POST", "/tag", {"sequences": [[["two", "1"], ["eggs", "3"]], []], "detail": "all"}),
    ("POST", "/tag", {"sequences": [[["figs", "2"]]], "detail": "labels"}),
    ("GET", "/status", {}),
    ("GET", "/next", {"annotator": "ann"}),
    ("GET", "/sequence", {"sequence": "1", "stream": "search"}),
    ("GET", "/search", {"text": "eggs"}),
    ("GET", "/bulk", {"least": "0.9"}),
    ("GET", "/disagreements", {}),
    ("GET", "/why", {"sequence": "0", "position": "1", "label": "N"}),
    ("POST", "/labels", {"request": "r", "annotator": "ann", "sequence": 0, "labels": ["Q", None]}),
    ("POST", "/undo", {"request": "u", "annotator": "ann"}),
    ("POST", "/bulk", {"request": "b", "annotator": "ann", "least": 0.5}),
]
HEADERS = [
    (b"content-length", b"9" * 5000),
    (b"content-length", b"x"),
    (b"host", b"elsewhere"),
    (b"host", b"["),
]
HEADERS += [(b"authorization", b"Bearer \xff\xfe"), (b"content-type", b"text/plain; charset=utf-16")]


class Idle:
    """Stands in for the background process that fits."""

    busy, listener = None, None

    def start(self, _: dict[str, Any]) -> bool:
        return False


def services(folder: Path) -> tuple[dict[str, Guard], Store, Answerer]:
    """Both services, guarded, with a model of columns and a pool of two sequences."""
    model, reader = models.columns_model(folder)
    answerer = Answerer(model)
    (folder / "pool").write_text("two 1\neggs 3\n\nfigs 2\n")
    (folder / "template").write_text("U:%x[0,0]\n")
    pool = read_pool([str(folder / "pool")], template=str(folder / "template"))
    store = Store(str(folder / "labels.db"))
    tags = store.open_pool(pool.digest, TagSet(("Q", "N"), False), [("p", s.words) for s in pool.sequences])
    session = Session(pool, store, tags, answerer, Idle(), 0)  # type: ignore[arg-type]
    hosts = frozenset(["localhost"])
    apps = {"serve": serve_app(answerer, reader, {}), "label": label_app(session, "ann")}
    return {name: Guard(app, TOKEN, hosts) for name, app in apps.items()}, store, answerer


async def ask(
    app: Guard, method: str, path: str, query: str, body: bytes, headers: Any
) -> tuple[int, bytes]:
    """Status and body of the answer."""
    scope = {"type": "http", "http_version": "1.1", "method": method, "path": path, "root_path": ""}
    scope |= {
        "raw_path": path.encode(),
        "query_string": query.encode("latin-1", "replace"),
        "scheme": "http",
    }
    scope |= {"headers": headers, "client": ("127.0.0.1", 1), "server": ("localhost", 80)}
    parts: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        parts.append(message)

    await asyncio.wait_for(app(scope, receive, send), SECONDS)
    return parts[0]["status"], b"".join(part.get("body", b"") for part in parts[1:])


def changed(rng: random.Random) -> tuple[str, str, str, bytes, list[tuple[bytes, bytes]]]:
    """A request with one to three changes."""
    method, path, given = rng.choice(GOOD)
    tree: Any = {"given": json.loads(json.dumps(given))}
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        if damage.places(tree):
            damage.json_value(tree, rng)
    headers = [(b"host", b"localhost"), (b"authorization", b"Bearer secret")]
    if rng.random() < 0.1:
        headers = [*headers, rng.choice(HEADERS)][rng.choice([0, 0, 1]) :]
    given = tree.get("given")
    query, body = "", json.dumps(given).replace(f'"{damage.DEEP}"', "[" * 5000).encode()
    if method == "GET":
        some = given if isinstance(given, dict) else {}
        query = "&".join(f"{k}={quote(str(v), errors='replace')}" for k, v in some.items())
    if rng.random() < 0.2:
        body = damage.bytes_of(body, rng)
    if rng.random() < 0.05:
        method, path = rng.choice(["PUT", "HEAD", "DELETE"]), rng.choice(["/", "/../x", "/tag/", path])
    return method, path, query, body, headers


def campaign(number: int, seed: int, folder: Path) -> Tally:
    tally = Tally("requests")
    apps, store, answerer = services(folder)
    for k in range(number):
        rng = random.Random(f"{seed}-{k}")
        name = rng.choice(["serve", "label", "label"])
        request = changed(rng)
        before = {e.id: e.labels for e in store.standing()}
        try:
            status, body = asyncio.run(ask(apps[name], *request))
            told = _fault(status, body, request[0])
            lost = {e.id for e in store.standing()} < set(before) and request[1] != "/undo"
            told = told or ("labels were lost" if lost else "")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            told = _place(error)
        if told:
            tally.add("failed", f"{seed}-{k}, {name} {str(request)[:300]}: {told}")
        else:
            tally.add("answered" if status < 300 else "refused")
    answerer.close()
    store.close()
    again = Store(str(folder / "labels.db"))  # the file can be read again
    again.close()
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(1)
    return tally


def _fault(status: int, body: bytes, method: str) -> str:
    """A description of what is wrong with an answer; '' if nothing is."""
    if status >= 500:
        return f"status {status}: {body[:200]!r}"
    if status >= 400 and method in ("GET", "POST") and body[:1] == b"{":
        error = json.loads(body)["error"]
        if "\n" in error or len(error) > 2000:
            return f"an error of several lines, or a long one: {error[:100]!r}"
    if status < 300 and body[:1] == b"{":
        json.loads(body, parse_constant=lambda name: 1 / 0)  # NaN and infinity are not JSON
    return ""
