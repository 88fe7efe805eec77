"""The addresses of ``structgp label``: the page, and the JSON interface that it uses."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from structgp.errors import InputError
from structgp.service.label_page import POLICY, page
from structgp.service.openapi import openapi
from structgp.service.reasons import why
from structgp.service.requests import answering, name_in, number_in, only
from structgp.service.session import Session
from structgp.service.tag_requests import Tagging

MOST_WITNESSES = 300
"""Number of latest labelled sequences in which 'why' looks for similar tokens; it takes half a second on
one core."""
OPENED = ("search", "review")


def label_app(session: Session, default_name: str) -> Tagging:
    """The application. default_name : the name that the page proposes for the annotator."""
    calls = Calls(session)
    html = page({"annotator": default_name, "tags": session.tags.to_json(), "pool": session.pool.name})

    async def show(_: Request) -> Response:
        return HTMLResponse(html, headers={"content-security-policy": POLICY})

    async def describe(_: Request) -> Response:
        return JSONResponse(openapi(labelling=True))

    reads = {
        "/next": calls.next,
        "/sequence": calls.sequence,
        "/status": calls.status,
        "/search": calls.search,
        "/bulk": calls.bulk,
        "/disagreements": calls.disagreements,
        "/why": calls.why,
    }
    writes = {"/labels": calls.labels, "/undo": calls.undo, "/bulk": calls.accept_bulk}
    rest = Starlette(
        routes=[
            Route("/", show),
            Route("/openapi.json", describe),
            *(Route(path, answering(call), methods=["GET"]) for path, call in reads.items()),
            *(
                Route(path, answering(call, needs_body=True), methods=["POST"])
                for path, call in writes.items()
            ),
        ]
    )
    return Tagging(session.answerer, session.pool.reader, rest)


class Calls:
    """One method per address, which handles the parsed request."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def next(self, given: dict[str, Any]) -> Any:
        only(given, "annotator")
        return self.session.next(name_in(given, "annotator"))

    def sequence(self, given: dict[str, Any]) -> Any:
        only(given, "sequence", "stream")
        return self.session.opened(number_in(given, "sequence", int), _stream(given))

    def status(self, given: dict[str, Any]) -> Any:
        only(given)
        return self.session.status()

    def search(self, given: dict[str, Any]) -> Any:
        only(given, "text")
        text = given.get("text")
        if not isinstance(text, str) or not text.strip():
            raise InputError("text", "missing", "give the words to look for, ?text=eggs")
        return {"found": self.session.search(text)}

    def disagreements(self, given: dict[str, Any]) -> Any:
        only(given)
        return {"found": self.session.disagreements()}

    def labels(self, given: dict[str, Any]) -> Any:
        """Saves labels and answers with the next sequence, in one round trip."""
        only(given, "request", "annotator", "sequence", "labels", "stream")
        request, annotator = name_in(given, "request"), name_in(given, "annotator")
        stream = _stream(given)
        events = self.session.accept(request, annotator, given.get("sequence"), given.get("labels"), stream)
        return {"events": [e.id for e in events], "next": self.session.next(annotator)}

    def undo(self, given: dict[str, Any]) -> Any:
        only(given, "request", "annotator")
        return {"next": self.session.undo(name_in(given, "request"), name_in(given, "annotator"))}

    def bulk(self, given: dict[str, Any]) -> Any:
        only(given, "least")
        return self.session.bulk(number_in(given, "least", float))

    def accept_bulk(self, given: dict[str, Any]) -> Any:
        only(given, "request", "annotator", "least")
        request, annotator = name_in(given, "request"), name_in(given, "annotator")
        events = self.session.accept_bulk(request, annotator, number_in(given, "least", float))
        return {"events": [e.id for e in events], "next": self.session.next(annotator)}

    def why(self, given: dict[str, Any]) -> Any:
        only(given, "sequence", "position", "label")
        i, token = number_in(given, "sequence", int), number_in(given, "position", int)
        return why(self.session, i, token, given.get("label"), MOST_WITNESSES)


def _stream(given: dict[str, Any]) -> str:
    stream = given.get("stream", "search")
    if stream not in (*OPENED, "chosen", "random", "audit"):
        raise InputError("stream", f"{stream!r} is not known", f"use one of {', '.join(OPENED)}")
    return str(stream)
