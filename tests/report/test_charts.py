"""Plots and the parts they are made of, at the ends of what they may be given."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from structgp.evaluation.metrics import calibration, deferral, risk_coverage
from structgp.report.charts import at_share, confidence_counts, learning_curve, reliability, risk_curve
from structgp.report.markup import MINUS, Markup, count, decimal, join, percent, plural, tag
from structgp.report.svg import Plot, ticks, widened
from structgp.report.tables import signed


def numbers_in(svg):
    return [float(v) for v in re.findall(r' (?:x|y|cx|cy|x1|y1|x2|y2)="([^"]*)"', svg)]


def test_plain_text_is_escaped_and_markup_is_not():
    assert tag("p", "<b>", Markup("<i></i>"), class_='"') == ('<p class="&quot;">&lt;b&gt;<i></i></p>')
    assert join(["&", tag("br")]) == "&amp;<br>"
    assert tag("td", hidden=True, title=None, x=1.5, aria_label="a") == (
        '<td hidden x="1.5" aria-label="a"></td>'
    )


def test_numbers():
    assert decimal(-1234.56, 1) == f"{MINUS}1,234.6"
    assert decimal(-0.001, 1) == "0.0"
    assert decimal(None, 2) == decimal(math.nan, 2) == "\N{EN DASH}"
    assert decimal(math.inf, 2) == "\N{INFINITY}"
    assert percent(0.1613) == "16.1\N{NARROW NO-BREAK SPACE}%"
    assert (plural(1, "token"), plural(2000, "token")) == ("1 token", "2,000 tokens")
    assert count(1e6) == "1,000,000"
    assert [signed(v) for v in (1.0, -1.0, 0.0)] == ["+1.0", f"{MINUS}1.0", "0.0"]


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_round_and_within(low, span):
    found = ticks(low, low + span)
    assert 1 <= len(found) <= 7
    assert all(low - 1e-6 * span <= t <= low + span * (1 + 1e-6) for t in found)
    steps = {round((b - a) / span, 6) for a, b in pairwise(found)}
    assert len(steps) <= 1


def test_a_range_is_never_empty():
    for values in ([3.0], [0.0, 0.0], [-5.0, -5.0]):
        low, high = widened(values)
        assert low < min(values) <= max(values) < high


def test_points_lie_where_the_data_says():
    plot = Plot((0, 10), (-1, 1), height=200, left=50, right=20)
    assert plot.at(0, -1) == (50, 156)
    assert plot.at(10, 1) == (400, 30)
    assert plot.at(5, 0) == (225, 93)


@pytest.mark.parametrize(
    "trace",
    [
        [[1, -10.0]],
        [[1, -10.0], [2, -10.0]],
        [[i + 1, -1e6 / (i + 1)] for i in range(400)],
        [[1, math.nan], [2, -3.0]],
    ],
)
@pytest.mark.parametrize("fresh", [-10.5, math.nan])
def test_learning_curves_of_any_length(trace, fresh):
    svg = learning_curve(trace, fresh)
    assert "nan" not in svg
    assert ('class="bracket"' in svg) == math.isfinite(fresh)
    assert all(0 <= v <= 421 for v in numbers_in(svg))


@pytest.mark.parametrize(("truth", "p"), [("a", 1.0), ("b", 1.0), ("a", 0.5), ("b", 0.75)], ids=str)
def test_curves_of_a_single_token(truth, p):
    y, marginals = [[truth]], [[{"a": p, "b": 1 - p}]]
    bins, risk = calibration(y, marginals), risk_coverage(y, marginals)
    left = deferral([["a"]], marginals)
    curves = risk_curve(left, risk), risk_curve(left, None)
    for svg in (reliability(bins), confidence_counts(bins), *curves):
        assert "nan" not in svg
        assert all(-1 <= v <= 421 for v in numbers_in(svg))
    assert at_share(risk.risk, 0.1) == at_share(risk.risk, 1.0) == (truth == "b")
    assert ["ideal" in svg for svg in curves] == [True, False]
