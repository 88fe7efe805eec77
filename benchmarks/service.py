"""``structgp label`` or ``structgp serve`` in a separate process, and a client for it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PATIENCE = 300.0
"""Seconds to wait for answers that normally take one: the machine may be busy."""


class Service:
    """A command in a separate process, and a client for it. folder : the folder that it runs in."""

    def __init__(self, *arguments: str, folder: str | None = None) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "structgp", *arguments],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http"), self.process.communicate()[1]
        self.port = int(self.url.split(":")[2].split("/")[0])
        self.token = self.url.partition("token=")[2]

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        given = {"Authorization": f"Bearer {self.token}"} | headers
        try:
            connection.request("GET" if data is None else "POST", path, data, given)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Ends the service; returns its exit status and standard error, which is '' for a killed
        service."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        if number == signal.SIGKILL:  # processes that it started hold its pipes for a moment longer
            assert self.process.stdout is not None
            assert self.process.stderr is not None
            self.process.stdout.close()
            self.process.stderr.close()
            return self.process.wait(PATIENCE), ""
        errors = self.process.communicate(timeout=PATIENCE)[1]
        return self.process.returncode, errors
