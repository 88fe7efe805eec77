"""Rules on labellings of any structure: which labels the tuples of a template may have together.

A declaration is one of ``data.schemes``, for neighbours in a sequence, or names templates::

    {"forbidden": {"next": [("A", "B")], "cites": [("A", "B")]}, "allowed": {"parent": [("A", "A"), ...]}}

A template goes by its name, by the name of the edges, or by the feature of equal tokens. A tagging scheme
may be given as well: ``{"scheme": "BIO", "forbidden": {...}}``. In the pairs of 'next', None stands for the
start or the end of a sequence. Labels of a layer are written without the layer's name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np

from structgp.data.links import GraphSplit, Links, spans_of
from structgp.data.schemes import Allowed, allowed
from structgp.errors import InputError

PLACE = "constraints"


def declared_rules(declared: Any, classes: Sequence[str], spec: Any = None) -> Allowed:
    """The rules that a declaration makes for the labels ``classes``. spec : the structure's, None for a
    chain."""
    by_template = _by_template(declared)
    if by_template is None:
        _check_next(spec)
        return allowed(declared, classes)
    scheme = declared.get("scheme")
    found = free(len(classes)) if scheme is None else declared_rules(scheme, classes, spec)
    for kind, rules in by_template.items():
        for name, tuples in rules.items():
            found = _also(found, kind, name, tuples, classes, spec)
    return found


def free(V: int) -> Allowed:
    """Rules for V labels that forbid nothing."""
    return Allowed(np.ones((V, V), bool), np.ones(V, bool), np.ones(V, bool))


def is_plain_next(template: Any) -> bool:
    """True for the template of neighbours in a sequence, which is the one that tagging schemes are
    about."""
    return bool(template.rule == "next" and template.labels == 2 and not template.layers)


def _by_template(declared: Any) -> dict[str, Mapping[str, Any]] | None:
    """The parts of a declaration that name templates; None if it does not name templates."""
    if not isinstance(declared, Mapping) or not declared:
        return None
    parts = {kind: rules for kind, rules in declared.items() if kind != "scheme"}
    known = all(k in ("forbidden", "allowed") and isinstance(v, Mapping) for k, v in parts.items())
    return parts if known else None


def _check_next(spec: Any) -> None:
    if spec is not None and not any(map(is_plain_next, spec.templates)):
        problem = f"without a template's name, neighbours in a sequence are meant, and {spec} has none"
        raise InputError(PLACE, problem, f"name a template: {_example(spec)}")


def _example(spec: Any) -> str:
    names = [t.name for t in spec.templates if t.rule not in ("node", "length")]
    return f"{{'forbidden': {{{(names or ['next'])[-1]!r}: [(label, label), ...]}}}}"


def _also(rules: Allowed, kind: str, name: str, tuples: Any, classes: Sequence[str], spec: Any) -> Allowed:
    """The given rules together with the rules that ``tuples`` make for one template."""
    place = f"{PLACE}[{kind!r}][{name!r}]"
    template = None if spec is None and name == "next" else _template(name, spec, place)
    if template is None or is_plain_next(template):
        more = allowed({kind: tuples}, classes, place)
        both = {n: getattr(rules, n) & getattr(more, n) for n in ("follows", "starts", "ends")}
        return replace(rules, **both)
    table = _table(kind, template, tuples, classes, spec, place)
    before = rules.more.get(template.name, True)
    return replace(rules, more=rules.more | {template.name: table & before})


def _template(name: str, spec: Any, place: str) -> Any:
    known = [] if spec is None else [t for t in spec.templates if t.rule not in ("node", "length")]
    also = (f"same {name}", f"edge {name}")
    found = [t for t in known if t.name == name] or [t for t in known if t.key == name or t.name in also]
    if len(found) == 1:
        return found[0]
    names = ", ".join(repr(t.name) for t in known) or "'next'"
    problem = (
        f"{name!r} could be any of {len(found)} templates" if found else "not a template of the structure"
    )
    raise InputError(place, problem, f"use one of {names}")


def _table(
    kind: str, template: Any, tuples: Any, classes: Sequence[str], spec: Any, place: str
) -> np.ndarray:
    """(*sizes), true where the tuples of a template may have these labels."""
    spans = spans_of(spec.layers, classes)
    layers = template.layers or ("",) * template.labels
    places = [_own_labels(classes, *spans[layer], layer) for layer in layers]
    table = np.full([len(labels) for labels in places], kind == "forbidden")
    if not isinstance(tuples, list | tuple):
        raise InputError(place, f"{tuples!r} is not a list of tuples of labels", "pass [(label, ...), ...]")
    for given in tuples:
        for labels in permutations(given) if template.symmetric and _is_tuple(given, template) else [given]:
            table[_indices(labels, places, template, place)] = kind == "allowed"
    return table


def _is_tuple(given: Any, template: Any) -> bool:
    return isinstance(given, list | tuple) and len(given) == template.labels


def _own_labels(classes: Sequence[str], start: int, stop: int, layer: str) -> dict[str, int]:
    return {
        label.removeprefix(f"{layer}=") if layer else label: i
        for i, label in enumerate(classes[start:stop])
    }


def _indices(given: Any, places: Sequence[dict[str, int]], template: Any, place: str) -> tuple[int, ...]:
    if not _is_tuple(given, template):
        problem = f"{given!r} is not a tuple of {template.labels} labels"
        raise InputError(place, problem, "give one label for each place of the template")
    found = []
    for label, known in zip(given, places, strict=True):
        text = str(label) if type(label) is int else label
        if not isinstance(text, str) or text not in known:
            problem = f"{label!r} is not a label in the training data"
            raise InputError(place, problem, f"use {', '.join(known)}")
        found.append(known[text])
    return tuple(found)


def broken_tuple(
    rules: Allowed, split: GraphSplit, y: np.ndarray, links: Links
) -> tuple[Any, list[int], list[int]] | None:
    """The first tuple of an example whose labels are forbidden: its template, its nodes and their label
    indices; None if there is none. y : (N,) label indices, negative where one is missing."""
    spec = split.spec
    T = len(y) // max(1, len(spec.layers))
    templates = [t for t in spec.templates if t.rule not in ("node", "length")]
    for template, nodes in zip(templates, links.tuples, strict=True):
        table = rules.more.get(template.name)
        if table is None or not len(nodes):
            continue
        layers = template.layers or ("",) * template.labels
        shift = [T * spec.layers.index(layer) if layer else 0 for layer in layers]
        labels = y[nodes + np.array(shift)]  # (E, a)
        first = np.array([split.spans[layer][0] for layer in layers])
        known = (labels >= 0).all(1)
        broken = np.zeros(len(nodes), bool)
        broken[known] = ~table[tuple((labels[known] - first).T)]
        if broken.any():
            e = int(broken.argmax())
            return template, nodes[e].tolist(), labels[e].tolist()
    return None


def check_tuples(
    rules: Allowed,
    split: GraphSplit,
    y: Iterable[np.ndarray],
    links: Iterable[Links],
    classes: Sequence[str],
) -> None:
    """InputError for the first labelling with labels that the rules forbid."""
    for n, (labels, link) in enumerate(zip(y, links, strict=True)):
        found = broken_tuple(rules, split, labels, link)
        if found is not None:
            template, nodes, indices = found
            layers = template.layers or ("",) * len(indices)
            own = [classes[i].removeprefix(f"{w}=") for w, i in zip(layers, indices, strict=True)]
            names = ", ".join(map(repr, own))
            problem = f"labels ({names}) of nodes {tuple(nodes)} in template {template.name!r}, which the "
            problem += "constraints forbid"
            raise InputError(f"y[{n}]", problem, "correct the labels or the constraints")
