"""JSON lines: one example per line, for every kind of structure.

===========  ==============================================================================================
tokens       of a sequence, or nodes of a tree or graph: a list of objects, lists of strings, or lists of
             numbers. In an object, a list of numbers is a vector
pixels       of a grid, in place of tokens: rows of objects, of lists of numbers, or of numbers
labels       one per token, null where it is missing; rows of them for a grid; an object by layer where
             tokens have several. May be left out of files that are yet to be labelled
annotations  labels of several annotators, by name, each in the form of ``labels``
parents      of a tree: the number of each node's parent, counted from 0; -1 or null for a root
edges        of a graph: ``{"cites": [[0, 2], [1, 2]]}``, numbers of nodes
features     of edges: ``{"cites": [[0.5, 1], [2, 0]]}`` or a list of objects, one per edge
id           anything; it is kept
===========  ==============================================================================================

What ``structgp tag`` adds to a line (``ANSWERS``) is skipped when it is read again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from structgp.data.graphs import Graph, edges_of, parents_of
from structgp.data.sources.lines import FileSequence, Source, iter_lines, name_of
from structgp.errors import InputError, warn_caller

KEYS = ("tokens", "pixels", "labels", "annotations", "parents", "edges", "features", "id")
ANSWERS = ("probability", "probabilities", "labellings", "sets")
FORMS = ("sequence", "grid", "tree", "graph")
SHOWN = ("word", "token", "form", "text")
"""Features whose value is shown for a token, if it has one."""


@dataclass(frozen=True)
class JsonExample(FileSequence):
    """One line. tokens : the example in the form that a classifier takes: tokens, a
    :class:`structgp.Graph`, or the rows of a grid. labels : in the form of the file. given : the line
    itself."""

    given: dict[str, Any] = field(default_factory=dict)


def iter_json(
    source: Source, form: str | None = None, *, encoding: str = "utf-8", name: str | None = None
) -> Iterator[JsonExample]:
    """Read examples one by one. Memory is that of one line.

    form : the form of the examples, one of ``FORMS``; None to tell from the keys of each line. Other
    arguments are those of :func:`structgp.data.sources.iter_columns`. An InputError names ``name:line``,
    and the place in the line.

    Example
    -------
    >>> line = '{"tokens": [{"word": "two"}, {"word": "eggs"}], "labels": ["QTY", null]}'
    >>> found = next(iter_json([line]))
    >>> found.tokens, found.labels
    ([{'word': 'two'}, {'word': 'eggs'}], ['QTY', None])
    """
    name = name_of(source) if name is None else name
    for number, line in enumerate(iter_lines(source, encoding=encoding, name=name), start=1):
        if line.strip():
            yield _example(line, form, name, number)


def format_json(given: Mapping[str, Any], **answers: Any) -> str:
    """The line of an example with these answers: arrays become lists, numbers stay numbers."""
    kept = {key: value for key, value in given.items() if key not in ANSWERS}
    return json.dumps(kept | answers, ensure_ascii=False, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} in an answer")


def _example(line: str, form: str | None, name: str, number: int) -> JsonExample:
    place = f"{name}:{number}"
    given = _parsed(line, place)
    is_grid = "pixels" in given if form is None else form == "grid"
    needed, other = ("pixels", "tokens") if is_grid else ("tokens", "pixels")
    if needed not in given:
        problem = f"no {needed!r}"
        if other in given and form is not None:
            problem = f"{other!r} where the structure is a {form}, which has {needed}"
        raise InputError(place, problem, f'write {{"{needed}": [...], ...}}')
    if other in given:
        raise InputError(place, f"both {other!r} and {needed!r}", "give one of them")
    x, nodes = _grid(given["pixels"], place) if is_grid else _tokens(given["tokens"], f"{place}.tokens")
    if not is_grid:
        graph = _graph(given, nodes, place)
        has_more = graph.parents is not None or bool(graph.edges or graph.features)
        left_out = [key for key in ("parents", "edges", "features") if given.get(key)]
        if form == "sequence" and left_out:
            what = ", ".join(left_out)
            warn_caller(f"{name}: {what}: not used: the structure is for sequences (train --structure)")
        x = graph if form in ("tree", "graph") or (form is None and has_more) else nodes
        if form == "tree" and graph.parents is None:
            raise InputError(place, "no 'parents'", 'write "parents": [-1, 0, ...], one per token')
    labels = given.get("labels")
    shape = [len(row) for row in x] if is_grid else len(nodes)
    labels = None if labels is None else _labels(labels, shape, f"{place}.labels")
    words = (
        [shown_word(token) for token in (t for row in x for t in row)]
        if is_grid
        else list(map(shown_word, nodes))
    )
    return JsonExample([()] * len(words), x, words, labels, name, number, given)


def _parsed(line: str, place: str) -> dict[str, Any]:
    def unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            twice = next(key for n, (key, _) in enumerate(items) if key in dict(items[:n]))
            raise InputError(place, f"the key {twice!r} twice", "give it once")
        return found

    try:
        given = json.loads(line, object_pairs_hook=unique, parse_constant=lambda _: float("nan"))
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        where = f" at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise InputError(place, f"not JSON ({reason}{where})", "write one object per line") from None
    if not isinstance(given, dict):
        problem = f"expected an object, got a {type(given).__name__}"
        raise InputError(place, problem, 'write {"tokens": [...], "labels": [...]}')
    for key in given:
        if key not in KEYS and key not in ANSWERS:
            remedy = f"use {', '.join(KEYS)}"
            if key == "text":
                remedy = "this looks like documents of doccano or Prodigy: use --format doccano or prodigy"
            raise InputError(place, f"unknown key {key!r}", remedy)
    return given


def _tokens(given: Any, place: str) -> tuple[list[Any], list[Any]]:
    if not isinstance(given, list):
        raise InputError(place, f"expected a list, got a {type(given).__name__}", "pass a list of objects")
    found = [_token(token, f"{place}[{t}]") for t, token in enumerate(given)]
    return found, found


def _token(token: Any, place: str) -> Any:
    """An object with its lists of numbers as vectors; lists as they are."""
    if isinstance(token, dict):
        vectors = {k: np.array(v, float) for k, v in token.items() if _is_vector(v)}
        return token | vectors if vectors else token
    if isinstance(token, list) and (_is_vector(token) or all(isinstance(v, str) for v in token)):
        return token
    problem = f"expected the features of a token, got {json.dumps(token)[:40]}"
    raise InputError(place, problem, 'write an object such as {"word": "two"}, or a list of numbers')


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_vector(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))


def _grid(given: Any, place: str) -> tuple[Any, list[Any]]:
    """The rows of a grid, an array (H, W, D) if pixels are numbers; and all pixels."""
    place = f"{place}.pixels"
    if not isinstance(given, list) or not all(isinstance(row, list) for row in given):
        raise InputError(place, "not rows of pixels", "write [[pixel, pixel], [pixel, pixel]]")
    for h, row in enumerate(given):
        if len(row) != len(given[0]):
            problem = f"{len(row)} pixels where the first row has {len(given[0])}"
            raise InputError(f"{place}[{h}]", problem, "write rows of one length")
    rows = [
        [[p] if _is_number(p) else _token(p, f"{place}[{h}][{w}]") for w, p in enumerate(row)]
        for h, row in enumerate(given)
    ]
    flat = [p for row in rows for p in row]
    if flat and all(map(_is_vector, flat)):
        width = len(flat[0])
        for h, row in enumerate(rows):
            for w, pixel in enumerate(row):
                if len(pixel) != width:
                    problem = f"{len(pixel)} numbers where the first pixel has {width}"
                    raise InputError(f"{place}[{h}][{w}]", problem, "give every pixel equally many")
        return np.array(rows, float), flat
    return rows, flat


def _graph(given: Mapping[str, Any], nodes: list[Any], place: str) -> Graph:
    """The graph of a line, after checking the numbers of its nodes."""
    edges, features, parents = given.get("edges"), given.get("features"), given.get("parents")
    for key, value in (("edges", edges), ("features", features)):
        if value is not None and not (
            isinstance(value, dict) and all(isinstance(v, list) for v in value.values())
        ):
            raise InputError(
                f"{place}.{key}", "not an object of lists", f'write "{key}": {{"name": [...]}}'
            )
    if parents is not None and not isinstance(parents, list):
        problem = f"expected a list, got a {type(parents).__name__}"
        raise InputError(f"{place}.parents", problem, "write one number per token, -1 for a root")
    own = {
        key: [_token(row, f"{place}.features[{key!r}][{e}]") for e, row in enumerate(rows)]
        for key, rows in (features or {}).items()
    }
    graph = Graph(nodes, edges or {}, own, parents)
    if parents is not None:
        parents_of(graph, len(nodes), place)
    for key, rows in graph.edges.items():
        arity = len(rows[0]) if rows and isinstance(rows[0], list) else 2
        edges_of(graph, key, arity, len(nodes), place)
    for key, rows in own.items():
        count = len(graph.edges.get(key, ()))
        if len(rows) != count:
            problem = f"{len(rows)} rows of features for {count} edges"
            raise InputError(f"{place}.features[{key!r}]", problem, "give one row per edge")
    return graph


def _labels(given: Any, shape: int | list[int], place: str) -> Any:
    """Labels in the form that a classifier takes, after checking that there is one per token."""
    if isinstance(given, dict) and isinstance(shape, int):
        return {layer: _labels(of, shape, f"{place}[{layer!r}]") for layer, of in given.items()}
    if isinstance(shape, list):
        rows = given if isinstance(given, list) else []
        if len(rows) != len(shape):
            problem = f"{len(rows)} rows of labels for {len(shape)} rows of pixels"
            raise InputError(place, problem, "give every pixel one label, or null")
        if rows and all(isinstance(row, list) and all(type(v) is int for v in row) for row in rows):
            for h, (row, width) in enumerate(zip(rows, shape, strict=True)):
                _check_count(row, width, "pixels", f"{place}[{h}]")
            return np.array(rows, dtype=np.int64)
        parts = enumerate(zip(rows, shape, strict=True))
        return [_row(row, width, "pixels", f"{place}[{h}]", True) for h, (row, width) in parts]
    return _row(given, shape, "tokens", place)


def _row(given: Any, width: int, what: str, place: str, numbers: bool = False) -> list[str | None]:
    if not isinstance(given, list):
        problem = f"expected a list of labels, got a {type(given).__name__}"
        raise InputError(place, problem, "write one label per token, null where it is missing")
    _check_count(given, width, what, place)
    found = [str(v) if numbers and type(v) is int else v for v in given]
    for t, label in enumerate(found):
        if label is not None and not isinstance(label, str):
            raise InputError(f"{place}[{t}]", f"label {label!r} is not a string", "put it in quotes")
    return found


def _check_count(row: Sequence[Any], width: int, what: str, place: str) -> None:
    if len(row) != width:
        raise InputError(
            place, f"{len(row)} labels for {width} {what}", f"give all {what} a label, or null"
        )


def shown_word(token: Any) -> str:
    """The text that is shown for a token, '' if there is none."""
    if isinstance(token, Mapping):
        strings = [token[key] for key in SHOWN if isinstance(token.get(key), str)]
        return next(iter([*strings, *(v for v in token.values() if isinstance(v, str))]), "")
    return token[0] if isinstance(token, list | tuple) and token and isinstance(token[0], str) else ""
