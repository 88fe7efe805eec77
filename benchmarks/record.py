"""Records of measurements: rows of JSON in files that only grow, tables and plots."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"

STYLE = """
svg { font: 12px system-ui, sans-serif; background: #fff }
.axis, .grid { stroke: #888; stroke-width: 1 } .grid { stroke: #ddd }
.tick, .note { fill: #555; font-size: 11px } .label { fill: #222 }
polyline { fill: none; stroke-width: 2 }
.c0 { stroke: #b0302a } .c1 { stroke: #2a5f8f } .c2 { stroke: #5a8a3a } .c3 { stroke: #9a6200 }
.c4 { stroke: #6b4c9a } .c5 { stroke: #1e7f86 } circle { fill: #fff; stroke-width: 2 }
"""


@dataclass(frozen=True)
class Options:
    """The options of a run. quick : use small sizes. threads : number of threads of torch and of libraries
    that follow its setting, for ours and the peers alike. peers : names of peers to measure beside ours;
    None for all that are installed. results : the folder for results."""

    quick: bool = False
    device: str = "cpu"
    threads: int = 2
    peers: tuple[str, ...] | None = None
    results: Path = RESULTS

    def wants(self, peer: str) -> bool:
        return self.peers is None or peer in self.peers


def circumstances(options: Options) -> Row:
    """The circumstances of a run, which are part of each of its rows."""
    from structgp import __version__

    where = platform.machine()
    if torch.device(options.device).type == "cuda":
        where = torch.cuda.get_device_name()
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "structgp": __version__,
        "torch": torch.__version__,
        "device": options.device,
        "machine": where,
        "cores": os.cpu_count(),
        "threads": options.threads,
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "quick": options.quick,
    }


def keep(name: str, rows: Sequence[Row], options: Options) -> None:
    """Appends the rows to the history of this benchmark."""
    options.results.mkdir(parents=True, exist_ok=True)
    common = circumstances(options)
    with (options.results / f"{name}.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(common | row) + "\n" for row in rows)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, in which numbers have three digits."""
    lines = [list(header), ["---"] * len(header), *([_text(x) for x in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _text(x: object) -> str:
    return f"{x:.3g}" if isinstance(x, float) else str(x)


def log_plot(
    lines: dict[str, Sequence[tuple[float, float]]], x: str, y: str, title: str, log_y: bool = True
) -> str:
    """The text of an SVG file with named lines on logarithmic axes."""
    from structgp.report.svg import Plot, ticks, widened

    def up(value: float) -> float:
        return math.log10(value) if log_y else value

    points = {
        name: [(math.log10(a), up(b)) for a, b in sorted(line)] for name, line in lines.items() if line
    }
    every = [point for line in points.values() for point in line]
    plot = Plot(widened([a for a, _ in every]), widened([b for _, b in every]), right=110)
    plot.x_axis(x, ticks(*plot.x, about=4), lambda v: f"{10**v:.3g}")
    plot.y_axis(y, ticks(*plot.y), (lambda v: f"{10**v:.2g}") if log_y else (lambda v: f"{v:.3g}"))
    for i, (name, line) in enumerate(points.items()):
        plot.line(line, f"c{i % 6}", name)
        for point in line:
            plot.dot(point, f"c{i % 6}", 2.5, "")
        plot.note(line[-1], name, shift=(6, 4))
    svg = str(plot.svg(title))
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        "</title>", f"</title><style>{STYLE}</style>", 1
    )
