from __future__ import annotations

import itertools
import math
from xml.etree import ElementTree

import pytest
from experiments.figures import Curve, Dot, _log_ticks, curves, dots, figure

SVG = "{http://www.w3.org/2000/svg}"
FALLING = Curve("one", [(1.0, 0.9), (10.0, 0.3), (100.0, 0.1)])


def parsed(panel, legend=()):
    return ElementTree.fromstring(figure([panel], legend))


def test_a_curve_goes_right_and_down_on_logarithmic_axes():
    tree = parsed(curves("title", "NLL", [FALLING], ["zero", "one"], {"a level": 0.2}))
    (line,) = [e for e in tree.iter(f"{SVG}polyline") if e.get("class") == "c1"]
    points = [tuple(map(float, p.split(","))) for p in line.get("points").split()]
    across = [b[0] - a[0] for a, b in itertools.pairwise(points)]
    assert across[0] == pytest.approx(across[1], abs=0.2)
    assert points[0][1] < points[1][1] < points[2][1]
    (level,) = [e for e in tree.iter(f"{SVG}polyline") if e.get("class") == "level"]
    heights = {p.split(",")[1] for p in level.get("points").split()}
    assert len(heights) == 1
    assert points[1][1] < float(heights.pop()) < points[2][1]


def test_a_single_point_is_a_dot():
    tree = parsed(curves("title", "NLL", [Curve("one", [(3.0, 0.4)])], ["one"]))
    assert not list(tree.iter(f"{SVG}polyline"))
    assert [e.get("class") for e in tree.iter(f"{SVG}circle")] == ["c0 dot"]


def test_rows_have_their_dots_and_names_are_escaped():
    shown = [Dot("a < b", 2.0, 0.5), Dot("a < b", 3.0, hollow=True), Dot("c", 1.0)]
    tree = parsed(dots("errors", "%", ["a < b", "c"], shown), ["here", "", "there"])
    circles = list(tree.iter(f"{SVG}circle"))
    x, y = ([float(c.get(k)) for c in circles] for k in ("cx", "cy"))
    assert x[2] < x[0] < x[1]
    assert y[0] < y[1] < y[2]
    texts = [e.text for e in tree.iter(f"{SVG}text")]
    assert {"a < b", "c", "● here", "● there"} <= set(texts)
    assert "● " not in texts


def test_equal_figures_are_equal_text():
    panels = [curves("t", "NLL", [FALLING], ["one"]), dots("t", "%", ["a"], [Dot("a", 1.0)])]
    assert figure(panels, ["one"]) == figure(panels, ["one"])
    height = float(ElementTree.fromstring(figure(panels * 2, [])).get("height"))
    assert height > float(ElementTree.fromstring(figure(panels, [])).get("height"))


@pytest.mark.parametrize("within", [(0.1, 1000.0), (0.3, 0.45), (4.0, 4.4), (7.0, 7.01)])
def test_there_are_ticks_in_every_range(within):
    low, high = map(math.log10, within)
    for few in (False, True):
        found = _log_ticks((low, high), few)
        assert len(found) >= 2
        assert all(low - 1e-9 <= v <= high + 1e-9 for v in found)
