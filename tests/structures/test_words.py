"""Structures in short words: what each declares, and errors that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from structgp.errors import InputError
from structgp.structures import (
    Spec,
    chain,
    edges,
    grid,
    layers,
    piecewise,
    same,
    segments,
    spec_from_words,
    tree,
)

SPECS: list[tuple[Any, Spec]] = [
    ({"chain": {}}, chain()),
    ({"chain": {"order": 0}}, chain(order=0)),
    ({"chain": {"features": ["word"], "shared": False}}, chain(["word"], shared=False)),
    ({"piecewise": {}}, piecewise()),
    (
        {"chain": {"order": 2}, "same": {"key": "word", "where": {"shape": ["Xx", "X"]}, "every": True}},
        chain(order=2) + same("word", where={"shape": ["Xx", "X"]}, every=True),
    ),
    ({"same": [{"key": "word"}, {"key": "stem", "where": {"shape": "Xx"}}]},
     same("word") + same("stem", where={"shape": "Xx"})),
    ({"tree": {"features": "both ends"}}, tree("both ends")),
    ({"tree": {}, "edges": {"name": "cites"}}, tree() + edges("cites")),
    ({"grid": {"neighbours": 8, "features": ["colour"]}}, grid(8, ["colour"])),
    (
        {"edges": [{"name": "cites", "symmetric": True}, {"name": "team", "labels": 3, "features": True}]},
        edges("cites", symmetric=True) + edges("team", labels=3, features=True),
    ),
    ({"segments": {"max_length": 5}}, segments(5)),
    (
        {"layers": {"pos": {"chain": {}}, "chunk": {"chain": {"order": 2}}}},
        layers(pos=chain(), chunk=chain(order=2)),
    ),
    (
        {"layers": {"pos": {"chain": {}}, "chunk": {"chain": {}}, "ties": [0, 1]}},
        layers(pos=chain(), chunk=chain(), ties=(1, 0)),
    ),
    ({"grid": {}, "program": "reweighted"}, grid().using("reweighted")),
    ({"grid": {}, "most_entries": 100}, grid().using("auto", 100)),
]  # fmt: skip


@pytest.mark.parametrize(("given", "spec"), SPECS)
def test_words_declare_what_the_functions_do(given: Any, spec: Spec) -> None:
    assert spec_from_words(json.loads(json.dumps(given))) == spec


@pytest.mark.parametrize("spec", [spec for _, spec in SPECS])
def test_a_spec_as_json_is_taken_as_well(spec: Spec) -> None:
    assert spec_from_words(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3, "structure: must be an object"),
        ({}, "structure: declares nothing"),
        ({"program": "exact"}, "structure: declares nothing"),
        ({"chian": {}}, "structure.chian: unknown field; known are chain, "),
        ({"chain": 2}, "structure.chain: must be an object with any of features, shared, order, got 2"),
        ({"chain": {"ordr": 2}}, "structure.chain.ordr: unknown field"),
        ({"chain": {"order": True}}, "structure.chain.order: must be a whole number, got True"),
        ({"chain": {"order": 9}}, "structure.chain.order: must be 0, 1, 2 or 3"),
        ({"chain": {"features": "word"}}, "structure.chain.features: must be a list of names"),
        ({"chain": {"shared": 1}}, "structure.chain.shared: must be true or false"),
        ({"same": {"where": {}}}, "structure.same.key: is missing"),
        ({"same": [{"key": "a"}, {"key": 3}]}, "structure.same[1].key: must be a string"),
        ({"same": {"key": ""}}, "structure.same.key: must name a feature"),
        ({"same": {"key": "a", "where": {"b": [3]}}}, "structure.same.where: must be an object"),
        ({"same": {"key": "a", "where": {"b": []}}}, "structure.same.where['b']: must be a value"),
        ({"edges": {}}, "structure.edges.name: is missing"),
        ({"grid": {"features": "both"}}, "structure.grid.features: must be 'both ends', or a list"),
        ({"grid": {"neighbours": 6}}, "structure.grid.neighbours: must be 4 or 8"),
        ({"segments": {"max_length": 0}}, "structure.segments.max_length: must be 1 to 100"),
        ({"grid": {}, "tree": {}}, "do not go together"),
        ({"layers": []}, "structure.layers: must be an object"),
        ({"layers": {"a": {"chain": {}}}}, "structure.layers: must be at least two"),
        ({"layers": {"a": {"chain": {"x": 1}}}}, "structure.layers.a.chain.x: unknown field"),
        ({"layers": {"a": {"chain": {}}, "ties": ["b"]}}, "structure.layers.ties: must be a list of"),
        ({"chain": {}, "layers": {}}, "structure.layers: must have its structures inside"),
        ({"chain": {}, "program": "magic"}, "structure.program: must be one of auto, exact"),
        ({"chain": {}, "most_entries": 0}, "structure.most_entries: must be a number of table entries"),
        ({"templates": 3}, "structure.templates: must be a list"),
    ],
)
def test_errors_name_the_field(given: Any, says: str) -> None:
    with pytest.raises(InputError) as caught:
        spec_from_words(given)
    assert says in str(caught.value)
