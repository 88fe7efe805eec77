"""Structures as plain data: a list of templates, each with potentials of its own.

A template covers tuples of variables: ``node`` each variable by itself, ``next`` each token together with
the one before it, and others the tuples that their rule finds. The scores of a template for the labels of a
tuple are functions, with a GP prior, of the features of that tuple. ``structgp.structures.declare`` has the
functions that declare other structures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

from structgp.errors import InputError

RULES = ("node", "next", "same", "parent", "offset", "edge", "tie", "length")
"""How a template finds its tuples: each variable; each token with those before it; tokens that have a
feature in common; each node with its parent; pixels at a fixed distance; tuples that are given with an
example; labels in two layers; whole segments."""

LINKS = ("same", "edge")
"""Rules of templates that link distant variables."""

ENDS = ("last", "both", "own")
"""Which features a tuple has: those of its last variable, those of all its variables, or features of its
own that are given with the example."""

PLACES = dict.fromkeys(("same", "parent", "offset", "tie", "length"), (2, 2)) | {"node": (1, 1)}
"""Fewest and most labels of a tuple, by rule; 2 to 4 for the other rules."""

LIKELIHOODS = ("exact", "piecewise")

PROGRAMS = ("auto", "exact", "reweighted", "loopy", "gibbs")
"""How labellings are summed over. 'auto' is exact within a budget and tree-reweighted beyond it."""


@dataclass(frozen=True)
class Template:
    """One kind of potential.

    name : name of the template. labels : number of labels in each tuple. features : names of the features
    that its scores depend on, in addition to the constant 1; None for all of them. without : names that
    ``features=None`` leaves out. rule : how tuples are found (``RULES``), by default as the name says.
    ends : which features a tuple has (``ENDS``). symmetric : True if the order within a tuple does not
    matter. key, where, every : for 'same', the feature that links tokens, the values ((feature, values),
    ...) that both tokens must have, and whether every pair is linked rather than only successive tokens.
    offset : for 'offset', (rows, columns) from the first pixel to the second; for 'tie', 0 and the number
    of tokens by which the first label comes after the second. layers : the layer of each place in a tuple,
    where there are several layers. longest : for 'length', the longest segment that has a score of its
    own."""

    name: str
    labels: int = 2
    features: tuple[str, ...] | None = ()
    without: tuple[str, ...] = ()
    rule: str = ""
    ends: str = "last"
    symmetric: bool = False
    key: str = ""
    where: tuple[tuple[str, tuple[str, ...]], ...] = ()
    every: bool = False
    offset: tuple[int, int] = (0, 0)
    layers: tuple[str, ...] = ()
    longest: int = 0

    def __post_init__(self) -> None:
        if not self.rule:
            object.__setattr__(self, "rule", self.name)
        for name in ("features", "without"):
            _check_names(f"{self.name}.{name}", getattr(self, name))
        if self.rule not in RULES:
            refuse(
                "name", f"must be 'node' or 'next', or have a rule of {_any_of(RULES)}, got {self.name!r}"
            )
        least, most = PLACES.get(self.rule, (2, 4))
        most = 2 if self.name == "next" else most
        if type(self.labels) is not int or not least <= self.labels <= most:
            wanted = str(least) if least == most else f"{least} to {most}"
            refuse("labels", f"must be {wanted} for {self.name!r}, got {self.labels!r}")
        if self.ends not in ENDS:
            refuse(f"{self.name}.ends", f"must be {_any_of(ENDS)}, got {self.ends!r}")
        if self.without and self.features is not None:
            refuse("without", f"{self.name!r} names its features and features to leave out")
        if self.rule == "same" and not self.key:
            refuse(f"{self.name}.key", "must name the feature that links tokens")
        if self.symmetric and self.ends == "both" and not self.is_constant:
            problem = f"{self.name!r} cannot be symmetric and have the features of both ends in order"
            refuse(f"{self.name}.symmetric", problem)

    @property
    def is_constant(self) -> bool:
        """True if the scores depend on no feature: one table serves all tuples."""
        return self.features == ()


@dataclass(frozen=True, repr=False)
class Spec:
    """Templates, and the likelihood to train with: 'exact', or 'piecewise' for the piecewise
    pseudo-likelihood. layers : names of the labels that each token has, where it has several. program : how
    labellings are summed over (``PROGRAMS``). most_entries : table entries per example up to which 'auto'
    is exact; None for the default. Two specs can be added if templates of the same name are equal."""

    templates: tuple[Template, ...]
    likelihood: str = "exact"
    layers: tuple[str, ...] = ()
    program: str = "auto"
    most_entries: int | None = None

    def __post_init__(self) -> None:
        names = [template.name for template in self.templates]
        if not names or self.templates[0].rule != "node":
            refuse("templates", f"must begin with node, got {', '.join(names) or 'none'}")
        if len(set(names)) < len(names):
            refuse("templates", f"must have different names, got {', '.join(names)}")
        rules = [template.rule for template in self.templates]
        if rules.count("node") != max(1, len(self.layers)):
            refuse("templates", f"must have one node template per layer, got {', '.join(names)}")
        if self.likelihood not in LIKELIHOODS:
            refuse("likelihood", f"must be {_any_of(LIKELIHOODS)}, got {self.likelihood!r}")
        if self.program not in PROGRAMS:
            refuse("program", f"must be {_any_of(PROGRAMS)}, got {self.program!r}")
        if self.likelihood == "piecewise" and not self.is_chain:
            refuse("likelihood", "'piecewise' is for chains; use the program 'auto' for other structures")
        for first, second in (("offset", "parent"), ("offset", "next"), ("offset", "edge")):
            if first in rules and second in rules:
                refuse("templates", f"{_words(first)} and {_words(second)} do not go together")
        most = self.most_entries
        if most is not None and (type(most) is not int or most < 1):
            refuse("most_entries", f"must be a number of table entries, got {most!r}")
        if "length" in rules and (rules != ["node", "next", "length"] or self.program != PROGRAMS[0]):
            refuse("templates", "segments are a structure of their own: nothing can be added to them")

    @property
    def node(self) -> Template:
        """The node template, of the first layer."""
        return self.templates[0]

    @property
    def next(self) -> Template | None:
        """The template of each token with the one before it; None if there is none."""
        found = [t for t in self.templates if t.rule == "next" and t.labels == 2]
        return found[0] if found else None

    @property
    def is_chain(self) -> bool:
        """True for the linear chain, which has programs of its own."""
        usual = [t.name for t in self.templates] in (["node"], ["node", "next"])
        return usual and not self.layers and self.program == PROGRAMS[0]

    @property
    def has_segments(self) -> bool:
        """True if whole segments have scores."""
        return any(t.rule == "length" for t in self.templates)

    @property
    def is_linked_chain(self) -> bool:
        """True for ``chain()`` without features on transitions, plus tables of links and nothing else."""
        own, links = self.templates[:2], self.templates[2:]
        is_chain = [t.name for t in own] == ["node", "next"] and own[1].is_constant and not self.layers
        return is_chain and bool(links) and all(t.rule in LINKS and t.is_constant for t in links)

    @property
    def form(self) -> str:
        """Kind of example: 'sequence', 'grid', 'tree' or 'graph'."""
        rules = {t.rule for t in self.templates}
        return (
            "grid"
            if "offset" in rules
            else "graph"
            if "edge" in rules
            else ("tree" if "parent" in rules else "sequence")
        )

    def using(self, program: str, most_entries: int | None = None) -> Spec:
        """The same structure with labellings summed by this program: 'exact', 'reweighted' (tree-reweighted
        belief propagation, a bound), 'loopy' (loopy belief propagation, no bound), 'gibbs' (answers by
        sampling), or 'auto'. most_entries : table entries per example up to which 'auto' is exact."""
        return replace(self, program=program, most_entries=most_entries)

    def __add__(self, other: Spec) -> Spec:
        if not isinstance(other, Spec):
            return NotImplemented
        if self.likelihood != other.likelihood:
            refuse("likelihood", f"cannot add {self.likelihood!r} and {other.likelihood!r}")
        if self.layers or other.layers:
            refuse("layers", "cannot be added to; declare what belongs to a layer inside of layers(...)")
        found = {template.name: template for template in self.templates}
        for template in other.templates:
            plain = Template("node", 1, None)
            if found.get(template.name) == plain:
                found[template.name] = template
            elif found.setdefault(template.name, template) != template and template != plain:
                refuse("templates", f"cannot add two different templates {template.name!r}")
        if PROGRAMS[0] not in (self.program, other.program) and self.program != other.program:
            refuse("program", f"cannot add {self.program!r} and {other.program!r}")
        program = other.program if self.program == PROGRAMS[0] else self.program
        most = other.most_entries if self.most_entries is None else self.most_entries
        return Spec(_ordered(found.values()), self.likelihood, (), program, most)

    def __repr__(self) -> str:
        from structgp.structures.declare import words

        return words(self)

    def to_json(self) -> dict[str, Any]:
        """The spec as JSON values, for a model file or ``--structure``."""
        told: dict[str, Any] = {"likelihood": self.likelihood}
        told["templates"] = [_template_json(template) for template in self.templates]
        plain = Spec(self.templates, self.likelihood, self.layers)
        told |= {"layers": list(self.layers)} if self.layers else {}
        changed = {name: getattr(self, name) for name in ("program", "most_entries")}
        return told | {k: v for k, v in changed.items() if v != getattr(plain, k)}

    @staticmethod
    def from_json(given: Any) -> Spec:
        """The spec that ``to_json`` wrote; InputError naming the field if it is damaged."""
        _check_fields("structure", given, Spec)
        templates = given.get("templates")
        if not isinstance(templates, list):
            refuse("templates", f"must be a list, got {templates!r}")
        found = []
        for n, entry in enumerate(templates):
            _check_fields(f"templates[{n}]", entry, Template)
            if "name" not in entry:
                refuse(f"templates[{n}].name", "is missing")
            for name, value in entry.items():
                _check_type(f"templates[{n}].{name}", value, KINDS[name])
            found.append(Template(**{name: _tuples(value) for name, value in entry.items()}))
        layers, most = given.get("layers", []), given.get("most_entries")
        _check_type("layers", layers, "names")
        rest = given.get("likelihood", "exact"), tuple(layers), given.get("program", "auto"), most
        return Spec(tuple(found) if layers else _ordered(found), *rest)


KINDS = {
    "name": "text", "labels": "number", "features": "names or null", "without": "names", "rule": "text",
    "ends": "text", "symmetric": "flag", "key": "text", "where": "list", "every": "flag",
    "offset": "numbers", "layers": "names", "longest": "number",
}  # fmt: skip
"""Kind of JSON value of each field of a template."""


def chain(features: Iterable[str] = (), shared: bool = True, order: int = 1) -> Spec:
    """The linear chain. Cost O(T V^(order + 1)) per sequence and draw.

    features : names of token features that the transition into a token depends on (CRF++'s
    ``B01:%x[0,0]``); without any, one table of transition scores serves all positions. shared : False if
    nodes are not to use those features. order : 1 by default; 0 for independent tokens, without
    transitions; 2 for additional scores of each label together with the two before it, 3 for those and
    scores together with the three before it.
    """
    names = (features,) if isinstance(features, str) else tuple(features)
    if order not in (0, 1, 2, 3) or isinstance(order, bool):
        refuse("order", f"must be 0, 1, 2 or 3, got {order!r}")
    if order == 0:
        if names:
            refuse("features", "order=0 has no transitions that could use features")
        return Spec((_node((), True),))
    further = tuple(Template(f"next {k}", k + 1, rule="next") for k in range(2, order + 1))
    return Spec((_node(names, shared), Template("next", features=names), *further))


def piecewise(features: Iterable[str] = (), shared: bool = True) -> Spec:
    """The chain trained with the piecewise pseudo-likelihood, which needs no recursion: O(T V) per sequence
    and draw. Answers are those of the chain."""
    return Spec(chain(features, shared).templates, "piecewise")


def _ordered(templates: Iterable[Template]) -> tuple[Template, ...]:
    """Nodes and transitions first, whatever was declared first."""
    return tuple(sorted(templates, key=lambda t: (t.rule != "node", t.rule != "next")))


def _node(names: tuple[str, ...], shared: bool) -> Template:
    return Template("node", 1, None, () if shared else names)


def _template_json(template: Template) -> dict[str, Any]:
    """The fields that differ from their defaults, and always the four that templates of a chain have."""
    usual = Template(template.name, template.labels, rule=template.rule, key="." if template.key else "")
    found = {}
    for f in fields(Template):
        value = getattr(template, f.name)
        always = f.name in ("name", "labels", "features", "without")
        if always or value != getattr(usual, f.name) or (f.name == "rule" and value != template.name):
            found[f.name] = _lists(value)
    return found


def _lists(value: Any) -> Any:
    return [_lists(v) for v in value] if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _check_names(place: str, names: Any) -> None:
    if names is None and place.endswith("features"):
        return
    if not isinstance(names, tuple) or not all(isinstance(name, str) and name for name in names):
        refuse(place, f"must be names of features, got {names!r}")
    if len(set(names)) < len(names):
        refuse(place, f"names a feature twice: {', '.join(names)}")


def _check_fields(place: str, given: Any, kind: type) -> None:
    known = [each.name for each in fields(kind) if each.init]
    if not isinstance(given, Mapping):
        refuse(place, f"must be an object with {', '.join(known)}, got {given!r}")
    for name in given:
        if name not in known:
            refuse(f"{place}.{name}", f"unknown field; known are {', '.join(known)}")


def _check_type(place: str, value: Any, kind: str) -> None:
    names = isinstance(value, list) and all(isinstance(v, str) for v in value)
    right = {
        "text": isinstance(value, str),
        "number": isinstance(value, int) and not isinstance(value, bool),
        "flag": isinstance(value, bool),
        "names": names,
        "names or null": value is None or names,
        "numbers": isinstance(value, list) and len(value) == 2 and all(type(v) is int for v in value),
        "list": isinstance(value, list)
        and all(
            isinstance(v, list) and len(v) == 2 and isinstance(v[0], str) and isinstance(v[1], list)
            for v in value
        ),
    }
    if not right[kind]:
        wanted = {
            "names or null": "names of features, or null",
            "names": "a list of names",
            "flag": "true or false",
            "text": "a string",
            "number": "a whole number",
            "numbers": "two whole numbers",
            "list": "a list of [feature, [values]]",
        }[kind]
        refuse(place, f"must be {wanted}, got {value!r}")


def _words(rule: str) -> str:
    return {"offset": "a grid", "parent": "a tree", "next": "a chain", "length": "segments",
            "same": "links between equal tokens", "edge": "edges"}[rule]  # fmt: skip


def _any_of(names: Iterable[str]) -> str:
    return " or ".join(map(repr, names))


def refuse(place: str, problem: str) -> NoReturn:
    """Raises InputError for an impossible structure."""
    place = place if place.startswith("structure") else f"structure.{place}"
    raise InputError(place, problem, "build it with chain(), grid() and their like")
