"""Runs an application with uvicorn until SIGTERM or Ctrl-C, on a port that is known before it starts."""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from structgp.errors import InputError
from structgp.service.guard import Guard

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
FIRST_BYTES = 10.0
"""Seconds that a client is given to send the head of its first request."""
MOST_HEAD = 1 << 16
"""Largest number of bytes in the head of a request, the same as for h11; beyond it, the request is refused.
httptools has no limit, and the head is read before any token is checked."""
SHUTDOWN = 5
"""Seconds that are left to answer the requests under way when the service ends."""


@dataclass(frozen=True)
class Place:
    """Where a service listens, and whom it answers. token : '' for a random one, None for no token. hosts :
    host names that it answers to, beside those of the loopback; '*' for any."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = ""
    hosts: tuple[str, ...] = ()


def check_installed() -> None:
    """Raises InputError, with the command to install them, if Starlette or uvicorn is missing."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        problem = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        raise InputError("label, serve", problem, 'run: pip install "structgp[label]"')


def run(app: Any, listening: socket.socket, place: Place, ready: Callable[[str], None]) -> None:
    """Serves ``app`` until it is told to end. ready : called with the address once the service answers.
    listening : the socket from :func:`listen`, which is closed at the end."""
    import uvicorn

    token = secrets.token_urlsafe(18) if place.token == "" else place.token
    hosts = None if "*" in place.hosts else frozenset(map(str.lower, (*LOOPBACK, place.host, *place.hosts)))
    config = uvicorn.Config(
        Guard(app, token, hosts),
        http=_protocol(),
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN,
        server_header=False,
    )
    host, port = listening.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}/{f'?token={token}' if token else ''}"
    # When it is done, uvicorn raises the signal that ended it once more: that should not be an error.
    before = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        asyncio.run(_serve(uvicorn.Server(config), listening, lambda: ready(address)))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        listening.close()


async def _serve(server: Any, listening: socket.socket, ready: Callable[[], None]) -> None:
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if not serving.done():
        ready()
    await serving


def listen(place: Place) -> socket.socket:
    """The socket of a service. It is opened first, so that a port that is in use is found out at once."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    # If the protocol is named, asyncio sends data at once (TCP_NODELAY). Otherwise the body of an answer
    # waits up to 40 ms until the client has acknowledged the head.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((place.host.strip("[]"), place.port))
        found.listen(128)
    except OSError as error:
        found.close()
        problem = f"cannot listen on {place.host} ({error.strerror or error})"
        raise InputError(f"--port {place.port}", problem, "use another one, or 0 for any") from error
    return found


def _protocol() -> Any:
    """uvicorn's protocol class, with limits on the size of a head and on the time until a client's first
    head. Once a request has begun, ``Guard`` limits its time; uvicorn's own limit holds between requests.
    Requests are parsed by httptools if it is installed: h11 is written in Python, and takes 0.07 ms longer
    for each."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Timely(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(FIRST_BYTES, self._late)
            self._head = 0

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            in_head = before is None or before.response_complete
            super().data_received(data)
            self._head = self._head + len(data) if in_head and self.cycle is before else 0
            if self._head > MOST_HEAD:
                self._refuse(b"431 Request Header Fields Too Large")

        def _late(self) -> None:
            if self.cycle is None:
                self._refuse(b"408 Request Timeout")

        def _refuse(self, status: bytes) -> None:
            if not self.transport.is_closing():
                with suppress(OSError):
                    self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\n\r\n")
                self.transport.close()

    return Timely
