"""``POST /tag``: labels for sequences that a request brings, from a model that others ask too."""

from __future__ import annotations

import asyncio
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
from structgp.service.openapi import openapi
from structgp.service.requests import body_of, only, wrong

MOST_SEQUENCES, MOST_TOKENS = 1000, 50_000
"""Per request: more would keep others waiting."""


def tag_route(answerer: Answerer, reader: sources.Reader) -> Route:
    async def tag(request: Request) -> Response:
        try:
            given = await body_of(request)
            only(given, "sequences", "texts", "detail")
            detail = given.get("detail", "probabilities")
            if detail not in DETAILS[:3]:
                raise InputError("detail", f"{detail!r} is not known", f"use {', '.join(DETAILS[:3])}")
            documents = documents_of(given["texts"], reader) if "texts" in given else None
            if documents is not None and isinstance(reader, DocumentReader):
                X = [reader.tokens(d) for d in documents]
            else:
                X = tokens_of(given.get("sequences"), reader)
            _check_tokens(X)
            if answerer.tagger is None:
                return JSONResponse({"error": "there is no model yet: label more sequences"}, 503)
            found = await asyncio.wrap_future(answerer.ask(X, detail)) if X else []
        except InputError as error:
            return wrong(error)
        except StructgpError as error:
            return JSONResponse({"error": str(error)}, 503)
        for document, answer in zip(documents or (), found, strict=documents is not None):
            answer["tokens"] = [list(at) for at in document.tokens]
            answer["spans"] = [list(span[:3]) for span in document.spans_of(answer["labels"])]
        return JSONResponse({"answers": found})

    return Route("/tag", tag, methods=["POST"])


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
    """The features of the sequences of a request. With a model of columns, a token is the list of its
    columns; otherwise its features, as JSON lines have them."""
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


def serve_app(answerer: Answerer, reader: sources.Reader, about: dict[str, Any]) -> Starlette:
    """The addresses of ``structgp serve``. about : what /status says of the model."""

    async def status(_: Request) -> Response:
        return JSONResponse(about)

    async def describe(_: Request) -> Response:
        return JSONResponse(openapi(labelling=False))

    routes = [tag_route(answerer, reader), Route("/status", status), Route("/openapi.json", describe)]
    return Starlette(routes=routes)
