"""The page of examples that are not chains: tables of templates, images, trees, layers."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from tests.api.declared_cases import CASES

from structgp.data.graphs import Graph, Shape
from structgp.report import Findings, Text, examine, render, sections
from structgp.report.findings import TokenUncertainty
from structgp.report.markup import percent
from structgp.report.pictures import MOST_NODES, MOST_SINGLE, order_of, pictures, positions

EVIL = "</script><b onclick=alert(1)>&amp;'\"<!--"


def words_of(x: Any) -> list[str]:
    if isinstance(x, np.ndarray):
        return [str(n) for n in range(x.shape[0] * x.shape[1])]
    nodes = x.nodes if isinstance(x, Graph) else x
    tokens = [token for row in nodes for token in row] if isinstance(nodes[0], list) else nodes
    return [token["w"] for token in tokens]


@pytest.fixture(scope="module", params=list(CASES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def found(name: str) -> Findings:
    case = CASES[name]
    text = Text("some.jsonl", [words_of(x) for x in case.X], list(range(1, len(case.X) + 1)), case.y)
    return examine(case.fit(), case.X, text, model_name="some.model")


def test_the_page_has_a_table_for_every_template(found, parse, name):
    page = parse(render(found))
    for template in CASES[name].spec.templates:
        if template.rule != "node":
            assert template.name in page.text["learned"]
    assert "What goes together" in page.text["learned"]
    assert percent(found.truth.scores.token_error) in page.text[""]
    assert found.truth.scores == found.estimator.evaluate(CASES[name].X, CASES[name].y)


def test_what_is_drawn(found, parse, name):
    page = parse(render(found))
    links = [a["href"] for kind, a in page.elements if kind == "a"]
    classes = [a.get("class") for _, a in page.elements]
    assert ("#pictures" in links) == name.startswith(("grid", "tree"))
    assert ("#text" in links) == (not name.startswith("grid"))
    shown = min(12, len(found.predicted))
    assert classes.count("image") == (4 * shown if name.startswith("grid") else 0)
    assert classes.count("tree") == (shown if name.startswith("tree") else 0)


def test_the_page_without_labels(found, name, parse):
    case = CASES[name]
    bare = dataclasses.replace(found.text, labels=None)
    if name == "layers":
        bare = dataclasses.replace(bare, words=bare.words[::2], lines=bare.lines[::2])
    again = examine(found.estimator, case.X, bare, model_name="some.model")
    assert again.truth is None
    page = parse(render(again))
    assert "without labels" in page.text[""]
    assert sum(a.get("class") == "false" for _, a in page.elements) == 0


def test_wrong_pixels_are_marked(fitted_grid: Findings, parse):
    truth = fitted_grid.truth
    assert truth is not None
    page = parse(str(pictures(fitted_grid)))
    chosen = order_of(fitted_grid)[:12]
    wrong = sum(
        a != b for i in chosen for a, b in zip(truth.labels[i], fitted_grid.predicted[i], strict=True)
    )
    assert sum(a.get("class") == "false" for _, a in page.elements) == wrong > 0


@pytest.fixture(scope="module")
def fitted_grid() -> Findings:
    case = CASES["grid"]
    flat = [y.astype(str).ravel().tolist() for y in case.y]  # labels of nodes in order do as well
    text = Text("some.jsonl", [words_of(x) for x in case.X], list(range(1, len(case.X) + 1)), flat)
    return examine(case.fit(), case.X, text, model_name="some.model")


def test_a_page_about_images_speaks_of_pixels(fitted_grid: Findings):
    told = sections.headline, sections.confidence, sections.confusions, sections.fit
    page = "".join(str(part(fitted_grid)) for part in told)
    assert "pixels" in page
    assert not re.search(r"\b(token|sequence)s?\b", page)


def test_large_images_are_drawn_in_runs(fitted_grid: Findings, parse):
    H, W = 40, MOST_SINGLE // 40 + 10
    labels = [str(h % 2) for h in range(H) for _ in range(W)]
    kinds = [dataclasses.replace(u, values=[np.full(H * W, 0.5)]) for u in fitted_grid.uncertainties]
    large = dataclasses.replace(
        fitted_grid, truth=None, predicted=[labels], uncertainties=kinds, shapes=[Shape(None, size=(H, W))]
    )
    page = parse(str(pictures(large)))
    assert sum(a.get("class") == "cell" for _, a in page.elements) == H
    assert sum(a.get("class") == "doubt" for _, a in page.elements) == H * len(kinds)


def test_labels_and_words_cannot_become_code(parse):
    parents = [-1, 0]
    tree = Shape(None, Graph([EVIL, "b"], parents=parents))
    case = CASES["tree"]
    text = Text("some.jsonl", [words_of(x) for x in case.X], list(range(1, len(case.X) + 1)), case.y)
    usual = examine(case.fit(), case.X, text, model_name="some.model")
    evil = dataclasses.replace(
        usual,
        text=Text("x", [[EVIL, "b"]], [1], None),
        truth=None,
        predicted=[[EVIL, "a"]],
        uncertainties=[TokenUncertainty("total", "t", "m", [np.zeros(2)], 1.0)],
        shapes=[tree],
    )
    page = parse(str(pictures(evil)))
    assert {kind for kind, _ in page.elements} <= {"p", "div", "svg", "title", "line", "g", "rect", "text"}


def test_trees_that_are_too_large_are_left_out():
    assert MOST_NODES >= 2
    place, depth = positions(np.array([-1, 0, 0, 1, 1, -1]))
    np.testing.assert_array_equal(depth, [0, 1, 1, 2, 2, 0])
    np.testing.assert_allclose(place, [1.25, 0.5, 2, 0, 1, 3])


def test_deep_trees_have_positions():
    place, depth = positions(np.arange(-1, 4_999))
    assert depth[-1] == 4_999
    assert not place.any()


def test_layers_are_sequences_of_their_own():
    case = CASES["layers"]
    text = Text("some.jsonl", [words_of(x) for x in case.X], list(range(1, len(case.X) + 1)), case.y)
    found = examine(case.fit(), case.X, text, model_name="some.model")
    assert len(found.predicted) == len(found.text.words) == 2 * len(case.X)
    assert found.truth is not None
    assert found.truth.labels[1] == [f"chunk={v}" for v in case.y[0]["chunk"]]
    part = [{"pos": [None] * len(y["pos"]), "chunk": y["chunk"]} for y in case.y]
    wanted = found.estimator.sequence_log_probs(case.X, part)
    np.testing.assert_allclose(found.truth.log_probs[1::2], wanted)
