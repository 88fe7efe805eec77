"""``POST /tag``: labels for the sequences in a request, from a model that serves many clients."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from structgp.data import sources
from structgp.data.documents import Document
from structgp.data.formats.document_reader import DocumentReader
from structgp.errors import InputError, StructgpError
from structgp.service.answering import DETAILS, Answerer
from structgp.service.guard import Receive, Scope, Send
from structgp.service.openapi import openapi
from structgp.service.requests import mistake, only, parsed

MOST_SEQUENCES, MOST_TOKENS = 1000, 50_000
"""Largest numbers of sequences and tokens per request: more would keep others waiting."""


@dataclass(frozen=True)
class Tagging:
    """An ASGI application that answers ``POST /tag`` itself and leaves other addresses to ``rest``.

    Starlette's routing of a request to a function takes as long as everything else in answering a request
    of one line (some 0.1 ms of processor time). This application runs inside ``Guard``, which hands over
    the whole body at once."""

    answerer: Answerer
    reader: sources.Reader
    rest: Any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in ("/tag", "/tag/"):
            await self.rest(scope, receive, send)
            return
        status, found, headers = 405, {"error": "use POST"}, [(b"allow", b"POST")]
        if scope["method"] == "POST":
            status, found = await self.answer((await receive())["body"])
            headers = []
        body = json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def answer(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """The HTTP status and the content of the answer."""
        try:
            given = parsed(body)
            only(given, "sequences", "texts", "detail")
            detail = given.get("detail", "probabilities")
            if detail not in DETAILS[:3]:
                raise InputError("detail", f"{detail!r} is not known", f"use {', '.join(DETAILS[:3])}")
            documents = documents_of(given["texts"], self.reader) if "texts" in given else None
            if documents is not None and isinstance(self.reader, DocumentReader):
                X = [self.reader.tokens(d) for d in documents]
            else:
                X = tokens_of(given.get("sequences"), self.reader)
            _check_tokens(X)
            if self.answerer.tagger is None:
                return 503, {"error": "there is no model yet: label more sequences"}
            found = await self.answerer.answers(X, detail) if X else []
        except InputError as error:
            return 400, mistake(error)
        except StructgpError as error:
            return 503, {"error": str(error)}
        for document, answer in zip(documents or (), found, strict=documents is not None):
            answer["tokens"] = [list(at) for at in document.tokens]
            answer["spans"] = [list(span[:3]) for span in document.spans_of(answer["labels"])]
        return 200, {"answers": found}


def _check_tokens(X: list[Any]) -> None:
    n = sum(map(len, X))
    if n > MOST_TOKENS:
        problem = f"{n:,} tokens, where {MOST_TOKENS:,} is the most"
        raise InputError("sequences", problem, "send several requests")


def documents_of(given: Any, reader: sources.Reader) -> list[Document]:
    """The texts of a request, split into tokens."""
    if not isinstance(reader, DocumentReader):
        raise InputError("texts", "the model was not trained on documents", "send 'sequences'")
    if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
        raise InputError("texts", "not a list of strings", 'send {"texts": ["...", ...]}')
    if len(given) > MOST_SEQUENCES:
        problem = f"{len(given)} of them, where {MOST_SEQUENCES} is the most"
        raise InputError("texts", problem, "send several requests")
    return [Document.from_text(text) for text in given]


def tokens_of(given: Any, reader: sources.Reader) -> list[Any]:
    """The features of the sequences in a request. For a model of columns, a token is given as the list of
    its columns; otherwise as its features, as in JSON lines."""
    if not isinstance(given, list):
        raise InputError("sequences", "not a list", 'send {"sequences": [[token, ...], ...]}')
    if len(given) > MOST_SEQUENCES:
        problem = f"{len(given)} of them, where {MOST_SEQUENCES} is the most"
        raise InputError("sequences", problem, "send several requests")
    if isinstance(reader, sources.ColumnReader):
        return [_columns(rows, reader, f"sequences[{n}]") for n, rows in enumerate(given)]
    for n, tokens in enumerate(given):
        if not isinstance(tokens, list) or not all(isinstance(t, dict | list) for t in tokens):
            raise InputError(f"sequences[{n}]", "not a list of tokens", "write the features of each token")
    return given


def _columns(rows: Any, reader: sources.ColumnReader, place: str) -> list[Any]:
    width = reader.n_columns
    if not isinstance(rows, list):
        raise InputError(place, "not a list of tokens", "write the columns of each token")
    for t, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != width or not all(isinstance(c, str) and c for c in row):
            problem = f"not {width} columns of text"
            raise InputError(
                f"{place}[{t}]", problem, "give the columns of the training file, without label"
            )
    return reader.tokens([tuple(row) for row in rows], place) if rows else []


def serve_app(answerer: Answerer, reader: sources.Reader, about: dict[str, Any]) -> Tagging:
    """The application of ``structgp serve``. about : what /status says about the model."""

    async def status(_: Request) -> Response:
        return JSONResponse(about)

    async def describe(_: Request) -> Response:
        return JSONResponse(openapi(labelling=False))

    routes = [Route("/status", status), Route("/openapi.json", describe)]
    return Tagging(answerer, reader, Starlette(routes=routes))
