"""Figures as SVG files: curves against time on logarithmic axes, and dots with their spreads by row.

A figure consists of panels, two side by side. It has its own style and a white background, so that it looks
the same on any page. Equal rows give equal text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from structgp.report.markup import Markup, join, tag
from structgp.report.svg import WIDTH, Plot, Point, ticks, widened

COLOURS = ("#0b6e99", "#c2410c", "#7c3aed", "#15803d", "#6b7280", "#b91c1c", "#a16207")
GAP = 20
STYLE = """
text { font: 12px sans-serif; fill: #333 } .label { font-weight: bold }
line.axis { stroke: #333 } line.grid { stroke: #e5e5e5 }
polyline { fill: none; stroke-width: 1.5; stroke-linejoin: round } circle { stroke: none }
.level { stroke: #333; stroke-dasharray: 5 4 } .hollow { fill: white; stroke-width: 1.5 }
"""


@dataclass(frozen=True)
class Curve:
    """One line, or a single dot: ``points`` (x, y), both above 0. name : chooses its colour."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Dot:
    """A value with its spread in a row of a panel; ``hollow`` dots are values from elsewhere."""

    row: str
    value: float
    spread: float = 0.0
    hollow: bool = False


def curves(
    title: str,
    label: str,
    lines: Sequence[Curve],
    names: Sequence[str],
    levels: Mapping[str, float] | None = None,
) -> Markup:
    """A panel of lines against seconds. names : all names, in the order of the colours. levels : names and
    heights of dashed horizontal lines."""
    levels = levels or {}
    x = _log_range([p[0] for line in lines for p in line.points])
    y = _log_range([*(p[1] for line in lines for p in line.points), *levels.values()])
    plot = Plot(x, y)
    plot.y_axis(label, _log_ticks(y), _power)
    plot.x_axis("seconds of one processor", _log_ticks(x, few=True), _power)
    for name, height in levels.items():
        at = math.log10(height)
        plot.line([(x[0], at), (x[1], at)], "level", name)
        plot.note((x[1], at), name, "end", (-2, -4))
    for line in lines:
        colour = f"c{names.index(line.name)}"
        points = [(math.log10(a), math.log10(b)) for a, b in line.points]
        if len(points) > 1:
            plot.line(points, colour, line.name)
        plot.dot(points[-1], f"{colour} dot", 3, line.name)
    return plot.svg(title)


def dots(title: str, label: str, rows: Sequence[str], shown: Sequence[Dot]) -> Markup:
    """A panel with one row for each name, the first on top."""
    ends = [dot.value + way * dot.spread for dot in shown for way in (-1, 1)]
    x = widened(ends, 0.06)
    plot = Plot(x, (-0.6, len(rows) - 0.4), height=90 + 26 * len(rows), left=150)
    places = {name: len(rows) - 1 - i for i, name in enumerate(rows)}
    plot.y_axis(title, list(places.values()), {v: k for k, v in places.items()}.__getitem__)
    plot.x_axis(label, ticks(*x), lambda v: f"{v:g}")
    for dot in shown:
        at = places[dot.row] + (-0.15 if dot.hollow else 0.15)
        colour = "c4" if dot.hollow else "c0"
        what = f"{dot.row}: {dot.value:.3g}"
        if dot.spread:
            plot.line([(dot.value - dot.spread, at), (dot.value + dot.spread, at)], colour)
        plot.dot((dot.value, at), f"{colour} {'hollow' if dot.hollow else 'dot'}", 4, what)
    return plot.svg(title)


def figure(panels: Sequence[Markup], legend: Sequence[str]) -> str:
    """The panels, two side by side, under a legend. legend : names of the colours in order; '' leaves one
    out."""
    heights = [_height(panel) for panel in panels]
    parts, top = [_legend(legend)], 34
    for i in range(0, len(panels), 2):
        for place, panel in enumerate(panels[i : i + 2]):
            parts.append(_placed(panel, place * (WIDTH + GAP), top, heights[i + place]))
        top += max(heights[i : i + 2]) + GAP
    width = WIDTH * min(2, len(panels)) + GAP * 2
    colours = "".join(
        f".c{i} {{ stroke: {c} }} .c{i}.dot {{ fill: {c} }} text.c{i} {{ fill: {c}; stroke: none }}\n"
        for i, c in enumerate(COLOURS)
    )
    whole = tag(
        "svg",
        tag("style", Markup(STYLE + colours)),
        tag("rect", width=width, height=top, fill="white"),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {top}",
        width=width,
        height=top,
    )
    # One element per line, so that changes of a figure can be read as changes of lines.
    return whole.replace("><", ">\n<") + "\n"


def _legend(names: Sequence[str]) -> Markup:
    words, x = [], 10
    for i, name in enumerate(names):
        if name:
            words.append(tag("text", f"● {name}", x=x, y=20, class_=f"c{i}"))
            x += 30 + 8 * len(name)
    return join(words)


def _placed(panel: Markup, x: float, y: float, height: float) -> Markup:
    return tag("svg", panel, x=x + 10, y=y, width=WIDTH, height=height)


def _height(panel: Markup) -> int:
    return int(panel.split('viewBox="0 0 ')[1].split('"')[0].split()[1])


def _log_range(values: Sequence[float]) -> tuple[float, float]:
    return widened([math.log10(v) for v in values])


def _log_ticks(within: tuple[float, float], few: bool = False) -> list[float]:
    """Logarithms of 1, 2 and 5 times the powers of ten; with ``few``, of the powers of ten only."""
    powers = range(math.floor(within[0]), math.ceil(within[1]) + 1)
    every = [math.log10(m) + p for p in powers for m in ((1,) if few else (1, 2, 5))]
    shown = [v for v in every if within[0] <= v <= within[1]]
    if len(shown) >= 2:
        return shown
    # The range is narrow: use round numbers in it.
    return [math.log10(v) for v in ticks(10 ** within[0], 10 ** within[1]) if v > 0]


def _power(value: float) -> str:
    return f"{10**value:.3g}"
