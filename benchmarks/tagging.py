"""``structgp tag`` on a large file, by name and through a pipe: rates, and whether memory grows.

    python -m benchmarks.tagging                        # 100 MB, some twenty minutes
    python -m benchmarks.tagging --megabytes 5

The model is fitted to the embedded corpus of recipes, whose test lines are repeated with some words
changed. Rates are per processor second, which does not depend on other load of the machine. Memory is that
of the process after a tenth of its output, and its peak.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from structgp.data.corpora import recipes

COMMAND = [sys.executable, "-W", "ignore", "-m", "structgp"]


def write(folder: Path, megabytes: float) -> None:
    """Writes the files to train the model, and the large file."""
    corpus = recipes()
    (folder / "template").write_text(corpus.template.text, encoding="utf-8")
    with open(folder / "train", "w", encoding="utf-8") as file:
        for x, y in zip(corpus.X_train, corpus.y_train, strict=True):
            file.writelines(" ".join([*row, label]) + "\n" for row, label in zip(x, y, strict=True))
            file.write("\n")
    rng = random.Random(0)
    with open(folder / "large", "w", encoding="utf-8") as file:
        while file.tell() < 1e6 * megabytes:
            for x in rng.sample(list(corpus.X_test), len(corpus.X_test)):
                file.writelines(" ".join(_varied(row, rng)) + "\n" for row in x)
                file.write("\n")


def _varied(row: Sequence[str], rng: random.Random) -> list[str]:
    """The row with a new word, in one case of five."""
    return [row[0] + str(rng.randrange(10**6)) if rng.random() < 0.2 else row[0], *row[1:]]


def tag(folder: Path, by_pipe: bool) -> tuple[float, float, float]:
    """Processor seconds; MB after a tenth of the output; and largest number of MB."""
    output = folder / "tagged"
    command = [*COMMAND, "tag", "-m", str(folder / "model")]
    source = open(folder / "large", "rb") if by_pipe else None  # noqa: SIM115
    feed = subprocess.Popen(["cat"], stdin=source, stdout=subprocess.PIPE) if by_pipe else None
    with open(output, "wb") as out:
        given = feed.stdout if feed is not None else subprocess.DEVNULL
        child = subprocess.Popen(
            command if by_pipe else [*command, str(folder / "large")], stdin=given, stdout=out
        )
        size, early, most, seconds = (folder / "large").stat().st_size, 0.0, 0.0, 0.0
        while child.poll() is None:
            time.sleep(0.2)
            held, spent = _look(child.pid)
            seconds, most = max(seconds, spent), max(most, held)
            if not early and output.stat().st_size > size / 10:
                early = held
    if child.returncode:
        raise SystemExit(child.returncode)
    return seconds, early, most


def _look(pid: int) -> tuple[float, float]:
    """Memory of a process in MB, and its processor seconds; both 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, IndexError):
        return 0.0, 0.0
    ticks = int(fields[11]) + int(fields[12])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, ticks / os.sysconf("SC_CLK_TCK")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--megabytes", type=float, default=100)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, given.megabytes)
        fit = ["train", "template", "train", "-o", "model", "--data-weight", "1"]
        subprocess.run([*COMMAND, *fit], cwd=folder, check=True, stderr=subprocess.DEVNULL)
        first = b""
        for by_pipe in (False, True):
            began = time.monotonic()
            seconds, early, most = tag(folder, by_pipe)
            answer = (folder / "tagged").read_bytes()
            same = "" if not by_pipe else f", {'the same' if answer == first else 'OTHER'} answers"
            first = answer
            rate, clock = given.megabytes / seconds, time.monotonic() - began
            told = f"{'pipe' if by_pipe else 'file'}: {given.megabytes:g} MB, {rate:.3f} MB per second of "
            told += f"processor time ({clock:.0f} s by the clock); {early:.0f} MB of memory after a tenth, "
            print(f"{told}{most:.0f} MB at most{same}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
