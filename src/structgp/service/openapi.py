"""The OpenAPI 3.1 description of the JSON interface, as served at ``/openapi.json``."""

from __future__ import annotations

from typing import Any

from structgp import __version__

_TEXT = {"type": "string"}
_NAME = {"type": "string", "minLength": 1, "maxLength": 64}
_NUMBER = {"type": "integer", "minimum": 0}
_SHARE = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
_LABELS = {
    "type": "array",
    "items": {"type": ["string", "null"]},
    "description": "One per token, null: unknown.",
}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _answers(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    errors = {
        "400": "The request is wrong; 'place', 'problem' and 'remedy' say how.",
        "401": "The token is missing or wrong.",
        "408": "The request took too long to arrive.",
        "413": "The request is too large.",
        "421": "The name in the Host header is not one that the service answers to.",
        "503": "There is no model yet, or the service is ending.",
    }
    content = {"application/json": {"schema": schema}}
    found: dict[str, Any] = {"200": {"description": description, "content": content}}
    wrong = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return found | {code: {"description": text, "content": wrong} for code, text in errors.items()}


def _get(summary: str, answer: dict[str, Any], **query: tuple[bool, dict[str, Any]]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "query", "required": required, "schema": schema}
        for name, (required, schema) in query.items()
    ]
    return {"summary": summary, "parameters": parameters, "responses": _answers(summary, answer)}


def _post(summary: str, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": body}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": content},
        "responses": _answers(summary, answer),
    }


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


_SCHEMAS: dict[str, Any] = {
    "Error": _object(("error",), error=_TEXT, place=_TEXT, problem=_TEXT, remedy=_TEXT),
    "Answer": _object(
        ("labels",),
        labels={"type": "array", "items": _TEXT},
        probability={"type": ["number", "null"], "description": "That all labels are right at once."},
        probabilities={"type": "array", "items": {"type": "number"}, "description": "Of each label."},
        marginals={
            "type": "array",
            "items": {"type": "object", "additionalProperties": {"type": "number"}},
            "description": "Of every label of each token.",
        },
        tokens={"type": "array", "description": "Of a text: start and stop of each token, in characters."},
        spans={"type": "array", "description": "Of a text: start, stop and label, in characters."},
    ),
    "Shown": _object(
        ("sequence",),
        sequence={"type": ["integer", "null"], "description": "null when there is none left."},
        place=_TEXT,
        words={"type": "array", "items": _TEXT},
        stream={"type": "string", "enum": ["chosen", "random", "audit", "search", "review"]},
        labels={"anyOf": [_LABELS, {"type": "null"}], "description": "That were given before."},
        suggestion={
            "type": ["object", "null"],
            "description": "An Answer with 'alternatives' (label and probability, per token), "
            "'uncertainty' (total and of the data, in nats, per token), 'spans' (start, stop, type, "
            "probability) and 'model'. null without a model, and for audits.",
        },
    ),
}


def _tag() -> dict[str, Any]:
    token = {"type": ["array", "object"], "description": "Its columns, or its features."}
    sequences = {"type": "array", "maxItems": 1000, "items": {"type": "array", "items": token}}
    detail = {"type": "string", "enum": ["labels", "probabilities", "all"], "default": "probabilities"}
    answer = _object(("answers",), answers={"type": "array", "items": _ref("Answer")})
    return _post(
        "Labels of sequences.", _object(("sequences",), sequences=sequences, detail=detail), answer
    )


def _labelling() -> dict[str, Any]:
    shown, found = _ref("Shown"), _object(("found",), found={"type": "array", "items": _object()})
    saved = _object(("events", "next"), events={"type": "array", "items": _NUMBER}, next=shown)
    by = {"request": _NAME, "annotator": _NAME}
    given = _object(
        ("request", "annotator", "sequence", "labels"), **by, sequence=_NUMBER, labels=_LABELS, stream=_TEXT
    )
    undone = _object(("next",), next={"anyOf": [shown, {"type": "null"}]})
    bulk = _object(("request", "annotator", "least"), **by, least=_SHARE)
    return {
        "/next": {"get": _get("The sequence to label now.", shown, annotator=(True, _NAME))},
        "/labels": {"post": _post("Save labels; answered once they are on disk.", given, saved)},
        "/undo": {
            "post": _post("Take back one's last labels.", _object(("request", "annotator"), **by), undone)
        },
        "/sequence": {"get": _get("Any sequence.", shown, sequence=(True, _NUMBER), stream=(False, _TEXT))},
        "/search": {"get": _get("Sequences that contain a text.", found, text=(True, _TEXT))},
        "/bulk": {
            "get": _get(
                "What is above a probability, with its precision.", _object(), least=(True, _SHARE)
            ),
            "post": _post("Accept the model's labels above a probability.", bulk, saved),
        },
        "/disagreements": {"get": _get("Labels that the model contradicts.", found)},
        "/why": {
            "get": _get(
                "What speaks for a label.",
                _object(),
                sequence=(True, _NUMBER),
                position=(True, _NUMBER),
                label=(False, _TEXT),
            )
        },
    }


def openapi(labelling: bool) -> dict[str, Any]:
    """The whole description. labelling : True for ``structgp label``, False for ``structgp serve``."""
    status = "How far the labels are, and how good the model is." if labelling else "About the model."
    paths = {"/tag": {"post": _tag()}, "/status": {"get": _get(status, _object())}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "structgp label" if labelling else "structgp serve", "version": __version__},
        "paths": paths | (_labelling() if labelling else {}),
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {
                "header": {"type": "http", "scheme": "bearer"},
                "address": {"type": "apiKey", "in": "query", "name": "token"},
            },
        },
        "security": [{"header": []}, {"address": []}],
    }
