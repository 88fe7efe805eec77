"""Structures declared in short words, as in JSON: ``{"chain": {"order": 2}, "same": {"key": "word"}}``.

Each word stands for the function of that name with its arguments; the specs that they declare are added.
``same`` and ``edges`` may be lists, to declare several. ``layers`` has words for each layer. ``program``
and ``most_entries`` are the arguments of ``Spec.using``. A spec as ``Spec.to_json`` writes it, with
``templates``, is accepted as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

from structgp.errors import InputError
from structgp.structures.declare import edges, grid, layers, same, segments, tree
from structgp.structures.spec import PROGRAMS, Spec, chain, piecewise, refuse

WORDS: dict[str, tuple[Callable[..., Spec], dict[str, str]]] = {
    "chain": (chain, {"features": "names", "shared": "flag", "order": "number"}),
    "piecewise": (piecewise, {"features": "names", "shared": "flag"}),
    "same": (same, {"key": "text", "where": "values", "every": "flag"}),
    "tree": (tree, {"features": "names or both"}),
    "grid": (grid, {"neighbours": "number", "features": "names or both"}),
    "edges": (edges, {"name": "text", "symmetric": "flag", "labels": "number", "features": "flag"}),
    "segments": (segments, {"max_length": "number"}),
}
"""The function of each word, and the kind of each of its arguments."""

SEVERAL, NEEDED = ("same", "edges"), {"same": "key", "edges": "name"}
OTHERS = ("layers", "program", "most_entries")


def spec_from_words(given: Any, place: str = "structure") -> Spec:
    """The spec that words, or the output of ``Spec.to_json``, declare; InputError naming the wrong
    field."""
    if isinstance(given, Mapping) and "templates" in given:
        return Spec.from_json(given)
    known = f"known are {', '.join((*WORDS, *OTHERS))}"
    if not isinstance(given, Mapping):
        refuse(place, f"must be an object, got {given!r}; {known}")
    for name in given:
        if name not in WORDS and name not in OTHERS:
            refuse(f"{place}.{name}", f"unknown field; {known}")
    parts = [spec for name, value in given.items() if name in WORDS for spec in _parts(name, value, place)]
    if "layers" in given:
        if parts:
            refuse(f"{place}.layers", "must have its structures inside, not beside it")
        parts = [_layers(given["layers"], f"{place}.layers")]
    if not parts:
        refuse(place, f"declares nothing; {known}")
    spec = reduce(lambda a, b: a + b, parts)
    return _using(spec, given, place)


def _parts(word: str, given: Any, place: str) -> list[Spec]:
    if word in SEVERAL and isinstance(given, list):
        return [_part(word, value, f"{place}.{word}[{n}]") for n, value in enumerate(given)]
    return [_part(word, given, f"{place}.{word}")]


def _part(word: str, given: Any, place: str) -> Spec:
    function, kinds = WORDS[word]
    if not isinstance(given, Mapping):
        refuse(place, f"must be an object with any of {', '.join(kinds)}, got {given!r}")
    for name, value in given.items():
        if name not in kinds:
            refuse(f"{place}.{name}", f"unknown field; known are {', '.join(kinds)}")
        problem = _fault(value, kinds[name])
        if problem:
            refuse(f"{place}.{name}", f"must be {problem}, got {value!r}")
    needed = NEEDED.get(word)
    if needed is not None and needed not in given:
        refuse(f"{place}.{needed}", "is missing")
    try:
        return function(**given)
    except InputError as error:
        own = error.place.removeprefix("structure.").removeprefix(word).removeprefix(".")
        raise InputError(f"{place}.{own or needed or word}", error.problem, error.remedy) from error


def _layers(given: Any, place: str) -> Spec:
    if not isinstance(given, Mapping):
        refuse(place, f"must be an object from the name of a layer to its structure, got {given!r}")
    ties = given.get("ties", (0,))
    if not isinstance(ties, list | tuple) or any(_fault(away, "number") for away in ties):
        refuse(f"{place}.ties", f"must be a list of distances in tokens such as [0, 1], got {ties!r}")
    parts = {name: value for name, value in given.items() if name != "ties"}
    found = {name: spec_from_words(value, f"{place}.{name}") for name, value in parts.items()}
    return layers(ties=ties, **found)


def _using(spec: Spec, given: Mapping[str, Any], place: str) -> Spec:
    program, most = given.get("program", PROGRAMS[0]), given.get("most_entries")
    if most is not None and (_fault(most, "number") or most < 1):
        refuse(f"{place}.most_entries", f"must be a number of table entries, got {most!r}")
    if program not in PROGRAMS:
        refuse(f"{place}.program", f"must be one of {', '.join(PROGRAMS)}, got {program!r}")
    return spec if program == PROGRAMS[0] and most is None else spec.using(program, most)


def _fault(value: Any, kind: str) -> str:
    """What a value must be; '' if it is just that."""
    names = isinstance(value, list) and all(isinstance(v, str) for v in value)
    right = {
        "flag": isinstance(value, bool),
        "number": isinstance(value, int) and not isinstance(value, bool),
        "text": isinstance(value, str),
        "names": names,
        "names or both": names or value == "both ends",
        "values": isinstance(value, Mapping)
        and all(
            isinstance(v, str) or (isinstance(v, list) and all(isinstance(x, str) for x in v))
            for v in value.values()
        ),
    }
    wanted = {
        "flag": "true or false",
        "number": "a whole number",
        "text": "a string",
        "names": "a list of names of features",
        "names or both": "'both ends', or a list of names of features",
        "values": "an object from the name of a feature to a value or a list of values",
    }
    return "" if right[kind] else wanted[kind]
