"""``python -m fuzz``: all campaigns, in some minutes. Exit status 1 if anything failed.

Every trial has its own seed, made from the campaign's seed and its number, so that failures can be
reproduced."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fuzz import checkpoints, damage, databases, inputs, kills, models, requests, stress
from fuzz.trial import Tally, try_files

Files = Iterator[tuple[str, bytes, str]]


def input_files(number: int, seed: int) -> Files:
    formats = list(inputs.SEEDS)
    for k in range(number):
        format = formats[k % len(formats)]
        yield format, inputs.mutated(format, random.Random(f"{seed}-{k}")), f"{seed}-{k}"


def damaged(files: dict[str, bytes], key: str, number: int, seed: int) -> Files:
    """Damaged files. Half of them are signed again; of the others, some have changed bytes."""
    for k in range(number):
        rng, name = random.Random(f"{seed}-{k}"), list(files)[k % len(files)]
        if k % 8 == 3:
            yield name, damage.bytes_of(files[name], rng), f"{seed}-{k}, bytes"
        else:
            content, done = damage.container(files[name], key, k % 2 == 0, rng)
            yield name, content, f"{seed}-{k}, {done}"


def campaigns(scale: float, seed: int, folder: Path, kept: Path) -> dict[str, Callable[[], Tally]]:
    def times(number: int) -> int:
        return max(1, round(scale * number))

    def of_models() -> Tally:
        files = {name: path.read_bytes() for name, path in models.write_all(folder, seed).items()}
        found = damaged(files, "structgp", times(600), seed)
        return try_files("models", found, models.answers, folder, kept)

    def of_checkpoints() -> Tally:
        files = {name: checkpoints.write(name, folder / f"kept {name}") for name in checkpoints.KINDS}
        found = damaged(files, "checkpoint", times(200), seed)
        return try_files("checkpoints", found, checkpoints.answers, folder, kept)

    def of_inputs() -> Tally:
        return try_files("inputs", input_files(times(3000), seed), inputs.answers, folder, kept)

    def of_databases() -> Tally:
        content = databases.write(folder / "labels")
        some = (databases.changed(content, random.Random(f"{seed}-{k}")) for k in range(times(300)))
        files = (("labels", found, f"{seed}-{k}, {done}") for k, (found, done) in enumerate(some))
        return try_files("databases", files, databases.answers, folder, kept)

    return {
        "inputs": of_inputs,
        "models": of_models,
        "checkpoints": of_checkpoints,
        "databases": of_databases,
        "requests": lambda: requests.campaign(times(500), seed, folder),
        "saves": lambda: kills.saves(times(30), seed, folder),
        "kills": lambda: kills.fits(times(10), seed, folder),
        "disks": lambda: kills.full_disks(times(20), seed, folder),
        "signals": lambda: kills.signals(times(6), seed, folder),
        "threads": lambda: stress.threads(times(20), seed),
        "numbers": lambda: stress.fits(times(40), seed),
    }


def main(arguments: list[str] | None = None) -> int:
    names = list(campaigns(1.0, 0, Path(), Path()))
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Attacks structgp, and counts.")
    parser.add_argument("campaigns", nargs="*", metavar="CAMPAIGN", help=f"any of {', '.join(names)}; all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of trials")
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="folder for files that fail")
    given = parser.parse_args(arguments)
    unknown = set(given.campaigns) - set(names)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)  # children are forked, and threads do not survive a fork
    warnings.simplefilter("ignore")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        found = campaigns(given.scale, given.seed, Path(folder), given.keep)
        for name in given.campaigns or names:
            began = time.monotonic()
            tally = found[name]()
            print(f"{tally} ({time.monotonic() - began:.0f} s)", flush=True)
            failed += len(tally.failures)
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
