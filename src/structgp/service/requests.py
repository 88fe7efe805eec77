"""Converts requests to Python values and back: JSON in and out, with mistakes as status 400."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from structgp.errors import InputError, StructgpError, cut
from structgp.service.store import StoreError

Handler = Callable[[Request], Awaitable[Response]]
NAME = re.compile(r"\S(.{0,62}\S)?")
"""Pattern of the names of annotators and requests: up to 64 characters, not blank at the ends."""


def answering(function: Callable[[Any], Any], needs_body: bool = False) -> Handler:
    """A handler that calls ``function`` in a thread with a dict from the body or the query, and answers
    with its result as JSON. An InputError becomes status 400."""

    async def handle(request: Request) -> Response:
        try:
            given: Any = parsed(await request.body()) if needs_body else dict(request.query_params)
            return JSONResponse(await run_in_threadpool(function, given))
        except StoreError as error:
            return JSONResponse({"error": str(error)}, 503)
        except InputError as error:
            return JSONResponse(mistake(error), 400)
        except StructgpError as error:
            return JSONResponse({"error": str(error)}, 503)

    return handle


def mistake(error: InputError) -> dict[str, str]:
    """The content of an answer with status 400."""
    told = {"place": error.place, "problem": error.problem, "remedy": error.remedy}
    return {"error": str(error)} | {name: cut(text) for name, text in told.items()}


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; InputError if there is none."""
    try:
        given = json.loads(body.decode("utf-8-sig"))  # json.loads(bytes) would accept lone surrogates
    except (ValueError, RecursionError) as error:
        raise InputError("body", f"not JSON ({error})", "send one JSON object") from None
    if not isinstance(given, dict):
        problem = f"expected an object, got a {type(given).__name__}"
        raise InputError("body", problem, "send one JSON object")
    if b"\\u" in body:
        try:
            json.dumps(given, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"half of a character (\\u{ord(error.object[error.start]):x})"
            raise InputError("body", half, "send whole characters") from None
    return given


def name_in(given: dict[str, Any], key: str) -> str:
    """The value under ``key``, a name or the identifier of a request, of up to 64 characters."""
    value = given.get(key)
    if not isinstance(value, str) or not NAME.fullmatch(value):
        problem = (
            "missing" if value is None else f"must be 1 to 64 characters in one line, got {value!r:.80}"
        )
        remedy = f'give a short name, such as "{key}": "ann"'
        if key == "request":  # a request that is sent twice changes nothing the second time
            remedy = "give a new random string with every request that saves or undoes, such as a UUID"
        raise InputError(key, problem, remedy)
    return value


def number_in(given: dict[str, Any], key: str, kind: type[int] | type[float]) -> Any:
    """The number under ``key``, from JSON or from the text of a query."""
    value: Any = given.get(key)
    if isinstance(value, str):
        try:
            value = kind(value)
        except ValueError:
            raise InputError(key, f"not a number: {value[:40]!r}", f"give {key}=1, for example") from None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (kind is int and not float(value).is_integer())
    ):
        raise InputError(key, "missing" if value is None else "not a number", "give a number")
    return kind(value)


def only(given: dict[str, Any], *keys: str) -> None:
    """Raises InputError for unknown keys, so that typing errors are not ignored."""
    for key in given:
        if key not in keys and key != "token":
            raise InputError(key[:64], "is not known here", f"use {', '.join(keys)}")
