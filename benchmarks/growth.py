"""Time against size: for the chain's log Z with its gradients, and for a whole default fit to generated
data.

One size is doubled at a time, and the others are fixed. The exponent is the slope of log time against log
size, over all sizes and over the upper half, where constant costs matter less. Sizes of a fit: N sequences,
T their mean length, V labels, D features (values per template), S draws of the second-order fit, and M
inducing inputs of a fit with ``posterior="inducing"``. Fits differ in the number of steps to convergence,
so the exponent of the time per step is given too. Times are CPU seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from benchmarks.chain import call_of, inputs, ours
from benchmarks.clock import exponent, take_turns
from benchmarks.record import Options, Row, log_plot, table
from structgp import Inducing, SecondOrder

CHAIN = {"S": 8, "B": 32, "T": 40, "V": 12}
FIT = {"N": 100, "T": 12, "V": 5, "D": 100, "S": 16}
INDUCING = {"N": 60, "M": 100}
CLAIMS = {"chain S": 1, "chain B": 1, "chain T": 1, "chain V": 2}


def run(options: Options) -> Iterator[Row]:
    for letter in CHAIN:
        yield from chain_rows(letter, options)
    factors = (1, 2) if options.quick else (1, 2, 4, 8)
    fit_seconds(FIT)  # so that loading of libraries is not measured
    for letter in FIT:
        for factor in factors:
            size = FIT | {letter: FIT[letter] * factor}
            yield {"what": f"fit {letter}", "size": size[letter], **fit_seconds(size)}
    for factor in factors:
        size = FIT | INDUCING | {"M": INDUCING["M"] * factor}
        yield {"what": "fit M", "size": size["M"], **fit_seconds(size)}


def chain_rows(letter: str, options: Options) -> Iterator[Row]:
    factors = (1, 2) if options.quick else (0.5, 1, 2, 4, 8)
    calls, sizes = {}, {}
    for factor in factors:
        size = CHAIN | {letter: int(CHAIN[letter] * factor)}
        shape = tuple(size.values())
        calls[str(factor)] = call_of(ours, *inputs(shape, torch.float64, options.device), True)
        sizes[str(factor)] = size[letter]
    rounds = 3 if options.quick else 9
    for key, times in take_turns(calls, rounds=rounds, device=options.device).items():
        seconds, cpu = times.seconds, times.cpu_seconds
        row = {"what": f"chain {letter}", "size": sizes[key]}
        yield row | {"seconds": seconds, "cpu_seconds": cpu, "steps": None}


def fit_seconds(size: dict[str, int]) -> Row:
    from benchmarks.generate import generate
    from structgp import StructuredGPClassifier

    data = generate(size["N"], n_labels=size["V"], mean_length=size["T"], n_values=size["D"], seed=0)
    more = {} if "M" not in size else {"posterior": Inducing(n_inducing=size["M"])}
    model = StructuredGPClassifier(inference=SecondOrder(n_draws=size["S"], learn_scales="auto"), **more)
    at, at_cpu = time.perf_counter(), time.process_time()
    model.fit(data.X, data.y)
    return {
        "seconds": time.perf_counter() - at,
        "cpu_seconds": time.process_time() - at_cpu,
        "steps": len(model.training_log_["steps"]),
    }


def tables(rows: list[Row]) -> str:
    lines = []
    for what, mine in grouped(rows).items():
        sizes, seconds = [row["size"] for row in mine], [row["cpu_seconds"] for row in mine]
        upper = len(mine) // 2 if len(mine) > 3 else 0
        steps = [row["steps"] for row in mine]
        each = [s / n for s, n in zip(seconds, steps, strict=True)] if steps[0] else None
        lines.append(
            [
                what,
                f"{sizes[0]} to {sizes[-1]}",
                f"{seconds[0]:.3g} to {seconds[-1]:.3g}",
                exponent(sizes, seconds),
                exponent(sizes[upper:], seconds[upper:]),
                "" if each is None else exponent(sizes, each),
                "" if each is None else ", ".join(map(str, steps)),
                CLAIMS.get(what, ""),
            ]
        )
    header = ["", "sizes", "CPU seconds", "exponent", "upper half", "a step", "steps", "claimed"]
    return table(header, lines)


def grouped(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["what"], []).append(row)
    return found


def plots(rows: list[Row]) -> dict[str, str]:
    made = {}
    for kind in ("chain", "fit"):
        lines = {
            what: [(row["size"] / mine[0]["size"], row["cpu_seconds"]) for row in mine]
            for what, mine in grouped(rows).items()
            if what.startswith(kind)
        }
        made[f"growth-{kind}"] = log_plot(lines, "times the smallest", "CPU seconds", kind)
    return made
