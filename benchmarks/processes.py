"""Shards fitted by one process and by several: time, memory, and the NLL of held-out sequences.

    python -m benchmarks.processes                               # 30,000 sequences, one process and two
    python -m benchmarks.processes --kill                        # one of them is killed once
    python -m benchmarks.processes --sequences 100000 --rounds 4 # memory: stop after some rounds

Processes are started by ``torchrun`` on this machine, with one thread each. Time is the processor time of
the busiest process within the fit, which other work on the machine disturbs least, and the wall-clock time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

N_TEST = 1000
CORPUS: dict[str, Any] = {"n_labels": 8, "mean_length": 12, "n_templates": 5, "n_values": 1500}


def corpus(n_sequences: int, first: int = 0) -> Iterator[tuple[Any, Any]]:
    """Sequences number ``first`` to ``n_sequences`` - 1 from one chain."""
    from benchmarks.generate import generate_stream

    for n, pair in enumerate(generate_stream(n_sequences, **CORPUS, seed=0)):
        if n >= first:
            yield pair


def fit(folder: str, kept: str, rounds: int) -> None:
    """The work of each process: a fit from the shards in a folder. rounds : number of rounds after which it
    is stopped, 0 for no limit."""
    import torch

    from structgp import StructuredGPClassifier
    from structgp.data import shards
    from structgp.inference.distributed import joined

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with joined() as together:
        seen: list[int] = []

        def told(info: Any) -> bool:
            seen.append(info.iteration)
            return len(seen) == rounds

        began, used = time.perf_counter(), time.process_time()
        data = shards.read(Path(folder) / "shards")
        model = StructuredGPClassifier().fit(data, callback=told, checkpoint=kept, together=together)
        row = {
            "rank": together.rank,
            "wall": time.perf_counter() - began,
            "cpu": time.process_time() - used,
            "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "first_step": seen[0],
            "bound": model.training_log_["elbo"],
        }
        print(json.dumps(row), flush=True)
        if together.is_first:
            model.save(f"{kept}.model")


def start(n_processes: int, *words: str, restarts: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc_per_node={n_processes}", f"--max-restarts={restarts}"]
    command = command if n_processes > 1 else [sys.executable]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command += ["-m", "benchmarks.processes", "--part", *words]
    return subprocess.Popen(command, env=environment, **pipes)


def measured(folder: Path, n_processes: int, rounds: int, kills: bool = False) -> dict[str, Any]:
    """Runs one fit: figures of its slowest and largest process, and the NLL per token of held-out
    sequences."""
    from structgp import load

    kept = folder / f"fit-{n_processes}{'-killed' * kills}"
    process = start(n_processes, str(folder), str(kept), str(rounds), restarts=int(kills))
    if kills:
        while not kept.exists():
            if process.poll() is not None:
                raise RuntimeError("the fit ended before its first checkpoint: ask for more --sequences")
            time.sleep(0.1)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
    out, said = process.communicate()
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if process.returncode:
        raise RuntimeError(f"the fit of {n_processes} processes failed:\n{said}")
    row = {name: max(r[name] for r in rows) for name in ("wall", "cpu", "peak_gib", "first_step")}
    row |= {"processes": n_processes, "bound": rows[0]["bound"]}
    test = list(corpus(_written(folder) + N_TEST, _written(folder)))
    X, y = ([pair[i] for pair in test] for i in range(2))
    row["nll"] = load(f"{kept}.model").evaluate(X, y).token_nll
    return row


def _written(folder: Path) -> int:
    from structgp.data import shards

    return int(shards.read(folder / "shards").about["n_given"])


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--sequences", type=int, default=30_000)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--rounds", type=int, default=0, help="stop after so many  [default: when it settles]"
    )
    parser.add_argument("--kill", action="store_true", help="kill one process of the last fit once")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.part:
        fit(given.part[0], given.part[1], int(given.part[2]))
        return 0
    from structgp.data import shards

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        kept = shards.write(lambda: corpus(given.sequences), folder / "shards", shard_tokens=15_000)
        print(f"{kept.n_sequences} sequences, {kept.n_tokens} tokens, {kept.n_shards} shards", flush=True)
        fits = [(n, False) for n in given.processes]
        fits += [(given.processes[-1], True)] if given.kill else []
        for n, kills in fits:
            row = measured(folder, n, given.rounds, kills)
            print(
                "{processes} processes: {cpu:.1f} s of processor, {wall:.1f} s on the wall, "
                "{peak_gib:.2f} GiB at most, bound {bound:.1f}, NLL {nll:.5f}".format(**row)
                + (", went on from step {first_step}".format(**row) if kills else ""),
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
