"""Structures as plain data: a list of templates, each with potentials of its own.

A template covers tuples of tokens: ``node`` each token by itself, ``next`` each token together with the one
before it. Its scores for the labels of a tuple are functions, with a GP prior, of the features of that
tuple.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from structgp.errors import InputError

LABELS = {"node": 1, "next": 2}
"""Templates that exist, and the number of labels that each tuple has."""

LIKELIHOODS = ("exact", "piecewise")


@dataclass(frozen=True)
class Template:
    """One kind of potential.

    name : 'node' or 'next'. labels : number of labels in each tuple. features : names of the token features
    that its scores depend on, beside the constant 1; None for all of them. A ``next`` tuple has the
    features of its second token. without : names that ``features=None`` leaves out.
    """

    name: str
    labels: int = 2
    features: tuple[str, ...] | None = ()
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("features", "without"):
            _check_names(f"{self.name}.{name}", getattr(self, name))
        if self.name not in LABELS:
            _refuse("name", f"must be {_any_of(LABELS)}, got {self.name!r}")
        if self.labels != LABELS[self.name] or isinstance(self.labels, bool):
            _refuse("labels", f"must be {LABELS[self.name]} for {self.name!r}, got {self.labels!r}")
        if self.without and self.features is not None:
            _refuse("without", f"{self.name!r} names its features and features to leave out")

    @property
    def is_constant(self) -> bool:
        """True if the scores depend on no feature: one table serves all tuples."""
        return self.features == ()


@dataclass(frozen=True, repr=False)
class Spec:
    """Templates, and the likelihood to train with: 'exact', or 'piecewise' for the piecewise
    pseudo-likelihood. Two specs can be added if templates of the same name are equal."""

    templates: tuple[Template, ...]
    likelihood: str = "exact"
    node: Template = field(init=False, compare=False)
    next: Template | None = field(init=False, compare=False)
    """The templates by name; ``next`` is None if tokens are independent."""

    def __post_init__(self) -> None:
        names = [template.name for template in self.templates]
        if names not in (["node"], ["node", "next"]):
            _refuse("templates", f"must be node, or node and next, got {', '.join(names) or 'none'}")
        if self.likelihood not in LIKELIHOODS:
            _refuse("likelihood", f"must be {_any_of(LIKELIHOODS)}, got {self.likelihood!r}")
        object.__setattr__(self, "node", self.templates[0])
        object.__setattr__(self, "next", self.templates[1] if len(names) > 1 else None)

    def __add__(self, other: Spec) -> Spec:
        if not isinstance(other, Spec):
            return NotImplemented
        if self.likelihood != other.likelihood:
            _refuse("likelihood", f"cannot add {self.likelihood!r} and {other.likelihood!r}")
        found = {template.name: template for template in self.templates}
        for template in other.templates:
            if found.setdefault(template.name, template) != template:
                _refuse("templates", f"cannot add two different templates {template.name!r}")
        return Spec(tuple(found.values()), self.likelihood)

    def __repr__(self) -> str:
        features, shared = () if self.next is None else self.next.features, not self.node.without
        if features is None or self.node != _node(features, shared):
            return f"Spec({self.templates!r}, likelihood={self.likelihood!r})"
        given = "order=0" if self.next is None else f"features={features!r}" if features else ""
        given += "" if shared else ", shared=False"
        return f"{'chain' if self.likelihood == 'exact' else 'piecewise'}({given})"

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for a model file or ``--structure``."""
        templates = [
            {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(template).items()}
            for template in self.templates
        ]
        return {"likelihood": self.likelihood, "templates": templates}

    @staticmethod
    def from_json(given: Any) -> Spec:
        """The spec that ``to_json`` wrote; InputError naming the field if it is damaged."""
        _check_fields("structure", given, Spec)
        templates = given.get("templates")
        if not isinstance(templates, list):
            _refuse("templates", f"must be a list, got {templates!r}")
        found = []
        for n, entry in enumerate(templates):
            _check_fields(f"templates[{n}]", entry, Template)
            if "name" not in entry:
                _refuse(f"templates[{n}].name", "is missing")
            values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
            found.append(Template(**values))
        return Spec(tuple(found), given.get("likelihood", "exact"))


def chain(features: Iterable[str] = (), shared: bool = True, order: int = 1) -> Spec:
    """The linear chain. Cost O(T V^2) per sequence and draw; O(T V) with ``order=0``.

    features : names of token features that the transition into a token depends on (CRF++'s
    ``B01:%x[0,0]``); without any, one table of transition scores serves all positions. shared : False if
    nodes do not use those features. order : 1; 0 for independent tokens, without transitions.
    """
    names = (features,) if isinstance(features, str) else tuple(features)
    if order not in (0, 1) or isinstance(order, bool):
        _refuse("order", f"must be 0 or 1, got {order!r}")
    if order == 0:
        if names:
            _refuse("features", "order=0 has no transitions that could use features")
        return Spec((_node((), True),))
    return Spec((_node(names, shared), Template("next", features=names)))


def piecewise(features: Iterable[str] = (), shared: bool = True) -> Spec:
    """The chain trained with the piecewise pseudo-likelihood, which needs no recursion: O(T V) per sequence
    and draw. Answers are the chain's."""
    return Spec(chain(features, shared).templates, "piecewise")


def _node(names: tuple[str, ...], shared: bool) -> Template:
    return Template("node", 1, None, () if shared else names)


def _check_names(place: str, names: Any) -> None:
    if names is None and place.endswith("features"):
        return
    if not isinstance(names, tuple) or not all(isinstance(name, str) and name for name in names):
        _refuse(place, f"must be names of features, got {names!r}")
    if len(set(names)) < len(names):
        _refuse(place, f"names a feature twice: {', '.join(names)}")


def _check_fields(place: str, given: Any, kind: type) -> None:
    known = [each.name for each in fields(kind) if each.init]
    if not isinstance(given, Mapping):
        _refuse(place, f"must be an object with {', '.join(known)}, got {given!r}")
    for name in given:
        if name not in known:
            _refuse(f"{place}.{name}", f"unknown field; known are {', '.join(known)}")


def _any_of(names: Iterable[str]) -> str:
    return " or ".join(map(repr, names))


def _refuse(place: str, problem: str) -> None:
    place = place if place.startswith("structure") else f"structure.{place}"
    raise InputError(place, problem, "build it with chain() or piecewise()")
