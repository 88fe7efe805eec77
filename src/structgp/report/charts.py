"""The plots: how the fit went, calibration, and the error that is left when unsure tokens are set aside."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from structgp.evaluation.metrics import Calibration, CalibrationBin, Deferral, RiskCoverage
from structgp.report.markup import Markup, count, decimal, percent, plural
from structgp.report.svg import Plot, Range, ticks, widened

_CURVE_POINTS = 240
_FIFTHS = [0, 0.2, 0.4, 0.6, 0.8, 1]


def learning_curve(trace: Sequence[Sequence[float]], fresh: float, *, from_step: int = 1) -> Markup:
    """The bound at each step, and at the last step a bracket from that bound to the one on fresh draws.
    ``from_step`` : the first step shown, where the plot is an enlargement of the end."""
    steps = [(s, v) for s, v in trace if math.isfinite(v) and s >= from_step]
    last_step, last = steps[-1]
    first_step = steps[0][0]
    y = widened([v for _, v in steps] + [v for v in (fresh,) if math.isfinite(v)], 0.08)
    span = max(last_step - first_step, 1.0)
    digits = 0 if y[1] - y[0] > 10 else 1
    widest = max(len(decimal(v, digits)) for v in ticks(*y))
    x = first_step - 0.04 * span, last_step + 0.09 * span  # with room for the bracket
    plot = Plot(x, y, left=18 + 7 * widest, right=12)
    plot.y_axis("bound (nats)", ticks(*y), lambda v: decimal(v, digits))
    whole = sorted({round(t) for t in ticks(first_step, max(last_step, first_step + 1))})
    plot.x_axis("step", [t for t in whole if first_step <= t <= last_step] or [last_step], count)
    plot.line(steps, "curve")
    if len(steps) <= 60:
        for step, bound in steps:
            plot.dot((step, bound), "point", 3, f"step {count(step)}: {decimal(bound, 1)}")
    if math.isfinite(fresh):
        pixel = (x[1] - x[0]) / (plot.right - plot.left)
        near, far = last_step + 8 * pixel, last_step + 14 * pixel
        points = [(near, last), (far, last), (far, fresh), (near, fresh)]
        plot.line(points, "bracket", f"last step {decimal(last, 1)}, fresh draws {decimal(fresh, 1)}")
        plot.dot((last_step, fresh), "fresh", 4, f"fresh draws: {decimal(fresh, 1)}")
    return plot.svg("Evidence bound by step" if from_step <= 1 else "Evidence bound, last steps")


def reliability(calibration: Calibration, one: str = "token") -> Markup:
    """Accuracy against confidence: one dot per bin, with two standard errors. one : the noun for a token,
    such as 'pixel', here and below."""
    plot = Plot((0, 1), (0, 1), height=330)
    plot.y_axis("share that is right", _FIFTHS, "{:g}".format)
    plot.x_axis("confidence", _FIFTHS, "{:g}".format)
    plot.line([(0, 0), (1, 1)], "ideal", "right as often as it claims")
    for b in calibration.bins:
        low, high = _interval(b)
        plot.line([(b.confidence, low), (b.confidence, high)], "whisker")
    plot.line([(b.confidence, b.accuracy) for b in calibration.bins], "curve")
    for b in calibration.bins:
        plot.dot((b.confidence, b.accuracy), "point", 4, describe_bin(b, one))
    return plot.svg(f"Reliability: expected calibration error {decimal(calibration.ece, 3)}")


def confidence_counts(calibration: Calibration, one: str = "token") -> Markup:
    """The number of tokens in each bin of confidence."""
    top = max(b.count for b in calibration.bins)
    plot = Plot((0, 1), (0, top * 1.02), height=130)
    plot.y_axis(f"{one}s", [t for t in ticks(0, top, 3) if t == int(t)], count)
    plot.x_axis("confidence", _FIFTHS, "{:g}".format)
    for b in calibration.bins:
        plot.box((b.low + 0.004, 0), (b.high - 0.004, b.count), "bar", describe_bin(b, one))
    return plot.svg(f"Number of {one}s by confidence")


def describe_bin(b: CalibrationBin, one: str = "token") -> str:
    return (
        f"confidence {decimal(b.low, 2)} to {decimal(b.high, 2)}: {plural(b.count, one)}, "
        f"{percent(b.accuracy)} right, {percent(b.confidence)} claimed"
    )


def risk_curve(deferral: Deferral, risk: RiskCoverage | None, one: str = "token") -> Markup:
    """Error among the most confident tokens against their share, beside the error that the model expects;
    only the latter if the true error is not known."""
    n = len(deferral.expected)
    which = np.unique(np.linspace(0, n - 1, min(n, _CURVE_POINTS)).round().astype(int))
    expected = [(float(deferral.coverage[i]), float(deferral.expected[i])) for i in which]
    errors, verb = (deferral.expected, "expected to be") if risk is None else (risk.risk, "are")
    points = [(float(deferral.coverage[i]), float(errors[i])) for i in which]
    top = max(0.01, *(r for _, r in points + expected)) * 1.12
    plot = Plot((0, 1), (0, top), height=330, right=58)
    digits = 0 if top > 0.05 else 1
    plot.y_axis("error among them", ticks(0, top), lambda v: percent(v, digits))
    plot.x_axis(f"most confident share of the {one}s", _FIFTHS, lambda v: percent(v, 0))
    plot.area(points, "under")
    plot.line(points, "curve")
    if risk is not None:
        plot.line(expected, "ideal", "what the model expects")
    for share in (0.5, 0.8, 1.0):
        error = at_share(errors, share)
        said = f"all {one}s" if share == 1 else f"most confident {percent(share, 0)}"
        plot.dot((share, error), "point", 4, f"{said}: {percent(error)} {verb} wrong")
        # Placed clear of lines and ticks: below the curve, or above it if the expected error lies below.
        below = at_share(deferral.expected, share) >= error > 0.08 * top
        plot.note((share, error), percent(error), *(("start", (8, 12)) if below else ("end", (-4, -9))))
    return plot.svg(f"Error among the {one}s that are answered, by their share")


def at_share(values: NDArray[np.float64], share: float) -> float:
    """The value for the most confident ``share`` of the tokens; ``values[k - 1]`` is that for k tokens."""
    return float(values[max(1, round(share * len(values))) - 1])


def _interval(b: CalibrationBin) -> Range:
    """Wilson's interval of two standard errors for the accuracy of a bin, as if tokens were independent."""
    z2, n, p = 4.0, b.count, b.accuracy
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)
