"""The service over HTTP: what it refuses, what it answers, how it ends."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from structgp.data import sources
from structgp.errors import InputError
from structgp.service import running
from structgp.service.guard import MOST_BYTES, Guard
from structgp.service.openapi import openapi
from structgp.service.requests import name_in, parsed


@pytest.fixture(scope="module")
def served(tagger, corpus, files, service):
    """``structgp serve`` with a model of columns."""
    reader = sources.ColumnReader(corpus.template, 5)
    tagger.save(files / "model.sgp", reader.to_json())
    started = service("serve", str(files / "model.sgp"))
    yield started
    status, errors = started.end()
    assert (status, errors) == (0, "")


def test_answers_are_the_offline_ones_whoever_else_asks(served, tagger, corpus):
    rows = [[list(row) for row in x] for x in corpus.X_test[:48]]
    X = [corpus.template.expand(x) for x in corpus.X_test[:48]]
    labels, log_probs = tagger.predict(X), tagger.sequence_log_probs(X, tagger.predict(X))
    marginals = tagger.predict_marginals(X)

    def ask(i):
        return served.ask("/tag", {"sequences": [rows[i]], "detail": "all"})

    with ThreadPoolExecutor(16) as many:
        found = list(many.map(ask, range(48)))
    for i, (status, answer) in enumerate(found):
        (one,) = answer["answers"]
        assert status == 200
        assert one["labels"] == labels[i]
        assert one["probability"] == pytest.approx(2.718281828459045 ** log_probs[i], abs=2e-6)
        for told, p in zip(one["marginals"], marginals[i], strict=True):
            assert told == pytest.approx(p, abs=2e-6)
    together = served.ask("/tag", {"sequences": rows, "detail": "labels"})[1]
    assert [a["labels"] for a in together["answers"]] == labels


def test_without_the_token_nothing_is_answered(served):
    for path in ("/status", "/openapi.json", "/tag", "/nothing"):
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}):
            assert served.ask(path, **headers)[0] == 401
    assert served.ask(f"/status?token={served.token}", Authorization="")[0] == 200


def test_other_names_of_the_machine_are_refused(served):
    status, answer = served.ask("/status", Host="evil.example")
    assert status == 421
    assert "evil.example" in answer["error"]
    assert served.ask("/status", Host=f"localhost:{served.port}")[0] == 200


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b"{", "body"),
        (b"[1]", "body"),
        (b"\xff", "body"),
        (b"[" * 100_000, "body"),
        (b"{}", "sequences"),
        ({"sequences": 3}, "sequences"),
        ({"sequences": [[["a"]]]}, "sequences[0][0]"),
        ({"sequences": [[]] * 1001}, "sequences"),
        ({"sequences": [], "detial": "all"}, "detial"),
        ({"sequences": [], "detail": "page"}, "detail"),
    ],
)
def test_malformed_requests_are_400_and_say_why(served, body, place):
    status, answer = served.ask("/tag", body)
    assert status == 400
    assert answer["place"] == place
    assert answer["problem"]
    assert answer["remedy"]


def test_oversized_requests_are_413(served):
    head = f"POST /tag HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {served.token}\r\n"
    with socket.create_connection(("127.0.0.1", served.port), 10) as s:
        s.sendall(f"{head}Content-Length: {MOST_BYTES + 1}\r\n\r\n".encode())
        assert s.recv(1000).startswith(b"HTTP/1.1 413")
    with socket.create_connection(("127.0.0.1", served.port), 10) as s:
        s.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        answer = b""
        try:
            for _ in range(MOST_BYTES // (1 << 20) + 2):
                s.sendall(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
        except OSError:
            pass
        try:
            answer = s.recv(1000)
        except OSError:
            answer = b"HTTP/1.1 413"  # it was closed while we were still sending
        assert answer.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("start", [b"GET /", b"GET /status HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_heads_that_never_end_are_cut_off(served, start):
    with socket.create_connection(("127.0.0.1", served.port), 10) as s:
        s.sendall(start)
        with pytest.raises(ConnectionError):  # closed while we were still sending
            s.sendall(b"a" * (256 * running.MOST_HEAD))
    assert served.ask("/status")[0] == 200


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_halves_of_characters_are_400(encoding):
    body = '{"\ud800": 1}'.encode(encoding, "surrogatepass")
    with pytest.raises(InputError, match="not JSON"):
        parsed(body)
    assert parsed(b'\xef\xbb\xbf{"\xc3\xa9": 1}') == {"\xe9": 1}


@pytest.mark.slow
def test_slow_requests_are_408(served):
    """Heads that never end, and bodies that never come."""
    began = time.monotonic()
    with (
        socket.create_connection(("127.0.0.1", served.port), 30) as head,
        socket.create_connection(("127.0.0.1", served.port), 30) as body,
    ):
        head.sendall(b"POST /tag HTTP/1.1\r\nHost: local")
        body.sendall(
            b"POST /tag HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
            + f"Authorization: Bearer {served.token}\r\n\r\n".encode()
        )
        assert served.ask("/status")[0] == 200, "others are answered meanwhile"
        assert head.recv(1000).startswith(b"HTTP/1.1 408")
        assert body.recv(1000).startswith(b"HTTP/1.1 408")
    assert time.monotonic() - began < 20


def test_what_is_not_answered_before_the_end_is_503():
    sent = []

    async def never(scope, receive, send):
        await asyncio.sleep(3600)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    async def cancelled():
        guard = Guard(never, None, None)
        asking = asyncio.ensure_future(guard({"type": "http", "headers": []}, receive, send))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asking

    asyncio.run(cancelled())
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"]) == {"error": "the service is ending"}


def test_unknown_addresses_and_ways(served):
    assert served.ask("/tag") == (405, {"error": "use POST"})
    assert served.ask("/tag/") == served.ask("/tag")
    assert served.ask("/tag/", {"sequences": []}) == (200, {"answers": []})
    for path, body, expected in (("/next", None, 404), ("/tag/x", {}, 404), ("/status", {}, 405)):
        try:
            status, _ = served.ask(path, body)
        except json.JSONDecodeError:  # Starlette's own answer is text
            continue
        assert status == expected


def test_many_requests_on_one_connection(served, corpus):
    """Among them some that are refused: those after them are answered."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    token = {"Authorization": f"Bearer {served.token}"}
    rows = [list(row) for row in corpus.X_test[0]]
    for k in range(10):
        good = k % 3 != 2
        connection.request("POST", "/tag", json.dumps({"sequences": [rows] if good else 3}), token)
        answer = connection.getresponse()
        assert answer.status == (200 if good else 400)
        assert answer.headers["cache-control"] == "no-store"
        assert json.loads(answer.read())
    connection.close()


def test_answers_are_sent_at_once():
    """asyncio turns Nagle's algorithm off for sockets that name their protocol."""
    listening = running.listen(running.Place())
    assert listening.proto == socket.IPPROTO_TCP
    listening.close()


def test_a_request_without_a_name_is_told_to_take_a_new_one():
    with pytest.raises(InputError, match="new random string"):
        name_in({"annotator": "ann"}, "request")
    assert name_in({"annotator": "ann"}, "annotator") == "ann"


def test_openapi_names_every_address(served):
    assert served.ask("/openapi.json") == (200, openapi(labelling=False))
    everything = openapi(labelling=True)
    assert {"/tag", "/next", "/labels", "/status"} <= everything["paths"].keys()
    text = json.dumps(everything)
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named == everything["components"]["schemas"].keys()


def test_the_labelling_service_from_start_to_end(labelling, tmp_path, truth):
    service = labelling()
    status, shown = service.ask("/next?annotator=ann")
    assert status == 200
    i = shown["sequence"]
    given = {"request": "r1", "annotator": "ann", "sequence": i, "labels": truth[i]}
    status, answer = service.ask("/labels", given)
    assert (status, answer["events"]) == (200, [1])
    assert answer["next"]["sequence"] != i
    assert service.ask("/labels", given)[1]["events"] == [1], "a second try changes nothing"
    wrong = {**given, "request": "r2", "labels": ["B-NMAE"] * len(truth[i])}
    status, answer = service.ask("/labels", wrong)
    assert status == 400
    assert "did you mean 'B-NAME'" in answer["error"]
    for bad in ({"annotator": ""}, {"sequence": 10**9}, {"sequence": "1"}, {"stream": "no"}, {"x": 1}):
        assert service.ask("/labels", {**given, "request": "r3", **bad})[0] == 400
    found = service.ask("/search?text=" + shown["words"][0])[1]["found"]
    assert i in [f["sequence"] for f in found]
    for path in ("/search", "/sequence?sequence=x", "/next", "/why?sequence=0&position=0", "/bulk?least=2"):
        assert service.ask(path)[0] == 400, path
    assert service.ask("/tag", {"sequences": [[["a"] * 5]]})[0] == 503, "no model yet"
    assert service.ask("/undo", {"request": "u", "annotator": "ann"})[1]["next"]["sequence"] == i
    status, errors = service.end(signal.SIGTERM)
    assert status == 0
    assert "0 of 60 sequences are labelled" in errors
    with sqlite3.connect(tmp_path / "labels.db") as db:
        rows = db.execute("SELECT kind, annotator, sequence FROM events ORDER BY id").fetchall()
    db.close()
    assert rows == [("label", "ann", i), ("undo", "ann", i)]


def test_a_port_that_is_taken_and_a_missing_package(monkeypatch):
    taken = running.listen(running.Place())
    with pytest.raises(InputError, match="cannot listen"):
        running.listen(running.Place(port=taken.getsockname()[1]))
    taken.close()
    monkeypatch.setattr(running.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r'pip install "structgp\[label\]"'):
        running.check_installed()


def kills(labelling, truth, tmp_path, n):
    """Labels from two annotators while the service is killed n times at any moment; what was acknowledged
    is compared with the file."""
    acknowledged: dict[str, tuple[str, int, list]] = {}
    asked: set[str] = set()
    refused: list[object] = []
    for round in range(n):
        service, before = labelling(), len(acknowledged)

        def work(who, service=service, round=round):
            k = 0
            try:
                while True:
                    i, k = (7 * k + round) % 60, k + 1
                    request = f"{who}-{round}-{k}"
                    labels = [None] * len(truth[i]) if k % 5 == 0 else truth[i]
                    asked.add(request)
                    body = {"request": request, "annotator": who, "sequence": i, "labels": labels}
                    status, answer = service.ask("/labels", body)
                    refused.extend([] if status == 200 else [answer])
                    acknowledged[request] = (who, i, labels)
            except (OSError, http.client.HTTPException, json.JSONDecodeError):
                return  # it was killed

        threads = [threading.Thread(target=work, args=(who,)) for who in ("ann", "bo")]
        for thread in threads:
            thread.start()
        late = time.monotonic() + 30
        while len(acknowledged) <= before and time.monotonic() < late:  # a busy machine is slow to begin
            time.sleep(0.01)
        time.sleep(0.45 * (round * 0.618 % 1))
        service.end(signal.SIGKILL)
        for thread in threads:
            thread.join()
        with sqlite3.connect(tmp_path / "labels.db") as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            found = db.execute("SELECT request, annotator, sequence, labels FROM events").fetchall()
        db.close()
        in_file = {r: (who, i, json.loads(labels)) for r, who, i, labels in found}
        assert {r: in_file.get(r) for r in acknowledged} == acknowledged
        assert in_file.keys() <= asked
    assert len(acknowledged) >= n
    assert refused == []


def test_killed_services_lose_nothing(labelling, truth, tmp_path):
    kills(labelling, truth, tmp_path, 2)


@pytest.mark.slow
def test_fifty_killed_services_lose_nothing(labelling, truth, tmp_path):
    kills(labelling, truth, tmp_path, 50)
