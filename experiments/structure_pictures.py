"""Pictures of the structures that can be declared, for the docs.

    python -m experiments.structure_pictures [--out docs/figures]

A circle is a label; a line joins labels that have a joint score; a dashed line is a template beside the
chain.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

Point = tuple[float, float]
Link = tuple[int, int]

STEP, RADIUS, EDGE = 48, 11, 22
STYLE = (
    "<style>circle{fill:#fff;stroke:#446;stroke-width:2}line,path{stroke:#446;stroke-width:2;fill:none}"
    ".more{stroke:#c50;stroke-dasharray:5 4}.box{fill:#c502;stroke:#c50;stroke-width:2}"
    "text{font:12px sans-serif;fill:#777;text-anchor:middle}</style>"
)


def draw(
    nodes: Sequence[Point],
    lines: Iterable[Link],
    arcs: Iterable[Link] = (),
    more: Iterable[Link] = (),
    boxes: Iterable[tuple[int, int]] = (),
    words: Sequence[str] = (),
) -> str:
    """An SVG of nodes at grid points. lines, more : pairs that are joined directly, the second in another
    colour. arcs : pairs that are joined above the nodes. boxes : first and last node of each box. words :
    texts below the first nodes."""
    at = [(EDGE + STEP * x, EDGE + STEP * y) for x, y in nodes]
    drop = 26 if arcs else 0
    at = [(x, y + drop) for x, y in at]
    width, height = max(x for x, _ in at) + EDGE, max(y for _, y in at) + EDGE + (16 if words else 0)
    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
        STYLE,
    ]
    for a, b in boxes:
        (x, y), (x2, _) = at[a], at[b]
        r = RADIUS + 6
        size = f'width="{x2 - x + 2 * r}" height="{2 * r}"'
        found.append(f'<rect class="box" x="{x - r}" y="{y - r}" {size} rx="{r}"/>')
    for kind, links in (("", lines), ("more", more)):
        for a, b in links:
            (x, y), (x2, y2) = at[a], at[b]
            found.append(f'<line class="{kind}" x1="{x}" y1="{y}" x2="{x2}" y2="{y2}"/>')
    for a, b in arcs:
        (x, y), (x2, y2) = at[a], at[b]
        found.append(f'<path class="more" d="M{x} {y} Q{(x + x2) / 2} {y - 62} {x2} {y2}"/>')
    found += [f'<circle cx="{x}" cy="{y}" r="{RADIUS}"/>' for x, y in at]
    found += [f'<text x="{x}" y="{y + 28}">{w}</text>' for (x, y), w in zip(at, words, strict=False) if w]
    return "\n".join([*found, "</svg>\n"])


def row(n: int, y: float = 0) -> list[Point]:
    return [(x, y) for x in range(n)]


def chained(n: int, first: int = 0) -> list[Link]:
    return [(first + i, first + i + 1) for i in range(n - 1)]


def pixels(height: int, width: int) -> tuple[list[Point], list[Link], list[Link]]:
    """Nodes of a grid, links to the right and below, and the diagonals."""
    place = {(h, w): h * width + w for h in range(height) for w in range(width)}
    straight = [(n, place[h + a, w + b]) for (h, w), n in place.items() for a, b in ((0, 1), (1, 0))
                if (h + a, w + b) in place]  # fmt: skip
    across = [(n, place[h + 1, w + b]) for (h, w), n in place.items() for b in (1, -1)
              if (h + 1, w + b) in place]  # fmt: skip
    return [(w, h) for h, w in place], straight, across


def pictures() -> dict[str, str]:
    """The pictures: maps the name of each to its SVG."""
    nodes, straight, across = pixels(3, 4)
    tree = [(2.0, 0.0), (1.0, 1.0), (3.0, 1.0), (0.5, 2.0), (1.5, 2.0), (3.0, 2.0)]
    graph = [(0.0, 0.6), (1.2, 0.0), (1.2, 1.4), (2.6, 0.2), (2.6, 1.3), (3.8, 0.7)]
    both = [*row(5), *row(5, 1.2)]
    return {
        "chain": draw(row(6), chained(6)),
        "order": draw(row(6), chained(6), arcs=[(i, i + 2) for i in range(4)]),
        "same": draw(row(6), chained(6), arcs=[(1, 4)], words=["", "Green", "", "", "Green", ""]),
        "tree": draw(tree, [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5)]),
        "grid": draw(nodes, straight),
        "grid-8": draw(nodes, straight, more=across),
        "layers": draw(both, [*chained(5), *chained(5, 5)], more=[(i, i + 5) for i in range(5)]),
        "edges": draw(graph, [(0, 1), (0, 2), (1, 2), (1, 3), (2, 4), (3, 5), (4, 5)]),
        "segments": draw(row(7), chained(7), boxes=[(0, 1), (3, 5)]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    out = parser.parse_args().out
    for name, svg in pictures().items():
        (out / f"structure-{name}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
