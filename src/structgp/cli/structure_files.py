"""The option --structure: a name, or a file that declares a structure over the features of the data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from structgp.data.rules import is_plain_next
from structgp.data.sources import Reader
from structgp.data.sources.lines import cannot_read
from structgp.errors import InputError
from structgp.structures import Spec, Template, chain, piecewise, spec_from_words

OPTION = "--structure"
NAMED = {"chain": chain, "piecewise": piecewise}


def read_json(path: str, encoding: str = "utf-8") -> Any:
    """The JSON value in a file."""
    try:
        with open(path, encoding=encoding) as file:
            return json.load(file)
    except OSError as error:
        raise cannot_read(path, error) from error
    except (ValueError, RecursionError) as error:
        raise InputError(path, f"not JSON ({error})", "correct it") from error


def declared_in(name: str) -> Spec | None:
    """The spec that the file ``name`` declares; None if ``name`` is the name of a structure."""
    if name in NAMED:
        return None
    if not name.endswith(".json"):
        problem = f"{name!r} is not known"
        raise InputError(
            OPTION, problem, f"use {' or '.join(NAMED)}, or a file NAME.json that declares one"
        )
    try:
        return spec_from_words(read_json(name))
    except InputError as error:
        if not error.place.startswith("structure"):
            raise
        remedy = "correct the file; 'structgp train --help' has examples"
        raise InputError(f"{name}: {error.place}", error.problem, remedy) from error


def check_format(spec: Spec | None, format: str, shards: str | None) -> None:
    """Raises InputError if files of this format cannot hold the examples of a structure."""
    if spec is None or spec.is_chain:
        return
    if shards is not None:
        raise InputError("--shards", f"knows chains, and the structure is {spec}", "leave it out")
    if format != "jsonl" and (spec.form != "sequence" or spec.layers):
        what = "labels by layer" if spec.layers else f"examples that are each a {spec.form}"
        raise InputError(OPTION, f"{spec} needs {what}", "write them as JSON lines, with --format jsonl")


def features_named(spec: Spec) -> list[str]:
    """Names of the token features that a structure refers to."""
    found: list[str] = []
    for t in spec.templates:
        found += [t.key] if t.rule == "same" else []
        found += [name for name, _ in t.where]
        found += [*(() if t.features is None or t.ends == "own" else t.features), *t.without]
    return list(dict.fromkeys(found))


def structure_of(name: str, spec: Spec | None, reader: Reader) -> Spec:
    """The structure, with features named as the reader names them, and with the features of transitions
    that the template's B lines ask for."""
    if spec is None:
        return NAMED[name](reader.transition_columns, shared=False)
    if reader.template_lines:
        names = {n: column_of(n, reader.template_lines, name) for n in features_named(spec)}
        spec = replace(spec, templates=tuple(_renamed(t, names) for t in spec.templates))
    return _with_transitions(spec, reader.transition_columns, name)


def column_of(name: str, lines: Mapping[str, str], place: str) -> str:
    """The number of the template line that has this number, name or text."""
    if name in lines:
        return name
    found = [n for n, line in lines.items() if name in (line, line.partition(":")[0])]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{n} ({line})" for n, line in lines.items())
    problem = f"{len(found)} lines of the template are called {name!r}" if found else f"no feature {name!r}"
    raise InputError(place, problem, f"use the number or name of a line of the template: {known}")


def _renamed(template: Template, names: Mapping[str, str]) -> Template:
    t = template
    own = t.features is None or t.ends == "own"
    return replace(
        t,
        key=names[t.key] if t.rule == "same" else t.key,
        where=tuple((names[name], values) for name, values in t.where),
        features=t.features if own else tuple(names[name] for name in t.features or ()),
        without=tuple(names[name] for name in t.without),
    )


def _with_transitions(spec: Spec, columns: Sequence[str], name: str) -> Spec:
    if not columns:
        return spec
    if not any(map(is_plain_next, spec.templates)) or spec.has_segments:
        problem = f"{spec} has no transitions with features, which the template's B lines ask for"
        raise InputError(name, problem, "leave macros out of B lines")
    node, found = spec.node, []
    for t in spec.templates[1:]:
        more = is_plain_next(t)
        found.append(
            replace(t, features=tuple(dict.fromkeys((*(t.features or ()), *columns)))) if more else t
        )
    node = replace(node, without=tuple(dict.fromkeys((*node.without, *columns))))
    return replace(spec, templates=(node, *found))
