"""Functions that declare structures beyond the chain, as plain data: a ``Spec``. Specs can be added."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from structgp.structures.spec import PROGRAMS, Spec, Template, chain, refuse

NODE = Template("node", 1, None)

DIRECTIONS = {"right": (0, 1), "down": (1, 0), "down right": (1, 1), "down left": (1, -1)}
"""Names of the templates of a grid, each with the step (rows, columns) from a pixel to its neighbour."""


def same(
    key: str,
    where: Mapping[str, Any] | None = None,
    every: bool = False,
    features: Iterable[str] | str = (),
) -> Spec:
    """Links between tokens of a sequence that have the same value of the feature ``key``, such as all
    mentions of one word. One symmetric table scores the labels of two linked tokens.

    where : {feature: value or values} that tokens must have to be linked. every : True to link every pair
    of equal tokens; by default each is linked to the one before it, which costs far less. features : names
    of features of both tokens that the score depends on, 'both ends' for all of them; the table is then not
    symmetric, and the earlier token comes first. Cost: exact sums take O(T V^(L + 2)) where L links
    overlap; where that is too much, the sum is tree-reweighted."""
    if not isinstance(key, str) or not key:
        refuse("same", f"must name a feature, got {key!r}")
    if where is not None and not isinstance(where, Mapping):
        refuse("same.where", f"must be a dict from feature to value or values, got {where!r}")
    wanted = [
        (name, _names(f"same.where[{name!r}]", values)) for name, values in sorted((where or {}).items())
    ]
    template = Template(f"same {key}", rule="same", key=key, where=tuple(wanted), every=every)
    template = _with_features(template, features, both=True)
    return Spec((NODE, replace(template, symmetric=template.is_constant)))


def tree(features: Iterable[str] | str = ()) -> Spec:
    """A tree or forest: one table for the labels of each parent (row) with each of its children (column).
    Every example is a :class:`structgp.Graph` with ``parents``. Cost O(N V^2) for N nodes.

    features : names of features of the child that the score of parent and child depends on; 'both ends' for
    all features of both."""
    return Spec((NODE, _with_features(Template("parent"), features)))


def grid(neighbours: int = 4, features: Iterable[str] | str = ()) -> Spec:
    """A grid of pixels: an array (H, W, D), or rows of tokens, with labels (H, W). One table for the labels
    of each pixel with its neighbour to the right, one for the neighbour below, and with ``neighbours=8``
    two for the diagonals. Cost: O(H W V^(min(H, W) + 1)) for exact sums, where that is within the budget;
    else O(H W V^2) per sweep of the tree-reweighted bound.

    features : 'both ends' if the scores of two neighbours depend on all features of both, or the names of
    some of them; without any, one table per direction."""
    if neighbours not in (4, 8) or isinstance(neighbours, bool):
        refuse("neighbours", f"must be 4 or 8, got {neighbours!r}")
    kept = list(DIRECTIONS)[: neighbours // 2]
    templates = [Template(name, rule="offset", offset=DIRECTIONS[name]) for name in kept]
    return Spec((NODE, *(_with_features(t, features, both=True) for t in templates)))


def edges(name: str, symmetric: bool = False, labels: int = 2, features: bool = False) -> Spec:
    """Tuples that every example lists under this name, as a :class:`structgp.Graph` with ``edges={name: (E,
    labels)}``. One table scores their joint labels. Sums are exact where that is within the budget, else
    tree-reweighted.

    symmetric : True if the order within a tuple has no meaning. labels : nodes per tuple, 2 to 4.
    features : True if every tuple has features of its own, ``features={name: (E, D)}``."""
    if not isinstance(name, str) or not name or "." in name:
        refuse("edges", f"must have a name without dots, got {name!r}")
    own: dict[str, Any] = {"features": None, "ends": "own"} if features else {}
    return Spec((NODE, Template(f"edge {name}", labels, rule="edge", key=name, symmetric=symmetric, **own)))


def layers(*, ties: Iterable[int] = (0,), **declared: Spec) -> Spec:
    """Several labels per token: each layer has a structure of its own, and one table ties each layer to the
    next one, as in ``layers(pos=chain(), chunk=chain())``. Labels of a sequence are given and returned as a
    dict from layer to a list of labels. Cost: the junction tree of two chains of U and V labels takes O(T U
    V (U + V)) per sequence and draw.

    ties : distances in tokens at which a label of the later layer is tied to a label of the earlier one,
    each with a table of its own. ``ties=(0, 1)`` ties a chunk label to the part of speech of the next word
    and of its own. One neighbour, -1 or 1, costs nothing extra; both cost V times as much."""
    offsets = _ties(ties)
    if len(declared) < 2:
        refuse("layers", f"must be at least two, got {', '.join(declared) or 'none'}")
    found: list[Template] = []
    for name, spec in declared.items():
        if (
            not isinstance(spec, Spec)
            or spec.form != "sequence"
            or spec.layers
            or "." in name
            or " " in name
        ):
            refuse(f"layers.{name}", f"must be a structure of sequences, got {spec!r}")
        found += [
            replace(t, name=f"{name} {t.name}", rule=t.rule, layers=(name,) * t.labels)
            for t in spec.templates
        ]
    names = list(declared)
    for first, second in pairwise(names):
        for away in offsets:
            name = f"{first} {second}" + (f" {away:+d}" if away else "")
            found.append(Template(name, rule="tie", layers=(first, second), offset=(0, away)))
    return Spec(tuple(found), layers=tuple(names))


def _ties(ties: Any) -> tuple[int, ...]:
    if isinstance(ties, Spec):
        refuse("layers.ties", "is an option and cannot be the name of a layer")
    found = tuple(ties) if isinstance(ties, Iterable) and not isinstance(ties, str) else (ties,)
    if not found or not all(type(away) is int for away in found) or len(set(found)) < len(found):
        refuse("layers.ties", f"must be different distances in tokens such as 0 and 1, got {ties!r}")
    return tuple(sorted(found, key=lambda away: (abs(away), away)))


def segments(max_length: int = 8) -> Spec:
    """Semi-Markov chain: in addition to the scores of a chain, every type of span has one score for each
    length up to ``max_length``, and one for all longer spans. Spans are read off the labels (BIO and the
    like; with plain labels, runs of one label). Cost O(T V (V + max_length)) per sequence and draw."""
    if not isinstance(max_length, int) or isinstance(max_length, bool) or not 1 <= max_length <= 100:
        refuse("max_length", f"must be 1 to 100, got {max_length!r}")
    return Spec((*chain().templates, Template("length", rule="length", longest=max_length)))


def _with_features(template: Template, features: Iterable[str] | str, both: bool = False) -> Template:
    if features == "both ends":
        return replace(template, features=None, ends="both")
    if not isinstance(features, Iterable):
        refuse(f"{template.name}.features", f"must be names of features, got {features!r}")
    names = (features,) if isinstance(features, str) else tuple(features)
    return replace(template, features=names, ends="both" if both and names else "last")


def _names(place: str, values: Any) -> tuple[str, ...]:
    found = (values,) if isinstance(values, str) or not isinstance(values, Iterable) else tuple(values)
    if not found or not all(isinstance(v, str) for v in found):
        refuse(place, f"must be a value or several, got {values!r}")
    return found


def words(spec: Spec) -> str:
    """The source text of the call that declares a spec."""
    features = () if spec.next is None else spec.next.features
    if not spec.layers and spec.node not in (NODE, replace(NODE, without=features or ())):
        return f"Spec({spec.templates!r}, likelihood={spec.likelihood!r})"
    if spec.layers:
        parts = {name: Spec(tuple(_in_layer(spec, name))) for name in spec.layers}
        ties = tuple(dict.fromkeys(t.offset[1] for t in spec.templates if t.rule == "tie"))
        told = [f"{name}={part!r}" for name, part in parts.items()]
        told += [] if ties == (0,) else [f"ties={ties!r}"]
        return f"layers({', '.join(told)})" + _using(spec)
    by_rule: dict[str, list[Template]] = {}
    for template in spec.templates[1:]:
        by_rule.setdefault(template.rule, []).append(template)
    found = []
    if "length" in by_rule:
        found.append(f"segments({by_rule['length'][0].longest})")
    elif "next" in by_rule or not by_rule:
        found.append(_chain_words(spec, by_rule.get("next", [])))
    if "offset" in by_rule:
        count, named = 2 * len(by_rule["offset"]), _features_words(by_rule["offset"][0])
        found.append(f"grid({', '.join([*([] if count == 4 else ['neighbours=8']), *named])})")
    found += [f"tree({', '.join(_features_words(t))})" for t in by_rule.get("parent", [])]
    for t in by_rule.get("same", []):
        options = [f"where={ {k: list(v) for k, v in t.where} }"] if t.where else []
        options += ["every=True"] if t.every else []
        found.append(f"same({', '.join([repr(t.key), *options, *_features_words(t)])})")
    for t in by_rule.get("edge", []):
        options = [
            *(["symmetric=True"] if t.symmetric else []),
            *([f"labels={t.labels}"] if t.labels > 2 else []),
        ]
        found.append(
            f"edges({', '.join([repr(t.key), *options, *([] if t.is_constant else ['features=True'])])})"
        )
    return " + ".join(found) + _using(spec)


def _using(spec: Spec) -> str:
    if spec.program == PROGRAMS[0] and spec.most_entries is None:
        return ""
    most = "" if spec.most_entries is None else f", {spec.most_entries}"
    return f".using({spec.program!r}{most})"


def _in_layer(spec: Spec, name: str) -> list[Template]:
    """The templates of one layer, as they were declared."""
    found = [t for t in spec.templates if set(t.layers) == {name}]
    return [replace(t, name=t.name.removeprefix(f"{name} "), layers=()) for t in found]


def _chain_words(spec: Spec, found: list[Template]) -> str:
    names, shared = found[0].features if found else (), not spec.node.without
    given = [] if found else ["order=0"]
    given += [f"order={len(found)}"] if len(found) > 1 else []
    given += [f"features={names!r}"] if names else []
    given += [] if shared else ["shared=False"]
    return f"{'chain' if spec.likelihood == 'exact' else 'piecewise'}({', '.join(given)})"


def _features_words(template: Template) -> list[str]:
    if template.is_constant:
        return []
    names = template.features
    return ["features='both ends'" if names is None else f"features={names!r}"]
