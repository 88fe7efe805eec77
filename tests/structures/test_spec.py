"""Specs as plain data, and what stands for a structure."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from structgp import StructuredGPClassifier
from structgp.errors import InputError
from structgp.structures import (
    BlackBox,
    Chain,
    Custom,
    Layout,
    Piecewise,
    Spec,
    Structure,
    Template,
    as_structure,
    chain,
    edges,
    grid,
    layers,
    piecewise,
    same,
    segments,
    tree,
)

SPECS = {
    "chain()": chain(),
    "chain(order=0)": chain(order=0),
    "chain(features=('word', 'shape'))": chain(["word", "shape"]),
    "chain(features=('word',), shared=False)": chain("word", shared=False),
    "piecewise()": piecewise(),
    "piecewise(features=('word',), shared=False)": piecewise(["word"], shared=False),
}

each_spec = pytest.mark.parametrize(("text", "spec"), SPECS.items(), ids=SPECS.keys())


@each_spec
def test_a_spec_is_plain_data(text: str, spec: Spec) -> None:
    assert repr(spec) == text
    assert eval(text, {"chain": chain, "piecewise": piecewise}) == spec
    assert Spec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert sum(spec == other for other in SPECS.values()) == 1
    assert len({hash(other) for other in SPECS.values()}) == len(SPECS)


names = st.lists(st.text(min_size=1, max_size=3), unique=True, max_size=3)


@given(names, st.booleans(), st.sampled_from([chain, piecewise]))
def test_any_features_survive_json(features: list[str], shared: bool, make: Any) -> None:
    spec = make(features, shared=shared)
    assert Spec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert spec.next.features == tuple(features)
    assert spec.node.features is None
    assert spec.node.without == (() if shared else tuple(features))
    assert eval(repr(spec), {"chain": chain, "piecewise": piecewise}) == spec


def test_templates() -> None:
    assert [t.name for t in chain().templates] == ["node", "next"]
    assert [t.labels for t in chain().templates] == [1, 2]
    assert chain().next.is_constant
    assert not chain(["word"]).next.is_constant
    assert not chain().node.is_constant
    assert chain(order=0).next is None
    odd = Spec((Template("node", 1, ("word",)), Template("next")))
    assert "features=('word',)" in repr(odd)
    assert Spec.from_json(odd.to_json()) == odd


def test_specs_add_up() -> None:
    assert chain(order=0) + chain() == chain() == chain() + chain()
    with pytest.raises(InputError, match="two different templates 'next'"):
        chain() + chain(["word"])
    with pytest.raises(InputError, match=r"structure\.likelihood: cannot add"):
        chain() + piecewise()
    with pytest.raises(TypeError):
        chain() + 3  # type: ignore[operator]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: chain(order=4), "order: must be 0, 1, 2 or 3, got 4"),
        (lambda: chain(order=True), "order: must be 0, 1"),
        (lambda: chain(["word"], order=0), "features: order=0 has no transitions"),
        (lambda: chain(["word", "word"]), r"next.features: names a feature twice|names a feature"),
        (lambda: chain([3]), r"features: must be names of features, got \(3,\)"),
        (lambda: Template("skip"), "name: must be 'node' or 'next', or have a rule of .*, got 'skip'"),
        (lambda: Template("next", 3), "labels: must be 2 for 'next', got 3"),
        (lambda: Template("next", features=("a",), without=("b",)), "without: 'next' names"),
        (lambda: Spec(()), "templates: must begin with node, got none"),
        (lambda: Spec((Template("next"),)), "templates: must begin with node, got next"),
        (lambda: Spec(chain().templates, "loopy"), "likelihood: must be 'exact' or 'piecewise'"),
    ],
)
def test_what_cannot_be(make: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d | {"levels": 2}, r"structure\.levels: unknown field"),
        (lambda d: d | {"layers": 2}, r"structure\.layers: must be a list of names, got 2"),
        (lambda d: d | {"most_entries": 0}, r"structure\.most_entries: must be a number of table entries"),
        (lambda d: d | {"program": "exakt"}, r"structure\.program: must be 'auto' or 'exact'"),
        (lambda d: d | {"templates": 3}, r"structure\.templates: must be a list, got 3"),
        (lambda d: {}, r"structure\.templates: must be a list, got None"),
        (lambda d: [d], "structure: must be an object with templates, likelihood"),
        (lambda d: d | {"templates": [{}]}, r"structure\.templates\[0\]\.name: is missing"),
        (lambda d: d | {"templates": [None]}, r"structure\.templates\[0\]: must be an object"),
        (
            lambda d: d | {"templates": [{"name": "node", "arity": 1}]},
            r"structure\.templates\[0\]\.arity: unknown field",
        ),
        (
            lambda d: d | {"templates": [{"name": "node", "labels": "1"}]},
            r"templates\[0\]\.labels: must be a whole number, got '1'",
        ),
        (
            lambda d: d | {"templates": [{"name": "next", "features": "word"}]},
            r"templates\[0\]\.features: must be names of features, or null, got 'word'",
        ),
        (lambda d: d | {"templates": [{"name": ["node"]}]}, r"templates\[0\]\.name: must be a string"),
        (lambda d: d | {"likelihood": None}, "likelihood: must be 'exact' or 'piecewise'"),
    ],
)
def test_damaged_json_names_the_field(change: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Spec.from_json(change(chain().to_json()))


def test_a_layout_has_the_tuples_of_each_template() -> None:
    layout = Layout(torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]).bool())
    assert torch.equal(layout.tuples("node"), layout.mask)
    assert layout.tuples("next").int().tolist() == [[1, 1], [0, 0], [0, 0]]
    assert Layout(torch.ones(2, 1, dtype=torch.bool)).tuples("next").shape == (2, 0)


# -- what stands for a structure ----------------------------------------------------------------------


def constant(f: Tensor, g: Tensor, y: Tensor) -> Tensor:
    return f.new_zeros(len(f))


class Own(Structure):
    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return f.new_zeros(f.shape[:2])


@each_spec
def test_a_spec_stands_for_its_likelihood(text: str, spec: Spec) -> None:
    found = as_structure(spec)
    assert isinstance(found, Piecewise if "piecewise" in text else Chain)
    assert found.spec == spec


def test_a_chain_is_no_piecewise_spec() -> None:
    with pytest.raises(InputError, match="pass chain"):
        Chain(spec=piecewise())


@pytest.mark.parametrize(
    ("structure", "says"),
    [
        ("grid", r"'grid' is not a name of one; pass structgp.grid\(...\)"),
        ("crf", "'crf' is not a name of one; use 'chain', 'piecewise', or a function"),
        (grid, r"grid is a function that declares one; call it: grid\(...\)"),
        (Custom(chain), r"chain is a function that declares one; call it: chain\(...\)"),
    ],
)
def test_what_is_not_a_structure_is_told_before_data_is_read(structure: Any, says: str) -> None:
    with pytest.raises(InputError, match=f"^structure: {says}"):
        StructuredGPClassifier(structure=structure).fit([[{"w": "a"}]], [np.zeros((2, 2))])


def test_a_custom_likelihood() -> None:
    found = as_structure(Custom(constant, n_jobs=2))
    assert isinstance(found, BlackBox)
    assert (found.function, found.n_jobs, found.batched) == (constant, 2, False)
    assert as_structure(Custom(constant, batched=True)).batched  # type: ignore[attr-defined]
    own = Own()
    assert as_structure(Custom(own)) is own
    with pytest.raises(InputError, match=r"pass an instance, as Own\(\)"):
        as_structure(Custom(Own))
    named = as_structure(Custom("piecewise", predict_with=Chain()))
    assert isinstance(named, Piecewise)
    with pytest.raises(InputError, match="must be a structure, got 3"):
        as_structure(Custom(3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spec",
    [chain() + same("w"), chain() + edges("a"), chain() + edges("a", labels=3) + same("w")],
    ids=repr,
)
def test_a_chain_with_tables_of_links_is_a_linked_chain(spec: Spec) -> None:
    assert spec.is_linked_chain


@pytest.mark.parametrize(
    "spec",
    [
        chain(),
        chain(order=0) + same("w"),
        chain(order=2),
        chain(order=2) + same("w"),
        chain("w") + same("w"),
        chain() + same("w", features=["w"]),
        chain() + edges("a", features=True),
        chain() + same("w") + edges("a", features=True),
        chain() + tree(),
        edges("a"),
        segments(),
        layers(one=chain(), two=chain() + same("w")),
    ],
    ids=repr,
)
def test_no_other_structure_is_a_linked_chain(spec: Spec) -> None:
    assert not spec.is_linked_chain


def test_templates_of_a_file_are_put_in_order() -> None:
    wanted = chain() + same("word")
    told = wanted.to_json()
    told["templates"] = [told["templates"][n] for n in (0, 2, 1)]
    assert Spec.from_json(told) == wanted
