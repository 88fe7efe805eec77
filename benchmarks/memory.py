"""Peak memory of a default fit against the number of sequences, with each fit in a separate process.

The memory of imports and data is measured before the fit begins.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.clock import exponent
from benchmarks.record import Options, Row, log_plot, table

SIZES = (100, 200, 400, 800, 1600)
QUICK = (20, 40)


def run(options: Options) -> Iterator[Row]:
    for n in QUICK if options.quick else SIZES:
        words = [sys.executable, "-m", "benchmarks.memory", str(n), str(options.threads)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        before, peak = map(int, done.stdout.split())
        yield {"sequences": n, "bytes_before": before, "peak_bytes": peak}


def fit(n: int) -> None:
    """Fits, and prints the peak memory of this process before and after."""
    from benchmarks.generate import generate
    from structgp import StructuredGPClassifier

    data = generate(n, seed=0)
    before = peak_bytes()
    StructuredGPClassifier().fit(data.X, data.y)
    print(before, peak_bytes())


def peak_bytes() -> int:
    """Peak memory of this process. On Linux it is read from /proc, because the figure of getrusage starts
    from that of the parent process."""
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return 1024 * int(fields["VmHWM"].split()[0])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def above(row: Row) -> float:
    """Memory of the fit itself, in MiB."""
    return max(row["peak_bytes"] - row["bytes_before"], 1) / 2**20


def tables(rows: list[Row]) -> str:
    lines = [[row["sequences"], row["peak_bytes"] / 2**20, above(row)] for row in rows]
    text = table(["sequences", "peak, MiB", "of the fit, MiB"], lines)
    if len(rows) > 1:
        slope = exponent([row["sequences"] for row in rows], [above(row) for row in rows])
        text += f"\nExponent of what the fit takes: {slope:.2f}\n"
    return text


def plots(rows: list[Row]) -> dict[str, str]:
    line = [(row["sequences"], above(row)) for row in rows]
    return {"memory": log_plot({"fit": line}, "sequences", "MiB", "Peak memory of a fit")}


if __name__ == "__main__":
    import torch

    torch.set_num_threads(int(sys.argv[2]))
    fit(int(sys.argv[1]))
