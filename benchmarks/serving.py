"""``structgp serve`` under load: many clients at once on the loopback, for minutes.

    python -m benchmarks.serving [--clients 64] [--seconds 120] [--lines 1] [--detail probabilities]

Each client keeps one connection open, and sends recipe lines as fast as they are answered, ``--lines`` of
them per request. All answers are compared with those that the model gives offline. Meanwhile, requests are
sent that have to be refused. Finally, the service is told to end while all clients are still asking.

The offline path reads the same columns from a file and answers with the same details, 200 lines at a time,
as ``structgp tag`` does, in one process with one thread. It is timed before and after the service, and the
mean is used: on a machine with other work, speed changes within minutes. The clients are in another
process, so lines per processor second are those of the service alone; lines per second depend on the other
load of the cores. Memory is that of the service's process, measured once a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.service import Service
from structgp import StructuredGPClassifier
from structgp.data.corpora import Recipes, recipes
from structgp.data.sources import ColumnReader, write_columns
from structgp.data.sources.lines import read_all
from structgp.service.answering import answers_of
from structgp.service.guard import MOST_BYTES

OFFLINE_SECONDS = 10.0
CHUNK = 200
"""Number of lines that the offline path answers together, as in ``structgp tag``."""
NEAR = 2e-6
"""Tolerance for equal numbers: answers are rounded to six digits, and may be rounded to the next number in
another batch."""


class Rates(NamedTuple):
    """Lines per second, and per processor second, which is hardly disturbed by other work."""

    wall: float
    cpu: float


def cpu_seconds(service: Service) -> float:
    """Processor time of the service's process so far."""
    fields = Path(f"/proc/{service.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def offline(tagger: Any, reader: ColumnReader, path: Path, detail: str) -> tuple[list[Any], Rates]:
    """The answers to all lines of a file, and the rates at which they are computed."""
    found: list[Any] = []
    n, began, began_cpu = 0, time.perf_counter(), time.process_time()
    while not found or time.perf_counter() - began < OFFLINE_SECONDS:
        sequences = read_all(reader.sequences(str(path)), str(path))
        answers: list[Any] = []
        for first in range(0, len(sequences), CHUNK):
            part = [s.tokens for s in sequences[first : first + CHUNK]]
            answers += answers_of(tagger, part, detail)
        json.dumps(answers)
        found = found or answers
        n += len(answers)
    return found, Rates(n / (time.perf_counter() - began), n / (time.process_time() - began_cpu))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float):
        return isinstance(b, float) and math.isclose(a, b, abs_tol=NEAR, rel_tol=0)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Load:
    """The clients' requests, what the clients have seen, and which request is next."""

    def __init__(
        self, service: Service, rows: list[Any], answers: list[Any], size: int, detail: str
    ) -> None:
        self.service, self.answers, self.size = service, answers, size
        head = f"POST /tag HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {service.token}\r\n"
        self.places = [[(k + i) % len(rows) for i in range(size)] for k in range(0, len(rows), size)]
        bodies = [json.dumps({"sequences": [rows[i] for i in p], "detail": detail}) for p in self.places]
        self.requests = [f"{head}Content-Length: {len(b.encode())}\r\n\r\n{b}".encode() for b in bodies]
        self.expected: list[bytes | None] = [None] * len(bodies)
        self.seconds: list[float] = []
        self.wrong: list[str] = []
        self.memory: list[float] = []
        self.ending = False
        self._turn = count()

    async def client(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.service.port, limit=1 << 24)
        try:
            while True:
                k = next(self._turn) % len(self.requests)
                at = time.perf_counter()
                writer.write(self.requests[k])
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                self._check(k, head, await reader.readexactly(length))
                self.seconds.append(time.perf_counter() - at)
        except (asyncio.IncompleteReadError, OSError) as error:
            if not self.ending:
                self.wrong.append(f"the connection was closed: {error!r}")
        finally:
            writer.close()

    def _check(self, k: int, head: bytes, body: bytes) -> None:
        if not head.startswith(b"HTTP/1.1 200"):
            if not self.ending:
                self.wrong.append(head.split(b"\r\n")[0].decode())
        elif body != self.expected[k]:  # a body with the same bytes as before has already been compared
            told = json.loads(body)["answers"]
            if all(same(a, self.answers[i]) for a, i in zip(told, self.places[k], strict=True)):
                self.expected[k] = body
            else:
                self.wrong.append(f"another answer to lines {self.places[k]}")

    async def watch(self) -> None:
        while True:
            text = Path(f"/proc/{self.service.process.pid}/status").read_text()
            self.memory.append(int(text.split("VmRSS:")[1].split()[0]) / 1024)
            await asyncio.sleep(1)


def refused(service: Service) -> dict[str, int]:
    """Sends requests that must be refused; returns the status of each."""
    token = {"Authorization": f"Bearer {service.token}"}
    found = {
        "no token": service.ask("/tag", {"sequences": []}, Authorization="")[0],
        "another Host": service.ask("/status", Host="evil.example")[0],
        "malformed": service.ask("/tag", b"{")[0],
    }
    for name, length in (("oversized", MOST_BYTES + 1), ("slow", 9)):
        lines = ["POST /tag HTTP/1.1", "Host: localhost", f"Content-Length: {length}"]
        lines += [f"{key}: {value}" for key, value in token.items()]
        with socket.create_connection(("127.0.0.1", service.port), 60) as s:
            s.sendall("\r\n".join([*lines, "", ""]).encode())
            found[name] = int(s.recv(1000).split()[1])
    return found


async def loaded(load: Load, clients: int, seconds: float) -> dict[str, Any]:
    """Runs the clients, and ends the service while they are asking."""
    asking = [asyncio.ensure_future(load.client()) for _ in range(clients)]
    watching = asyncio.ensure_future(load.watch())
    began, began_cpu = time.perf_counter(), cpu_seconds(load.service)
    refusals = await asyncio.to_thread(refused, load.service)
    await asyncio.sleep(seconds - (time.perf_counter() - began))
    n, passed = len(load.seconds), time.perf_counter() - began
    lines = n * load.size
    rates = Rates(lines / passed, lines / (cpu_seconds(load.service) - began_cpu))
    watching.cancel()
    load.ending = True
    status, errors = await asyncio.to_thread(load.service.end)
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 30)
    settled = load.memory[len(load.memory) // 4 :]
    return {
        "requests": n,
        "rates": rates,
        "p50": float(np.percentile(load.seconds, 50)),
        "p95": float(np.percentile(load.seconds, 95)),
        "wrong": load.wrong,
        "memory": [settled[0], max(settled), settled[-1]],
        "refused": refusals,
        "exit": [status, errors],
    }


def told(found: dict[str, Any], alone: Rates, size: int) -> str:
    low, high, last = found["memory"]
    status, errors = found["exit"]
    return "\n  ".join(
        (
            f"{size} lines per request: {found['requests']} requests, {found['rates'].wall:.0f} lines a "
            f"second, {found['rates'].wall / alone.wall:.2f} of offline; per second of processor "
            f"{found['rates'].cpu / alone.cpu:.2f} of offline",
            f"answered after {1000 * found['p50']:.0f} ms, 95th percentile {1000 * found['p95']:.0f} ms",
            f"errors and wrong answers: {'; '.join(found['wrong'][:5]) or 'none'}",
            f"memory: {low:.0f} MiB after a quarter of the time, at most {high:.0f}, {last:.0f} at the end",
            f"refused: {', '.join(f'{name} {code}' for name, code in found['refused'].items())}",
            f"told to end: exit status {status}{', ' if errors else ''}{errors[:200]}",
        )
    )


def saved(folder: Path) -> tuple[Any, ColumnReader, Recipes]:
    """Fits a model to the recipes and saves it; returns it with its reader and the corpus."""
    corpus = recipes()
    reader = ColumnReader(corpus.template, len(corpus.X_train[0][0]))
    tagger = StructuredGPClassifier(features="columns")
    tagger.fit([corpus.template.expand(x) for x in corpus.X_train], corpus.y_train)
    tagger.save(folder / "model.sgp", reader.to_json())
    return tagger, reader, corpus


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--lines", type=int, nargs="+", default=[1], help="per request")
    parser.add_argument("--detail", default="probabilities", help="labels, probabilities or all")
    given = parser.parse_args(words)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        tagger, reader, corpus = saved(folder)
        lines = [*corpus.X_train, *corpus.X_test]
        write_columns(folder / "lines.conll", lines)
        answers, rates = offline(tagger, reader, folder / "lines.conll", given.detail)
        print(
            f"offline: {rates.wall:.0f} lines a second, {rates.cpu:.0f} per second of processor", flush=True
        )
        rows = [[list(row) for row in x] for x in lines]
        for size in given.lines:
            load = Load(Service("serve", str(folder / "model.sgp")), rows, answers, size, given.detail)
            found = asyncio.run(loaded(load, given.clients, given.seconds))
            before, (_, rates) = rates, offline(tagger, reader, folder / "lines.conll", given.detail)
            print(f"offline again: {rates.wall:.0f} and {rates.cpu:.0f}")
            mean = Rates((before.wall + rates.wall) / 2, (before.cpu + rates.cpu) / 2)
            print(told(found, mean, size), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
