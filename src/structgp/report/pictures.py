"""Pictures of examples that are not sequences: grids as images, trees as trees."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from structgp.data.graphs import Shape, parents_of
from structgp.report.findings import Findings
from structgp.report.markup import Markup, count, decimal, join, plural, tag

MOST_PICTURES = 12
MOST_CELLS = 30_000
"""Largest number of pixels in all images together; a page with more is slow to scroll."""

MOST_SINGLE = 1_500
"""Largest number of pixels of an image in which each has its own cell, with a title; in larger images, runs
of equal pixels share a cell."""

MOST_NODES = 60
"""Largest number of nodes of a tree that is drawn."""

PICTURE, ROOM, SLOT, LEVEL = 230, 16, 74, 66
"""In pixels: width of an image, least side of a cell with text in it, width and height of a tree's node."""


def pictures(findings: Findings) -> Markup | None:
    """A few examples as pictures, the most surprising first, or the most uncertain if there are no labels;
    None for sequences and graphs, which have no pictures."""
    if findings.form == "grid":
        return _images(findings)
    return _trees(findings) if findings.form == "tree" else None


def order_of(findings: Findings) -> list[int]:
    """Examples that have nodes, those with the most surprise per node, or uncertainty, first."""
    there = [i for i, labels in enumerate(findings.predicted) if labels]
    total = [float(findings.uncertainties[0].values[i].sum()) for i in range(len(findings.predicted))]
    if findings.truth is not None:
        log_probs = findings.truth.log_probs
        total = [math.inf if p is None else -p for p in log_probs]
        total = total if any(p is not None for p in log_probs) else _wrong(findings)
    return sorted(there, key=lambda i: -total[i] / len(findings.predicted[i]))


def _wrong(findings: Findings) -> list[float]:
    assert findings.truth is not None
    both = zip(findings.truth.labels, findings.predicted, strict=True)
    return [float(sum(a != b for a, b in zip(*two, strict=True))) for two in both]


# -- images ----------------------------------------------------------------------------------------


def _images(findings: Findings) -> Markup:
    assert findings.shapes is not None
    chosen: list[int] = []
    cells = 0
    for i in order_of(findings)[:MOST_PICTURES]:
        cells += len(findings.predicted[i])
        if chosen and cells > MOST_CELLS:
            break
        chosen.append(i)
    often = Counter(label for i in chosen for label in _labels_of(findings, i))
    names = sorted(often, key=lambda label: _place(label, findings.estimator.classes_.tolist()))
    # The most frequent label, such as a background, is grey.
    usual = often.most_common(1)[0][0] if often else ""
    hues = {label: _hue(n, len(names), label == usual) for n, label in enumerate(names)}
    keys = (tag("span", tag("i", style=hues[label]), label) for label in hues)
    said = "The most surprising images first." if findings.truth else "The most uncertain images first."
    said += " Dashed: pixels whose label is wrong. Darker: more uncertain."
    drawn = [_image(findings, i, hues) for i in chosen]
    shown = tag("div", *drawn, class_="pictures")
    return join((tag("p", said, class_="note"), tag("div", *keys, class_="keys"), shown))


def _labels_of(findings: Findings, i: int) -> list[str]:
    truth = () if findings.truth is None else findings.truth.labels[i]
    return [*findings.predicted[i], *truth]


def _place(label: str, known: Sequence[str]) -> tuple[int, str]:
    return known.index(label) if label in known else len(known), label


def _hue(n: int, of: int, grey: bool) -> str:
    """A colour that is far from those of other labels: hues around the circle, every other one paler."""
    return f"--hue:{round(360 * n / max(of, 1))};--pale:{n % 2 if of > 6 else 0};--full:{0 if grey else 1}"


def _image(findings: Findings, i: int, hues: dict[str, str]) -> Markup:
    assert findings.shapes is not None
    size = findings.shapes[i].size
    assert size is not None
    predicted, truth = findings.predicted[i], findings.truth
    true = None if truth is None else truth.labels[i]
    wrong = [] if true is None else [a != b for a, b in zip(true, predicted, strict=True)]
    panels = [] if true is None else [("true labels", _labels(size, true, hues, None))]
    panels.append(("predicted labels", _labels(size, predicted, hues, wrong)))
    panels += [(kind.title, _shades(size, kind.values[i], kind.full)) for kind in findings.uncertainties]
    facts = [f"line {count(findings.text.lines[i])}", f"{size[0]} x {size[1]} pixels"]
    if true is not None:
        facts.append(plural(sum(wrong), "error") if any(wrong) else "no error")
    parts = [tag("div", svg, tag("p", title, class_="note")) for title, svg in panels]
    about = tag("p", " \N{MIDDLE DOT} ".join(facts), class_="about")
    return tag("div", about, tag("div", *parts, class_="panels"), class_="picture")


def _labels(
    size: tuple[int, int], labels: Sequence[str], hues: dict[str, str], wrong: Sequence[bool] | None
) -> Markup:
    """Cells in the colours of labels; wrong ones have a dashed edge. wrong : None for true labels."""
    (H, W), parts = size, []
    side = _side(size)
    single, errors = H * W <= MOST_SINGLE, wrong or [False] * len(labels)
    for h in range(H):
        keys = [(labels[h * W + w], errors[h * W + w], w if single else 0) for w in range(W)]
        w = 0
        for (label, bad, _), run in groupby(keys):
            n = len(list(run))
            title = f"row {h}, column {w}: {label}{', which is wrong' if bad else ''}" if single else ""
            parts.append(_cell(side, h, w, n, title, "cell", hues[label]))
            if bad:
                parts.append(_cell(side, h, w, n, "", "false", ""))
            if single and side >= ROOM and len(label) <= side // 8:
                x, y = (w + 0.5) * side, (h + 0.5) * side + 4
                parts.append(tag("text", label, x=x, y=y, text_anchor="middle"))
            w += n
    return _svg(size, parts, "predicted labels" if wrong is not None else "true labels")


def _shades(size: tuple[int, int], values: np.ndarray, full: float) -> Markup:
    """Cells shaded by uncertainty (N,) in nats, darkest at ``full``."""
    (H, W), parts = size, []
    side, single = _side(size), H * W <= MOST_SINGLE
    levels = np.clip(20 * values / full, 0, 20).round().astype(int)
    for h in range(H):
        keys = [(int(levels[h * W + w]), w if single else 0) for w in range(W)]
        w = 0
        for (level, _), run in groupby(keys):
            n = len(list(run))
            title = f"row {h}, column {w}: {decimal(float(values[h * W + w]), 2)} nats" if single else ""
            parts.append(_cell(side, h, w, n, title, "doubt", f"--shade:{5 * level}%"))
            w += n
    return _svg(size, parts, "uncertainty")


def _side(size: tuple[int, int]) -> float:
    """Pixels on the screen per pixel of the image."""
    return float(min(28.0, PICTURE / max(1, *size)))


def _cell(side: float, h: int, w: int, n: int, title: str, kind: str, style: str) -> Markup:
    room = 1.0 if kind == "false" else 0.0
    box = {
        "x": w * side + room,
        "y": h * side + room,
        "width": n * side - 2 * room,
        "height": side - 2 * room,
    }
    return tag("rect", title and tag("title", title), **box, class_=kind, style=style or None)


def _svg(size: tuple[int, int], parts: Sequence[Markup], title: str) -> Markup:
    width, height = (round(n * _side(size), 2) for n in (size[1], size[0]))
    box = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    return tag("svg", tag("title", title), *parts, **box, role="img", class_="image")


# -- trees -----------------------------------------------------------------------------------------


def _trees(findings: Findings) -> Markup:
    assert findings.shapes is not None
    small = [i for i in order_of(findings) if len(findings.predicted[i]) <= MOST_NODES]
    if not small:
        return tag(
            "p", f"No tree has at most {MOST_NODES} nodes, and larger ones are not drawn.", class_="note"
        )
    said = "The most surprising trees first" if findings.truth else "The most uncertain trees first"
    said += (
        f", of those with at most {MOST_NODES} nodes. Shaded by uncertainty; wrong labels struck through."
    )
    drawn = [_tree(findings, i, findings.shapes[i]) for i in small[:MOST_PICTURES]]
    return join((tag("p", said, class_="note"), tag("div", *drawn, class_="pictures")))


def _tree(findings: Findings, i: int, shape: Shape) -> Markup:
    n, kind = len(findings.predicted[i]), findings.uncertainties[0]
    parents = np.full(n, -1)
    for parent, child in parents_of(shape.graph, n, f"X[{i}]"):
        parents[child] = parent
    place, depth = positions(parents)
    x, y = (place + 0.5) * SLOT, depth * LEVEL + 16
    truth = None if findings.truth is None else findings.truth.labels[i]
    ends = [
        24 if truth is None or a == b else 35
        for a, b in zip(truth or [""] * n, findings.predicted[i], strict=True)
    ]
    parts = [
        tag(
            "line",
            x1=float(x[p]),
            y1=float(y[p] + ends[p]),
            x2=float(x[t]),
            y2=float(y[t] - 14),
            class_="branch",
        )
        for t, p in enumerate(parents)
        if p >= 0
    ]
    for t, (word, label) in enumerate(zip(findings.text.words[i], findings.predicted[i], strict=True)):
        wrong = truth is not None and truth[t] != label
        share = min(1.0, float(kind.values[i][t]) / kind.full)
        title = f"{word}: {label}" + (f", true label {truth[t]}" if truth is not None and wrong else "")
        box = {"x": float(x[t]) - SLOT / 2 + 3, "y": float(y[t]) - 13, "width": SLOT - 6.0, "height": 20.0}
        words = tag(
            "text", _short(word), x=float(x[t]), y=float(y[t]) + 2, text_anchor="middle", class_="word"
        )
        below = [(label, "wrong" if wrong else "label")] + ([(truth[t], "true")] if wrong and truth else [])
        lines = [
            tag(
                "text",
                _short(name),
                x=float(x[t]),
                y=float(y[t]) + 18 + 11 * k,
                text_anchor="middle",
                class_=of,
            )
            for k, (name, of) in enumerate(below)
        ]
        node = tag("rect", **box, rx=4, class_="doubt", style=f"--shade:{100 * share:.0f}%")
        parts.append(tag("g", tag("title", title), node, words, *lines))
    width, height = (float(place.max()) + 1) * SLOT, float(depth.max()) * LEVEL + 52
    size = {"viewBox": f"0 0 {width:.0f} {height:.0f}", "width": width, "height": height}
    svg = tag(
        "svg", tag("title", f"tree of {plural(n, 'node')}"), *parts, **size, role="img", class_="tree"
    )
    facts = [f"line {count(findings.text.lines[i])}", plural(n, "node")]
    if truth is not None:
        bad = sum(a != b for a, b in zip(truth, findings.predicted[i], strict=True))
        facts.append(plural(bad, "error") if bad else "no error")
    about = tag("p", " \N{MIDDLE DOT} ".join(facts), class_="about")
    box_of = tag("div", svg, class_="box", tabindex=0, role="region", aria_label="tree")
    return tag("div", about, box_of, class_="picture")


def _short(word: str) -> str:
    return word if len(word) <= 10 else word[:9] + "\N{HORIZONTAL ELLIPSIS}"


def positions(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(N,) places from left to right and depths of the nodes of a forest: leaves side by side in the order
    of their nodes, parents above the middle of their children."""
    n = len(parents)
    children: list[list[int]] = [[] for _ in range(n)]
    for t, p in enumerate(parents):
        if p >= 0:
            children[p].append(t)
    place, depth, order = np.zeros(n), np.zeros(n, dtype=int), []
    stack = [t for t in reversed(range(n)) if parents[t] < 0]
    while stack:
        t = stack.pop()
        order.append(t)
        depth[t] = 0 if parents[t] < 0 else depth[parents[t]] + 1
        stack.extend(reversed(children[t]))
    leaves = 0
    for t in order:
        if not children[t]:
            place[t] = leaves
            leaves += 1
    for t in reversed(order):
        if children[t]:
            place[t] = (place[children[t][0]] + place[children[t][-1]]) / 2
    return place, depth
