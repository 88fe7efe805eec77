"""Rules on the tuples of templates: what a declaration allows, and labels that break it."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import numpy as np
import pytest

from structgp import Graph, chain, edges, grid, layers, same, segments, tree
from structgp.data.examples import read_examples
from structgp.data.rules import declared_rules
from structgp.data.schemes import Allowed
from structgp.errors import InputError

ABC = ["a", "b", "c"]
TWO = ["chunk=I", "chunk=O", "pos=N", "pos=V"]
LAYERS = layers(pos=chain(), chunk=chain() + same("word"))


def forbidden(table: np.ndarray, *names: list[str]) -> set[tuple[str, ...]]:
    found = product(*(range(n) for n in table.shape))
    return {tuple(name[i] for name, i in zip(names, at, strict=True)) for at in found if not table[at]}


def test_forbidden_and_allowed_tuples() -> None:
    spec = grid(8)
    found = declared_rules({"forbidden": {"right": [("a", "b")], "down left": [["c", "c"]]}}, ABC, spec)
    assert forbidden(found.more["right"], ABC, ABC) == {("a", "b")}
    assert forbidden(found.more["down left"], ABC, ABC) == {("c", "c")}
    assert set(found.more) == {"right", "down left"}
    assert found.follows_freely
    only = declared_rules({"allowed": {"down": [("a", "a"), ("b", "c")]}}, ABC, spec).more["down"]
    assert np.argwhere(only).tolist() == [[0, 0], [1, 2]]
    both = {"allowed": {"down": [("a", "a"), ("b", "c")]}, "forbidden": {"down": [("a", "a")]}}
    assert np.argwhere(declared_rules(both, ABC, spec).more["down"]).tolist() == [[1, 2]]


def test_the_order_of_symmetric_tuples_does_not_matter() -> None:
    spec = edges("team", symmetric=True, labels=3) + edges("cites")
    rules = declared_rules({"forbidden": {"team": [("a", "a", "b")], "cites": [("a", "b")]}}, ABC, spec)
    team = forbidden(rules.more["edge team"], ABC, ABC, ABC)
    assert team == {("a", "a", "b"), ("a", "b", "a"), ("b", "a", "a")}
    assert forbidden(rules.more["edge cites"], ABC, ABC) == {("a", "b")}


@pytest.mark.parametrize("name", ["same word", "word"])
def test_names_of_templates(name: str) -> None:
    rules = declared_rules({"forbidden": {name: [("a", "b")]}}, ABC, chain() + same("word"))
    assert list(rules.more) == ["same word"]


@pytest.mark.parametrize("spec", [None, chain(order=2), segments(), chain() + same("word")])
def test_neighbours_have_the_rules_of_a_chain(spec: Any) -> None:
    pairs = [("a", "b"), (None, "c"), ("a", None)]
    plain = declared_rules({"forbidden": pairs}, ABC, spec)
    named = declared_rules({"forbidden": {"next": pairs}}, ABC, spec)
    for name in ("follows", "starts", "ends"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(named, name))
    assert not named.more
    assert not named.follows_freely


def test_a_scheme_beside_rules_on_templates() -> None:
    classes, spec = ["B-X", "I-X", "O"], chain(order=2) + same("word")
    given = {"scheme": "BIO", "forbidden": {"word": [("O", "B-X")], "next 2": [("O", "O", "O")]}}
    found = declared_rules(given, classes, spec)
    assert not found.follows[2, 1]
    assert found.more["same word"].sum() == 7
    assert not found.more["next 2"][2, 2, 2]
    again = Allowed.from_json(json.loads(json.dumps(found.to_json())))
    assert again is not None
    assert again.to_json() == found.to_json()


def test_labels_of_layers_are_their_own() -> None:
    given = {"chunk next": [("I", "O")], "pos chunk": [("V", "I")], "word": [("I", "O")]}
    found = declared_rules({"forbidden": given}, TWO, LAYERS)
    assert forbidden(found.more["chunk next"], ["I", "O"], ["I", "O"]) == {("I", "O")}
    assert forbidden(found.more["pos chunk"], ["N", "V"], ["I", "O"]) == {("V", "I")}
    assert forbidden(found.more["chunk same word"], ["I", "O"], ["I", "O"]) == {("I", "O"), ("O", "I")}
    assert found.follows_freely


def test_numbers_as_labels() -> None:
    found = declared_rules({"forbidden": {"right": [(0, 1)]}}, ["0", "1"], grid())
    assert np.argwhere(~found.more["right"]).tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("given", "spec", "classes", "says"),
    [
        ("BIO", grid(), ABC, "neighbours in a sequence are meant, and grid() has none; name a template: "),
        ({"forbidden": [("a", "b")]}, tree(), ABC, "name a template: {'forbidden': {'parent': [(label"),
        ({"forbidden": {"rihgt": []}}, grid(), ABC, "['rihgt']: not a template of the structure"),
        ({"forbidden": {"word": []}}, None, ABC, "not a template of the structure; use one of 'next'"),
        ({"forbidden": {"node": []}}, grid(), ABC, "not a template"),
        ({"forbidden": {"length": []}}, segments(), ABC, "not a template"),
        ({"forbidden": {"right": 3}}, grid(), ABC, "3 is not a list of tuples of labels"),
        ({"forbidden": {"right": ["ab"]}}, grid(), ABC, "'ab' is not a tuple of 2 labels"),
        ({"forbidden": {"right": [("a", "b", "c")]}}, grid(), ABC, "is not a tuple of 2 labels"),
        ({"allowed": {"right": [("a", "x")]}}, grid(), ABC, "['right']: 'x' is not a label in the"),
        ({"allowed": {"right": [("a", None)]}}, grid(), ABC, "None is not a label in the training data"),
        ({"forbidden": {"chunk next": [("N", "O")]}}, LAYERS, TWO,
         "'N' is not a label in the training"),
        ({"forbidden": {"next": []}}, LAYERS, TWO, "not a template of the structure; use"),
        ({"forbidden": {"word": []}}, layers(pos=same("word"), chunk=same("word")), TWO, "of 2 templates"),
        ({"forbidden": {}, "banned": {}}, grid(), ABC, "neighbours in a sequence"),
        ({"forbidden": {}, "banned": {}}, None, ABC, "is not a declaration"),
    ],
)  # fmt: skip
def test_mistakes(given: Any, spec: Any, classes: list[str], says: str) -> None:
    with pytest.raises(InputError) as caught:
        declared_rules(given, classes, spec)
    assert says in str(caught.value)
    assert caught.value.place.startswith("constraints")


W = [{"word": "w"}, {"word": "v"}, {"word": "w"}]


@pytest.mark.parametrize(
    ("spec", "x", "y", "rules", "says"),
    [
        (tree(), Graph(W, parents=[-1, 0, 1]), list("aba"), {"parent": [("b", "a")]},
         "labels ('b', 'a') of nodes (1, 2) in template 'parent'"),
        (edges("e", symmetric=True), Graph(W, {"e": [[0, 2]]}), list("aab"), {"e": [("b", "a")]},
         "labels ('a', 'b') of nodes (0, 2) in template 'edge e'"),
        (chain() + same("word"), W, list("aab"), {"word": [("a", "b")]},
         "labels ('a', 'b') of nodes (0, 2) in template 'same word'"),
        (grid(), [W], [list("aab")], {"right": [("a", "b")]},
         "labels ('a', 'b') of nodes (1, 2) in template 'right'"),
        (LAYERS, W, {"pos": list("NNV"), "chunk": list("OIO")}, {"pos chunk": [("N", "I")]},
         "labels ('N', 'I') of nodes (1, 1) in template 'pos chunk'"),
        (LAYERS, W, {"pos": list("NNV"), "chunk": list("OIO")}, {"chunk next": [("I", "O")]},
         "labels ('I', 'O') of nodes (1, 2) in template 'chunk next'"),
    ],
)  # fmt: skip
def test_training_labels_that_break_a_rule_are_named(
    spec: Any, x: Any, y: Any, rules: Any, says: str
) -> None:
    read_examples([x], [y], spec=spec)
    with pytest.raises(InputError) as caught:
        read_examples([x], [y], spec=spec, constraints={"forbidden": rules})
    assert str(caught.value).startswith(f"y[0]: {says}, which the constraints forbid; ")


def test_a_missing_label_breaks_no_rule() -> None:
    rules = {"forbidden": {"parent": [("b", "a")]}}
    given = [Graph(W, parents=[-1, 0, 1])] * 2
    found = read_examples(given, [["a", "b", None], list("aab")], spec=tree(), constraints=rules)
    assert found.some_missing
