"""Label Studio's tasks: a JSON list of ``{"data": {"text": ...}, "annotations": [...], "predictions":
[...]}``.

If a task has several annotations, the one marked as ground truth is read, else the last that was not
cancelled; the others stay in the task. A model's answers are written as a prediction with a ``score`` for
the task, the share of its labels that is expected to be right, and the probability of each region as the
region's score. Offsets count characters (code points), as in Label Studio; if the text of a region shows
that they count UTF-16 units, as in older versions, they are read as such."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from structgp.data.documents import Document, TextSpan, tokenize
from structgp.data.formats import format_parts as parts
from structgp.data.formats.format_parts import UNKNOWN, Placed, Reading
from structgp.data.formats.json_array import json_items
from structgp.data.sources.lines import Source
from structgp.errors import InputError

MODEL = "structgp"
_REGIONS = ("labels", "hypertextlabels")
_NAMES = {"from_name": "label", "to_name": "text", "type": "labels"}


def read_label_studio(source: Source, name: str, how: Reading) -> Iterator[Placed]:
    for number, (given, line) in enumerate(json_items(source, name, how.encoding)):
        place = f"{name}[{number}]"
        yield Placed(_document(parts.an_object(given, place), place, how), line)


def _document(task: dict[str, Any], place: str, how: Reading) -> Document:
    data = parts.an_object(task.get("data"), f"{place}.data")
    text = parts.text_of(data, _text_key(data, f"{place}.data"), f"{place}.data")
    more = task.get("meta")
    more = more if isinstance(more, dict) else {}
    offsets = parts.offsets_of(more.get("tokens"), text, f"{place}.meta.tokens")
    meta = {key: value for key, value in task.items() if key != "id" or not isinstance(value, str)}
    identity = None if task.get("id") is None else str(task["id"])
    document = parts.placed_document(text, offsets, place, id=identity, meta={"task": meta} if meta else {})
    chosen = _annotation(task, place)
    if chosen is not None:
        annotation, at = chosen
        document = parts.labelled(document, _spans(annotation, text, at), at, how, more.get(UNKNOWN))
    predictions = parts.list_of(task.get("predictions", []), f"{place}.predictions")
    # Exports may hold ids instead of predictions.
    own = [n for n, p in enumerate(predictions) if isinstance(p, dict) and p.get("model_version") == MODEL]
    if own:
        at, given = f"{place}.predictions[{own[-1]}]", predictions[own[-1]]
        document = parts.labelled(
            document, _spans(given, text, at), at, how, predicted=True, score=given.get("score")
        )
    return document


def _text_key(data: Mapping[str, Any], place: str) -> str:
    strings = [key for key, value in data.items() if isinstance(value, str)]
    if "text" in data or len(strings) != 1:
        return "text"
    return strings[0]


def _annotation(task: Mapping[str, Any], place: str) -> tuple[dict[str, Any], str] | None:
    """The annotation to read, and its place."""
    found = []
    for n, given in enumerate(parts.list_of(task.get("annotations", []), f"{place}.annotations")):
        at = f"{place}.annotations[{n}]"
        if not parts.an_object(given, at).get("was_cancelled"):
            found.append((given, at))
    return next(
        (one for one in reversed(found) if one[0].get("ground_truth")), found[-1] if found else None
    )


def _spans(given: Mapping[str, Any], text: str, place: str) -> list[tuple[Any, ...]]:
    """The labelled regions of an annotation or prediction; anything else in it, such as choices, is
    skipped."""
    found = []
    for n, region in enumerate(parts.list_of(given.get("result"), f"{place}.result")):
        at = f"{place}.result[{n}]"
        value = parts.an_object(region, at).get("value")
        if region.get("type", "labels") not in _REGIONS or not isinstance(value, dict):
            continue
        names = parts.list_of(value.get("labels", value.get("hypertextlabels")), f"{at}.value.labels")
        if len(names) != 1:
            raise InputError(f"{at}.value.labels", f"{len(names)} labels", "give a region one label")
        # For HTML, where the other offsets are paths.
        offsets = parts.an_object(value.get("globalOffsets", value), f"{at}.value.globalOffsets")
        start, stop = (parts.whole(offsets.get(key), f"{at}.value.{key}") for key in ("start", "end"))
        start, stop = _in_characters(text, start, stop, value.get("text"), at)
        label = parts.name_of_label(names[0], f"{at}.value.labels[0]")
        found.append((start, stop, label, region.get("score", 0.0)))
    return found


def _in_characters(text: str, start: int, stop: int, shown: Any, place: str) -> tuple[int, int]:
    """Offsets in characters, checked against the text that the region gives for itself."""
    if not isinstance(shown, str) or text[start:stop].split() == shown.split():
        return start, stop
    units = text.encode("utf-16-le", "surrogatepass")
    pieces = units[: 2 * start], units[: 2 * stop]
    first, last = (len(piece.decode("utf-16-le", "replace")) for piece in pieces)
    if text[first:last].split() == shown.split():
        return first, last
    problem = f"{shown!r}, but the text from {start} to {stop} is {text[start:stop]!r}"
    raise InputError(f"{place}.value", problem, "correct the offsets, or export the project again")


def write_label_studio(documents: Iterable[Document], how: Reading) -> Iterator[str]:
    yield "["
    for number, document in enumerate(documents):
        yield ("," if number else "") + "\n" + parts.as_line(_task(document)).rstrip("\n")
    yield "\n]\n"


def _task(document: Document) -> dict[str, Any]:
    identity = {} if document.id is None else {"id": document.id}
    task: dict[str, Any] = identity | dict(document.meta.get("task", {}))
    names = _names_in(task)
    data = dict(task.get("data", {}))
    task["data"] = data | {_text_key(data, ""): document.text}
    more = dict(task["meta"]) if isinstance(task.get("meta"), dict) else {}
    if document.tokens != tokenize(document.text):
        more["tokens"] = [list(token) for token in document.tokens]
    if document.labels is not None:
        task["annotations"] = _annotations(document, task, names)
        if unknown := [list(t) for t, y in zip(document.tokens, document.labels, strict=True) if y is None]:
            more[UNKNOWN] = unknown
    if more:
        task["meta"] = more
    if document.prediction is not None:
        score = document.prediction.score
        own: dict[str, Any] = {
            "model_version": MODEL,
            "result": _regions(document, document.prediction.spans, names),
        }
        own |= {} if score is None else {"score": parts.rounded(score)}
        others = [
            p
            for p in task.get("predictions", [])
            if not isinstance(p, dict) or p.get("model_version") != MODEL
        ]
        task["predictions"] = [*others, own]
    return task


def _annotations(document: Document, task: Mapping[str, Any], names: Mapping[str, str]) -> list[Any]:
    """The task's annotations, with the document's spans in the one that is read. If all its regions already
    agree with the spans, they stay as they are; so does everything that is not a region."""
    given = list(task.get("annotations", []))
    chosen = _annotation(task, "task")
    if chosen is None:
        return [*given, {"result": _regions(document, document.spans, names)}]
    annotation, at = chosen
    spans = [span[:3] for span in document.spans]
    if sorted(span[:3] for span in _spans(annotation, document.text, at)) != spans:
        others = [region for region in annotation["result"] if region.get("type") not in _REGIONS]
        changed = annotation | {"result": [*others, *_regions(document, document.spans, names)]}
        given[next(n for n, one in enumerate(given) if one is annotation)] = changed
    return given


def _names_in(task: Mapping[str, Any]) -> dict[str, str]:
    """The names that the project has for its labels and its text: those in the task's regions, else the
    usual ones."""
    for given in (*task.get("annotations", ()), *task.get("predictions", ())):
        result = given.get("result") if isinstance(given, dict) else None  # or an id
        for region in result if isinstance(result, list) else ():  # cancelled ones are not checked
            if isinstance(region, dict) and region.get("type") in _REGIONS:
                return {key: region.get(key, usual) for key, usual in _NAMES.items()}
    return _NAMES


def _regions(
    document: Document, spans: Iterable[TextSpan], names: Mapping[str, str]
) -> list[dict[str, Any]]:
    found = []
    for n, span in enumerate(spans):
        value = {"start": span.start, "end": span.stop, "text": document.text[span.start : span.stop]}
        region: dict[str, Any] = {"id": f"s{n}", **names, "value": value | {names["type"]: [span.label]}}
        found.append(
            region if span.probability is None else region | {"score": parts.rounded(span.probability)}
        )
    return found
