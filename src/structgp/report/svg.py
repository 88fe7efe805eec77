"""A small plot: two linear axes, and lines, dots and bars in the coordinates of the data.

Plots are narrow, so that their text is as large on a phone as on a desktop; colours are classes, which the
page's style sheet defines for both themes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from structgp.report.markup import Markup, tag

WIDTH = 420
Point = tuple[float, float]
Range = tuple[float, float]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def widened(values: Iterable[float], share: float = 0.05) -> Range:
    """The range of the values with some room on both sides, never empty."""
    low, high = min(values := list(values)), max(values)
    room = share * (high - low) or 0.5 * max(1.0, abs(high)) * share
    return low - room, high + room


class Plot:
    """x, y : the ranges of the data; height, and the margins left and right, are in pixels."""

    def __init__(self, x: Range, y: Range, *, height: int = 300, left: int = 52, right: int = 18) -> None:
        self.x, self.y, self.height = x, y, height
        self.left, self.right = left, WIDTH - right
        self.top, self.bottom = 30, height - 44
        self._parts: list[Markup] = []

    def at(self, x: float, y: float) -> Point:
        """Pixels of a point."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return (self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top))

    def x_axis(self, label: str, at: Sequence[float], form: Callable[[float], str]) -> None:
        self._rule(self.left, self.bottom, self.right, self.bottom, "axis")
        for value in at:
            x, _ = self.at(value, self.y[0])
            self._rule(x, self.bottom, x, self.bottom + 4, "axis")
            self._text(x, self.bottom + 17, form(value), "tick", "middle")
        self._text((self.left + self.right) / 2, self.bottom + 36, label, "label", "middle")

    def y_axis(self, label: str, at: Sequence[float], form: Callable[[float], str]) -> None:
        """The label stands above the axis, so that it is horizontal."""
        for value in at:
            _, y = self.at(self.x[0], value)
            self._rule(self.left, y, self.right, y, "grid")
            self._text(self.left - 8, y + 4, form(value), "tick", "end")
        self._text(0, self.top - 14, label, "label", "start")

    def line(self, points: Sequence[Point], kind: str, title: str = "") -> None:
        self._draw("polyline", title, points=self._path(points), class_=kind)

    def area(self, points: Sequence[Point], kind: str) -> None:
        """Fills the area between the line and the horizontal axis."""
        floor = [(points[-1][0], self.y[0]), (points[0][0], self.y[0])]
        self._draw("polygon", points=self._path([*points, *floor]), class_=kind)

    def dot(self, point: Point, kind: str, radius: float, title: str) -> None:
        x, y = self.at(*point)
        self._draw("circle", title, cx=x, cy=y, r=radius, class_=kind)

    def box(self, low: Point, high: Point, kind: str, title: str) -> None:
        (x0, y0), (x1, y1) = self.at(*low), self.at(*high)
        self._draw("rect", title, x=x0, y=y1, width=x1 - x0, height=y0 - y1, class_=kind)

    def note(self, point: Point, text: str, anchor: str = "start", shift: Point = (0.0, 0.0)) -> None:
        """Text at a point, ``shift`` pixels away."""
        x, y = self.at(*point)
        self._text(x + shift[0], y + shift[1], text, "note", anchor)

    def svg(self, title: str) -> Markup:
        box = f"0 0 {WIDTH} {self.height}"
        return tag("svg", tag("title", title), *self._parts, viewBox=box, role="img", class_="plot")

    def _path(self, points: Sequence[Point]) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*point) for point in points))

    def _draw(self, name: str, title: str = "", **attributes: object) -> None:
        self._parts.append(tag(name, title and tag("title", title), **attributes))

    def _rule(self, x0: float, y0: float, x1: float, y1: float, kind: str) -> None:
        self._draw("line", x1=x0, y1=y0, x2=x1, y2=y1, class_=kind)

    def _text(self, x: float, y: float, text: str, kind: str, anchor: str) -> None:
        self._parts.append(tag("text", text, x=x, y=y, class_=kind, text_anchor=anchor))
