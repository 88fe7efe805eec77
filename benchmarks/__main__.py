"""python -m benchmarks [name ...] [--quick] [--device cpu|cuda] [--threads 2] [--peers ...] [--results DIR]

chain    log Z of a linear chain and its gradients, against torch-struct, pytorch-crf and a plain loop
growth   time against the size of a chain, and of a whole fit, with exponents
fit      time to a given loss on new data, against CRFsuite, slice sampling and the paper's settings
answering labels and probabilities of a chunker, in bulk and one sentence at a time, against CRFsuite
memory   peak memory of a fit against the number of sequences
encoding time to encode a token against the number of known features, by form of input

All of them if none is named. Tables are printed and kept as RESULTS/name.md, plots as RESULTS/name*.svg;
every row is appended to RESULTS/name.jsonl. Peers that are not installed are left out; the table says so.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.record import RESULTS, Options, keep

# Each has run(options) -> rows, tables(rows) -> Markdown, plots(rows) -> name to SVG.
NAMES = ("chain", "growth", "fit", "answering", "memory", "encoding")
ON_GPU = ("chain",)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for chain")
    parser.add_argument("--threads", type=int, default=2, help="of ours and of the peers")
    parser.add_argument("--peers", nargs="*", help="these only")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder")
    given = parser.parse_args(words)
    unknown = [name for name in given.names if name not in NAMES]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    names = given.names or (NAMES if given.device == "cpu" else ON_GPU)
    if given.device != "cpu" and not set(names) <= set(ON_GPU):
        parser.error(f"--device {given.device} is for {', '.join(ON_GPU)}")
    torch.set_num_threads(given.threads)
    peers = None if given.peers is None else tuple(given.peers)
    options = Options(given.quick, given.device, given.threads, peers, given.results)
    for name in names:
        run_one(name, options)
    return 0


def run_one(name: str, options: Options) -> str:
    benchmark = importlib.import_module(f"benchmarks.{name}")
    rows = []
    for row in benchmark.run(options):
        print(f"{name}: {row}", file=sys.stderr, flush=True)
        rows.append(row)
    keep(name, rows, options)
    text = benchmark.tables(rows)
    suffix = "" if options.device == "cpu" else f"-{options.device}"
    (options.results / f"{name}{suffix}.md").write_text(text, encoding="utf-8")
    for what, svg in benchmark.plots(rows).items():
        (options.results / f"{what}{suffix}.svg").write_text(svg, encoding="utf-8")
    print(text)
    return text


if __name__ == "__main__":
    sys.exit(main())
