"""Corpora on disk: time and memory of a step, with few sequences and with ten times as many.

    python -m benchmarks.streaming                      # 10,000 and 100,000 sequences, 300,000 features
    python -m benchmarks.streaming --sizes 300 3000 --values 200 --steps 20

Both corpora come from one chain and have the same features: 10 templates of 30,000 values, Zipf-like, each
of which occurs at least once in the first 10,000 sequences of 25 tokens. Each corpus is written sequence by
sequence and fitted batch by batch, in separate processes. The two fits take their steps in turn, so that
other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

N_LABELS, N_TEMPLATES, MEAN_LENGTH, SWEEP = 20, 10, 25, 8
WARM_UP = 3
"""Number of first steps that are not counted: the very first one touches all weights."""


def peak() -> float:
    """Largest resident memory of this process so far, in GiB."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def write(folder: str, n_sequences: int, n_values: int) -> None:
    """Writes the corpus, from a generator that is run twice."""
    from benchmarks.generate import generate_stream
    from structgp.data import shards

    def sequences() -> Any:
        return generate_stream(
            n_sequences,
            n_labels=N_LABELS,
            mean_length=MEAN_LENGTH,
            n_templates=N_TEMPLATES,
            n_values=n_values,
            sweep=SWEEP,
            seed=0,
        )

    began = time.perf_counter()
    kept = shards.write(sequences, folder, features="columns")
    n_features = sum(map(len, kept.encoder.values))
    tell(
        n_sequences=kept.n_sequences,
        n_tokens=kept.n_tokens,
        n_features=n_features,
        write_seconds=time.perf_counter() - began,
        write_peak=peak(),
    )


def fit(folder: str, steps: int) -> None:
    """The default fit; each line on standard input lets it take one more step."""
    import torch

    torch.set_num_threads(1)
    from structgp import StructuredGPClassifier
    from structgp.data import shards

    began = 0.0

    def turn(info: Any) -> bool:
        nonlocal began
        if info.iteration:
            seconds = time.perf_counter() - began
            tell(seconds=seconds, peak=peak(), sites=sites(folder))
        sys.stdin.readline()
        began = time.perf_counter()
        return info.iteration >= steps

    warnings.simplefilter("ignore")
    model = StructuredGPClassifier().fit(shards.read(folder), callback=turn)
    tell(peak=peak(), fresh_bound=model.training_log_["fresh_elbo"])


def sites(folder: str) -> int:
    """Size in bytes of the sites of a fit that is under way."""
    return sum(file.stat().st_size for file in Path(folder).glob(".sites-*/*"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs=2, default=[10_000, 100_000])
    parser.add_argument("--values", type=int, default=30_000, help="of each of the ten templates")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--folder", help="where the shards are, or are to be  [default: temporary]")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.part and given.part[0] == "write":
        write(given.part[1], int(given.part[2]), int(given.part[3]))
    elif given.part:
        fit(given.part[1], int(given.part[2]))
    elif given.folder:
        compare(Path(given.folder), given.sizes, given.values, given.steps)
    else:
        with tempfile.TemporaryDirectory() as folder:
            compare(Path(folder), given.sizes, given.values, given.steps)
    return 0


def compare(folder: Path, sizes: Sequence[int], n_values: int, steps: int) -> None:
    for n in sizes:
        path = folder / f"{n}-{n_values}"
        if not (path / "manifest.json").exists():
            told = json.loads(_run("write", str(path), str(n), str(n_values)))
            print(
                "{n_sequences} sequences, {n_tokens} tokens, {n_features} features: written in "
                "{write_seconds:.0f} s, {write_peak:.2f} GiB at most".format(**told),
                flush=True,
            )
    fits = [_start("fit", str(folder / f"{n}-{n_values}"), str(steps)) for n in sizes]
    seconds: list[list[float]] = [[] for _ in sizes]
    first: list[float] = []
    for step in range(steps):
        for fit, own in zip(fits, seconds, strict=True):
            told = _ask(fit)
            if step == 0:
                first.append(told["sites"] / 2)  # these are the sites of two batches
            if step >= WARM_UP:
                own.append(told["seconds"])
    ends = [_ask(fit) for fit in fits]
    for fit in fits:
        fit.communicate()
    for n, own, end, size in zip(sizes, seconds, ends, first, strict=True):
        print(
            f"{n} sequences: {statistics.median(own):.3f} s a step (median of {len(own)}), "
            f"{end['peak']:.2f} GiB at most, {size / 2**20:.1f} MiB on disk for the site of a batch, "
            f"bound on fresh draws {end['fresh_bound']:.0f}"
        )
    few, many = (statistics.median(own) for own in seconds)
    print(f"time per step, {sizes[1]} over {sizes[0]} sequences: {many / few:.3f}")


def _command(*part: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.streaming", "--part", *part]


def _run(*part: str) -> str:
    return subprocess.run(_command(*part), check=True, capture_output=True, text=True).stdout


def _start(*part: str) -> subprocess.Popen[str]:
    return subprocess.Popen(_command(*part), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(fit: subprocess.Popen[str]) -> Any:
    """Lets a fit take its next step, and returns what it reports."""
    assert fit.stdin is not None
    assert fit.stdout is not None
    fit.stdin.write("\n")
    fit.stdin.flush()
    return json.loads(fit.stdout.readline())


if __name__ == "__main__":
    sys.exit(main())
