"""Checks that every request has to pass before it is handled: host name, token, size and time.

This is an ASGI application around another one. It reads the whole body itself, with limits on size and
time, so that the inner application never waits for a client."""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

MOST_BYTES = 8 << 20
"""Largest size of a body: some hundred thousand tokens with their features."""
BODY_SECONDS = 10.0
"""Seconds within which a body has to arrive."""
HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


class Refused(Exception):  # noqa: N818
    """A request that is refused, with its HTTP status and the reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Guard:
    """Guards the application ``app``. token : the token that a request has to bring, in its address or as
    ``Authorization: Bearer``; None for no token. hosts : the names in the Host header that are answered,
    None for any; this stops pages of other sites that point their own host name at this machine."""

    app: Any
    token: str | None
    hosts: frozenset[str] | None
    most_bytes: int = MOST_BYTES
    seconds: float = BODY_SECONDS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            self._check(scope)
            body = await self._body_in_time(receive)
        except Refused as refused:
            await _answer(send, refused.status, str(refused))
            return
        except asyncio.TimeoutError:
            await _answer(send, 408, f"the request took longer than {self.seconds:g} s to arrive")
            return
        if body is None:
            return
        whole, given = body, False

        async def replay() -> dict[str, Any]:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": whole, "more_body": False}

        began = False

        async def answer(message: dict[str, Any]) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self.app(scope, replay, _with_headers(answer))
        except asyncio.CancelledError:  # the service was told to end, and this took longer than it waits
            if began:
                raise
            await _answer(send, 503, "the service is ending")

    def _check(self, scope: Scope) -> None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        host = headers.get(b"host", b"").decode("latin-1")
        if self.hosts is not None and _name_of(host) not in self.hosts:
            raise Refused(421, f"this service does not answer to the name {host!r}; see --allow-host")
        if self.token is not None and not self._has_token(scope, headers):
            raise Refused(401, "the token is missing or wrong: use the address that the command printed")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 15 or int(length) > self.most_bytes:
            raise Refused(413, f"larger than {self.most_bytes} bytes; send less at a time")

    def _has_token(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        assert self.token is not None
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ").decode("latin-1")
        if not given:
            given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        return hmac.compare_digest(given.encode(), self.token.encode())

    async def _body_in_time(self, receive: Receive) -> bytes | None:
        if sys.version_info >= (3, 11):
            async with asyncio.timeout(self.seconds):
                return await self._body(receive)
        return await asyncio.wait_for(self._body(receive), self.seconds)  # creates a task each time

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole body; None if the client has disconnected."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.most_bytes:
                raise Refused(413, f"larger than {self.most_bytes} bytes; send less at a time")
            if not message.get("more_body", False):
                return b"".join(parts)


def _name_of(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[: host.find("]") + 1].lower()
    return host.partition(":")[0].lower()


def _with_headers(send: Send) -> Send:
    async def add(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = message | {"headers": [*message.get("headers", []), *HEADERS]}
        await send(message)

    return add


async def _answer(send: Send, status: int, message: str) -> None:
    body = json.dumps({"error": message}).encode()
    kind = [(b"content-type", b"application/json"), (b"connection", b"close")]
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*kind, length, *HEADERS]})
    await send({"type": "http.response.body", "body": body})
